//! What must never happen, whatever strikes: a run number given twice, a manifest that mixes incarnations, wrong bytes, a
//! plan below what was protected, a word that promises more than the RAM of all nodes holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::Digest;
use storaged_core::RequestId;
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    CheckpointState, ManifestBytes, Namespace, Rank, Refusal, RefusalCode, RunId, Step,
};

use super::super::world::World;
use super::asks::{Asked, What};
use super::failures::Failures;
use super::jobs::IncarnationId;
use super::kept::KeptSteps;
use super::pins::PinnedSteps;
use super::tier::TierKind;
use super::{Crashes, Scenario, Unequal};
use crate::testkit::digests;

/// The newest checkpoint that was shown as protected and was, how many losses it was said to bear, and the nodes lost
/// since. Nodes that were cut off when it was protected do not bear anything.
#[derive(Debug, Clone)]
pub struct Floor {
    pub key: CheckpointKey,
    pub bears: usize,
    pub lost: BTreeSet<usize>,
    /// Cut off for so long that others need not count on them any more. They are back once all that was promised is there with them.
    pub cut_off: BTreeSet<usize>,
    /// The last home node that knew it was among these: more than m have not known it at one time, and nobody else has it healed.
    pub is_without_home: bool,
}

impl Floor {
    /// Machines that whoever has not been away could not count on at some time since.
    pub fn gone(&self) -> BTreeSet<usize> {
        self.lost.union(&self.cut_off).copied().collect()
    }

    /// Whether more is gone than was promised to be borne.
    pub fn bears_no_more(&self) -> bool {
        self.gone().len() > self.bears
    }
}

/// A node that has been linked for so long has been asked, and has answered.
const ANSWERED_MS: u64 = 1_000;

/// Whoever has opened a run hears of it within a second, even if some node that is up is silent.
const TOLD_MS: u64 = 1_500;

type Sealed = (Namespace, RunId, Step, Rank);

/// What is shown as protected does not bear what is said.
#[derive(Clone, Copy)]
pub struct Doubt {
    pub since: u64,
    /// When it was last looked at, and how long nodes were down till then.
    pub seen: u64,
    pub down_ms: u64,
}

#[derive(Default)]
pub struct Promises {
    runs: BTreeMap<Namespace, BTreeMap<RunId, u64>>,
    /// Who sealed which root.
    sealed: BTreeMap<Sealed, BTreeMap<Digest, u64>>,
    pub manifests: BTreeMap<Digest, Arc<ManifestBytes>>,
    /// The one manifest of each step.
    names: BTreeMap<CheckpointKey, Digest>,
    /// The epoch of the node whose rank commits a step, when that rank says so.
    described_in: BTreeMap<CheckpointKey, u64>,
    pub floors: BTreeMap<Namespace, Floor>,
    /// Since when machines have been cut off from most others.
    pub cut_off_since: BTreeMap<usize, u64>,
    /// When machines were lost last.
    pub lost_at: BTreeMap<usize, u64>,
    /// When what is promised was asked for last before a loss.
    asked_at: Option<u64>,
    pub doubts: BTreeMap<Namespace, Doubt>,
    /// When something new was last shown as at least protected.
    pub progress: BTreeMap<Namespace, (CheckpointKey, u64)>,
    /// Runs that were given, to which job, and when they were asked for.
    opened: Vec<(usize, RunId, u64)>,
    /// Runs that heard of a newer one, of which job, and when.
    fenced: Vec<(usize, RunId, u64)>,
    /// Requests for a run whose job ended before the answer: which job's, from when to when.
    broken_off: Vec<(usize, u64, u64)>,
    /// Steps that restarts have failed from.
    pub failures: Failures,
    pub kept_steps: KeptSteps,
    pub pins: PinnedSteps,
    /// Refusals by code, and those that nothing excuses.
    pub refusals: BTreeMap<String, u64>,
}

impl Promises {
    /// Whether a step or a newer one of its job has.
    pub fn has_committed(&self, key: &CheckpointKey) -> bool {
        let mut newer = self.names.range(key..);
        newer.any(|(of, _)| of.namespace == key.namespace)
    }

    pub fn lost(&mut self, node: usize) {
        for floor in self.floors.values_mut() {
            floor.lost.insert(node);
        }
        self.kept_steps.lost(node);
        self.pins.lost(node);
    }

    /// Nodes lost or cut off since what is protected bore `m`.
    pub fn lost_since_shown(&self, m: usize) -> usize {
        let floors = self.floors.values();
        let lost = floors.map(|floor| floor.gone().len() + (m - floor.bears));
        let newest = lost.max().unwrap_or(0);
        let kept = self.kept_steps.most_lost().max(self.pins.most_lost());
        newest.max(kept)
    }
}

impl World {
    pub(super) fn newest_run(&mut self, job: usize) -> Option<RunId> {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let runs = self.month().promises.runs.get(&namespace)?;
        runs.keys().next_back().copied()
    }

    /// The newest checkpoint of a job that a plan asked now may not go below. Below one that a restart has failed from it may.
    pub(super) fn known_safe(&mut self, job: usize) -> Option<CheckpointKey> {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let floor = self.month().promises.floors.get(&namespace);
        let protected = floor.map(|floor| floor.key.clone());
        let newest = protected.max(self.known_durable(job));
        newest.filter(|key| !self.month().promises.failures.has(key))
    }

    /// The newest checkpoint of a job in the durable tier, unless that lies about it.
    pub(super) fn known_durable(&mut self, job: usize) -> Option<CheckpointKey> {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let newest = self.tier.newest(&namespace).cloned();
        newest.filter(|_| self.month().scenario.tier != TierKind::Lying)
    }

    pub(super) fn run_numbers_are_unique(&mut self, asked: &Asked, run: RunId) {
        let namespace = self.month().jobs.all[asked.job].namespace.clone();
        let apart = self.may_be_numbered_apart();
        let runs = self
            .month()
            .promises
            .runs
            .entry(namespace.clone())
            .or_default();
        let same = |it: &RunId| *it == run || (!apart && it.number() == run.number());
        let before = runs.keys().find(|it| same(it)).map(|it| runs[it]);
        assert!(
            before.is_none(),
            "run numbers are unique: run {run} was given to incarnation {before:?} and to {}",
            asked.incarnation
        );
        runs.insert(run, asked.incarnation);
        let durable = asked.durable.as_ref().map(|key| key.run.number());
        assert!(
            durable.is_none_or(|durable| run.number() > durable),
            "a new run is above all that is durable: got run {run}, and run {durable:?} is in the tier"
        );
        let now = self.now;
        let promises = &mut self.month().promises;
        promises.opened.push((asked.job, run, asked.at));
        promises.kept_steps.opened(&namespace, run, now);
    }

    /// While the tier is away a majority gives numbers, and the tier may give the same one to a node that is cut off from
    /// that, or that has lost its memory with all others; their identities tell such runs apart.
    fn may_be_numbered_apart(&mut self) -> bool {
        let Scenario {
            links,
            pauses,
            tier,
            crashes,
            ..
        } = self.month().scenario;
        let forgotten = crashes == Crashes::AllAtOnce;
        (links || pauses || forgotten) && matches!(tier, TierKind::Slow | TierKind::Failing)
    }

    /// An incarnation heard that a newer run was opened. Whoever opened that is told within a second.
    fn fenced(&mut self, asked: &Asked, run: Option<RunId>) {
        let scenario = self.month().scenario;
        let certain = !scenario.pauses && scenario.crashes == Crashes::Never;
        if let Some(run) = run.filter(|_| certain) {
            let fenced = (asked.job, run, self.now);
            self.month().promises.fenced.push(fenced);
        }
    }

    /// An incarnation ends that may wait for its run. It may have been opened, and nobody is there who would be told.
    pub(super) fn breaks_off(&mut self, whose: IncarnationId) {
        let now = self.now;
        let month = self.month();
        let asked = month.jobs.asked.values();
        let of_it = asked.filter(|it| it.incarnation == whose.id && matches!(it.what, What::Run));
        let broken_off = of_it.map(|it| (whose.job, it.at, now));
        month.promises.broken_off.extend(broken_off);
    }

    /// A run that was asked for and not given ends no job.
    pub(super) fn only_an_opened_run_fences(&mut self) {
        let now = self.now;
        let promises = &mut self.month().promises;
        let due = |(_, _, at): &&(usize, RunId, u64)| now - at >= TOLD_MS;
        for (job, run, at) in promises.fenced.iter().filter(due) {
            let mut opened = promises.opened.iter();
            let by = opened.any(|it| it.0 == *job && it.1 > *run && it.2 <= *at);
            let mut broken_off = promises.broken_off.iter();
            let by = by
                || broken_off
                    .any(|(of, from, to)| of == job && (*from..*to + TOLD_MS).contains(at));
            assert!(
                by,
                "a failed open_run ends no job: run {run} was fenced off at {at} ms, and no newer one was opened"
            );
        }
        promises.fenced.retain(|(_, _, at)| now - at < TOLD_MS);
    }

    /// An offer says of every rank where its shard is.
    pub(super) fn a_plan_names_every_shard(&mut self, plan: &RestorePlan) {
        let ranks: BTreeSet<Rank> = plan.shards.iter().map(|shard| shard.rank).collect();
        assert!(
            ranks.len() == plan.world_size.get() as usize,
            "a plan names every shard: run {} step {} is offered with ranks {ranks:?}",
            plan.run,
            plan.step
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
        IncarnationId {
            job,
            id: incarnation,
        }: IncarnationId,
        run: RunId,
        step: Step,
        rank: Rank,
        root: Digest,
    ) {
        let namespace = self.month().jobs.all[job].namespace.clone();
        let place = (namespace, run, step, rank);
        let roots = self.month().promises.sealed.entry(place).or_default();
        roots.insert(root, incarnation);
    }

    /// A manifest lists shards that were sealed, all of them by one incarnation.
    pub fn promise_of_message(&mut self, from: usize, message: &PeerMessage) {
        if let PeerMessage::Parcel { parcel, .. } = message {
            let process = self.processes[from].as_ref();
            let bytes = process.and_then(|process| process.node.parcel(*parcel));
            let bytes = bytes.expect("a node tells of a parcel that it has");
            let message = storaged_wire::decode("message", &bytes).expect("a message");
            return self.promise_of_message(from, &message);
        }
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
        let all = record.shards.len() == self.scene.limits.ranks as usize;
        assert!(all, "all or nothing: {} shards", record.shards.len());
        self.a_step_is_coded_by_the_groups_of_one_epoch(&manifest);
        let manifests = &mut self.month().promises.manifests;
        manifests.insert(name, Arc::new(manifest));
    }

    /// A rank says that a step is to be committed: from this epoch on may its groups be.
    pub(super) fn is_described(&mut self, key: CheckpointKey, node: usize) {
        let epoch = self.month().registry.epoch_of(node);
        self.month().promises.described_in.insert(key, epoch);
    }

    /// Two manifests of one step could be restored by neither; and groups of nodes that are gone protect nothing.
    fn a_step_is_coded_by_the_groups_of_one_epoch(&mut self, manifest: &ManifestBytes) {
        let record = manifest.manifest();
        let key = CheckpointKey::of(record);
        let (epoch, step) = (record.epoch, record.step);
        let newest = self.month().registry.newest().epoch;
        let promises = &mut self.month().promises;
        let described = promises.described_in.get(&key).copied();
        assert!(
            described.is_some_and(|least| (least..=newest).contains(&epoch)),
            "a step is coded in the epoch in which it was described: step {step} was in {described:?}, its manifest says {epoch}, the newest is {newest}"
        );
        let one = *promises.names.entry(key).or_insert(manifest.name());
        // Nodes whose configurations differ describe a step each in its own way, and none of these is ever coded.
        if self.month().scenario.unequal != Unequal::Nothing {
            return;
        }
        assert_eq!(one, manifest.name(), "a step has one manifest: step {step}");
        let roster = self.month().registry.of(epoch);
        let groups = roster.and_then(|it| it.groups(record.geometry));
        let mut groups = groups.expect("an epoch that was agreed can be coded");
        groups.retain(|group| {
            let mut shards = record.shards.iter();
            shards.any(|shard| group.data.contains(&shard.node))
        });
        let coded_by = record.groups.iter();
        let as_agreed = coded_by.clone().count() == groups.len()
            && coded_by
                .zip(&groups)
                .all(|(one, other)| one.data == other.data && one.coding == other.coding);
        assert!(
            as_agreed,
            "a step is coded by the groups of its epoch: step {step} of epoch {epoch} by {:?}",
            record.groups
        );
        self.a_cordoned_node_codes_only_where_it_must(record);
    }

    pub(super) fn bytes_are_what_was_sealed(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        rank: Rank,
        bytes: &[u8],
    ) {
        let whose = IncarnationId { job, id };
        let right = self.are_sealed(whose, rank, bytes);
        assert!(
            right,
            "wrong bytes are never returned: rank {rank} of {whose:?}"
        );
    }

    /// Whether these are the bytes that the rank has sealed of the step that its incarnation was offered.
    pub(super) fn are_sealed(&mut self, whose: IncarnationId, rank: Rank, bytes: &[u8]) -> bool {
        let it = self.month().jobs.incarnation(whose.job, whose.id);
        let Some(plan) = it.and_then(|it| it.plan.clone()) else {
            return true;
        };
        let place = (plan.namespace, plan.run, plan.step, rank);
        let roots = self.month().promises.sealed.get(&place);
        roots.is_some_and(|roots| roots.contains_key(&digests(bytes).1))
    }

    pub(super) fn namespaces(&mut self) -> Vec<Namespace> {
        let jobs = self.month().jobs.all.iter();
        jobs.map(|job| job.namespace.clone()).collect()
    }

    /// What a machine has goes with it, now or soon. What is promised at this instant must bear that, which may be a newer step than at
    /// the last look, and one that bears less: a step goes for it that only nodes that cannot be reached would have made safer.
    pub(super) fn lose_machine(&mut self, machine: usize) {
        self.ask_what_is_promised();
        let floors = self.month().promises.floors.clone();
        for (namespace, mut floor) in floors {
            floor.is_without_home |= self.is_last_home(&floor.key, machine);
            self.month().promises.floors.insert(namespace, floor);
        }
        let now = self.now;
        let promises = &mut self.month().promises;
        promises.lost_at.insert(machine, now);
        promises.lost(machine);
    }

    /// Before something is lost.
    pub(super) fn ask_what_is_promised(&mut self) {
        // Of those that are lost at one instant nothing is promised in between.
        let now = self.now;
        if self.month().promises.asked_at.replace(now) != Some(now) {
            for namespace in self.namespaces() {
                self.protected_bears_m_losses(&namespace);
            }
        }
    }

    pub(super) fn keep_promises(&mut self) {
        self.lose_the_cut_off();
        self.note_who_is_reached();
        for namespace in self.namespaces() {
            self.protected_bears_m_losses(&namespace);
            self.protected_is_not_lost(&namespace);
            self.kept_steps_stay(&namespace);
            self.pinned_steps_stay(&namespace);
            self.what_must_go_on_goes_on(&namespace);
        }
        self.only_an_opened_run_fences();
        self.nothing_is_left_without_an_owner();
        self.ram_is_within_the_budget();
    }

    pub(super) fn no_plan_goes_below(&mut self, asked: &Asked, plan: &RestorePlan) {
        let offered = CheckpointKey {
            namespace: plan.namespace.clone(),
            run: plan.run,
            step: plan.step,
        };
        let below = |floor: &CheckpointKey| offered < *floor;
        let Some(floor) = asked.floor.clone().filter(below) else {
            return;
        };
        // The plan may know of what was said meanwhile.
        if self.month().promises.failures.has(&floor) {
            return;
        }
        let there = self.restorable(&plan.namespace);
        // What a failed one has made needless has left RAM.
        let failures = &self.month().promises.failures;
        let there = there.filter(|there| !failures.has(there));
        if self.may_go_below(asked) {
            return;
        }
        assert!(
            there.is_none_or(|there| there < floor),
            "no plan goes below what was protected: asked at {} ms, {floor:?} was safe, {offered:?} is offered",
            asked.at
        );
    }

    /// Whether a plan may go below a step: the node that was asked and all whom it could ask, who are a majority, did not know that when it
    /// was asked, be it that they have lost their memory since it was protected or were cut off then, and nobody came up meanwhile who did and
    /// had the time to answer. The limit that docs/SEMANTICS.md names.
    fn may_go_below(&mut self, asked: &Asked) -> bool {
        let is_majority = asked.reaches_majority || self.reaches_majority(asked.pid.node);
        let has_heard = asked
            .in_reach_since
            .is_some_and(|since| self.now - since >= ANSWERED_MS);
        is_majority && asked.floor_is_out_of_reach && !has_heard
    }

    /// Whether a node and those whom it can ask are more than half of all.
    pub(super) fn reaches_majority(&mut self, node: usize) -> bool {
        2 * self.reached(node).len() > self.machines().len()
    }

    /// Who asks for a plan may hear of what is safe while it waits.
    fn note_who_is_reached(&mut self) {
        let now = self.now;
        let out_of_reach = |(id, asked): (&RequestId, &Asked)| {
            let floor = asked.floor.clone().filter(|_| asked.floor_is_out_of_reach);
            Some((*id, asked.pid.node, floor?))
        };
        let asked = self.month().jobs.asked.iter().filter_map(out_of_reach);
        for (id, node, floor) in asked.collect::<Vec<_>>() {
            let is_reached = !self.is_out_of_reach(node, &floor);
            if let Some(asked) = self.month().jobs.asked.get_mut(&id) {
                let since = asked.in_reach_since.unwrap_or(now);
                asked.in_reach_since = is_reached.then_some(since);
            }
        }
    }

    /// Whether neither a node nor anybody whom it can ask knows a step to be protected or durable.
    pub(super) fn is_out_of_reach(&mut self, node: usize, key: &CheckpointKey) -> bool {
        let reached = self.reached(node);
        let knowing = self.knowing_protected(key);
        !reached.iter().any(|machine| knowing.contains(machine))
    }

    /// Machines that know a step to be protected or durable, or have heard that it, or a newer one, was.
    pub(super) fn knowing_protected(&self, key: &CheckpointKey) -> BTreeSet<usize> {
        let shown = self.shown_of(key).into_iter();
        let protected = shown.filter(|(_, shown)| shown.state >= CheckpointState::Protected);
        let has_mark = |machine: &usize| {
            let process = self.processes[*machine].as_ref();
            process.is_some_and(|process| process.node.has_mark(key))
        };
        let marked = (0..self.processes.len()).filter(has_mark);
        protected
            .map(|(machine, _)| machine)
            .chain(marked)
            .collect()
    }

    /// A node and all whom it can ask.
    fn reached(&mut self, node: usize) -> Vec<usize> {
        let mut reached = self.machines();
        reached.retain(|it| {
            // A link may have ended, and nobody has noticed it yet.
            let is_linked = self.is_linked(node, *it) && self.is_linked(*it, node);
            let is_alive = self.link_of(node, *it).alive && self.link_of(*it, node).alive;
            *it == node || is_linked && is_alive && self.is_reachable(node, *it)
        });
        reached
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
            (What::Hello, RefusalCode::UnknownRun) => self.an_opened_run_is_known(asked, refusal),
            (What::KeptStep(key), _) => self.a_kept_step_is_not_refused(asked, key, refusal),
            (What::Plan(Some(_)) | What::SealBack | What::Keep(..), _) => {}
            _ if self.is_undisturbed() => self.is_excused(asked, refusal),
            _ if self.is_settled() && asked.at > super::SETTLED_MS => {
                self.is_excused(asked, refusal)
            }
            _ => {}
        }
    }

    fn nothing_is_hidden(&mut self, asked: &Asked, refusal: &Refusal) {
        let failures = &self.month().promises.failures;
        let has_failed = asked.durable.as_ref().is_some_and(|it| failures.has(it));
        assert!(
            asked.durable.is_none() || has_failed,
            "what cannot be read is not nothing: {:?} was in the durable tier, refused at {} ms: {refusal:?}",
            asked.durable,
            self.now
        );
        let Some(floor) = asked.floor.as_ref().filter(|it| !failures.has(it)) else {
            return;
        };
        let there = self.restorable(&floor.namespace);
        let failures = &self.month().promises.failures;
        let there = there.filter(|there| !failures.has(there));
        if self.may_go_below(asked) {
            return;
        }
        assert!(
            there.as_ref() < Some(floor),
            "what cannot be read is not nothing: {floor:?} was safe and {there:?} is there at {} ms, refused: {refusal:?}",
            self.now
        );
    }

    /// A node that has just started asks the others; only where those cannot be reached it knows no better.
    fn an_opened_run_is_known(&mut self, asked: &Asked, refusal: &Refusal) {
        let Scenario {
            links,
            pauses,
            clocks,
            ..
        } = self.month().scenario;
        assert!(
            links || pauses || clocks,
            "a run that was opened is known at {} ms: {asked:?}: {refusal:?}",
            self.now
        );
    }

    fn an_older_run_is_older(&mut self, asked: &Asked, refusal: &Refusal) {
        let run = self.month().jobs.incarnation(asked.job, asked.incarnation);
        let run = run.and_then(|it| it.run);
        let newest = self.newest_run(asked.job);
        self.fenced(asked, run);
        let opening = self.month().jobs.all[asked.job].alive.len() > 1;
        assert!(
            run < newest || opening || !self.is_settled(),
            "a run that is the newest is not an older one: {run:?} of {newest:?}: {refusal:?}"
        );
    }

    /// With all nodes up and the tier well.
    fn is_excused(&mut self, asked: &Asked, refusal: &Refusal) {
        let scenario = self.month().scenario;
        let tight = scenario.is_little_room();
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
