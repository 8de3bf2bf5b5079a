//! Connections between nodes, as the daemon makes them: each node has one to each other, and says what it has to say on
//! its own. What a short cut delays comes later, what a long one cuts off is lost, and who has a connection finds out
//! only by the idle timeout.

use super::super::world::World;
use crate::testkit::{Event, Failed, Participants, silent};

/// In which directions packets are cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    OneWay,
    BothWays,
}

/// A side that hears nothing for this long gives the connection up.
pub const IDLE_MS: u64 = 2_000;

impl World {
    /// Whether bytes go both ways and both processes handle them.
    pub(super) fn is_reachable(&mut self, a: usize, b: usize) -> bool {
        let now = self.now;
        let open = self.link_of(a, b).cut_until <= now && self.link_of(b, a).cut_until <= now;
        open && self.is_awake(a) && self.is_awake(b)
    }

    pub(super) fn will_dial(&mut self, a: usize, b: usize, ms: u64) {
        if !std::mem::replace(&mut self.link_of(a, b).dials, true) {
            self.after(ms, Event::Dial(a, b));
        }
    }

    pub fn dial_in_month(&mut self, a: usize, b: usize) {
        self.link_of(a, b).dials = false;
        if self.is_linked(a, b) || !self.is_up(a) || !self.month().registry.lists(a, b) {
            return;
        }
        if !self.is_reachable(a, b)
            || !self.list_each_other(a, b)
            || self.has_link_to_place_of(a, b)
        {
            let again = 200 + self.random(800);
            return self.will_dial(a, b, again);
        }
        let Some(mine) = self.pid(a) else { return };
        self.join(a, b);
        // Who hears of another incarnation gives the connection to the last one up at once, or has another one already.
        let back = self.link_of(b, a);
        if back.alive || back.peer == mine.generation {
            return;
        }
        // It takes the place of the one to the last, and nobody says that this has ended.
        let may_replace = !self.month().scenario.links && self.is_linked(b, a);
        if may_replace && self.random(2) == 0 {
            return self.join(b, a);
        }
        let delay = 1 + self.random(20);
        self.part_after(delay, b, a);
    }

    /// Whether `a` has still a connection to another machine that has the name of `b`: it hears of the end of that one first.
    fn has_link_to_place_of(&self, a: usize, b: usize) -> bool {
        let place = self.place_of(b);
        let mut namesakes = self.others(b).into_iter();
        namesakes.any(|it| self.place_of(it) == place && self.is_linked(a, it))
    }

    pub fn dial_again(&mut self, a: usize, b: usize) {
        let delay = 50 + self.random(500);
        self.will_dial(a, b, delay);
    }

    /// What `a` says to `b` is lost from now on, and it finds out within the idle timeout and `more`.
    fn connection_breaks(&mut self, a: usize, b: usize, more: u64) {
        let link = self.link_of(a, b);
        link.alive = false;
        self.will_be_down(a, b, more);
    }

    fn will_be_down(&mut self, a: usize, b: usize, more: u64) {
        let delay = IDLE_MS + more + self.random(500);
        self.part_after(delay, a, b);
    }

    /// Packets are cut off, in both directions or from `a` to `b` alone.
    pub(super) fn cut_link(&mut self, a: usize, b: usize, ms: u64, cut: Cut) {
        let (until, lossy) = (self.now + ms, ms >= IDLE_MS);
        let back = [(b, a)].into_iter().filter(|_| cut == Cut::BothWays);
        for (from, to) in [(a, b)].into_iter().chain(back) {
            let link = self.link_of(from, to);
            link.lossy = lossy || (link.lossy && link.cut_until > until);
            link.cut_until = link.cut_until.max(until);
        }
        if !lossy {
            return;
        }
        if cut == Cut::OneWay {
            // b hears nothing and gives up first; what it says still arrives till then. a hears b's silence after that.
            self.will_be_down(b, a, 0);
            self.connection_breaks(a, b, IDLE_MS);
        } else {
            self.connection_breaks(a, b, 0);
            self.connection_breaks(b, a, 0);
        }
        for key in self.sessions.of(a) {
            if self.sessions.of(b).contains(&key) {
                self.cut_session(&key, b, IDLE_MS);
            }
        }
    }

    /// A node pauses: the others give their connections to it up, and it finds its own given up when it goes on.
    pub(super) fn links_pause(&mut self, node: usize, ms: u64) {
        if ms < IDLE_MS {
            return;
        }
        for other in self.others(node) {
            self.will_be_down(other, node, 0);
            let found = ms + 1 + self.random(50);
            self.part_after(found, node, other);
        }
        for key in self.sessions.of(node) {
            self.cut_session(&key, node, IDLE_MS);
        }
    }

    /// What a node says on connections that the others have given up is lost.
    pub(super) fn links_resume(&mut self, node: usize) {
        for other in self.others(node) {
            self.link_of(node, other).alive = false;
        }
    }

    /// A process has started: it dials all.
    pub fn links_begin(&mut self, node: usize) {
        for other in self.others(node) {
            let (mine, theirs) = (20 + self.random(500), 20 + self.random(500));
            self.will_dial(node, other, mine);
            if self.is_up(other) && !self.is_linked(other, node) {
                self.will_dial(other, node, theirs);
            }
        }
    }

    /// Two members of a session that cannot reach each other.
    pub fn unreachable_members(&mut self, members: &Participants) -> Option<Failed> {
        self.scene.month.as_ref()?;
        let nodes: Vec<_> = members.iter().map(|(at, it)| (*at, it.pid.node)).collect();
        for (index, (member, a)) in nodes.iter().enumerate() {
            for (other, b) in &nodes[index + 1..] {
                if !self.is_reachable(*a, *b) || !self.list_each_other(*a, *b) {
                    let fault = silent(&members[other].work, *other, "cannot be reached");
                    let member = *member;
                    return Some(Failed { member, fault });
                }
            }
        }
        None
    }
}
