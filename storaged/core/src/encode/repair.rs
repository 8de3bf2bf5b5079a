//! Healing: what a protected lane has lost is put back by the node that leads it, without the trainer. What members
//! hold is asked again whenever they come up.

use std::collections::BTreeSet;

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Holding, Lane, PeerMessage, SessionKind};
use storaged_wire::shape::RepairShape;
use storaged_wire::{
    CheckpointState, EnclosuresHeld, ManifestBytes, Namespace, NodeName, SessionId,
};

use super::session::LanePlace;
use crate::api::Now;
use crate::context::Context;
use crate::encode::SessionGoal;
use crate::encode::Sessions;
use crate::limits;

/// The blocks of a lane as its members hold them.
#[derive(Debug, Default)]
struct FoundBlocks {
    available: Vec<usize>,
    wanted: Vec<(u32, NodeName)>,
}

impl Sessions {
    /// Puts back what up members of a protected lane do not hold.
    pub(crate) fn repair_lane(
        &mut self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
        cx: &mut Context,
    ) {
        if planted!("nothing_is_healed") {
            return;
        }
        if let Some((kind, healed)) = self.next_heal(key, manifest, lane, blocks, cx) {
            self.lead(
                key.clone(),
                manifest,
                lane,
                kind,
                SessionGoal::Heal(healed),
                cx,
            );
        }
    }

    /// The session that puts back what is lost, and whose blocks those are; none if there is nothing to do, or not now.
    fn next_heal(
        &mut self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
        cx: &mut Context,
    ) -> Option<(SessionKind, Vec<NodeName>)> {
        if self.encodes_newer(key, lane) {
            return None;
        }
        let FoundBlocks {
            available,
            mut wanted,
        } = self.find_blocks(key, manifest, lane, blocks, cx)?;
        if wanted.is_empty() {
            return None;
        }
        let place = LanePlace::of(manifest, lane);
        let progress = &self.lanes[&place];
        let first = self.trusted(place, blocks, &available, cx);
        // Once bytes came out wrong, one block at a time and checked.
        let shape = if progress.wary {
            wanted.truncate(1);
            RepairShape::Direct
        } else {
            repair_shape(wanted.len())
        };
        // With too few others, whoever was blamed is asked again: it may have been slow, or blamed wrongly.
        let survivors = self.survivors(blocks, [&first, &available], wanted.len(), shape, cx)?;
        let healed = wanted.iter().map(|(_, node)| node.clone()).collect();
        let kind = SessionKind::Repair {
            lane,
            survivors: survivors.into_iter().map(|block| block as u32).collect(),
            wanted,
            stripes: Vec::new(),
            shape,
        };
        Some((kind, healed))
    }

    /// Whether the session of a lane is still the right one.
    pub(crate) fn revalidate(
        &mut self,
        session: SessionId,
        manifest: &ManifestBytes,
        blocks: &LaneBlocks,
        state: CheckpointState,
        cx: &mut Context,
    ) {
        let Some(led) = self.led.get(&session) else {
            return;
        };
        let (key, lane) = (led.key.clone(), led.lane);
        match led.purpose.clone() {
            // A node that was restarted hears first that there is the checkpoint, and then that it is protected.
            SessionGoal::Encode if state >= CheckpointState::Protected => {
                self.interrupt_led(session, cx);
                self.repair_lane(&key, manifest, lane, blocks, cx);
            }
            SessionGoal::Heal(healed) => self.extend_repair(session, &healed, manifest, blocks, cx),
            SessionGoal::Encode | SessionGoal::Open(_) => {}
        }
    }

    /// While a lane heals: a member that has come up and has lost its block too is healed along with the others, by one
    /// session for all. One after the other each would take as long as all together. What the session has put in
    /// place till now stays.
    fn extend_repair(
        &mut self,
        session: SessionId,
        healed: &[NodeName],
        manifest: &ManifestBytes,
        blocks: &LaneBlocks,
        cx: &mut Context,
    ) {
        let Some(led) = self.led.get(&session) else {
            return;
        };
        // Checked block by block, one is healed at a time.
        let SessionKind::Repair { shape, .. } = led.record.kind else {
            return;
        };
        if shape == RepairShape::Direct {
            return;
        }
        let (key, lane) = (led.key.clone(), led.lane);
        let Some((kind, all)) = self.next_heal(&key, manifest, lane, blocks, cx) else {
            return;
        };
        if all.iter().any(|node| !healed.contains(node)) {
            self.interrupt_led(session, cx);
            self.lead(key, manifest, lane, kind, SessionGoal::Heal(all), cx);
        }
    }

    /// Whether this node is at encoding the same lane of a newer checkpoint: that makes healing this one needless.
    fn encodes_newer(&self, key: &CheckpointKey, lane: Lane) -> bool {
        self.led.values().any(|led| {
            let of_namespace = led.key.namespace == key.namespace && led.key > *key;
            of_namespace && led.lane == lane && led.purpose == SessionGoal::Encode
        })
    }

    /// Which blocks are there, and which up members lack theirs; none before all have said what they hold.
    fn find_blocks(
        &mut self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
        cx: &mut Context,
    ) -> Option<FoundBlocks> {
        let holders: Vec<(usize, NodeName)> = (0..blocks.blocks())
            .filter_map(|block| Some((block, blocks.node(block)?.clone())))
            .collect();
        let place = LanePlace::of(manifest, lane);
        self.ask_unknown_holders(&key.namespace, place, &holders, cx);
        self.learn_own_blocks(place, key, blocks, cx);
        let progress = &self.lanes[&place];
        let mut found = FoundBlocks::default();
        for (block, node) in &holders {
            match progress.held.get(node) {
                _ if !cx.is_up(node) => {}
                None => return None,
                Some(held) if held.contains(block) => found.available.push(*block),
                Some(_) if *block >= blocks.data.len() && planted!("no_top_up") => {}
                Some(_) if cx.is_cordoned(node) && planted!("cordoned_not_repaired") => {}
                Some(_) => found.wanted.push((*block as u32, node.clone())),
            }
        }
        Some(found)
    }

    /// Of these blocks of a lane, those whose nodes were neither blamed nor are slow.
    pub(crate) fn trusted(
        &self,
        place: LanePlace,
        blocks: &LaneBlocks,
        available: &[usize],
        cx: &Context,
    ) -> Vec<usize> {
        let suspects = self.lanes.get(&place).map(|progress| &progress.suspects);
        let is_trusted = |block: &usize| {
            let node = blocks.node(*block);
            node.is_some_and(|node| {
                suspects.is_none_or(|nodes| !nodes.contains(node)) && !self.links(cx).is_slow(node)
            })
        };
        available.iter().copied().filter(is_trusted).collect()
    }

    fn ask_unknown_holders(
        &mut self,
        namespace: &Namespace,
        place: LanePlace,
        holders: &[(usize, NodeName)],
        cx: &mut Context,
    ) {
        let now = cx.now;
        for (_, node) in holders {
            if node == cx.me() || !cx.is_up(node) {
                continue;
            }
            let progress = self.lanes.entry(place).or_default();
            let asked = progress
                .asked_at
                .get(node)
                .is_some_and(|at| now.since(*at) < limits::REPEAT_MS);
            if progress.held.contains_key(node) || asked {
                continue;
            }
            progress.asked_at.insert(node.clone(), now);
            let namespace = namespace.clone();
            cx.send(
                node,
                PeerMessage::HoldingsQuery {
                    query: limits::REPAIR_QUERY,
                    namespace,
                },
            );
        }
    }

    fn learn_own_blocks(
        &mut self,
        place: LanePlace,
        key: &CheckpointKey,
        blocks: &LaneBlocks,
        cx: &mut Context,
    ) {
        let me = cx.me().clone();
        let holding = cx
            .checkpoints
            .get(key)
            .and_then(|checkpoint| checkpoint.holding(EnclosuresHeld::NotAll));
        let held = holding.map(|holding| blocks_held(blocks, place.lane, &holding));
        let progress = self.lanes.entry(place).or_default();
        progress.held.insert(me, held.unwrap_or_default());
    }

    /// A peer said for repairs what it holds.
    pub(crate) fn holdings_told(
        &mut self,
        from: &NodeName,
        holdings: &[Holding],
        cx: &mut Context,
    ) {
        let all = cx.checkpoints.keys().map(|key| key.namespace.clone());
        let mut namespaces: Vec<Namespace> = all.collect();
        namespaces.dedup();
        // An answer without holdings is of whichever namespace was asked: it says that nothing is held.
        if let Some(holding) = holdings.first() {
            namespaces.retain(|namespace| *namespace == holding.key.namespace);
        }
        for namespace in namespaces {
            self.lanes_learn(from, &namespace, holdings, cx);
        }
    }

    fn lanes_learn(
        &mut self,
        from: &NodeName,
        namespace: &Namespace,
        holdings: &[Holding],
        cx: &mut Context,
    ) {
        let places: Vec<LanePlace> = self.lanes.keys().copied().collect();
        for place in places {
            let (name, lane) = (place.manifest, place.lane);
            let Some(manifest) = cx.manifest_named(name) else {
                continue;
            };
            if manifest.manifest().namespace != *namespace {
                continue;
            }
            let Some(blocks) = LaneBlocks::of(&manifest, lane) else {
                continue;
            };
            let held = holdings
                .iter()
                .find(|holding| holding.manifest == name)
                .map(|holding| blocks_held(&blocks, lane, holding));
            let progress = self.lanes.entry(place).or_default();
            let held = held.unwrap_or_default();
            let has_lost = |known: &BTreeSet<usize>| !known.is_subset(&held);
            if progress.asked_at.remove(from).is_some() {
                progress.held.insert(from.clone(), held);
            } else if progress.held.get(from).is_some_and(has_lost) {
                // It says so by itself. What a session has put back while that was on its way it did not know: it is asked.
                progress.held.remove(from);
            }
        }
        self.lead_lanes(cx);
    }

    pub(crate) fn lanes_forget(&mut self, node: &NodeName) {
        for progress in self.lanes.values_mut() {
            if !planted!("blocks_of_the_dead_counted") {
                progress.held.remove(node);
            }
            progress.asked_at.remove(node);
        }
    }

    /// A peer came up, perhaps with empty RAM: it gets the manifests that concern it, and what it holds is asked.
    pub(crate) fn peer_may_have_lost(&mut self, node: &NodeName, cx: &mut Context) {
        for (key, manifest) in cx.committed() {
            if cx.stakeholders(&manifest).contains(node) {
                cx.tell(&key, node);
            }
        }
        cx.announce_all();
        // What failed because it was gone need not wait any more.
        for progress in self.lanes.values_mut() {
            progress.retry_at = Now::default();
            progress.failures = 0;
        }
        self.lead_lanes(cx);
    }
}

/// How so many wanted blocks are brought back (`encode::helpers` has the arithmetic).
fn repair_shape(wanted: usize) -> RepairShape {
    if wanted <= 1 {
        RepairShape::Chain
    } else {
        RepairShape::Gather
    }
}

/// The blocks of a lane that a holding has.
pub(crate) fn blocks_held(blocks: &LaneBlocks, lane: Lane, holding: &Holding) -> BTreeSet<usize> {
    let k = blocks.data.len();
    let data = blocks.data.iter().enumerate().filter_map(|(block, entry)| {
        let shard = entry.as_ref()?;
        holding.shards.contains(&shard.rank).then_some(block)
    });
    let parity = holding
        .parity
        .iter()
        .filter(|(of, _)| *of == lane)
        .map(|(_, index)| k + *index as usize);
    data.chain(parity).collect()
}
