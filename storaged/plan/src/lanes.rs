//! Lanes: the stripes of a group. Which shard is which block, and which node holds it.

use storaged_codec::{CodingMatrix, RepairError};
use storaged_wire::peer::Lane;
use storaged_wire::{ManifestBytes, NodeName, Rank, ShardEntry};

use super::coding::Coefficients;

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
pub fn lanes_of(manifest: &ManifestBytes) -> Vec<Lane> {
    let groups = 0..manifest.manifest().groups.len() as u32;
    groups.flat_map(|group| lanes_in(manifest, group)).collect()
}

/// The lanes that a node has parity of.
pub fn lanes_coded_by<'a>(
    manifest: &'a ManifestBytes,
    node: &NodeName,
) -> impl Iterator<Item = Lane> + use<'a> {
    let on = manifest.nodes().get(node);
    let groups = on.map_or(&[][..], |on| &on.coding).iter();
    groups.flat_map(|(group, _)| lanes_in(manifest, *group))
}

/// The blocks that belong on a node: of its shards, and parity.
pub fn blocks_on(manifest: &ManifestBytes, node: &NodeName) -> Vec<(Lane, usize)> {
    let Some(on) = manifest.nodes().get(node) else {
        return Vec::new();
    };
    let indices = 0..u32::try_from(on.ranks.len()).unwrap_or(u32::MAX);
    let shards = on.data.iter().flat_map(|(group, block)| {
        let lane = |index| Lane {
            group: *group,
            index,
        };
        indices.clone().map(move |index| (lane(index), *block))
    });
    let k = manifest.manifest().geometry.k();
    let parity = on
        .coding
        .iter()
        .flat_map(|(group, index)| lanes_in(manifest, *group).map(move |lane| (lane, k + index)));
    shards.chain(parity).collect()
}

/// Nodes on which something of a checkpoint belongs: shards, or parity. A data node of its groups on which no rank is has no block of it.
pub fn nodes_with_blocks(manifest: &ManifestBytes) -> impl Iterator<Item = &NodeName> {
    let nodes = manifest.nodes().iter();
    let holding = nodes.filter(move |(node, on)| {
        !on.ranks.is_empty() || lanes_coded_by(manifest, node).next().is_some()
    });
    holding.map(|(node, _)| node)
}

/// A node with shards that no group codes: it had no place in the epoch of the manifest. Only it can give them back.
pub fn uncoded_node(manifest: &ManifestBytes) -> Option<&NodeName> {
    uncoded_nodes(manifest).next()
}

/// In the order of their names.
fn uncoded_nodes(manifest: &ManifestBytes) -> impl Iterator<Item = &NodeName> {
    let nodes = manifest.nodes().iter();
    let uncoded = nodes.filter(|(_, on)| !on.ranks.is_empty() && on.data.is_empty());
    uncoded.map(|(node, _)| node)
}

/// A group has as many lanes as the data node with the most shards has shards.
fn lanes_in(manifest: &ManifestBytes, group: u32) -> impl Iterator<Item = Lane> + use<> {
    let entry = manifest.manifest().groups.get(group as usize);
    let data = entry.map_or(&[][..], |entry| &entry.data).iter();
    let depth = data.map(|node| manifest.ranks_on(node).len()).max();
    let count = u32::try_from(depth.unwrap_or(0)).unwrap_or(u32::MAX);
    (0..count).map(move |index| Lane { group, index })
}

impl LaneBlocks {
    /// Every lane with its blocks.
    pub fn all(manifest: &ManifestBytes) -> Vec<(Lane, Self)> {
        let lanes = lanes_of(manifest).into_iter();
        lanes
            .filter_map(|lane| Some((lane, Self::of(manifest, lane)?)))
            .collect()
    }

    /// The blocks of `lane`, if the manifest has such a lane.
    pub fn of(manifest: &ManifestBytes, lane: Lane) -> Option<Self> {
        let record = manifest.manifest();
        let group = record.groups.get(lane.group as usize)?;
        let shard = |node: &NodeName| {
            let rank = manifest.ranks_on(node).get(lane.index as usize)?;
            record.shard(*rank).cloned()
        };
        let mut data: Vec<Option<ShardEntry>> = group.data.iter().map(shard).collect();
        data.resize(record.geometry.k(), None);
        let length = data.iter().flatten().map(|shard| shard.length).max()?;
        Some(Self {
            data,
            coding: group.coding.clone(),
            length,
        })
    }

    /// The lane and data block that the shard of `rank` is.
    pub fn find(manifest: &ManifestBytes, rank: Rank) -> Option<(Lane, usize)> {
        let node = &manifest.manifest().shard(rank)?.node;
        let on = manifest.nodes().get(node)?;
        let index = on.ranks.iter().position(|it| *it == rank)?;
        let (group, block) = *on.data.first()?;
        let index = u32::try_from(index).ok()?;
        Some((Lane { group, index }, block))
    }

    /// The lane and block by which others read the shard of `rank`. One that no group codes has a lane of its own, numbered behind those
    /// of the groups, with its node's shard in it and no parity: it is copied, or cannot be had.
    pub fn to_read(manifest: &ManifestBytes, rank: Rank) -> Option<(Lane, usize)> {
        if let Some(found) = Self::find(manifest, rank) {
            return Some(found);
        }
        let node = &manifest.manifest().shard(rank)?.node;
        let place = uncoded_nodes(manifest).position(|it| it == node)?;
        let on = manifest.nodes().get(node)?;
        let index = on.ranks.iter().position(|it| *it == rank)?;
        let group = u32::try_from(manifest.manifest().groups.len() + place).ok()?;
        let index = u32::try_from(index).ok()?;
        Some((Lane { group, index }, 0))
    }

    /// The blocks of a lane that is read: of a group, or of a shard that none codes.
    pub fn of_read(manifest: &ManifestBytes, lane: Lane) -> Option<Self> {
        let record = manifest.manifest();
        let Some(place) = (lane.group as usize).checked_sub(record.groups.len()) else {
            return Self::of(manifest, lane);
        };
        let node = uncoded_nodes(manifest).nth(place)?;
        let rank = manifest.ranks_on(node).get(lane.index as usize)?;
        let shard = record.shard(*rank)?.clone();
        Some(Self {
            length: shard.length,
            data: vec![Some(shard)],
            coding: Vec::new(),
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
