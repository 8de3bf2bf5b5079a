//! Connections between nodes: each node has one to each other, made with one incarnation of it, and says on it what it has to
//! say, in order. Who has a connection finds out only after a while that nothing gets through.

use std::collections::BTreeMap;

use storaged_core::Input;
use storaged_wire::Generation;
use storaged_wire::peer::PeerMessage;

use super::process::Pid;
use super::scene::Scene;
use super::world::{Event, World};

/// From one node to another: the packets, and the connection that the first one has.
#[derive(Debug, Clone, Default)]
pub struct Link {
    /// Connections are numbered; messages belong to one.
    pub number: u64,
    /// The first one believes in it.
    pub up: bool,
    /// What is said on it gets through.
    pub alive: bool,
    /// The incarnation that it was made with.
    pub peer: u64,
    /// Until when packets are cut off.
    pub cut_until: u64,
    /// The cut is long enough to lose them.
    pub lossy: bool,
    /// When the last message arrives.
    pub free_at: u64,
    /// It will be tried.
    pub dials: bool,
}

pub type Links = BTreeMap<(usize, usize), Link>;

impl<S: Scene> World<S> {
    pub fn link_of(&mut self, from: usize, to: usize) -> &mut Link {
        self.links.entry((from, to)).or_default()
    }

    /// Whether a node has a connection to another one.
    pub fn is_linked(&self, from: usize, to: usize) -> bool {
        self.links.get(&(from, to)).is_some_and(|link| link.up)
    }

    pub fn others(&self, node: usize) -> Vec<usize> {
        (0..self.processes.len()).filter(|it| *it != node).collect()
    }

    /// Connections from and to a node are tried.
    pub fn dial_all(&mut self, node: usize) {
        for other in self.others(node) {
            for (from, to) in [(node, other), (other, node)] {
                let ms = S::dials_after(self, from, to);
                self.after(ms, Event::Dial(from, to));
            }
        }
    }

    /// A connection is made if the way is free and both are awake; one to an earlier incarnation ends before.
    pub fn dial_once(&mut self, from: usize, to: usize) {
        if !self.is_awake(from) || !self.is_awake(to) {
            return;
        }
        let (far, now) = (self.ram(to).generation, self.now);
        let link = self.link_of(from, to);
        if link.cut_until > now || (link.up && link.peer == far) {
            return;
        }
        if link.up {
            self.part(from, to);
        }
        self.join(from, to);
    }

    /// `from` has a connection to whatever runs at `to`.
    pub fn join(&mut self, from: usize, to: usize) {
        let far = self.processes[to].as_ref().map(|far| far.generation);
        let Some(far) = far.filter(|_| self.is_up(from)) else {
            return;
        };
        let link = self.link_of(from, to);
        link.number += 1;
        (link.up, link.alive, link.peer, link.free_at) = (true, true, far, 0);
        let generation = Generation::new(far);
        let node = S::name_of(self, to);
        self.tell(from, Input::PeerUp { node, generation });
    }

    /// `from` gives its connection up, if it has one.
    pub fn part(&mut self, from: usize, to: usize) {
        let link = self.link_of(from, to);
        link.alive = false;
        if std::mem::take(&mut link.up) && self.is_up(from) {
            let node = S::name_of(self, to);
            self.tell(from, Input::PeerDown { node });
            S::parted(self, from, to);
        }
    }

    /// `from` will give the connection up that it has now.
    pub fn part_after(&mut self, ms: u64, from: usize, to: usize) {
        let number = self.link_of(from, to).number;
        self.after(ms, Event::Down(from, to, number));
    }

    pub(super) fn link_down(&mut self, from: usize, to: usize, number: u64) {
        if self.link_of(from, to).number == number {
            self.part(from, to);
        }
    }

    /// A process is gone: the others find out.
    pub(super) fn links_lose(&mut self, node: usize) {
        for other in self.others(node) {
            let mine = self.link_of(node, other);
            (mine.up, mine.alive) = (false, false);
            self.link_of(other, node).alive = false;
            let ms = S::finds_out_after(self, other, node);
            self.part_after(ms, other, node);
        }
    }

    /// A control message: in order on its connection, and lost with it.
    pub fn post(&mut self, from: usize, to: usize, message: PeerMessage) {
        let Some(delay) = S::way(self, from, to, &message) else {
            return;
        };
        let now = self.now;
        let link = self.link_of(from, to);
        if !link.up || !link.alive || (link.cut_until > now && link.lossy) {
            return;
        }
        let time = (now.max(link.cut_until) + delay).max(link.free_at);
        link.free_at = time;
        let number = link.number;
        let message = Box::new(message);
        self.at(time, Event::Deliver(from, to, number, message));
    }

    pub(super) fn deliver(&mut self, from: usize, to: usize, number: u64, message: PeerMessage) {
        let link = self.link_of(from, to);
        if link.number == number {
            let generation = link.peer;
            let from = S::name_of(self, from);
            let pid = Pid {
                node: to,
                generation,
            };
            self.feed(pid, Input::Message { from, message });
        }
    }
}
