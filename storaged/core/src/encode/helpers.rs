//! Which survivors a repair reads.
//!
//! With l blocks wanted and k needed, the sums of a chain are carried past every survivor in it, so each sends l blocks
//! per stripe; if the survivors gather in turn, of s of them each sends (k - 1 + l)/s, and receives less. A gather never
//! sends more: k*l - (k - 1 + l) = (k - 1)(l - 1). With one wanted and k survivors both come to one block, and the chain
//! needs fewer connections; with several the gather is chosen (`repair_shape`).
//!
//! A chain ends when the slowest in it has sent its blocks, so the fastest k make the best one. A gather of the s fastest
//! takes (k - 1 + l)/s blocks over the slowest one's link: the best s is the one with the greatest s times that rate.

use storaged_plan::LaneBlocks;
use storaged_wire::shape::RepairShape;

use crate::context::Context;
use crate::encode::Sessions;

impl Sessions {
    /// The survivors of a lane to read so that so many blocks come back: of the first of these choices that has enough.
    /// None if none has.
    pub(crate) fn survivors(
        &self,
        blocks: &LaneBlocks,
        choices: [&[usize]; 2],
        wanted: usize,
        shape: RepairShape,
        cx: &Context,
    ) -> Option<Vec<usize>> {
        let links = self.links(cx);
        let rate = |block: usize| {
            let link = links.measure(blocks.node(block)?)?;
            Some(link.up_bytes_per_s.min(link.down_bytes_per_s))
        };
        let all_turn = shape == RepairShape::Gather && wanted > 1;
        let mut choices = choices.into_iter();
        choices.find_map(|available| {
            if all_turn {
                for_a_gather(blocks, available, rate)
            } else {
                for_a_chain(blocks, available, rate)
            }
        })
    }
}

/// Blocks that can be read, with the rates of their nodes, fastest first; none if they do not suffice. A rate that is
/// not known counts as the best, so that what is known to be slow is left out; of equals the first come first.
fn by_rate(
    blocks: &LaneBlocks,
    available: &[usize],
    rate: impl Fn(usize) -> Option<u64>,
) -> Option<Vec<(u64, usize)>> {
    let there = blocks.readable(available).into_iter();
    let rated = there.map(|block| (rate(block).unwrap_or(u64::MAX), block));
    let mut rated: Vec<(u64, usize)> = rated.collect();
    rated.sort_by_key(|(rate, _)| std::cmp::Reverse(*rate));
    (rated.len() >= blocks.needed()).then_some(rated)
}

/// The fastest that suffice, ascending.
fn for_a_chain(
    blocks: &LaneBlocks,
    available: &[usize],
    rate: impl Fn(usize) -> Option<u64>,
) -> Option<Vec<usize>> {
    let rated = by_rate(blocks, available, rate)?;
    Some(first(&rated, blocks.needed()))
}

/// As many of the fastest as make the gather quickest, ascending.
fn for_a_gather(
    blocks: &LaneBlocks,
    available: &[usize],
    rate: impl Fn(usize) -> Option<u64>,
) -> Option<Vec<usize>> {
    let rated = by_rate(blocks, available, rate)?;
    let speed = |count: &usize| {
        let slowest = rated[..*count].last().map_or(0, |(rate, _)| *rate);
        *count as u128 * u128::from(slowest)
    };
    let count = (blocks.needed()..=rated.len()).max_by_key(speed)?;
    Some(first(&rated, count))
}

fn first(rated: &[(u64, usize)], count: usize) -> Vec<usize> {
    let mut blocks: Vec<usize> = rated[..count].iter().map(|(_, block)| *block).collect();
    blocks.sort_unstable();
    blocks
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use storaged_codec::Digest;
    use storaged_wire::{NodeName, Rank, ShardEntry};

    use super::*;

    /// A lane of (4, 3); its third data block is zeros if so wished.
    fn lane(zeros: Option<usize>) -> LaneBlocks {
        let name = |at: usize| NodeName::new(format!("n{at}")).expect("a name");
        let shard = |at: usize| ShardEntry {
            rank: Rank::new(at as u32),
            node: name(at),
            length: 10,
            root: Digest::from_bytes(&[0; 32]),
        };
        LaneBlocks {
            data: (0..4)
                .map(|at| (Some(at) != zeros).then(|| shard(at)))
                .collect(),
            coding: (4..7).map(name).collect(),
            length: 10,
        }
    }

    fn rates(of: &[(usize, u64)]) -> impl Fn(usize) -> Option<u64> {
        let of: BTreeMap<usize, u64> = of.iter().copied().collect();
        move |block| of.get(&block).copied()
    }

    fn chain(lane: &LaneBlocks, available: &[usize], of: &[(usize, u64)]) -> Option<Vec<usize>> {
        for_a_chain(lane, available, rates(of))
    }

    #[test]
    fn a_chain_takes_the_fastest_that_suffice() {
        let lane = lane(None);
        assert_eq!(chain(&lane, &[6, 5, 3, 2, 1], &[]), Some(vec![1, 2, 3, 5]));
        let slow = [(1, 10), (2, 100), (3, 100), (5, 100), (6, 50)];
        assert_eq!(
            chain(&lane, &[1, 2, 3, 5, 6], &slow),
            Some(vec![2, 3, 5, 6])
        );
        // With none to spare also the slowest is taken.
        assert_eq!(chain(&lane, &[1, 2, 3, 5], &slow), Some(vec![1, 2, 3, 5]));
        assert_eq!(chain(&lane, &[1, 2, 3], &[]), None);
        assert_eq!(chain(&lane, &[1, 1, 2, 2, 9], &[]), None);
    }

    #[test]
    fn blocks_of_zeros_are_not_read() {
        let lane = lane(Some(2));
        assert_eq!(chain(&lane, &[0, 1, 2, 5], &[]), Some(vec![0, 1, 5]));
        assert_eq!(
            for_a_gather(&lane, &[0, 1, 2, 5, 6], rates(&[])),
            Some(vec![0, 1, 5, 6])
        );
    }

    #[test]
    fn in_a_gather_all_take_turns_unless_one_is_too_slow() {
        let lane = lane(None);
        let available = [0, 1, 3, 5, 6];
        assert_eq!(
            for_a_gather(&lane, &available, rates(&[])),
            Some(available.to_vec())
        );
        let all = |slow: u64| [(0, 100), (1, 100), (3, slow), (5, 100), (6, 100)];
        // Five at 85 are quicker than four at 100, at 75 they are not.
        assert_eq!(
            for_a_gather(&lane, &available, rates(&all(85))),
            Some(available.to_vec())
        );
        assert_eq!(
            for_a_gather(&lane, &available, rates(&all(75))),
            Some(vec![0, 1, 5, 6])
        );
        assert_eq!(for_a_gather(&lane, &[0, 1, 3], rates(&[])), None);
    }
}
