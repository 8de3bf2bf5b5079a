//! Transport between daemons: QUIC with mutual TLS. Owns the endpoints, one link per peer (which is also how a peer's
//! death is seen), its trunks and the streams. Knows nothing of what the messages mean.
//!
//! Order of reading: `tls`, `node_naming`, `authority`, `revoked` and `cert` (who is who), `address`, `lookups` (names, few at a time), `agreement` (what nodes must have in common), `runtime` (its threads), `socket` (the
//! UDP seam), `endpoint` (start, accept), `hello` (first records), `link` (one connection per peer, kept and reported), `trunks` and `trunk` (more for data), `rails` (over which interface), `dial`, `transport` (what connections are set to),
//! `pulse` (whether the peer is there), `probe` (whether anybody is there at all), `streams` (what it sends), `requests` (what it asks), `failure` (whose fault the end of a connection is).

mod address;
mod agreement;
mod authority;
pub mod cert;
mod dial;
mod endpoint;
mod failure;
mod frame;
mod hello;
mod link;
mod lookups;
mod node_naming;
mod pace;
mod probe;
mod pulse;
mod rails;
mod requests;
mod revoked;
mod runtime;
mod socket;
mod streams;
#[cfg(test)]
mod tests;
mod tls;
mod transport;
mod trunk;
mod trunks;

pub use address::{AddressError, PeerAddress};
pub use agreement::{Agreement, Difference, VersionRange, advised, told};
pub use endpoint::{LINK_VERSIONS, Net, NetConfig, NetEvent, Peer};
pub use node_naming::{NodeNaming, SpiffeTemplate, SpiffeTemplateError};
pub use pace::MessageRoom;
pub use probe::probe;
pub use rails::RailHint;
pub use requests::PeerAnswer;
pub use runtime::runtime_of;
pub use socket::{SocketFactory, UdpFactory};
pub use tls::{TlsError, TlsFiles, TlsIdentity, Validity};
pub use trunks::{DataStream, SOCKETS_MAX};

use storaged_wire::NodeName;
use thiserror::Error;

/// Whose certificate was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// The peer's, here.
    Theirs,
    /// This node's, by the peer.
    Ours,
}

/// What really helps: a renewal by the authority that the node has would change nothing.
fn told_authority(whose: Whose, peer: &str, reason: &str) -> String {
    let advice = "`storaged config FILE` shows the authority of each node: take the certificate of the one that differs where the right authority is (`storaged cert issue DIR NODE`), copy it and ca.pem there and reload that daemon";
    match whose {
        Whose::Theirs => {
            format!("the certificate of {peer} is of another authority: {reason}; {advice}")
        }
        Whose::Ours => format!(
            "the certificate of this node is of another authority than {peer} knows: {reason}; {advice}"
        ),
    }
}

/// What the transport can meet.
#[derive(Debug, Error)]
pub enum NetError {
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The socket.
    #[error("binding UDP {address} failed")]
    Bind {
        address: std::net::SocketAddr,
        #[source]
        source: std::io::Error,
    },
    /// Not a configured peer.
    #[error(
        "{0} is no peer of this node: it is not in [[peers]], or has no place in the roster that this node knows"
    )]
    UnknownPeer(NodeName),
    /// A place is another machine's.
    #[error(
        "the place {place} is filled by {expected}, got {got}: one of the two has not read the newest roster yet"
    )]
    AnotherMachine {
        place: NodeName,
        expected: NodeName,
        got: NodeName,
    },
    /// No link now.
    #[error("the link to {0} is down")]
    Down(NodeName),
    /// The peer's certificate is not that of the node it should be.
    #[error(
        "the certificate of {peer} was refused here: {reason}; renew it where the authority is with `storaged cert renew DIR NODE`, copy it to that node and reload the daemon there"
    )]
    PeerCertificate { peer: String, reason: String },
    /// The peer refused ours.
    #[error(
        "{peer} refused the certificate of this node: {reason}; see its dates in `storaged status`, renew it where the authority is with `storaged cert renew DIR NODE`, copy it here and reload this daemon"
    )]
    OwnCertificate { peer: String, reason: String },
    /// One of the two certificates is of an authority that the other node does not know.
    #[error("{}", told_authority(*whose, peer, reason))]
    Authority {
        whose: Whose,
        peer: String,
        reason: String,
    },
    /// What must be equal is not.
    #[error("{}", told(peer, differences))]
    Disagreement {
        peer: NodeName,
        differences: Vec<Difference>,
    },
    /// No version that both speak.
    #[error("{peer} speaks versions {there} of the link, this node {here}: upgrade the older one")]
    Version {
        peer: NodeName,
        here: VersionRange,
        there: VersionRange,
    },
    /// The peer's host name has no address.
    #[error("the address {address} of {peer} could not be looked up: check peers.address")]
    Address {
        peer: NodeName,
        address: PeerAddress,
        #[source]
        source: std::io::Error,
    },
    /// The peer broke the protocol.
    #[error("{peer} broke the protocol: {reason}")]
    Protocol { peer: String, reason: String },
    /// A stream of it ended while it was up, or said nothing in time: a cut, a pause, a stop.
    #[error("the link to {peer} was lost: {reason}")]
    Lost { peer: String, reason: String },
    /// The connection failed.
    #[error("the connection to {peer} failed: {reason}")]
    Connection { peer: String, reason: String },
}

impl NetError {
    /// What is sent to a peer does not arrive.
    fn failed(peer: &NodeName, reason: String) -> Self {
        let peer = peer.to_string();
        Self::Connection { peer, reason }
    }
}
