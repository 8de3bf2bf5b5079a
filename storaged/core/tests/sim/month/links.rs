//! Connections between nodes, as the daemon makes them: each node has one to each other, and says what it has to say on
//! its own. What a short cut delays comes later, what a long one cuts off is lost, and who has a connection finds out
//! only by the idle timeout.

use storaged_core::Input;
use storaged_wire::Generation;
use storaged_wire::peer::{PeerMessage, SessionFault};

use super::super::executor::Members;
use super::super::world::{World, name};
use super::Happening;

/// A side that hears nothing for this long gives the connection up.
pub const IDLE_MS: u64 = 2_000;

/// From one node to another: the packets, and the connection that the first one has.
#[derive(Debug, Clone, Default)]
pub struct Link {
    /// Connections are numbered; messages belong to one.
    number: u64,
    alive: bool,
    /// The incarnation that it was made with.
    peer: u64,
    /// Until when packets are cut off.
    pub cut_until: u64,
    /// The cut is long enough to lose them.
    lossy: bool,
    free_at: u64,
    dials: bool,
}

impl World {
    pub(super) fn link_of(&mut self, a: usize, b: usize) -> &mut Link {
        self.month().links.entry((a, b)).or_default()
    }

    /// Whether bytes go both ways and both processes handle them.
    pub(super) fn is_reachable(&mut self, a: usize, b: usize) -> bool {
        let now = self.now;
        let open = self.link_of(a, b).cut_until <= now && self.link_of(b, a).cut_until <= now;
        open && self.is_awake(a) && self.is_awake(b)
    }

    pub(super) fn is_awake(&mut self, node: usize) -> bool {
        self.is_up(node) && !self.month().paused.contains_key(&node)
    }

    fn will_dial(&mut self, a: usize, b: usize, ms: u64) {
        if !std::mem::replace(&mut self.link_of(a, b).dials, true) {
            self.happens_after(ms, Happening::Dial(a, b));
        }
    }

    pub(super) fn dial(&mut self, a: usize, b: usize) {
        self.link_of(a, b).dials = false;
        if self.up.contains(&(a, b)) || !self.is_up(a) {
            return;
        }
        if !self.is_reachable(a, b) {
            let again = 200 + self.random(800);
            return self.will_dial(a, b, again);
        }
        let (Some(from), Some(to)) = (&self.processes[a], &self.processes[b]) else {
            return;
        };
        let (mine, theirs) = (from.generation, to.generation);
        let link = self.link_of(a, b);
        link.number += 1;
        (link.alive, link.peer, link.free_at) = (true, theirs, 0);
        self.up.insert((a, b));
        let up = Input::PeerUp {
            node: name(b),
            generation: Generation::new(theirs),
        };
        self.feed(a, mine, up);
        // Who hears of another incarnation gives the connection to the last one up at once, or has another one already.
        let back = self.link_of(b, a);
        if back.alive || back.peer == mine {
            return;
        }
        let number = back.number;
        let may_replace = !self.month().scenario.links && self.up.contains(&(b, a));
        if may_replace && self.random(2) == 0 {
            return self.link_is_replaced(b, a);
        }
        let delay = 1 + self.random(20);
        self.happens_after(delay, Happening::Down(b, a, number));
    }

    /// A connection to a new incarnation takes the place of the one to the last, and nobody says that this has ended.
    fn link_is_replaced(&mut self, a: usize, b: usize) {
        let (Some(from), Some(to)) = (&self.processes[a], &self.processes[b]) else {
            return;
        };
        let (mine, theirs) = (from.generation, to.generation);
        let link = self.link_of(a, b);
        link.number += 1;
        (link.alive, link.peer, link.free_at) = (true, theirs, 0);
        let up = Input::PeerUp {
            node: name(b),
            generation: Generation::new(theirs),
        };
        self.feed(a, mine, up);
    }

    /// A node gives its connection to another one up.
    pub(super) fn link_down(&mut self, a: usize, b: usize, number: u64) {
        let link = self.link_of(a, b);
        if link.number != number {
            return;
        }
        link.alive = false;
        if !self.up.remove(&(a, b)) {
            return;
        }
        let Some(process) = &self.processes[a] else {
            return;
        };
        let generation = process.generation;
        self.feed(a, generation, Input::PeerDown { node: name(b) });
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
        let number = self.link_of(a, b).number;
        let delay = IDLE_MS + more + self.random(500);
        self.happens_after(delay, Happening::Down(a, b, number));
    }

    /// Packets are cut off, in both directions or from `a` to `b` alone.
    pub(super) fn cut_link(&mut self, (a, b): (usize, usize), ms: u64, one_way: bool) {
        let (until, lossy) = (self.now + ms, ms >= IDLE_MS);
        let back = [(b, a)].into_iter().filter(|_| !one_way);
        for (from, to) in [(a, b)].into_iter().chain(back) {
            let link = self.link_of(from, to);
            link.lossy = lossy || (link.lossy && link.cut_until > until);
            link.cut_until = link.cut_until.max(until);
        }
        if !lossy {
            return;
        }
        if one_way {
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

    /// A control message: in order on its connection.
    pub fn send_in_month(&mut self, from: usize, to: usize, message: PeerMessage) {
        self.promise_of_message(from, &message);
        let (now, delay) = (self.now, 1 + self.random(8));
        let is_up = self.up.contains(&(from, to));
        let link = self.link_of(from, to);
        if !is_up || !link.alive || (link.cut_until > now && link.lossy) {
            return;
        }
        let time = (now.max(link.cut_until) + delay).max(link.free_at);
        link.free_at = time;
        let number = link.number;
        let message = Box::new(message);
        self.happens_after(time - now, Happening::Deliver(from, to, number, message));
    }

    pub(super) fn deliver(&mut self, from: usize, to: usize, number: u64, message: PeerMessage) {
        let link = self.link_of(from, to);
        let (same, peer) = (link.number == number, link.peer);
        if same {
            let from = name(from);
            self.feed(to, peer, Input::Message { from, message });
        }
    }

    /// A node pauses: the others give their connections to it up, and it finds its own given up when it goes on.
    pub(super) fn links_pause(&mut self, node: usize, ms: u64) {
        if ms < IDLE_MS {
            return;
        }
        for other in self.others(node) {
            self.will_be_down(other, node, 0);
            let number = self.link_of(node, other).number;
            let found = ms + 1 + self.random(50);
            self.happens_after(found, Happening::Down(node, other, number));
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

    /// A process is gone: the others find out.
    pub(super) fn links_lose(&mut self, node: usize) {
        for other in self.others(node) {
            self.up.remove(&(node, other));
            self.link_of(node, other).alive = false;
            self.connection_breaks(other, node, 0);
        }
    }

    /// A process has started: it dials all.
    pub fn links_begin(&mut self, node: usize) {
        for other in self.others(node) {
            let (mine, theirs) = (20 + self.random(500), 20 + self.random(500));
            self.will_dial(node, other, mine);
            if self.is_up(other) && !self.up.contains(&(other, node)) {
                self.will_dial(other, node, theirs);
            }
        }
    }

    pub(super) fn others(&self, node: usize) -> Vec<usize> {
        (0..self.limits.nodes).filter(|it| *it != node).collect()
    }

    /// Two members of a session that cannot reach each other.
    pub fn unreachable_members(&mut self, members: &Members) -> Option<(usize, SessionFault)> {
        self.month.as_ref()?;
        let nodes: Vec<(usize, usize)> = members.iter().map(|(at, it)| (*at, it.0)).collect();
        for (index, (at, a)) in nodes.iter().enumerate() {
            for (other, b) in &nodes[index + 1..] {
                if !self.is_reachable(*a, *b) {
                    let node = members[other].2.members[*other].clone();
                    let reason = "cannot be reached".into();
                    return Some((*at, SessionFault::Neighbour { node, reason }));
                }
            }
        }
        None
    }
}
