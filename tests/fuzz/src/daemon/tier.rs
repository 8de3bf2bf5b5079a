//! A durable tier that somebody else can write in. Honest steps lie there, as they are, packed, and as increments with every kind of
//! record; an input says what is done to the objects. Whatever that is, no step is offered that its job has not written, and no
//! byte comes back that is not the one that was saved.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use storaged::keep::NoStore;
use storaged::memory::Memory;
use storaged::trickle::store::{FakeStore, KeyPrefix, ObjectKey, Store};
use storaged::trickle::{Packing, RequireMac, Retention, Trickle, TrickleLimits};
use storaged_codec::{ChunkSize, Digest, Geometry, digest, root_digest};
use storaged_core::{Authorship, Leftovers, SlotShard, Trust, UploadBase};
use storaged_wire::{
    Enclosed, Enclosures, JobKeys, Manifest, ManifestBytes, Namespace, NodeName, Owner, Rank,
    RunId, ShardEntry, SlotId, Step, WorldSize,
};

use crate::Inputs;

const CHUNK: u32 = 4 << 10;
const RANK: Rank = Rank::new(0);
const TOKEN: &[u8] = b"a token of tests";
const SCHEMA: &[u8] = b"a schema";
/// Of an input's changes, so many are made.
const CHANGES_MAX: usize = 12;
/// Bytes of a change: which object, what, where, with what.
const CHANGE_BYTES: usize = 6;

type Objects = BTreeMap<ObjectKey, Vec<u8>>;

/// What honest jobs have written.
struct Honest {
    objects: Objects,
    /// The manifests, and what the shard of each holds.
    steps: BTreeMap<Digest, Vec<u8>>,
}

/// The writer of honest steps.
struct Writer {
    store: Arc<FakeStore>,
    memory: Arc<Memory>,
    slots: u64,
}

struct Saved {
    manifest: Arc<ManifestBytes>,
    shard: SlotShard,
}

fn job() -> Namespace {
    Namespace::new("job").expect("a name")
}

fn job_keys() -> JobKeys {
    JobKeys::of_token(&job(), TOKEN)
}

fn chunk() -> ChunkSize {
    ChunkSize::new(CHUNK).expect("a size")
}

fn limits(packing: Packing, require_mac: RequireMac) -> TrickleLimits {
    TrickleLimits {
        part_bytes: 1 << 20,
        in_flight_bytes: 64 << 20,
        rate: None,
        packing,
        increments: 8,
        retention: Retention::default(),
        require_mac,
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().max_blocking_threads(1);
    builder.build().expect("a runtime")
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

impl Writer {
    fn slot(&mut self, bytes: &[u8]) -> SlotId {
        self.slots += 1;
        let slot = SlotId::new(self.slots);
        let length = (bytes.len() as u64).max(1);
        self.memory.create_slot(slot, length).expect("memory");
        let made = self.memory.slot(slot).expect("it was made");
        made.write_at(0, bytes).expect("it has room");
        slot
    }

    fn seal(&mut self, step: u64, bytes: &[u8]) -> (Saved, Enclosures) {
        let (slot, length) = (self.slot(bytes), bytes.len() as u64);
        let all = 0..chunk().count(length);
        let (leaves, _) = (self.memory.digest(slot, length, chunk(), all)).expect("a slot");
        let enclosures = Enclosures {
            schema: SCHEMA.to_vec().into(),
            torch_metadata: zstd::bulk::compress(b"metadata", 1).expect("memory").into(),
        };
        let manifest = manifest(step, length, &leaves, &enclosures);
        let shard = SlotShard {
            slot,
            length,
            chunk: chunk(),
            leaves: leaves.into(),
            prints: Arc::default(),
        };
        let manifest = Arc::new(manifest.seal().expect("it holds together"));
        (Saved { manifest, shard }, enclosures)
    }

    async fn save(
        &mut self,
        step: u64,
        bytes: &[u8],
        packing: Packing,
        base: Option<&Saved>,
    ) -> Saved {
        let mut limits = limits(packing, RequireMac::default());
        // A slow link: every kind of record is worth its time.
        limits.rate = Some(2 << 20);
        let trickle = Trickle::new(self.store.clone(), self.memory.clone(), limits);
        let (saved, enclosures) = self.seal(step, bytes);
        let base = base.map(|base| UploadBase {
            manifest: base.manifest.clone(),
            shard: base.shard.clone(),
        });
        let copied = trickle.upload(
            &saved.manifest,
            RANK,
            &saved.shard,
            base.as_ref(),
            Leftovers::Perhaps,
        );
        copied.await.expect("a store that takes all");
        let by = Authorship {
            keys: Some(job_keys()),
            predecessor: None,
        };
        let published = trickle.publish(&saved.manifest, &enclosures, &by);
        published.await.expect("a store that takes all");
        saved
    }
}

fn manifest(step: u64, length: u64, leaves: &[Digest], enclosures: &Enclosures) -> Manifest {
    Manifest {
        version: Manifest::VERSION,
        namespace: job(),
        owner: Owner::of_token(TOKEN),
        run: RunId::new(1),
        step: Step::new(step),
        world_size: WorldSize::new(1).expect("one rank"),
        epoch: 0,
        geometry: Geometry::new(1, 1).expect("a geometry"),
        chunk: chunk(),
        shards: vec![ShardEntry {
            rank: RANK,
            node: NodeName::new("n0").expect("a name"),
            length,
            root: root_digest(leaves, length, chunk()),
        }],
        groups: vec![],
        schema: Enclosed::naming(&enclosures.schema),
        torch_metadata: Enclosed::naming(&enclosures.torch_metadata),
    }
}

/// Numbers as in training: nearly every one moves a little.
fn trained(bytes: &[u8]) -> Vec<u8> {
    let (words, rest) = bytes.as_chunks::<4>();
    let moved = words.iter().enumerate().map(|(index, word)| {
        let nudge = index as u32 % 61;
        u32::from_le_bytes(*word).wrapping_add(nudge).to_le_bytes()
    });
    moved.flatten().chain(rest.iter().copied()).collect()
}

async fn write_honest() -> Honest {
    let store = Arc::new(FakeStore::new());
    let mut writer = Writer {
        store: store.clone(),
        memory: Arc::new(Memory::new(Arc::new(NoStore))),
        slots: 0,
    };
    let first = noise(1, 3 * CHUNK as usize + 100);
    let second = trained(&first);
    let third = [&b"moved"[..], &second].concat();
    let fourth = b"again and ".repeat(900);
    let mut steps = BTreeMap::new();
    let mut before: Option<Saved> = None;
    for (step, bytes, packing) in [
        (1, &first, Packing::None),
        (2, &second, Packing::None),
        (3, &third, Packing::None),
        (4, &fourth, Packing::Zstd),
    ] {
        let base = before.as_ref().filter(|_| packing == Packing::None);
        let saved = writer.save(step, bytes, packing, base).await;
        steps.insert(saved.manifest.name(), bytes.clone());
        before = Some(saved);
    }
    let mut objects = Objects::new();
    let listed = store.list(&KeyPrefix::root()).await.expect("a store");
    for entry in listed {
        let bytes = store.get(&entry.key, None).await.expect("it is there");
        objects.insert(entry.key, bytes.to_vec());
    }
    Honest { objects, steps }
}

fn honest() -> &'static Honest {
    static HONEST: OnceLock<Honest> = OnceLock::new();
    HONEST.get_or_init(|| runtime().block_on(write_honest()))
}

/// The target: the first byte says what the reader believes, then come changes, and then bytes that changes may put in.
pub fn tier(bytes: &[u8]) {
    let Some((how, rest)) = bytes.split_first() else {
        return;
    };
    let count = CHANGES_MAX.min(rest.len() / CHANGE_BYTES);
    let (changes, own) = rest.split_at(count * CHANGE_BYTES);
    let mut objects = honest().objects.clone();
    for change in changes.as_chunks::<CHANGE_BYTES>().0 {
        make(&mut objects, *change, own);
    }
    runtime().block_on(read(objects, *how));
}

/// One thing that somebody who may write in the tier does.
fn make(objects: &mut Objects, change: [u8; CHANGE_BYTES], own: &[u8]) {
    let [which, what, low, high, byte, from] = change;
    let keys: Vec<ObjectKey> = objects.keys().cloned().collect();
    let Some(key) = keys.get(usize::from(which) % keys.len().max(1)) else {
        return;
    };
    let other = &keys[usize::from(byte) % keys.len()];
    let copy = objects.get(other).cloned().unwrap_or_default();
    let own = own
        .get(usize::from(from).min(own.len())..)
        .unwrap_or_default();
    let Some(object) = objects.get_mut(key) else {
        return;
    };
    let at = usize::from(u16::from_le_bytes([low, high])) % object.len().max(1);
    match what % 9 {
        0 => object
            .iter_mut()
            .skip(at)
            .take(1)
            .for_each(|it| *it ^= byte.max(1)),
        1 => object.truncate(at),
        2 => object.extend_from_slice(own),
        3 => *object = own.to_vec(),
        4 => drop(objects.remove(key)),
        5 => *object = copy,
        6 => rename(objects, key, byte),
        7 => digested_anew(object),
        _ => {
            let end = object.len().min(at + own.len());
            object[at..end].copy_from_slice(&own[..end - at]);
        }
    }
}

/// A digest at an object's end fits what stands before it: whoever forges one makes it so.
fn digested_anew(object: &mut Vec<u8>) {
    if let Some((body, _)) = object.split_last_chunk::<32>() {
        *object = [body, digest(body).as_bytes()].concat();
    }
}

/// An object lies in another step's place.
fn rename(objects: &mut Objects, key: &ObjectKey, byte: u8) {
    let text = key.as_str();
    let moved = (1..=4).find_map(|step| {
        let from = format!("step-{step}/");
        let to = format!("step-{}/", byte % 6);
        text.contains(&from).then(|| text.replace(&from, &to))
    });
    if let Some(to) = moved.and_then(|to| to.parse().ok())
        && let Some(object) = objects.remove(key)
    {
        objects.insert(to, object);
    }
}

fn trust_of(how: u8) -> Trust {
    let owner = Owner::of_token(TOKEN);
    match how % 4 {
        0 | 1 => Trust::Job {
            owner,
            keys: job_keys(),
            known: None,
        },
        2 => Trust::Nothing { owner },
        _ => Trust::Anything,
    }
}

/// All that a restart reads.
async fn read(objects: Objects, how: u8) {
    let store = Arc::new(FakeStore::new());
    for (key, object) in objects {
        let put = store.put_new(&key, object.into()).await;
        put.expect("its key is free");
    }
    let modes = [
        RequireMac::Always,
        RequireMac::AfterFirst,
        RequireMac::Never,
    ];
    let require_mac = modes[usize::from(how / 4) % modes.len()];
    let memory = Arc::new(Memory::new(Arc::new(NoStore)));
    let trickle = Trickle::new(store, memory.clone(), limits(Packing::None, require_mac));
    let trust = trust_of(how);
    let step = (how >= 128).then(|| Step::new(u64::from(how % 6)));
    let Ok(listing) = trickle.list(&job(), step, &trust).await else {
        return;
    };
    for (name, bytes) in &listing.enclosures {
        assert_eq!(digest(bytes), *name, "what a manifest names has its digest");
    }
    for (slot, manifest) in (1..).zip(&listing.manifests) {
        let saved = honest().steps.get(&manifest.name());
        let is_checked = matches!(trust, Trust::Job { .. }) && require_mac == RequireMac::Always;
        // Where nothing else is left, one of another token says that the name is not this one's: no plan offers it.
        let is_own = manifest.manifest().owner == Owner::of_token(TOKEN);
        assert!(
            saved.is_some() || !is_checked || !is_own,
            "a forged step is offered"
        );
        fetch(&trickle, &memory, manifest, SlotId::new(slot), &trust).await;
    }
}

/// A shard that comes back is the one that was saved, or has the digests that whoever wrote the manifest gave it.
async fn fetch(
    trickle: &Trickle,
    memory: &Memory,
    manifest: &Arc<ManifestBytes>,
    slot: SlotId,
    trust: &Trust,
) {
    let record = manifest.manifest();
    let Some(entry) = record.shard(RANK).filter(|entry| entry.length <= 1 << 20) else {
        return;
    };
    (memory.create_slot(slot, entry.length.max(1))).expect("memory");
    let Ok(leaves) = trickle.fetch(manifest, RANK, slot, &[], trust).await else {
        return;
    };
    let root = root_digest(&leaves, entry.length, record.chunk);
    assert_eq!(root, entry.root, "the digests are the manifest's");
    let all = 0..record.chunk.count(entry.length);
    let digested = memory.digest(slot, entry.length, record.chunk, all);
    let (there, _) = digested.expect("a slot");
    assert_eq!(there[..], leaves[..], "the bytes have these digests");
    if let Some(saved) = honest().steps.get(&manifest.name()) {
        let mut got = vec![0; entry.length as usize];
        let read = memory.slot(slot).map(|slot| slot.read_at(0, &mut got));
        assert!(
            matches!(read, Some(Ok(()))) && got == *saved,
            "they are what was saved"
        );
    }
}

/// Every kind of change to every object, and what each reader believes.
pub fn tier_seeds() -> Inputs {
    let count = honest().objects.len() as u8;
    let untouched = (0..12).map(|how| (format!("untouched-{how}"), vec![how]));
    let asked = (1..5).map(|step| (format!("asked-{step}"), vec![132 + step]));
    let changed = (0..count).flat_map(|which| {
        (0..9).map(move |what| {
            let how = [0, 3, 4, 8][usize::from(what) % 4];
            let mut bytes = vec![how, which, what, 9, 0, which.wrapping_add(1), 0];
            // Of forgers who make the digest fit.
            bytes.extend([which, 7, 0, 0, 0, 0]);
            bytes.extend(b"bytes of somebody's own");
            (format!("changed-{which}-{what}"), bytes)
        })
    });
    untouched.chain(asked).chain(changed).collect()
}
