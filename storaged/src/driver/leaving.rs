//! How a daemon stops: what only it can finish comes first, for as long as the operator gives it (`node.leave_within`).
//! Meanwhile it serves peers and trainers as before: a save that is under way comes through, and one that a trainer which is
//! stopped too begins while the daemon still waits for something.

use std::time::Duration;

use storaged_core::{LastWork, RequestId, Unfinished, Viewer};
use storaged_wire::drain::DrainOrder;
use storaged_wire::local::Reply;
use tokio::time::Instant;

use super::drain::{Drain, WorkEnd};
use super::{Daemon, PlaceTaken};

/// How often it looks whether something is left, and says what.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Steps that are begun later are not waited for: a job that trains on would keep the daemon till its time is over. Till then
/// the last save of a trainer that was told to stop with it may begin.
const LAST_SAVE: Duration = Duration::from_secs(5);

/// For [`Node::restart_objections`](storaged_core::Node::restart_objections): of each job's newest step something is left without this
/// node, in RAM or in the durable tier.
pub(super) const AT_LEAST_DURABLE: u32 = 0;

/// What was finished last is told to peers at once and again after a second. A node that went before they hear of it would leave
/// them with a checkpoint that is in the tier but for the manifest, which they then give up.
const TOLD_WITHIN: Duration = Duration::from_millis(1_500);

/// What has come meanwhile, of a job that trains on, may be done a moment later.
const QUIET_WITHIN: Duration = Duration::from_secs(3);

/// A daemon that was told to stop.
pub(super) struct Leaving {
    until: Instant,
    told_by: ToldBy,
    /// Nothing before this, since something was unfinished or others' copies are under way.
    told_at: Option<Instant>,
    last_save_at: Instant,
    last_work: LastWork,
    /// Until when a moment is waited for in which nothing is unfinished, once all that was is done.
    quiet_by: Option<Instant>,
    look_at: Instant,
    say_at: Instant,
}

/// Who told a daemon to stop.
enum ToldBy {
    /// Whoever started it.
    Signal,
    /// An operator, who waits for a report.
    Operator(Drain),
    /// The registry: another node has its place.
    Registry,
}

/// What a look at a daemon that leaves has shown.
enum Look {
    /// It goes on.
    Busy,
    /// It has finished, or its time is over, and this is left.
    Ready(Vec<String>),
}

impl Leaving {
    fn is_drain(&self) -> bool {
        matches!(self.told_by, ToldBy::Operator(_))
    }

    /// A signal to a daemon that leaves already: it has so long now. None: it has been told so before, and goes at once.
    fn cut_short(&mut self, within: Duration) -> Option<()> {
        let ToldBy::Operator(drain) = &mut self.told_by else {
            return None;
        };
        self.until = self.until.min(Instant::now() + within);
        drain.first_signal()
    }

    /// Whether nobody needs this node's memory any more: an operator had it go for good, and this is all that it leaves unfinished.
    pub fn is_for_good(&self, left: &[String]) -> bool {
        match &self.told_by {
            ToldBy::Operator(drain) => drain.is_for_good() && left.is_empty(),
            ToldBy::Signal | ToldBy::Registry => false,
        }
    }

    /// When it is to be looked at next.
    pub fn look_at(&self) -> Instant {
        self.look_at
    }

    /// What is waited for, of all that is unfinished.
    fn relevant(&mut self, unfinished: Vec<Unfinished>, now: Instant) -> Vec<Unfinished> {
        if now < self.last_save_at {
            return unfinished;
        }
        self.last_work.of(unfinished)
    }
}

impl Daemon {
    /// A signal, or nobody is there any more who could send one. None: at once.
    pub(super) fn heed_signal(&mut self, signal: Option<()>) -> Option<()> {
        let within = self.config.leave_within;
        match &mut self.leaving {
            None => self.leaving = Some(self.leave(ToldBy::Signal, within)),
            Some(leaving) => leaving.cut_short(within)?,
        }
        signal
    }

    /// Another node has this one's place. Nobody else has its uploads yet.
    pub(super) fn heed_loss_of_place(&mut self, taken: PlaceTaken) {
        let PlaceTaken {
            epoch,
            change,
            place,
        } = &taken;
        if let Some(Leaving {
            told_by: ToldBy::Operator(drain),
            ..
        }) = &mut self.leaving
        {
            tracing::info!(epoch, change, "this node has no place any more");
            drain.place_is_gone(&taken);
            return;
        }
        tracing::error!(
            epoch,
            change,
            place,
            "this node has lost its place: it finishes what only it can, ends, and is a spare from its next start on"
        );
        if self.leaving.is_none() {
            let within = self.config.leave_within;
            self.leaving = Some(self.leave(ToldBy::Registry, within));
        }
        self.place_taken = Some(taken);
    }

    /// An operator ends this daemon, or asks how far that is.
    pub(super) fn drain(&mut self, id: RequestId, order: DrainOrder) {
        let within = Duration::from_millis(order.within_ms.into());
        if !self.leaving.as_ref().is_some_and(Leaving::is_drain) {
            tracing::info!(?within, place = ?order.place, "an operator drains this node");
            let mut drain = Drain::of(order);
            if let Some(taken) = self.place_taken.take() {
                drain.place_is_gone(&taken);
            }
            self.leaving = Some(self.leave(ToldBy::Operator(drain), within));
        }
        let Some(leaving) = &mut self.leaving else {
            return;
        };
        let now = Instant::now();
        // Whoever drains asks again and again, each time for as long. One who has less time, as after a notice of preemption, is heard.
        leaving.until = leaving.until.min(now + within);
        let left = leaving.until.saturating_duration_since(now);
        if let ToldBy::Operator(drain) = &mut leaving.told_by {
            drain.told_again(order);
            let report = drain.report(left);
            self.answer(id, Reply::Draining(report), None);
        }
    }

    /// Begins to leave.
    fn leave(&mut self, told_by: ToldBy, within: Duration) -> Leaving {
        self.links.is_leaving = true;
        self.show();
        let now = Instant::now();
        Leaving {
            until: now + within,
            told_by,
            told_at: self.node.awaits_copies().then_some(now + TOLD_WITHIN),
            last_save_at: now + LAST_SAVE,
            last_work: LastWork::default(),
            quiet_by: None,
            look_at: now,
            say_at: now,
        }
    }

    /// What is left unfinished, once the daemon is to end.
    pub(super) fn has_left(&mut self) -> Option<Vec<String>> {
        let mut leaving = self.leaving.take()?;
        let now = Instant::now();
        if self.config.leave_within.is_zero() && !leaving.is_drain() {
            return Some(Vec::new());
        }
        let left = (now >= leaving.look_at).then(|| {
            leaving.look_at = now + LOOK_EVERY;
            self.look_at_leaving(&mut leaving, now)
        });
        self.leaving = Some(leaving);
        left.flatten()
    }

    fn look_at_leaving(&self, leaving: &mut Leaving, now: Instant) -> Option<Vec<String>> {
        let look = match &leaving.told_by {
            ToldBy::Operator(drain) if drain.has_finished() => Look::Busy,
            _ => self.look_at_work(leaving, now),
        };
        match (&mut leaving.told_by, look) {
            (ToldBy::Operator(drain), Look::Ready(left)) => {
                let after = self.node.after_drain();
                let end = WorkEnd { left, after };
                drain.finished(end, self.members.as_ref(), now);
                None
            }
            (ToldBy::Operator(drain), Look::Busy) => {
                drain.look(now, self.links.registry_fault.as_deref())
            }
            (_, Look::Ready(left)) => Some(left),
            (_, Look::Busy) => None,
        }
    }

    fn look_at_work(&self, leaving: &mut Leaving, now: Instant) -> Look {
        if now >= leaving.until {
            return Look::Ready(self.left_by(leaving));
        }
        let unfinished = leaving.relevant(self.node.unfinished(), now);
        if !unfinished.is_empty() {
            leaving.told_at = Some(now + TOLD_WITHIN);
        }
        let mut waits: Vec<String> = unfinished.iter().map(ToString::to_string).collect();
        if let ToldBy::Operator(drain) = &mut leaving.told_by {
            // Coding it is what makes a step do without this node, so that is waited for first.
            if waits.is_empty() {
                waits = self.objections(drain);
            }
            drain.waits(&waits);
        }
        if waits.is_empty() && leaving.told_at.is_none_or(|at| now >= at) {
            // What was begun later is left too, and is said.
            let left = self.left_by(leaving);
            let quiet_by = *leaving.quiet_by.get_or_insert(now + QUIET_WITHIN);
            if left.is_empty() || now >= quiet_by || self.left_now().is_empty() {
                return Look::Ready(left);
            }
            return Look::Busy;
        }
        leaving.quiet_by = None;
        if now >= leaving.say_at {
            leaving.say_at = now + SAY_EVERY;
            let seconds = (leaving.until - now).as_secs();
            for one in &waits {
                tracing::info!("leaving within {seconds} s, before that: {one}");
            }
        }
        Look::Busy
    }

    /// What is left if it goes now.
    pub(super) fn left_by(&self, leaving: &Leaving) -> Vec<String> {
        let mut left = self.left_now();
        match &leaving.told_by {
            ToldBy::Operator(drain) => left.extend(self.objections(drain)),
            ToldBy::Signal => left.extend(self.node.ends_with_this_node(Some(AT_LEAST_DURABLE))),
            // Who has its place puts back what it held.
            ToldBy::Registry => {}
        }
        left
    }

    /// What speaks against going for good.
    fn objections(&self, drain: &Drain) -> Vec<String> {
        let node = &self.node;
        node.restart_objections(Some(drain.bears()), &Viewer::Operator)
    }

    /// What is unfinished.
    pub(super) fn left_now(&self) -> Vec<String> {
        let unfinished = self.node.unfinished();
        unfinished.iter().map(ToString::to_string).collect()
    }
}
