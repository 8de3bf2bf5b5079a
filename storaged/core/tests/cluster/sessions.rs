//! Sessions of the small cluster: one stripe of each after the other, as long as all of its members are at it.

use std::collections::BTreeMap;

use storaged_core::{Input, Keep, Output, SessionTally, SessionWork, Source, Turn};
use storaged_plan::Target;
use storaged_wire::local::Reply;
use storaged_wire::peer::SessionFault;
use storaged_wire::{NodeName, SessionId, SlotId};

use super::{Cluster, Event, index, name};

/// What a stripe takes while one session runs; those that run side by side share the links.
pub const STRIPE_MS: u64 = 10;

pub type Key = (NodeName, SessionId);

/// What a session keeps at a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Block {
    Shard,
    Parity,
}

#[derive(Default)]
pub struct Sessions {
    running: BTreeMap<Key, Session>,
    /// Where executors put bytes, until they have said that they do not any more: by node, its generation and session.
    written: BTreeMap<(usize, u64, Key), Keep>,
    /// Slots that executors read from, until they have been told to stop or have ended by themselves.
    read: BTreeMap<(usize, u64, Key), SlotId>,
}

impl Sessions {
    pub(super) fn hears(&mut self, node: usize, generation: u64, input: &Input) {
        if let Input::SessionEnded {
            leader, session, ..
        } = input
        {
            let key = (leader.clone(), *session);
            let place = (node, generation, key);
            self.written.remove(&place);
            self.read.remove(&place);
        }
    }

    /// Nothing is given to somebody else, or goes, while a session is at it.
    pub(super) fn check(&mut self, node: usize, generation: u64, output: &Output) {
        if let Output::Stop { leader, session } = output {
            let key = (leader.clone(), *session);
            self.read.remove(&(node, generation, key));
        }
        let mut written = self
            .written
            .iter()
            .filter(|((at, of, _), _)| (*at, *of) == (node, generation));
        match output {
            Output::Fetch { slot: into, .. } => {
                let fills = |keep: &Keep| matches!(keep, Keep::Shard(shard) if shard.slot == *into);
                let session = written.find(|(_, keep)| fills(keep));
                assert!(
                    session.is_none(),
                    "n{node} fetches into a slot that a session fills"
                );
            }
            Output::DropParity { set: gone } => {
                let makes = |keep: &Keep| matches!(keep, Keep::Parity { set, .. } if set == gone);
                let session = written.find(|(_, keep)| makes(keep));
                assert!(
                    session.is_none(),
                    "n{node} drops parity that a session makes"
                );
            }
            Output::Reply {
                reply: Reply::SlotGranted { slot, .. },
                ..
            } => {
                let mut read = self.read.iter();
                let read =
                    read.any(|((at, of, _), read)| (*at, *of, *read) == (node, generation, *slot));
                assert!(!read, "n{node} gives a trainer a slot that a session reads");
            }
            _ => {}
        }
    }
}

#[derive(Default)]
struct Session {
    /// Node, generation and work, by member.
    members: BTreeMap<usize, (usize, u64, SessionWork)>,
    turns: Vec<Turn>,
    done: usize,
    kept: BTreeMap<usize, Vec<u64>>,
}

impl Session {
    fn is_complete(&self) -> bool {
        let Some((_, _, work)) = self.members.values().next() else {
            return false;
        };
        let has_part = |member: &usize| {
            let mut classes = work.plan.classes().iter();
            classes.any(|plan| plan.hop(*member).is_some())
        };
        self.members.len() == (0..work.members.len()).filter(has_part).count()
    }
}

impl Cluster {
    pub(super) fn begin_session(&mut self, node: usize, generation: u64, work: SessionWork) {
        let key = (work.leader.clone(), work.session);
        self.begun.insert(key.clone());
        let place = (node, generation, key.clone());
        if let Some(keep) = &work.keep {
            self.sessions.written.insert(place.clone(), keep.clone());
        }
        if let Some(Source::Shard { shard, .. }) = &work.source {
            self.sessions.read.insert(place, shard.slot);
        }
        let session = self.sessions.running.entry(key.clone()).or_default();
        session.turns = work.turns().collect();
        session
            .members
            .insert(work.member, (node, generation, work));
        if session.is_complete() {
            self.at(self.now + STRIPE_MS, Event::Stripe(key));
        }
    }

    pub(super) fn stop_session(&mut self, node: usize, key: Key) {
        let is_in = |session: &Session| session.members.values().any(|(at, _, _)| *at == node);
        if self.sessions.running.get(&key).is_some_and(is_in) {
            self.break_off(&key, node);
        }
    }

    pub(super) fn sessions_lose(&mut self, node: usize) {
        let keys: Vec<Key> = self.sessions.running.keys().cloned().collect();
        keys.into_iter()
            .for_each(|key| self.stop_session(node, key));
    }

    /// The session is over at all members: at one because it was told so, at the others because their streams end.
    fn break_off(&mut self, key: &Key, because_of: usize) {
        let Some(session) = self.sessions.running.remove(key) else {
            return;
        };
        for (member, (node, generation, _)) in &session.members {
            let fault = match *node == because_of {
                true => SessionFault::Aborted,
                false => SessionFault::Neighbour {
                    node: name(because_of),
                    reason: "ended its stream".into(),
                },
            };
            let kept = session.kept.get(member);
            self.session_ended(key, (*node, *generation), Err(fault), kept);
        }
    }

    fn session_ended(
        &mut self,
        (leader, session): &Key,
        (node, generation): (usize, u64),
        outcome: Result<SessionTally, SessionFault>,
        kept: Option<&Vec<u64>>,
    ) {
        let kept = kept
            .into_iter()
            .flatten()
            .map(|stripe| *stripe..*stripe + 1);
        let input = Input::SessionEnded {
            leader: leader.clone(),
            session: *session,
            outcome,
            kept: kept.collect(),
        };
        // The executor waits for jobs that are being done.
        self.at(self.now + 5, Event::Input(node, generation, input));
    }

    pub(super) fn stripe(&mut self, key: &Key) {
        let at_once = self
            .sessions
            .running
            .values()
            .filter(|s| s.is_complete())
            .count() as u64;
        let Some(session) = self.sessions.running.get_mut(key) else {
            return;
        };
        let Some(turn) = session.turns.get(session.done).copied() else {
            return self.finish(key);
        };
        session.done += 1;
        let (_, _, first) = &session.members.values().next().expect("it is complete");
        let class = &first.plan.classes()[turn.class];
        for edge in &class.edges {
            let node = index(&first.members[edge.from]);
            *self.sent.entry(node).or_default() += edge.width as u64;
        }
        for hop in &class.hops {
            let keeps = hop
                .outputs
                .iter()
                .any(|output| matches!(output.target, Target::Keep(_)));
            if !keeps {
                continue;
            }
            let (node, _, work) = &session.members[&hop.member];
            session
                .kept
                .entry(hop.member)
                .or_default()
                .push(turn.stripe);
            let block = match work.keep {
                Some(Keep::Shard(_)) => Block::Shard,
                _ => Block::Parity,
            };
            let put = self.put.entry((*node, block)).or_default();
            *put.entry(turn.stripe).or_default() += 1;
        }
        self.moved.insert(key.clone());
        self.at(
            self.now + STRIPE_MS * at_once.max(1),
            Event::Stripe(key.clone()),
        );
    }

    fn finish(&mut self, key: &Key) {
        let Some(session) = self.sessions.running.remove(key) else {
            return;
        };
        for (member, (node, generation, work)) in &session.members {
            let tally = SessionTally {
                bytes: work.lane_length,
                elapsed_ms: 1,
                ..SessionTally::default()
            };
            let kept = session.kept.get(member);
            self.session_ended(key, (*node, *generation), Ok(tally), kept);
        }
    }
}
