//! A node that an operator drains: beside what a daemon finishes at any stop, no job's newest step may need this node any more, its place
//! goes to the next spare before the daemon ends, and whoever drains it hears what is left.

use std::time::Duration;

use storaged_wire::CheckpointState;
use storaged_wire::drain::{DrainOrder, DrainPhase, DrainReport, PlaceAfter, StepAfterDrain};
use tokio::time::Instant;

use super::leaving::AT_LEAST_DURABLE;
use super::{Members, PlaceTaken};

/// The registry answers within this time, or the place is given up by the others.
const GIVE_UP_WITHIN: Duration = Duration::from_secs(3);
/// Whoever asked hears the end of it, if he asks again within this time.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// An answer is on its way to the socket for so long at most.
const ANSWERED_WITHIN: Duration = Duration::from_millis(200);

/// How the work of a drained node has ended.
pub(super) struct WorkEnd {
    /// What is not done.
    pub left: Vec<String>,
    /// What jobs' newest steps bear without this node.
    pub after: Vec<StepAfterDrain>,
}

/// How far a drain is.
pub(super) struct Drain {
    place: PlaceAfter,
    bears: u32,
    phase: DrainPhase,
    /// The next phase begins by then.
    until: Option<Instant>,
    /// What is waited for, or left.
    left: Vec<String>,
    /// What jobs' newest steps bear without this node, once its work is done.
    after: Option<Vec<StepAfterDrain>>,
    /// What became of the place.
    given_up: Option<String>,
    /// Nobody counts on this node any more: it has no place, or was to go for good where files say who has one.
    is_gone: bool,
    /// Others may lose a node more before what this one has is needed again.
    is_spared: bool,
    was_signalled: bool,
    was_heard: bool,
}

impl Drain {
    pub fn of(order: DrainOrder) -> Self {
        Self {
            place: order.place,
            bears: order.bears.unwrap_or(AT_LEAST_DURABLE),
            phase: DrainPhase::Finishing,
            until: None,
            left: Vec::new(),
            after: None,
            given_up: None,
            is_gone: false,
            is_spared: false,
            was_signalled: false,
            was_heard: false,
        }
    }

    /// Node losses that each job's newest step must bear before it goes.
    pub fn bears(&self) -> u32 {
        self.bears
    }

    /// Another operator says how it is to end: whoever goes for good, does, and who asks for less of what is left has less time.
    pub fn told_again(&mut self, order: DrainOrder) {
        self.bears = self.bears.min(order.bears.unwrap_or(AT_LEAST_DURABLE));
        if order.place == PlaceAfter::GivenUp && self.given_up.is_none() {
            self.place = PlaceAfter::GivenUp;
        }
    }

    /// Whether the daemon's work is done, and only the place and the report are left.
    pub fn has_finished(&self) -> bool {
        self.phase != DrainPhase::Finishing
    }

    /// Whether it has come to its end, this node does not come back to what it has, and nobody would want that back after the next loss.
    pub fn is_for_good(&self) -> bool {
        let is_of_no_use = self.is_gone && self.is_spared && self.left.is_empty();
        self.phase == DrainPhase::Over && is_of_no_use
    }

    /// None if there was one before.
    pub fn first_signal(&mut self) -> Option<()> {
        (!std::mem::replace(&mut self.was_signalled, true)).then_some(())
    }

    /// What the work still waits for.
    pub fn waits(&mut self, left: &[String]) {
        self.left = left.to_vec();
    }

    /// The work is done but for what is left.
    pub fn finished(&mut self, end: WorkEnd, members: Option<&Members>, now: Instant) {
        self.left = end.left;
        let does_without =
            |step: &StepAfterDrain| step.bears.losses > 0 || step.state == CheckpointState::Durable;
        self.is_spared = end.after.iter().all(does_without);
        // Who has lost its place has lost its links: it knows of no step any more what it bears.
        self.after = Some(end.after).filter(|_| self.given_up.is_none());
        let Some(members) = members else {
            self.is_gone = self.place == PlaceAfter::GivenUp;
            self.over(None, now);
            return;
        };
        if self.place == PlaceAfter::Kept {
            self.over(Some("kept".into()), now);
            return;
        }
        members.going.notify_one();
        self.phase = DrainPhase::GivingUpPlace;
        self.until = Some(now + GIVE_UP_WITHIN);
    }

    /// Nobody fills the place any more, or another node does.
    pub fn place_is_gone(&mut self, taken: &PlaceTaken) {
        let PlaceTaken { epoch, change, .. } = taken;
        let what = format!("given up since epoch {epoch}: {change}");
        self.is_gone = true;
        if self.phase == DrainPhase::GivingUpPlace {
            self.over(Some(what), Instant::now());
        } else {
            self.given_up = Some(what);
            self.place = PlaceAfter::Kept;
        }
    }

    fn over(&mut self, place: Option<String>, now: Instant) {
        self.given_up = self.given_up.take().or(place);
        self.phase = DrainPhase::Over;
        self.until = Some(now + HEARD_WITHIN);
    }

    /// What is left, once the daemon is to end. `fault` is why the registry cannot be used, as far as that is known.
    pub fn look(&mut self, now: Instant, fault: Option<&str>) -> Option<Vec<String>> {
        if self.until.is_none_or(|until| now < until) {
            return None;
        }
        if self.phase == DrainPhase::Over {
            return Some(std::mem::take(&mut self.left));
        }
        let fault = fault.unwrap_or("the registry does not answer");
        let late = format!(
            "its place could not be given up in time, and the other nodes give it up after membership.replace_after: {fault}"
        );
        self.left.push(late);
        self.over(Some("not given up".into()), now);
        None
    }

    /// For whoever asks.
    pub fn report(&mut self, within: Duration) -> DrainReport {
        if self.phase == DrainPhase::Over && !std::mem::replace(&mut self.was_heard, true) {
            self.until = Some(Instant::now() + ANSWERED_WITHIN);
        }
        DrainReport {
            phase: self.phase,
            within_ms: u32::try_from(within.as_millis()).unwrap_or(u32::MAX),
            left: self.left.clone(),
            place: self.given_up.clone(),
            after: self.after.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::local::Bears;
    use storaged_wire::peer::CheckpointKey;
    use storaged_wire::{Namespace, RunId, Step};

    use super::*;

    /// A step that bears so many losses once the node has gone.
    fn step(losses: u32, state: CheckpointState) -> StepAfterDrain {
        let key = CheckpointKey {
            namespace: Namespace::new("job").unwrap(),
            run: RunId::new(1),
            step: Step::new(10),
        };
        let bears = Bears { losses, of: 2 };
        StepAfterDrain { key, bears, state }
    }

    /// Without a registry.
    fn drained(place: PlaceAfter, end: WorkEnd) -> Drain {
        let mut drain = Drain::of(DrainOrder {
            within_ms: 1_000,
            place,
            bears: None,
        });
        assert!(!drain.is_for_good(), "it has not ended");
        drain.finished(end, None, Instant::now());
        drain
    }

    fn all_done(after: Vec<StepAfterDrain>) -> WorkEnd {
        let left = Vec::new();
        WorkEnd { left, after }
    }

    #[test]
    fn memory_is_of_no_use_any_more_where_nothing_is_left_and_nobody_comes_back() {
        let is_for_good = |place, end| drained(place, end).is_for_good();
        assert!(is_for_good(PlaceAfter::GivenUp, all_done(Vec::new())));
        assert!(!is_for_good(PlaceAfter::Kept, all_done(Vec::new())));
        let left = WorkEnd {
            left: vec!["an upload".into()],
            after: Vec::new(),
        };
        assert!(!is_for_good(PlaceAfter::GivenUp, left));
    }

    /// With the next node that is lost this one's memory is what would bring a step back.
    #[test]
    fn memory_without_which_a_step_bears_no_loss_stays() {
        let protected = CheckpointState::Protected;
        for (after, is_of_no_use) in [
            (step(1, protected), true),
            (step(0, protected), false),
            (step(0, CheckpointState::Durable), true),
        ] {
            let drain = drained(PlaceAfter::GivenUp, all_done(vec![after.clone()]));
            assert_eq!(drain.is_for_good(), is_of_no_use, "{after:?}");
        }
    }

    /// Whatever its operator said: another node has the place.
    #[test]
    fn nor_does_one_come_back_that_has_lost_its_place() {
        let mut drain = drained(PlaceAfter::Kept, all_done(Vec::new()));
        drain.place_is_gone(&PlaceTaken {
            epoch: 3,
            change: "n3 comes in place of n0".into(),
            place: "n3 has the place n0 of this node".into(),
        });
        assert!(drain.is_for_good());
    }
}
