//! Whether a machine answers at an address with the certificate of a node: a handshake and nothing more.

use std::net::SocketAddr;
use std::sync::Arc;

use quinn::{Endpoint, VarInt};
use storaged_wire::NodeName;

use super::dial::DIAL_WAIT;
use super::node_naming::dns_name;
use super::{NetError, PeerAddress, TlsIdentity, failure, hello};

/// Ends well once a machine has proved there that it has the node's certificate and key.
///
/// # Errors
/// [`NetError`] if none has, in the time of a dial, or this node's own certificate cannot be used.
pub async fn probe(
    identity: &TlsIdentity,
    node: &NodeName,
    address: &PeerAddress,
) -> Result<(), NetError> {
    let config = quinn::ClientConfig::new(Arc::new(identity.client()?));
    let down = |reason: String| NetError::failed(node, reason);
    let whole = async {
        let endpoint = endpoint(address).map_err(|error| down(error.to_string()))?;
        let from = endpoint.local_addr().map_err(|e| down(e.to_string()))?;
        let resolved = address.resolve(from).await;
        let resolved = resolved.map_err(|source| NetError::Address {
            peer: node.clone(),
            address: address.clone(),
            source,
        })?;
        let connecting = endpoint.connect_with(config, resolved, &dns_name(node));
        let connecting = connecting.map_err(|error| down(error.to_string()))?;
        let connected = connecting.await;
        let connection =
            connected.map_err(|error| failure::of_connection(&node.to_string(), &error))?;
        hello::check_identity(&connection, &identity.naming(), node)?;
        connection.close(VarInt::from_u32(0), b"only asked whether anybody is there");
        endpoint.wait_idle().await;
        Ok(())
    };
    let probed = tokio::time::timeout(DIAL_WAIT, whole).await;
    probed.unwrap_or_else(|_| Err(down("no answer".into())))
}

/// A socket of the address's family; of a host's name IPv4, as nodes listen by default.
fn endpoint(address: &PeerAddress) -> std::io::Result<Endpoint> {
    let from = match address {
        PeerAddress::Ip(SocketAddr::V6(_)) => "[::]:0",
        _ => "0.0.0.0:0",
    };
    let from: SocketAddr = from.parse().map_err(std::io::Error::other)?;
    Endpoint::client(from)
}
