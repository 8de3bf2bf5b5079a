//! What `storaged config` says of a configuration: groups, and what a rank's shards cost in RAM.

use std::fmt::Write;

use bytesize::ByteSize;

use super::Config;

/// Ranks per node that the bill is made out for.
const RANKS: [u64; 3] = [1, 4, 8];

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
        let coded = self.groups_coded();
        let copies = u128::from(self.slots_per_rank as u64 + self.parity_copies() * coded);
        let k = self.geometry.map_or(0, |geometry| geometry.k() as u64);
        // This node keeps the tables of its own shards, and where it codes those of the shards that it codes for.
        let tables = u128::from(self.slots_per_rank as u64 * (1 + k * coded));
        let chunk = self.chunk.bytes() as u128;
        let ranks = u128::from(ranks.max(1));
        let share = |budget: u64, per_chunk: u128| {
            let most = u128::from(budget) * chunk / (ranks * per_chunk).max(1);
            u64::try_from(most).unwrap_or(u64::MAX)
        };
        let tables_free = self
            .budget
            .saturating_add(storaged_core::limits::TABLES_FREE_BYTES);
        let blocks = share(self.budget, copies * chunk);
        let with_tables = share(
            tables_free,
            copies * chunk + tables * u128::from(storaged_core::limits::TABLE_BYTES_PER_CHUNK),
        );
        blocks.min(with_tables)
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
            "RAM per rank and byte of shard: {} slots and, as this node codes for {coded} groups, {} to {} of parity",
            self.slots_per_rank,
            self.keep_steps as u64 * coded,
            self.parity_copies() * coded
        );
        for ranks in RANKS {
            let most = ByteSize::b(self.shard_bytes_max(ranks));
            let _ = writeln!(text, "ranks per node {ranks}  shards up to {most}");
        }
        text.truncate(text.trim_end().len());
        text
    }
}
