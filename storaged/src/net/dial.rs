//! One dial: look the peer up, connect, say hello.

use std::time::Duration;

use quinn::{Connection, Endpoint};
use std::sync::Arc;
use storaged_wire::NodeName;
use tokio_util::sync::CancellationToken;

use super::address::PeerAddress;
use super::endpoint::Shared;
use super::hello::{self, introduce};
use super::link::Offer;
use super::node_naming::dns_name;
use super::pulse::{Proximity, Side};
use super::{NetError, failure};

/// A dial and its hello take no longer.
pub(super) const DIAL_WAIT: Duration = Duration::from_secs(3);

/// Whom to dial, and as whom.
pub(super) struct Dialling {
    pub endpoint: Endpoint,
    pub peer: NodeName,
    /// The name in its certificate.
    pub node: NodeName,
    pub address: PeerAddress,
    pub shared: Arc<Shared>,
    /// The peer has dialled meanwhile: a dial that was not answered yet ends. One that was goes on, for the peer may take
    /// its connection for the better one.
    pub unneeded: CancellationToken,
    pub purpose: Purpose,
    /// As what the peer is watched while the connection lasts.
    pub proximity: Proximity,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// It is the link.
    Link,
    /// It is the trunk of that number.
    Trunk(u8),
}

impl Purpose {
    /// The number of a trunk.
    pub fn trunk(self) -> Option<u8> {
        match self {
            Self::Link => None,
            Self::Trunk(number) => Some(number),
        }
    }
}

pub(super) async fn dial(dialling: Dialling) -> Result<Offer, NetError> {
    let (peer, shared) = (&dialling.peer, &dialling.shared);
    let (purpose, proximity) = (dialling.purpose, dialling.proximity);
    let failed = |reason: &str| NetError::failed(peer, reason.into());
    let whole = async {
        let connection = tokio::select! {
            biased;
            () = dialling.unneeded.cancelled() => return Err(failed("the peer has dialled")),
            connection = connect(&dialling) => connection?,
        };
        let agreed = introduce(&connection, peer, shared, purpose, proximity).await?;
        Ok(Offer {
            connection,
            agreed,
            side: Side::Dialled,
        })
    };
    let dialled = tokio::time::timeout(DIAL_WAIT, whole).await;
    dialled.unwrap_or_else(|_| Err(failed("no answer")))
}

async fn connect(dialling: &Dialling) -> Result<Connection, NetError> {
    let Dialling {
        endpoint,
        peer,
        node,
        address,
        shared,
        ..
    } = dialling;
    let name = peer.to_string();
    let down = |reason: String| NetError::failed(peer, reason);
    let from = endpoint.local_addr().map_err(|e| down(e.to_string()))?;
    let resolved = address.resolve(from).await;
    let resolved = resolved.map_err(|source| NetError::Address {
        peer: peer.clone(),
        address: address.clone(),
        source,
    })?;
    let client = shared.client(dialling.purpose);
    let connecting = endpoint.connect_with(client, resolved, &dns_name(node));
    let connecting = connecting.map_err(|error| down(error.to_string()))?;
    let connected = connecting.await;
    let connection = connected.map_err(|error| failure::of_connection(&name, &error))?;
    hello::check_identity(&connection, &shared.naming(), node)?;
    Ok(connection)
}
