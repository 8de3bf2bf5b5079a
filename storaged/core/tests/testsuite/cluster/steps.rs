//! Which steps the nodes hold, and whether they can be restored.

use storaged_wire::local::{Reply, Request, Role};
use storaged_wire::{Rank, Step};

use super::Cluster;
use crate::testkit::{self, open_shard};

impl Cluster {
    /// The steps that a node holds blocks of, with what they bear.
    pub fn held(&self, node: usize) -> Vec<(u64, Option<u32>)> {
        let process = self.processes[node].as_ref().expect("it is up");
        let shown = process.node.shown().into_iter();
        let blocks = shown.filter(|it| !it.shards.is_empty() || !it.parity.is_empty());
        blocks.map(|it| (it.key.step.get(), it.bears)).collect()
    }

    /// The same of all nodes.
    pub fn held_by_all(&self) -> Vec<Vec<(u64, Option<u32>)>> {
        let all = 0..self.processes.len();
        all.map(|node| self.held(node)).collect()
    }

    /// The home nodes of a step, and how many of its blocks they hold.
    pub fn homes_of(&self, step: u64) -> (Vec<usize>, usize) {
        let shown = |node: usize| {
            let process = self.processes[node].as_ref()?;
            let mut shown = process.node.shown().into_iter();
            shown.find(|it| it.key.step == Step::new(step))
        };
        let known = (0..self.processes.len()).find_map(shown);
        let homes = known.expect("some node knows it").homes;
        let homes: Vec<usize> = homes.iter().map(testkit::index).collect();
        let holding = homes.iter().filter_map(|home| shown(*home));
        let blocks = holding.map(|it| it.shards.len() + it.parity.len());
        (homes.clone(), blocks.sum())
    }

    /// All nodes hold these steps, each of which bears two losses, and no others.
    pub fn assert_all_hold(&self, steps: impl IntoIterator<Item = u64>) {
        let expected: Vec<_> = steps.into_iter().map(|step| (step, Some(2))).collect();
        for node in 0..self.processes.len() {
            assert_eq!(self.held(node), expected, "n{node}");
        }
    }

    /// A reader on this node gets these ranks' shards of a step.
    pub fn assert_restores(
        &mut self,
        node: usize,
        step: u64,
        ranks: impl IntoIterator<Item = u32>,
    ) {
        let reader = self.connect(node, Role::Reader);
        let plan = Request::Plan {
            step: Some(Step::new(step)),
            timeout_ms: 10_000,
            allow_older: false,
        };
        let Reply::Plan(plan) = self.ask(node, reader, plan) else {
            panic!("step {step} is there");
        };
        for rank in ranks {
            let open = open_shard(plan.manifest, Rank::new(rank), 10_000);
            let opened = self.ask(node, reader, open);
            assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
        }
        self.disconnect(node, reader);
    }
}
