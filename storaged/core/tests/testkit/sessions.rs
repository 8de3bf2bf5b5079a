//! The life of sessions: once every member of a plan has begun, a session runs for some time, and its stripes are made
//! (`stripes`), all at its end or one after the other. A member that dies or is told to stop ends it for all.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use storaged_core::{Input, SessionTally, SessionWork, Sink, Source, Urgency};
use storaged_wire::peer::SessionFault;
use storaged_wire::{NodeName, SessionId, SlotId};

use super::process::Pid;
use super::scene::Scene;
use super::world::{Event, World};
use storaged_core::ParityId;

/// A session as its members name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub leader: NodeName,
    pub session: SessionId,
}

/// A member of a session that has begun.
#[derive(Debug, Clone)]
pub struct Participant {
    pub pid: Pid,
    pub work: SessionWork,
}

pub type Participants = BTreeMap<usize, Participant>;

/// An executor whose neighbours never begin gives a session up.
const STALL_MS: u64 = 8_000;

/// Which member failed, with what.
#[derive(Debug, Clone)]
pub struct Failed {
    pub member: usize,
    pub fault: SessionFault,
}

/// How a session ends whose time is over.
pub enum End {
    /// Everything is made.
    Whole,
    /// So many stripes are, then somebody fails.
    Breaks(u64, Failed),
}

/// When stripes are made.
pub enum Pacing {
    /// Each member is done at once, whoever else has begun.
    AtOnce,
    /// All at the end, after so long.
    AtTheEnd,
    /// One after the other; sessions that run side by side share the time.
    ByStripe { ms: u64 },
}

/// What a session keeps at a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Block {
    Shard,
    Parity,
}

/// What a session came to: the stripes that each member has kept, and who failed first.
#[derive(Debug, Default)]
pub struct Made {
    pub kept: BTreeMap<usize, Vec<u64>>,
    pub failed: Option<Failed>,
}

/// Members that have begun.
#[derive(Debug, Default)]
pub struct Session {
    pub members: Participants,
    /// Until when it runs; none while members are awaited.
    pub ends_at: Option<u64>,
    done: usize,
    made: Made,
}

/// What sessions did.
#[derive(Debug, Default)]
pub struct Counts {
    /// Sessions that some member's executor was given.
    pub begun: BTreeSet<Key>,
    /// Sessions that have moved something.
    pub moved: BTreeSet<Key>,
    /// Blocks sent by each node.
    pub sent: BTreeMap<usize, u64>,
    /// How often each stripe of a block was put in place, by node.
    pub put: BTreeMap<(usize, Block), BTreeMap<u64, u32>>,
    /// Repairs that had less than all of a lane to do, and encodes that had.
    pub resumed: u64,
    pub incremental: u64,
    /// Parity sets that a session found made in part.
    pub carried: u64,
    /// Sessions that a member's end cut short.
    pub cut: u64,
    /// Parts of sessions that nodes were given as awaited, or were told later that they are.
    pub awaited: BTreeSet<(usize, Key)>,
}

/// Sessions by their leader and number.
#[derive(Default)]
pub struct Sessions {
    pub begun: BTreeMap<Key, Session>,
    pub counts: Counts,
    /// Where executors put bytes, until they have said that they do not any more.
    written: BTreeMap<(Pid, Key), Sink>,
    /// Slots that executors read from, until they have been told to stop or have ended by themselves.
    read: BTreeMap<(Pid, Key), SlotId>,
}

impl Sessions {
    /// Sessions that a node takes part in.
    pub fn of(&self, node: usize) -> Vec<Key> {
        let takes_part = |session: &Session| session.members.values().any(|it| it.pid.node == node);
        let sessions = self.begun.iter().filter(|(_, it)| takes_part(it));
        sessions.map(|(key, _)| key.clone()).collect()
    }

    pub(super) fn hears(&mut self, pid: Pid, input: &Input) {
        if let Input::SessionEnded {
            leader, session, ..
        } = input
        {
            let key = Key {
                leader: leader.clone(),
                session: *session,
            };
            let place = (pid, key);
            self.written.remove(&place);
            self.read.remove(&place);
        }
    }

    /// Nothing else fills a slot that a session fills.
    pub(super) fn nothing_fills(&self, pid: Pid, slot: SlotId) {
        let fills = |keep: &Sink| matches!(keep, Sink::Shard(shard) if shard.slot == slot);
        assert!(
            !self.is_written(pid, fills),
            "{pid:?} fetches into a slot that a session fills"
        );
    }

    /// What a session makes stays.
    pub(super) fn nothing_makes(&self, pid: Pid, gone: ParityId) {
        let makes = |keep: &Sink| matches!(keep, Sink::Parity { set, .. } if *set == gone);
        assert!(
            !self.is_written(pid, makes),
            "{pid:?} drops parity that a session makes"
        );
    }

    /// Nobody is given what a session reads.
    pub(super) fn nothing_reads(&self, pid: Pid, slot: SlotId) {
        let mut read = self.read.iter();
        let read = read.any(|((at, _), read)| (*at, *read) == (pid, slot));
        assert!(!read, "{pid:?} gives a trainer a slot that a session reads");
    }

    fn is_written(&self, pid: Pid, what: impl Fn(&Sink) -> bool) -> bool {
        let mut written = self.written.iter();
        written.any(|((at, _), keep)| *at == pid && what(keep))
    }

    fn note(&mut self, pid: Pid, key: &Key, work: &SessionWork) {
        self.counts.begun.insert(key.clone());
        let place = (pid, key.clone());
        if let Some(Source::Shard { shard, .. }) = &work.source {
            self.read.insert(place.clone(), shard.slot);
        }
        if let Some(keep) = &work.keep {
            self.written.insert(place, keep.clone());
        }
    }
}

impl<S: Scene> World<S> {
    pub(super) fn hasten(&mut self, pid: Pid, key: Key) {
        self.sessions.counts.awaited.insert((pid.node, key));
    }

    pub(super) fn session_begins(&mut self, pid: Pid, work: SessionWork, takes_ms: u64) {
        let key = Key {
            leader: work.leader.clone(),
            session: work.session,
        };
        if work.urgency == Urgency::Awaited {
            self.hasten(pid, key.clone());
        }
        let pacing = S::pacing(self);
        if let Pacing::AtOnce = pacing {
            self.sessions.counts.begun.insert(key.clone());
            let all = 0..work.chunk.count(work.lane_length);
            if let Some(sink) = &work.keep {
                all.clone()
                    .for_each(|stripe| self.ram(pid.node).put(sink, stripe));
            }
            let kept = work.keep.as_ref().map(|_| all);
            let ended = ended(
                &key,
                Ok(SessionTally::default()),
                kept.into_iter().collect(),
            );
            return self.back(pid, takes_ms, ended);
        }
        self.after(STALL_MS, Event::Stalled(key.clone()));
        self.sessions.note(pid, &key, &work);
        let session = self.sessions.begun.entry(key.clone()).or_default();
        let (member, participant) = (work.member, Participant { pid, work });
        if session.ends_at.is_some() {
            return self.is_no_member(&key, participant);
        }
        let before = session.members.insert(member, participant);
        let whole = is_whole(&session.members);
        if let Some(before) = before.filter(|before| before.pid != pid) {
            self.is_no_member(&key, before);
        }
        let Some(session) = self.sessions.begun.get_mut(&key) else {
            return;
        };
        match pacing {
            Pacing::ByStripe { ms } if whole => {
                session.ends_at = Some(u64::MAX);
                self.after(ms, Event::Stripe(key));
            }
            Pacing::ByStripe { .. } => {}
            _ => self.after(takes_ms, Event::Sessions),
        }
    }

    /// One that lies has told two nodes that they are the same member, or one of a session that runs without it: the streams of one of
    /// them lead nowhere.
    fn is_no_member(&mut self, key: &Key, Participant { pid, work }: Participant) {
        let fault = silent(&work, work.member, "is another node");
        self.back(pid, 20, ended(key, Err(fault), Vec::new()));
    }

    /// Begins sessions whose members are all there, and ends those whose time has come.
    pub(super) fn advance_sessions(&mut self) {
        let keys: Vec<Key> = self.sessions.begun.keys().cloned().collect();
        for key in keys {
            let session = &self.sessions.begun[&key];
            match session.ends_at {
                None if is_whole(&session.members) => self.start_session(&key),
                Some(end) if end <= self.now => self.end_session(&key),
                _ => {}
            }
        }
    }

    fn start_session(&mut self, key: &Key) {
        let ends_at = self.now + S::session_lasts(self, key);
        let session = self.sessions.begun.get_mut(key).expect("it has begun");
        session.ends_at = Some(ends_at);
        let members = session.members.clone();
        self.at(ends_at, Event::Sessions);
        self.count(&members);
        let failed = unlike(&members).or_else(|| self.prepare(&members));
        if let Some(failed) = failed.or_else(|| S::cannot_begin(self, &members)) {
            self.sessions.begun.remove(key);
            let made = Made {
                failed: Some(failed),
                ..Made::default()
            };
            self.tell_end(key, &members, &made, 20);
        }
    }

    fn end_session(&mut self, key: &Key) {
        let Some(Session { members, .. }) = self.sessions.begun.remove(key) else {
            return;
        };
        let end = S::session_ends(self, key, &members);
        let made = self.make(&members, end);
        self.sessions.counts.moved.insert(key.clone());
        self.tell_end(key, &members, &made, 10);
    }

    /// The next stripe of a session that makes one after the other.
    pub(super) fn stripe(&mut self, key: &Key) {
        let Pacing::ByStripe { ms } = S::pacing(self) else {
            return;
        };
        let running = |session: &&Session| session.ends_at.is_some();
        let at_once = self.sessions.begun.values().filter(running).count() as u64;
        let Some(mut session) = self.sessions.begun.remove(key) else {
            return;
        };
        let first = session.members.values().next().expect("it is complete");
        match first.work.turns().nth(session.done) {
            Some(turn) if session.made.failed.is_none() => {
                session.done += 1;
                let made = self.make_stripe(&session.members, turn, &mut session.made.kept);
                session.made.failed = made.err();
                self.sessions.counts.moved.insert(key.clone());
                self.sessions.begun.insert(key.clone(), session);
                self.after(ms * at_once.max(1), Event::Stripe(key.clone()));
            }
            _ => self.tell_end(key, &session.members, &session.made, 5),
        }
    }

    /// Ends the sessions of a node that is about to die, while its RAM is still there: some stripes are done by then,
    /// and the others notice within the time that a link may be silent.
    pub(super) fn lose_sessions(&mut self, node: usize) {
        for key in self.sessions.of(node) {
            self.lose_member(&key, node, 2_000);
        }
    }

    /// A node's executor is told to end a session; it says what it has kept, if it had begun and had not ended.
    pub(super) fn stop_session(&mut self, pid: Pid, key: &Key, takes_ms: u64) {
        self.sessions.read.remove(&(pid, key.clone()));
        let is_at_once = matches!(S::pacing(self), Pacing::AtOnce);
        let kept = if self.sessions.of(pid.node).contains(key) {
            self.lose_member(key, pid.node, 20)
        } else if is_at_once {
            Vec::new()
        } else {
            return;
        };
        let ended = ended(key, Err(SessionFault::Aborted), kept);
        self.back(pid, takes_ms, ended);
    }

    /// One member of a session ends; if it runs, the others fail within `ms`. Gives what that member has kept.
    fn lose_member(&mut self, key: &Key, node: usize, ms: u64) -> Vec<Range<u64>> {
        let Some(session) = self.sessions.begun.get_mut(key) else {
            return Vec::new();
        };
        let Some(lost) = member_on(&session.members, node) else {
            return Vec::new();
        };
        if session.ends_at.is_none() {
            session.members.remove(&lost);
            if session.members.is_empty() {
                self.sessions.begun.remove(key);
            }
            return Vec::new();
        }
        let (mut members, made) = self.cut_off(key, lost);
        members.remove(&lost);
        self.tell_end(key, &members, &made, ms);
        runs(made.kept.get(&lost))
    }

    /// A link or a process stops in the midst of a session: all members find out within `ms`.
    pub fn cut_session(&mut self, key: &Key, node: usize, ms: u64) {
        let session = self.sessions.begun.get(key);
        let running = session.filter(|session| session.ends_at.is_some());
        if let Some(lost) = running.and_then(|session| member_on(&session.members, node)) {
            let (members, made) = self.cut_off(key, lost);
            self.tell_end(key, &members, &made, ms);
        }
    }

    /// What has been made when a member is lost.
    fn cut_off(&mut self, key: &Key, lost: usize) -> (Participants, Made) {
        let session = self.sessions.begun.remove(key).unwrap_or_default();
        let Session {
            members, mut made, ..
        } = session;
        self.sessions.counts.cut += 1;
        let failed = missed(&members, lost);
        if let Pacing::ByStripe { .. } = S::pacing(self) {
            made.failed = Some(failed);
            return (members, made);
        }
        let done = S::stripes_done(self, key, stripes(&members));
        let made = self.make(&members, End::Breaks(done, failed));
        (members, made)
    }

    /// Members that have waited in vain for the others give up.
    pub(super) fn end_unbegun_session(&mut self, key: &Key) {
        let waits = |session: &Session| session.ends_at.is_none();
        if !self.sessions.begun.get(key).is_some_and(waits) {
            return;
        }
        let Some(Session { members, .. }) = self.sessions.begun.remove(key) else {
            return;
        };
        let Some((at, Participant { work, .. })) = members.iter().next() else {
            return;
        };
        let absent = (0..work.members.len()).find(|member| !members.contains_key(member));
        let failed = Failed {
            member: *at,
            fault: silent(work, absent.unwrap_or(*at), "sent nothing in time"),
        };
        let made = Made {
            failed: Some(failed),
            ..Made::default()
        };
        self.tell_end(key, &members, &made, 20);
    }

    /// Every member hears within `ms` how its session ended.
    fn tell_end(&mut self, key: &Key, members: &Participants, made: &Made, ms: u64) {
        for (member, Participant { pid, work }) in members {
            let outcome = match &made.failed {
                None => Ok(S::tally(self, key, members, *member)),
                Some(failed) if failed.member == *member => Err(failed.fault.clone()),
                Some(failed) => Err(silent(work, failed.member, "ended its stream")),
            };
            let ended = ended(key, outcome, runs(made.kept.get(member)));
            let after = S::told_after(self, ms);
            self.back(*pid, after, ended);
        }
    }

    /// What sessions are like, for the tallies of a run.
    fn count(&mut self, members: &Participants) {
        let first = &members.values().next().expect("a session has members").work;
        let some = first.stripes.iter().map(|run| run.end - run.start);
        let resumes = some.sum::<u64>() < first.chunk.count(first.lane_length);
        let repairs = repairs(members);
        let counts = &mut self.sessions.counts;
        counts.resumed += u64::from(resumes && repairs);
        counts.incremental += u64::from(resumes && !repairs);
        let carry = |it: &&Participant| !it.work.carried.is_empty();
        counts.carried += members.values().filter(carry).count() as u64;
    }
}

fn ended(key: &Key, outcome: Result<SessionTally, SessionFault>, kept: Vec<Range<u64>>) -> Input {
    let Key { leader, session } = key.clone();
    Input::SessionEnded {
        leader,
        session,
        outcome,
        kept,
    }
}

fn member_on(members: &Participants, node: usize) -> Option<usize> {
    let found = members.iter().find(|(_, it)| it.pid.node == node);
    found.map(|(member, _)| *member)
}

/// A member that has another plan than the first one, as only a leader that lies has it: what one sends is not what the other expects.
fn unlike(members: &Participants) -> Option<Failed> {
    let plan_of = |work: &SessionWork| {
        let (plan, members) = (work.plan.clone(), work.members.clone());
        (plan, members, work.stripes.clone(), work.lane_length)
    };
    let (first, Participant { work, .. }) = members.first_key_value()?;
    let mut others = members.iter();
    let (other, _) = others.find(|(_, it)| plan_of(&it.work) != plan_of(work))?;
    Some(Failed {
        member: *first,
        fault: silent(
            work,
            (*other).min(work.members.len() - 1),
            "sent something else",
        ),
    })
}

/// Whether all members have begun that have a part in some class.
fn is_whole(members: &Participants) -> bool {
    let Some(Participant { work, .. }) = members.values().next() else {
        return false;
    };
    let has_part = |member: &usize| {
        let mut classes = work.plan.classes().iter();
        classes.any(|plan| plan.hop(*member).is_some())
    };
    members.len() == (0..work.members.len()).filter(has_part).count()
}

pub fn stripes(members: &Participants) -> u64 {
    let first = members.values().next().expect("a session has members");
    first.work.turns().count() as u64
}

/// Whether nothing but shards comes out.
pub fn repairs(members: &Participants) -> bool {
    let mut keeps = members.values().filter_map(|it| it.work.keep.as_ref());
    keeps.all(|keep| matches!(keep, Sink::Shard(_)))
}

/// Whether shards go in and nothing but parity comes out.
pub fn encodes(members: &Participants) -> bool {
    members.values().all(|it| {
        !matches!(it.work.source, Some(Source::Parity { .. }))
            && !matches!(it.work.keep, Some(Sink::Shard(_)))
    })
}

/// A member blames a neighbour.
pub fn silent(work: &SessionWork, member: usize, reason: &str) -> SessionFault {
    SessionFault::Neighbour {
        node: work.members[member].clone(),
        reason: reason.into(),
    }
}

/// Some other member misses what this one should have sent.
pub fn missed(members: &Participants, lost: usize) -> Failed {
    let by = members.keys().find(|member| **member != lost);
    let member = *by.unwrap_or(&lost);
    let fault = silent(&members[&member].work, lost, "sent nothing in time");
    Failed { member, fault }
}

fn runs(stripes: Option<&Vec<u64>>) -> Vec<Range<u64>> {
    let stripes = stripes.into_iter().flatten();
    stripes.map(|stripe| *stripe..*stripe + 1).collect()
}
