//! Policy of the verb *restore*: the plan before action (`plan` asks, `survey` has what was told, `settle` says for how
//! long, `offer` what comes of it, `marks` what it must not go below), the ladder per shard (`open`), openings that a
//! heal serves (`heal_first`), what nodes hold (`holdings`), and checking a whole checkpoint (`verify`).

mod heal_first;
mod holdings;
mod marks;
mod offer;
mod open;
mod plan;
mod rung_fault;
mod settle;
mod survey;
mod verify;

pub(crate) use heal_first::HealFirst;
pub(crate) use marks::mark_at;
pub(crate) use open::{OpenWish, Opening};
pub(crate) use plan::{Older, PlanQuery};
pub(crate) use rung_fault::is_wrong;
pub(crate) use verify::VerifyWork;

use storaged_wire::NodeName;

use crate::api::{ConnId, SessionTally};
use crate::limits;
use crate::node::Node;

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

impl Node {
    /// A peer is gone: nobody waits for its answers any more.
    pub(crate) fn queries_forget(&mut self, node: &NodeName) {
        self.plans_forget(node);
        self.openings_forget(node);
        self.verifies_forget(node);
        self.advance_drops();
    }

    /// A connection is gone: its plans, openings and runs are over.
    pub(crate) fn forget_requests(&mut self, conn: ConnId) {
        self.plans.retain(|_, plan| plan.id.conn != conn);
        self.verifies
            .retain(|_, work| work.id().is_none_or(|id| id.conn != conn));
        self.forget_drops(conn);
        self.forget_heals(conn);
        self.forget_proposals(conn);
        self.forget_hellos(conn);
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
