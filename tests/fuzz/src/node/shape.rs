//! What cluster an input is played in: its first bytes say how many nodes there are and how they are configured.

use std::collections::BTreeMap;

use storaged_codec::Geometry;
use storaged_core::{
    DurableForm, DurablePolicy, LinkRates, MessageLimits, RateBasis, RunAuthority, RunsWithoutTier,
    Setup, TenantShare,
};
use storaged_wire::TenantName;

use crate::testkit::Pacing;

/// Bytes of an input that say in which cluster it is played.
pub const SHAPE_BYTES: usize = 8;

/// Small ones, so that what is long in them is no longer than a page.
const SMALL_MESSAGES: MessageLimits = MessageLimits {
    inline: 1_000,
    spread: 1_000,
    page: 1_000,
    table_chunks: 2,
    fan_out: 2,
};

/// How a cluster is configured.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape([u8; SHAPE_BYTES]);

impl Shape {
    /// The shape that an input begins with, and the rest.
    pub fn read(bytes: &[u8]) -> (Self, &[u8]) {
        let mut shape = [0; SHAPE_BYTES];
        let length = bytes.len().min(SHAPE_BYTES);
        let (head, rest) = bytes.split_at(length);
        shape[..length].copy_from_slice(head);
        (Self(shape), rest)
    }

    pub fn of(bytes: [u8; SHAPE_BYTES]) -> Self {
        Self(bytes)
    }

    pub fn bytes(self) -> [u8; SHAPE_BYTES] {
        self.0
    }

    fn pick<T: Copy>(self, byte: usize, of: &[T]) -> T {
        of[usize::from(self.0[byte]) % of.len()]
    }

    fn bit(self, byte: usize, bit: u8) -> bool {
        self.0[byte] >> bit & 1 == 1
    }

    pub fn nodes(self) -> usize {
        self.pick(0, &[3, 4, 5, 6, 1])
    }

    /// Ranks that save on each node.
    pub fn ranks_per_node(self) -> usize {
        1 + usize::from(self.0[0] >> 7)
    }

    /// A daemon that is alone and has a code waits for others before it decides anything.
    fn geometry(self) -> Option<Geometry> {
        let (k, m) = self.pick(1, &[(2, 1), (4, 2), (2, 2), (3, 1), (4, 1), (0, 0)]);
        Geometry::new(k, m).ok().filter(|_| self.nodes() > 1)
    }

    /// Whether tenants have jobs of one name, and shares of the memory.
    pub fn has_tenants(self) -> bool {
        self.bit(5, 0)
    }

    /// Bytes of each rank's shard, and what it is longer by on each following rank.
    pub fn length(self) -> u64 {
        self.pick(6, &[10_000, 40_000, 4_096, 0, 100_000])
    }

    pub fn pacing(self) -> Pacing {
        match self.0[7] % 4 {
            0 => Pacing::AtOnce,
            1 => Pacing::AtTheEnd,
            2 => Pacing::ByStripe { ms: 10 },
            _ => Pacing::ByStripe { ms: 400 },
        }
    }

    /// A node's configuration, but for its name and its members.
    pub fn set_up(self, setup: &mut Setup) {
        setup.geometry = self.geometry();
        setup.budget = self.pick(3, &[1 << 30, 40 << 20, 20 << 20, 10 << 20]);
        setup.keep_steps = 1 + usize::from(self.bit(3, 6));
        setup.slots_per_rank = setup.keep_steps + 1 + usize::from(self.bit(3, 7));
        setup.scrub_period_ms = self.pick(4, &[0, 1_000, 20_000]);
        setup.idle_job_ms = self.pick(4, &[3_600_000, 2_000]);
        if self.bit(4, 7) {
            setup.messages = SMALL_MESSAGES;
        }
        self.set_up_tier(setup);
        self.set_up_rates(setup);
        if self.has_tenants() {
            setup.shares = shares();
        }
    }

    fn set_up_tier(self, setup: &mut Setup) {
        setup.durable = self.pick(
            2,
            &[
                DurablePolicy::Absent,
                DurablePolicy::Every(1),
                DurablePolicy::OnRequest,
                DurablePolicy::Every(2),
            ],
        );
        if self.bit(2, 4) {
            setup.durable_form = DurableForm::Increments;
        }
        if self.bit(2, 5) {
            setup.runs_without_tier = RunsWithoutTier::Allowed;
        }
        if self.bit(2, 6) {
            setup.run_authority = RunAuthority::Registry;
        }
    }

    fn set_up_rates(self, setup: &mut Setup) {
        if self.bit(5, 1) {
            setup.link_rates = LinkRates {
                usual: Some(1_000_000),
                unusual: BTreeMap::from([(crate::testkit::name(1), 10_000)]),
                basis: RateBasis::Measured,
            };
        }
        if self.bit(5, 2) {
            setup.link_rates.basis = RateBasis::Configured;
        }
    }
}

/// What tenants are sure of, and have at most.
fn shares() -> BTreeMap<Option<TenantName>, TenantShare> {
    let share = |guaranteed, most| TenantShare {
        guaranteed,
        most,
        new_jobs: None,
    };
    let tenant = |name: &str| TenantName::new(name).ok();
    BTreeMap::from([
        (tenant("blue"), share(4 << 20, None)),
        (tenant("red"), share(0, Some(12 << 20))),
    ])
}
