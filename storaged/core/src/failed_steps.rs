//! The steps of a namespace that restarts have failed from: how often, and until when plans pass them over. What follows for plans is
//! in `restore/failed.rs`.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use storaged_wire::Step;
use storaged_wire::failed::FailedRestart;
use storaged_wire::peer::HighMark;

use crate::api::Now;
use crate::limits;

/// What was said of the steps of a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FailedRestarts(BTreeMap<HighMark, Failures>);

/// What was said of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Failures {
    times: u32,
    /// Until when it is passed over, unless it is for good.
    until: Now,
    changes: u32,
}

/// How a step stands in plans that name none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quarantine {
    None,
    /// It is offered if nothing else is restorable.
    Until(Now),
    /// It is offered when an operator has lifted it.
    ForGood,
}

impl Failures {
    fn quarantine(self, now: Now) -> Quarantine {
        if self.times >= limits::FAILURES_MAX && !planted!("quarantine_always_ends") {
            Quarantine::ForGood
        } else if self.times > 0 && now < self.until {
            Quarantine::Until(self.until)
        } else {
            Quarantine::None
        }
    }

    /// Whoever says it within this time speaks of the same restart: every node's launcher may say it.
    fn is_same_restart(self, now: Now) -> bool {
        let began = self.until.0.saturating_sub(back_off_ms(self.times));
        self.times > 0 && now.0.saturating_sub(began) < limits::FAILURE_SAID_WITHIN_MS
    }

    fn to_wire(self, at: HighMark, now: Now) -> FailedRestart {
        let wait_ms = match self.quarantine(now) {
            Quarantine::Until(until) => Some(until.since(now)),
            Quarantine::None | Quarantine::ForGood => None,
        };
        FailedRestart {
            run: at.run,
            step: at.step,
            times: self.times,
            wait_ms,
            changes: self.changes,
        }
    }
}

/// Twice as long each time.
fn back_off_ms(times: u32) -> u64 {
    let doubled = times.clamp(1, limits::FAILURES_MAX) - 1;
    limits::QUARANTINE_MS << doubled
}

impl FailedRestarts {
    /// A restart from this step has failed.
    pub fn count(&mut self, at: HighMark, now: Now) {
        let before = self.0.get(&at).copied();
        if before.is_some_and(|it| it.is_same_restart(now) || it.times >= limits::FAILURES_MAX) {
            return;
        }
        let (times, changes) = before.map_or((0, 0), |it| (it.times, it.changes));
        let times = times + 1;
        self.put(
            at,
            Failures {
                times,
                until: now.plus(back_off_ms(times)),
                changes: changes.saturating_add(1),
            },
        );
    }

    /// Takes back what was said of a step; of which runs.
    pub fn lift(&mut self, step: Step) -> Vec<HighMark> {
        let said = self.0.iter_mut();
        let of_step = said.filter(|(at, it)| at.step == step && it.times > 0);
        let mut lifted = Vec::new();
        for (at, failures) in of_step {
            failures.times = 0;
            failures.changes = failures.changes.saturating_add(1);
            lifted.push(*at);
        }
        lifted
    }

    /// Takes what a peer or an earlier daemon says, where it is later than what is known. Of the same, whoever counts for longer has
    /// the shorter time left.
    pub fn learn(&mut self, told: &FailedRestart, now: Now) {
        let at = HighMark {
            run: told.run,
            step: told.step,
        };
        let longest = back_off_ms(told.times);
        let mut until = now.plus(told.wait_ms.unwrap_or(0).min(longest));
        let known = self.0.get(&at).copied();
        // One huge number said once would leave none for the changes that follow.
        let changes_before = known.map_or(0, |known| known.changes);
        let most = changes_before.saturating_add(limits::FAILED_CHANGES_MISSED_MAX);
        if told.changes > most && !planted!("changes_without_limit") {
            return;
        }
        if let Some(known) = known {
            match (told.changes, told.times).cmp(&(known.changes, known.times)) {
                Ordering::Less => return,
                Ordering::Equal => until = until.min(known.until),
                Ordering::Greater => {}
            }
        }
        let (times, changes) = (told.times, told.changes);
        let failures = Failures {
            times,
            until,
            changes,
        };
        self.put(at, failures);
    }

    /// What is older than all others goes first: nobody restarts from it any more.
    fn put(&mut self, at: HighMark, failures: Failures) {
        self.0.insert(at, failures);
        while self.0.len() > limits::FAILED_STEPS_MAX {
            self.0.pop_first();
        }
    }

    /// How a step stands, and how often it has failed.
    pub fn of(&self, at: HighMark, now: Now) -> (Quarantine, u32) {
        let known = self.0.get(&at);
        known.map_or((Quarantine::None, 0), |it| (it.quarantine(now), it.times))
    }

    /// For peers.
    pub fn told(&self, now: Now) -> Vec<FailedRestart> {
        let all = self.0.iter();
        all.map(|(at, failures)| failures.to_wire(*at, now))
            .collect()
    }

    /// For the daemon that starts next, which knows no time before its own: the whole back-off begins anew, until a peer knows better.
    pub fn kept(&self) -> Option<Vec<FailedRestart>> {
        let all = self.0.iter().map(|(at, failures)| FailedRestart {
            run: at.run,
            step: at.step,
            times: failures.times,
            wait_ms: Some(back_off_ms(failures.times)),
            changes: failures.changes,
        });
        (!self.0.is_empty()).then(|| all.collect())
    }

    /// As an earlier daemon of this node left it.
    pub fn recovered(kept: Option<Vec<FailedRestart>>, now: Now) -> Self {
        let mut all = Self::default();
        for told in kept.iter().flatten() {
            all.learn(told, now);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::RunId;

    use super::*;
    use crate::testkit::at;

    #[test]
    fn a_count_that_nobody_can_have_reached_leaves_room_for_the_changes_that_follow() {
        let (mut known, now) = (FailedRestarts::default(), Now(1_000));
        known.count(at(7), now);
        let mut told = known.told(now)[0];
        (told.times, told.changes) = (0, u32::MAX);
        known.learn(&told, now);
        assert_ne!(known.of(at(7), now).0, Quarantine::None);
        told.changes = 2;
        known.learn(&told, now);
        assert_eq!(known.of(at(7), now).0, Quarantine::None);
    }

    #[test]
    fn what_was_said_later_counts_in_whatever_order_it_is_heard() {
        let (mut one, now) = (FailedRestarts::default(), Now(1_000));
        one.count(at(7), now);
        let early = one.told(now);
        one.lift(Step::new(7));
        let late = one.told(now);
        for order in [[&early, &late], [&late, &early]] {
            let mut other = FailedRestarts::default();
            for told in order.into_iter().flatten() {
                other.learn(told, now);
            }
            assert_eq!(other.of(at(7), now).0, Quarantine::None);
        }
        one.count(at(7), now);
        assert_eq!(one.of(at(7), now).1, 1, "counted from the beginning");
    }

    #[test]
    fn no_more_than_so_many_steps_are_remembered_and_the_oldest_go() {
        let mut all = FailedRestarts::default();
        let most = limits::FAILED_STEPS_MAX as u64;
        (0..most + 10).for_each(|step| all.count(at(step), Now(0)));
        assert_eq!(all.0.len(), limits::FAILED_STEPS_MAX);
        assert_eq!(all.of(at(9), Now(1)).1, 0);
        assert_eq!(all.of(at(most + 9), Now(1)).1, 1);
    }

    /// What a peer tells cannot keep a step away for longer than its count says.
    #[test]
    fn a_wait_that_is_told_is_at_most_the_back_off() {
        let mut all = FailedRestarts::default();
        let told = FailedRestart {
            run: RunId::new(1),
            step: Step::new(7),
            times: 1,
            wait_ms: Some(u64::MAX),
            changes: 1,
        };
        all.learn(&told, Now(5));
        let until = Now(5).plus(limits::QUARANTINE_MS);
        assert_eq!(all.of(at(7), Now(6)).0, Quarantine::Until(until));
    }
}
