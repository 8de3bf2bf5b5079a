//! Sessions: once every member of a plan has begun, its stripes are computed by the definition of a hop, on the
//! bytes in the members' RAM.

use std::collections::BTreeMap;

use storaged_codec::{engine, leaf_digest};
use storaged_core::encode::{Keep, SessionWork, Source, Target, Turn};
use storaged_core::{Input, SessionTally};
use storaged_wire::peer::SessionFault;
use storaged_wire::{NodeName, SessionId};

use super::world::{CHUNK_BYTES, Event, World, index};

type Key = (NodeName, SessionId);

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

    pub fn stop(&mut self, node: usize, leader: &NodeName, session: SessionId) {
        if let Some(members) = self.begun.get_mut(&(leader.clone(), session)) {
            members.retain(|_, (at, _, _)| *at != node);
        }
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
            let outcome = self.compute(&members);
            for (member, (node, generation, work)) in &members {
                let outcome = match &outcome {
                    Ok(()) => Ok(SessionTally {
                        bytes: work.lane_length,
                        elapsed_ms: 5,
                    }),
                    Err((guilty, fault)) if guilty == member => Err(fault.clone()),
                    Err((guilty, _)) => {
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

    fn compute(
        &mut self,
        members: &BTreeMap<usize, (usize, u64, SessionWork)>,
    ) -> Result<(), (usize, SessionFault)> {
        let (_, _, first) = members.values().next().unwrap();
        let plan = first.plan.clone();
        for (member, (node, _, work)) in members {
            self.prepare(*node, work)
                .map_err(|fault| (*member, fault))?;
        }
        for Turn { stripe, class } in first.turns() {
            let plan = &plan.classes()[class];
            let bytes = first.stripe_bytes(stripe);
            let mut edges: Vec<Vec<Vec<u8>>> = vec![Vec::new(); plan.edges.len()];
            for hop in &plan.hops {
                let (node, _, work) = &members[&hop.member];
                assert_eq!(index(&work.members[hop.member]), *node);
                let mut operands: Vec<Vec<u8>> =
                    hop.inputs.iter().flat_map(|e| edges[*e].clone()).collect();
                if hop.local.is_some() {
                    let block = self.read(*node, work, stripe, bytes);
                    operands.push(block.map_err(|fault| (hop.member, fault))?);
                }
                for output in &hop.outputs {
                    let sums = output
                        .rows
                        .iter()
                        .map(|row| combine(row, &operands, bytes))
                        .collect();
                    match output.target {
                        Target::Edge(edge) => edges[edge] = sums,
                        Target::Keep(_) => {
                            let kept = self.keep(*node, work, stripe, &sums[0]);
                            kept.map_err(|fault| (hop.member, fault))?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn prepare(&mut self, node: usize, work: &SessionWork) -> Result<(), SessionFault> {
        if let Some(Keep::Parity { set, basis }) = &work.keep {
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
            Keep::Parity { set, .. } => {
                let block =
                    &mut ram.parity.get_mut(set).ok_or(SessionFault::Aborted)?[stripe as usize];
                engine().xor(&mut block[..sum.len()], sum);
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

/// Members that have a part in some class.
fn members_of(work: &SessionWork) -> usize {
    let has_part = |member: &usize| {
        let mut classes = work.plan.classes().iter();
        classes.any(|plan| plan.hop(*member).is_some())
    };
    (0..work.members.len()).filter(has_part).count()
}

fn combine(row: &[u8], operands: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    let mut sum = vec![0; bytes];
    for (c, operand) in row.iter().zip(operands) {
        engine().fold(&mut [&mut sum[..]], &[*c], operand);
    }
    sum
}
