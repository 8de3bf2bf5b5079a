//! The daemon's configuration: a TOML file, or nothing at all for one useful node. Everything is validated here;
//! an explicit setting that cannot hold fails at start, a default that cannot hold shrinks.

mod admin;
mod bill;
mod budget;
mod checks;
mod encryption;
mod hostlist;
mod hyperpod;
mod membership;
mod memory;
mod memory_limit;
mod network;
mod node;
mod peers;
mod reload;
mod scrub;
mod span;
mod swap;
mod tenants;
mod threads;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use serde::Deserialize;
use storaged_core::{DurablePolicy, LinkRates, RateBasis, RunsWithoutTier, Viewer};
use storaged_plan::Member;
use storaged_wire::{ChunkSize, Geometry, IncrementIndex, NodeName};
use thiserror::Error;

pub use admin::AdminSection;
pub use budget::BudgetSize;
pub use encryption::{EncryptionConfig, EncryptionSection, KeySource};
pub use hyperpod::{HyperpodSection, LatestName};
pub use membership::{MembershipConfig, MembershipSection, RegistryConfig};
pub use memory::MemorySection;
use memory_limit::DefaultBudget;
pub use memory_limit::MemoryLimit;
pub use network::{NetworkConfig, NetworkSection};
pub use node::NodeSection;
use peers::Nodes;
pub use peers::{OwnListing, PeerSection};
pub use reload::Fixed;
pub use scrub::{HookCommand, ScrubConfig, ScrubSection};
pub use span::Span;
pub use swap::{SwapName, SwapState};
pub use tenants::{TenantSection, TenantShares};
use threads::{ThreadKeys, codec_threads};

use crate::cores::WorkerThreads;
use crate::net::{NodeNaming, Peer, TlsFiles};
use crate::stage::TenantSocket;
use crate::trickle::store::StoreConfig;
use crate::trickle::{Packing, RequireMac, Retention, SharedReadsMode, TrickleLimits};

/// A configuration that cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file.
    #[error("reading the configuration {path} failed")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Not TOML, an unknown key, or a wrong type: the text says where.
    #[error("the configuration {path} cannot be used: {reason}")]
    Parse { path: PathBuf, reason: String },
    /// A value that cannot hold.
    #[error("configuration key {key}: {reason}")]
    Value { key: &'static str, reason: String },
}

fn value(key: &'static str, reason: impl ToString) -> ConfigError {
    ConfigError::Value {
        key,
        reason: reason.to_string(),
    }
}

/// The file as it is written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfigFile {
    /// This node.
    pub node: NodeSection,
    /// Its sockets and their threads.
    pub network: NetworkSection,
    /// Certificates; needed with peers.
    pub tls: Option<TlsSection>,
    /// The other nodes, where they are listed here.
    pub peers: Vec<PeerSection>,
    /// Where they are agreed on, if not.
    pub membership: Option<MembershipSection>,
    /// The code; without it checkpoints are not coded.
    pub coding: Option<CodingSection>,
    /// How checkpoints are coded.
    pub encode: EncodeSection,
    /// RAM.
    pub memory: MemorySection,
    /// Who may use the daemon; by default its own user.
    pub tenants: Vec<TenantSection>,
    /// The operator's own socket.
    pub admin: AdminSection,
    /// What is logged.
    pub log: LogSection,
    /// The durable tier; by default none.
    pub durable: Option<StoreConfig>,
    /// What goes there and how fast.
    pub trickle: TrickleSection,
    /// How often RAM is read again.
    pub scrub: ScrubSection,
    /// HTTP for HyperPod's clients; by default none.
    pub hyperpod: Option<HyperpodSection>,
}

/// `[tls]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsSection {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// This node's certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Certificates that the authority has revoked.
    pub crl: Option<PathBuf>,
    /// The SPIFFE ID that names a node in its certificate, with `{node}` for its name; without it that is a DNS name.
    pub spiffe: Option<String>,
    /// How often these files are looked at for changes; 0s: never, only at a reload.
    #[serde(default = "default_watch")]
    pub watch: Span,
}

fn default_watch() -> Span {
    Span::from_secs(30)
}

/// `[log]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogSection {
    /// Such as `info,storaged::net=debug`; the environment's STORAGED_LOG goes before it.
    pub filter: String,
}

impl Default for LogSection {
    fn default() -> Self {
        Self {
            filter: "info".into(),
        }
    }
}

/// `[coding]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodingSection {
    /// Data nodes of a group.
    pub k: usize,
    /// Coding nodes of a group: so many may be lost.
    pub m: usize,
    /// Size of a chunk, the same on all nodes.
    #[serde(default = "default_chunk")]
    pub chunk: ByteSize,
}

fn default_chunk() -> ByteSize {
    ByteSize::kib(256)
}

/// `[encode]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncodeSection {
    /// What plans are chosen by: rates measured in sessions and, where nothing was measured, the configured ones; or
    /// the configured ones alone.
    pub rates: RatesName,
    /// Bytes per second of every node's link, each way: what is assumed of a link that was not measured; by default
    /// nothing, and until something is measured the plain chain is taken.
    pub link_rate: Option<ByteSize>,
    /// The same of nodes that have another one, by name: a slow one gathers nothing, and stands first in a chain.
    pub node_rates: BTreeMap<String, ByteSize>,
    /// Bytes per second of all repairs that this node sends for while a save is being protected here; 0: no bound.
    pub repair_rate: ByteSize,
    /// Threads of the codec; by default a quarter as many as there are cores, or half if that is at most 4.
    pub threads: Option<usize>,
    /// Cores for the codec: one thread on each, which stays there.
    pub cores: Option<Vec<usize>>,
}

impl Default for EncodeSection {
    fn default() -> Self {
        Self {
            rates: RatesName::default(),
            link_rate: None,
            node_rates: BTreeMap::new(),
            repair_rate: ByteSize::mib(128),
            threads: None,
            cores: None,
        }
    }
}

/// What plans are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RatesName {
    #[default]
    Measured,
    Configured,
}

/// `[trickle]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrickleSection {
    /// Steps that are multiples of this go to the durable tier; 0: only those that a trainer asks for.
    pub every: u64,
    /// Bytes of an upload's part.
    pub part: ByteSize,
    /// Memory for parts on their way there, and two fifths as much for reads.
    pub in_flight: ByteSize,
    /// Bytes per second of this node's uploads; by default no limit.
    pub rate: Option<ByteSize>,
    /// How full copies are stored there: "none" (stock PyTorch reads them) or "zstd" (smaller).
    pub packing: Packing,
    /// Copies in a row that may hold only what changed since the one before; 0: every copy stands alone.
    pub increments: u32,
    /// The newest so many checkpoints stay in the tier; 0: all do.
    pub keep_last: u32,
    /// Steps that are multiples of this stay beside them; 0: none.
    pub keep_every: u64,
    /// What an older run has left unfinished goes after so many hours; 0: never.
    pub abandoned_hours: u32,
    /// Whether checkpoints there without a MAC are refused: "always", "after-first" (if an older one of the job has one) or "never".
    pub require_mac: RequireMac,
    /// Whether nodes pass on what they read there: "auto" (of S3, GCS and Azure), "always" or "never".
    pub shared_reads: SharedReadsMode,
    /// Whether a run may be opened while the durable tier cannot be read and no node remembers the namespace.
    pub runs_without_tier: bool,
    /// Whether what goes there is encrypted; by default not.
    pub encryption: Option<EncryptionSection>,
}

impl Default for TrickleSection {
    fn default() -> Self {
        Self {
            every: 0,
            part: ByteSize::mib(16),
            in_flight: ByteSize::mib(320),
            rate: None,
            packing: Packing::None,
            increments: 0,
            keep_last: 0,
            keep_every: 0,
            abandoned_hours: 0,
            require_mac: RequireMac::default(),
            shared_reads: SharedReadsMode::default(),
            runs_without_tier: false,
            encryption: None,
        }
    }
}

/// A configuration that holds.
#[derive(Debug, Clone)]
pub struct Config {
    /// What this node is called among the others: with `[membership]`, once it has one, the name of its place.
    pub name: NodeName,
    /// The machine's own name, as in its certificate.
    pub node: NodeName,
    /// How the nodes are agreed on, if they are not listed.
    pub membership: Option<MembershipConfig>,
    /// The cluster of the roster, and its epoch: 1 where the nodes are listed.
    pub cluster: Option<String>,
    pub epoch: u64,
    /// All nodes, this one included.
    pub members: Vec<Member>,
    /// The other nodes.
    pub peers: Vec<Peer>,
    /// Whether the lists of them name this one, where they are listed.
    pub own_listing: OwnListing,
    /// UDP address.
    pub listen: SocketAddr,
    /// Further ones, and threads for all.
    pub network: NetworkConfig,
    /// TCP address for operators.
    pub ops_listen: Option<SocketAddr>,
    /// Whether what is shown there names jobs.
    pub ops_viewer: Viewer,
    /// For how long the daemon goes on when it is told to stop.
    pub leave_within: Duration,
    /// Certificates, if there are peers.
    pub tls: Option<TlsFiles>,
    /// How often their files are looked at; none: only at a reload.
    pub tls_watch: Option<Duration>,
    /// k and m.
    pub geometry: Option<Geometry>,
    /// Size of a chunk.
    pub chunk: ChunkSize,
    /// What is known of the links.
    pub link_rates: LinkRates,
    /// Bytes per second of repairs beside a save; none for no bound.
    pub repair_rate: Option<NonZeroU64>,
    /// Threads of the codec.
    pub codec_threads: WorkerThreads,
    /// Bytes of RAM.
    pub budget: u64,
    /// The budget as it is written; the bytes of a default change with what is free.
    pub budget_set: String,
    /// Slots per rank.
    pub slots_per_rank: usize,
    /// Safe steps of a job that stay in RAM.
    pub keep_steps: usize,
    /// Milliseconds for which a job without trainers keeps RAM that another one needs.
    pub idle_job_ms: u64,
    /// What is done where slots could be swapped out, and whether they could.
    pub swap: SwapName,
    pub swap_state: SwapState,
    /// How often RAM is read again, and what follows from what is found.
    pub scrub: ScrubConfig,
    /// Sockets, the operator's among them.
    pub sockets: Vec<TenantSocket>,
    /// What tenants have of the budget.
    pub shares: TenantShares,
    /// What is logged.
    pub log_filter: String,
    /// The durable tier.
    pub durable: Option<StoreConfig>,
    /// Which checkpoints go there.
    pub durable_policy: DurablePolicy,
    /// Whether runs are opened that only it could number, while it cannot be read.
    pub runs_without_tier: RunsWithoutTier,
    /// How checkpoints go there.
    pub trickle: TrickleLimits,
    /// Whether nodes pass on what they read there.
    pub shared_reads: SharedReadsMode,
    /// Whether they are encrypted there.
    pub encryption: Option<EncryptionConfig>,
    /// HTTP for HyperPod's clients.
    pub hyperpod: Option<HyperpodSection>,
}

impl ConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`] if it cannot be read or has a key that is not known; the text lists those that are.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| ConfigError::Read {
            path: path.into(),
            source,
        })?;
        toml::from_str(&text).map_err(|error| ConfigError::Parse {
            path: path.into(),
            reason: error.to_string(),
        })
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for one that cannot hold.
    pub fn validate(self) -> Result<Config, ConfigError> {
        let name = self.own_name()?;
        let Nodes {
            members,
            peers,
            own_listing,
        } = self.nodes(&name)?;
        if !peers.is_empty() && self.tls.is_none() {
            return Err(value(
                "tls",
                "expected certificates because there are peers, got none: `storaged cert` makes them",
            ));
        }
        no_name_twice(&members)?;
        let (geometry, chunk) = self.coding_values()?;
        let membership = self.membership(&name)?;
        if let Some(geometry) = geometry {
            let planned = membership.as_ref().map(MembershipConfig::planned);
            let members = planned.as_ref().unwrap_or(&members);
            storaged_plan::groups(members, geometry).map_err(|error| value("coding", error))?;
        }
        let link_rates = self.encode.rates(&members)?;
        let codec_threads = self.encode.codec_threads()?;
        self.check_tier()?;
        let swap_state = SwapState::read();
        swap_state.check(self.memory.swap)?;
        let filter = crate::log::check_filter(&self.log.filter);
        filter.map_err(|error| value("log.filter", crate::driver::chain(&error)))?;
        let budget = self.budget()?;
        let tenants = self.tenants(budget)?;
        let config = Config {
            members,
            peers,
            own_listing,
            listen: self.node.listen,
            network: self.network.validate(&self.node)?,
            ops_listen: self.node.ops_listen,
            ops_viewer: self.node.ops_names.viewer(),
            leave_within: Duration::from_millis(self.node.leave_within.as_ms()),
            tls: self.tls_files()?,
            tls_watch: self.tls_watch(),
            geometry,
            chunk,
            link_rates,
            repair_rate: NonZeroU64::new(self.encode.repair_rate.as_u64()),
            codec_threads,
            budget,
            budget_set: (self.memory.budget.as_ref())
                .map_or_else(|| "the default".into(), ToString::to_string),
            slots_per_rank: self.slots()?,
            keep_steps: self.keep_steps()?,
            idle_job_ms: self.memory.idle_job.as_ms(),
            swap: self.memory.swap,
            swap_state,
            scrub: self.scrub.validate()?,
            sockets: tenants.sockets,
            shares: tenants.shares,
            log_filter: self.log.filter.clone(),
            durable_policy: self.policy(),
            runs_without_tier: if self.trickle.runs_without_tier {
                RunsWithoutTier::Allowed
            } else {
                RunsWithoutTier::Refused
            },
            trickle: self.trickle_limits()?,
            shared_reads: self.trickle.shared_reads,
            encryption: self.encryption()?,
            hyperpod: self.hyperpod()?,
            durable: self.durable,
            node: name.clone(),
            name,
            membership,
            cluster: None,
            epoch: 1,
        };
        config.check_budget()?;
        Ok(config)
    }

    fn trickle_limits(&self) -> Result<TrickleLimits, ConfigError> {
        Ok(TrickleLimits {
            part_bytes: self.part()?,
            in_flight_bytes: self.trickle.in_flight_bytes()?,
            rate: self.rate()?,
            packing: self.trickle.packing,
            require_mac: self.trickle.require_mac,
            increments: self.increments()?,
            retention: self.retention()?,
        })
    }

    fn rate(&self) -> Result<Option<u64>, ConfigError> {
        let rate = self.trickle.rate.map(|rate| rate.as_u64());
        if rate == Some(0) {
            let text = "expected more than 0 bytes per second, got 0";
            return Err(value("trickle.rate", text));
        }
        Ok(rate)
    }

    fn own_name(&self) -> Result<NodeName, ConfigError> {
        let named = self.node.name.as_ref();
        let named = named.map(|name| NodeName::new(name.as_str()));
        let named = named
            .transpose()
            .map_err(|error| value("node.name", error))?;
        Ok(named.unwrap_or_else(host_name))
    }

    fn tls_files(&self) -> Result<Option<TlsFiles>, ConfigError> {
        let Some(tls) = &self.tls else {
            return Ok(None);
        };
        let naming = match &tls.spiffe {
            None => NodeNaming::Dns,
            Some(template) => {
                let template = template.parse();
                NodeNaming::Spiffe(template.map_err(|error| value("tls.spiffe", error))?)
            }
        };
        Ok(Some(TlsFiles {
            ca: tls.ca.clone(),
            certificate: tls.certificate.clone(),
            key: tls.key.clone(),
            crl: tls.crl.clone(),
            naming,
        }))
    }

    fn tls_watch(&self) -> Option<Duration> {
        let every = self.tls.as_ref()?.watch.as_ms();
        (every > 0).then(|| Duration::from_millis(every))
    }

    fn coding_values(&self) -> Result<(Option<Geometry>, ChunkSize), ConfigError> {
        let chunk = self
            .coding
            .as_ref()
            .map_or_else(default_chunk, |coding| coding.chunk);
        let chunk = u32::try_from(chunk.as_u64()).map_err(|error| value("coding.chunk", error))?;
        let chunk = ChunkSize::new(chunk).map_err(|error| value("coding.chunk", error))?;
        let geometry = match &self.coding {
            Some(coding) => {
                Some(Geometry::new(coding.k, coding.m).map_err(|error| value("coding", error))?)
            }
            None => None,
        };
        Ok((geometry, chunk))
    }

    fn budget(&self) -> Result<u64, ConfigError> {
        let memory = MemoryLimit::read();
        let Some(asked) = self.memory.budget else {
            return Ok(default_budget(memory));
        };
        let asked = asked.of(memory.limit);
        if asked.as_u64() <= memory.limit {
            Ok(asked.as_u64())
        } else {
            Err(value(
                "memory.budget",
                format!(
                    "expected at most the {} that this machine or container has, got {asked}",
                    ByteSize::b(memory.limit)
                ),
            ))
        }
    }

    fn increments(&self) -> Result<u32, ConfigError> {
        match self.trickle.increments {
            got if got <= IncrementIndex::DEPTH_MAX => Ok(got),
            got => Err(value(
                "trickle.increments",
                format!("expected 0 to {}, got {got}", IncrementIndex::DEPTH_MAX),
            )),
        }
    }

    fn retention(&self) -> Result<Retention, ConfigError> {
        let trickle = &self.trickle;
        if trickle.keep_last == 0 && trickle.keep_every > 0 {
            return Err(value(
                "trickle.keep_every",
                "expected trickle.keep_last above 0 beside it, got 0, which keeps every checkpoint",
            ));
        }
        let hours = u64::from(trickle.abandoned_hours);
        Ok(Retention {
            keep_last: Some(trickle.keep_last).filter(|last| *last > 0),
            keep_every: Some(trickle.keep_every).filter(|every| *every > 0),
            abandoned_after: Some(hours)
                .filter(|hours| *hours > 0)
                .map(|hours| std::time::Duration::from_secs(hours * 3600)),
        })
    }

    fn part(&self) -> Result<u64, ConfigError> {
        let part = self.trickle.part.as_u64();
        if (1 << 20..=1 << 30).contains(&part) {
            Ok(part)
        } else {
            Err(value(
                "trickle.part",
                format!("expected 1MiB to 1GiB, got {}", self.trickle.part),
            ))
        }
    }

    fn policy(&self) -> DurablePolicy {
        match (&self.durable, self.trickle.every) {
            (None, _) => DurablePolicy::Absent,
            (Some(_), 0) => DurablePolicy::OnRequest,
            (Some(_), steps) => DurablePolicy::Every(steps),
        }
    }
}

impl EncodeSection {
    fn codec_threads(&self) -> Result<WorkerThreads, ConfigError> {
        let keys = ThreadKeys {
            threads: "encode.threads",
            cores: "encode.cores",
        };
        keys.validate(self.threads, self.cores.as_deref(), codec_threads)
    }

    fn rates(&self, members: &[Member]) -> Result<LinkRates, ConfigError> {
        let usual = self.link_rate.map(|rate| rate.as_u64());
        let zero = "expected more than 0 bytes per second, got 0";
        if usual == Some(0) {
            return Err(value("encode.link_rate", zero));
        }
        let mut unusual = BTreeMap::new();
        for (name, rate) in &self.node_rates {
            let node = members.iter().find(|member| member.name.as_str() == name);
            let unknown = format!("expected names of nodes that are configured, got {name:?}");
            let node = node.ok_or_else(|| value("encode.node_rates", unknown))?;
            if rate.as_u64() == 0 {
                return Err(value("encode.node_rates", zero));
            }
            unusual.insert(node.name.clone(), rate.as_u64());
        }
        let basis = match self.rates {
            RatesName::Measured => RateBasis::Measured,
            RatesName::Configured => RateBasis::Configured,
        };
        Ok(LinkRates {
            usual,
            unusual,
            basis,
        })
    }
}

fn no_name_twice(members: &[Member]) -> Result<(), ConfigError> {
    let mut names = BTreeSet::new();
    match members.iter().find(|member| !names.insert(&member.name)) {
        None => Ok(()),
        Some(twice) => Err(value(
            "peers.name",
            format!(
                "expected a name of its own for every node, got {} twice: name each once, and this node in a host list alone",
                twice.name
            ),
        )),
    }
}

/// The host's name, if it can be a node's.
fn host_name() -> NodeName {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().to_lowercase();
    let first = host.split('.').next().unwrap_or_default().to_owned();
    NodeName::new(first).unwrap_or_else(|_| NodeName::new("node").expect("node is a name"))
}

/// Nobody asked for a size, so less than usual is a warning rather than an error.
fn default_budget(memory: MemoryLimit) -> u64 {
    let chosen = memory.default_budget();
    if let DefaultBudget::Shrunk { wanted, budget } = chosen {
        tracing::warn!(wanted = %ByteSize::b(wanted), budget = %ByteSize::b(budget),
            "half of the memory is not free, so the budget is smaller: set memory.budget to choose one");
    }
    chosen.bytes()
}

#[cfg(test)]
mod tests;
