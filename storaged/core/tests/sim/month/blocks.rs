//! What `protected` is worth: the blocks that really lie in the RAM of all processes are counted, for every set of m
//! losses, while the word is shown; and what was protected is there as long as no more than m nodes are lost.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::Digest;
use storaged_core::Shown;
use storaged_plan::{LaneBlocks, lanes_of};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, EnclosuresHeld, Namespace, Rank};

use super::super::world::World;
use super::Unequal;
use super::promises::{Doubt, Floor};
use crate::sim::SCRUB_MS;
use crate::testkit::Pid;

/// Until a loss is found out, told and no longer shown: the idle timeout, a second until it is said again, and one more
/// for whoever was asked in between.
const FOUND_OUT_MS: u64 = 6_000;

/// As long as a node is down it may come back with what it had, and the word stays: where one is restarted after the other, up to so much more.
const DOWN_MS_MAX: u64 = 6_000;

/// For so long a step that was called protected waits for nodes that are gone, and what it takes to find out that they are.
const GIVEN_UP_MS: u64 = 6_000;

/// Every set of `m` of these nodes.
fn sets(nodes: &[usize], m: usize) -> impl Iterator<Item = u32> + '_ {
    let chosen = (0..1u32 << nodes.len()).filter(move |set| set.count_ones() as usize == m);
    chosen.map(|set| {
        let of_set = nodes.iter().enumerate();
        let of_set = of_set.filter(|(at, _)| set & (1 << at) != 0);
        of_set.map(|(_, node)| 1 << node).sum()
    })
}

/// The newest checkpoint that anybody shows as protected.
fn newest_protected(
    held: &BTreeMap<Digest, Vec<(usize, Shown)>>,
) -> Option<(CheckpointKey, Digest)> {
    let all = held.iter().filter_map(|(name, all)| {
        let mut said = all.iter().map(|(_, shown)| shown);
        let protected = said.find(|shown| shown.state >= CheckpointState::Protected)?;
        Some((protected.key.clone(), *name))
    });
    all.max()
}

impl World {
    /// What is in the RAM of all processes, by manifest: who shows it and what it holds of it.
    fn held(&self, namespace: &Namespace) -> BTreeMap<Digest, Vec<(usize, Shown)>> {
        let mut held: BTreeMap<Digest, Vec<(usize, Shown)>> = BTreeMap::new();
        for (node, process) in self.processes.iter().enumerate() {
            let Some(process) = process else { continue };
            let generation = process.generation;
            let pid = Pid { node, generation };
            for mut shown in process.node.shown() {
                let name = shown.manifest;
                shown.shards.retain(|shard| {
                    process.slots.contains_key(&shard.1)
                        && !name.is_some_and(|name| self.is_rotten_shard(pid, name, shard.1))
                });
                shown.parity.retain(|(_, _, set)| {
                    process.parity.contains_key(set) && !self.is_rotten_parity(pid, *set)
                });
                if let Some(name) = shown.manifest
                    && shown.key.namespace == *namespace
                {
                    held.entry(name).or_default().push((node, shown));
                }
            }
        }
        held
    }

    /// Whether a checkpoint can be restored from the RAM of all nodes but those of a set.
    fn is_whole_without(&self, name: Digest, held: &[(usize, Shown)], lost: u32) -> bool {
        let Some(month) = self.scene.month.as_deref() else {
            return false;
        };
        let Some(manifest) = month.promises.manifests.get(&name) else {
            return false;
        };
        let left = || held.iter().filter(|(node, _)| lost & (1 << node) == 0);
        let mut lanes = lanes_of(manifest).into_iter();
        let mut described = left().map(|(_, shown)| shown.enclosures);
        let has = |rank: Rank| left().any(|(_, it)| it.shards.iter().any(|(of, _)| *of == rank));
        // A shard that no group codes is on its own node and nowhere else.
        let all = manifest.manifest().shards.iter();
        let mut uncoded = all.filter(|it| LaneBlocks::find(manifest, it.rank).is_none());
        described.any(|it| it == EnclosuresHeld::All)
            && uncoded.all(|shard| has(shard.rank))
            && lanes.all(|lane| {
                let Some(blocks) = LaneBlocks::of(manifest, lane) else {
                    return false;
                };
                let mut there = BTreeSet::new();
                for (_, shown) in left() {
                    let has = |rank: Rank| shown.shards.iter().any(|(of, _)| *of == rank);
                    let data = blocks.data.iter().enumerate();
                    there.extend(data.filter_map(|(block, entry)| {
                        entry
                            .as_ref()
                            .filter(|entry| has(entry.rank))
                            .map(|_| block)
                    }));
                    let parity = shown.parity.iter().filter(|(of, _, _)| *of == lane);
                    there.extend(parity.map(|(_, i, _)| blocks.data.len() + *i as usize));
                }
                there.len() >= blocks.needed()
            })
    }

    /// Of what is held: a machine that has lost its place takes what it has with it, be it now or when it hears of that.
    fn keep_what_stays(&mut self, held: &mut Vec<(usize, Shown)>) {
        let machines = self.machines();
        held.retain(|(node, _)| machines.contains(node));
    }

    /// The newest checkpoint that RAM or the durable tier can give back.
    pub(super) fn restorable(&mut self, namespace: &Namespace) -> Option<CheckpointKey> {
        let mut held = self.held(namespace);
        for all in held.values_mut() {
            self.keep_what_stays(all);
        }
        held.retain(|_, all| !all.is_empty());
        let whole = held
            .iter()
            .filter(|(name, held)| self.is_whole_without(**name, held, 0));
        let in_ram = whole.map(|(_, held)| held[0].1.key.clone()).max();
        in_ram.max(self.tier.newest(namespace).cloned())
    }

    fn nodes_up(&self) -> Vec<usize> {
        let all = 0..self.processes.len();
        all.filter(|node| self.is_up(*node)).collect()
    }

    /// Whether a step bears every set of so many losses: in the RAM of the machines that have a place.
    pub(super) fn bears_losses(&mut self, key: &CheckpointKey, losses: usize) -> bool {
        let up = self.nodes_up();
        let held = self.held(&key.namespace);
        let Some((name, all)) = held.into_iter().find(|(_, all)| all[0].1.key == *key) else {
            return false;
        };
        let mut stays = all;
        self.keep_what_stays(&mut stays);
        self.bears_every(losses, &up, name, &stays)
    }

    /// Whether of each job the newest step that anybody shows as protected bears so many losses at this instant.
    pub(super) fn what_is_shown_bears(&mut self, losses: usize) -> bool {
        self.namespaces().iter().all(|namespace| {
            let newest = newest_protected(&self.held(namespace));
            newest.is_none_or(|(key, _)| self.bears_losses(&key, losses))
        })
    }

    /// Whether it bears every set of so many losses of these nodes. Where there are fewer nodes it bears no such set.
    fn bears_every(
        &self,
        losses: usize,
        up: &[usize],
        name: Digest,
        held: &[(usize, Shown)],
    ) -> bool {
        let mut lost = sets(up, losses);
        losses <= up.len() && lost.all(|lost| self.is_whole_without(name, held, lost))
    }

    /// Spares, and machines that have gone for good, are not waited for.
    fn lacks_one_of_its_machines(&mut self, up: &[usize]) -> bool {
        self.machines().iter().any(|machine| !up.contains(machine))
    }

    /// What is shown as protected bears every set of as many losses as is said, at this instant.
    pub(super) fn protected_bears_m_losses(&mut self, namespace: &Namespace) {
        let (now, m) = (self.now, self.scene.limits.m);
        let up = self.nodes_up();
        let is_one_down = self.lacks_one_of_its_machines(&up);
        let held = self.held(namespace);
        let Some((key, name)) = newest_protected(&held) else {
            return;
        };
        let all = &held[&name];
        let said = all
            .iter()
            .filter(|(node, it)| it.state >= CheckpointState::Protected && self.sees_most(*node));
        let said = said.map(|(_, it)| it.bears.map_or(m, |bears| bears as usize).min(m));
        // That it bears none says as well that it may be lost already: a node that has just started counts what it holds by and by.
        let said = said.filter(|bears| *bears > 0);
        // Of a process that is paused, and of one that is cut off from most others, nobody learns that what it showed last was lost since.
        let said = said.max();
        let bears = |losses| self.bears_every(losses, &up, name, all);
        let as_said = said.is_none_or(bears);
        let mut stays = all.clone();
        self.keep_what_stays(&mut stays);
        let stay = |losses| self.bears_every(losses, &up, name, &stays);
        let worth = said.and_then(|said| self.worth(said, stay));
        let fully = stay(m);
        let durable = self.tier.published.contains_key(&key);
        let equal = self.month().scenario.unequal == Unequal::Nothing;
        let rots = self.has_rot();
        let promises = &mut self.month().promises;
        let progress = promises.progress.get(namespace);
        if progress.is_none_or(|(before, _)| key > *before) {
            let progress = (key.clone(), now);
            promises.progress.insert(namespace.clone(), progress);
        }
        let floor = promises.floors.get(namespace);
        let is_newer = floor.is_none_or(|floor| floor.key < key);
        // An older one would hide that the newer is gone, unless it may be.
        let may_fall = floor.is_none_or(|floor| floor.key <= key || floor.bears_no_more());
        let borne = if fully && may_fall {
            Some((m, BTreeSet::new()))
        } else {
            worth.filter(|_| is_newer)
        };
        if let Some((bears, lost)) = borne {
            let floor = Floor {
                key: key.clone(),
                bears,
                lost,
                cut_off: BTreeSet::new(),
                is_without_home: false,
            };
            promises.floors.insert(namespace.clone(), floor);
        }
        if as_said || !equal {
            promises.doubts.remove(namespace);
        }
        let Some(said) = said.filter(|_| !as_said && !durable && equal) else {
            return;
        };
        // Of whichever step: a word that is wrong of each for as long as it is the newest is wrong.
        let new = Doubt {
            since: now,
            seen: now,
            down_ms: 0,
        };
        let doubt = promises.doubts.entry(namespace.clone()).or_insert(new);
        if is_one_down {
            doubt.down_ms += now - doubt.seen;
        }
        doubt.seen = now;
        let Doubt { since, down_ms, .. } = *doubt;
        let found_out_ms =
            FOUND_OUT_MS + down_ms.min(DOWN_MS_MAX) + if rots { SCRUB_MS } else { 0 };
        let by: Vec<_> = (all.iter())
            .map(|(node, it)| (node, it.state, it.bears))
            .collect();
        assert!(
            now - since < found_out_ms,
            "protected bears every {said} losses: {key:?} is shown at {now} ms and has not since {since}: {by:?}"
        );
    }

    /// What a step is promised to bear that is said to bear so many losses, and what is lost of that already.
    fn worth(
        &self,
        said: usize,
        stays: impl Fn(usize) -> bool,
    ) -> Option<(usize, BTreeSet<usize>)> {
        if said == 0 || stays(said) {
            return (said > 0).then(|| (said, BTreeSet::new()));
        }
        // Machines that were lost so shortly before are still counted on: what is said is true but for those, and they are lost since.
        let lost = self.just_lost();
        let left = said.saturating_sub(lost.len());
        (left < said && stays(left)).then_some((said, lost))
    }

    /// Machines of whose loss nobody need have heard yet.
    fn just_lost(&self) -> BTreeSet<usize> {
        let month = self.scene.month.as_deref();
        let lost_at = month.into_iter().flat_map(|month| &month.promises.lost_at);
        let is_recent = |(_, at): &(&usize, &u64)| self.now - **at < FOUND_OUT_MS;
        lost_at.filter(is_recent).map(|(node, _)| *node).collect()
    }

    /// A node that sees at least half of the others.
    fn sees_most(&self, node: usize) -> bool {
        let Some(month) = self.scene.month.as_deref() else {
            return false;
        };
        let newest = month.registry.newest();
        let seen = newest.machines().filter(|it| self.is_linked(node, *it));
        !self.is_paused(node) && 2 * seen.count() >= newest.places.len() - 1
    }

    /// Machines that most others have not reached for so long that their blocks are waited for no more, and whoever alone knows a step to be
    /// protected and is cut off, count as lost.
    pub(super) fn lose_the_cut_off(&mut self) {
        let now = self.now;
        let cut_off: BTreeSet<usize> = (self.machines().into_iter())
            .filter(|machine| !self.sees_most(*machine))
            .collect();
        let since = &mut self.month().promises.cut_off_since;
        since.retain(|machine, _| cut_off.contains(machine));
        for machine in &cut_off {
            since.entry(*machine).or_insert(now);
        }
        let is_long = |(_, since): &(&usize, &u64)| now - **since >= GIVEN_UP_MS;
        let lost: Vec<usize> = (since.iter().filter(is_long))
            .map(|(machine, _)| *machine)
            .collect();
        for namespace in self.namespaces() {
            let Some(mut floor) = self.month().promises.floors.get(&namespace).cloned() else {
                continue;
            };
            let left = floor.bears.checked_sub(floor.lost.len());
            if !floor.cut_off.is_subset(&cut_off)
                && left.is_some_and(|left| self.bears_losses(&floor.key, left))
            {
                floor.cut_off.retain(|machine| cut_off.contains(machine));
            }
            let unheard_of = self.unheard_of(&floor.key, &cut_off);
            floor.cut_off.extend(lost.iter().copied().chain(unheard_of));
            self.month().promises.floors.insert(namespace, floor);
        }
    }

    /// The only machines that know a step to be protected, if these are cut off from most others: to whoever has never heard their word
    /// they are lost, and may take as many with them as any others.
    fn unheard_of(&self, key: &CheckpointKey, cut_off: &BTreeSet<usize>) -> BTreeSet<usize> {
        let knowing = self.knowing_protected(key);
        if knowing.is_subset(cut_off) {
            knowing
        } else {
            BTreeSet::new()
        }
    }

    /// After m losses or fewer, what was protected is there, or something newer.
    pub(super) fn protected_is_not_lost(&mut self, namespace: &Namespace) {
        let Some(floor) = self.month().promises.floors.get(namespace).cloned() else {
            return;
        };
        // What daemons have left is in memory, but no decisions know of it: whether it is there is seen when they start again.
        if floor.bears_no_more() || self.is_left_by_any() {
            return;
        }
        let there = self.restorable(namespace);
        assert!(
            there.as_ref() >= Some(&floor.key),
            "a protected checkpoint is not lost at {} ms: {:?}, there is {there:?}; lost since: {:?}, cut off: {:?}",
            self.now,
            floor.key,
            floor.lost,
            floor.cut_off
        );
    }

    /// Everything that jobs have saved bears m losses, and all nodes are there.
    pub(super) fn everything_bears_m(&mut self) -> bool {
        let m = self.scene.limits.m;
        let awake = self.machines().into_iter().all(|node| self.is_awake(node));
        let promises = &self.month().promises;
        let is_whole = |floor: &Floor| floor.gone().is_empty() && floor.bears == m;
        let whole = promises.floors.values().all(is_whole);
        awake && whole && !promises.floors.is_empty() && promises.doubts.is_empty()
    }
}
