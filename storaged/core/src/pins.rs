//! The steps of a namespace that somebody has pinned, as this node knows them. What follows for its RAM is in `stage/pins.rs`.

use std::collections::BTreeMap;

use storaged_wire::Namespace;
use storaged_wire::local::Keep;
use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::pins::{Pin, PinDoubt};

use crate::api::Now;
use crate::limits;

/// What was said of the steps of a namespace; of the same step whatever was changed later counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pins(BTreeMap<HighMark, PinWord>);

/// What was said of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PinWord {
    pinned: bool,
    changes: u32,
    doubt: Option<PinDoubt>,
    /// How often other nodes were asked for the step, of which nothing is here.
    asked: u32,
    asked_at: Now,
}

impl Pins {
    /// What is to be said of a step that somebody pins or lets go.
    pub fn next(&self, at: HighMark, keep: Keep) -> Pin {
        let before = self.0.get(&at).map_or(0, |word| word.changes);
        let changes = before.saturating_add(1);
        Pin {
            run: at.run,
            step: at.step,
            pinned: keep == Keep::Pin,
            changes,
            doubt: (keep == Keep::Pin).then_some(PinDoubt::Undecided),
        }
    }

    /// Whether a peer, or an earlier daemon, tells of something later than what is known. One huge number said once would leave none
    /// for the changes that follow.
    pub fn is_news(&self, told: &Pin) -> bool {
        let known = self.of(mark_of(told));
        let most = known.map_or(0, |it| it.changes);
        let most = most.saturating_add(limits::PIN_CHANGES_MISSED_MAX);
        let is_later = known.map_or(told.changes > 0, |known| age(told) > age(&known));
        is_later && told.changes <= most
    }

    /// Whether a change that a peer has not heard of is known.
    pub fn is_later_than(&self, told: &Pin) -> bool {
        self.of(mark_of(told))
            .is_some_and(|known| age(&known) > age(told))
    }

    /// Whether a step has not been changed since.
    pub fn is_last(&self, change: &Pin) -> bool {
        let known = self.of(mark_of(change));
        known.is_some_and(|it| (it.changes, it.pinned) == (change.changes, change.pinned))
    }

    /// What was said last of a step.
    pub fn of(&self, at: HighMark) -> Option<Pin> {
        self.0.get(&at).map(|word| word.to_wire(at))
    }

    /// Takes what is told. Of two that were changed equally often, nothing stays.
    pub fn learn(&mut self, told: &Pin) {
        if self.is_news(told) {
            self.put(told);
        }
    }

    /// Whether others may be asked for a pinned step again, which then counts as done. All nodes that have it tell of its pin again and again: if
    /// each time all were asked, and it cannot come back, they would say nothing else any more.
    pub fn may_ask(&mut self, at: HighMark, now: Now) -> bool {
        let Some(word) = self.0.get_mut(&at) else {
            return false;
        };
        let doubled = word.asked.saturating_sub(1);
        let wait = limits::PINS_EVERY_MS.saturating_mul(1 << doubled.min(16));
        let wait = wait.min(limits::PINNED_ASKED_AGAIN_MAX_MS);
        if word.asked > 0 && now.since(word.asked_at) < wait {
            return false;
        }
        word.asked = word.asked.saturating_add(1);
        word.asked_at = now;
        true
    }

    /// What an earlier daemon of this node went by, however often it was changed.
    pub fn recover(&mut self, kept: &Pin) {
        self.put(kept);
    }

    /// A node has come that may have what is asked for.
    pub fn ask_anew(&mut self) {
        self.0.values_mut().for_each(|word| word.asked = 0);
    }

    /// What is let go is forgotten first, then what is older than all others.
    fn put(&mut self, told: &Pin) {
        self.0.insert(mark_of(told), PinWord::of(told));
        while self.0.len() > limits::PINS_REMEMBERED_MAX {
            let free = self.0.iter().find(|(_, word)| !word.pinned);
            let goes = free.or_else(|| self.0.first_key_value());
            let goes = goes.map(|(at, _)| *at);
            goes.and_then(|at| self.0.remove(&at));
        }
    }

    pub fn has(&self, at: HighMark) -> bool {
        self.0.get(&at).is_some_and(|word| word.pinned)
    }

    /// Whether nobody takes the pin of a step back any more but by unpinning it.
    pub fn has_decided(&self, at: HighMark) -> bool {
        let word = self.0.get(&at);
        word.is_some_and(|word| word.pinned && word.doubt.is_none())
    }

    /// The steps that are pinned.
    pub fn pinned(&self) -> impl DoubleEndedIterator<Item = HighMark> + '_ {
        let pinned = self.0.iter().filter(|(_, word)| word.pinned);
        pinned.map(|(at, _)| *at)
    }

    /// For peers, and for the daemon that starts next; none if nothing was ever said.
    pub fn told(&self) -> Option<Vec<Pin>> {
        let all = self.0.iter().map(|(at, word)| word.to_wire(*at));
        (!self.0.is_empty()).then(|| all.collect())
    }
}

impl PinWord {
    fn of(told: &Pin) -> Self {
        Self {
            pinned: told.pinned,
            changes: told.changes,
            doubt: told.doubt,
            asked: 0,
            asked_at: Now::default(),
        }
    }

    fn to_wire(self, at: HighMark) -> Pin {
        Pin {
            run: at.run,
            step: at.step,
            pinned: self.pinned,
            changes: self.changes,
            doubt: self.doubt,
        }
    }
}

/// Orders what is said of one step: what was changed more often is later, of two that were changed equally often the one that holds nothing,
/// and a pin that has been decided is later than the same one before that.
fn age(pin: &Pin) -> impl Ord {
    (pin.changes, !pin.pinned, pin.doubt.is_none())
}

/// The checkpoint at a place among those of its job.
pub(crate) fn key_at(namespace: &Namespace, mark: HighMark) -> CheckpointKey {
    CheckpointKey {
        namespace: namespace.clone(),
        run: mark.run,
        step: mark.step,
    }
}

pub(crate) fn mark_of(pin: &Pin) -> HighMark {
    HighMark {
        run: pin.run,
        step: pin.step,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::at;

    impl Pins {
        fn change(&mut self, at: HighMark, keep: Keep) -> Pin {
            let pin = self.next(at, keep);
            self.learn(&pin);
            pin
        }
    }

    #[test]
    fn what_was_said_later_counts_in_whatever_order_it_is_heard() {
        let mut one = Pins::default();
        let early = one.change(at(7), Keep::Pin);
        let late = one.change(at(7), Keep::Unpin);
        for order in [[&early, &late], [&late, &early]] {
            let mut other = Pins::default();
            order.into_iter().for_each(|told| other.learn(told));
            assert!(!other.has(at(7)));
        }
        let again = one.change(at(7), Keep::Pin);
        let mut other = Pins::default();
        for told in [&again, &early, &late] {
            other.learn(told);
        }
        assert!(other.has(at(7)));
    }

    /// Two nodes change the same at the same time: both come to the same.
    #[test]
    fn of_two_that_changed_equally_often_the_one_counts_that_holds_nothing() {
        let (mut one, mut other) = (Pins::default(), Pins::default());
        let kept = one.change(at(7), Keep::Pin);
        let free = other.change(at(7), Keep::Unpin);
        one.learn(&free);
        other.learn(&kept);
        assert!(!one.has(at(7)) && !other.has(at(7)));
    }

    #[test]
    fn a_count_that_nobody_can_have_reached_leaves_room_for_the_changes_that_follow() {
        let mut pins = Pins::default();
        let mut told = pins.change(at(7), Keep::Unpin);
        (told.pinned, told.changes) = (true, u32::MAX);
        pins.learn(&told);
        assert!(!pins.has(at(7)));
    }

    /// Each of many nodes tells of the pin every ten seconds, for a day.
    #[test]
    fn a_step_that_does_not_come_back_is_asked_for_ever_more_rarely() {
        let mut pins = Pins::default();
        pins.change(at(7), Keep::Pin);
        let mut asked = Vec::new();
        for told_at in (0..86_400_000).step_by(100) {
            if pins.may_ask(at(7), Now(told_at)) {
                asked.push(told_at);
            }
        }
        assert_eq!(asked[..4], [0, 10_000, 30_000, 70_000]);
        let longest = limits::PINNED_ASKED_AGAIN_MAX_MS;
        let last = asked.windows(2).last();
        assert_eq!(last.map(|pair| pair[1] - pair[0]), Some(longest));
        let now = Now(86_400_000);
        pins.ask_anew();
        assert!(pins.may_ask(at(7), now), "a node has come");
        assert!(!pins.may_ask(at(7), now));
        pins.change(at(7), Keep::Unpin);
        pins.change(at(7), Keep::Pin);
        assert!(pins.may_ask(at(7), now), "it is a new pin");
    }

    #[test]
    fn what_is_not_pinned_any_more_is_forgotten_first() {
        let mut pins = Pins::default();
        pins.change(at(0), Keep::Pin);
        let most = limits::PINS_REMEMBERED_MAX as u64;
        for step in 1..most + 9 {
            pins.change(at(step), Keep::Unpin);
        }
        assert!(pins.has(at(0)));
        assert_eq!(pins.0.len(), limits::PINS_REMEMBERED_MAX);
    }
}
