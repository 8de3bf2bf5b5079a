//! What `storaged config` says of a configuration: groups, and what a rank's shards cost in RAM.

use std::fmt::Write;

use bytesize::ByteSize;

use super::Config;

/// Ranks per node that the bill is made out for.
const RANKS: [u64; 3] = [1, 4, 8];

/// What the Python package asks for above a shard, for items that are no tensors, beside 4 KiB for each of them: `SPARE_BYTES` of its
/// `_arena.py`.
pub(super) const PYTHON_SPARE_BYTES: u64 = 1 << 20;

/// What a node keeps while its ranks save.
struct ShardDemand {
    ranks: u128,
    /// Of a rank.
    slots: u128,
    /// Parity sets, for each rank.
    parity: u128,
    /// Shards of whose chunks there are tables, for each rank.
    tables: u128,
    chunk: u128,
}

impl ShardDemand {
    /// Whether shards of so many bytes fit a budget.
    fn fits(&self, bytes: u64, budget: u64) -> bool {
        use storaged_core::limits::{TABLE_BYTES_PER_CHUNK, TABLES_FREE_BYTES};
        let (shard, budget) = (u128::from(bytes), u128::from(budget));
        let grain = u128::from(storaged_core::SLOT_GRAIN_BYTES);
        let slot = (shard + u128::from(PYTHON_SPARE_BYTES)).next_multiple_of(grain);
        let blocks = self.ranks * (self.slots * slot + self.parity * shard);
        let chunks = shard.div_ceil(self.chunk);
        let tables = self.ranks * self.tables * chunks * u128::from(TABLE_BYTES_PER_CHUNK);
        blocks <= budget && blocks + tables <= budget + u128::from(TABLES_FREE_BYTES)
    }
}

impl Config {
    /// Parity sets that this node holds for each of its ranks, by the groups that it codes.
    fn groups_coded(&self) -> u64 {
        let groups = self.groups();
        let codes = groups
            .iter()
            .filter(|group| group.coding.contains(&self.name));
        codes.count() as u64
    }

    fn groups(&self) -> Vec<storaged_plan::Group> {
        let groups = self
            .geometry
            .map(|geometry| storaged_plan::groups(&self.members, geometry));
        // They were made once when the file was checked.
        groups.and_then(Result::ok).unwrap_or_default()
    }

    /// Of how many steps parity is there at most: of those that stay, and of the one that is coded.
    fn parity_copies(&self) -> u64 {
        self.keep_steps as u64 + 1
    }

    /// The largest shard for so many ranks per node: each has its slots, and parity is there once more while a step is
    /// coded, beside that of the safe steps that stay. Digests and fingerprints of chunks take room too.
    pub fn shard_bytes_max(&self, ranks: u64) -> u64 {
        let demand = ShardDemand {
            ranks: u128::from(ranks.max(1)),
            slots: self.slots_per_rank as u128,
            parity: u128::from(self.parity_copies() * self.groups_coded()),
            // This node keeps the tables of its own shards, and where it codes those of the shards that it codes for.
            tables: self.slots_per_rank as u128
                * (1 + u128::from(self.groups_coded())
                    * self.geometry.map_or(0, |geometry| geometry.k() as u128)),
            chunk: self.chunk.bytes() as u128,
        };
        let (mut fits, mut beyond) = (0, self.budget.saturating_add(1));
        while beyond - fits > 1 {
            let bytes = fits + (beyond - fits) / 2;
            if demand.fits(bytes, self.budget) {
                fits = bytes;
            } else {
                beyond = bytes;
            }
        }
        fits
    }

    /// The smallest budget in which one rank can save step after step: the slot of the newest step and that of the next,
    /// and parity of both where this node codes, of shards of one chunk.
    pub fn budget_min(&self) -> u64 {
        2 * storaged_core::SLOT_GRAIN_BYTES + 2 * self.groups_coded() * self.chunk.bytes() as u64
    }

    /// Groups and bill as text.
    pub fn bill(&self) -> String {
        let mut text = String::new();
        let names = |nodes: &[storaged_wire::NodeName]| {
            let names: Vec<&str> = nodes.iter().map(|node| node.as_str()).collect();
            names.join(" ")
        };
        for (number, group) in self.groups().iter().enumerate() {
            let (data, coding) = (names(&group.data), names(&group.coding));
            let _ = writeln!(text, "group {number}  data {data}  coding {coding}");
        }
        let coded = self.groups_coded();
        let _ = writeln!(
            text,
            "RAM per rank and byte of shard: {} slots (of 1 MiB more, in whole 2 MiB) and, as this node codes for {coded} groups, {} to {} of parity",
            self.slots_per_rank,
            self.keep_steps as u64 * coded,
            self.parity_copies() * coded
        );
        for ranks in RANKS {
            let _ = match self.shard_bytes_max(ranks) {
                0 => writeln!(text, "ranks per node {ranks}  no shards fit"),
                most => {
                    let most = ByteSize::b(most);
                    writeln!(text, "ranks per node {ranks}  shards up to {most}")
                }
            };
        }
        text.truncate(text.trim_end().len());
        text
    }
}
