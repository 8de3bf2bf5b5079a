//! `[node]`: what this node is called, where it listens, and how it leaves.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;

use super::span::Span;

/// `[node]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeSection {
    /// Its name; by default the host's.
    pub name: Option<String>,
    /// What fails together with it; by default the node alone.
    pub failure_domain: Option<String>,
    /// UDP address for peers.
    pub listen: SocketAddr,
    /// Where the socket goes.
    pub runtime_dir: PathBuf,
    /// TCP address for metrics, health and status; plain HTTP, names and numbers only.
    pub ops_listen: Option<SocketAddr>,
    /// Told to stop, the daemon finishes what only it can for so long; 0s: it stops at once.
    pub leave_within: Span,
}

impl Default for NodeSection {
    fn default() -> Self {
        Self {
            name: None,
            failure_domain: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 9300)),
            runtime_dir: PathBuf::from("/run/storaged"),
            ops_listen: Some(SocketAddr::from(([127, 0, 0, 1], 9301))),
            leave_within: Span::from_secs(20),
        }
    }
}
