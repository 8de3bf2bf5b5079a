//! What must never happen, whatever strikes: a run number given twice, a manifest that mixes incarnations, wrong bytes, a
//! plan below what was protected, a word that promises more than the RAM of all nodes holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::Digest;
use storaged_core::Shown;
use storaged_core::encode::{LaneBlocks, lanes_of};
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    CheckpointState, ManifestBytes, Namespace, Rank, Refusal, RefusalCode, RunId, Step,
};

use super::super::world::{World, digests};
use super::Unequal;
use super::jobs::{Asked, What};
use super::tier::TierKind;

/// Until a loss is found out, told and no longer shown: the idle timeout, a second until it is said again, and one more
/// for whoever was asked in between.
const FOUND_OUT_MS: u64 = 6_000;

/// The newest checkpoint that was shown as protected and was, and the nodes lost since.
#[derive(Debug, Clone)]
pub struct Floor {
    pub key: CheckpointKey,
    lost: BTreeSet<usize>,
}

type Sealed = (Namespace, RunId, Step, Rank);

#[derive(Default)]
pub struct Promises {
    runs: BTreeMap<Namespace, BTreeMap<RunId, u64>>,
    /// Who sealed which root.
    sealed: BTreeMap<Sealed, BTreeMap<Digest, u64>>,
    manifests: BTreeMap<Digest, Arc<ManifestBytes>>,
    pub floors: BTreeMap<Namespace, Floor>,
    doubted_since: BTreeMap<CheckpointKey, u64>,
    /// When something new was last shown as at least protected.
    pub progress: BTreeMap<Namespace, (CheckpointKey, u64)>,
    /// Refusals by code, and those that nothing excuses.
    pub refusals: BTreeMap<String, u64>,
}

impl Promises {
    pub fn lost(&mut self, node: usize) {
        for floor in self.floors.values_mut() {
            floor.lost.insert(node);
        }
    }

    /// Nodes lost since what is protected was last whole.
    pub fn lost_since_shown(&self) -> usize {
        let lost = self.floors.values().map(|floor| floor.lost.len());
        lost.max().unwrap_or(0)
    }
}

/// Every set of `m` of `n` nodes.
fn sets(n: usize, m: usize) -> impl Iterator<Item = u32> {
    (0..1u32 << n).filter(move |set| set.count_ones() as usize == m)
}

impl World {
    pub(super) fn newest_run(&mut self, job: usize) -> Option<RunId> {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let runs = self.month().promises.runs.get(&namespace)?;
        runs.keys().next_back().copied()
    }

    /// The newest checkpoint of a job that a plan asked now may not go below.
    pub(super) fn known_safe(&mut self, job: usize) -> Option<CheckpointKey> {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let lies = self.month().tier.kind == TierKind::Lying;
        let durable = self.month().tier.newest(&namespace).cloned();
        let floor = self.month().promises.floors.get(&namespace);
        let protected = floor.map(|floor| floor.key.clone());
        protected.max(durable.filter(|_| !lies))
    }

    pub(super) fn run_numbers_are_unique(&mut self, asked: &Asked, run: RunId) {
        let namespace = self.month().jobs.all[asked.job].namespace.clone();
        let runs = self.month().promises.runs.entry(namespace).or_default();
        let before = runs.insert(run, asked.incarnation);
        assert!(
            before.is_none(),
            "run numbers are unique: run {run} was given to incarnation {before:?} and to {}",
            asked.incarnation
        );
    }

    pub(super) fn a_run_counts_only_if_it_was_opened(
        &mut self,
        asked: &Asked,
        run: RunId,
        reply: &Reply,
    ) {
        let namespace = self.month().jobs.all[asked.job].namespace.clone();
        let runs = self.month().promises.runs.get(&namespace);
        let opened = runs.is_some_and(|runs| runs.contains_key(&run));
        let welcome = matches!(reply, Reply::Welcome { .. });
        assert!(opened || !welcome, "run {run} counts, and nobody opened it");
    }

    pub(super) fn will_be_sealed(
        &mut self,
        (job, incarnation): (usize, u64),
        (run, step, rank): (RunId, Step, Rank),
        root: Digest,
    ) {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let place = (namespace, run, step, rank);
        let roots = self.month().promises.sealed.entry(place).or_default();
        roots.insert(root, incarnation);
    }

    /// A manifest lists shards that were sealed, all of them by one incarnation.
    pub(super) fn promise_of_message(&mut self, message: &PeerMessage) {
        let PeerMessage::Committed { manifest, .. } = message else {
            return;
        };
        let Ok(manifest) = ManifestBytes::parse(manifest.to_vec()) else {
            panic!("a node sends a manifest that is none");
        };
        let name = manifest.name();
        if self.month().promises.manifests.contains_key(&name) {
            return;
        }
        let record = manifest.manifest();
        let sealed = &self.month().promises.sealed;
        let by: BTreeSet<Option<u64>> = (record.shards.iter())
            .map(|shard| {
                let place = (
                    record.namespace.clone(),
                    record.run,
                    record.step,
                    shard.rank,
                );
                sealed.get(&place)?.get(&shard.root).copied()
            })
            .collect();
        assert!(
            by.len() == 1 && !by.contains(&None),
            "no manifest mixes incarnations: run {} step {} has shards of {by:?}",
            record.run,
            record.step
        );
        let all = record.shards.len() == self.limits.ranks as usize;
        assert!(all, "all or nothing: {} shards", record.shards.len());
        let manifests = &mut self.month().promises.manifests;
        manifests.insert(name, Arc::new(manifest));
    }

    pub(super) fn bytes_are_what_was_sealed(
        &mut self,
        (job, id): (usize, u64),
        rank: Rank,
        bytes: &[u8],
    ) {
        let it = self.month().jobs.incarnation(job, id);
        let Some(plan) = it.and_then(|it| it.plan.clone()) else {
            return;
        };
        let place = (plan.namespace, plan.run, plan.step, rank);
        let roots = self.month().promises.sealed.get(&place);
        let right = roots.is_some_and(|roots| roots.contains_key(&digests(bytes).1));
        assert!(right, "wrong bytes are never returned: {place:?}");
    }

    /// What is in the RAM of all processes, by manifest: who shows it and what it holds of it.
    fn held(&self, namespace: &Namespace) -> BTreeMap<Digest, Vec<(usize, Shown)>> {
        let mut held: BTreeMap<Digest, Vec<(usize, Shown)>> = BTreeMap::new();
        for (node, process) in self.processes.iter().enumerate() {
            let Some(process) = process else { continue };
            for mut shown in process.node.shown() {
                shown
                    .shards
                    .retain(|(_, slot)| process.slots.contains_key(slot));
                shown
                    .parity
                    .retain(|(_, _, set)| process.parity.contains_key(set));
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
        let Some(month) = self.month.as_deref() else {
            return false;
        };
        let Some(manifest) = month.promises.manifests.get(&name) else {
            return false;
        };
        let left = || held.iter().filter(|(node, _)| lost & (1 << node) == 0);
        let mut lanes = lanes_of(manifest.manifest()).into_iter();
        left().next().is_some()
            && lanes.all(|lane| {
                let Some(blocks) = LaneBlocks::of(manifest.manifest(), lane) else {
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

    /// The newest checkpoint that RAM or the durable tier can give back.
    fn restorable(&mut self, namespace: &Namespace) -> Option<CheckpointKey> {
        let held = self.held(namespace);
        let whole = held
            .iter()
            .filter(|(name, held)| self.is_whole_without(**name, held, 0));
        let in_ram = whole.map(|(_, held)| held[0].1.key.clone()).max();
        in_ram.max(self.month().tier.newest(namespace).cloned())
    }

    pub(super) fn keep_promises(&mut self) {
        let jobs = &self.month().jobs.all;
        let namespaces: Vec<Namespace> = jobs.iter().map(|job| job.namespace.clone()).collect();
        for namespace in namespaces {
            self.protected_bears_m_losses(&namespace);
            self.protected_is_not_lost(&namespace);
            self.what_must_go_on_goes_on(&namespace);
        }
        self.nothing_is_left_without_an_owner();
        self.ram_is_within_the_budget();
    }

    /// What is shown as protected bears every set of m losses at this instant.
    fn protected_bears_m_losses(&mut self, namespace: &Namespace) {
        let (now, m, n) = (self.now, self.limits.m, self.limits.nodes);
        let held = self.held(namespace);
        let mut newest: Option<(CheckpointKey, Digest, bool)> = None;
        for (name, all) in &held {
            let said = all
                .iter()
                .filter(|(_, it)| it.state >= CheckpointState::Protected);
            let connected = said.clone().any(|(node, _)| self.sees_most(*node));
            let key = said.map(|(_, it)| it.key.clone()).max();
            if let Some(key) = key
                && newest.as_ref().is_none_or(|(than, ..)| key > *than)
            {
                newest = Some((key, *name, connected));
            }
        }
        let Some((key, name, connected)) = newest else {
            return;
        };
        let all = &held[&name];
        let bears = sets(n, m).all(|lost| self.is_whole_without(name, all, lost));
        let durable = self.month().tier.published.contains_key(&key);
        let equal = self.month().scenario.unequal == Unequal::Nothing;
        let promises = &mut self.month().promises;
        let progress = promises.progress.get(namespace);
        if progress.is_none_or(|(before, _)| key > *before) {
            promises
                .progress
                .insert(namespace.clone(), (key.clone(), now));
        }
        if bears {
            promises.doubted_since.remove(&key);
            let lost = BTreeSet::new();
            promises
                .floors
                .insert(namespace.clone(), Floor { key, lost });
            return;
        }
        if durable || !connected || !equal {
            promises.doubted_since.remove(&key);
            return;
        }
        let since = *promises.doubted_since.entry(key.clone()).or_insert(now);
        assert!(
            now - since < FOUND_OUT_MS,
            "protected bears every {m} losses: {key:?} is shown at {now} ms and has not since {since}"
        );
    }

    /// A node that sees at least half of the others.
    fn sees_most(&self, node: usize) -> bool {
        let seen = self.up.iter().filter(|(from, _)| *from == node).count();
        let paused = self
            .month
            .as_deref()
            .is_some_and(|it| it.paused.contains_key(&node));
        !paused && 2 * seen >= self.limits.nodes - 1
    }

    /// After m losses or fewer, what was protected is there, or something newer.
    fn protected_is_not_lost(&mut self, namespace: &Namespace) {
        let Some(floor) = self.month().promises.floors.get(namespace).cloned() else {
            return;
        };
        if floor.lost.len() > self.limits.m {
            return;
        }
        let there = self.restorable(namespace);
        assert!(
            there.as_ref() >= Some(&floor.key),
            "a protected checkpoint is not lost at {} ms: {:?}, there is {there:?}; lost since: {:?}",
            self.now,
            floor.key,
            floor.lost
        );
    }

    /// Everything that jobs have saved bears m losses, and all nodes are there.
    pub(super) fn everything_bears_m(&mut self) -> bool {
        let awake = (0..self.limits.nodes).all(|node| self.is_awake(node));
        let promises = &self.month().promises;
        let whole = promises.floors.values().all(|floor| floor.lost.is_empty());
        awake && whole && !promises.floors.is_empty() && promises.doubted_since.is_empty()
    }

    pub(super) fn no_plan_goes_below(&mut self, asked: &Asked, newest: bool, plan: &RestorePlan) {
        let offered = CheckpointKey {
            namespace: plan.namespace.clone(),
            run: plan.run,
            step: plan.step,
        };
        let Some(floor) = asked
            .floor
            .clone()
            .filter(|floor| newest && offered < *floor)
        else {
            return;
        };
        let there = self.restorable(&plan.namespace);
        assert!(
            there.is_none_or(|there| there < floor),
            "no plan goes below what was protected: asked at {} ms, {floor:?} was safe, {offered:?} is offered",
            asked.at
        );
    }

    /// A refusal is not simply a restart of the job.
    pub(super) fn judge(&mut self, asked: &Asked, refusal: &Refusal) {
        let code = format!("{:?}", refusal.code);
        *self.month().promises.refusals.entry(code).or_default() += 1;
        match (&asked.what, refusal.code) {
            (
                What::Plan(None),
                RefusalCode::NoCheckpoint
                | RefusalCode::UnknownNamespace
                | RefusalCode::TooManyLost,
            ) => self.nothing_is_hidden(asked, refusal),
            (_, RefusalCode::OlderRun) => self.an_older_run_is_older(asked, refusal),
            (What::Plan(Some(_)) | What::SealBack, _) => {}
            _ if self.is_settled() && asked.at > super::SETTLED_MS => {
                self.is_excused(asked, refusal)
            }
            _ => {}
        }
    }

    fn nothing_is_hidden(&mut self, asked: &Asked, refusal: &Refusal) {
        let Some(floor) = &asked.floor else { return };
        let there = self.restorable(&floor.namespace);
        assert!(
            there.as_ref() < Some(floor),
            "what cannot be read is not nothing: {floor:?} was safe and {there:?} is there at {} ms, refused: {refusal:?}",
            self.now
        );
    }

    fn an_older_run_is_older(&mut self, asked: &Asked, refusal: &Refusal) {
        let run = self.month().jobs.incarnation(asked.job, asked.incarnation);
        let run = run.and_then(|it| it.run);
        let newest = self.newest_run(asked.job);
        let opening = self.month().jobs.all[asked.job].alive.len() > 1;
        assert!(
            run < newest || opening || !self.is_settled(),
            "a run that is the newest is not an older one: {run:?} of {newest:?}: {refusal:?}"
        );
    }

    /// With all nodes up and the tier well.
    fn is_excused(&mut self, asked: &Asked, refusal: &Refusal) {
        let scenario = self.month().scenario;
        let tight = scenario.budget_slots < 16;
        let excused = match refusal.code {
            RefusalCode::BudgetFull | RefusalCode::Busy => tight,
            RefusalCode::Abandoned => true,
            _ => false,
        };
        assert!(
            excused || scenario.unequal != Unequal::Nothing,
            "nothing is wrong at {} ms, and {:?} is refused: {refusal:?}",
            self.now,
            asked.what
        );
    }

    /// What was slots and parity sets is within what the operator gave.
    fn ram_is_within_the_budget(&self) {
        for process in self.processes.iter().flatten() {
            let slots: usize = process.slots.values().map(Vec::len).sum();
            let total = process.node.ledger().total;
            assert!(slots as u64 <= total, "memory stays within the budget");
        }
    }
}
