//! The arithmetic of one stripe at one member: every output is a linear combination of the received partial sums
//! and the local block. A sum that goes on with coefficient 1 keeps its memory, and the other operands are folded
//! onto it; clean operands cost nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use storaged_codec::{Digest, Unchecked, engine};
use storaged_core::{SessionPurpose, SessionWork, Sink, StripeTurn};
use storaged_plan::{HopOutput, Target};
use storaged_wire::peer::SessionFault;
use tokio_util::sync::CancellationToken;

use super::buffer::{Block, BufferPool};
use super::check::{CheckedPlan, ClassPart, EdgeRef};
use super::frame::Sums;
use super::wary;
use super::{BlockSink, BlockState, Blocks, Proof};

/// This node's part of a session: all that the arithmetic of its stripes needs.
pub(super) struct MemberTask {
    pub work: SessionWork,
    pub plan: CheckedPlan,
    pub blocks: Arc<dyn Blocks>,
    pub keep: Option<Box<dyn BlockSink>>,
    pub buffers: Arc<BufferPool>,
    /// Stripes kept so far.
    pub kept: Arc<Mutex<Vec<u64>>>,
    /// Set when the session is over: stripes that still wait for a thread are not computed then, nor kept.
    pub over: CancellationToken,
}

/// What a stripe sends: per output edge of the hop, in order.
#[derive(Debug)]
pub(super) struct Computed {
    pub edges: Vec<Sums>,
    pub state: BlockState,
}

impl MemberTask {
    /// This node's part in a class; it is asked only for classes that it has a part in.
    pub fn class(&self, class: usize) -> Result<&ClassPart, SessionFault> {
        let part = self.plan.classes.get(class).and_then(Option::as_ref);
        part.ok_or(SessionFault::NoBlocks)
    }

    /// The links over which this node sends or receives something of the stripes that move. Both ends of a link find the
    /// same, by the same plan and the same stripes.
    pub fn links_used(&self) -> BTreeSet<usize> {
        let mut unseen: BTreeMap<usize, &ClassPart> = (self.plan.classes.iter().enumerate())
            .filter_map(|(class, part)| Some((class, part.as_ref()?)))
            .collect();
        let mut used = BTreeSet::new();
        for turn in self.work.turns() {
            if let Some(part) = unseen.remove(&turn.class) {
                let edges = part.inputs.iter().chain(&part.outputs);
                used.extend(edges.map(|edge| edge.link));
            }
            if unseen.is_empty() {
                break;
            }
        }
        used
    }

    /// Computes one stripe. `inputs` are the sums of the hop's input edges, in order.
    pub fn compute(&self, turn: StripeTurn, inputs: Vec<Sums>) -> Result<Computed, SessionFault> {
        self.go_on()?;
        let stripe = turn.stripe;
        let class = self.class(turn.class)?;
        let hop = &class.hop;
        let bytes = self.work.stripe_bytes(stripe);
        let mut operands = Vec::new();
        for (input, (edge, sums)) in class.inputs.iter().zip(inputs).enumerate() {
            self.check_raw(*edge, stripe, &sums)?;
            wary::check_sums(self, class, input, stripe, &sums)?;
            match sums {
                Some(sums) => operands.extend(sums.into_iter().map(Some)),
                None => operands.extend((0..edge.width).map(|_| None)),
            }
        }
        if hop.local.is_some() {
            operands.push(self.local_block(stripe, bytes)?);
        }
        let state = if operands.iter().any(Option::is_some) {
            BlockState::Dirty
        } else {
            BlockState::Clean
        };
        let mut edges = Vec::with_capacity(hop.outputs.len());
        for (index, output) in hop.outputs.iter().enumerate() {
            let later = hop.outputs.get(index + 1..).unwrap_or_default();
            let sums = combine(&output.rows, &mut operands, later, bytes, &self.buffers);
            match output.target {
                Target::Edge(_) => edges.push(sums),
                Target::Keep(_) => {
                    let kept = self.keep_block(stripe, &sums);
                    kept.map_err(|fault| self.blame(fault, class, &output.rows))?;
                }
            }
        }
        Ok(Computed { edges, state })
    }

    fn go_on(&self) -> Result<(), SessionFault> {
        if self.over.is_cancelled() {
            Err(SessionFault::Aborted)
        } else {
            Ok(())
        }
    }

    fn local_block(&self, stripe: u64, bytes: usize) -> Result<Option<Block>, SessionFault> {
        let source = self.work.source.as_ref().ok_or(SessionFault::NoBlocks)?;
        let mut block = self.buffers.lend(bytes);
        match self.blocks.read(source, stripe, self.proof(), &mut block)? {
            BlockState::Clean => Ok(None),
            BlockState::Dirty => Ok(Some(block)),
        }
    }

    /// In a session that follows a wrong result each member looks at what it puts in, so that the one is found whose chunk is wrong.
    fn proof(&self) -> Proof {
        let is_kept_proved = self.work.purpose == SessionPurpose::Encode;
        if is_kept_proved && self.work.proofs.is_empty() {
            Proof::Keeper
        } else {
            Proof::Reader
        }
    }

    /// Compares a block that a member sent as it is with the digest that it must have, if that is known here.
    fn check_raw(&self, edge: EdgeRef, stripe: u64, sums: &Sums) -> Result<(), SessionFault> {
        let proof = edge.raw_from.and_then(|from| self.work.proofs.get(&from));
        let (Some(from), Some(proof)) = (edge.raw_from, proof) else {
            return Ok(());
        };
        let range = self.work.chunk.range(stripe, proof.length);
        let length = usize::try_from(range.end - range.start).unwrap_or(0);
        let expected = usize::try_from(stripe)
            .ok()
            .and_then(|at| proof.leaves.get(at));
        let sent = sums.as_ref().and_then(|sums| sums.first());
        let right = match (expected, sent) {
            // Beyond the shard's end all is zeros.
            (None, sent) => sent.is_none_or(|block| block.iter().all(|byte| *byte == 0)),
            (Some(leaf), Some(block)) => {
                block.split_at_checked(length).is_some_and(|(chunk, rest)| {
                    is_chunk(chunk, leaf, stripe) && rest.iter().all(|byte| *byte == 0)
                })
            }
            (Some(leaf), None) => is_chunk(&vec![0; length], leaf, stripe),
        };
        if right {
            Ok(())
        } else {
            Err(SessionFault::WrongBytes {
                node: self.work.members[from].clone(),
                reason: format!("chunk {stripe} does not have its digest"),
            })
        }
    }

    /// A wrong result of one block that came as it is, and is the wanted one, is its sender's. Of blocks of which all
    /// but one were checked it is because of that one: parity, which has no digest that others know. Its node need
    /// not have lied: it may hold what another one sent.
    fn blame(&self, fault: SessionFault, class: &ClassPart, rows: &[Vec<u8>]) -> SessionFault {
        let SessionFault::WrongResult(reason) = fault else {
            return fault;
        };
        // Nobody who sends a difference can help what it is put onto.
        if let Some(Sink::Parity { basis: Some(_), .. }) = &self.work.keep {
            return SessionFault::WrongResult(reason);
        }
        let checked = |edge: &EdgeRef| {
            let from = edge.raw_from;
            from.is_some_and(|from| self.work.proofs.contains_key(&from))
        };
        let mut suspects = class.inputs.iter().filter(|edge| !checked(edge));
        let (Some(suspect), None) = (suspects.next(), suspects.next()) else {
            return SessionFault::WrongResult(reason);
        };
        let node = suspect.raw_from.filter(|_| class.hop.local.is_none());
        let Some(node) = node.map(|from| self.work.members[from].clone()) else {
            return SessionFault::WrongResult(reason);
        };
        if rows == [[1]] {
            SessionFault::WrongBytes { node, reason }
        } else {
            SessionFault::Unproven { node, reason }
        }
    }

    fn keep_block(&self, stripe: u64, sums: &Sums) -> Result<(), SessionFault> {
        self.go_on()?;
        let keep = self.keep.as_ref().ok_or(SessionFault::NoBlocks)?;
        let block = sums.as_ref().and_then(|sums| sums.first());
        keep.put(stripe, block.map(AsRef::as_ref))?;
        self.kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(stripe);
        Ok(())
    }
}

/// All sums of one output; none if they are all zeros. Takes the memory of operands that no `later` output needs.
fn combine(
    rows: &[Vec<u8>],
    operands: &mut [Option<Block>],
    later: &[HopOutput],
    bytes: usize,
    buffers: &Arc<BufferPool>,
) -> Sums {
    let used = |row: &Vec<u8>| {
        row.iter()
            .zip(operands.iter())
            .any(|(c, x)| *c != 0 && x.is_some())
    };
    if !rows.iter().any(used) {
        return None;
    }
    let mut sums: Vec<Block> = (0..rows.len())
        .map(|row| {
            let taken = (0..operands.len())
                .filter(|column| operands[*column].is_some())
                .find(|column| is_only_for(*column, row, rows, later))
                .and_then(|column| operands[column].take());
            taken.unwrap_or_else(|| buffers.lend_zeros(bytes))
        })
        .collect();
    let mut coefficients = vec![0; rows.len()];
    for (column, operand) in operands.iter().enumerate() {
        let Some(data) = operand else { continue };
        rows.iter()
            .zip(&mut coefficients)
            .for_each(|(row, c)| *c = row[column]);
        if coefficients.iter().any(|c| *c != 0) {
            let mut out: Vec<&mut [u8]> = sums.iter_mut().map(|sum| &mut **sum).collect();
            engine().fold(&mut out, &coefficients, data);
        }
    }
    Some(sums)
}

/// Whether the operand of `column` goes into `row` as it is, and nowhere else from here on.
fn is_only_for(column: usize, row: usize, rows: &[Vec<u8>], later: &[HopOutput]) -> bool {
    let elsewhere = rows
        .iter()
        .enumerate()
        .any(|(other, c)| other != row && c[column] != 0);
    let later = later
        .iter()
        .flat_map(|output| &output.rows)
        .any(|c| c[column] != 0);
    rows[row][column] == 1 && !elsewhere && !later
}

fn is_chunk(bytes: &[u8], leaf: &Digest, index: u64) -> bool {
    Unchecked::new(bytes).verify(leaf, index).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(buffers: &Arc<BufferPool>, x: u8) -> Option<Block> {
        let mut block = buffers.lend(4);
        block.fill(x);
        Some(block)
    }

    fn times(c: u8, x: u8) -> u8 {
        let mut out = [0];
        engine().fold(&mut [&mut out[..]], &[c], &[x]);
        out[0]
    }

    #[test]
    fn a_sum_is_the_linear_combination_in_the_memory_of_what_came_in() {
        let buffers = BufferPool::new();
        let rows = vec![vec![1, 0, 3], vec![0, 1, 5]];
        let mut operands = [operand(&buffers, 7), None, operand(&buffers, 9)];
        let memory = operands[0].as_ref().map(|block| block.as_ptr());
        let sums = combine(&rows, &mut operands, &[], 4, &buffers).unwrap();
        assert_eq!(*sums[0], [7 ^ times(3, 9); 4]);
        assert_eq!(*sums[1], [times(5, 9); 4]);
        assert_eq!(Some(sums[0].as_ptr()), memory);
    }

    #[test]
    fn an_operand_that_a_later_output_needs_stays() {
        let buffers = BufferPool::new();
        let later = [HopOutput {
            target: Target::Keep(0),
            rows: vec![vec![0, 2]],
        }];
        let mut operands = [operand(&buffers, 7), operand(&buffers, 9)];
        let first = combine(&[vec![1, 1]], &mut operands, &later, 4, &buffers).unwrap();
        assert_eq!(*first[0], [7 ^ 9; 4]);
        assert!(operands[0].is_none() && operands[1].is_some());
        let second = combine(&later[0].rows, &mut operands, &[], 4, &buffers).unwrap();
        assert_eq!(*second[0], [times(2, 9); 4]);
    }

    #[test]
    fn clean_operands_make_clean_sums() {
        let buffers = BufferPool::new();
        assert!(combine(&[vec![1, 2]], &mut [None, None], &[], 4, &buffers).is_none());
        let mut operands = [operand(&buffers, 1), None];
        assert!(combine(&[vec![0, 2]], &mut operands, &[], 4, &buffers).is_none());
    }
}
