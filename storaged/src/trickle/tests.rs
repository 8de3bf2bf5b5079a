//! Increments over a store in memory: chains come back byte by byte, and what is damaged or missing is said, never
//! returned.

use std::sync::Arc;

use bytes::Bytes;
use storaged_codec::delta::Kind;
use storaged_codec::{ChunkSize, Digest, Geometry};
use storaged_core::{Authorship, DurableFault, Leftovers, SlotShard, Trust, UploadBase};
use storaged_wire::{
    Enclosed, Enclosures, JobKeys, Manifest, ManifestBytes, ManifestKey, Namespace, NodeName,
    Owner, Rank, RunId, ShardEntry, SlotId, Step, WorldSize,
};

use super::store::{self, ObjectKey, Store};
use super::{
    Copied, IncrementReport, Packing, RequireMac, Retention, Trickle, TrickleLimits, windows_of,
};
use crate::keep::NoStore;
use crate::memory::Memory;

mod damaged_base;
mod enclosed;
mod encrypted;
mod forms;

mod parts;
mod provenance;
mod share;
mod shared_reads;
mod succession;
mod threads;
mod tier;
mod torch_metadata;
mod withdrawal;

const CHUNK: u32 = 64 << 10;
const SCHEMA: &[u8] = b"a schema";
const RANK: Rank = Rank::new(0);
const TOKEN: &[u8] = b"token";

fn job_keys() -> JobKeys {
    JobKeys::of_token(&Namespace::new("job").unwrap(), TOKEN)
}

/// What whoever says the job's token believes.
fn of_job() -> Trust {
    Trust::Job {
        owner: Owner::of_token(TOKEN),
        keys: job_keys(),
        known: None,
    }
}

fn by_job() -> Authorship {
    Authorship {
        keys: Some(job_keys()),
        predecessor: None,
    }
}

struct World {
    store: Arc<dyn Store>,
    memory: Arc<Memory>,
    trickle: Trickle,
    limits: TrickleLimits,
    run: RunId,
    job: Namespace,
    slots: u64,
}

/// A checkpoint of one shard, and what it was written as.
struct Saved {
    manifest: Arc<ManifestBytes>,
    enclosures: Enclosures,
    shard: SlotShard,
    bytes: Vec<u8>,
}

impl Saved {
    fn base(&self) -> UploadBase {
        UploadBase {
            manifest: self.manifest.clone(),
            shard: self.shard.clone(),
        }
    }
}

impl World {
    fn new(increments: u32, packing: Packing) -> Self {
        Self::over_a_link(increments, packing, 16 << 20)
    }

    /// The link's rate counts: over a fast one records stay raw.
    fn over_a_link(increments: u32, packing: Packing, bytes_per_second: u64) -> Self {
        let store: Arc<dyn Store> = Arc::new(store::FakeStore::new());
        let memory = Arc::new(Memory::new(Arc::new(NoStore)));
        let limits = TrickleLimits {
            part_bytes: 1 << 20,
            in_flight_bytes: 64 << 20,
            rate: Some(bytes_per_second),
            packing,
            increments,
            retention: Retention::default(),
            require_mac: RequireMac::default(),
        };
        let trickle = Trickle::new(store.clone(), memory.clone(), limits);
        Self {
            store,
            memory,
            trickle,
            limits,
            run: RunId::new(1),
            job: Namespace::new("job").unwrap(),
            slots: 0,
        }
    }

    fn slot(&mut self, bytes: &[u8]) -> SlotId {
        self.slots += 1;
        let slot = SlotId::new(self.slots);
        let length = (bytes.len() as u64).max(1);
        self.memory.create_slot(slot, length).unwrap();
        self.memory.slot(slot).unwrap().write_at(0, bytes).unwrap();
        slot
    }

    fn seal(&mut self, step: u64, bytes: Vec<u8>) -> Saved {
        let metadata = zstd::bulk::compress(b"metadata", 1).unwrap();
        self.seal_with(step, bytes, metadata)
    }

    fn seal_with(&mut self, step: u64, bytes: Vec<u8>, metadata: Vec<u8>) -> Saved {
        let slot = self.slot(&bytes);
        let length = bytes.len() as u64;
        let chunk = ChunkSize::new(CHUNK).unwrap();
        let all = 0..chunk.count(length);
        let (leaves, prints) = self.memory.digest(slot, length, chunk, all).unwrap();
        let root = storaged_codec::root_digest(&leaves, length, chunk);
        let leaves: Arc<[Digest]> = leaves.into();
        let manifest = Manifest {
            version: Manifest::VERSION,
            namespace: self.job.clone(),
            owner: Owner::of_token(TOKEN),
            run: self.run,
            step: Step::new(step),
            world_size: WorldSize::new(1).unwrap(),
            epoch: 0,
            geometry: Geometry::new(1, 1).unwrap(),
            chunk: ChunkSize::new(CHUNK).unwrap(),
            shards: vec![ShardEntry {
                rank: RANK,
                node: NodeName::new("n0").unwrap(),
                length,
                root,
            }],
            groups: vec![],
            schema: Enclosed::naming(SCHEMA),
            torch_metadata: Enclosed::naming(&metadata),
        };
        Saved {
            enclosures: Enclosures {
                schema: SCHEMA.to_vec().into(),
                torch_metadata: metadata.into(),
            },
            manifest: Arc::new(manifest.seal().unwrap()),
            shard: SlotShard {
                slot,
                length,
                chunk: ChunkSize::new(CHUNK).unwrap(),
                leaves,
                prints: prints.into(),
            },
            bytes,
        }
    }

    async fn copy(&self, saved: &Saved, base: Option<&Saved>) -> Copied {
        let base = base.map(Saved::base);
        let copied = self.trickle.upload(
            &saved.manifest,
            RANK,
            &saved.shard,
            base.as_ref(),
            Leftovers::Perhaps,
        );
        let copied = copied.await.unwrap();
        self.publish(saved, &by_job()).await.unwrap();
        copied
    }

    async fn publish(&self, saved: &Saved, by: &Authorship) -> Result<(), DurableFault> {
        let publish = self.trickle.publish(&saved.manifest, &saved.enclosures, by);
        publish.await
    }

    async fn save(&mut self, step: u64, bytes: Vec<u8>, base: Option<&Saved>) -> (Saved, Copied) {
        let saved = self.seal(step, bytes);
        let copied = self.copy(&saved, base).await;
        (saved, copied)
    }

    async fn fetch(&mut self, saved: &Saved) -> Result<Vec<u8>, DurableFault> {
        self.fetch_believing(saved, of_job()).await
    }

    async fn fetch_believing(
        &mut self,
        saved: &Saved,
        trust: Trust,
    ) -> Result<Vec<u8>, DurableFault> {
        let slot = self.slot(&vec![0; saved.bytes.len()]);
        let fetch = self.trickle.fetch(&saved.manifest, RANK, slot, &[], &trust);
        fetch.await?;
        let mut got = vec![0; saved.bytes.len()];
        self.memory
            .slot(slot)
            .unwrap()
            .read_at(0, &mut got)
            .unwrap();
        Ok(got)
    }

    async fn comes_back(&mut self, saved: &Saved) {
        let got = self.fetch(saved).await.unwrap();
        assert!(
            got == saved.bytes,
            "step {} came back changed",
            saved.manifest.manifest().step
        );
    }

    async fn change(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let key: ObjectKey = key.parse().unwrap();
        let mut bytes = self.store.get(&key, None).await.unwrap().to_vec();
        self.store.delete(&key).await.unwrap();
        change(&mut bytes);
        self.store.put_new(&key, Bytes::from(bytes)).await.unwrap();
    }

    async fn has(&self, key: &str) -> bool {
        self.store.length(&key.parse().unwrap()).await.is_ok()
    }
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Numbers as in training: nearly every one moves a little.
fn trained(bytes: &[u8], step: u64) -> Vec<u8> {
    let (words, _) = bytes.as_chunks::<4>();
    let moved = words.iter().enumerate().map(|(index, word)| {
        let nudge = (index as u32).wrapping_mul(step as u32 * 2 + 1) % 61;
        u32::from_le_bytes(*word).wrapping_add(nudge).to_le_bytes()
    });
    moved.flatten().collect()
}

fn increment(copied: &Copied) -> &IncrementReport {
    copied.increment.as_ref().expect("an increment")
}

fn chunks(report: &IncrementReport, kind: Kind) -> u64 {
    report.tallies.get(&kind).map_or(0, |tally| tally.chunks)
}

#[tokio::test(start_paused = true)]
async fn a_chain_comes_back_at_every_step_and_ends_in_a_new_full_copy() {
    let mut world = World::new(2, Packing::None);
    let mut saved: Vec<Saved> = Vec::new();
    let mut forms = Vec::new();
    for step in 1..=5 {
        let bytes = match saved.last() {
            Some(last) => trained(&last.bytes, step),
            None => noise(1, 5 * CHUNK as usize + 100),
        };
        let (next, copied) = world.save(step, bytes, saved.last()).await;
        forms.push(copied.increment.as_ref().map(|report| report.depth));
        if let Some(report) = &copied.increment {
            assert!(report.bytes * 2 < copied.bytes, "{report:?}");
            assert_eq!(report.bytes, copied.stored);
            assert_eq!(report.without_base, 0);
        }
        saved.push(next);
    }
    assert_eq!(forms, [None, Some(1), Some(2), None, Some(1)]);
    for step in &saved {
        world.comes_back(step).await;
    }
    assert!(world.has("job/run-1/step-1/.metadata").await);
    assert!(
        !world.has("job/run-1/step-2/.metadata").await,
        "stock readers must not see it"
    );
    assert!(!world.has("job/run-1/step-2/__0_0.distcp").await);
}

#[tokio::test(start_paused = true)]
async fn unchanged_chunks_are_neither_read_nor_sent() {
    let mut world = World::new(8, Packing::Zstd);
    let (first, _) = world.save(1, noise(1, 40 * CHUNK as usize), None).await;
    let mut bytes = first.bytes.clone();
    bytes[7 * CHUNK as usize] ^= 1;
    // What is clean by its digest is not read from the base: one that lost all other chunks does as well.
    let slot = world.memory.slot(first.shard.slot).unwrap();
    slot.write_at(20 * u64::from(CHUNK), &noise(9, 20 * CHUNK as usize))
        .unwrap();
    let (second, copied) = world.save(2, bytes, Some(&first)).await;
    let report = increment(&copied);
    assert_eq!(chunks(report, Kind::Clean), 39);
    assert!(report.bytes < 40 * 24 + 4096, "{report:?}");
    assert_eq!(report.without_base, 0);
    world.comes_back(&second).await;
}

#[tokio::test(start_paused = true)]
async fn shards_may_grow_shrink_and_move() {
    let mut world = World::new(8, Packing::None);
    let bytes = noise(3, 6 * CHUNK as usize + 17);
    let (first, _) = world.save(1, bytes.clone(), None).await;
    let grown = [&bytes[..], &noise(4, 2 * CHUNK as usize + 5)].concat();
    let (second, copied) = world.save(2, grown.clone(), Some(&first)).await;
    assert_eq!(chunks(increment(&copied), Kind::Clean), 6);
    let shrunk = grown[..3 * CHUNK as usize - 9].to_vec();
    let (third, _) = world.save(3, shrunk.clone(), Some(&second)).await;
    let moved = [&b"inserted"[..], &shrunk].concat();
    let (fourth, copied) = world.save(4, moved, Some(&third)).await;
    assert_eq!(increment(&copied).depth, 3);
    for step in [&first, &second, &third, &fourth] {
        world.comes_back(step).await;
    }
}

#[cfg(feature = "moved")]
#[tokio::test(start_paused = true)]
async fn content_that_moved_is_found_over_a_slow_link() {
    let mut world = World::over_a_link(8, Packing::None, 2 << 20);
    let bytes = noise(3, 6 * CHUNK as usize);
    let (first, _) = world.save(1, bytes.clone(), None).await;
    let moved = [&b"inserted"[..], &bytes].concat();
    let (second, copied) = world.save(2, moved, Some(&first)).await;
    let report = increment(&copied);
    assert!(chunks(report, Kind::Moved) >= 4, "{report:?}");
    assert!(report.bytes * 2 < copied.bytes, "{report:?}");
    world.comes_back(&second).await;
}

#[tokio::test(start_paused = true)]
async fn a_range_moves_only_its_chunks() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(5, 8 * CHUNK as usize), None).await;
    let (second, _) = world.save(2, trained(&first.bytes, 2), Some(&first)).await;
    // Chunks outside the range are damaged at both levels, and nobody notices.
    world
        .change("job/run-1/step-1/__0_0.distcp", |bytes| bytes[0] ^= 1)
        .await;
    world
        .change("job/run-1/step-2/__0_0.increment", |bytes| bytes[30] ^= 1)
        .await;
    let slot = world.slot(&vec![0; second.bytes.len()]);
    let chunk = u64::from(CHUNK);
    let range = 4 * chunk + 5..5 * chunk + 1;
    let ranges = std::slice::from_ref(&range);
    let trust = of_job();
    let fetched = (world.trickle).fetch(&second.manifest, RANK, slot, ranges, &trust);
    fetched.await.unwrap();
    let mut got = vec![0; (range.end - range.start) as usize];
    world
        .memory
        .slot(slot)
        .unwrap()
        .read_at(range.start, &mut got)
        .unwrap();
    assert_eq!(got, second.bytes[range.start as usize..range.end as usize]);
    assert!(world.fetch(&second).await.is_err(), "the whole is damaged");
}

#[tokio::test(start_paused = true)]
async fn a_base_that_leaves_ram_meanwhile_costs_bytes_and_no_step() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(6, 6 * CHUNK as usize), None).await;
    let second = world.seal(2, trained(&first.bytes, 2));
    // The slot holds another step's bytes by now.
    let slot = world.memory.slot(first.shard.slot).unwrap();
    slot.write_at(0, &noise(7, 6 * CHUNK as usize)).unwrap();
    let copied = world.copy(&second, Some(&first)).await;
    assert_eq!(increment(&copied).without_base, 6);
    world.comes_back(&second).await;

    let third = world.seal(3, trained(&second.bytes, 3));
    world.memory.drop_slot(second.shard.slot);
    let copied = world.copy(&third, Some(&second)).await;
    assert_eq!(increment(&copied).without_base, 6);
    world.comes_back(&third).await;
}

#[tokio::test(start_paused = true)]
async fn a_base_that_is_not_whole_in_the_tier_is_not_built_on() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(8, 3 * CHUNK as usize), None).await;
    let key: ObjectKey = "job/run-1/step-1/storaged.leaves.0".parse().unwrap();
    world.store.delete(&key).await.unwrap();
    let (second, copied) = world.save(2, trained(&first.bytes, 2), Some(&first)).await;
    assert!(copied.increment.is_none());
    world.comes_back(&second).await;
}

#[tokio::test(start_paused = true)]
async fn what_is_damaged_or_missing_is_said_and_nothing_is_returned() {
    let damages: [(&str, &str); 7] = [
        (
            "job/run-1/step-3/__0_0.increment",
            "digest mismatch in record",
        ),
        ("job/run-1/step-3/storaged.increment.0", "digest mismatch"),
        (
            "job/run-1/step-2/__0_0.increment",
            "digest mismatch in record",
        ),
        ("job/run-1/step-2/storaged.manifest", "cannot be used"),
        (
            "job/run-1/step-1/__0_0.distcp",
            "step 1: digest mismatch in chunk",
        ),
        ("job/run-1/step-1/storaged.leaves.0", "digest mismatch"),
        ("job/run-1/step-1/storaged.manifest", "cannot be used"),
    ];
    for (key, expected) in damages {
        for missing in [false, true] {
            let mut world = World::new(8, Packing::None);
            let (first, _) = world.save(1, noise(2, 3 * CHUNK as usize), None).await;
            let (second, _) = world.save(2, trained(&first.bytes, 2), Some(&first)).await;
            let (third, _) = world
                .save(3, trained(&second.bytes, 3), Some(&second))
                .await;
            world.comes_back(&third).await;
            if missing {
                world.store.delete(&key.parse().unwrap()).await.unwrap();
            } else {
                world.change(key, |bytes| bytes[20] ^= 4).await;
            }
            let Err(error) = world.fetch(&third).await else {
                panic!("{key}: a damaged chain came back");
            };
            assert!(error.is_damage(), "{key}: {error:?}");
            let text = error.to_string();
            assert!(missing || text.contains(expected), "{key}: {text}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_step_whose_base_was_removed_is_not_offered() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(2, 3 * CHUNK as usize), None).await;
    let (second, _) = world.save(2, trained(&first.bytes, 2), Some(&first)).await;
    world
        .save(3, trained(&second.bytes, 3), Some(&second))
        .await;
    let offered = async |world: &World| {
        let listed = world
            .trickle
            .list(&Namespace::new("job").unwrap(), None, &of_job())
            .await;
        let steps = listed
            .unwrap()
            .manifests
            .into_iter()
            .map(|one| one.manifest().step.get());
        steps.collect::<Vec<_>>()
    };
    assert_eq!(offered(&world).await, [3, 2, 1]);
    let manifest: ObjectKey = "job/run-1/step-2/storaged.manifest".parse().unwrap();
    world.store.delete(&manifest).await.unwrap();
    assert_eq!(offered(&world).await, [1]);
}

#[tokio::test(start_paused = true)]
async fn an_index_of_another_checkpoint_is_refused() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(2, 3 * CHUNK as usize), None).await;
    let (second, _) = world.save(2, trained(&first.bytes, 2), Some(&first)).await;
    let (third, _) = world
        .save(3, trained(&second.bytes, 3), Some(&second))
        .await;
    let of = |step: u64| format!("job/run-1/step-{step}/storaged.increment.0");
    let other = world
        .store
        .get(&of(2).parse().unwrap(), None)
        .await
        .unwrap();
    world.change(&of(3), |bytes| *bytes = other.to_vec()).await;
    let Err(error) = world.fetch(&third).await else {
        panic!("an index of another checkpoint was taken");
    };
    assert!(
        error.to_string().contains("expected the index of"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_broke_off_is_done_again() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(2, 3 * CHUNK as usize), None).await;
    let second = world.seal(2, trained(&first.bytes, 2));
    let base = first.base();
    let upload = world.trickle.upload(
        &second.manifest,
        RANK,
        &second.shard,
        Some(&base),
        Leftovers::Perhaps,
    );
    upload.await.unwrap();
    // The records are there, the index is not: as after a crash between the two.
    let index: ObjectKey = "job/run-1/step-2/storaged.increment.0".parse().unwrap();
    world.store.delete(&index).await.unwrap();
    assert!(world.publish(&second, &by_job()).await.is_err());
    let copied = world.copy(&second, None).await;
    assert!(
        copied.increment.is_none(),
        "after a restart there is no base"
    );
    world.comes_back(&second).await;

    let third = world.seal(3, trained(&second.bytes, 3));
    let copied = world.copy(&third, Some(&second)).await;
    assert_eq!(increment(&copied).depth, 1);
    let again = world.copy(&third, Some(&second)).await;
    assert!(
        again.increment.is_none(),
        "what is there is not written twice"
    );
    world.comes_back(&third).await;
}

#[test]
fn ranges_are_read_by_whole_chunks_each_of_them_once() {
    let chunk = ChunkSize::new(4096).unwrap();
    let length = 10 * 4096 + 5;
    let every_other: Vec<_> = (0..4096).rev().map(|at| 2 * at..2 * at + 1).collect();
    let windows = windows_of(&every_other, length, chunk);
    assert_eq!(windows.as_slice(), std::slice::from_ref(&(0..2)));
    let apart = [9 * 4096 + 1..length, 0..1, 4095..4096, 20_000..20_001];
    assert_eq!(windows_of(&apart, length, chunk), [0..1, 4..5, 9..11]);
    let windows = windows_of(&[], length, chunk);
    assert_eq!(windows.as_slice(), std::slice::from_ref(&(0..11)));
    let nothing = 7..7;
    let nothing = std::slice::from_ref(&nothing);
    assert!(windows_of(nothing, length, chunk).is_empty());
    let large = 1 << 40;
    // Who wants less of it reads the same windows.
    let all = windows_of(&[], large, chunk);
    let rest = 3 * 4096..large;
    let of_rest = windows_of(std::slice::from_ref(&rest), large, chunk);
    assert_eq!(of_rest[0], 3..all[0].end);
    assert_eq!(of_rest[1..], all[1..]);
    let windows = windows_of(&[], large, chunk);
    assert!(windows.iter().all(|it| it.end - it.start == windows[0].end));
    assert_eq!(windows.last().map(|it| it.end), Some(large / 4096));
}
