//! Sessions that take their time: one node's link is a tenth of the others'. Bytes flow evenly, and a link is waited for
//! for the share of the time that it is busy. A session that is stopped half-way keeps the stripes that are done.

use std::collections::BTreeMap;

use storaged_core::encode::SessionWork;
use storaged_core::{Input, SessionTally};
use storaged_wire::peer::{LinkTally, SessionFault};
use storaged_wire::{NodeName, SessionId};

use super::executor::{Computed, runs};
use super::world::{CHUNK_BYTES, Event, World, name};

pub type Key = (NodeName, SessionId);
pub type Members = BTreeMap<usize, (usize, u64, SessionWork)>;

/// Bytes per second of every link but the slow one.
const RATE: f64 = 500_000.0;
const SLOW_RATE: f64 = RATE / 10.0;
/// As the daemon's executors do it.
const PROGRESS_MS: u64 = 1000;

/// A session that takes its time.
pub struct Running {
    pub members: Members,
    began: u64,
    takes_ms: u64,
    /// Bytes per link, of the whole session.
    links: BTreeMap<(usize, usize), f64>,
    /// Once it was stopped.
    computed: Option<Computed>,
}

impl World {
    /// Bytes per second of a node's link.
    fn rate(&self, node: usize) -> f64 {
        match self.limits.slow == Some(node) {
            true => SLOW_RATE,
            false => RATE,
        }
    }

    pub fn run_slowly(&mut self, key: Key, members: Members) {
        let links = links(&members);
        let sides = self.sides(&members, &links);
        let takes = sides.values().copied().fold(0.0, f64::max);
        let running = Running {
            members,
            began: self.now,
            takes_ms: (takes * 1000.0) as u64 + 5,
            links,
            computed: None,
        };
        self.after(running.takes_ms, Event::SessionOver(key.clone()));
        self.after(PROGRESS_MS, Event::Progress(key.clone()));
        self.sessions.running.insert(key, running);
    }

    /// Seconds that each side of each member's link is busy: sending, receiving.
    fn sides(
        &self,
        members: &Members,
        links: &BTreeMap<(usize, usize), f64>,
    ) -> BTreeMap<(usize, bool), f64> {
        let mut busy = BTreeMap::new();
        for ((from, to), bytes) in links {
            for (member, sends) in [(*from, true), (*to, false)] {
                let node = members.get(&member).map_or(member, |(node, _, _)| *node);
                *busy.entry((member, sends)).or_insert(0.0) += bytes / self.rate(node);
            }
        }
        busy
    }

    pub fn session_progress(&mut self, key: Key) {
        let Some(running) = self.sessions.running.get(&key) else {
            return;
        };
        if running.computed.is_some() {
            return;
        }
        let tallies: Vec<_> = running
            .members
            .iter()
            .map(|(member, (node, generation, _))| {
                (*node, *generation, self.tally(running, *member))
            })
            .collect();
        for (node, generation, mut tally) in tallies {
            if self.limits.fibber == Some(node) {
                self.fib(&mut tally);
            }
            let (leader, session) = key.clone();
            let input = Input::SessionProgress {
                leader,
                session,
                tally,
            };
            self.feed(node, generation, input);
        }
        self.after(PROGRESS_MS, Event::Progress(key));
    }

    /// What a member saw till now.
    fn tally(&self, running: &Running, member: usize) -> SessionTally {
        let elapsed_ms = self.now - running.began;
        let share = elapsed_ms as f64 / running.takes_ms as f64;
        let sides = self.sides(&running.members, &running.links);
        let (_, _, work) = &running.members[&member];
        let mut seen = Vec::new();
        for ((from, to), bytes) in running.links.iter().filter(|((_, to), _)| *to == member) {
            let busy = sides[&(*from, true)].max(sides[&(*to, false)]);
            let waited = (busy / running.takes_ms as f64 * 1000.0).min(1.0) * elapsed_ms as f64;
            seen.push(LinkTally {
                node: work.members[*from].clone(),
                bytes: (bytes * share) as u64,
                waiting_ms: waited as u64,
            });
        }
        let stripes = work.turns().count() as f64 * share;
        SessionTally {
            bytes: 0,
            elapsed_ms,
            stripes: stripes as u64,
            links: seen,
        }
    }

    /// Whatever comes to a liar's mind.
    fn fib(&mut self, tally: &mut SessionTally) {
        let Some(link) = tally.links.first_mut() else {
            return;
        };
        match self.random(6) {
            0 => link.bytes = u64::MAX,
            1 => link.node = name(99),
            2 => tally.elapsed_ms = u64::MAX,
            3 => tally.stripes = 0,
            4 => link.waiting_ms = tally.elapsed_ms,
            _ => {
                let again = link.clone();
                tally.links.push(again);
            }
        }
    }

    pub fn session_over(&mut self, key: &Key) {
        let Some(running) = self.sessions.running.remove(key) else {
            return;
        };
        if let Some((_, _, work)) = running.members.values().next()
            && running.computed.is_none()
            && running.members.len() == super::executor::members_of(work)
        {
            let mut tallies: BTreeMap<usize, SessionTally> = BTreeMap::new();
            for member in running.members.keys() {
                tallies.insert(*member, self.tally(&running, *member));
            }
            self.complete(&running.members, &tallies);
        }
    }

    /// A member's part is stopped: what it has kept, if the session was running.
    pub fn stop_running(&mut self, node: usize, key: &Key) -> Option<Input> {
        let mut running = self.sessions.running.remove(key)?;
        let (leader, session) = key.clone();
        if running.computed.is_none() {
            let (_, _, work) = running.members.values().next()?;
            let share = (self.now - running.began) as f64 / running.takes_ms as f64;
            let done = (work.turns().count() as f64 * share) as u64;
            let whole = running.members.len() == super::executor::members_of(work);
            running.computed = Some(match whole {
                true => self.compute(&running.members, Some(done)),
                false => Computed::default(),
            });
        }
        let member = running.members.iter().find(|(_, (at, _, _))| *at == node);
        let member = member.map(|(member, _)| *member);
        let kept = running.computed.as_ref().map(|computed| &computed.kept);
        let kept = member.and_then(|member| kept?.get(&member));
        let input = Input::SessionEnded {
            leader,
            session,
            outcome: Err(SessionFault::Aborted),
            kept: runs(kept),
        };
        if let Some(member) = member {
            running.members.remove(&member);
        }
        if !running.members.is_empty() {
            self.sessions.running.insert(key.clone(), running);
        }
        member.map(|_| input)
    }
}

/// Bytes over each link, with a frame as large as the stripe is.
fn links(members: &Members) -> BTreeMap<(usize, usize), f64> {
    let mut links = BTreeMap::new();
    let Some((_, _, work)) = members.values().next() else {
        return links;
    };
    for turn in work.turns() {
        for edge in &work.plan.classes()[turn.class].edges {
            let bytes = work.stripe_bytes(turn.stripe).min(CHUNK_BYTES as usize) * edge.width;
            *links.entry((edge.from, edge.to)).or_insert(0.0) += bytes as f64;
        }
    }
    links
}
