//! Sessions that take their time: one node's link is a tenth of the others'. Bytes flow evenly, and a link is waited for
//! for the share of the time that it is busy. A session that is stopped half-way keeps the stripes that are done.

use std::collections::BTreeMap;

use storaged_core::{Input, SessionTally};
use storaged_wire::peer::LinkTally;

use super::world::{Scripted, World};
use crate::testkit::{CHUNK_BYTES, Event, Key, Participant, Participants, name};

/// Bytes per second of every link but the slow one.
const RATE: f64 = 500_000.0;
const SLOW_RATE: f64 = RATE / 10.0;
/// As the daemon's executors do it.
const PROGRESS_MS: u64 = 1000;

/// How a session goes over links of which one is slow.
pub struct Pace {
    began: u64,
    takes_ms: u64,
    /// Bytes per link, of the whole session.
    links: BTreeMap<(usize, usize), f64>,
}

impl Pace {
    /// Of so many stripes, those that are done.
    pub fn stripes(&self, of: u64, now: u64) -> u64 {
        let share = (now - self.began) as f64 / self.takes_ms as f64;
        (of as f64 * share) as u64
    }
}

impl World {
    /// Bytes per second of a node's link.
    fn rate(&self, node: usize) -> f64 {
        if self.scene.limits.slow_link == Some(node) {
            SLOW_RATE
        } else {
            RATE
        }
    }

    /// How long a session that begins now will take; none if no link is slow.
    pub fn pace(&mut self, key: &Key) -> Option<u64> {
        self.scene.limits.slow_link?;
        let members = &self.sessions.begun[key].members;
        let links = links(members);
        let sides = self.sides(members, &links);
        let takes = sides.values().copied().fold(0.0, f64::max);
        let takes_ms = (takes * 1000.0) as u64 + 5;
        let pace = Pace {
            began: self.now,
            takes_ms,
            links,
        };
        self.progresses(key.clone());
        self.scene.paces.insert(key.clone(), pace);
        Some(takes_ms)
    }

    fn progresses(&mut self, key: Key) {
        self.after(PROGRESS_MS, Event::Scene(Scripted::Progress(key)));
    }

    /// Seconds that each side of each member's link is busy: sending, receiving.
    fn sides(
        &self,
        members: &Participants,
        links: &BTreeMap<(usize, usize), f64>,
    ) -> BTreeMap<(usize, bool), f64> {
        let mut busy = BTreeMap::new();
        for ((from, to), bytes) in links {
            for (member, sends) in [(*from, true), (*to, false)] {
                let node = members.get(&member).map_or(member, |it| it.pid.node);
                *busy.entry((member, sends)).or_insert(0.0) += bytes / self.rate(node);
            }
        }
        busy
    }

    pub fn session_progress(&mut self, key: Key) {
        let Some(session) = self.sessions.begun.get(&key) else {
            self.scene.paces.remove(&key);
            return;
        };
        let Some(pace) = self.scene.paces.get(&key) else {
            return;
        };
        let members = &session.members;
        let tallies: Vec<_> = members
            .iter()
            .map(|(member, it)| (it.pid, self.paced_tally(pace, members, *member)))
            .collect();
        for (pid, mut tally) in tallies {
            if self.scene.limits.fibber == Some(pid.node) {
                self.fib(&mut tally);
            }
            let Key { leader, session } = key.clone();
            let input = Input::SessionProgress {
                leader,
                session,
                tally,
            };
            self.feed(pid, input);
        }
        self.progresses(key);
    }

    /// What a member saw till now.
    pub fn paced_tally(&self, pace: &Pace, members: &Participants, member: usize) -> SessionTally {
        let elapsed_ms = self.now - pace.began;
        let share = elapsed_ms as f64 / pace.takes_ms as f64;
        let sides = self.sides(members, &pace.links);
        let work = &members[&member].work;
        let mut seen = Vec::new();
        for ((from, to), bytes) in pace.links.iter().filter(|((_, to), _)| *to == member) {
            let busy = sides[&(*from, true)].max(sides[&(*to, false)]);
            let waited = (busy / pace.takes_ms as f64 * 1000.0).min(1.0) * elapsed_ms as f64;
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
}

/// Bytes over each link, with a frame as large as the stripe is.
fn links(members: &Participants) -> BTreeMap<(usize, usize), f64> {
    let mut links = BTreeMap::new();
    let Some(Participant { work, .. }) = members.values().next() else {
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
