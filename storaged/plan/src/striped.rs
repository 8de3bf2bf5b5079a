//! A plan for every stripe of a lane, written down once per class of stripes.

use std::collections::BTreeSet;
use std::ops::Range;

use super::error::PlanError;
use super::stripes::{StripeSet, append};
use crate::CodingPlan;

/// More classes than this are not written down: rotations that do not fit are a little uneven instead.
pub(super) const CLASSES_MAX: usize = 256;

/// How a stripe finds its class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rotation {
    /// By its position among the stripes that move: even whatever is dirty. For roles that leave nothing behind.
    ByTurn,
    /// By its own number, always the same: for plans in which the class says which node keeps what. The period is
    /// the number of nodes that keep sums.
    ByStripe { period: usize },
}

/// From one member to another: all that a session sends this way goes over one stream, in the order of the stripes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Link {
    /// Sending member.
    pub from: usize,
    /// Receiving member.
    pub to: usize,
}

/// One coding plan per class of stripes, over one list of nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StripedPlan {
    members: usize,
    sources: usize,
    rotation: Rotation,
    classes: Vec<CodingPlan>,
}

impl StripedPlan {
    /// The sources are members `0..sources`; every class is a plan over the same members.
    ///
    /// # Errors
    /// [`PlanError`] if there is no class, or a period that does not divide their number.
    pub fn new(
        members: usize,
        sources: usize,
        rotation: Rotation,
        classes: Vec<CodingPlan>,
    ) -> Result<Self, PlanError> {
        let period = match rotation {
            Rotation::ByTurn => 1,
            Rotation::ByStripe { period } => period,
        };
        if classes.is_empty() || period == 0 || !classes.len().is_multiple_of(period) {
            let got = classes.len();
            let expected = period.max(1);
            return Err(PlanError::Blocks { expected, got });
        }
        Ok(Self {
            members,
            sources,
            rotation,
            classes,
        })
    }

    /// The same plan for every stripe, over as many members as it names.
    pub fn uniform(plan: CodingPlan, sources: usize) -> Self {
        let hops = plan.hops.iter().map(|hop| hop.member + 1);
        Self {
            members: hops.max().unwrap_or(0).max(sources),
            sources,
            rotation: Rotation::ByTurn,
            classes: vec![plan],
        }
    }

    /// How many members.
    pub fn members(&self) -> usize {
        self.members
    }

    /// How many of them, from the first, hold the blocks that go in.
    pub fn sources(&self) -> usize {
        self.sources
    }

    /// One plan per class.
    pub fn classes(&self) -> &[CodingPlan] {
        &self.classes
    }

    /// Every pair of members between which some class has an edge, ascending: a link's place here is its number in
    /// the streams of a session.
    pub fn links(&self) -> Vec<Link> {
        let edges = self.classes.iter().flat_map(|plan| &plan.edges);
        let link = |edge: &crate::Edge| Link {
            from: edge.from,
            to: edge.to,
        };
        let links: BTreeSet<Link> = edges.map(link).collect();
        links.into_iter().collect()
    }

    /// The class of a stripe that is the `turn`-th to move.
    pub fn class_of(&self, stripe: u64, turn: u64) -> usize {
        let classes = self.classes.len();
        match self.rotation {
            Rotation::ByTurn => (turn % classes as u64) as usize,
            Rotation::ByStripe { period } => {
                let blocks = (classes / period) as u64;
                let block = (stripe / period as u64 % blocks) as usize;
                placement(stripe, period) + period * block
            }
        }
    }

    /// The stripes of a set that one class has, for a session that executes this class alone.
    pub fn stripes_of(&self, class: usize, set: &StripeSet) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        for (turn, stripe) in (0..).zip(set.iter()) {
            if self.class_of(stripe, turn) == class {
                append(&mut runs, stripe..stripe + 1);
            }
        }
        runs
    }
}

/// Which of `period` nodes begins the row of those that keep a stripe's parity: always the same one, so that parity
/// is found, and updated in place, whatever plan made it.
///
/// Each `period` stripes in a row, from a multiple of it, have each node once. The digits of the stripe's number to
/// the base `period` are added up, so that stripes at the distance of a power of it (rows of a matrix of which one
/// column changes) do not all fall to one node, as they would by the last digit alone.
pub(super) fn placement(stripe: u64, period: usize) -> usize {
    let period = period as u64;
    if period < 2 {
        return 0;
    }
    let mut left = stripe;
    let mut sum = 0;
    while left > 0 {
        sum += left % period;
        left /= period;
    }
    (sum % period) as usize
}
