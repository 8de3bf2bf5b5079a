//! The first records of a connection, both ways: who the two nodes are, and whether they go together.

use minicbor::{Decode, Encode};
use quinn::Connection;
use storaged_wire::{Generation, NodeName, decode, encode};

use super::agreement::{Agreement, Difference, VersionRange};
use super::dial::Purpose;
use super::endpoint::{FIRST_RECORD_BYTES_MAX, Known, Shared};
use super::frame::ControlFrameError;
use super::node_naming::NodeNaming;
use super::pulse::Proximity;
use super::trunks::{SocketKind, TrunkAddress};
use super::{NetError, failure, frame, tls};

/// First record of a connection, both ways.
#[derive(Debug, Clone, Encode, Decode)]
pub(super) struct LinkHello {
    #[n(0)]
    pub version: u16,
    /// Its name among the nodes: of the place that it fills.
    #[n(1)]
    pub place: NodeName,
    #[n(2)]
    pub generation: Generation,
    /// The lowest version; without it `version` is the only one.
    #[n(3)]
    pub version_min: Option<u16>,
    #[n(4)]
    pub agreement: Option<Agreement>,
    /// The name in its certificate; without it that of its place.
    #[n(5)]
    pub node: Option<NodeName>,
    /// Where it takes trunks; a node of an older release, or of one socket, says none.
    #[n(6)]
    pub trunks: Option<Vec<TrunkAddress>>,
    /// This connection is the trunk of that number, and no link.
    #[n(7)]
    pub trunk: Option<u8>,
    /// From the one that dials: near, and it says a word at every beat for as long as the connection lasts. A node of an older release
    /// promises nothing.
    #[n(8)]
    pub proximity: Option<Proximity>,
}

impl LinkHello {
    /// Whose certificate it shows.
    pub fn machine(&self) -> &NodeName {
        self.node.as_ref().unwrap_or(&self.place)
    }

    fn versions(&self) -> VersionRange {
        VersionRange {
            min: self.version_min.unwrap_or(self.version),
            max: self.version,
        }
    }

    /// The version that both speak, if they speak one and are configured alike.
    fn agree(&self, there: &Self) -> Result<u16, NetError> {
        let (here, theirs) = (self.versions(), there.versions());
        let version = here.common(theirs).ok_or_else(|| NetError::Version {
            peer: there.place.clone(),
            here,
            there: theirs,
        })?;
        let differences = self.differences(there);
        if differences.is_empty() {
            Ok(version)
        } else {
            Err(NetError::Disagreement {
                peer: there.place.clone(),
                differences,
            })
        }
    }

    fn differences(&self, there: &Self) -> Vec<Difference> {
        let both = self.agreement.as_ref().zip(there.agreement.as_ref());
        both.map_or_else(Vec::new, |(here, there)| here.differences(there))
    }
}

/// What the other end of a connection said, and both agree on.
#[derive(Debug)]
pub(super) struct Agreed {
    pub generation: Generation,
    pub version: u16,
    /// What it must and should have in common with this node.
    pub theirs: Option<Agreement>,
    /// What this node said of that.
    pub said: Option<Agreement>,
    /// Where it takes trunks.
    pub trunks: Vec<TrunkAddress>,
    /// As what the one that dialled watches the other at least.
    pub promised: Proximity,
}

/// Says hello to the one that was dialled, and hears who it is.
pub(super) async fn introduce(
    connection: &Connection,
    peer: &NodeName,
    shared: &Shared,
    purpose: Purpose,
    proximity: Proximity,
) -> Result<Agreed, NetError> {
    let name = peer.to_string();
    let opened = connection.open_bi().await;
    let (mut send, mut recv) = opened.map_err(|error| failure::of_connection(&name, &error))?;
    // A server that refuses our certificate says so by closing, which shows in the streams.
    let of_stream = |error| failure::of_stream(&name, connection, error);
    let wrong = |reason: String| of_stream(ControlFrameError::Wrong(reason));
    let hello = LinkHello {
        trunk: purpose.trunk(),
        proximity: Some(proximity),
        ..shared.hello()
    };
    frame::write(&mut send, encode(&hello).into())
        .await
        .map_err(of_stream)?;
    let _ = send.finish();
    let body = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX)
        .await
        .map_err(of_stream)?;
    let body = body.ok_or_else(|| wrong("no hello".into()))?;
    let answer: LinkHello = decode("hello", &body).map_err(|error| wrong(error.to_string()))?;
    if answer.place != *peer {
        let reason = format!("expected {peer}, got {}: see peers.address", answer.place);
        return Err(wrong(reason));
    }
    let version = hello.agree(&answer)?;
    Ok(Agreed {
        generation: answer.generation,
        version,
        theirs: answer.agreement,
        said: hello.agreement,
        trunks: answer.trunks.unwrap_or_default(),
        promised: proximity,
    })
}

/// Takes the peer's hello, checks that its certificate is the node's it says it is, and answers.
pub(super) async fn welcome(
    connection: &Connection,
    shared: &Shared,
    socket: SocketKind,
) -> Result<(Known, Agreed, Purpose), NetError> {
    let peer = connection.remote_address().to_string();
    let of_stream = |error| failure::of_stream(&peer, connection, error);
    let wrong = |reason: String| of_stream(ControlFrameError::Wrong(reason));
    let (mut send, mut recv) = connection
        .accept_bi()
        .await
        .map_err(|error| failure::of_connection(&peer, &error))?;
    let body = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX)
        .await
        .map_err(of_stream)?;
    let body = body.ok_or_else(|| wrong("the hello is empty".into()))?;
    let hello: LinkHello = decode("hello", &body).map_err(|error| wrong(error.to_string()))?;
    check_identity(connection, &shared.naming(), hello.machine())?;
    let purpose = socket.purpose(hello.trunk);
    let purpose = purpose.map_err(|error| wrong(error.to_string()))?;
    let Some(known) = shared.known(&hello.place) else {
        return Err(NetError::UnknownPeer(hello.place));
    };
    // A machine that was thought lost, or the next one, of which this node has not heard yet.
    if known.node != *hello.machine() {
        return Err(NetError::AnotherMachine {
            place: hello.place.clone(),
            expected: known.node,
            got: hello.machine().clone(),
        });
    }
    let own = shared.hello();
    frame::write(&mut send, encode(&own).into())
        .await
        .map_err(of_stream)?;
    let _ = send.finish();
    let version = own.agree(&hello)?;
    let generation = hello.generation;
    Ok((
        known,
        Agreed {
            generation,
            version,
            theirs: hello.agreement,
            said: own.agreement,
            trunks: hello.trunks.unwrap_or_default(),
            promised: hello.proximity.unwrap_or_default(),
        },
        purpose,
    ))
}

/// Checks that the other end has shown a node's certificate.
pub(super) fn check_identity(
    connection: &Connection,
    naming: &NodeNaming,
    node: &NodeName,
) -> Result<(), NetError> {
    let refuse = |reason: String| NetError::PeerCertificate {
        peer: node.to_string(),
        reason,
    };
    let chain = tls::shown(connection);
    let first = chain
        .as_ref()
        .and_then(|chain| chain.first())
        .ok_or_else(|| refuse("there is none".into()))?;
    let checked = naming.check(first, node);
    checked.map_err(|error| refuse(error.to_string()))
}
