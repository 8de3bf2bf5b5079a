//! The protected step before the newest one, in months whose nodes keep two: as long as no save lacks room it bears what it was said to
//! bear, is offered to whoever asks for it by its number, and is healed like the newest one.

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::Note;
use storaged_wire::local::Request;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::plan::RestorePlan;
use storaged_wire::{CheckpointState, Namespace, Refusal, RunId};

use super::super::world::World;
use super::asks::{Asked, What};
use super::jobs::{IncarnationId, Phase};
use super::trainers::RankState;

/// A rank that has waited for a slot for so long may be given that of a kept step.
const LACKS_ROOM_MS: u64 = 700;
/// Of the beats, the kept step is asked for at one in so many.
const ASK_ONE_IN: u64 = 40;
const PLAN_MS: u32 = 5_000;
/// All nodes have heard of a run that was opened so long ago.
const HEARD_OF_MS: u64 = 1_000;

/// Which steps were ever said to be protected, since when, and what became of the one before the newest.
#[derive(Debug, Default)]
pub struct KeptSteps {
    protected: BTreeMap<Namespace, BTreeMap<CheckpointKey, u64>>,
    /// The newest run of each job, and when it was opened.
    opened: BTreeMap<Namespace, (RunId, u64)>,
    /// Those that stay and bore all losses, and the machines lost since.
    whole: BTreeMap<CheckpointKey, BTreeSet<usize>>,
    /// Saves lacked room while these were kept.
    given_way: BTreeSet<CheckpointKey>,
    /// Among the newest there was no place for these, if only for a moment.
    without_place: BTreeSet<CheckpointKey>,
}

impl KeptSteps {
    pub fn lost(&mut self, machine: usize) {
        for lost in self.whole.values_mut() {
            lost.insert(machine);
        }
    }

    /// Machines lost since what stays bore all losses: of the one that has lost most.
    pub fn most_lost(&self) -> usize {
        let all = self.whole.iter();
        let kept = all.filter(|(key, _)| !self.given_way.contains(*key));
        kept.map(|(_, lost)| lost.len()).max().unwrap_or(0)
    }

    pub fn opened(&mut self, namespace: &Namespace, run: RunId, at: u64) {
        let opened = (run, at);
        let newest = self.opened.entry(namespace.clone()).or_insert(opened);
        *newest = opened.max(*newest);
    }

    /// The newest protected step, and the one before it. What an earlier run saved from there on where the job went back to is left: it may be
    /// protected after that all the same. Until a step of the newest run is protected nobody can know which ones are left, and
    /// one more stays.
    fn newest(&self, namespace: &Namespace) -> Vec<CheckpointKey> {
        let Some(steps) = self.protected.get(namespace) else {
            return Vec::new();
        };
        let is_left = |key: &CheckpointKey| {
            let mut later = steps.keys().rev().take_while(|it| it.run > key.run);
            later.any(|it| it.step <= key.step)
        };
        let newest_first = steps.iter().rev().filter(|(key, _)| !is_left(key));
        let opened = self.opened.get(namespace);
        let is_of_run_before = |(key, at): &(&CheckpointKey, &u64)| {
            opened.is_some_and(|(run, opened)| key.run < *run && opened + HEARD_OF_MS <= **at)
        };
        let stay = match newest_first.clone().next().filter(is_of_run_before) {
            Some(_) => 3,
            None => 2,
        };
        newest_first
            .take(stay)
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// What newer ones have left no place for is not kept, also when later steps of the newest run leave these.
    fn note_those_without_place(&mut self, namespace: &Namespace) {
        let newest = self.newest(namespace);
        let mut all = self.whole.keys().cloned().collect::<BTreeSet<_>>();
        all.retain(|key| key.namespace == *namespace && !newest.contains(key));
        self.without_place.extend(all);
    }

    fn second_newest(&self, namespace: &Namespace) -> Option<CheckpointKey> {
        self.newest(namespace).into_iter().nth(1)
    }

    /// The step that must be there, unless more than `m` machines were lost.
    fn due(&self, namespace: &Namespace, m: usize) -> Option<CheckpointKey> {
        let key = self.second_newest(namespace)?;
        let lost = self.whole.get(&key)?;
        let may_have_gone = self.given_way.contains(&key) || self.without_place.contains(&key);
        (lost.len() <= m && !may_have_gone).then_some(key)
    }
}

impl World {
    pub(super) fn keeps_two(&mut self) -> bool {
        self.month().scenario.keep_steps == 2
    }

    /// A node says how far a step is.
    pub fn note_in_month(&mut self, note: &Note) {
        if let Note::State { key, state } = note
            && *state == CheckpointState::Committed
        {
            self.month().commits.has_come(key);
        }
        if let Note::State { key, state } = note
            && matches!(state, CheckpointState::Protected | CheckpointState::Durable)
        {
            let now = self.now;
            let kept = &mut self.month().promises.kept_steps;
            let steps = kept.protected.entry(key.namespace.clone()).or_default();
            steps.entry(key.clone()).or_insert(now);
            kept.note_those_without_place(&key.namespace);
            // What was the newest is kept from now on, and may go this moment.
            if self.keeps_two() {
                self.note_lack_of_room(&key.namespace);
            }
        }
    }

    /// The step that a job of these months may ask for by its number.
    pub(super) fn kept_step(&mut self, namespace: &Namespace) -> Option<CheckpointKey> {
        let m = self.scene.limits.m;
        self.month().promises.kept_steps.due(namespace, m)
    }

    /// What was kept and bore all losses is there as long as no more than m machines are lost and no save lacks room.
    pub(super) fn kept_steps_stay(&mut self, namespace: &Namespace) {
        if !self.keeps_two() {
            return;
        }
        self.note_lack_of_room(namespace);
        let (now, m) = (self.now, self.scene.limits.m);
        let newest = self.month().promises.kept_steps.newest(namespace);
        let is_of_it = |key: &CheckpointKey| key.namespace == *namespace;
        let kept = &mut self.month().promises.kept_steps;
        kept.whole
            .retain(|key, _| !is_of_it(key) || newest.contains(key));
        for key in newest {
            if self.bears_losses(&key, m) {
                let kept = &mut self.month().promises.kept_steps;
                kept.without_place.remove(&key);
                kept.whole.insert(key, BTreeSet::new());
            }
        }
        let Some(key) = self.kept_step(namespace) else {
            return;
        };
        let is_there = self.is_left_by_any() || self.bears_losses(&key, 0);
        let lost = self.month().promises.kept_steps.whole.get(&key);
        assert!(
            is_there,
            "a kept step stays: {key:?} is gone at {now} ms, lost since it bore all losses: {lost:?}"
        );
        self.struck("kept steps that are there");
    }

    fn note_lack_of_room(&mut self, namespace: &Namespace) {
        let now = self.now;
        let month = self.month();
        let jobs = month.jobs.all.iter();
        let of_it = jobs.filter(|job| job.namespace == *namespace);
        let mut states = of_it
            .flat_map(|job| &job.alive)
            .flat_map(|it| it.ranks.states.values());
        let lacks = states.any(
            |state| matches!(state, RankState::Acquiring(since) if now - since >= LACKS_ROOM_MS),
        );
        let kept = &mut month.promises.kept_steps;
        let older = kept.newest(namespace).into_iter().skip(1);
        let older: Vec<CheckpointKey> = older.filter(|_| lacks).collect();
        if !older.is_empty() {
            kept.given_way.extend(older);
            self.struck("saves that lack room");
        }
    }

    /// Nodes that were lost are back, and nothing new is saved: the kept step is topped up too.
    pub(super) fn what_is_kept_beside_bears_m_again(&mut self, namespace: &Namespace) {
        let Some(key) = self.kept_step(namespace).filter(|_| self.keeps_two()) else {
            return;
        };
        let (now, m) = (self.now, self.scene.limits.m);
        assert!(
            self.bears_losses(&key, m),
            "kept steps are healed: {key:?} does not bear {m} losses at {now} ms"
        );
    }

    /// Some training job asks for it now and then.
    pub(super) fn ask_for_kept_steps(&mut self) {
        if !self.keeps_two() || self.random(ASK_ONE_IN) != 0 {
            return;
        }
        for job in 0..self.month().jobs.all.len() {
            let namespace = self.month().jobs.all[job].namespace.clone();
            let Some(key) = self.kept_step(&namespace) else {
                continue;
            };
            let alive = self.month().jobs.all[job].alive.iter();
            let mut training = alive.filter(|it| it.phase == Phase::Training);
            let Some((id, place)) = training.next().map(|it| (it.id, it.coordinator)) else {
                continue;
            };
            let plan = Request::Plan {
                step: Some(key.step),
                timeout_ms: PLAN_MS,
                allow_older: false,
            };
            let limit = u64::from(PLAN_MS);
            let whose = IncarnationId { job, id };
            self.ask_in_month(whose, place, plan, limit, What::KeptStep(key));
        }
    }

    pub(super) fn a_kept_step_is_offered(&mut self, key: &CheckpointKey, plan: &RestorePlan) {
        assert_eq!(plan.step, key.step, "what is offered was asked for");
        self.struck("kept steps offered");
    }

    pub(super) fn a_kept_step_is_not_refused(
        &mut self,
        asked: &Asked,
        key: &CheckpointKey,
        refusal: &Refusal,
    ) {
        let still = self.kept_step(&key.namespace).as_ref() == Some(key);
        let calm = self.is_undisturbed() || (self.is_settled() && asked.at > super::SETTLED_MS);
        assert!(
            !still || !calm,
            "a kept step is offered: {key:?} was asked for at {} ms and refused: {refusal:?}",
            asked.at
        );
    }
}
