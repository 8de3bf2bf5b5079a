//! What a node remembers of its memory where that outlives the daemon: the records that make kept slots and parity usable for the
//! daemon that starts next. Each has a name; a later record of a name takes the place of the earlier one.
//!
//! The bytes that they speak of are checked by the digests and fingerprints in them, whoever reads them.

use minicbor::{Decode, Encode};
use storaged_codec::{ChunkSize, Digest, Fingerprint};

use crate::enclosure::Enclosure;
use crate::failed::FailedRestart;
use crate::ids::{Namespace, Owner, Rank, SlotId, Step, WorldSize};
use crate::local::DurableWish;
use crate::peer::{CheckpointKey, HighMark, Lane, OrderKey};
use crate::pins::Pin;
use crate::provenance::{DurableStep, ManifestKey};
use crate::run::RunId;
use crate::shared::SharedBytes;
use crate::state::CheckpointState;
use crate::succession::{RetiredKey, Succession};

/// The name of a record.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub enum RecordName {
    /// [`KeptNamespace`].
    #[n(0)]
    Namespace(#[n(0)] Namespace),
    /// A manifest, by its digest.
    #[n(1)]
    Manifest(#[n(0)] Digest),
    /// A schema or torch metadata, by its digest.
    #[n(2)]
    Enclosure(#[n(0)] Digest),
    /// [`KeptTable`].
    #[n(3)]
    Table(#[n(0)] CheckpointKey, #[n(1)] Rank),
    /// [`KeptCheckpoint`].
    #[n(4)]
    Checkpoint(#[n(0)] CheckpointKey),
    /// Where the chunks of a parity set lie, by its number: the daemon's own, the decisions know nothing of it.
    #[n(5)]
    Parity(#[n(0)] u64),
}

/// A record.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum KeptRecord {
    /// What is known of a job.
    #[n(0)]
    Namespace(#[n(0)] Box<KeptNamespace>),
    /// The bytes of a manifest.
    #[n(1)]
    Manifest(#[n(0)] Digest, #[n(1)] SharedBytes),
    /// The bytes of a schema or of torch metadata.
    #[n(2)]
    Enclosure(#[n(0)] Digest, #[n(1)] SharedBytes),
    /// Digests of a shard's chunks.
    #[n(3)]
    Table(#[n(0)] KeptTable),
    /// What is held of a checkpoint.
    #[n(4)]
    Checkpoint(#[n(0)] KeptCheckpoint),
}

impl KeptRecord {
    /// Its name.
    pub fn name(&self) -> RecordName {
        match self {
            Self::Namespace(it) => RecordName::Namespace(it.namespace.clone()),
            Self::Manifest(name, _) => RecordName::Manifest(*name),
            Self::Enclosure(name, _) => RecordName::Enclosure(*name),
            Self::Table(it) => RecordName::Table(it.key.clone(), it.rank),
            Self::Checkpoint(it) => RecordName::Checkpoint(it.key.clone()),
        }
    }
}

/// A job as the node knows it: above all which runs it has fenced off and promised, which it must not forget.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptNamespace {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Runs below are fenced off.
    #[n(2)]
    pub fence: RunId,
    /// The highest run that was promised to whoever opens it, here or at a peer.
    #[n(3)]
    pub promised: RunId,
    /// The highest that this node has promised.
    #[n(4)]
    pub granted: RunId,
    /// The highest checkpoint known to have been protected.
    #[n(5)]
    pub mark: Option<HighMark>,
    /// Up to here the job's checkpoints have left RAM for another job, or were dropped.
    #[n(6)]
    pub evicted: Option<HighMark>,
    /// Steps that restarts have failed from; none if there are none.
    #[n(7)]
    pub failed: Option<Vec<FailedRestart>>,
    /// The highest checkpoint of which this node has copied a shard to the durable tier.
    #[n(8)]
    pub copied: Option<HighMark>,
    /// The key of its MACs in the durable tier, if one of its trainers was here.
    #[n(9)]
    pub manifest_key: Option<ManifestKey>,
    /// The newest checkpoint known to have been durable.
    #[n(10)]
    pub durable: Option<DurableStep>,
    /// The newest of them known to have a MAC.
    #[n(11)]
    pub with_mac: Option<DurableStep>,
    /// By which token it is opened, if not by its first.
    #[n(12)]
    pub succession: Option<Box<Succession>>,
    /// Keys of tokens that were changed, behind `manifest_key`.
    #[n(13)]
    pub retired_keys: Option<Vec<RetiredKey>>,
    /// Steps that are pinned in RAM; none if there are none.
    #[n(14)]
    pub pins: Option<Vec<Pin>>,
    /// The key of the orders that its token gives, if that was said here.
    #[n(15)]
    pub order_key: Option<OrderKey>,
    /// Copies in the durable tier that this node found damaged and of which the tier took no mark, the last of them, oldest first; none if
    /// there are none.
    #[n(16)]
    pub damaged: Option<Vec<KeptDamage>>,
}

/// A copy of a checkpoint in the durable tier that this node found damaged.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptDamage {
    /// The checkpoint's manifest.
    #[n(0)]
    pub manifest: Digest,
    /// Its run.
    #[n(1)]
    pub run: RunId,
    /// Its step.
    #[n(2)]
    pub step: Step,
    /// What was found.
    #[n(3)]
    pub reason: String,
}

/// Digests and fingerprints of the chunks of one shard: of this node, or of one that it codes for.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptTable {
    /// The checkpoint.
    #[n(0)]
    pub key: CheckpointKey,
    /// The rank whose shard it is.
    #[n(1)]
    pub rank: Rank,
    /// One digest per chunk; none where only fingerprints are known.
    #[n(2)]
    pub leaves: Vec<Digest>,
    /// One fingerprint per chunk; none where they are not known.
    #[n(3)]
    pub prints: Vec<Fingerprint>,
}

/// What the node holds of one checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptCheckpoint {
    /// The checkpoint.
    #[n(0)]
    pub key: CheckpointKey,
    /// Whom its job belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Its ranks.
    #[n(2)]
    pub world_size: WorldSize,
    /// Its manifest, once committed.
    #[n(3)]
    pub manifest: Option<Digest>,
    /// How safe the node knows it to be.
    #[n(4)]
    pub state: CheckpointState,
    /// Whether it must reach the durable tier.
    #[n(5)]
    pub durable: DurableWish,
    /// Shards in slots.
    #[n(6)]
    pub shards: Vec<KeptShard>,
    /// Parity sets.
    #[n(7)]
    pub parity: Vec<KeptParity>,
    /// What a trainer here said of it, before it was committed.
    #[n(8)]
    pub description: Option<KeptDescription>,
}

/// A shard in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptShard {
    /// Whose shard.
    #[n(0)]
    pub rank: Rank,
    /// Where it is.
    #[n(1)]
    pub slot: SlotId,
    /// Bytes of the slot.
    #[n(2)]
    pub capacity: u64,
    /// Bytes of the shard.
    #[n(3)]
    pub length: u64,
    /// Size of its chunks.
    #[n(4)]
    pub chunk: ChunkSize,
}

/// A parity set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptParity {
    /// Of which lane.
    #[n(0)]
    pub lane: Lane,
    /// Which of its parities.
    #[n(1)]
    pub index: u32,
    /// Its number at this node.
    #[n(2)]
    pub set: u64,
}

/// Schema and metadata that a trainer gave for a step that is not committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeptDescription {
    /// Its schema.
    #[n(0)]
    pub schema: Enclosure,
    /// Its torch metadata.
    #[n(1)]
    pub torch_metadata: Enclosure,
    /// Whether it must reach the durable tier.
    #[n(2)]
    pub durable: DurableWish,
    /// The epoch whose groups code it; 1 without.
    #[n(3)]
    pub epoch: Option<u64>,
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;

    use super::*;
    use crate::framing::{decode, encode};

    fn kept_job(key: &CheckpointKey) -> KeptNamespace {
        let (run, step) = (key.run, key.step);
        KeptNamespace {
            namespace: key.namespace.clone(),
            owner: Owner::of_token(b"t"),
            fence: run,
            promised: run,
            granted: RunId::ZERO,
            mark: Some(HighMark { run, step }),
            evicted: None,
            failed: Some(vec![FailedRestart {
                run,
                step,
                times: 2,
                wait_ms: Some(1_200_000),
                changes: 2,
            }]),
            copied: Some(HighMark { run, step }),
            manifest_key: Some(ManifestKey::of_token(&key.namespace, b"t")),
            durable: Some(DurableStep {
                run,
                step,
                manifest: digest(b"m"),
            }),
            with_mac: None,
            succession: None,
            retired_keys: None,
            order_key: Some(OrderKey::of_token(&key.namespace, b"t")),
            pins: Some(vec![Pin {
                run,
                step,
                pinned: true,
                changes: 1,
                doubt: None,
            }]),
            damaged: None,
        }
    }

    fn some_key() -> CheckpointKey {
        CheckpointKey {
            namespace: Namespace::new("job").unwrap(),
            run: RunId::with_identity(7, 0xa6),
            step: Step::new(3),
        }
    }

    /// Without it the record is what it was before there was such a field.
    #[test]
    fn what_was_found_damaged_makes_the_round_trip_and_is_left_out_where_nothing_was() {
        let without = kept_job(&some_key());
        let with = KeptNamespace {
            damaged: Some(vec![KeptDamage {
                manifest: digest(b"m"),
                run: RunId::new(7),
                step: Step::new(3),
                reason: "digest mismatch in chunk 1".into(),
            }]),
            ..without.clone()
        };
        for job in [&with, &without] {
            let read = decode::<KeptNamespace>("kept job", &encode(job)).unwrap();
            assert_eq!(read, *job);
        }
        // An array's head says how many fields there are: 16 and 17.
        assert_eq!((encode(&without)[0], encode(&with)[0]), (0x90, 0x91));
    }

    #[test]
    fn records_make_the_round_trip_and_their_bytes_are_pinned() {
        let key = some_key();
        let of_job = kept_job(&key);
        let table = KeptTable {
            key: key.clone(),
            rank: Rank::new(1),
            leaves: vec![digest(b"a")],
            prints: vec![Fingerprint::ZERO],
        };
        let held = KeptCheckpoint {
            key,
            owner: Owner::of_token(b"t"),
            world_size: WorldSize::new(2).unwrap(),
            manifest: Some(digest(b"m")),
            state: CheckpointState::Protected,
            durable: DurableWish::Policy,
            shards: vec![KeptShard {
                rank: Rank::new(1),
                slot: SlotId::new(9),
                capacity: 4096,
                length: 5,
                chunk: ChunkSize::new(4096).unwrap(),
            }],
            parity: vec![KeptParity {
                lane: Lane { group: 0, index: 1 },
                index: 1,
                set: 4,
            }],
            description: None,
        };
        let records = [
            KeptRecord::Namespace(Box::new(of_job)),
            KeptRecord::Manifest(digest(b"m"), vec![1, 2].into()),
            KeptRecord::Enclosure(digest(b"e"), vec![].into()),
            KeptRecord::Table(table),
            KeptRecord::Checkpoint(held),
        ];
        for record in &records {
            let bytes = encode(record);
            assert_eq!(
                decode::<KeptRecord>("kept record", &bytes).unwrap(),
                *record
            );
            let name = encode(&record.name());
            assert_eq!(
                decode::<RecordName>("kept name", &name).unwrap(),
                record.name()
            );
        }
        let entries = records.iter().map(|it| (encode(&it.name()), encode(it)));
        let pinned: Vec<String> = entries
            .map(|(name, record)| digest(&[name, record].concat()).to_string())
            .collect();
        assert_eq!(
            pinned,
            include_str!("../golden/kept-v1.digests")
                .lines()
                .collect::<Vec<_>>(),
            "a record that is laid out anew needs another version of the journal"
        );
    }
}
