//! Shards that are put back, and what is known of them without another look.

use storaged_codec::{fingerprint, leaf_digest};

use super::*;
use crate::digest::{digest, digest_restored};
use crate::keep::NoStore;
use crate::memory::{Digested, locked};
use crate::pool::Pool;

const CHUNK: usize = 4096;
const LENGTH: usize = 3 * CHUNK + 7;
const SLOT: SlotId = SlotId::new(1);

struct PutBack {
    memory: Arc<Memory>,
    pool: Pool,
    shard: SlotShard,
    bytes: Vec<u8>,
}

fn noise(seed: u8) -> Vec<u8> {
    (0..LENGTH)
        .map(|at| (at % 251) as u8 ^ (at / CHUNK) as u8 ^ seed)
        .collect()
}

fn shard(bytes: &[u8]) -> SlotShard {
    let blocks = bytes.chunks(CHUNK);
    SlotShard {
        slot: SLOT,
        length: bytes.len() as u64,
        chunk: ChunkSize::new(CHUNK as u32).unwrap(),
        leaves: (0..)
            .zip(blocks)
            .map(|(at, it)| leaf_digest(it, at))
            .collect(),
        prints: bytes.chunks(CHUNK).map(fingerprint).collect(),
    }
}

impl PutBack {
    /// An empty slot for a shard.
    fn new() -> Self {
        let bytes = noise(0);
        let memory = Arc::new(Memory::new(Arc::new(NoStore)));
        memory.create_slot(SLOT, 2 * LENGTH as u64).unwrap();
        Self {
            memory,
            pool: Pool::start(1).unwrap(),
            shard: shard(&bytes),
            bytes,
        }
    }

    fn put(&self, bytes: &[u8], chunks: std::ops::Range<usize>) {
        let keep = self.memory.keep_shard(&shard(bytes)).unwrap();
        for (at, block) in bytes.chunks(CHUNK).enumerate() {
            if chunks.contains(&at) {
                keep.put(at as u64, Some(block)).unwrap();
            }
        }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let slot = self.memory.slot(SLOT).unwrap();
        slot.write_at(at as u64, bytes).unwrap();
    }

    async fn restored(&self) -> Digested {
        let SlotShard { length, chunk, .. } = self.shard;
        let digested = digest_restored(&self.pool, &self.memory, SLOT, ShardSize { length, chunk });
        digested.await.unwrap()
    }

    /// What a digest of the slot says.
    fn is_of_the_slot(&self, got: &Digested) -> bool {
        let mut bytes = vec![0; LENGTH];
        let slot = self.memory.slot(SLOT).unwrap();
        slot.read_at(0, &mut bytes).unwrap();
        got.read == LENGTH as u64 && is_of(&bytes, got)
    }
}

fn is_of(bytes: &[u8], got: &Digested) -> bool {
    let shard = shard(bytes);
    let root = storaged_codec::root_digest(&shard.leaves, shard.length, shard.chunk);
    (&got.leaves, &got.prints, got.root) == (&shard.leaves, &shard.prints, root)
}

#[tokio::test]
async fn a_shard_that_was_put_back_is_known_by_what_was_verified_and_once() {
    let put = PutBack::new();
    put.put(&put.bytes, 0..4);
    put.write(CHUNK + 5, b"changed");
    let got = put.restored().await;
    assert!(is_of(&put.bytes, &got) && got.read == 0);
    let again = put.restored().await;
    assert!(put.is_of_the_slot(&again) && !is_of(&put.bytes, &again));
}

#[tokio::test]
async fn a_chunk_that_was_not_put_has_the_shard_read() {
    for missing in 0..4 {
        let put = PutBack::new();
        put.put(&put.bytes, 0..missing);
        put.put(&put.bytes, missing + 1..4);
        assert!(put.is_of_the_slot(&put.restored().await));
    }
}

#[tokio::test]
async fn what_is_saved_in_the_slot_is_read_and_nothing_of_before_is_left() {
    let put = PutBack::new();
    put.put(&put.bytes, 0..4);
    let saved = noise(9);
    put.write(0, &saved);
    let SlotShard { length, chunk, .. } = put.shard;
    let got = digest(&put.pool, &put.memory, SLOT, ShardSize { length, chunk }).await;
    assert!(is_of(&saved, &got.unwrap()));
    assert!(put.is_of_the_slot(&put.restored().await));
}

#[tokio::test]
async fn what_was_put_last_counts() {
    let put = PutBack::new();
    let newer = noise(3);
    put.put(&put.bytes, 0..4);
    put.put(&newer, 0..4);
    put.put(&newer, 2..3);
    let got = put.restored().await;
    assert!(is_of(&newer, &got) && got.read == 0);
    // Of a shard of another length nothing is taken over.
    put.put(&newer[..LENGTH - 1], 0..4);
    put.put(&newer, 3..4);
    assert!(put.is_of_the_slot(&put.restored().await));
}

#[tokio::test]
async fn a_write_that_fails_leaves_no_note() {
    let put = PutBack::new();
    let long = [noise(0), noise(1), noise(2)].concat();
    let keep = put.memory.keep_shard(&shard(&long)).unwrap();
    let mut blocks = (0..).zip(long.chunks(CHUNK));
    let first = blocks.next().unwrap();
    keep.put(first.0, Some(first.1)).unwrap();
    let noted = |at: usize| {
        let held = put.memory.held(SLOT).unwrap();
        let table = locked(&held.notes.table);
        table.as_ref().is_some_and(|it| it.chunks[at].is_some())
    };
    for (at, block) in blocks {
        let written = keep.put(at, Some(block));
        assert_eq!(written.is_ok(), noted(at as usize), "chunk {at}");
    }
    assert!(noted(0) && !noted(long.len() / CHUNK));
}

#[tokio::test]
async fn memory_that_was_given_back_is_read_again() {
    let put = PutBack::new();
    put.put(&put.bytes, 0..4);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let slot = put.memory.slot(SLOT).unwrap();
    rustix::fs::fallocate(&*slot, punch, 0, CHUNK as u64).unwrap();
    let got = put.restored().await;
    assert!(put.is_of_the_slot(&got) && !is_of(&put.bytes, &got));
}

#[tokio::test]
async fn notes_are_bounded_and_go_with_their_slot() {
    let put = PutBack::new();
    let room = put.memory.note_room.clone();
    put.put(&put.bytes, 0..1);
    assert_eq!(room.available_permits(), NOTED_CHUNKS_MAX - 4);
    put.memory.drop_slot(SLOT);
    assert_eq!(room.available_permits(), NOTED_CHUNKS_MAX);
    put.memory.create_slot(SLOT, LENGTH as u64).unwrap();
    let _taken = room.try_acquire_many(NOTED_CHUNKS_MAX as u32 - 3).unwrap();
    put.put(&put.bytes, 0..4);
    assert!(put.is_of_the_slot(&put.restored().await));
}

/// A reader's shard, which goes with it, costs neither notes nor fingerprints.
#[tokio::test]
async fn what_does_not_stay_is_not_noted() {
    let put = PutBack::new();
    let SlotShard { length, chunk, .. } = put.shard;
    put.put(&put.bytes, 0..4);
    let size = ShardSize { length, chunk };
    let target = put.memory.put_target(SLOT, size, Stay::No).unwrap();
    let block = Unchecked::new(&put.bytes[..CHUNK]).verify_in(&put.shard.leaves, 0);
    target.put(&block.unwrap()).unwrap();
    assert!(put.is_of_the_slot(&put.restored().await));
}
