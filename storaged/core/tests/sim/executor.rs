//! Sessions: once every member of a plan has begun, its stripes are computed by the definition of a hop, on the
//! bytes in the members' RAM.

use std::collections::BTreeMap;

use storaged_codec::{Fingerprint, engine, fingerprint, leaf_digest};
use storaged_core::encode::plans::trace;
use storaged_core::encode::{CodingPlan, Hop, Keep, SessionWork, Source, Target, Turn};
use storaged_core::{Input, SessionTally};
use storaged_wire::peer::SessionFault;
use storaged_wire::{NodeName, SessionId};

use super::world::{CHUNK_BYTES, Event, World, index};

type Key = (NodeName, SessionId);

/// What a session came to: the stripes that each member has kept, and who failed first, with what.
#[derive(Default)]
struct Computed {
    kept: BTreeMap<usize, Vec<u64>>,
    failed: Option<(usize, SessionFault)>,
}

/// Works of sessions, by member.
#[derive(Default)]
pub struct Sessions {
    begun: BTreeMap<Key, BTreeMap<usize, (usize, u64, SessionWork)>>,
}

impl Sessions {
    pub fn begin(&mut self, node: usize, generation: u64, work: SessionWork) {
        let key = (work.leader.clone(), work.session);
        self.begun
            .entry(key)
            .or_default()
            .insert(work.member, (node, generation, work));
    }

    /// Whether it had begun and had not ended.
    pub fn stop(&mut self, node: usize, leader: &NodeName, session: SessionId) -> bool {
        let Some(members) = self.begun.get_mut(&(leader.clone(), session)) else {
            return false;
        };
        let before = members.len();
        members.retain(|_, (at, _, _)| *at != node);
        members.len() < before
    }

    pub fn lost(&mut self, node: usize) {
        self.begun
            .values_mut()
            .for_each(|members| members.retain(|_, (at, _, _)| *at != node));
    }
}

impl World {
    pub fn advance_sessions(&mut self) {
        let whole = |members: &BTreeMap<usize, (usize, u64, SessionWork)>| {
            members
                .values()
                .next()
                .is_some_and(|(_, _, work)| members.len() == members_of(work))
        };
        let ready: Vec<Key> = self
            .sessions
            .begun
            .iter()
            .filter(|(_, m)| whole(m))
            .map(|(k, _)| k.clone())
            .collect();
        self.sessions.begun.retain(|_, members| !members.is_empty());
        for key in ready {
            let members = self.sessions.begun.remove(&key).unwrap();
            let Computed { kept, failed } = self.compute(&members);
            for (member, (node, generation, work)) in &members {
                let outcome = match &failed {
                    None => Ok(SessionTally {
                        bytes: work.lane_length,
                        elapsed_ms: 5,
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
                    kept: runs(kept.get(member)),
                };
                let delay = 5 + self.random(20);
                let event = Event::Input {
                    node: *node,
                    generation: *generation,
                    input: Box::new(input),
                };
                self.after(delay, event);
            }
        }
    }

    fn compute(&mut self, members: &BTreeMap<usize, (usize, u64, SessionWork)>) -> Computed {
        let mut computed = Computed::default();
        for (member, (node, _, work)) in members {
            if let Err(fault) = self.prepare(*node, work) {
                computed.failed = Some((*member, fault));
                return computed;
            }
        }
        let (_, _, first) = members.values().next().unwrap();
        let resumes = first
            .stripes
            .iter()
            .map(|run| run.end - run.start)
            .sum::<u64>()
            < first.chunk.count(first.lane_length);
        let mut keeps = members
            .values()
            .filter_map(|(_, _, work)| work.keep.as_ref());
        let repairs = keeps.all(|keep| matches!(keep, Keep::Shard(_)));
        self.resumed += u64::from(resumes && repairs);
        self.incremental += u64::from(resumes && !repairs);
        self.carried += members
            .values()
            .filter(|(_, _, work)| !work.carried.is_empty())
            .count() as u64;
        // Of repairs one in three, of encodes one in ten breaks off half-way, by somebody's silence.
        let stripes = first.turns().count() as u64;
        let one_in = if repairs { 3 } else { 10 };
        let breaks = stripes > 1 && self.limits.liar.is_none() && self.random(one_in) == 0;
        let breaks_at = breaks.then(|| 1 + self.random(stripes - 1));
        for (turn, at) in (0..).zip(first.turns()) {
            let outcome = match breaks_at == Some(turn) {
                true => Err(self.silence(members)),
                false => self.compute_stripe(members, at, &mut computed.kept),
            };
            if let Err(failed) = outcome {
                computed.failed = Some(failed);
                return computed;
            }
        }
        computed
    }

    /// Some member blames some other one for being silent.
    fn silence(
        &mut self,
        members: &BTreeMap<usize, (usize, u64, SessionWork)>,
    ) -> (usize, SessionFault) {
        let (_, _, work) = members.values().next().unwrap();
        let count = work.members.len() as u64;
        let (by, silent) = (self.random(count) as usize, self.random(count) as usize);
        let node = work.members[silent].clone();
        let reason = "sent nothing whole".into();
        (by, SessionFault::Neighbour { node, reason })
    }

    fn compute_stripe(
        &mut self,
        members: &BTreeMap<usize, (usize, u64, SessionWork)>,
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
            for stripe in (0..count).filter(|stripe| !moves(*stripe)) {
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

/// Whether shards go in and nothing but parity comes out.
fn encodes(members: &BTreeMap<usize, (usize, u64, SessionWork)>) -> bool {
    members.values().all(|(_, _, work)| {
        !matches!(work.source, Some(Source::Parity { .. }))
            && !matches!(work.keep, Some(Keep::Shard(_)))
    })
}

/// Members that have a part in some class.
fn members_of(work: &SessionWork) -> usize {
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

fn runs(stripes: Option<&Vec<u64>>) -> Vec<std::ops::Range<u64>> {
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
