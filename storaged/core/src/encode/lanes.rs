//! Lanes: the stripes of a group. Which shard is which block, and which node holds it.

use std::collections::BTreeMap;

use storaged_codec::{CodingMatrix, RepairError};
use storaged_wire::peer::Lane;
use storaged_wire::{Manifest, NodeName, Rank, ShardEntry};

use super::plan::Coefficients;

/// The blocks of one lane: data blocks `0..k` (some may be zeros, of nodes without such a shard), then parity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaneBlocks {
    /// The shard behind each data block.
    pub data: Vec<Option<ShardEntry>>,
    /// The node of each parity block.
    pub coding: Vec<NodeName>,
    /// Length of the longest shard.
    pub length: u64,
}

/// All lanes of a checkpoint.
pub fn lanes_of(manifest: &Manifest) -> Vec<Lane> {
    let per_node = ranks_per_node(manifest);
    let mut lanes = Vec::new();
    for (group, entry) in (0u32..).zip(&manifest.groups) {
        let depth = entry
            .data
            .iter()
            .filter_map(|node| per_node.get(node))
            .map(Vec::len)
            .max();
        let count = u32::try_from(depth.unwrap_or(0)).unwrap_or(u32::MAX);
        lanes.extend((0..count).map(|index| Lane { group, index }));
    }
    lanes
}

fn ranks_per_node(manifest: &Manifest) -> BTreeMap<&NodeName, Vec<&ShardEntry>> {
    let mut per_node: BTreeMap<&NodeName, Vec<&ShardEntry>> = BTreeMap::new();
    for shard in &manifest.shards {
        per_node.entry(&shard.node).or_default().push(shard);
    }
    per_node
}

impl LaneBlocks {
    /// Every lane with its blocks.
    pub fn all(manifest: &Manifest) -> Vec<(Lane, Self)> {
        let per_node = ranks_per_node(manifest);
        let lanes = lanes_of(manifest).into_iter();
        lanes
            .filter_map(|lane| Some((lane, Self::among(manifest, lane, &per_node)?)))
            .collect()
    }

    /// The blocks of `lane`, if the manifest has such a lane.
    pub fn of(manifest: &Manifest, lane: Lane) -> Option<Self> {
        Self::among(manifest, lane, &ranks_per_node(manifest))
    }

    fn among(
        manifest: &Manifest,
        lane: Lane,
        per_node: &BTreeMap<&NodeName, Vec<&ShardEntry>>,
    ) -> Option<Self> {
        let group = manifest.groups.get(lane.group as usize)?;
        let mut data: Vec<Option<ShardEntry>> = group
            .data
            .iter()
            .map(|node| {
                per_node
                    .get(node)?
                    .get(lane.index as usize)
                    .map(|shard| (*shard).clone())
            })
            .collect();
        data.resize(manifest.geometry.k(), None);
        let length = data.iter().flatten().map(|shard| shard.length).max()?;
        Some(Self {
            data,
            coding: group.coding.clone(),
            length,
        })
    }

    /// The lane and data block that the shard of `rank` is.
    pub fn find(manifest: &Manifest, rank: Rank) -> Option<(Lane, usize)> {
        lanes_of(manifest).into_iter().find_map(|lane| {
            let blocks = Self::of(manifest, lane)?;
            let is_it = |entry: &Option<ShardEntry>| entry.as_ref().is_some_and(|s| s.rank == rank);
            Some((lane, blocks.data.iter().position(is_it)?))
        })
    }

    /// k + m.
    pub fn blocks(&self) -> usize {
        self.data.len() + self.coding.len()
    }

    /// The node that a block belongs on; none for a block of zeros.
    pub fn node(&self, block: usize) -> Option<&NodeName> {
        match self.data.get(block) {
            Some(entry) => entry.as_ref().map(|shard| &shard.node),
            None => self.coding.get(block - self.data.len()),
        }
    }

    /// Whether the block is zeros that no node needs to hold.
    pub fn is_zeros(&self, block: usize) -> bool {
        self.data.get(block).is_some_and(Option::is_none)
    }

    /// Sources of an encode, the data blocks that are not zeros, and the coefficients of these parity blocks over them.
    pub fn encode(
        &self,
        matrix: &CodingMatrix,
        parities: &[usize],
    ) -> (Vec<usize>, Option<Coefficients>) {
        let sources: Vec<usize> = (0..self.data.len())
            .filter(|block| !self.is_zeros(*block))
            .collect();
        let rows = parities
            .iter()
            .map(|parity| {
                sources
                    .iter()
                    .map(|block| matrix.coefficient(*parity, *block))
                    .collect()
            })
            .collect();
        (sources, Coefficients::new(rows).ok())
    }

    /// Coefficients of the `wanted` blocks over the `survivors`. One survivor that is itself wanted is a copy.
    ///
    /// # Errors
    /// [`RepairError`] if the survivors, with the blocks of zeros, are not exactly k different blocks.
    pub fn repair(
        &self,
        matrix: &CodingMatrix,
        survivors: &[usize],
        wanted: &[usize],
    ) -> Result<Option<Coefficients>, RepairError> {
        if survivors.len() == 1 && survivors == wanted {
            return Ok(Coefficients::new(vec![vec![1]]).ok());
        }
        let mut known: Vec<usize> = (0..self.data.len())
            .filter(|block| self.is_zeros(*block))
            .collect();
        known.extend(survivors);
        known.sort_unstable();
        let rows = matrix.repair_coefficients(&known, wanted)?;
        let columns: Vec<usize> = survivors
            .iter()
            .filter_map(|survivor| known.iter().position(|block| block == survivor))
            .collect();
        let rows = rows
            .iter()
            .map(|row| columns.iter().map(|column| row[*column]).collect())
            .collect();
        Ok(Coefficients::new(rows).ok())
    }

    /// How many blocks it takes to compute the rest, beside the blocks of zeros.
    pub fn needed(&self) -> usize {
        self.data.iter().flatten().count()
    }

    /// Which of these blocks can be read: those of the lane that are not zeros, ascending.
    pub fn readable(&self, available: &[usize]) -> Vec<usize> {
        let mut there: Vec<usize> = available.to_vec();
        there.sort_unstable();
        there.dedup();
        there.retain(|block| *block < self.blocks() && !self.is_zeros(*block));
        there
    }

    /// Which of the blocks that are here and there suffice to compute the rest: exactly as many as are needed
    /// beside the blocks of zeros, or none if there are too few.
    pub fn enough(&self, available: &[usize]) -> Option<Vec<usize>> {
        let needed = self.needed();
        let there = self.readable(available);
        (there.len() >= needed).then(|| there[..needed].to_vec())
    }
}
