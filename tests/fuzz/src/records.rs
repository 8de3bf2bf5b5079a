//! Bytes as records, of every kind that comes from a peer, a trainer, the durable tier or an earlier daemon: what can be read is
//! written and read again as the same, holds together, and a digest or MAC that is wrong lets nothing through.

use std::fmt::Debug;

use minicbor::{Decode, Encode};
use storaged_codec::digest;
use storaged_wire::claim::RunClaim;
use storaged_wire::enclosure::Enclosures;
use storaged_wire::framing::{FRAME_PREFIX_BYTES, body_length};
use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::{CONTROL_FRAME_BYTES_MAX, CheckpointKey, PeerMessage, StreamRecord};
use storaged_wire::plan::RestorePlan;
use storaged_wire::provenance::IndexDigest;
use storaged_wire::{
    DurableStep, IncrementBase, IncrementIndex, KeptRecord, ManifestBytes, ManifestKey, Provenance,
    Rank, RecordName, RunId, Step, decode, encode,
};

use crate::index::holds_together;
use crate::twist::{Seen, Twist};
use crate::{Inputs, samples};

/// Longest first record of a data stream, as links have it.
const FIRST_RECORD_BYTES_MAX: usize = 4096;
/// A name of 64 bytes, two numbers and their heads.
const STREAM_RECORD_BYTES_MAX: usize = 128;

/// A record that can be read is written and read again as the same, in bytes that no longer change.
fn round_trip<T>(bytes: &[u8]) -> Option<T>
where
    T: for<'b> Decode<'b, ()> + Encode<()> + PartialEq + Debug,
{
    let record: T = decode("record", bytes).ok()?;
    let written = encode(&record);
    let again: T = decode("record", &written).expect("what was just written");
    assert_eq!(again, record);
    assert_eq!(encode(&again), written);
    Some(record)
}

/// The target: the first byte says which record.
pub fn records(bytes: &[u8]) {
    let Some((which, bytes)) = bytes.split_first() else {
        return;
    };
    match which % 10 {
        0 => drop(round_trip::<Request>(bytes)),
        1 => drop(round_trip::<Reply>(bytes)),
        2 => drop(round_trip::<PeerMessage>(bytes)),
        3 => drop(round_trip::<RestorePlan>(bytes)),
        4 => manifest(bytes),
        5 => index(bytes),
        6 => provenance(bytes),
        7 => kept(bytes),
        8 => drop(round_trip::<RunClaim>(bytes)),
        _ => drop(round_trip::<RecordName>(bytes)),
    }
}

/// A manifest holds together, can be sealed again, and is no other's.
fn manifest(bytes: &[u8]) {
    let Ok(read) = ManifestBytes::parse(bytes.to_vec()) else {
        return;
    };
    let record = read.manifest();
    assert_eq!((read.bytes(), read.name()), (bytes, digest(bytes)));
    assert_eq!(record.shards.len(), record.world_size.get() as usize);
    let lengths = record.shards.iter().map(|shard| u128::from(shard.length));
    assert_eq!(u128::from(record.length()), lengths.sum());
    let sealed = record.clone().seal().expect("it held together before");
    let again = ManifestBytes::verify(sealed.bytes().to_vec(), sealed.name());
    assert_eq!(again.expect("what was just sealed"), sealed);
    let other = digest(b"another");
    assert!(ManifestBytes::verify(bytes.to_vec(), other).is_err());
    let nothing = Enclosures::default();
    if let Ok(whole) = Enclosures::of(record, &nothing) {
        assert!(record.enclosures().all(|one| one.is_empty()) || whole != nothing);
    }
}

/// An index is believed with its digest only.
fn index(bytes: &[u8]) {
    assert!(IncrementIndex::from_object(&[bytes, &[0; 32]].concat()).is_err());
    holds_together(bytes);
}

fn some_key() -> ManifestKey {
    ManifestKey::of_token(&samples::namespace(), b"a token of tests")
}

/// Bytes that somebody without the key has made are never a provenance.
fn provenance(bytes: &[u8]) {
    let key = some_key();
    if let Ok(read) = Provenance::from_object(bytes, &key) {
        assert_eq!(read.to_object(&key), bytes, "its MAC was made with the key");
    }
    let other = ManifestKey::of_token(&samples::namespace(), b"another token");
    let Some(record) = round_trip::<Provenance>(bytes) else {
        return;
    };
    let object = record.to_object(&key);
    assert!(Provenance::from_object(&object, &other).is_err());
    let place = &record.key;
    let read = |manifest| Provenance::from_object(&object, &key)?.for_checkpoint(manifest, place);
    let of = read(record.manifest);
    assert_eq!(of.is_ok(), record.version == Provenance::VERSION);
    assert!(read(digest(b"another")).is_err());
}

fn kept(bytes: &[u8]) {
    if let Some(record) = round_trip::<KeptRecord>(bytes) {
        let name = encode(&record.name());
        assert_eq!(round_trip::<RecordName>(&name), Some(record.name()));
    }
}

/// The target of data streams: one frame with the first record, as a link reads it.
pub fn streams(bytes: &[u8]) {
    let Some((prefix, body)) = bytes.split_first_chunk::<FRAME_PREFIX_BYTES>() else {
        return;
    };
    let Ok(length) = body_length(*prefix, FIRST_RECORD_BYTES_MAX) else {
        return;
    };
    assert!(length <= FIRST_RECORD_BYTES_MAX);
    if let Some(record) = body.get(..length).and_then(round_trip::<StreamRecord>) {
        assert!(encode(&record).len() <= STREAM_RECORD_BYTES_MAX);
    }
}

/// A frame of a peer's control stream, if it is whole; and what follows.
pub fn next_frame(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (prefix, rest) = bytes.split_first_chunk::<FRAME_PREFIX_BYTES>()?;
    let length = body_length(*prefix, CONTROL_FRAME_BYTES_MAX).ok()?;
    rest.split_at_checked(length)
}

fn sample_index() -> IncrementIndex {
    IncrementIndex {
        manifest: digest(b"manifest"),
        rank: Rank::new(3),
        base: IncrementBase {
            run: RunId::new(2),
            step: Step::new(40),
            manifest: digest(b"base"),
        },
        depth: 2,
        ends: vec![24, 100, 4096],
        digests: vec![digest(b"a"), digest(b"b"), digest(b"c")],
    }
}

fn sample_provenance() -> Provenance {
    let record = samples::manifest();
    Provenance {
        version: Provenance::VERSION,
        manifest: digest(b"manifest"),
        key: CheckpointKey::of(&record),
        predecessor: Some(DurableStep {
            run: record.run,
            step: record.step,
            manifest: digest(b"before"),
        }),
        increments: vec![IndexDigest {
            rank: Rank::new(0),
            digest: digest(b"index"),
        }],
    }
}

/// One input of each record, as its encoder makes it.
pub fn record_seeds() -> Inputs {
    let mut all: Vec<(u8, Vec<u8>)> = Vec::new();
    all.extend(samples::requests().iter().map(|one| (0, encode(one))));
    all.extend(samples::replies().iter().map(|one| (1, encode(one))));
    let messages = samples::checkpoint_messages().into_iter();
    let messages = messages.chain(samples::session_messages());
    all.extend(messages.map(|one| (2, encode(&one))));
    all.push((3, encode(&samples::plan())));
    all.push((4, encode(&samples::manifest())));
    let index = sample_index().to_object();
    all.push((5, index[..index.len() - 32].to_vec()));
    all.push((6, sample_provenance().to_object(&some_key())));
    all.push((6, encode(&sample_provenance())));
    all.extend(kept_records().iter().map(|one| (7, encode(one))));
    all.extend(kept_records().iter().map(|one| (9, encode(&one.name()))));
    let owner = storaged_wire::Owner::of_token(b"t");
    let claim = RunClaim::new(samples::namespace(), owner, RunId::new(7));
    all.push((8, encode(&claim)));
    let named = all.into_iter().enumerate().map(|(at, (which, record))| {
        let bytes = [&[which], record.as_slice()].concat();
        (format!("record-{at}"), bytes)
    });
    named.collect()
}

/// What a node keeps of a small job, from one that has saved.
fn kept_records() -> Vec<KeptRecord> {
    crate::node::kept_by_a_node()
}

/// Stream heads, sound and twisted.
pub fn stream_seeds() -> Inputs {
    let seen = Seen::default();
    let twisted = (0..8).map(|how| {
        let twist = Twist::of([how, 0, how * 30, how]);
        let record: StreamRecord = twist.twist(&samples::stream_record(), &seen);
        (
            format!("stream-{how}"),
            storaged_wire::framing::frame(&record),
        )
    });
    twisted.collect()
}
