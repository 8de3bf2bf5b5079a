//! `[membership]`: where the list of nodes is agreed on, for clusters that change while jobs run.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use storaged_core::RunAuthority;
use storaged_core::limits::{WATCHED_NODES_MAX, WATCHERS};
use storaged_plan::Member;
use storaged_wire::NodeName;

use super::{ConfigError, ConfigFile, Span, value};
use crate::membership::{
    Arrival, ClusterName, EtcdConfig, KubernetesConfig, PLACES_MAX, Place, Roster,
};
use crate::net::PeerAddress;
use crate::trickle::store::StoreConfig;

/// The newest roster that a node has seen, in its runtime directory.
const REMEMBERED: &str = "roster.json";
/// Looking more often than this costs the registry more than it gives.
const POLL_MAX_S: u64 = 60;

/// `[membership]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MembershipSection {
    /// What holds the rosters: a directory that all nodes share, a bucket of S3, etcd, or Kubernetes.
    pub registry: RegistryConfig,
    /// Places of a cluster that begins; later `storaged node resize` says how many.
    pub size: usize,
    /// Where peers reach this node; by default `node.listen`.
    pub address: Option<PeerAddress>,
    /// The place of a node that is not in sight for so long is given to a spare; 0s: by the operator alone.
    #[serde(default = "replace_after")]
    pub replace_after: Span,
    /// How often a node looks whether the roster has changed.
    #[serde(default = "poll")]
    pub poll: Span,
    /// The cluster whose registry it must be; without it that is the cluster which is found there.
    pub cluster: Option<String>,
    /// Who says whose a run's number is.
    #[serde(default)]
    pub runs: RunsSection,
}

/// `membership.runs`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunsSection {
    /// The registry, without which no run is opened.
    #[default]
    Registry,
    /// The durable tier or a majority of the members, as without a registry.
    Members,
}

impl RunsSection {
    const fn authority(self) -> RunAuthority {
        match self {
            Self::Registry => RunAuthority::Registry,
            Self::Members => RunAuthority::Members,
        }
    }
}

/// `membership.registry`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Table")]
pub enum RegistryConfig {
    /// An object store, with the keys of `[durable]`.
    Objects(StoreConfig),
    /// etcd.
    Etcd(EtcdConfig),
    /// ConfigMaps of Kubernetes.
    Kubernetes(KubernetesConfig),
}

impl TryFrom<toml::Table> for RegistryConfig {
    type Error = toml::de::Error;

    fn try_from(mut table: toml::Table) -> Result<Self, Self::Error> {
        let kind = table.get("kind").and_then(toml::Value::as_str);
        match kind.map(ToOwned::to_owned).as_deref() {
            Some("etcd") => {
                table.remove("kind");
                table.try_into().map(Self::Etcd)
            }
            Some("kubernetes") => {
                table.remove("kind");
                table.try_into().map(Self::Kubernetes)
            }
            _ => table.try_into().map(Self::Objects),
        }
    }
}

impl RegistryConfig {
    /// What is wrong with it, without asking anybody.
    fn check(&self) -> Result<(), ConfigError> {
        let wrong = |error: &dyn std::fmt::Display| value("membership.registry", error);
        match self {
            Self::Objects(_) => Ok(()),
            Self::Etcd(etcd) => etcd.check().map_err(|error| wrong(&error)),
            Self::Kubernetes(kubernetes) => kubernetes.check().map_err(|error| wrong(&error)),
        }
    }
}

/// Longer than a daemon is away that is started again, which costs no repair then: 0.2 s below a keeper and 0.7 s by systemd with what it held, 5 s at
/// most between two tries of one that cannot start. And longer than a fabric needs to find another way.
const fn replace_after() -> Span {
    Span::from_secs(15)
}

const fn poll() -> Span {
    Span::from_secs(2)
}

/// What a node of a cluster with a registry goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipConfig {
    /// What holds the rosters.
    pub registry: RegistryConfig,
    /// This node, as it asks for a place.
    pub arrival: Arrival,
    /// Places of a cluster that begins.
    pub size: usize,
    /// When the place of a lost node is given up.
    pub replace_after: Option<Duration>,
    /// How often it looks.
    pub poll: Duration,
    /// Where the newest roster is remembered.
    pub remembered: PathBuf,
    /// The cluster whose registry it must be.
    pub cluster: Option<ClusterName>,
    /// Who says whose a run's number is.
    pub runs: RunAuthority,
}

impl MembershipConfig {
    /// The name of a cluster that this node would begin, which nobody else's has by chance.
    pub fn first_name(&self, number: u64) -> String {
        match &self.cluster {
            Some(name) => name.with_number(number),
            None => format!("{number:016x}"),
        }
    }

    /// As many members as there are to be, each on its own: whether they can be grouped is known before they have come.
    pub(super) fn planned(&self) -> Vec<Member> {
        let member = |number: usize| {
            let name = NodeName::new(format!("p{number}")).ok()?;
            Some(Member {
                failure_domain: name.to_string(),
                cordon: Default::default(),
                seat: None,
                name,
            })
        };
        (0..self.size).filter_map(member).collect()
    }
}

impl ConfigFile {
    /// Checks `[membership]`, which takes the place of `[[peers]]`.
    pub(super) fn membership(
        &self,
        node: &NodeName,
    ) -> Result<Option<MembershipConfig>, ConfigError> {
        let Some(section) = &self.membership else {
            return Ok(None);
        };
        if !self.peers.is_empty() {
            let reason = "expected none beside [membership], whose registry lists the nodes: leave one of the two out";
            return Err(value("peers", reason));
        }
        if self.tls.is_none() {
            let reason = "expected certificates because [membership] gives the node peers, got none: `storaged cert` makes them";
            return Err(value("tls", reason));
        }
        section.registry.check()?;
        Ok(Some(MembershipConfig {
            registry: section.registry.clone(),
            arrival: Arrival {
                node: node.clone(),
                address: section.address(self.node.listen)?,
                failure_domain: self.node.failure_domain.clone(),
            },
            size: section.size()?,
            replace_after: Some(section.replace_after.as_ms())
                .filter(|ms| *ms > 0)
                .map(Duration::from_millis),
            poll: section.poll()?,
            remembered: self.node.runtime_dir.join(REMEMBERED),
            cluster: section.cluster()?,
            runs: section.runs.authority(),
        }))
    }
}

impl MembershipSection {
    fn address(&self, listen: SocketAddr) -> Result<PeerAddress, ConfigError> {
        match &self.address {
            Some(address) => Ok(address.clone()),
            None if !listen.ip().is_unspecified() && listen.port() > 0 => Ok(listen.into()),
            None => Err(value(
                "membership.address",
                format!(
                    "expected where peers reach this node, such as 10.0.0.7:9300, because node.listen is {listen}"
                ),
            )),
        }
    }

    fn cluster(&self) -> Result<Option<ClusterName>, ConfigError> {
        let name = self.cluster.as_deref().map(ClusterName::new);
        name.transpose()
            .map_err(|error| value("membership.cluster", error))
    }

    fn size(&self) -> Result<usize, ConfigError> {
        match self.size {
            size @ 1..=PLACES_MAX => Ok(size),
            got => Err(value(
                "membership.size",
                format!("expected 1 to {PLACES_MAX}, got {got}"),
            )),
        }
    }

    fn poll(&self) -> Result<Duration, ConfigError> {
        match self.poll.as_ms() {
            ms @ 1_000.. if ms <= POLL_MAX_S * 1_000 => Ok(Duration::from_millis(ms)),
            ms => Err(value(
                "membership.poll",
                format!("expected 1s to {POLL_MAX_S}s, got {ms} ms"),
            )),
        }
    }
}

impl super::Config {
    /// Who this node is among how many, as far as the file says it.
    pub fn listing(&self) -> String {
        match &self.membership {
            Some(membership) => format!(
                "node {} at {}, in a cluster of {} places in a registry (`storaged node ls`)",
                self.node, membership.arrival.address, membership.size
            ),
            None => format!("node {} of {}", self.name, self.members.len()),
        }
    }

    /// The nodes that give places up, the first two in order of those that have one, in clusters that two nodes can watch. None where files
    /// say who is there: each node is the first in its own, and no place is given up.
    pub fn watchers(&self) -> Vec<NodeName> {
        if self.cluster.is_none() || self.members.len() > WATCHED_NODES_MAX {
            return Vec::new();
        }
        let is_there = |name: &&NodeName| {
            **name == self.name || self.peers.iter().any(|peer| peer.name == **name)
        };
        let names = self.members.iter().map(|member| &member.name);
        names.filter(is_there).take(WATCHERS).cloned().collect()
    }

    /// Takes what a roster says of this node, which fills this place.
    ///
    /// # Errors
    /// [`ConfigError`] if the roster's places cannot be grouped by `[coding]`.
    pub fn take_roster(&mut self, roster: &Roster, place: &Place) -> Result<(), ConfigError> {
        let members = roster.members();
        if let Some(geometry) = self.geometry {
            let grouped = storaged_plan::groups(&members, geometry);
            grouped.map_err(|error| value("coding", error))?;
        }
        self.name = place.name.clone();
        self.members = members;
        self.peers = roster.peers_of(&place.name);
        self.cluster = Some(roster.cluster.clone());
        self.epoch = roster.epoch;
        Ok(())
    }
}
