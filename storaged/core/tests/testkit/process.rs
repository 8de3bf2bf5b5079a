//! One node's process: its decisions and its RAM. A crash loses all of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_codec::{ChunkSize, Digest, digest, leaf_digest, root_digest};
use storaged_core::{Node, ParityId};
use storaged_wire::SlotId;

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

pub struct Process {
    pub node: Node,
    pub generation: u64,
    pub slots: BTreeMap<SlotId, Vec<u8>>,
    /// What slots hold where no bytes exist.
    pub leaves: BTreeMap<SlotId, Arc<[Digest]>>,
    /// The last slots that were dropped: readers and trainers that have them mapped still see them.
    dropped: BTreeMap<SlotId, Vec<u8>>,
    pub parity: BTreeMap<ParityId, Vec<Vec<u8>>>,
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
            started,
            ahead: 0,
            wakes_at: None,
        }
    }

    pub fn drop_slot(&mut self, slot: SlotId) {
        self.leaves.remove(&slot);
        self.dropped
            .extend(self.slots.remove(&slot).map(|bytes| (slot, bytes)));
        while self.dropped.len() > DROPPED_KEPT {
            self.dropped.pop_first();
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
    let leaves: Vec<Digest> = bytes
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

fn with_root(leaves: Vec<Digest>, length: u64) -> (Arc<[Digest]>, Digest) {
    let root = root_digest(&leaves, length, ChunkSize::new(CHUNK_BYTES).unwrap());
    (leaves.into(), root)
}
