//! One attack after the other on a scene, and what is held against each.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::cross;
use crate::report::{Outcome, Report};
use crate::scene::{Enemy, Scene};
use crate::watch::Measured;

/// What the honest job does during an attack, at least, and after it.
pub const ROUNDS: u64 = 3;
/// Memory that a daemon may keep of an attack.
const KEPT: u64 = 24 << 20;

/// Whether an attack takes seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    Quick,
    Long,
}

/// What hostile programs do while the honest job goes on.
pub struct Attack {
    pub name: &'static str,
    pub length: Length,
    pub enemy: Enemy,
    /// What it saw; an error is something that must not be.
    pub run: fn(&Scene) -> Result<String>,
}

/// Attacks share a scene until one of them is not held, or another enemy's turn comes: those after it start anew.
pub struct Trial {
    scene: Option<Scene>,
    memory_wait: Duration,
}

impl Trial {
    /// Memory that an attack took is given back within this time.
    pub fn new(memory_wait: Duration) -> Self {
        Self {
            scene: None,
            memory_wait,
        }
    }

    fn scene(&mut self, enemy: Enemy, report: &mut Report) -> Result<Scene> {
        let of_before = self.scene.take();
        if let Some(scene) = of_before.filter(|it| it.enemy == enemy) {
            return Ok(scene);
        }
        let scene = Scene::start(enemy)?;
        scene.watch.take();
        scene.endure(ROUNDS)?;
        report.rested(scene.watch.take().status);
        Ok(scene)
    }

    /// # Errors
    /// If there is no cluster to attack; what an attack breaks is reported.
    pub fn run(&mut self, attack: &Attack, report: &mut Report) -> Result<()> {
        let scene = self.scene(attack.enemy, report)?;
        scene.watch.take();
        scene.endure(1)?;
        let rest = scene.watch.take().memory;
        let before = scene.honest.count();

        let attacked = (attack.run)(&scene);
        let Measured {
            memory,
            status,
            mut faults,
        } = scene.watch.take();
        let saves = scene.honest.count().since(&before);
        let after = self.well_again(&scene, &rest).and_then(|()| scene.clean());

        faults.extend(scene.honest.count().since(&before).faults);
        faults.extend(after.err().map(|error| format!("{error:#}")));
        let seen = attacked.unwrap_or_else(|error| {
            faults.push(format!("{error:#}"));
            String::new()
        });
        faults.truncate(5);
        let above = memory.iter().zip(&rest);
        let above = above.map(|(most, rest)| most.saturating_sub(*rest));
        let held = faults.is_empty();
        report.add(Outcome {
            name: attack.name,
            seen,
            fell: faults,
            memory: above.max().unwrap_or_default(),
            saves,
            status,
            aborts: scene.aborted(),
        });
        self.scene = held.then_some(scene);
        Ok(())
    }

    /// What one tenant can do to another.
    ///
    /// # Errors
    /// If there is no cluster, or the honest job does not survive it.
    pub fn cross(&mut self, report: &mut Report) -> Result<()> {
        self.scene = None;
        let scene = self.scene(Enemy::User, report)?;
        cross::measure(&scene, report)
    }

    /// The honest job goes on, all daemons live, and what they took is given back.
    fn well_again(&self, scene: &Scene, rest: &[u64]) -> Result<()> {
        scene.endure(ROUNDS)?;
        let began = Instant::now();
        loop {
            ensure!(scene.aborted() == 0, "a daemon has ended");
            let now = scene.memory();
            let kept = now.iter().zip(rest);
            let kept = kept.map(|(now, rest)| now.saturating_sub(*rest)).max();
            let kept = kept.unwrap_or_default();
            if kept <= KEPT {
                return Ok(());
            }
            let waited = began.elapsed();
            ensure!(
                waited < self.memory_wait,
                "{} MiB are kept after {waited:.0?}",
                kept >> 20
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
