//! The beginning of a session at a member: from what the leader says, the plan, the stripes that move, and the work
//! that the executor gets.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_plan::{Derived, DirtyMap, StripedPlan};
use storaged_wire::local::Rung;
use storaged_wire::peer::{CheckpointKey, PeerMessage, SessionFault, SumChecks};
use storaged_wire::shape::RepairShape;
use storaged_wire::{Digest, Manifest, NodeName, Rank, SessionId};

use super::fingerprints;
use super::session::{
    Beginning, Closing, JoinedSession, MemberPhase, SessionPlace, SinkState, SlotOwner,
};
use super::stripe_maps::from_wire;
use super::tables::Tables;
use crate::api::{ExpectedShard, Output, SessionPurpose, SessionWork, Sink, SlotShard};
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::Event;
use crate::restore::ComingShard;

impl Sessions {
    pub(crate) fn begin(
        &mut self,
        from: &NodeName,
        session: SessionId,
        beginning: Beginning,
        cx: &mut Context,
    ) {
        let place = SessionPlace::of(from, session);
        let Some(joined) = self.joined.get(&place) else {
            return;
        };
        if joined.phase != MemberPhase::Ready {
            return;
        }
        let Some(manifest) = cx
            .checkpoints
            .get(&joined.key)
            .and_then(|c| c.manifest.clone())
        else {
            return;
        };
        let work = planned(from, joined, beginning)
            .and_then(|planned| cx.work(&place, joined, manifest.manifest(), planned));
        match work {
            Ok(work) => {
                if let Some(joined) = self.joined.get_mut(&place) {
                    joined.phase = MemberPhase::Running;
                    // What is computed again counts as made only once it is.
                    joined.made = DirtyMap::clean(joined.stripe_count);
                    joined.made.mark_all(work.carried.iter().cloned());
                    if let SinkState::Shard { rank, .. } = &joined.kept {
                        cx.emit(Event::ShardComes(manifest.name(), *rank));
                    }
                }
                cx.out.push(Output::Run(work));
            }
            Err(fault) => {
                self.leave(&place, Closing::BrokenOff, cx);
                cx.send(from, PeerMessage::Failed { session, fault });
            }
        }
    }

    /// Slots of this node that running sessions fill with a shard.
    pub(crate) fn coming(&self, name: Digest, rank: Rank, cx: &Context) -> Vec<ComingShard> {
        let Some(manifest) = cx.manifest_named(name) else {
            return Vec::new();
        };
        let key = CheckpointKey::of(manifest.manifest());
        let coming = |joined: &JoinedSession| {
            let SinkState::Shard {
                rank: kept,
                slot,
                length,
                belongs_to,
                ..
            } = joined.kept
            else {
                return None;
            };
            if kept != rank || joined.key != key || !joined.is_running() {
                return None;
            }
            Some(ComingShard {
                slot,
                is_of_opening: belongs_to == SlotOwner::Opening,
                length,
                chunk: manifest.manifest().chunk,
                leaves: cx.leaves_here(joined, rank)?,
                rung: match joined.derived.sources.as_slice() {
                    [_] => Rung::PeerRam,
                    _ => Rung::Decoded,
                },
            })
        };
        self.joined.values().filter_map(coming).collect()
    }

    /// The stripes of a block to keep that are asked for and are not there yet.
    pub(super) fn lacking(
        &self,
        kept: &SinkState,
        derived: &Derived,
        made: &DirtyMap,
    ) -> Option<DirtyMap> {
        let mut lacking = DirtyMap::clean(made.chunks());
        lacking.mark_all(stripe_ranges(&derived.stripes, made.chunks()));
        match kept {
            SinkState::Nothing => return None,
            SinkState::Parity { .. } => lacking.remove(made),
            SinkState::Shard { slot, .. } => {
                if let Some(filled) = self.filled(*slot) {
                    lacking.remove(filled);
                }
            }
        }
        Some(lacking)
    }
}

impl Context {
    fn work(
        &self,
        place: &SessionPlace,
        joined: &JoinedSession,
        manifest: &Manifest,
        planned: PlannedStripes,
    ) -> Result<SessionWork, SessionFault> {
        let PlannedStripes { plan, stripes } = planned;
        let tables = joined.fetch.tables();
        let keep = match &joined.kept {
            SinkState::Nothing => None,
            SinkState::Parity { index, set, basis } => Some(Sink::Parity {
                set: *set,
                basis: *basis,
                prints: self.parity_prints(joined, manifest, *index)?,
            }),
            SinkState::Shard {
                rank, slot, length, ..
            } => {
                let leaves = tables
                    .leaves(*rank)
                    .cloned()
                    .or_else(|| self.leaves_known(&joined.key, *rank));
                let (slot, length) = (*slot, *length);
                let leaves = leaves.ok_or(SessionFault::NoBlocks)?;
                Some(Sink::Shard(SlotShard {
                    slot,
                    length,
                    chunk: manifest.chunk,
                    leaves,
                    prints: Arc::default(),
                }))
            }
        };
        let mut carried = joined.made.clone();
        let mut moved = DirtyMap::clean(joined.stripe_count);
        moved.mark_all(stripes.iter().cloned());
        carried.remove(&moved);
        Ok(SessionWork {
            leader: place.leader.clone(),
            session: place.session,
            purpose: match joined.derived.shape {
                Some(_) => SessionPurpose::Repair,
                None => SessionPurpose::Encode,
            },
            urgency: joined.urgency,
            plan,
            members: joined.derived.members.clone().into(),
            member: joined.member,
            chunk: manifest.chunk,
            lane_length: joined.derived.blocks.length,
            stripes,
            source: joined.source.clone(),
            proofs: match (&keep, joined.derived.shape, joined.derived.checks) {
                (Some(_), Some(RepairShape::Direct), _) => {
                    self.proofs(joined, tables, |_| Some(Arc::default()))?
                }
                (.., SumChecks::Every) => {
                    self.proofs(joined, tables, |rank| self.prints_here(joined, rank))?
                }
                (.., SumChecks::Parity) => BTreeMap::new(),
            },
            keep,
            carried: carried.runs(),
        })
    }

    /// What the members' shards must be, as far as it is known. An encode that checks every sum needs all of it.
    fn proofs(
        &self,
        joined: &JoinedSession,
        tables: &Tables,
        prints: impl Fn(Rank) -> Option<Arc<[Fingerprint]>>,
    ) -> Result<BTreeMap<usize, ExpectedShard>, SessionFault> {
        let proof = |block: usize| {
            let shard = joined.derived.blocks.data.get(block)?.as_ref()?;
            let leaves = tables.leaves(shard.rank).cloned();
            let leaves = leaves.or_else(|| self.leaves_known(&joined.key, shard.rank))?;
            Some(ExpectedShard {
                length: shard.length,
                leaves,
                prints: prints(shard.rank)?,
            })
        };
        let mut proofs = BTreeMap::new();
        for (member, block) in joined.derived.sources.iter().enumerate() {
            match (proof(*block), joined.derived.checks) {
                (Some(proof), _) => drop(proofs.insert(member, proof)),
                (None, SumChecks::Parity) => {}
                (None, SumChecks::Every) => {
                    return Err(fingerprints::missing(&joined.derived.members[member]));
                }
            }
        }
        Ok(proofs)
    }
}

/// What is computed in a session, and of which stripes.
#[derive(Debug)]
struct PlannedStripes {
    plan: Arc<StripedPlan>,
    stripes: Vec<Range<u64>>,
}

/// The plan and the stripes of a session, as its leader began it.
fn planned(
    leader: &NodeName,
    joined: &JoinedSession,
    beginning: Beginning,
) -> Result<PlannedStripes, SessionFault> {
    let Beginning { stripes, shape } = beginning;
    let wrong = |reason: &str| SessionFault::Neighbour {
        node: leader.clone(),
        reason: reason.into(),
    };
    let plan = joined.derived.plan(shape.as_ref());
    let plan = plan.ok_or_else(|| wrong("began a session with a shape that does not fit"))?;
    let count = joined.stripe_count;
    let stripes = match stripes {
        None => stripe_ranges(&joined.derived.stripes, count),
        Some(map) => {
            let map = from_wire(&map, count);
            map.ok_or_else(|| wrong("began a session with a map of stripes that does not fit"))?
                .runs()
        }
    };
    Ok(PlannedStripes { plan, stripes })
}

/// Stripes as ranges within `0..count`; all of them if none are named.
fn stripe_ranges(named: &[(u64, u64)], count: u64) -> Vec<Range<u64>> {
    if named.is_empty() {
        return std::iter::once(0..count)
            .filter(|range| !range.is_empty())
            .collect();
    }
    named
        .iter()
        .map(|(first, length)| *first..first.saturating_add(*length).min(count))
        .filter(|range| !range.is_empty())
        .collect()
}
