//! Enclosures: the schema and the torch metadata of a checkpoint, which its manifest names and does not carry. They are
//! megabytes in a large job and mostly the same at every step; every node gets the manifest, few have any use for these.

use std::ops::Deref;

use minicbor::data::Type;
use minicbor::decode::{Decoder, Error as DecodeError};
use minicbor::encode::{Encoder, Error as EncodeError, Write};
use minicbor::{Decode, Encode};
use storaged_codec::{Digest, digest};
use thiserror::Error;

use crate::manifest::{Manifest, ManifestBytes, ManifestError};
use crate::shared::SharedBytes;

/// Bytes by their name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct Enclosure {
    /// Plain BLAKE3 of the bytes.
    #[n(0)]
    pub digest: Digest,
    /// How many; 0 where there are none.
    #[n(1)]
    pub length: u64,
}

/// Bytes that are not what a manifest names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("expected {} bytes of digest {}, got {} of {}", expected.length, expected.digest, got.length, got.digest)]
pub struct EnclosureError {
    pub expected: Enclosure,
    pub got: Enclosure,
}

impl Enclosure {
    /// The name of these bytes. It digests them: megabytes take milliseconds.
    pub fn of(bytes: &[u8]) -> Self {
        Self {
            digest: digest(bytes),
            length: bytes.len() as u64,
        }
    }

    /// Whether nothing is enclosed.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Checks that bytes are the named ones.
    ///
    /// # Errors
    /// [`EnclosureError`] if they are not.
    pub fn prove(self, bytes: &[u8]) -> Result<(), EnclosureError> {
        let got = Self::of(bytes);
        let expected = self;
        if got == expected {
            Ok(())
        } else {
            Err(EnclosureError { expected, got })
        }
    }
}

/// How a manifest has its schema or its torch metadata.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Enclosed {
    /// In its own bytes: versions 1 and 2.
    Inline(SharedBytes),
    /// By name: from version 3 on.
    Named(Enclosure),
}

impl Enclosed {
    /// Nothing, as manifests of today say it.
    pub fn nothing() -> Self {
        Self::naming(&[])
    }

    /// These bytes, by name.
    pub fn naming(bytes: &[u8]) -> Self {
        Self::Named(Enclosure::of(bytes))
    }

    /// What must be fetched; none where there is nothing or it is carried.
    pub fn to_fetch(&self) -> Option<Enclosure> {
        match self {
            Self::Inline(_) => None,
            Self::Named(enclosure) => Some(*enclosure).filter(|it| !it.is_empty()),
        }
    }

    /// The bytes, of which those that are named are given.
    fn resolve(&self, given: &SharedBytes) -> Result<SharedBytes, EnclosureError> {
        match self {
            Self::Inline(bytes) => Ok(bytes.clone()),
            Self::Named(enclosure) => enclosure.prove(given).map(|()| given.clone()),
        }
    }
}

impl<C> Encode<C> for Enclosed {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        match self {
            Self::Inline(bytes) => bytes.encode(encoder, context),
            Self::Named(enclosure) => enclosure.encode(encoder, context),
        }
    }
}

impl<'b, C> Decode<'b, C> for Enclosed {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, DecodeError> {
        match decoder.datatype()? {
            Type::Bytes => SharedBytes::decode(decoder, context).map(Self::Inline),
            _ => Enclosure::decode(decoder, context).map(Self::Named),
        }
    }
}

/// Both, whole.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Enclosures {
    /// The framework's own description of the tensors.
    pub schema: SharedBytes,
    /// The `.metadata` object for stock PyTorch readers, compressed.
    pub torch_metadata: SharedBytes,
}

impl Enclosures {
    /// Those of a manifest: what it carries itself, and of what was given that which it names.
    ///
    /// # Errors
    /// [`EnclosureError`] if what was given is not what it names.
    pub fn of(manifest: &Manifest, given: &Self) -> Result<Self, EnclosureError> {
        Ok(Self {
            schema: manifest.schema.resolve(&given.schema)?,
            torch_metadata: manifest.torch_metadata.resolve(&given.torch_metadata)?,
        })
    }
}

/// A manifest and all that it encloses, verified: what a reader works with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DescribedManifest {
    manifest: ManifestBytes,
    enclosures: Enclosures,
}

impl DescribedManifest {
    /// Reads the bytes of a manifest that must have the name `expected`, with what was given along.
    ///
    /// # Errors
    /// [`ManifestError`] if it is not sound, or what was given is not what it names.
    pub fn verify(
        bytes: impl Into<SharedBytes>,
        given: &Enclosures,
        expected: Digest,
    ) -> Result<Self, ManifestError> {
        let manifest = ManifestBytes::verify(bytes, expected)?;
        let enclosures = Enclosures::of(manifest.manifest(), given)?;
        Ok(Self {
            manifest,
            enclosures,
        })
    }

    /// The framework's own description of the tensors.
    pub fn schema(&self) -> &SharedBytes {
        &self.enclosures.schema
    }

    /// The `.metadata` object for stock PyTorch readers, compressed.
    pub fn torch_metadata(&self) -> &SharedBytes {
        &self.enclosures.torch_metadata
    }
}

impl Deref for DescribedManifest {
    type Target = ManifestBytes;

    fn deref(&self) -> &ManifestBytes {
        &self.manifest
    }
}

/// Whether a node holds all that a manifest encloses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Encode, Decode)]
#[cbor(index_only)]
pub enum EnclosuresHeld {
    /// It does not.
    #[default]
    #[n(0)]
    NotAll,
    /// It does; also where there is nothing to hold.
    #[n(1)]
    All,
}
