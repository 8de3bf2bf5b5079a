//! One node's process: its decisions and its RAM. A crash loses the decisions; the RAM outlives them if the test says so, with the
//! records that were kept beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::{ChunkSize, Digest, digest, leaf_digest, root_digest};
use storaged_core::{Node, ParityId, Sink};
use storaged_wire::{KeptParity, KeptRecord, RecordName, SlotId};

use super::setup::CHUNK_BYTES;

/// Dropped slots whose memory is kept for whoever has it mapped: more than are dropped while an answer is on its way.
const DROPPED_KEPT: usize = 64;

/// One incarnation of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pid {
    pub node: usize,
    pub generation: u64,
}

/// What of shards and parity there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// All of it.
    Bytes,
    /// Ids and digests; nobody ever sees a byte.
    Digests,
}

/// Memory of a process that its holder lacks: it had no room for a descriptor, or was never given it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unheld {
    pub slots: BTreeSet<SlotId>,
    pub parity: BTreeSet<ParityId>,
}

pub struct Process {
    pub node: Node,
    pub generation: u64,
    pub slots: BTreeMap<SlotId, Vec<u8>>,
    /// What slots hold where no bytes exist.
    pub leaves: BTreeMap<SlotId, Arc<[Digest]>>,
    /// The last slots that were dropped: readers and trainers that have them mapped still see them.
    dropped: BTreeMap<SlotId, Vec<u8>>,
    pub parity: BTreeMap<ParityId, Vec<Vec<u8>>>,
    /// Chunks of parity that are not what they were, where no bytes exist.
    pub rotten_parity: BTreeSet<(ParityId, u64)>,
    /// What the decisions have kept.
    pub kept: BTreeMap<RecordName, KeptRecord>,
    /// Slots of an earlier process whose digests have not been made again.
    pub inherited: BTreeMap<SlotId, Arc<[Digest]>>,
    /// The bytes of its slots change before somebody inherits them.
    pub rots: bool,
    /// What of its memory nobody inherits.
    pub unheld: Unheld,
    pub started: u64,
    /// How far its clock has jumped ahead.
    pub ahead: u64,
    /// When it wakes by itself, as the driver that sleeps to the deadline does.
    pub wakes_at: Option<u64>,
}

impl Process {
    pub fn new(node: Node, generation: u64, started: u64) -> Self {
        Self {
            node,
            generation,
            slots: BTreeMap::new(),
            leaves: BTreeMap::new(),
            dropped: BTreeMap::new(),
            parity: BTreeMap::new(),
            rotten_parity: BTreeSet::new(),
            kept: BTreeMap::new(),
            inherited: BTreeMap::new(),
            rots: false,
            unheld: Unheld::default(),
            started,
            ahead: 0,
            wakes_at: None,
        }
    }

    /// Takes over what another process of the node has left. Gives the records, of checkpoints with what of them is in memory, as the
    /// driver does (`storaged/src/driver/kept.rs`).
    pub fn inherit(&mut self, left: Self) -> Vec<KeptRecord> {
        let (mut slots, mut parity) = (left.slots, left.parity);
        // Its successor writes its own.
        let mut kept = left.kept;
        for record in kept.values_mut() {
            if let KeptRecord::Checkpoint(kept) = record {
                let Unheld { slots, parity } = &left.unheld;
                kept.shards.retain(|shard| !slots.contains(&shard.slot));
                let is_held = |it: &KeptParity| !parity.contains(&ParityId(it.set));
                kept.parity.retain(is_held);
            }
        }
        let tables = kept.values().filter_map(|record| match record {
            KeptRecord::Table(table) => Some(((table.key.clone(), table.rank), &table.leaves)),
            _ => None,
        });
        let tables: BTreeMap<_, _> = tables.collect();
        for record in kept.values() {
            let KeptRecord::Checkpoint(kept) = record else {
                continue;
            };
            // What no record names is freed.
            let named = kept.shards.iter().map(|shard| shard.slot);
            self.slots
                .extend(named.filter_map(|slot| slots.remove_entry(&slot)));
            let named = kept.parity.iter().map(|parity| ParityId(parity.set));
            self.parity
                .extend(named.filter_map(|set| parity.remove_entry(&set)));
            for shard in &kept.shards {
                if let Some(leaves) = tables.get(&(kept.key.clone(), shard.rank)) {
                    self.inherited.insert(shard.slot, leaves.as_slice().into());
                }
            }
        }
        if left.rots {
            self.inherited.clear();
            self.slots.values_mut().for_each(|bytes| bytes[0] ^= 1);
        }
        self.leaves = self.inherited.clone();
        kept.into_values().collect()
    }

    /// No two records name one slot: the next process would take it for the older one's.
    pub fn keep(&mut self, record: KeptRecord) {
        self.kept.insert(record.name(), record);
        let kept = self.kept.values().filter_map(|record| match record {
            KeptRecord::Checkpoint(kept) => Some(kept),
            _ => None,
        });
        let slots: Vec<SlotId> = kept
            .flat_map(|kept| kept.shards.iter().map(|shard| shard.slot))
            .collect();
        let different: std::collections::BTreeSet<&SlotId> = slots.iter().collect();
        assert_eq!(
            different.len(),
            slots.len(),
            "a slot is kept twice: {slots:?}"
        );
    }

    pub fn drop_slot(&mut self, slot: SlotId) {
        self.leaves.remove(&slot);
        self.dropped
            .extend(self.slots.remove(&slot).map(|bytes| (slot, bytes)));
        while self.dropped.len() > DROPPED_KEPT {
            self.dropped.pop_first();
        }
    }

    /// A session puts a stripe in place: it is right from now on.
    pub fn put(&mut self, sink: &Sink, stripe: u64) {
        match sink {
            Sink::Shard(shard) => {
                let unknown = || vec![digest(b"nothing yet"); shard.leaves.len()].into();
                let there = self.leaves.entry(shard.slot).or_insert_with(unknown);
                let mut leaves = there.to_vec();
                if let Some(leaf) = leaves.get_mut(stripe as usize) {
                    *leaf = shard.leaves[stripe as usize];
                }
                *there = leaves.into();
            }
            Sink::Parity { set, .. } => drop(self.rotten_parity.remove(&(*set, stripe))),
        }
    }

    /// A slot's memory as a process sees it that has its descriptor.
    pub fn mapped(&mut self, slot: SlotId) -> &mut Vec<u8> {
        let there = self.slots.get_mut(&slot);
        there
            .or_else(|| self.dropped.get_mut(&slot))
            .expect("whoever has it mapped got it from here")
    }
}

/// Chunk digests and root of a shard.
pub fn digests(bytes: &[u8]) -> (Arc<[Digest]>, Digest) {
    let leaves: Arc<[Digest]> = bytes
        .chunks(CHUNK_BYTES as usize)
        .enumerate()
        .map(|(index, chunk)| leaf_digest(chunk, index as u64))
        .collect();
    with_root(leaves, bytes.len() as u64)
}

/// Those of a shard that nobody has ever seen; each name has others.
pub fn made_up_digests(name: &str, length: u64) -> (Arc<[Digest]>, Digest) {
    let chunk = ChunkSize::new(CHUNK_BYTES).unwrap();
    let leaf = |at| digest(format!("{name} {at}").as_bytes());
    with_root((0..chunk.count(length)).map(leaf).collect(), length)
}

/// The root to chunk digests.
pub fn with_root(leaves: Arc<[Digest]>, length: u64) -> (Arc<[Digest]>, Digest) {
    let root = root_digest(&leaves, length, ChunkSize::new(CHUNK_BYTES).unwrap());
    (leaves, root)
}
