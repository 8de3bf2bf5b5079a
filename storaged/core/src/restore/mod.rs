//! Policy of the verb *restore*: the plan before action (`plan` asks, `cluster_view` has what was told, `settle` says for how
//! long, `offer` what comes of it, `marks` what it must not go below), the ladder per shard (`open`), openings that a
//! heal serves (`await_repair`), what nodes hold (`holdings`), what readers get of a manifest (`reading`), and checking a whole checkpoint (`verify`).

mod await_repair;
mod cluster_view;
mod hear;
mod holdings;
mod marks;
mod offer;
mod open;
mod opening;
mod plan;
mod reading;
mod settle;
mod source_fault;
mod verify;

pub(crate) use marks::mark_at;
pub(crate) use opening::OpenRequest;
pub(crate) use plan::Older;
pub(crate) use source_fault::is_wrong;

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_wire::{ManifestBytes, Namespace, SlotId};

use await_repair::AwaitedRepair;
use opening::ShardOpen;
use plan::SurveyInProgress;
use reading::ManifestWait;
use verify::VerifyWork;

use crate::api::{Now, QueryId, SessionTally};
use crate::limits;

/// Plans, openings and verifications that are asked for here.
#[derive(Debug, Default)]
pub(crate) struct Restores {
    plans: BTreeMap<QueryId, SurveyInProgress>,
    openings: BTreeMap<SlotId, ShardOpen>,
    awaited_repairs: Vec<AwaitedRepair>,
    verifies: BTreeMap<QueryId, VerifyWork>,
    manifest_waits: Vec<ManifestWait>,
    /// Manifests of the last plans, for the requests that follow them.
    planned: Vec<Arc<ManifestBytes>>,
    /// Openings for which the durable tier is listed, since memory did not give them what they need.
    listed_for: BTreeMap<QueryId, SlotId>,
}

impl Restores {
    /// When one of them must be looked at again.
    pub fn deadlines(&self) -> impl Iterator<Item = Now> {
        let plans = self.plans.values().map(|plan| plan.deadline);
        let openings = self.openings.values().map(|opening| opening.deadline);
        let rest = self
            .awaited_repairs_deadlines()
            .chain(self.verifies_deadline())
            .chain(self.manifest_waits.iter().map(|wait| wait.request.deadline));
        plans.chain(openings).chain(rest)
    }

    /// Jobs that a plan is made for.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.plans.values().map(|plan| &plan.namespace)
    }

    /// Requests that have not been answered.
    pub fn unanswered(&self) -> usize {
        let openings = self.openings.values().filter(|it| !it.is_open());
        let waits = self.awaited_repairs.len() + self.manifest_waits.len();
        waits + self.plans.len() + openings.count() + self.verifies.len()
    }

    /// Openings that wait for a repair.
    pub fn waiters(&self) -> usize {
        self.awaited_repairs.len()
    }
}

/// Rates for the plan's estimate: measured where something was measured, a first guess elsewhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    session_bytes_per_ms: u64,
}

impl Default for Rates {
    fn default() -> Self {
        Self {
            session_bytes_per_ms: limits::SESSION_BYTES_PER_MS,
        }
    }
}

impl Rates {
    /// Moves the estimate a quarter of the way to what a session just did. Tiny sessions say nothing of the rate.
    pub fn session(&mut self, tally: &SessionTally) {
        const TELLING_BYTES: u64 = 1 << 20;
        if tally.bytes < TELLING_BYTES {
            return;
        }
        let measured = tally.bytes / tally.elapsed_ms.max(1);
        self.session_bytes_per_ms = (3 * self.session_bytes_per_ms + measured)
            .div_ceil(4)
            .max(1);
    }

    pub fn ram_ms(bytes: u64) -> u64 {
        bytes.div_ceil(limits::RAM_BYTES_PER_MS)
    }

    pub fn session_ms(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.session_bytes_per_ms)
    }

    pub fn durable_ms(bytes: u64) -> u64 {
        bytes.div_ceil(limits::DURABLE_BYTES_PER_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(bytes: u64, elapsed_ms: u64) -> SessionTally {
        SessionTally {
            bytes,
            elapsed_ms,
            ..SessionTally::default()
        }
    }

    #[test]
    fn the_rate_of_sessions_moves_a_quarter_of_the_way_to_what_the_last_one_did() {
        let mut rates = Rates {
            session_bytes_per_ms: 1_000,
        };
        rates.session(&session(50_000_000, 10_000));
        assert_eq!(rates.session_bytes_per_ms, (3 * 1_000 + 5_000) / 4);
        assert_eq!(rates.session_ms(20_001), 11, "rounded up");
        for _ in 0..40 {
            rates.session(&session(50_000_000, 10_000));
        }
        assert_eq!(rates.session_bytes_per_ms, 5_000);
    }

    #[test]
    fn a_session_of_less_than_a_mebibyte_says_nothing_of_the_rate() {
        let mut rates = Rates {
            session_bytes_per_ms: 1_000,
        };
        rates.session(&session((1 << 20) - 1, 1));
        assert_eq!(rates.session_bytes_per_ms, 1_000);
        rates.session(&session(1 << 20, 1));
        assert_eq!(rates.session_bytes_per_ms, (3 * 1_000 + (1 << 20)) / 4);
    }

    /// A plan is shown an estimate, never a division by nothing.
    #[test]
    fn a_session_that_took_no_time_or_moved_hardly_anything_leaves_a_rate() {
        let mut rates = Rates {
            session_bytes_per_ms: 1,
        };
        rates.session(&session(1 << 20, u64::MAX));
        assert_eq!(rates.session_bytes_per_ms, 1);
        rates.session(&session(1 << 20, 0));
        assert!(rates.session_bytes_per_ms > 1);
    }
}
