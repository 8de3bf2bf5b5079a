//! Who wrote a checkpoint in the durable tier, and what came before it there: a record with a MAC under a key that is made of the job's
//! token. Whoever may write in the tier and has no token can make everything else that a checkpoint consists of.

use std::fmt;

use minicbor::bytes::ByteArray;
use minicbor::{Decode, Encode};
use storaged_codec::Digest;
use thiserror::Error;

use crate::framing::{WireError, decode, encode_to};
use crate::ids::{Namespace, Owner, Rank, Step};
use crate::peer::{CheckpointKey, HighMark};
use crate::run::RunId;
use crate::succession::RetiredKey;

/// Bytes of a key and of a MAC.
const MAC_BYTES: usize = 32;

/// Room for a record without increments and its MAC, and for one of them.
const OBJECT_BYTES: usize = 512;
const INCREMENT_BYTES: usize = 40;

/// The key of a job's MACs: from its token and its name, so that one token of two jobs does not let a checkpoint pass from one to the
/// other. It is a secret: its text is not that of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub struct ManifestKey(#[n(0)] ByteArray<MAC_BYTES>);

impl ManifestKey {
    /// The key of whoever holds `token`. That of an empty token everybody can make.
    pub fn of_token(namespace: &Namespace, token: &[u8]) -> Self {
        let context = "storaged 2026-11 job token manifest key";
        Self(ByteArray::from(token_key(context, namespace, token)))
    }

    pub(crate) fn mac(&self, bytes: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, bytes)
    }
}

/// A key of whoever holds `token`, other for each context.
pub(crate) fn token_key(context: &str, namespace: &Namespace, token: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    // No name has a zero byte: no two pairs give the same bytes.
    hasher.update(namespace.as_str().as_bytes());
    hasher.update(&[0]);
    hasher.update(token);
    *hasher.finalize().as_bytes()
}

impl fmt::Debug for ManifestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ManifestKey(..)")
    }
}

/// A checkpoint that was durable before another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct DurableStep {
    /// Its run.
    #[n(0)]
    pub run: RunId,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// Its name.
    #[n(2)]
    pub manifest: Digest,
}

impl DurableStep {
    /// Its place among the checkpoints of its job.
    pub fn mark(&self) -> HighMark {
        HighMark {
            run: self.run,
            step: self.step,
        }
    }
}

/// The index of an increment, which says how bytes of the tier are taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct IndexDigest {
    /// Whose shard it is of.
    #[n(0)]
    pub rank: Rank,
    /// Digest of the whole object.
    #[n(1)]
    pub digest: Digest,
}

/// What a checkpoint in the durable tier is.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Provenance {
    /// Format version, [`Provenance::VERSION`].
    #[n(0)]
    pub version: u16,
    /// Its manifest.
    #[n(1)]
    pub manifest: Digest,
    /// Where it lies: a copy in another folder is none.
    #[n(2)]
    pub key: CheckpointKey,
    /// The newest that was durable when it was published; none for the first.
    #[n(3)]
    pub predecessor: Option<DurableStep>,
    /// Indices of its increments, by rank; none where all shards stand alone.
    #[n(4)]
    pub increments: Vec<IndexDigest>,
}

/// Bytes that claim to be a checkpoint's provenance, and are not.
#[derive(Debug, Error)]
pub enum ProvenanceError {
    /// Shorter than a MAC.
    #[error("expected a provenance of more than {MAC_BYTES} bytes, got {0}")]
    Short(usize),
    /// Not written by whoever has the key.
    #[error(
        "its MAC is not that of this job's token: it was forged or changed, or belongs to another job"
    )]
    Forged,
    /// Not the record.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A version of the future.
    #[error(
        "provenance version must be {expected}, got {got}: use a storaged release that knows it"
    )]
    Version { expected: u16, got: u16 },
    /// By a token that was changed for another one, and newer than what was durable then.
    #[error(
        "its MAC is that of a token that was changed before run {run} step {step}: whoever had that token made it"
    )]
    Retired { run: RunId, step: Step },
    /// That of another checkpoint of the job.
    #[error("it is that of run {run} step {step}, manifest {manifest}")]
    Another {
        run: RunId,
        step: Step,
        manifest: Digest,
    },
}

impl Provenance {
    /// The version that this code writes and reads.
    pub const VERSION: u16 = 1;

    /// The object: the record, then the MAC of its bytes.
    pub fn to_object(&self, key: &ManifestKey) -> Vec<u8> {
        let mut object = Vec::with_capacity(OBJECT_BYTES + self.increments.len() * INCREMENT_BYTES);
        encode_to(self, &mut object);
        let mac = key.mac(&object);
        object.extend_from_slice(mac.as_bytes());
        object
    }

    /// Reads an object, once its MAC was compared.
    ///
    /// # Errors
    /// [`ProvenanceError`] that says what is wrong.
    pub fn from_object(object: &[u8], key: &ManifestKey) -> Result<Self, ProvenanceError> {
        let (bytes, mac) = object
            .split_last_chunk::<MAC_BYTES>()
            .ok_or(ProvenanceError::Short(object.len()))?;
        // Compared in constant time.
        if key.mac(bytes) != blake3::Hash::from_bytes(*mac) {
            return Err(ProvenanceError::Forged);
        }
        let record: Self = decode("provenance", bytes)?;
        let (expected, got) = (Self::VERSION, record.version);
        if expected != got {
            return Err(ProvenanceError::Version { expected, got });
        }
        Ok(record)
    }

    /// Itself if it is that of this very checkpoint.
    ///
    /// # Errors
    /// [`ProvenanceError::Another`] says whose it is.
    pub fn for_checkpoint(
        self,
        manifest: Digest,
        place: &CheckpointKey,
    ) -> Result<Self, ProvenanceError> {
        if self.manifest == manifest && self.key == *place {
            return Ok(self);
        }
        Err(ProvenanceError::Another {
            run: self.key.run,
            step: self.key.step,
            manifest: self.manifest,
        })
    }

    /// The digest that the index of a rank's increment must have.
    pub fn index_of(&self, rank: Rank) -> Option<Digest> {
        let found = self.increments.iter().find(|one| one.rank == rank);
        found.map(|one| one.digest)
    }
}

/// A node is to publish a job's checkpoint, and has had none of its trainers.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeyWanted {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
}

/// The answer of a node that a trainer of the job gave its token to.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeyTold {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// The key.
    #[n(2)]
    pub key: ManifestKey,
    /// Keys of tokens that were changed; none of releases that do not know of it.
    #[n(3)]
    pub retired: Option<Vec<RetiredKey>>,
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;

    use super::*;

    fn job(name: &str) -> Namespace {
        Namespace::new(name).unwrap()
    }

    fn provenance() -> Provenance {
        let run = RunId::with_identity(7, 0xa6);
        Provenance {
            version: Provenance::VERSION,
            manifest: digest(b"m"),
            key: CheckpointKey {
                namespace: job("job"),
                run,
                step: Step::new(20),
            },
            predecessor: Some(DurableStep {
                run,
                step: Step::new(10),
                manifest: digest(b"before"),
            }),
            increments: vec![IndexDigest {
                rank: Rank::new(3),
                digest: digest(b"index"),
            }],
        }
    }

    fn read(object: &[u8], key: &ManifestKey) -> Result<Provenance, ProvenanceError> {
        let it = provenance();
        Provenance::from_object(object, key)?.for_checkpoint(it.manifest, &it.key)
    }

    #[test]
    fn a_provenance_is_read_by_its_job_alone_and_its_bytes_are_pinned() {
        let key = ManifestKey::of_token(&job("job"), b"secret");
        let object = provenance().to_object(&key);
        let read_back = read(&object, &key).unwrap();
        assert_eq!(read_back, provenance());
        assert_eq!(read_back.index_of(Rank::new(3)), Some(digest(b"index")));
        assert_eq!(read_back.index_of(Rank::new(2)), None);
        for (name, token) in [("job", "secret2"), ("job2", "secret"), ("job", "")] {
            let other = ManifestKey::of_token(&job(name), token.as_bytes());
            let fault = read(&object, &other).unwrap_err();
            assert!(matches!(fault, ProvenanceError::Forged), "{name}: {fault}");
        }
        let pinned = digest(&object).to_string();
        assert_eq!(
            pinned, "92ccae5cb6e4e59a1e9a24ff91ee6fbae224fee2784eb1d52fb237fc1cbcf7e8",
            "readers of other releases know these bytes"
        );
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_seen() {
        let key = ManifestKey::of_token(&job("job"), b"secret");
        let object = provenance().to_object(&key);
        for bit in 0..object.len() * 8 {
            let mut changed = object.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(read(&changed, &key), Err(ProvenanceError::Forged)),
                "bit {bit}"
            );
        }
        for length in 0..object.len() {
            assert!(read(&object[..length], &key).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn that_of_another_step_or_manifest_is_named() {
        let key = ManifestKey::of_token(&job("job"), b"secret");
        let mut newer = provenance();
        newer.key.step = Step::new(30);
        let mut other = provenance();
        other.manifest = digest(b"other");
        for another in [newer, other] {
            let fault = read(&another.to_object(&key), &key).unwrap_err();
            assert!(matches!(fault, ProvenanceError::Another { .. }), "{fault}");
        }
        let mut later = provenance();
        later.version += 1;
        let fault = read(&later.to_object(&key), &key).unwrap_err();
        assert!(matches!(fault, ProvenanceError::Version { .. }), "{fault}");
    }

    #[test]
    fn a_key_shows_nothing_of_itself() {
        let key = ManifestKey::of_token(&job("job"), b"secret");
        assert_eq!(format!("{key:?}"), "ManifestKey(..)");
        let told = KeyTold {
            namespace: job("job"),
            owner: Owner::of_token(b"secret"),
            key,
            retired: None,
        };
        assert!(format!("{told:?}").contains("ManifestKey(..)"));
    }
}
