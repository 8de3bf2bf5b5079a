//! Stripes of sessions: computed by the definition of a hop, on the bytes in the members' RAM; or only counted.

use std::collections::BTreeMap;

use storaged_codec::{Fingerprint, engine, fingerprint, leaf_digest};
use storaged_core::{SessionWork, Sink, Source, StripeTurn};
use storaged_plan::{CodingPlan, Hop, HopOutput, Target, trace};
use storaged_wire::peer::SessionFault;

use super::process::Payload;
use super::scene::Scene;
use super::sessions::{Block, End, Failed, Made, Participant, Participants};
use super::setup::CHUNK_BYTES;
use super::world::World;

impl<S: Scene> World<S> {
    /// Makes the stripes of a session up to its end.
    pub(super) fn make(&mut self, members: &Participants, end: End) -> Made {
        let mut made = Made::default();
        let first = members.values().next().expect("a session has members");
        for (turn, at) in (0..).zip(first.work.turns()) {
            let outcome = match &end {
                End::Breaks(breaks_at, failed) if *breaks_at == turn => Err(failed.clone()),
                _ => self.make_stripe(members, at, &mut made.kept),
            };
            if let Err(failed) = outcome {
                made.failed = Some(failed);
                return made;
            }
        }
        if let End::Breaks(_, failed) = end {
            made.failed = Some(failed);
        }
        made
    }

    pub(super) fn make_stripe(
        &mut self,
        members: &Participants,
        turn: StripeTurn,
        kept: &mut BTreeMap<usize, Vec<u64>>,
    ) -> Result<(), Failed> {
        let (begun, Participant { work: first, .. }) =
            members.first_key_value().expect("it has members");
        let plan = first.plan.classes()[turn.class].clone();
        // One that lies has others begin by plans that do not fit one another.
        let senders = plan.edges.iter().map(|edge| edge.from);
        let mut named = senders.chain(plan.hops.iter().map(|hop| hop.member));
        if let Some(absent) = named.find(|member| !members.contains_key(member)) {
            return Err(Failed {
                member: *begun,
                fault: SessionFault::Neighbour {
                    node: first.members[absent].clone(),
                    reason: "has not begun".into(),
                },
            });
        }
        for edge in &plan.edges {
            let node = members[&edge.from].pid.node;
            let sent = self.sessions.counts.sent.entry(node).or_default();
            *sent += edge.width as u64;
        }
        let mut edges: Vec<Vec<Vec<u8>>> = vec![Vec::new(); plan.edges.len()];
        for hop in &plan.hops {
            if S::PAYLOAD == Payload::Bytes {
                self.make_hop(&plan, hop, members, turn.stripe, &mut edges)
                    .map_err(|fault| Failed {
                        member: hop.member,
                        fault,
                    })?;
            }
            let is_kept = |output: &&HopOutput| matches!(output.target, Target::Keep(_));
            for _ in hop.outputs.iter().filter(is_kept) {
                kept.entry(hop.member).or_default().push(turn.stripe);
                let member = &members[&hop.member];
                self.count_put(member, turn.stripe);
                if let (Payload::Digests, Some(sink)) = (S::PAYLOAD, &member.work.keep) {
                    self.ram(member.pid.node).put(sink, turn.stripe);
                }
            }
        }
        Ok(())
    }

    fn count_put(&mut self, Participant { pid, work }: &Participant, stripe: u64) {
        let block = match work.keep {
            Some(Sink::Shard(_)) => Block::Shard,
            _ => Block::Parity,
        };
        let put = self.sessions.counts.put.entry((pid.node, block));
        *put.or_default().entry(stripe).or_default() += 1;
    }

    /// One hop: it checks what comes in, sums it up with its own block, and sends or keeps the sums.
    fn make_hop(
        &mut self,
        plan: &CodingPlan,
        hop: &Hop,
        members: &Participants,
        stripe: u64,
        edges: &mut [Vec<Vec<u8>>],
    ) -> Result<(), SessionFault> {
        let Participant { pid, work } = &members[&hop.member];
        assert_eq!(work.members[hop.member], S::name_of(self, pid.node));
        for edge in &hop.inputs {
            let arrived = Arrived {
                plan,
                work,
                edge: *edge,
                stripe,
                sums: &edges[*edge],
            };
            arrived.check()?;
        }
        let bytes = work.stripe_bytes(stripe);
        let mut operands: Vec<Vec<u8>> =
            hop.inputs.iter().flat_map(|e| edges[*e].clone()).collect();
        if hop.local.is_some() {
            operands.push(self.read(pid.node, work, stripe, bytes)?);
        }
        for output in &hop.outputs {
            let rows = output.rows.iter();
            let mut sums: Vec<_> = rows.map(|row| combine(row, &operands, bytes)).collect();
            match output.target {
                Target::Edge(edge) => {
                    S::sends(self, pid.node, members, &mut sums);
                    edges[edge] = sums;
                }
                Target::Keep(_) => self
                    .keep(pid.node, work, stripe, &sums[0])
                    .map_err(|fault| blame(plan, hop, work, fault))?,
            }
        }
        Ok(())
    }

    /// Parity that is there in part, or that an older set is the basis of, is where the session makes the rest.
    pub(super) fn prepare(&mut self, members: &Participants) -> Option<Failed> {
        members.iter().find_map(|(member, it)| {
            let fault = self.prepare_member(it.pid.node, &it.work).err()?;
            Some(Failed {
                member: *member,
                fault,
            })
        })
    }

    fn prepare_member(&mut self, node: usize, work: &SessionWork) -> Result<(), SessionFault> {
        if let Some(Sink::Parity { set, basis, prints }) = &work.keep {
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
            Sink::Parity { set, prints, .. } => {
                let set = ram.parity.get_mut(set).ok_or(SessionFault::Aborted)?;
                let mut block = set[stripe as usize].clone();
                engine().xor(&mut block[..sum.len()], sum);
                if fingerprint(&block[..sum.len()]) != prints[stripe as usize] {
                    return Err(SessionFault::WrongResult(format!("stripe {stripe}")));
                }
                set[stripe as usize] = block;
            }
            Sink::Shard(shard) => {
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

/// What came on an edge for one stripe, to be checked as the daemon's executor does it.
struct Arrived<'a> {
    plan: &'a CodingPlan,
    work: &'a SessionWork,
    edge: usize,
    stripe: u64,
    sums: &'a [Vec<u8>],
}

impl Arrived<'_> {
    fn check(&self) -> Result<(), SessionFault> {
        self.check_raw()?;
        self.check_sums()
    }

    fn from(&self) -> usize {
        self.plan.edges[self.edge].from
    }

    fn wrong(&self, what: &str) -> SessionFault {
        SessionFault::WrongBytes {
            node: self.work.members[self.from()].clone(),
            reason: format!("{what} {}", self.stripe),
        }
    }

    /// A block that came as it is must have its digest, if that is known.
    fn check_raw(&self) -> Result<(), SessionFault> {
        let (work, stripe) = (self.work, self.stripe);
        let proof = work.proofs.get(&self.from());
        let Some(proof) = proof.filter(|_| self.plan.is_raw(self.edge)) else {
            return Ok(());
        };
        let range = work.chunk.range(stripe, proof.length);
        let chunk = &self.sums[0][..(range.end - range.start) as usize];
        let leaf = proof.leaves.get(stripe as usize);
        if leaf.is_none_or(|leaf| leaf_digest(chunk, stripe) == *leaf) {
            Ok(())
        } else {
            Err(self.wrong("chunk"))
        }
    }

    /// A sum of blocks whose fingerprints are known must have their combination.
    fn check_sums(&self) -> Result<(), SessionFault> {
        let proofs = &self.work.proofs;
        if proofs.is_empty() {
            return Ok(());
        }
        let print = |source: usize| {
            let proof = proofs.get(&source)?;
            let at = self.stripe as usize;
            (proof.prints.len() == proof.leaves.len())
                .then(|| proof.prints.get(at).copied().unwrap_or_default())
        };
        let made = trace(self.plan, self.work.plan.sources()).unwrap();
        for (row, sum) in made.edges[self.edge].iter().zip(self.sums) {
            let terms = row.iter().enumerate().filter(|(_, c)| **c != 0);
            let terms: Option<Vec<_>> = terms
                .map(|(source, c)| Some((*c, print(source)?)))
                .collect();
            let Some(terms) = terms else { continue };
            let mut expected = Fingerprint::ZERO;
            terms.iter().for_each(|(c, print)| expected.fold(*c, print));
            if fingerprint(sum) != expected {
                return Err(self.wrong("stripe"));
            }
        }
        Ok(())
    }
}

/// A wrong result of blocks of which all but one were checked is because of that one.
fn blame(plan: &CodingPlan, hop: &Hop, work: &SessionWork, fault: SessionFault) -> SessionFault {
    let SessionFault::WrongResult(reason) = fault else {
        return fault;
    };
    if let Some(Sink::Parity { basis: Some(_), .. }) = &work.keep {
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

fn combine(row: &[u8], operands: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    let mut sum = vec![0; bytes];
    for (c, operand) in row.iter().zip(operands) {
        engine().fold(&mut [&mut sum[..]], &[*c], operand);
    }
    sum
}
