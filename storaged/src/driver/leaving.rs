//! How a daemon stops: what only it can finish comes first, for as long as the operator gives it (`node.leave_within`).
//! Meanwhile it serves peers and trainers as before: a save that is under way comes through, and one that a trainer which is
//! stopped too begins while the daemon still waits for something.

use std::collections::BTreeSet;
use std::time::Duration;

use storaged_core::Unfinished;
use storaged_wire::SlotId;
use storaged_wire::peer::CheckpointKey;
use tokio::time::Instant;

use super::Daemon;

/// How often it looks whether something is left, and says what.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Steps that are begun later are not waited for: a job that trains on would keep the daemon till its time is over. Till then
/// the last save of a trainer that was told to stop with it may begin.
const LAST_SAVE: Duration = Duration::from_secs(5);

/// What was finished last is told to peers at once and again after a second. A node that went before they hear of it would leave
/// them with a checkpoint that is in the tier but for the manifest, which they then give up.
const TOLD_WITHIN: Duration = Duration::from_millis(1_500);

/// A daemon that was told to stop.
pub(super) struct Leaving {
    until: Instant,
    /// Nothing before this, since something was unfinished or others' copies are under way.
    told_at: Option<Instant>,
    last_save_at: Instant,
    /// Slots that were being filled then, as long as they are; and once they are not, what had begun by then.
    filled: Option<BTreeSet<SlotId>>,
    waited_for: Option<BTreeSet<CheckpointKey>>,
    look_at: Instant,
    say_at: Instant,
}

impl Leaving {
    /// When it is to be looked at next.
    pub fn look_at(&self) -> Instant {
        self.look_at
    }

    /// What is waited for, of all that is unfinished.
    fn relevant(&mut self, mut unfinished: Vec<Unfinished>, now: Instant) -> Vec<Unfinished> {
        if now < self.last_save_at {
            return unfinished;
        }
        let mut filling = BTreeSet::new();
        for one in &unfinished {
            if let Unfinished::Filling { slots, .. } = one {
                filling.extend(slots.iter().copied());
            }
        }
        let filled = self.filled.get_or_insert_with(|| filling.clone());
        filled.retain(|slot| filling.contains(slot));
        if !filled.is_empty() {
            return unfinished;
        }
        let begun = || unfinished.iter().filter_map(Unfinished::key).cloned();
        let waited_for = self.waited_for.get_or_insert_with(|| begun().collect());
        unfinished.retain(|one| one.key().is_some_and(|key| waited_for.contains(key)));
        unfinished
    }
}

impl Daemon {
    /// Begins to leave.
    pub(super) fn leave(&mut self) -> Leaving {
        self.links.is_leaving = true;
        self.show();
        let now = Instant::now();
        Leaving {
            until: now + self.config.leave_within,
            told_at: self.node.awaits_copies().then_some(now + TOLD_WITHIN),
            last_save_at: now + LAST_SAVE,
            filled: None,
            waited_for: None,
            look_at: now,
            say_at: now,
        }
    }

    /// What is left unfinished, once there is nothing or no time any more.
    pub(super) fn has_left(&self, leaving: Option<&mut Leaving>) -> Option<Vec<Unfinished>> {
        let leaving = leaving?;
        if self.config.leave_within.is_zero() {
            return Some(Vec::new());
        }
        let now = Instant::now();
        if now < leaving.look_at {
            return None;
        }
        leaving.look_at = now + LOOK_EVERY;
        let unfinished = leaving.relevant(self.node.unfinished(), now);
        if !unfinished.is_empty() {
            leaving.told_at = Some(now + TOLD_WITHIN);
        }
        let is_told = unfinished.is_empty() && leaving.told_at.is_none_or(|at| now >= at);
        if is_told || now >= leaving.until {
            // What was begun later is left too, and is said.
            return Some(self.node.unfinished());
        }
        if now >= leaving.say_at {
            leaving.say_at = now + SAY_EVERY;
            let seconds = (leaving.until - now).as_secs();
            for one in &unfinished {
                tracing::info!("leaving within {seconds} s, before that: {one}");
            }
        }
        None
    }
}
