//! Records that storaged sends, stores and shares. No I/O: types, their bytes, and the checks on both.
//!
//! Order of reading: `ids` (the nouns), `run` (a number and an identity), `state`, `manifest` (what a checkpoint is), `enclosure` (what it names beside its shards), `provenance` (who wrote it), `succession` (a job's token is changed), `local` (trainer and daemon),
//! `peer` (daemon and daemon), `kept` (daemon and the next one on its node), `shape` (of a session), `verdict` (on a restart), `failed` (steps that restarts have failed from), `pins` (steps that stay in RAM), `drain` (a node ends in order), `refusal` (what a caller is told when something cannot be done), `framing`.
//! Every record is CBOR with explicit field numbers; numbers are never reused.

#![forbid(unsafe_code)]

mod blocks;
pub mod claim;
pub mod drain;
pub mod enclosure;
pub mod failed;
pub mod framing;
pub mod ids;
pub mod increment;
pub mod kept;
pub mod local;
pub mod manifest;
pub mod peer;
pub mod pins;
pub mod plan;
pub mod provenance;
mod ranges;
pub mod refusal;
pub mod run;
pub mod shape;
mod shared;
mod shared_table;
pub mod state;
pub mod succession;
pub mod verdict;

pub use enclosure::{
    DescribedManifest, Enclosed, Enclosure, EnclosureError, Enclosures, EnclosuresHeld,
};
pub use framing::{WireError, decode, encode};
pub use ids::{
    Generation, IdError, NAME_BYTES_MAX, Namespace, NodeName, Owner, Rank, SessionId, SlotId, Step,
    TenantName, WorldSize,
};
pub use increment::{IncrementBase, IncrementIndex};
pub use kept::{
    KeptCheckpoint, KeptDamage, KeptDescription, KeptNamespace, KeptParity, KeptRecord, KeptShard,
    KeptTable, RecordName,
};
pub use manifest::{Manifest, ManifestBytes, ManifestError, OnNode, ShardEntry};
pub use provenance::{DurableStep, ManifestKey, Provenance, ProvenanceError};
pub use refusal::{Refusal, RefusalCode};
pub use run::{RunId, RunIdError};
pub use shared::SharedBytes;
pub use shared_table::SharedTable;
pub use state::{CheckpointState, UnknownState};
pub use storaged_codec::{ChunkSize, Digest, Fingerprint, Geometry};
pub use succession::{ConsentKey, JobKeys, Rotation, Succession};
