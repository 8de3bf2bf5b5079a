//! What a node is told at start.

use std::collections::BTreeMap;

use storaged_plan::Member;
use storaged_wire::{ChunkSize, Generation, Geometry, NodeName, TenantName};

use crate::limits;

/// When checkpoints go to the durable tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DurablePolicy {
    /// There is no durable tier.
    Absent,
    /// Only those a trainer asks for.
    OnRequest,
    /// Those whose step is a multiple of this number.
    Every(u64),
}

/// Whether a run may be opened that no node remembers the namespace of, while the durable tier cannot be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunsWithoutTier {
    /// No: its number might have been given before.
    #[default]
    Refused,
    /// Yes: the operator knows that nothing of such a namespace is in the tier.
    Allowed,
}

/// Who settles whose a run's number is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunAuthority {
    /// The durable tier if it answers, else a majority of the members.
    #[default]
    Members,
    /// The registry that the members come from.
    Registry,
}

/// What copies in the durable tier hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DurableForm {
    /// Every one stands alone.
    #[default]
    Full,
    /// What changed since an earlier one, where that is still in RAM.
    Increments,
}

/// How much one message to a peer holds. Tests have small ones, so that what is long in them is no longer than a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageLimits {
    /// Bytes of a message that goes as it is; a longer one is fetched page by page.
    pub inline: usize,
    /// Bytes of a commit that goes as it is to every node that it concerns; a longer one is handed on along a tree.
    pub spread: usize,
    /// Bytes of such a page.
    pub page: usize,
    /// Chunks of which a page of a table tells the digests and fingerprints.
    pub table_chunks: usize,
    /// To how many nodes a home node tells a commit that does not fit a message; they tell the others, likewise.
    pub fan_out: usize,
}

impl Default for MessageLimits {
    fn default() -> Self {
        Self {
            inline: limits::INLINE_BYTES_MAX,
            spread: limits::SPREAD_BYTES_MIN,
            page: limits::PARCEL_PAGE_BYTES,
            table_chunks: limits::TABLE_PAGE_CHUNKS,
            fan_out: limits::RELAY_FAN_OUT,
        }
    }
}

/// What one tenant has of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantShare {
    /// Bytes of the memory budget that no other tenant takes.
    pub guaranteed: u64,
    /// Bytes of it beyond which the tenant is refused; none: the budget.
    pub most: Option<u64>,
    /// Jobs that it opens within a minute and that save nothing; none: as many as a tenant may that nothing is said of.
    pub new_jobs: Option<usize>,
}

/// What a node is told at start.
#[derive(Debug, Clone)]
pub struct Setup {
    /// This node's name; it is one of `members`.
    pub name: NodeName,
    /// This incarnation.
    pub generation: Generation,
    /// All configured nodes, this one included.
    pub members: Vec<Member>,
    /// Which list of nodes that is, counted from 1: always 1 where no registry numbers them.
    pub epoch: u64,
    /// k and m; none means that checkpoints are not coded.
    pub geometry: Option<Geometry>,
    /// Size of a chunk.
    pub chunk: ChunkSize,
    /// How much a message holds.
    pub messages: MessageLimits,
    /// Slots per rank.
    pub slots_per_rank: usize,
    /// Safe steps of a job that stay in RAM, the newest among them; less than `slots_per_rank`.
    pub keep_steps: usize,
    /// Bytes of RAM that slots and parity may take.
    pub budget: u64,
    /// What of it tenants are sure of, and may have at most, and how many jobs; one that is not named shares the rest with all others.
    pub shares: BTreeMap<Option<TenantName>, TenantShare>,
    /// A job without trainers for so long may lose RAM to another one, though it is not durable.
    pub idle_job_ms: u64,
    /// Every byte of shards and parity in RAM is read again within so many milliseconds; 0: never.
    pub scrub_period_ms: u64,
    /// What is known of the links: what the shape of an encode is chosen by.
    pub link_rates: LinkRates,
    /// The durable tier.
    pub durable: DurablePolicy,
    /// What if it cannot be asked for a run.
    pub runs_without_tier: RunsWithoutTier,
    /// Who says which run is the newest.
    pub run_authority: RunAuthority,
    /// What is copied there.
    pub durable_form: DurableForm,
}

/// What plans are chosen by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RateBasis {
    /// What sessions measured; what is configured where nothing was.
    #[default]
    Measured,
    /// What is configured, and nothing else.
    Configured,
}

/// What is known of the links, as the operator says it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LinkRates {
    /// Bytes per second of every node's link, each way, if known: assumed where nothing was measured.
    pub usual: Option<u64>,
    /// Of nodes that have another one.
    pub unusual: BTreeMap<NodeName, u64>,
    /// Whether measurements count.
    pub basis: RateBasis,
}
