//! `[node]`: what this node is called, where it listens, and how it leaves.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;
use storaged_core::Viewer;

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
    /// Whether these name jobs.
    pub ops_names: OpsNames,
    /// Told to stop, the daemon finishes what only it can for so long; 0s: it stops at once.
    pub leave_within: Span,
}

/// What metrics, health and status call jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OpsNames {
    /// `job-` and eight digits of the name's digest: whoever reaches the address sees no names.
    #[default]
    Hidden,
    /// By their names.
    Shown,
}

impl OpsNames {
    pub(super) fn viewer(self) -> Viewer {
        match self {
            Self::Hidden => Viewer::Public,
            Self::Shown => Viewer::Operator,
        }
    }
}

impl Default for NodeSection {
    fn default() -> Self {
        Self {
            name: None,
            failure_domain: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 9300)),
            runtime_dir: PathBuf::from("/run/storaged"),
            ops_listen: Some(SocketAddr::from(([127, 0, 0, 1], 9301))),
            ops_names: OpsNames::Hidden,
            leave_within: Span::from_secs(20),
        }
    }
}
