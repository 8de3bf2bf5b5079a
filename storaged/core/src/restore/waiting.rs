//! What waiting would gain: which step becomes restorable if nodes that have not answered return with what they held in RAM. It
//! is computed from manifests and from what the nodes that answered hold, lane by lane, so that no combination of nodes need be
//! tried. What cannot be known is not promised: a step whose manifest nobody has, and parity of one that was never protected.

use std::collections::BTreeSet;

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Lane};
use storaged_wire::verdict::{HeldBasis, Returning, Verdict, WaitingGain};
use storaged_wire::{CheckpointState, Digest, ManifestBytes, NodeName, ShardEntry};

use super::cluster_view::ShardSources;
use super::plan::SurveyInProgress;
use crate::context::Context;
use crate::limits;

/// What can be had of a step without waiting.
#[derive(Debug, Clone, Copy)]
pub(super) struct HadNow<'a> {
    pub key: &'a CheckpointKey,
    pub verdict: Verdict,
}

/// A checkpoint, what of it can be had, and who has not answered.
struct Absent<'a> {
    manifest: &'a ManifestBytes,
    sources: ShardSources<'a>,
    silent: &'a BTreeSet<NodeName>,
    homes: Vec<NodeName>,
    basis: HeldBasis,
}

impl Context {
    /// The newest step first, and of one step what takes the fewest nodes first.
    pub(super) fn waiting_gains(
        &self,
        plan: &SurveyInProgress,
        had: Option<HadNow<'_>>,
    ) -> Vec<WaitingGain> {
        let silent: BTreeSet<NodeName> = self.silent(plan).into_iter().collect();
        let mut gains = Vec::new();
        if silent.is_empty() {
            return gains;
        }
        let candidates = self.candidates(plan).into_iter();
        let better = candidates.filter(|(key, _)| had.is_none_or(|had| *key >= had.key));
        for (key, name) in better.take(limits::WAITING_STEPS_MAX) {
            let now = had.filter(|had| had.key == key).map(|had| had.verdict);
            let gained = self.gained(plan, key, name, &silent).into_iter();
            gains.extend(gained.filter(|gain| now.is_none_or(|now| gain.verdict < now)));
        }
        gains
    }

    /// What the return of silent nodes would make of a step; nothing where it would not make it whole.
    pub(super) fn gained(
        &self,
        plan: &SurveyInProgress,
        key: &CheckpointKey,
        name: Digest,
        silent: &BTreeSet<NodeName>,
    ) -> Vec<WaitingGain> {
        let Some(manifest) = plan.survey.manifests.get(&name) else {
            return Vec::new();
        };
        let at = key.mark();
        let is_protected = plan.survey.states.get(&name) == Some(&CheckpointState::Protected)
            || self.bar(plan) == Some(at);
        let absent = Absent {
            manifest,
            sources: plan.survey.sources(manifest),
            silent,
            homes: self.homes_of(key),
            basis: if is_protected || planted!("parity_of_the_unprotected_promised") {
                HeldBasis::Coded
            } else {
                HeldBasis::Sealed
            },
        };
        let gain = |verdict, returning| WaitingGain {
            at,
            verdict,
            returning,
        };
        let in_place = absent.in_place().ok();
        let decoded = absent
            .decoded()
            .ok()
            .filter(|it| Some(it) != in_place.as_ref());
        let decoded = decoded.map(|it| gain(Verdict::Recover, it));
        let in_place = in_place.map(|it| gain(Verdict::RecoverInPlace, it));
        let all = decoded.into_iter().chain(in_place);
        // What needs nobody to return is not gained by waiting.
        all.filter(|gain| !gain.returning.is_empty()).collect()
    }
}

/// A node has answered and has lost what is lacking: nobody brings it back into RAM by returning.
struct LostForGood;

impl Absent<'_> {
    /// Who must return for every shard to be where it was sealed.
    fn in_place(&self) -> Result<Vec<Returning>, LostForGood> {
        let is_there = |entry: &ShardEntry| self.sources.holders(entry.rank).contains(&entry.node);
        let shards = self.manifest.manifest().shards.iter();
        let away = shards.filter(|entry| !is_there(entry));
        let all = self.all_of(away.map(|entry| &entry.node))?;
        self.with_description(all.into_iter().collect())
    }

    /// Who must return for every shard to be somewhere, or to be decoded.
    fn decoded(&self) -> Result<Vec<Returning>, LostForGood> {
        let mut returning = BTreeSet::new();
        let mut uncoded = Vec::new();
        for entry in &self.manifest.manifest().shards {
            if !self.sources.holders(entry.rank).is_empty() {
                continue;
            }
            let lane = LaneBlocks::find(self.manifest, entry.rank).map(|(lane, _)| lane);
            let blocks = lane.and_then(|lane| LaneBlocks::of(self.manifest, lane));
            match lane.zip(blocks) {
                Some((lane, blocks)) => returning.extend(self.lane_needs(lane, &blocks)?),
                None => uncoded.push(&entry.node),
            }
        }
        returning.extend(self.all_of(uncoded.into_iter())?);
        self.with_description(returning)
    }

    /// As many blocks of a lane as are lacking, of those that silent nodes held.
    fn lane_needs(
        &self,
        lane: Lane,
        blocks: &LaneBlocks,
    ) -> Result<Option<Returning>, LostForGood> {
        let there = blocks.readable(&self.sources.available(lane, blocks));
        let lacking = blocks.needed().saturating_sub(there.len());
        if lacking == 0 {
            return Ok(None);
        }
        let is_parity = |block: usize| block >= blocks.data.len();
        let was_held = |block: &usize| !is_parity(*block) || self.basis == HeldBasis::Coded;
        let absent = (0..blocks.blocks()).filter(|block| !there.contains(block));
        let absent = absent.filter(|block| !blocks.is_zeros(*block) && was_held(block));
        let mut of = BTreeSet::new();
        let mut basis = HeldBasis::Sealed;
        for block in absent {
            let node = blocks.node(block).filter(|node| self.may_return(node));
            let Some(node) = node else {
                continue;
            };
            of.insert(node.clone());
            if is_parity(block) {
                basis = HeldBasis::Coded;
            }
        }
        if lacking > of.len() {
            return Err(LostForGood);
        }
        Ok(Some(some_of(lacking, of, basis)))
    }

    /// All of these.
    fn all_of<'a>(
        &self,
        nodes: impl Iterator<Item = &'a NodeName>,
    ) -> Result<Option<Returning>, LostForGood> {
        let nodes: BTreeSet<NodeName> = nodes.cloned().collect();
        if !nodes.iter().all(|node| self.may_return(node)) || nodes.len() > limits::WAITED_FOR_MAX {
            return Err(LostForGood);
        }
        let any = nodes.len();
        Ok((any > 0).then(|| some_of(any, nodes, HeldBasis::Sealed)))
    }

    fn may_return(&self, node: &NodeName) -> bool {
        self.silent.contains(node) || planted!("restarted_nodes_promised")
    }

    /// The same with a home node that has the schema and the metadata, if nobody who answered has them.
    fn with_description(
        &self,
        mut returning: BTreeSet<Returning>,
    ) -> Result<Vec<Returning>, LostForGood> {
        if !self.sources.is_described() {
            let homes = self.homes.iter().filter(|home| self.may_return(home));
            let of: BTreeSet<NodeName> = homes.cloned().collect();
            if of.is_empty() {
                return Err(LostForGood);
            }
            returning.insert(some_of(1, of, HeldBasis::Sealed));
        }
        Ok(returning.into_iter().collect())
    }
}

fn some_of(any: usize, of: BTreeSet<NodeName>, basis: HeldBasis) -> Returning {
    Returning {
        any: u32::try_from(any).unwrap_or(u32::MAX),
        of: of.into_iter().collect(),
        basis,
    }
}
