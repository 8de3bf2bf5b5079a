//! Nodes that operators drain, as a node knows of them, and whose turn it is. Turns are given as in Lamport's clocks: a node that has heard
//! of a drain comes after it, and names decide between nodes that had not heard of one another.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::{Generation, NodeName};

use crate::api::Now;
use crate::limits;

/// Who is drained.
#[derive(Debug, Default)]
pub(crate) struct Drains {
    own: Option<OwnDrain>,
    others: BTreeMap<NodeName, PeerDrain>,
}

/// This node's.
#[derive(Debug)]
struct OwnDrain {
    turn: u64,
    since: Now,
    /// Peers that have heard of it, and have said whether they are drained.
    noted: BTreeSet<NodeName>,
}

#[derive(Debug)]
struct PeerDrain {
    turn: u64,
    generation: Generation,
    /// It has ended then, or its link has: home nodes may still count its blocks.
    gone_at: Option<Now>,
}

impl Drains {
    /// An operator drains this node. Told again it changes nothing.
    pub fn begin(&mut self, now: Now) {
        let turns = self.others.values().map(|drain| drain.turn);
        let turn = turns.max().unwrap_or(0).saturating_add(1);
        self.own.get_or_insert(OwnDrain {
            turn,
            since: now,
            noted: BTreeSet::new(),
        });
    }

    /// This node's turn, if it is drained.
    pub fn turn(&self) -> Option<u64> {
        self.own.as_ref().map(|own| own.turn)
    }

    /// A peer is drained.
    pub fn note(&mut self, node: &NodeName, generation: Generation, turn: u64) {
        let drain = PeerDrain {
            turn,
            generation,
            gone_at: None,
        };
        self.others.insert(node.clone(), drain);
    }

    /// A peer has heard of this node's drain.
    pub fn heard_by(&mut self, node: &NodeName) {
        if let Some(own) = &mut self.own {
            own.noted.insert(node.clone());
        }
    }

    /// A peer's link is up: of the daemon that is drained, or of another one in its place.
    pub fn peer_up(&mut self, node: &NodeName, generation: Generation, now: Now) {
        if let Some(drain) = self.others.get_mut(node) {
            if drain.generation == generation {
                drain.gone_at = None;
            } else {
                drain.gone_at.get_or_insert(now);
            }
        }
    }

    /// A peer's link is down. It may have gone for good.
    pub fn peer_down(&mut self, node: &NodeName, now: Now) {
        if let Some(own) = &mut self.own {
            own.noted.remove(node);
        }
        if let Some(drain) = self.others.get_mut(node) {
            drain.gone_at.get_or_insert(now);
        }
    }

    /// Forgets those that have gone, once everybody counts without them.
    pub fn forget_gone(&mut self, now: Now) {
        let is_over = |at: Now| now.since(at) >= limits::DRAIN_SETTLE_MS;
        self.others
            .retain(|_, drain| !drain.gone_at.is_some_and(is_over));
    }

    /// Of some peers those that have not heard of this node's drain, if it is drained.
    pub fn unaware<'a>(
        &'a self,
        peers: impl Iterator<Item = &'a NodeName>,
    ) -> impl Iterator<Item = &'a NodeName> {
        let own = self.own.as_ref();
        peers.filter(move |peer| own.is_some_and(|own| !own.noted.contains(*peer)))
    }

    /// Drained nodes that go before this one: all of them, if it is not drained itself.
    pub fn before<'a>(&'a self, me: &'a NodeName) -> impl Iterator<Item = &'a NodeName> {
        let own = self.turn();
        let goes_first = move |(node, drain): &(&NodeName, &PeerDrain)| {
            planted!("drains_without_turns")
                || own.is_none_or(|turn| (drain.turn, *node) < (turn, me))
        };
        self.others.iter().filter(goes_first).map(|(node, _)| node)
    }

    /// Of some peers those that may be drained too, for all this node knows: they have not answered yet, and have had little time.
    pub fn silent<'a>(
        &'a self,
        peers: impl Iterator<Item = &'a NodeName>,
        now: Now,
    ) -> impl Iterator<Item = &'a NodeName> {
        let own = self.own.as_ref();
        let is_waited_for = own.is_some_and(|own| {
            now.since(own.since) < limits::DRAIN_NOTED_MS && !planted!("drains_ask_nobody")
        });
        let unaware = self.unaware(peers);
        unaware.filter(move |node| is_waited_for && !self.others.contains_key(*node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::name;

    const NOW: Now = Now(10_000);

    #[test]
    fn a_peer_that_never_answers_is_waited_for_no_longer_than_it_may() {
        let (a, b) = (name("a"), name("b"));
        let mut drains = Drains::default();
        assert_eq!(drains.silent([&a].into_iter(), NOW).count(), 0);
        drains.begin(NOW);
        let silent = |drains: &Drains, now: Now| {
            let silent = drains.silent([&a, &b].into_iter(), now);
            silent.cloned().collect::<Vec<_>>()
        };
        let almost = NOW.plus(limits::DRAIN_NOTED_MS - 1);
        assert_eq!(silent(&drains, almost), [a.clone(), b.clone()]);
        assert_eq!(silent(&drains, NOW.plus(limits::DRAIN_NOTED_MS)), []);
        drains.heard_by(&a);
        assert_eq!(silent(&drains, almost), vec![b.clone()]);
        // Its link breaks: what it says on the next one counts.
        drains.peer_down(&a, NOW);
        assert_eq!(silent(&drains, almost), [a.clone(), b.clone()]);
    }

    #[test]
    fn a_drained_node_counts_until_everybody_has_missed_it() {
        let (a, me) = (name("a"), name("m"));
        let settled = NOW.plus(limits::DRAIN_SETTLE_MS);
        let counts = |drains: &mut Drains, now: Now| {
            drains.forget_gone(now);
            drains.before(&me).count()
        };
        let mut drains = Drains::default();
        drains.note(&a, Generation::new(1), 1);
        drains.peer_down(&a, NOW);
        drains.peer_up(&a, Generation::new(1), NOW);
        assert_eq!(counts(&mut drains, settled), 1, "its link was away");
        drains.peer_down(&a, NOW);
        // Another daemon has its place, and is not drained.
        drains.peer_up(&a, Generation::new(2), settled);
        assert_eq!(counts(&mut drains, NOW), 1);
        assert_eq!(counts(&mut drains, settled), 0);
    }
}
