//! A session as every member derives it from its record: nothing but the record and the manifest goes in.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_codec::CodingMatrix;
use storaged_wire::peer::{Lane, SessionKind, SessionRecord};
use storaged_wire::{Manifest, NodeName};

use super::lanes::LaneBlocks;
use super::plan::CodingPlan;
use super::plans::StripedPlan;

/// A session's plan and who is who in it, as every member derives it.
#[derive(Debug, Clone)]
pub(crate) struct Derived {
    pub lane: Lane,
    pub blocks: LaneBlocks,
    pub plan: Arc<StripedPlan>,
    /// One name per member of the plan.
    pub members: Vec<NodeName>,
    /// The block that each source member reads: the first members of the plan, in order.
    pub sources: Vec<usize>,
    /// The block that each sink keeps.
    pub sinks: Vec<usize>,
    /// Members that are sinks, in the order of `sinks`.
    pub sink_members: Vec<usize>,
    pub stripes: Vec<(u64, u64)>,
}

impl Derived {
    /// Derives a session from its record; none if the record does not fit the manifest.
    pub fn of(record: &SessionRecord, manifest: &Manifest) -> Option<Self> {
        match &record.kind {
            SessionKind::Encode { lane, .. } => Self::encode(manifest, *lane),
            SessionKind::Repair {
                lane,
                survivors,
                wanted,
                stripes,
            } => Self::repair(manifest, *lane, survivors, wanted, stripes),
        }
    }

    fn encode(manifest: &Manifest, lane: Lane) -> Option<Self> {
        let blocks = LaneBlocks::of(manifest, lane)?;
        let matrix = CodingMatrix::cauchy(manifest.geometry);
        let (sources, coefficients) = blocks.encode(&matrix);
        let sinks: Vec<usize> = (blocks.data.len()..blocks.blocks()).collect();
        let plan = StripedPlan::uniform(CodingPlan::chain(&coefficients?), sources.len());
        let all = sources.iter().chain(&sinks);
        let members = all
            .map(|block| blocks.node(*block).cloned())
            .collect::<Option<Vec<_>>>()?;
        let sink_members = (sources.len()..members.len()).collect();
        Some(Self {
            lane,
            blocks,
            plan: Arc::new(plan),
            members,
            sources,
            sinks,
            sink_members,
            stripes: Vec::new(),
        })
    }

    fn repair(
        manifest: &Manifest,
        lane: Lane,
        survivors: &[u32],
        wanted: &[(u32, NodeName)],
        stripes: &[(u64, u64)],
    ) -> Option<Self> {
        let blocks = LaneBlocks::of(manifest, lane)?;
        let in_range = |block: &u32| (*block as usize) < blocks.blocks();
        if !survivors
            .iter()
            .chain(wanted.iter().map(|(block, _)| block))
            .all(in_range)
        {
            return None;
        }
        let matrix = CodingMatrix::cauchy(manifest.geometry);
        let mut sources: Vec<usize> = survivors.iter().map(|block| *block as usize).collect();
        let first_sink = wanted.first().map(|(_, node)| node);
        let into_last = wanted.len() == 1
            && sources
                .iter()
                .any(|block| blocks.node(*block) == first_sink);
        if into_last {
            sources.sort_by_key(|block| blocks.node(*block) == first_sink);
        }
        let sinks: Vec<usize> = wanted.iter().map(|(block, _)| *block as usize).collect();
        let coefficients = blocks.repair(&matrix, &sources, &sinks).ok()??;
        let holders = sources.iter().map(|block| blocks.node(*block).cloned());
        let mut members = holders.collect::<Option<Vec<_>>>()?;
        let (plan, sink_members) = if into_last {
            (
                CodingPlan::chain_into_last(&coefficients),
                vec![sources.len() - 1],
            )
        } else {
            members.extend(wanted.iter().map(|(_, node)| node.clone()));
            (
                CodingPlan::chain(&coefficients),
                (sources.len()..members.len()).collect(),
            )
        };
        let distinct: BTreeSet<&NodeName> = members.iter().collect();
        (distinct.len() == members.len()).then_some(())?;
        Some(Self {
            lane,
            blocks,
            plan: Arc::new(StripedPlan::uniform(plan, sources.len())),
            members,
            sources,
            sinks,
            sink_members,
            stripes: stripes.to_vec(),
        })
    }
}
