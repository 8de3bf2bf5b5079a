//! What a plan asks of every node, before anything moves.

use super::striped::StripedPlan;
use super::stripes::StripeSet;
use crate::{CodingPlan, Target};

/// What one node does for a set of stripes, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct NodeLoad {
    /// Over its uplink.
    pub sent: u64,
    /// Over its downlink.
    pub received: u64,
    /// Of its own block read from RAM.
    pub read: u64,
    /// Into its RAM, to stay.
    pub kept: u64,
    /// Multiplied by a coefficient and added: what its processor works on.
    pub folded: u64,
}

impl NodeLoad {
    /// Both together: of a node that has parts in two plans at once.
    pub fn plus(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            received: self.received + other.received,
            read: self.read + other.read,
            kept: self.kept + other.kept,
            folded: self.folded + other.folded,
        }
    }

    fn times(self, bytes: u64) -> Self {
        Self {
            sent: self.sent * bytes,
            received: self.received * bytes,
            read: self.read * bytes,
            kept: self.kept * bytes,
            folded: self.folded * bytes,
        }
    }
}

impl StripedPlan {
    /// Per member, what it does for these stripes if every block of a stripe in the set moves. Where a node sends
    /// only what is dirty of its own, it is less.
    pub fn loads(&self, set: &StripeSet) -> Vec<NodeLoad> {
        let mut bytes = vec![0; self.classes().len()];
        for (turn, stripe) in (0..).zip(set.iter()) {
            bytes[self.class_of(stripe, turn)] += set.stripe_bytes(stripe);
        }
        let mut loads = vec![NodeLoad::default(); self.members()];
        for (plan, bytes) in self.classes().iter().zip(bytes) {
            let blocks = blocks_per_stripe(plan, self.members());
            for (load, blocks) in loads.iter_mut().zip(blocks) {
                *load = load.plus(blocks.times(bytes));
            }
        }
        loads
    }

    /// Per member, blocks of one stripe of every class added up: loads in units of a stripe per class.
    pub fn blocks_per_round(&self) -> Vec<NodeLoad> {
        let mut loads = vec![NodeLoad::default(); self.members()];
        for plan in self.classes() {
            let blocks = blocks_per_stripe(plan, self.members());
            for (load, blocks) in loads.iter_mut().zip(blocks) {
                *load = load.plus(blocks);
            }
        }
        loads
    }

    /// How many stripes are in flight at a member where `usual` are in a plan in which every stripe goes the same way. In
    /// one whose roles rotate a stripe waits for its own root, so it takes two for each role, or some roots have nothing
    /// to do; at most twice as many as usual.
    pub fn stripes_in_flight(&self, usual: usize) -> usize {
        let usual = usual.max(1);
        (2 * self.classes().len()).clamp(usual, 2 * usual)
    }

    /// Blocks that a member holds of one stripe of a class: what it received, its own block and its results. Those that go on in
    /// the memory of what came in are counted twice.
    pub fn blocks_held(&self, member: usize, class: usize) -> usize {
        let plan = self.classes().get(class);
        plan.map_or(0, |plan| blocks_held_of(plan, member))
    }

    /// Most blocks that a member holds while `stripes_in_flight` stripes are, if all are of the class of which it holds most.
    pub fn blocks_in_flight_max(&self, member: usize, stripes_in_flight: usize) -> usize {
        let each = self
            .classes()
            .iter()
            .map(|plan| blocks_held_of(plan, member));
        each.max().unwrap_or(0) * stripes_in_flight
    }

    /// How many different nodes a member sends to or receives from: its connections.
    pub fn peers(&self, member: usize) -> usize {
        let edges = self.classes().iter().flat_map(|plan| &plan.edges);
        let mut peers: Vec<usize> = edges
            .filter_map(|edge| {
                if edge.from == member {
                    Some(edge.to)
                } else {
                    (edge.to == member).then_some(edge.from)
                }
            })
            .collect();
        peers.sort_unstable();
        peers.dedup();
        peers.len()
    }
}

fn blocks_held_of(plan: &CodingPlan, member: usize) -> usize {
    plan.hop(member).map_or(0, |hop| {
        let received: usize = hop.inputs.iter().map(|edge| plan.edges[*edge].width).sum();
        let results: usize = hop.outputs.iter().map(|output| output.rows.len()).sum();
        received + usize::from(hop.local.is_some()) + results
    })
}

/// Per member, how many blocks of one stripe it sends, receives, and so on.
pub(super) fn blocks_per_stripe(plan: &CodingPlan, members: usize) -> Vec<NodeLoad> {
    let mut loads = vec![NodeLoad::default(); members];
    for edge in &plan.edges {
        loads[edge.from].sent += edge.width as u64;
        loads[edge.to].received += edge.width as u64;
    }
    for hop in &plan.hops {
        let load = &mut loads[hop.member];
        load.read += u64::from(hop.local.is_some());
        for output in &hop.outputs {
            load.kept += u64::from(matches!(output.target, Target::Keep(_)));
            let terms = output.rows.iter().flatten();
            // A sum that goes on with coefficient 1 keeps its memory: only what is multiplied costs.
            load.folded += terms.filter(|c| **c > 1).count() as u64;
        }
    }
    loads
}
