//! Work on whole manifests. A manifest of ten thousand ranks with its schema has megabytes; encoded, digested or parsed where
//! decisions are made it would keep a node from hearing anybody for ten milliseconds, one of a hundred thousand ranks for longer
//! than links wait. The core asks for it and goes on; each piece is a pure function of what it was given.

use std::sync::Arc;

use storaged_codec::digest;
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{
    Digest, Enclosure, Manifest, ManifestBytes, ManifestError, SharedBytes, WireError, decode,
    encode,
};
use thiserror::Error;

use crate::api::RequestId;

/// What is to be prepared, by [`Preparation::run`], on any thread.
#[derive(Debug, Clone)]
pub enum Preparation {
    /// Seal the manifest of a checkpoint of which everything has been heard, and encode what its nodes are told.
    Seal {
        key: CheckpointKey,
        manifest: Box<Manifest>,
        durable: DurableWish,
    },
    /// Digest what a trainer says of a step, which waits for the answer.
    Describe {
        id: RequestId,
        key: CheckpointKey,
        description: GivenDescription,
    },
    /// Read a parcel that has come as a whole.
    Open { parcel: Digest, bytes: SharedBytes },
}

/// The result.
#[derive(Debug, Clone)]
pub enum Prepared {
    /// Of [`Preparation::Seal`].
    Sealed {
        key: CheckpointKey,
        outcome: Result<SealedCommit, ManifestError>,
    },
    /// Of [`Preparation::Describe`].
    Described {
        id: RequestId,
        key: CheckpointKey,
        description: NamedDescription,
    },
    /// Of [`Preparation::Open`].
    Opened {
        parcel: Digest,
        bytes: SharedBytes,
        outcome: Result<ParcelContents, ParcelFault>,
    },
}

/// What a trainer says of a step beside its shards.
#[derive(Debug, Clone)]
pub struct GivenDescription {
    pub schema: SharedBytes,
    pub torch_metadata: SharedBytes,
    pub durable: DurableWish,
}

/// The same, and the names of schema and torch metadata.
#[derive(Debug, Clone)]
pub struct NamedDescription {
    pub given: GivenDescription,
    pub names: [Enclosure; 2],
}

impl GivenDescription {
    /// As a trainer gives it.
    pub fn new(
        schema: impl Into<SharedBytes>,
        torch_metadata: impl Into<SharedBytes>,
        durable: DurableWish,
    ) -> Self {
        Self {
            schema: schema.into(),
            torch_metadata: torch_metadata.into(),
            durable,
        }
    }

    /// Bytes to digest.
    pub fn length(&self) -> usize {
        self.schema.len() + self.torch_metadata.len()
    }

    /// Digests them.
    pub fn named(self) -> NamedDescription {
        let names = [&self.schema, &self.torch_metadata].map(|bytes| Enclosure::of(bytes));
        NamedDescription { given: self, names }
    }
}

/// A manifest, and the parcel in which its nodes hear of it.
#[derive(Debug, Clone)]
pub struct SealedCommit {
    pub manifest: Arc<ManifestBytes>,
    pub durable: DurableWish,
    pub notice: SharedBytes,
    pub notice_name: Digest,
}

/// What a parcel says.
#[derive(Debug, Clone)]
pub enum ParcelContents {
    /// A checkpoint has committed.
    Commit {
        manifest: Arc<ManifestBytes>,
        durable: DurableWish,
    },
    /// The answer to whoever asked for a manifest; none if it is not a sound one.
    Manifest {
        query: Option<u64>,
        manifest: Option<Arc<ManifestBytes>>,
    },
    /// Any other message.
    Message(Box<PeerMessage>),
}

/// Why a parcel is not heard.
#[derive(Debug, Clone, Error)]
pub enum ParcelFault {
    /// It is not what was told of.
    #[error("sent bytes that have another digest than the parcel that was told of")]
    Digest,
    /// A parcel in a parcel would be a way to keep a node busy.
    #[error("sent a parcel that holds another one")]
    Nested,
    /// No message.
    #[error(transparent)]
    Unreadable(#[from] WireError),
    /// A commit without a sound manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

impl Preparation {
    /// Does it.
    pub fn run(self) -> Prepared {
        match self {
            Self::Seal {
                key,
                manifest,
                durable,
            } => {
                let outcome = SealedCommit::new(*manifest, durable);
                Prepared::Sealed { key, outcome }
            }
            Self::Describe {
                id,
                key,
                description,
            } => Prepared::Described {
                id,
                key,
                description: description.named(),
            },
            Self::Open { parcel, bytes } => {
                let outcome = open(parcel, &bytes);
                Prepared::Opened {
                    parcel,
                    bytes,
                    outcome,
                }
            }
        }
    }
}

impl SealedCommit {
    fn new(manifest: Manifest, durable: DurableWish) -> Result<Self, ManifestError> {
        let manifest = manifest.seal()?;
        let notice: SharedBytes = encode(&PeerMessage::Committed {
            manifest: manifest.shared(),
            durable,
        })
        .into();
        Ok(Self {
            manifest: Arc::new(manifest),
            durable,
            notice_name: digest(&notice),
            notice,
        })
    }
}

fn open(parcel: Digest, bytes: &[u8]) -> Result<ParcelContents, ParcelFault> {
    if digest(bytes) != parcel {
        return Err(ParcelFault::Digest);
    }
    match decode::<PeerMessage>("message", bytes)? {
        PeerMessage::Parcel { .. } | PeerMessage::ParcelPage { .. } => Err(ParcelFault::Nested),
        PeerMessage::Committed { manifest, durable } => {
            let manifest = Arc::new(ManifestBytes::parse(manifest)?);
            Ok(ParcelContents::Commit { manifest, durable })
        }
        PeerMessage::ManifestAnswer { query, manifest } => {
            let manifest = manifest.and_then(|bytes| ManifestBytes::parse(bytes).ok());
            Ok(ParcelContents::Manifest {
                query,
                manifest: manifest.map(Arc::new),
            })
        }
        other => Ok(ParcelContents::Message(Box::new(other))),
    }
}
