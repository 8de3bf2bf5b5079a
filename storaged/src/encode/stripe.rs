//! The arithmetic of one stripe at one member: every output is a linear combination of the received partial sums
//! and the local block. Sums that only pass through are moved, not copied; clean operands cost nothing.

use storaged_codec::engine;
use storaged_core::encode::{Hop, SessionWork, Target};
use storaged_wire::peer::SessionFault;

use super::frame::Sums;
use super::{BlockState, Blocks, KeepBlocks};

/// What a stripe sends: per output edge of the hop, in order.
#[derive(Debug)]
pub(super) struct Computed {
    pub stripe: u64,
    pub edges: Vec<(usize, Sums)>,
    pub dirty: bool,
}

/// Computes one stripe. `inputs` are the sums of the hop's input edges, in order.
pub(super) fn compute(
    work: &SessionWork,
    hop: &Hop,
    stripe: u64,
    inputs: Vec<Sums>,
    blocks: &dyn Blocks,
    keep: Option<&dyn KeepBlocks>,
) -> Result<Computed, SessionFault> {
    let bytes = work.stripe_bytes(stripe);
    let local = local_block(work, hop, stripe, bytes, blocks)?;
    let mut operands = flatten(work, hop, inputs);
    if hop.local.is_some() {
        operands.push(local);
    }
    let dirty = operands.iter().any(Option::is_some);
    let mut edges = Vec::new();
    let last = hop.outputs.len().saturating_sub(1);
    for (index, output) in hop.outputs.iter().enumerate() {
        let sums = combine(&output.rows, &mut operands, bytes, index == last);
        match output.target {
            Target::Edge(edge) => edges.push((edge, sums)),
            Target::Keep(_) => {
                let keep = keep.ok_or(SessionFault::NoBlocks)?;
                keep.put(
                    stripe,
                    sums.as_ref()
                        .and_then(|sums| sums.first())
                        .map(Vec::as_slice),
                )?;
            }
        }
    }
    Ok(Computed {
        stripe,
        edges,
        dirty,
    })
}

fn local_block(
    work: &SessionWork,
    hop: &Hop,
    stripe: u64,
    bytes: usize,
    blocks: &dyn Blocks,
) -> Result<Option<Vec<u8>>, SessionFault> {
    let (Some(_), Some(source)) = (hop.local, &work.source) else {
        return Ok(None);
    };
    let mut block = vec![0; bytes];
    match blocks.read(source, stripe, &mut block)? {
        BlockState::Clean => Ok(None),
        BlockState::Dirty => Ok(Some(block)),
    }
}

/// One entry per partial sum of all input edges.
fn flatten(work: &SessionWork, hop: &Hop, inputs: Vec<Sums>) -> Vec<Option<Vec<u8>>> {
    let mut operands = Vec::new();
    for (edge, sums) in hop.inputs.iter().zip(inputs) {
        match sums {
            Some(sums) => operands.extend(sums.into_iter().map(Some)),
            None => operands.extend((0..work.plan.edges[*edge].width).map(|_| None)),
        }
    }
    operands
}

/// All sums of one output; none if they are all zeros. The last output may take the operands' memory.
fn combine(
    rows: &[Vec<u8>],
    operands: &mut [Option<Vec<u8>>],
    bytes: usize,
    may_take: bool,
) -> Sums {
    let used = |row: &Vec<u8>| {
        row.iter()
            .zip(operands.iter())
            .any(|(c, x)| *c != 0 && x.is_some())
    };
    if !rows.iter().any(used) {
        return None;
    }
    let mut sums: Vec<Vec<u8>> = rows
        .iter()
        .enumerate()
        .map(|(row, _)| start_of(rows, row, operands, bytes, may_take))
        .collect();
    for (column, operand) in operands.iter().enumerate() {
        let Some(data) = operand else { continue };
        let coefficients: Vec<u8> = rows.iter().map(|row| row[column]).collect();
        if coefficients.iter().all(|c| *c == 0) {
            continue;
        }
        let mut out: Vec<&mut [u8]> = sums.iter_mut().map(Vec::as_mut_slice).collect();
        engine().fold(&mut out, &coefficients, data);
    }
    Some(sums)
}

/// Where a sum starts: an operand that only this row uses, as it is, is taken over; else zeros.
fn start_of(
    rows: &[Vec<u8>],
    row: usize,
    operands: &mut [Option<Vec<u8>>],
    bytes: usize,
    may_take: bool,
) -> Vec<u8> {
    let only_here = |column: usize| {
        rows[row][column] == 1
            && rows
                .iter()
                .enumerate()
                .all(|(r, other)| r == row || other[column] == 0)
    };
    let taken = (0..operands.len())
        .find(|column| may_take && operands[*column].is_some() && only_here(*column))
        .and_then(|column| operands[column].take());
    taken.unwrap_or_else(|| vec![0; bytes])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_the_linear_combination() {
        let rows = vec![vec![1, 0, 3], vec![0, 1, 5]];
        let operand = |x: u8| Some(vec![x; 4]);
        let mut operands = vec![operand(7), None, operand(9)];
        let sums = combine(&rows, &mut operands, 4, true).unwrap();
        let times = |c: u8, x: u8| {
            let mut out = [0];
            engine().fold(&mut [&mut out[..]], &[c], &[x]);
            out[0]
        };
        assert_eq!(sums[0], vec![7 ^ times(3, 9); 4]);
        assert_eq!(sums[1], vec![times(5, 9); 4]);
    }

    #[test]
    fn clean_operands_make_clean_sums() {
        let rows = vec![vec![1, 2]];
        assert!(combine(&rows, &mut [None, None], 4, true).is_none());
        assert!(combine(&[vec![0, 2]], &mut [Some(vec![1]), None], 1, true).is_none());
    }
}
