//! Transport between daemons: QUIC with mutual TLS. Owns the endpoint, one outgoing link per peer (which is also
//! how a peer's death is seen) and the streams. Knows nothing of what the messages mean.
//!
//! Order of reading: `tls` and `cert` (who is who), `socket` (the UDP seam), `endpoint` (start, accept), `link`
//! (dial, keep, report), `wake` (a peer that came back is dialled at once).

pub mod cert;
mod endpoint;
mod frame;
mod link;
mod socket;
mod tls;
mod wake;

pub use endpoint::{Net, NetConfig, NetEvent, Peer};
pub use socket::{SocketFactory, UdpFactory};
pub use tls::{TlsError, TlsFiles, TlsIdentity};

use storaged_wire::NodeName;
use thiserror::Error;

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
    #[error("{0} is not a configured peer: add it to [[peers]]")]
    UnknownPeer(NodeName),
    /// No link now.
    #[error("the link to {0} is down")]
    Down(NodeName),
    /// The peer's certificate is not that of the node it should be.
    #[error(
        "the certificate of {peer} was refused: {reason}; issue it with `storaged cert issue {peer}`"
    )]
    PeerCertificate { peer: String, reason: String },
    /// The peer broke the protocol.
    #[error("{peer} broke the protocol: {reason}")]
    Protocol { peer: String, reason: String },
    /// The connection failed.
    #[error("the connection to {peer} failed: {reason}")]
    Connection { peer: String, reason: String },
}
