//! How a node is configured where a suite says nothing else.

use std::collections::BTreeMap;

use storaged_codec::{ChunkSize, Geometry};
use storaged_core::{
    DurableForm, DurablePolicy, LinkRates, MessageLimits, RunAuthority, RunsWithoutTier, Setup,
};
use storaged_plan::Member;
use storaged_wire::{Generation, NodeName};

pub const CHUNK_BYTES: u32 = 4096;
/// Longer than any test.
pub const NEVER_IDLE_MS: u64 = 3_600_000;

/// One of these members, with neither parity nor a durable tier, and with a budget that nothing exceeds.
pub fn setup(name: NodeName, members: Vec<Member>) -> Setup {
    Setup {
        name,
        generation: Generation::new(1),
        members,
        epoch: 1,
        geometry: None,
        chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
        slots_per_rank: 3,
        keep_steps: 1,
        budget: 1 << 30,
        shares: BTreeMap::new(),
        idle_job_ms: NEVER_IDLE_MS,
        scrub_period_ms: 0,
        link_rates: LinkRates::default(),
        durable: DurablePolicy::Absent,
        messages: MessageLimits::default(),
        runs_without_tier: RunsWithoutTier::Refused,
        run_authority: RunAuthority::Members,
        durable_form: DurableForm::Full,
    }
}

pub fn geometry(k: usize, m: usize) -> Geometry {
    Geometry::new(k, m).unwrap()
}
