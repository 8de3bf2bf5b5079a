//! A node that an operator drains: beside what a daemon finishes at any stop, no job's newest step may need this node any more, its place
//! goes to the next spare before the daemon ends, and whoever drains it hears what is left.

use std::time::Duration;

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

    /// Whether it has come to its end, and this node does not come back to what it has.
    pub fn is_for_good(&self) -> bool {
        self.phase == DrainPhase::Over && self.is_gone && self.left.is_empty()
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
    use super::*;

    /// Without a registry.
    fn drained(place: PlaceAfter, left: &[&str]) -> Drain {
        let mut drain = Drain::of(DrainOrder {
            within_ms: 1_000,
            place,
            bears: None,
        });
        assert!(!drain.is_for_good(), "it has not ended");
        let left = left.iter().map(ToString::to_string).collect();
        let after = Vec::new();
        drain.finished(WorkEnd { left, after }, None, Instant::now());
        drain
    }

    #[test]
    fn memory_is_of_no_use_any_more_where_nothing_is_left_and_nobody_comes_back() {
        assert!(drained(PlaceAfter::GivenUp, &[]).is_for_good());
        assert!(!drained(PlaceAfter::Kept, &[]).is_for_good());
        assert!(!drained(PlaceAfter::GivenUp, &["an upload"]).is_for_good());
    }

    /// Whatever its operator said: another node has the place.
    #[test]
    fn nor_does_one_come_back_that_has_lost_its_place() {
        let mut drain = drained(PlaceAfter::Kept, &[]);
        drain.place_is_gone(&PlaceTaken {
            epoch: 3,
            change: "n3 comes in place of n0".into(),
            place: "n3 has the place n0 of this node".into(),
        });
        assert!(drain.is_for_good());
    }
}
