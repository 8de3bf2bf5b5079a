//! The durable tier of a month: well, slow, full, failing, hanging, or lying about what it has.

use storaged_core::DurableFault;

use super::super::world::World;
use super::FAULTS_END_MS;
use crate::testkit::{Course, Task};

/// What kind of tier a scenario has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    Absent,
    Well,
    /// Uploads take up to 100 steps, publishing and listing up to 10 s.
    Slow,
    /// Full, failing and hanging by turns, and well for a while now and then.
    Failing,
    /// It lists what it had some time ago.
    Lying,
}

/// What it is like just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sky {
    Well,
    Slow,
    Full,
    Failing,
    Hanging,
}

#[derive(Debug)]
pub struct Weather {
    now: Sky,
    changes_at: u64,
}

impl Weather {
    pub fn of(kind: TierKind) -> Self {
        let now = match kind {
            TierKind::Slow => Sky::Slow,
            _ => Sky::Well,
        };
        let changes_at = 10_000;
        Self { now, changes_at }
    }
}

impl World {
    /// The weather changes each 5 to 25 s.
    pub(super) fn tier_weather(&mut self) {
        let now = self.now;
        let kind = self.month().scenario.tier;
        if self.month().weather.changes_at > now || kind != TierKind::Failing {
            return;
        }
        let changes_at = now + 5_000 + self.random(20_000);
        let sky = match self.random(4) {
            0 => Sky::Well,
            1 => Sky::Full,
            2 => Sky::Failing,
            _ => Sky::Hanging,
        };
        self.struck("tier outages");
        self.month().weather = Weather {
            now: sky,
            changes_at,
        };
    }

    pub(super) fn tier_is_well(&mut self) {
        self.month().weather.now = Sky::Well;
    }

    /// How a task of a month's tier goes; what it comes to is decided when it ends.
    pub fn tier_course_in_month(&mut self, task: &Task) -> Option<Course> {
        let month = self.scene.month.as_deref()?;
        let claims = matches!(
            task,
            Task::Claim(..) | Task::Record(..) | Task::Find(..) | Task::Successions(..)
        );
        // Where links are cut as well, runs are claimed beside the weather.
        if claims && month.scenario.links {
            return None;
        }
        let sky = month.weather.now;
        let usual = match task {
            Task::Upload(..) | Task::Fetch(..) => 50 + self.random(50),
            _ => 10 + self.random(30),
        };
        let lasts_ms = match (sky, task) {
            (Sky::Well, _) => usual,
            (Sky::Slow, Task::Upload(..)) => 300 << self.random(8),
            (Sky::Slow, Task::Fetch(..)) => 10 * usual,
            (Sky::Slow, _) => 100 << self.random(7),
            (Sky::Full | Sky::Failing, _) => 10 + self.random(500),
            // Whoever hangs is let go with the storm.
            (Sky::Hanging, _) => FAULTS_END_MS.saturating_sub(self.now) + self.random(3_000),
        };
        Some(Course::Open { lasts_ms })
    }

    pub fn tier_fault_in_month(&self, task: &Task) -> Option<DurableFault> {
        let reads = matches!(
            task,
            Task::List(..) | Task::Fetch(..) | Task::Find(..) | Task::Successions(..)
        );
        match self.scene.month.as_deref()?.weather.now {
            Sky::Full if !reads => Some(DurableFault::Full("no space left in the tier".into())),
            Sky::Failing | Sky::Hanging => {
                Some(DurableFault::Unavailable("500 of the tier".into()))
            }
            _ => None,
        }
    }

    /// Until faults end a tier that lies says what it had some time ago.
    pub fn listed_until_in_month(&self) -> u64 {
        let kind = self.scene.month.as_deref().map(|month| month.scenario.tier);
        let lies = kind == Some(TierKind::Lying) && self.now < FAULTS_END_MS;
        self.now.saturating_sub(if lies { 15_000 } else { 0 })
    }
}
