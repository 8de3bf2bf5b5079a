//! Plans that compute lost blocks from survivors: lost shards, lost parity, or a byte range that a reader waits for
//! (the same plans over `StripeSet::of_bytes`).
//!
//! Members are the survivors, in the order given, and then one newcomer per lost block. With more survivors than are
//! needed, each stripe uses the next ones in turn, so that all send equally little. Blocks that one survivor sends
//! per stripe, with k needed of s survivors and l lost: a chain `l*k/s`, a gather `(k - 1 + l)/s`. One chain per lost
//! block, all at once, would be as many blocks as one chain for all: it is not offered.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use storaged_codec::RepairError;

use super::encode::{chain, star};
use super::error::PlanError;
use super::reduce::{Vertex, reduce};
use super::striped::{Rotation, StripedPlan};
use crate::{CodingPlan, Coefficients};

/// What is there and what is not, as block indices of a lane: data, then parity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RepairTask<'a> {
    /// Blocks to read, one per node. Leave out a slow node while there are enough.
    pub survivors: &'a [usize],
    /// Blocks to compute, one per newcomer.
    pub lost: &'a [usize],
    /// How many survivors a stripe takes: k, less the blocks that are zeros.
    pub needed: usize,
}

/// How the survivors' blocks come together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum RepairShape {
    /// One chain carries the sums of all lost blocks.
    Chain,
    /// Each stripe is gathered by one survivor, in turn, which sends each newcomer its block.
    Gather,
    /// Every newcomer gathers for itself: the least delay, for a few stripes.
    GatherAtNewcomers,
}

/// Plans that together repair every lost block; they are independent and run at once.
///
/// `rows(survivors, lost)` gives the coefficients of the lost blocks over the survivors, both as block indices, the
/// survivors increasing: what `LaneBlocks::repair` does.
///
/// # Errors
/// [`PlanError::Survivors`] if there are too few, or what `rows` refused.
pub fn repair_plans(
    task: &RepairTask<'_>,
    shape: RepairShape,
    rows: impl Fn(&[usize], &[usize]) -> Result<Option<Coefficients>, RepairError>,
) -> Result<Vec<StripedPlan>, PlanError> {
    let survivors = task.survivors.len();
    if survivors < task.needed || task.needed == 0 {
        let (needed, got) = (task.needed.max(1), survivors);
        return Err(PlanError::Survivors { needed, got });
    }
    let all: Vec<usize> = (0..task.lost.len()).collect();
    match shape {
        RepairShape::Chain | RepairShape::Gather => Ok(vec![striped(task, shape, &all, 0, &rows)?]),
        RepairShape::GatherAtNewcomers => all
            .iter()
            .map(|lost| {
                let first = lost * survivors / all.len();
                striped(task, shape, &[*lost], first, &rows)
            })
            .collect(),
    }
}

/// One plan for some of the lost blocks, given as positions; in the first class the survivor `first` comes first.
fn striped(
    task: &RepairTask<'_>,
    shape: RepairShape,
    lost: &[usize],
    first: usize,
    rows: &impl Fn(&[usize], &[usize]) -> Result<Option<Coefficients>, RepairError>,
) -> Result<StripedPlan, PlanError> {
    let survivors = task.survivors.len();
    let sinks: Vec<usize> = lost.iter().map(|lost| survivors + lost).collect();
    // Each set of survivors costs the inverse of a matrix; without one to spare all classes have the same set.
    let mut known: BTreeMap<Vec<usize>, Coefficients> = BTreeMap::new();
    let mut class = |class: usize| -> Result<CodingPlan, PlanError> {
        let order: Vec<usize> = (0..task.needed)
            .map(|i| (first + class + i) % survivors)
            .collect();
        let mut used = order.clone();
        used.sort_unstable_by_key(|survivor| task.survivors[*survivor]);
        let coefficients = match known.entry(used) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(vacant) => {
                let found = coefficients(task, lost, vacant.key(), rows)?;
                vacant.insert(found)
            }
        };
        reduce(coefficients, &vertices(shape, &order, &sinks), &sinks)
    };
    let classes = (0..survivors)
        .map(&mut class)
        .collect::<Result<Vec<_>, _>>()?;
    let members = survivors + task.lost.len();
    StripedPlan::new(members, survivors, Rotation::ByTurn, classes)
}

fn vertices(shape: RepairShape, order: &[usize], sinks: &[usize]) -> Vec<Vertex> {
    match (shape, order.split_last()) {
        (RepairShape::Gather, Some((root, others))) => {
            star(others, |children| Vertex::source(*root, children))
        }
        (RepairShape::GatherAtNewcomers, _) => star(order, |children| Vertex {
            member: sinks[0],
            source: None,
            children,
        }),
        _ => chain(order),
    }
}

/// The coefficients of some lost blocks over all survivors: nought for those that are not `used`, which are given by
/// their blocks' order.
fn coefficients(
    task: &RepairTask<'_>,
    lost: &[usize],
    used: &[usize],
    rows: &impl Fn(&[usize], &[usize]) -> Result<Option<Coefficients>, RepairError>,
) -> Result<Coefficients, PlanError> {
    let blocks: Vec<usize> = used.iter().map(|s| task.survivors[*s]).collect();
    let wanted: Vec<usize> = lost.iter().map(|lost| task.lost[*lost]).collect();
    let narrow = rows(&blocks, &wanted)?;
    let narrow = narrow.filter(|c| c.sources() == used.len() && c.sinks() == wanted.len());
    let (expected, got) = (wanted.len(), 0);
    let narrow = narrow.ok_or(PlanError::Blocks { expected, got })?;
    let widen = |row: &Vec<u8>| {
        let mut wide = vec![0; task.survivors.len()];
        used.iter().zip(row).for_each(|(s, c)| wide[*s] = *c);
        wide
    };
    let wide = narrow.rows().iter().map(widen).collect();
    Coefficients::new(wide).map_err(|_| PlanError::Blocks { expected, got })
}
