//! The adversary of a month: cuts, pauses, clocks that jump, crashes and restarts. All of it ends at one time.

use storaged_core::Input;

use super::super::world::{Limits, World};
use super::links::{Cut, IDLE_MS};
use super::{Crashes, FAULTS_END_MS, Happening, JOBS_END_MS, Pause, Scenario, TierKind, Trainers};

/// Of the beats (one each 50 ms), each fault strikes at one in so many.
const CUT_ONE_IN: u64 = 120;
const PAUSE_ONE_IN: u64 = 160;
const JUMP_ONE_IN: u64 = 300;
const CRASH_ONE_IN: u64 = 300;

impl World {
    pub(super) fn strike_in_month(&mut self) {
        if self.now < 5_000 || self.now >= JOBS_END_MS {
            return;
        }
        if self.now >= FAULTS_END_MS {
            return self.all_well();
        }
        let scenario = self.month().scenario;
        if scenario.links && self.random(CUT_ONE_IN) == 0 {
            self.strike_links();
        }
        if scenario.pauses && self.random(PAUSE_ONE_IN) == 0 {
            let (node, ms) = (self.any_node(), self.any_time(500, 40_000));
            self.pause(node, ms);
        }
        if scenario.clocks && self.random(JUMP_ONE_IN) == 0 {
            let (node, ms) = (self.any_node(), self.any_time(1_000, 300_000));
            self.jump(node, ms);
        }
        self.strike_nodes(scenario.crashes);
        self.strike_holders();
        self.strike_registry();
        self.strike_places();
        self.strike_cordons();
        if scenario.rot {
            self.strike_chunks();
        }
        self.strike_tier();
    }

    pub(super) fn any_node(&mut self) -> usize {
        let machines = self.machines();
        machines[self.random(machines.len() as u64) as usize]
    }

    /// Short times as often as long ones, and none beyond the end of faults.
    pub(super) fn any_time(&mut self, least: u64, most: u64) -> u64 {
        let doublings = (most / least).ilog2() as u64 + 1;
        let scale = least << self.random(doublings);
        let ms = (scale + self.random(scale)).min(most);
        ms.min(FAULTS_END_MS.saturating_sub(self.now)).max(1)
    }

    /// A link, or all links of a node, in both directions or one way.
    fn strike_links(&mut self) {
        let ms = self.any_time(100, 60_000);
        let a = self.any_node();
        let cut = if self.random(3) == 0 {
            Cut::OneWay
        } else {
            Cut::BothWays
        };
        let others = self.others(a);
        let all = self.random(3) == 0;
        let one = others[self.random(others.len() as u64) as usize];
        let hit = others.into_iter().filter(|b| all || *b == one);
        self.struck(match cut {
            Cut::OneWay => "one-way cuts",
            Cut::BothWays => "cuts",
        });
        for b in hit.collect::<Vec<_>>() {
            self.cut_link(a, b, ms, cut);
        }
    }

    /// A process handles nothing for a while; what comes is queued.
    pub(super) fn pause(&mut self, node: usize, ms: u64) {
        if !self.is_awake(node) {
            return;
        }
        self.struck("pauses");
        let pause = Pause {
            began: self.now,
            until: self.now + ms,
        };
        self.month().pauses.insert(node, pause);
        self.stop_process(node);
        self.links_pause(node, ms);
        self.happens_after(ms, Happening::Resume(node));
    }

    pub(super) fn resume(&mut self, node: usize) {
        let now = self.now;
        let due = |pause: &Pause| pause.until <= now;
        if !self.month().pauses.get(&node).is_some_and(due) {
            return;
        }
        let Some(pause) = self.month().pauses.remove(&node) else {
            return;
        };
        self.month().resumed_at.insert(node, now);
        if pause.until - pause.began >= IDLE_MS {
            self.links_resume(node);
        }
        self.continue_process(node);
    }

    /// A monotonic clock goes on that much faster for an instant: a suspended machine.
    fn jump(&mut self, node: usize, ms: u64) {
        if !self.is_awake(node) {
            return;
        }
        self.struck("clock jumps");
        let now = self.now;
        let Some(process) = self.processes[node].as_mut() else {
            return;
        };
        process.ahead += ms;
        self.month().resumed_at.insert(node, now);
        self.tell(node, Input::Tick);
    }

    fn strike_nodes(&mut self, crashes: Crashes) {
        let (turn, at) = self.month().in_turn;
        match crashes {
            Crashes::Never => {}
            Crashes::UpToM => {
                let may_lose = self.may_lose_memory();
                let quiet = self.month().scenario.trainers == Trainers::Quiet;
                let one_in = if quiet {
                    CRASH_ONE_IN / 4
                } else {
                    CRASH_ONE_IN
                };
                if may_lose && self.random(one_in) == 0 {
                    let node = self.any_node();
                    let back = if quiet {
                        self.any_time(200, 7_000)
                    } else {
                        200 + self.random(7_000)
                    };
                    self.kill(node, Some(back));
                }
            }
            Crashes::OneForLong => {
                if let Some(node) = self.spare_node().filter(|_| turn == 0 && self.now >= at) {
                    self.month().in_turn = (1, u64::MAX);
                    self.kill(node, None);
                }
            }
            Crashes::AllAtOnce => {
                if turn < 3 && self.now >= at {
                    self.month().in_turn = (turn + 1, self.now + 15_000);
                    // Those too that have lost their places and go on for a moment.
                    let machines = self.machines();
                    for node in 0..self.processes.len() {
                        let back = machines.contains(&node);
                        let back = back.then(|| 200 + self.random(2_000));
                        self.kill(node, back);
                    }
                    // A run that was numbered without the tier is forgotten: the next may have its number.
                    self.month().promises.progress.clear();
                }
            }
            Crashes::DaemonsAlone => {
                if self.random(CRASH_ONE_IN) == 0 {
                    let one_in = 1 + self.random(3);
                    for node in self.machines() {
                        if self.random(one_in) == 0 {
                            self.kill_daemon(node);
                        }
                    }
                }
            }
            Crashes::AllInTurn | Crashes::AllInTurnWaiting => {
                let waits = crashes == Crashes::AllInTurnWaiting;
                let due = turn < self.scene.limits.nodes && self.now >= at;
                if due && (!waits || self.everything_bears_m()) {
                    let (back, next) = (200 + self.random(2_000), 1_000 + self.random(4_000));
                    self.kill(turn, Some(back));
                    self.month().in_turn = (turn + 1, self.now + back + next);
                }
            }
        }
    }

    /// The node that is lost for long, on which no rank is: the last one, or the first that codes for the others.
    pub(super) fn spare_node(&mut self) -> Option<usize> {
        let Scenario { crashes, tier, .. } = self.month().scenario;
        let Limits { nodes, m, .. } = self.scene.limits;
        let node = match tier {
            TierKind::Absent => nodes - m,
            _ => nodes - 1,
        };
        (crashes == Crashes::OneForLong).then_some(node)
    }

    /// kill -9, and a new process after a while.
    pub(super) fn kill(&mut self, node: usize, back_after: Option<u64>) {
        if !self.is_awake(node) {
            return;
        }
        self.struck("crashes");
        self.lose_machine(node);
        self.end_process(node);
        self.scene.crashes += 1;
        self.jobs_lose_node(node);
        match back_after {
            Some(ms) => self.start_after(ms, node),
            None => drop(self.month().kept_down.insert(node)),
        }
    }

    /// kill -9 of a daemon whose memory is kept for the next one: nothing may be lost by it.
    pub(super) fn kill_daemon(&mut self, node: usize) {
        // Without its keeper that is a crash.
        if !self.is_awake(node) || self.is_leaving(node) {
            return;
        }
        self.struck("daemons' ends");
        self.end_daemon(node);
        self.scene.crashes += 1;
        self.jobs_lose_node(node);
        let back = 50 + self.random(3_000);
        self.start_after(back, node);
    }

    /// Faults have ended: who was kept down starts, the tier is well.
    fn all_well(&mut self) {
        for node in std::mem::take(&mut self.month().kept_down) {
            if self.machines().contains(&node) {
                self.start_after(1, node);
            }
        }
        self.places_are_filled();
        self.cordons_are_lifted();
        self.tier_is_well();
    }

    fn strike_tier(&mut self) {
        let kind = self.month().scenario.tier;
        if !matches!(kind, TierKind::Absent | TierKind::Well) {
            self.tier_weather();
        }
    }
}
