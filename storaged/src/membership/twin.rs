//! Two machines with one name and certificate: each would take the other's place in the roster, for ever. The one that comes second
//! finds the first by asking at the address that the roster has.

use futures::future::BoxFuture;
use storaged_wire::NodeName;
use thiserror::Error;

use crate::net::{PeerAddress, TlsFiles, TlsIdentity, probe};

/// Another machine is this node.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "another machine answers at {address} with the name and the certificate of this one, {node}: give this machine a name and a \
     certificate of its own (node.name, `storaged cert issue DIR NAME`), or stop the other one before this one takes its place"
)]
pub struct Twin {
    /// The name of both.
    pub node: NodeName,
    /// Where the other one is.
    pub address: PeerAddress,
}

/// Whether somebody answers as a node.
pub trait Presence: std::fmt::Debug + Send + Sync {
    /// Whether a machine at this address proves that it has the node's certificate.
    fn answers<'a>(&'a self, node: &'a NodeName, address: &'a PeerAddress) -> BoxFuture<'a, bool>;
}

/// By dialling it with this node's certificate.
#[derive(Debug, Clone)]
pub struct Dialled {
    /// The certificate; without one there are no links.
    pub tls: Option<TlsFiles>,
}

impl Presence for Dialled {
    fn answers<'a>(&'a self, node: &'a NodeName, address: &'a PeerAddress) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let Some(files) = &self.tls else {
                return false;
            };
            // Certificates that cannot be used are found out by the start.
            let Ok(identity) = TlsIdentity::load(files) else {
                return false;
            };
            probe(&identity, node, address).await.is_ok()
        })
    }
}
