//! A session as every member derives it: from its record and the manifest who is who and what is computed; from what
//! the leader says at the beginning the plan.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_codec::CodingMatrix;
use storaged_wire::peer::{Lane, SessionKind, SessionRecord, SumChecks};
use storaged_wire::shape::{EncodeShape, RepairShape};
use storaged_wire::{ManifestBytes, NodeName};

use super::lanes::LaneBlocks;
use super::topology;
use crate::{
    CodingPlan, Coefficients, ParityHolders, RepairTask, Rotation, StripedPlan, encode_plan,
    repair_plans,
};

/// Who is who in a session, as every member derives it.
#[derive(Debug, Clone)]
pub struct Derived {
    pub lane: Lane,
    pub blocks: LaneBlocks,
    /// One name per member of the plan.
    pub members: Vec<NodeName>,
    /// The block that each source member reads: the first members of the plan, in order.
    pub sources: Vec<usize>,
    /// The block that each sink keeps.
    pub sinks: Vec<usize>,
    /// Members that are sinks, in the order of `sinks`.
    pub sink_members: Vec<usize>,
    pub stripes: Vec<(u64, u64)>,
    /// Of a repair.
    pub shape: Option<RepairShape>,
    /// Of an encode.
    pub checks: SumChecks,
    computes: Computes,
}

/// What is computed: the rest of the plan is in the beginning, or is known already.
#[derive(Debug, Clone)]
enum Computes {
    Parity(Coefficients),
    Lost(Arc<StripedPlan>),
}

impl Derived {
    /// Derives a session from its record; none if the record does not fit the manifest.
    pub fn of(record: &SessionRecord, manifest: &ManifestBytes) -> Option<Self> {
        match &record.kind {
            // What whole chunks must be says nothing about differences.
            SessionKind::Encode {
                basis: Some(_),
                checks: SumChecks::Every,
                ..
            } => None,
            SessionKind::Encode {
                lane,
                checks,
                parities,
                ..
            } => Self::encode(manifest, *lane, *checks, parities),
            SessionKind::Repair {
                lane,
                survivors,
                wanted,
                stripes,
                shape,
            } => Self::repair(manifest, *lane, survivors, wanted, stripes, *shape),
        }
    }

    /// The plan; none if the shape does not fit.
    pub fn plan(&self, shape: Option<&EncodeShape>) -> Option<Arc<StripedPlan>> {
        match (&self.computes, shape) {
            (Computes::Parity(coefficients), shape) => {
                let shape = topology::from_wire(shape, self.sources.len())?;
                encode_plan(coefficients, ParityHolders::Fixed, &shape)
                    .ok()
                    .map(Arc::new)
            }
            (Computes::Lost(plan), None) => Some(plan.clone()),
            (Computes::Lost(_), Some(_)) => None,
        }
    }

    fn encode(
        manifest: &ManifestBytes,
        lane: Lane,
        checks: SumChecks,
        parities: &[u32],
    ) -> Option<Self> {
        let blocks = LaneBlocks::of(manifest, lane)?;
        let parities: Vec<usize> = parities.iter().map(|index| *index as usize).collect();
        let ascending = parities.is_sorted_by(|a, b| a < b);
        let in_range = parities
            .last()
            .is_some_and(|last| *last < blocks.coding.len());
        (ascending && in_range).then_some(())?;
        let matrix = CodingMatrix::cauchy(manifest.manifest().geometry);
        let (sources, coefficients) = blocks.encode(&matrix, &parities);
        let k = blocks.data.len();
        let sinks: Vec<usize> = parities.iter().map(|parity| k + parity).collect();
        let all = sources.iter().chain(&sinks);
        let members = all
            .map(|block| blocks.node(*block).cloned())
            .collect::<Option<Vec<_>>>()?;
        let sink_members = (sources.len()..members.len()).collect();
        Some(Self {
            lane,
            blocks,
            members,
            sources,
            sinks,
            sink_members,
            stripes: Vec::new(),
            shape: None,
            checks,
            computes: Computes::Parity(coefficients?),
        })
    }

    fn repair(
        manifest: &ManifestBytes,
        lane: Lane,
        survivors: &[u32],
        wanted: &[(u32, NodeName)],
        stripes: &[(u64, u64)],
        shape: RepairShape,
    ) -> Option<Self> {
        let blocks = LaneBlocks::of_read(manifest, lane)?;
        let in_range = |block: &u32| (*block as usize) < blocks.blocks();
        let named = survivors
            .iter()
            .chain(wanted.iter().map(|(block, _)| block));
        if !named.copied().all(|block| in_range(&block)) {
            return None;
        }
        let matrix = CodingMatrix::cauchy(manifest.manifest().geometry);
        let mut sources: Vec<usize> = survivors.iter().map(|block| *block as usize).collect();
        let sinks: Vec<usize> = wanted.iter().map(|(block, _)| *block as usize).collect();
        let first_sink = wanted.first().map(|(_, node)| node);
        let is_sink = |block: &usize| blocks.node(*block) == first_sink;
        let into_last = wanted.len() == 1 && sources.iter().any(is_sink);
        if into_last {
            sources.sort_by_key(is_sink);
        }
        let holders = sources.iter().map(|block| blocks.node(*block).cloned());
        let mut members = holders.collect::<Option<Vec<_>>>()?;
        let (plan, sink_members) = if into_last {
            // The newcomer holds a survivor's block itself: it stands last and keeps the sum.
            let coefficients = blocks.repair(&matrix, &sources, &sinks).ok()??;
            let plan = CodingPlan::chain_into_last(&coefficients);
            let sinks = vec![sources.len() - 1];
            (StripedPlan::uniform(plan, sources.len()), sinks)
        } else {
            members.extend(wanted.iter().map(|(_, node)| node.clone()));
            let plan = repair_plan(&blocks, &matrix, &sources, &sinks, shape)?;
            (plan, (sources.len()..members.len()).collect())
        };
        let distinct: BTreeSet<&NodeName> = members.iter().collect();
        (distinct.len() == members.len()).then_some(())?;
        Some(Self {
            lane,
            blocks,
            members,
            sources,
            sinks,
            sink_members,
            stripes: stripes.to_vec(),
            shape: Some(shape),
            checks: SumChecks::Parity,
            computes: Computes::Lost(Arc::new(plan)),
        })
    }
}

/// One plan for all wanted blocks.
fn repair_plan(
    blocks: &LaneBlocks,
    matrix: &CodingMatrix,
    survivors: &[usize],
    lost: &[usize],
    shape: RepairShape,
) -> Option<StripedPlan> {
    let shape = match shape {
        RepairShape::Chain => crate::RepairShape::Chain,
        RepairShape::Gather => crate::RepairShape::Gather,
        RepairShape::Direct if lost.len() == 1 => crate::RepairShape::GatherAtNewcomers,
        RepairShape::Direct => return None,
    };
    let is_copy = survivors == lost;
    let task = RepairTask {
        survivors,
        lost,
        needed: if is_copy { 1 } else { blocks.needed() },
    };
    let rows = |survivors: &[usize], lost: &[usize]| blocks.repair(matrix, survivors, lost);
    let mut made = repair_plans(&task, shape, rows).ok()?;
    let plan = (made.len() == 1).then(|| made.remove(0))?;
    match shape {
        // With no survivor to spare every one sends the same in any order. A fixed one keeps a stripe no longer at a
        // member than it takes to pass it on, whatever the window.
        crate::RepairShape::Chain if task.needed == survivors.len() => {
            let class = plan.classes()[0].clone();
            StripedPlan::new(
                plan.members(),
                plan.sources(),
                Rotation::ByTurn,
                vec![class],
            )
            .ok()
        }
        _ => Some(plan),
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::{ChunkSize, Geometry, digest};
    use storaged_wire::manifest::GroupEntry;
    use storaged_wire::{
        Enclosed, Manifest, Namespace, Owner, Rank, RunId, SessionId, ShardEntry, Step, WorldSize,
    };

    use super::*;

    const LANE: Lane = Lane { group: 0, index: 0 };

    fn name(text: &str) -> NodeName {
        NodeName::new(text).expect("a name")
    }

    /// Shards on `a`, `b` and `c`, parity on `d` and `e`.
    fn manifest() -> ManifestBytes {
        let shard = |(rank, node): (u32, &str)| ShardEntry {
            rank: Rank::new(rank),
            node: name(node),
            length: 100,
            root: digest(node.as_bytes()),
        };
        let manifest = Manifest {
            version: Manifest::VERSION,
            namespace: Namespace::new("job").expect("a name"),
            owner: Owner::of_token(b"token"),
            run: RunId::new(1),
            step: Step::new(1),
            world_size: WorldSize::new(3).expect("ranks"),
            epoch: 1,
            geometry: Geometry::new(3, 2).expect("a geometry"),
            chunk: ChunkSize::new(4096).expect("a size"),
            shards: (0u32..).zip(["a", "b", "c"]).map(shard).collect(),
            groups: vec![GroupEntry {
                data: ["a", "b", "c"].map(name).into(),
                coding: ["d", "e"].map(name).into(),
            }],
            schema: Enclosed::nothing(),
            torch_metadata: Enclosed::nothing(),
        };
        manifest.seal().expect("a sound manifest")
    }

    fn repair(survivors: &[u32], wanted: &[(u32, &str)]) -> Option<Derived> {
        let manifest = manifest();
        let record = SessionRecord {
            session: SessionId::new(1),
            manifest: manifest.name(),
            kind: SessionKind::Repair {
                lane: LANE,
                survivors: survivors.to_vec(),
                wanted: wanted
                    .iter()
                    .map(|(block, node)| (*block, name(node)))
                    .collect(),
                stripes: vec![(0, 1)],
                shape: RepairShape::Chain,
            },
        };
        Derived::of(&record, &manifest)
    }

    fn members(of: &Derived) -> Vec<&str> {
        of.members.iter().map(NodeName::as_str).collect()
    }

    #[test]
    fn a_lost_block_comes_to_a_newcomer_from_all_survivors() {
        let derived = repair(&[1, 2, 3], &[(0, "f")]).expect("a session");
        assert_eq!(members(&derived), ["b", "c", "d", "f"]);
        assert_eq!(
            (derived.sources, derived.sink_members),
            (vec![1, 2, 3], vec![3])
        );
    }

    /// A rank that starts again on a node that has parity of its lane: no node is two members of a plan.
    #[test]
    fn whoever_wants_a_block_and_holds_another_stands_last_and_keeps_the_sum() {
        let derived = repair(&[1, 3, 4], &[(0, "d")]).expect("a session");
        assert_eq!(members(&derived), ["b", "e", "d"]);
        assert_eq!(
            (&derived.sources, &derived.sink_members),
            (&vec![1, 4, 3], &vec![2])
        );
        let plan = derived.plan(None).expect("a plan");
        assert_eq!((plan.members(), plan.sources()), (3, 3));
    }

    #[test]
    fn two_blocks_for_nodes_that_hold_others_are_no_session() {
        assert!(repair(&[1, 2, 3], &[(0, "d"), (4, "f")]).is_none());
        assert!(repair(&[1, 2, 3], &[(0, "f"), (4, "g")]).is_some());
    }

    #[test]
    fn a_record_that_does_not_fit_its_manifest_is_no_session() {
        assert!(
            repair(&[1, 2, 9], &[(0, "f")]).is_none(),
            "no such survivor"
        );
        assert!(repair(&[1, 2, 3], &[(7, "f")]).is_none(), "no such block");
        assert!(repair(&[1, 2], &[(0, "f")]).is_none(), "too few");
        let encode = |parities: &[u32]| {
            let manifest = manifest();
            let kind = SessionKind::Encode {
                lane: LANE,
                basis: None,
                checks: SumChecks::Parity,
                parities: parities.to_vec(),
            };
            let session = SessionId::new(1);
            let manifest_name = manifest.name();
            let record = SessionRecord {
                session,
                manifest: manifest_name,
                kind,
            };
            Derived::of(&record, &manifest)
        };
        let members = |parities| encode(parities).map(|derived| derived.members.len());
        assert_eq!(members(&[0, 1]), Some(5));
        assert_eq!(members(&[1]), Some(4));
        for bad in [&[][..], &[1, 0], &[0, 0], &[2]] {
            assert_eq!(members(bad), None, "{bad:?}");
        }
    }
}
