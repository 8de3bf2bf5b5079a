//! Sessions: once every member of a plan has begun, a session runs for some time, and then its stripes are computed by
//! the definition of a hop, on the bytes in the members' RAM. A slow hop makes it run for seconds, and sometimes stalls
//! it; a member that dies or is told to stop ends it half-way for all.

use std::collections::BTreeMap;
use std::ops::Range;

use storaged_codec::{Fingerprint, engine, fingerprint, leaf_digest};
use storaged_core::{Input, Keep, SessionTally, SessionWork, Source, Turn};
use storaged_plan::{CodingPlan, Hop, Target, trace};
use storaged_wire::peer::SessionFault;
use storaged_wire::{NodeName, SessionId};

use super::slow::Pace;
use super::world::{CHUNK_BYTES, Event, World, index};

pub type Key = (NodeName, SessionId);

/// A member's node, its generation and its work.
pub type Member = (usize, u64, SessionWork);
pub type Members = BTreeMap<usize, Member>;

/// A slow hop makes a session last this long and up to so much longer, in milliseconds; one in so many such sessions
/// stalls for good.
const SLOW_MS: u64 = 500;
const SLOWER_MS: u64 = 4_000;
const STALL_ONE_IN: u64 = 4;
/// An executor whose neighbours never begin gives a session up.
pub const STALL_MS: u64 = 8_000;

/// What a session came to: the stripes that each member has kept, and who failed first, with what.
#[derive(Default)]
struct Computed {
    kept: BTreeMap<usize, Vec<u64>>,
    failed: Option<Failed>,
}

/// Which member, with what.
type Failed = (usize, SessionFault);

/// How a session goes.
enum Course {
    /// To its end.
    Whole,
    /// So many stripes, then somebody fails.
    Breaks(u64, Failed),
}

/// A session that members have begun; once all have, it runs until some time.
#[derive(Default)]
pub struct Session {
    pub members: Members,
    ends_at: Option<u64>,
    /// How it goes over the links, if one of them is slow.
    pub pace: Option<Pace>,
}

/// Sessions by their leader and number.
#[derive(Default)]
pub struct Sessions {
    pub begun: BTreeMap<Key, Session>,
}

impl Sessions {
    pub fn begin(&mut self, node: usize, generation: u64, work: SessionWork) {
        let key = (work.leader.clone(), work.session);
        let session = self.begun.entry(key).or_default();
        session
            .members
            .insert(work.member, (node, generation, work));
    }

    /// Sessions that a node takes part in.
    pub fn of(&self, node: usize) -> Vec<Key> {
        let takes_part = |session: &Session| session.members.values().any(|(at, _, _)| *at == node);
        let sessions = self.begun.iter().filter(|(_, it)| takes_part(it));
        sessions.map(|(key, _)| key.clone()).collect()
    }
}

impl World {
    /// Begins sessions whose members are all there, and ends those whose time has come.
    pub fn advance_sessions(&mut self) {
        let keys: Vec<Key> = self.sessions.begun.keys().cloned().collect();
        for key in keys {
            let session = &self.sessions.begun[&key];
            let whole = is_whole(&session.members);
            match session.ends_at {
                None if whole => self.start_session(&key),
                Some(end) if end <= self.now => self.end_session(&key),
                _ => {}
            }
        }
    }

    fn start_session(&mut self, key: &Key) {
        let slow = self.slow_member(key).is_some();
        let pace = self.pace(key);
        let lasts = match (&pace, slow) {
            (Some(pace), _) => pace.takes_ms,
            (None, true) => SLOW_MS + self.random(SLOWER_MS),
            (None, false) => 5 + self.random(20),
        };
        let ends_at = self.now + lasts;
        let session = self.sessions.begun.get_mut(key).expect("it has begun");
        session.ends_at = Some(ends_at);
        session.pace = pace;
        let members = session.members.clone();
        self.at(ends_at, Event::Sessions);
        self.count(&members);
        let prepared = members.iter().find_map(|(member, (node, _, work))| {
            Some((*member, self.prepare(*node, work).err()?))
        });
        let prepared = prepared.or_else(|| self.unreachable_members(&members));
        if let Some(failed) = prepared {
            self.sessions.begun.remove(key);
            let kept = BTreeMap::new();
            let computed = Computed {
                kept,
                failed: Some(failed),
            };
            self.tell(&members, (&computed, None), 20);
        }
    }

    fn slow_member(&self, key: &Key) -> Option<usize> {
        let slow = self.limits.slow?;
        let mut members = self.sessions.begun[key].members.iter();
        members.find_map(|(member, (node, _, _))| (*node == slow).then_some(*member))
    }

    fn end_session(&mut self, key: &Key) {
        let slow = self.slow_member(key);
        let Some(Session { members, pace, .. }) = self.sessions.begun.remove(key) else {
            return;
        };
        let stripes = stripes(&members);
        // Of repairs one in three, of encodes one in ten breaks off half-way, by somebody's silence.
        let one_in = if repairs(&members) { 3 } else { 10 };
        let may_break = stripes > 1 && self.limits.liar.is_none();
        let stalls = slow.filter(|_| stripes > 1 && self.random(STALL_ONE_IN) == 0);
        let course = if let Some(slow) = stalls {
            self.stalls += 1;
            Course::Breaks(1 + self.random(stripes - 1), missed(&members, slow))
        } else if may_break && self.random(one_in) == 0 {
            let silence = self.silence(&members);
            Course::Breaks(1 + self.random(stripes - 1), silence)
        } else {
            Course::Whole
        };
        let computed = self.compute(&members, course);
        self.tell(&members, (&computed, pace.as_ref()), 10);
    }

    /// Ends the sessions of a node that is about to die, while its RAM is still there: some stripes are done by then,
    /// and the others notice within the time that a link may be silent.
    pub fn lose_sessions(&mut self, node: usize) {
        for key in self.sessions.of(node) {
            self.lose_member(&key, node, 2_000);
        }
    }

    /// A node's executor is told to end a session. Gives the stripes that it has kept, or none if it had not begun or
    /// had ended.
    pub fn stop_session(
        &mut self,
        node: usize,
        leader: &NodeName,
        session: SessionId,
    ) -> Option<Vec<Range<u64>>> {
        let key = (leader.clone(), session);
        let takes_part = self.sessions.of(node).contains(&key);
        takes_part.then(|| self.lose_member(&key, node, 20))
    }

    /// One member of a session ends; if it runs, the others fail within `ms`. Gives what that member has kept.
    fn lose_member(&mut self, key: &Key, node: usize, ms: u64) -> Vec<Range<u64>> {
        let Some(Session {
            mut members,
            ends_at,
            pace,
        }) = self.sessions.begun.remove(key)
        else {
            return Vec::new();
        };
        let is_lost = |(_, (at, _, _)): &(&usize, &Member)| *at == node;
        let Some(lost) = members.iter().find(is_lost).map(|(member, _)| *member) else {
            return Vec::new();
        };
        if ends_at.is_none() {
            members.remove(&lost);
            if !members.is_empty() {
                let session = Session {
                    members,
                    ends_at,
                    pace,
                };
                self.sessions.begun.insert(key.clone(), session);
            }
            return Vec::new();
        }
        self.cut += 1;
        let done = match &pace {
            Some(pace) => pace.stripes(stripes(&members), self.now),
            None => self.random(stripes(&members).max(1)),
        };
        let course = Course::Breaks(done, missed(&members, lost));
        let computed = self.compute(&members, course);
        members.remove(&lost);
        self.tell(&members, (&computed, None), ms);
        runs(computed.kept.get(&lost))
    }

    /// A link or a process stops in the midst of a session: all members find out within `ms`.
    pub fn cut_session(&mut self, key: &Key, node: usize, ms: u64) {
        let is_lost = |(_, (at, _, _)): &(&usize, &Member)| *at == node;
        let lost = self.sessions.begun.get(key).and_then(|session| {
            let begun = session.ends_at.is_some();
            let lost = session.members.iter().find(is_lost);
            lost.filter(|_| begun).map(|(member, _)| *member)
        });
        let Some(lost) = lost else { return };
        let Some(Session { members, .. }) = self.sessions.begun.remove(key) else {
            return;
        };
        self.cut += 1;
        let done = self.random(stripes(&members).max(1));
        let computed = self.compute(&members, Course::Breaks(done, missed(&members, lost)));
        self.tell(&members, (&computed, None), ms);
    }

    /// Members that have waited in vain for the others give up.
    pub fn end_unbegun_session(&mut self, key: &Key) {
        let waits = |session: &Session| session.ends_at.is_none();
        if !self.sessions.begun.get(key).is_some_and(waits) {
            return;
        }
        let Some(Session { members, .. }) = self.sessions.begun.remove(key) else {
            return;
        };
        let Some((at, (_, _, work))) = members.iter().next() else {
            return;
        };
        let absent = (0..work.members.len()).find(|member| !members.contains_key(member));
        let node = work.members[absent.unwrap_or(*at)].clone();
        let reason = "sent nothing in time".into();
        let computed = Computed {
            kept: BTreeMap::new(),
            failed: Some((*at, SessionFault::Neighbour { node, reason })),
        };
        self.tell(&members, (&computed, None), 20);
    }

    /// Every member hears within `ms` how its session ended.
    fn tell(&mut self, members: &Members, outcome: (&Computed, Option<&Pace>), ms: u64) {
        let (computed, pace) = outcome;
        for (member, (node, generation, work)) in members {
            let outcome = match &computed.failed {
                None => Ok(match pace {
                    Some(pace) => self.tally(pace, members, *member),
                    None => SessionTally {
                        bytes: work.lane_length,
                        elapsed_ms: 5,
                        ..SessionTally::default()
                    },
                }),
                Some((guilty, fault)) if guilty == member => Err(fault.clone()),
                Some((guilty, _)) => {
                    let reason = "ended its stream".into();
                    Err(SessionFault::Neighbour {
                        node: work.members[*guilty].clone(),
                        reason,
                    })
                }
            };
            let input = Input::SessionEnded {
                leader: work.leader.clone(),
                session: work.session,
                outcome,
                kept: runs(computed.kept.get(member)),
            };
            let delay = 1 + self.random(ms);
            let event = Event::Input {
                node: *node,
                generation: *generation,
                input: Box::new(input),
            };
            self.after(delay, event);
        }
    }

    /// What sessions are like, for the tallies of a run.
    fn count(&mut self, members: &Members) {
        let (_, _, first) = members.values().next().expect("a session has members");
        let some = first.stripes.iter().map(|run| run.end - run.start);
        let resumes = some.sum::<u64>() < first.chunk.count(first.lane_length);
        let repairs = repairs(members);
        self.resumed += u64::from(resumes && repairs);
        self.incremental += u64::from(resumes && !repairs);
        let carry = |(_, _, work): &&Member| !work.carried.is_empty();
        self.carried += members.values().filter(carry).count() as u64;
    }

    fn compute(&mut self, members: &Members, course: Course) -> Computed {
        let mut computed = Computed::default();
        let (_, _, first) = members.values().next().expect("a session has members");
        for (turn, at) in (0..).zip(first.turns()) {
            let outcome = match &course {
                Course::Breaks(breaks_at, failed) if *breaks_at == turn => Err(failed.clone()),
                _ => self.compute_stripe(members, at, &mut computed.kept),
            };
            if let Err(failed) = outcome {
                computed.failed = Some(failed);
                return computed;
            }
        }
        if let Course::Breaks(_, failed) = course {
            computed.failed = Some(failed);
        }
        computed
    }

    /// Some member blames some other one for being silent.
    fn silence(&mut self, members: &Members) -> Failed {
        let (_, _, work) = members.values().next().unwrap();
        let count = work.members.len() as u64;
        let (by, silent) = (self.random(count) as usize, self.random(count) as usize);
        let node = work.members[silent].clone();
        let reason = "sent nothing whole".into();
        (by, SessionFault::Neighbour { node, reason })
    }

    fn compute_stripe(
        &mut self,
        members: &Members,
        Turn { stripe, class }: Turn,
        kept: &mut BTreeMap<usize, Vec<u64>>,
    ) -> Result<(), (usize, SessionFault)> {
        let (_, _, first) = members.values().next().unwrap();
        let plan = &first.plan.clone().classes()[class].clone();
        let bytes = first.stripe_bytes(stripe);
        let mut edges: Vec<Vec<Vec<u8>>> = vec![Vec::new(); plan.edges.len()];
        for hop in &plan.hops {
            let (node, _, work) = &members[&hop.member];
            assert_eq!(index(&work.members[hop.member]), *node);
            for edge in &hop.inputs {
                check_raw(plan, *edge, work, stripe, &edges[*edge])
                    .and_then(|()| check_sums(plan, *edge, work, stripe, &edges[*edge]))
                    .map_err(|fault| (hop.member, fault))?;
            }
            let mut operands: Vec<Vec<u8>> =
                hop.inputs.iter().flat_map(|e| edges[*e].clone()).collect();
            if hop.local.is_some() {
                let block = self.read(*node, work, stripe, bytes);
                operands.push(block.map_err(|fault| (hop.member, fault))?);
            }
            for output in &hop.outputs {
                let mut sums: Vec<Vec<u8>> = output
                    .rows
                    .iter()
                    .map(|row| combine(row, &operands, bytes))
                    .collect();
                match output.target {
                    Target::Edge(edge) => {
                        if self.limits.liar == Some(*node) && self.random(2) == 0 {
                            sums[0][0] ^= 0x5a;
                            self.lies += 1;
                            self.lies_in_encodes += u64::from(encodes(members));
                        }
                        edges[edge] = sums;
                    }
                    Target::Keep(_) => {
                        let put = self.keep(*node, work, stripe, &sums[0]);
                        put.map_err(|fault| (hop.member, blame(plan, hop, work, fault)))?;
                        kept.entry(hop.member).or_default().push(stripe);
                    }
                }
            }
        }
        Ok(())
    }

    fn prepare(&mut self, node: usize, work: &SessionWork) -> Result<(), SessionFault> {
        if let Some(Keep::Parity { set, basis, prints }) = &work.keep {
            let ram = self.ram(node);
            let mut fresh = match basis {
                Some(basis) => ram
                    .parity
                    .get(basis)
                    .cloned()
                    .ok_or(SessionFault::NoBasis)?,
                None => Vec::new(),
            };
            let count = work.chunk.count(work.lane_length) as usize;
            fresh.resize(count.max(fresh.len()), vec![0; CHUNK_BYTES as usize]);
            for stripe in work.carried.iter().cloned().flatten() {
                fresh[stripe as usize] = ram.parity[set][stripe as usize].clone();
            }
            let moves = |stripe: usize| work.turns().any(|turn| turn.stripe == stripe as u64);
            let carried = |stripe: usize| {
                let mut ranges = work.carried.iter();
                ranges.any(|range| range.contains(&(stripe as u64)))
            };
            let stays = |stripe: &usize| match basis {
                Some(_) => !moves(*stripe),
                None => carried(*stripe),
            };
            for stripe in (0..count).filter(stays) {
                let bytes = work.stripe_bytes(stripe as u64);
                if fingerprint(&fresh[stripe][..bytes]) != prints[stripe] {
                    return Err(SessionFault::WrongResult(format!("kept stripe {stripe}")));
                }
            }
            ram.parity.insert(*set, fresh);
        }
        Ok(())
    }

    fn read(
        &mut self,
        node: usize,
        work: &SessionWork,
        stripe: u64,
        bytes: usize,
    ) -> Result<Vec<u8>, SessionFault> {
        let ram = self.ram(node);
        let mut block = vec![0; bytes];
        match work.source.as_ref().unwrap() {
            Source::Shard { shard, basis } => {
                for one in std::iter::once(shard).chain(basis) {
                    let range = work.chunk.range(stripe, one.length);
                    let gone = if one == shard {
                        SessionFault::NoBlocks
                    } else {
                        SessionFault::NoBasis
                    };
                    let slot = ram.slots.get(&one.slot).ok_or(gone)?;
                    let chunk = &slot[range.start as usize..range.end as usize];
                    let expected = one.leaves.get(stripe as usize);
                    if expected.is_some_and(|leaf| leaf_digest(chunk, stripe) != *leaf) {
                        let changed = SessionFault::Corrupt(format!("chunk {stripe}"));
                        return Err(if one == shard {
                            changed
                        } else {
                            SessionFault::NoBasis
                        });
                    }
                    let both = chunk.len().min(bytes);
                    engine().xor(&mut block[..both], &chunk[..both]);
                }
            }
            Source::Parity { set } => {
                let set = ram.parity.get(set).ok_or(SessionFault::NoBlocks)?;
                block.copy_from_slice(&set[stripe as usize][..bytes]);
            }
        }
        Ok(block)
    }

    fn keep(
        &mut self,
        node: usize,
        work: &SessionWork,
        stripe: u64,
        sum: &[u8],
    ) -> Result<(), SessionFault> {
        let ram = self.ram(node);
        match work.keep.as_ref().unwrap() {
            Keep::Parity { set, prints, .. } => {
                let set = ram.parity.get_mut(set).ok_or(SessionFault::Aborted)?;
                let mut block = set[stripe as usize].clone();
                engine().xor(&mut block[..sum.len()], sum);
                if fingerprint(&block[..sum.len()]) != prints[stripe as usize] {
                    return Err(SessionFault::WrongResult(format!("stripe {stripe}")));
                }
                set[stripe as usize] = block;
            }
            Keep::Shard(shard) => {
                let range = work.chunk.range(stripe, shard.length);
                let bytes = &sum[..(range.end - range.start) as usize];
                if shard
                    .leaves
                    .get(stripe as usize)
                    .is_some_and(|leaf| leaf_digest(bytes, stripe) != *leaf)
                {
                    return Err(SessionFault::WrongResult(format!("chunk {stripe}")));
                }
                let slot = ram
                    .slots
                    .get_mut(&shard.slot)
                    .ok_or(SessionFault::Aborted)?;
                slot[range.start as usize..range.end as usize].copy_from_slice(bytes);
            }
        }
        Ok(())
    }
}

/// Whether all members have begun.
fn is_whole(members: &Members) -> bool {
    let first = members.values().next();
    first.is_some_and(|(_, _, work)| members.len() == members_of(work))
}

fn stripes(members: &Members) -> u64 {
    let (_, _, first) = members.values().next().expect("a session has members");
    first.turns().count() as u64
}

fn repairs(members: &Members) -> bool {
    let mut keeps = members
        .values()
        .filter_map(|(_, _, work)| work.keep.as_ref());
    keeps.all(|keep| matches!(keep, Keep::Shard(_)))
}

/// Some other member misses what this one should have sent.
fn missed(members: &Members, silent: usize) -> Failed {
    let by = members.keys().find(|member| **member != silent);
    let by = *by.unwrap_or(&silent);
    let node = members[&by].2.members[silent].clone();
    let reason = "sent nothing in time".into();
    (by, SessionFault::Neighbour { node, reason })
}

/// Whether shards go in and nothing but parity comes out.
fn encodes(members: &Members) -> bool {
    members.values().all(|(_, _, work)| {
        !matches!(work.source, Some(Source::Parity { .. }))
            && !matches!(work.keep, Some(Keep::Shard(_)))
    })
}

/// Members that have a part in some class.
pub fn members_of(work: &SessionWork) -> usize {
    let has_part = |member: &usize| {
        let mut classes = work.plan.classes().iter();
        classes.any(|plan| plan.hop(*member).is_some())
    };
    (0..work.members.len()).filter(has_part).count()
}

/// As the daemon's executor does it: a block that came as it is must have its digest, if that is known.
fn check_raw(
    plan: &CodingPlan,
    edge: usize,
    work: &SessionWork,
    stripe: u64,
    sums: &[Vec<u8>],
) -> Result<(), SessionFault> {
    let from = plan.edges[edge].from;
    let proof = work.proofs.get(&from).filter(|_| plan.is_raw(edge));
    let Some(proof) = proof else { return Ok(()) };
    let range = work.chunk.range(stripe, proof.length);
    let chunk = &sums[0][..(range.end - range.start) as usize];
    let leaf = proof.leaves.get(stripe as usize);
    match leaf.is_none_or(|leaf| leaf_digest(chunk, stripe) == *leaf) {
        true => Ok(()),
        false => Err(SessionFault::WrongBytes {
            node: work.members[from].clone(),
            reason: format!("chunk {stripe}"),
        }),
    }
}

/// As the daemon's executor does it: a sum of blocks whose fingerprints are known must have their combination.
fn check_sums(
    plan: &CodingPlan,
    edge: usize,
    work: &SessionWork,
    stripe: u64,
    sums: &[Vec<u8>],
) -> Result<(), SessionFault> {
    if work.proofs.is_empty() {
        return Ok(());
    }
    let print = |source: usize| {
        let proof = work.proofs.get(&source)?;
        let at = stripe as usize;
        (proof.prints.len() == proof.leaves.len())
            .then(|| proof.prints.get(at).copied().unwrap_or_default())
    };
    let made = trace(plan, work.plan.sources()).unwrap();
    for (row, sum) in made.edges[edge].iter().zip(sums) {
        let terms = row.iter().enumerate().filter(|(_, c)| **c != 0);
        let terms: Option<Vec<_>> = terms
            .map(|(source, c)| Some((*c, print(source)?)))
            .collect();
        let Some(terms) = terms else { continue };
        let mut expected = Fingerprint::ZERO;
        terms.iter().for_each(|(c, print)| expected.fold(*c, print));
        if fingerprint(sum) != expected {
            return Err(SessionFault::WrongBytes {
                node: work.members[plan.edges[edge].from].clone(),
                reason: format!("stripe {stripe}"),
            });
        }
    }
    Ok(())
}

/// A wrong result of blocks of which all but one were checked is because of that one.
fn blame(plan: &CodingPlan, hop: &Hop, work: &SessionWork, fault: SessionFault) -> SessionFault {
    let SessionFault::WrongResult(reason) = fault else {
        return fault;
    };
    if let Some(Keep::Parity { basis: Some(_), .. }) = &work.keep {
        return SessionFault::WrongResult(reason);
    }
    let mut unchecked = hop.inputs.iter().filter(|edge| {
        !(plan.is_raw(**edge) && work.proofs.contains_key(&plan.edges[**edge].from))
    });
    match (unchecked.next(), unchecked.next(), hop.local) {
        (Some(edge), None, None) if plan.is_raw(*edge) => SessionFault::Unproven {
            node: work.members[plan.edges[*edge].from].clone(),
            reason,
        },
        _ => SessionFault::WrongResult(reason),
    }
}

pub fn runs(stripes: Option<&Vec<u64>>) -> Vec<Range<u64>> {
    let stripes = stripes.into_iter().flatten();
    stripes.map(|stripe| *stripe..*stripe + 1).collect()
}

fn combine(row: &[u8], operands: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    let mut sum = vec![0; bytes];
    for (c, operand) in row.iter().zip(operands) {
        engine().fold(&mut [&mut sum[..]], &[*c], operand);
    }
    sum
}
