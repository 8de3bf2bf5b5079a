//! The manifest: what a checkpoint is, whole and immutable, named by the digest of its bytes.

use std::collections::{BTreeMap, BTreeSet};

use minicbor::{Decode, Encode};
use storaged_codec::{ChunkSize, Digest, Geometry, digest};
use thiserror::Error;

use crate::enclosure::{Enclosed, Enclosure, EnclosureError};
use crate::framing::{WireError, decode, encode};
use crate::ids::{Namespace, NodeName, Owner, Rank, Step, WorldSize};
use crate::run::RunId;
use crate::shared::SharedBytes;

/// One rank's shard.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ShardEntry {
    /// Whose bytes they are.
    #[n(0)]
    pub rank: Rank,
    /// The node that sealed them.
    #[n(1)]
    pub node: NodeName,
    /// Bytes.
    #[n(2)]
    pub length: u64,
    /// Root of the digest tree over the chunks.
    #[n(3)]
    pub root: Digest,
}

/// Nodes that share stripes at commit time: data nodes in coding order, then coding nodes.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct GroupEntry {
    /// At most k names; missing ones at the end count as zeros.
    #[cbor(n(0), with = "crate::blocks")]
    pub data: Vec<NodeName>,
    /// Exactly m names.
    #[cbor(n(1), with = "crate::blocks")]
    pub coding: Vec<NodeName>,
}

/// All that a restore needs to know of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Manifest {
    /// Format version, [`Manifest::VERSION`].
    #[n(0)]
    pub version: u16,
    /// The job.
    #[n(1)]
    pub namespace: Namespace,
    /// Whom the namespace belongs to.
    #[n(2)]
    pub owner: Owner,
    /// The incarnation of the trainers.
    #[cbor(n(3), decode_with = "crate::run::decode_stored")]
    pub run: RunId,
    /// The training step.
    #[n(4)]
    pub step: Step,
    /// How many ranks.
    #[n(5)]
    pub world_size: WorldSize,
    /// Version of the group membership below.
    #[n(6)]
    pub epoch: u64,
    /// k and m.
    #[n(7)]
    pub geometry: Geometry,
    /// Size of a chunk.
    #[n(8)]
    pub chunk: ChunkSize,
    /// One entry per rank, in rank order.
    #[n(9)]
    pub shards: Vec<ShardEntry>,
    /// The groups that protect the shards; empty where the cluster is too small to protect.
    #[n(10)]
    pub groups: Vec<GroupEntry>,
    /// The framework's own description of the tensors in a typed schema, compressed; opaque here.
    #[n(11)]
    pub schema: Enclosed,
    /// The `.metadata` object for stock PyTorch readers, compressed.
    #[n(12)]
    pub torch_metadata: Enclosed,
}

/// Bytes that claim to be a manifest and are not a sound one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ManifestError {
    /// Not the record.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The digest is not the name.
    #[error("manifest digest mismatch: expected {expected}, got {got}")]
    Digest { expected: Digest, got: Digest },
    /// A version of the future or the past.
    #[error(
        "manifest version must be at most {expected}, got {got}: use a storaged release that knows it"
    )]
    Version { expected: u16, got: u16 },
    /// What was given along is not what it names.
    #[error(transparent)]
    Enclosure(#[from] EnclosureError),
    /// Fields contradict one another.
    #[error("inconsistent manifest: {0}")]
    Inconsistent(String),
}

/// A manifest with its canonical bytes, its name, and what of it is on which node: found once, so that no decision walks
/// all ranks for the few that it concerns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestBytes {
    manifest: Manifest,
    bytes: SharedBytes,
    name: Digest,
    on: BTreeMap<NodeName, OnNode>,
}

/// What a manifest places on one node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OnNode {
    /// Ranks whose shards are here, ascending.
    pub ranks: Vec<Rank>,
    /// Groups of which this is a data node, and as which of them.
    pub data: Vec<(u32, usize)>,
    /// Groups of which it is a coding node, and as which of them.
    pub coding: Vec<(u32, usize)>,
}

impl OnNode {
    /// Whether no shard and no parity belongs here: a data node of a group on which no rank is.
    pub fn is_bare(&self) -> bool {
        self.ranks.is_empty() && self.coding.is_empty()
    }
}

impl Manifest {
    /// The version that this code writes. It reads versions 1 and 2 too, which carry schema and torch metadata themselves; in
    /// version 1 runs are numbers alone.
    pub const VERSION: u16 = 3;

    /// The last version that carries schema and torch metadata.
    const INLINE_VERSION: u16 = 2;

    /// Seals the manifest: its bytes and its name.
    ///
    /// # Errors
    /// [`ManifestError::Inconsistent`] if fields contradict one another.
    pub fn seal(self) -> Result<ManifestBytes, ManifestError> {
        self.check()?;
        let bytes = encode(&self);
        let name = digest(&bytes);
        Ok(ManifestBytes {
            on: on_nodes(&self),
            manifest: self,
            bytes: bytes.into(),
            name,
        })
    }

    /// The entry of `rank`.
    pub fn shard(&self, rank: Rank) -> Option<&ShardEntry> {
        self.shards.get(rank.get() as usize)
    }

    /// What it names and does not carry, each once.
    pub fn enclosures(&self) -> impl Iterator<Item = Enclosure> {
        let (first, second) = (self.schema.to_fetch(), self.torch_metadata.to_fetch());
        let is_other = move |it: &Enclosure| Some(*it) != first;
        first.into_iter().chain(second.filter(is_other))
    }

    /// Total payload bytes; as many as there are numbers for if a manifest that was never checked says more.
    pub fn length(&self) -> u64 {
        let lengths = self.shards.iter().map(|shard| shard.length);
        lengths.fold(0, u64::saturating_add)
    }

    fn check(&self) -> Result<(), ManifestError> {
        if !(1..=Self::VERSION).contains(&self.version) {
            return Err(ManifestError::Version {
                expected: Self::VERSION,
                got: self.version,
            });
        }
        let wrong = |text: String| Err(ManifestError::Inconsistent(text));
        self.check_enclosed()?;
        if self.shards.len() != self.world_size.get() as usize {
            return wrong(format!(
                "expected {} shards, got {}",
                self.world_size,
                self.shards.len()
            ));
        }
        for (index, shard) in self.shards.iter().enumerate() {
            if shard.rank.get() as usize != index {
                return wrong(format!("expected rank {index}, got {}", shard.rank));
            }
        }
        let mut lengths = self.shards.iter().map(|shard| shard.length);
        let total = lengths.try_fold(0u64, |sum, length| sum.checked_add(length));
        if total.is_none() {
            return wrong("expected shards of less than 2^64 bytes together, got more".into());
        }
        for group in &self.groups {
            self.check_group(group)?;
        }
        Ok(())
    }

    /// A version has one form alone, or one checkpoint would have two names.
    fn check_enclosed(&self) -> Result<(), ManifestError> {
        for enclosed in [&self.schema, &self.torch_metadata] {
            let is_inline = matches!(enclosed, Enclosed::Inline(_));
            if is_inline != (self.version <= Self::INLINE_VERSION) {
                return Err(ManifestError::Inconsistent(format!(
                    "expected schema and metadata as bytes up to version {} and by name from then on, got version {} otherwise",
                    Self::INLINE_VERSION,
                    self.version
                )));
            }
            if let Enclosed::Named(enclosure) = enclosed
                && enclosure.is_empty()
                && *enclosure != Enclosure::of(&[])
            {
                return Err(ManifestError::Inconsistent(
                    "expected no bytes to have the digest of no bytes, got another one".into(),
                ));
            }
        }
        Ok(())
    }

    fn check_group(&self, group: &GroupEntry) -> Result<(), ManifestError> {
        let (k, m) = (self.geometry.k(), self.geometry.m());
        let all: BTreeSet<_> = group.data.iter().chain(&group.coding).collect();
        let sizes_hold = !group.data.is_empty() && group.data.len() <= k && group.coding.len() == m;
        if sizes_hold && all.len() == group.data.len() + m {
            return Ok(());
        }
        Err(ManifestError::Inconsistent(format!(
            "expected a group of 1 to {k} data and {m} coding nodes, all different, got {:?} and {:?}",
            group.data, group.coding
        )))
    }
}

impl ManifestBytes {
    /// Reads bytes that must have the name `expected`.
    ///
    /// # Errors
    /// [`ManifestError`] if the digest, the record or its consistency fails.
    pub fn verify(bytes: impl Into<SharedBytes>, expected: Digest) -> Result<Self, ManifestError> {
        let bytes = bytes.into();
        let got = digest(&bytes);
        if got != expected {
            return Err(ManifestError::Digest { expected, got });
        }
        Self::parse(bytes)
    }

    /// Reads bytes whose name is not known yet.
    ///
    /// # Errors
    /// [`ManifestError`] if the record or its consistency fails.
    pub fn parse(bytes: impl Into<SharedBytes>) -> Result<Self, ManifestError> {
        let bytes = bytes.into();
        let manifest: Manifest = decode("manifest", &bytes)?;
        manifest.check()?;
        let name = digest(&bytes);
        Ok(Self {
            on: on_nodes(&manifest),
            manifest,
            bytes,
            name,
        })
    }

    /// The record.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The canonical bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The same for messages: they are not copied.
    pub fn shared(&self) -> SharedBytes {
        self.bytes.clone()
    }

    /// The name: digest of the bytes.
    pub fn name(&self) -> Digest {
        self.name
    }

    /// Nodes with shards and all members of the groups, by name, and what the manifest places on them: nothing on some.
    pub fn nodes(&self) -> &BTreeMap<NodeName, OnNode> {
        &self.on
    }

    /// Ranks whose shards are on a node, ascending.
    pub fn ranks_on(&self, node: &NodeName) -> &[Rank] {
        self.on.get(node).map_or(&[], |on| &on.ranks)
    }
}

fn on_nodes(manifest: &Manifest) -> BTreeMap<NodeName, OnNode> {
    let mut on: BTreeMap<NodeName, OnNode> = BTreeMap::new();
    for shard in &manifest.shards {
        match on.get_mut(&shard.node) {
            Some(node) => node.ranks.push(shard.rank),
            None => on
                .entry(shard.node.clone())
                .or_default()
                .ranks
                .push(shard.rank),
        }
    }
    for (group, entry) in (0u32..).zip(&manifest.groups) {
        for (place, node) in entry.data.iter().enumerate() {
            on.entry(node.clone())
                .or_default()
                .data
                .push((group, place));
        }
        for (place, node) in entry.coding.iter().enumerate() {
            on.entry(node.clone())
                .or_default()
                .coding
                .push((group, place));
        }
    }
    on
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enclosure::Enclosures;

    fn sample() -> Manifest {
        let node = |name: &str| NodeName::new(name).unwrap();
        Manifest {
            version: Manifest::VERSION,
            namespace: Namespace::new("job").unwrap(),
            owner: Owner::of_token(b"t"),
            run: RunId::with_identity(2, 0x5eed),
            step: Step::new(40),
            world_size: WorldSize::new(1).unwrap(),
            epoch: 1,
            geometry: Geometry::new(2, 1).unwrap(),
            chunk: ChunkSize::new(65536).unwrap(),
            shards: vec![ShardEntry {
                rank: Rank::new(0),
                node: node("a"),
                length: 5,
                root: digest(b"hello"),
            }],
            groups: vec![GroupEntry {
                data: vec![node("a")],
                coding: vec![node("b")],
            }],
            schema: Enclosed::naming(&[1, 2]),
            torch_metadata: Enclosed::nothing(),
        }
    }

    /// The same as releases before version 3 wrote it.
    fn inline() -> Manifest {
        Manifest {
            version: 2,
            schema: Enclosed::Inline(vec![1, 2].into()),
            torch_metadata: Enclosed::Inline(vec![].into()),
            ..sample()
        }
    }

    #[test]
    fn a_manifest_survives_its_bytes() {
        let sealed = sample().seal().unwrap();
        let back = ManifestBytes::verify(sealed.bytes().to_vec(), sealed.name()).unwrap();
        assert_eq!(back, sealed);
    }

    #[test]
    fn the_bytes_of_version_three_are_pinned() {
        let name = sample().seal().unwrap().name().to_string();
        assert_eq!(name, include_str!("../golden/manifest-v3.digest").trim());
    }

    #[test]
    fn a_manifest_of_version_two_is_still_read_with_what_it_carries() {
        let sealed = inline().seal().unwrap();
        let expected: Digest = include_str!("../golden/manifest-v2.digest")
            .trim()
            .parse()
            .unwrap();
        let read = ManifestBytes::verify(sealed.bytes().to_vec(), expected).unwrap();
        assert_eq!(read.manifest(), &inline());
        assert_eq!(read.manifest().enclosures().count(), 0);
        let carried = Enclosures::of(read.manifest(), &Enclosures::default()).unwrap();
        assert_eq!(&carried.schema[..], [1, 2]);
    }

    #[test]
    fn what_a_manifest_names_is_proved_and_named_once() {
        let mut manifest = sample();
        let given = |schema: &[u8]| Enclosures {
            schema: schema.to_vec().into(),
            ..Enclosures::default()
        };
        assert_eq!(
            Enclosures::of(&manifest, &given(&[1, 2])),
            Ok(given(&[1, 2]))
        );
        assert!(Enclosures::of(&manifest, &given(&[1, 3])).is_err());
        assert!(Enclosures::of(&manifest, &given(&[])).is_err());
        assert_eq!(manifest.enclosures().count(), 1, "nothing is not fetched");
        manifest.torch_metadata = manifest.schema.clone();
        assert_eq!(manifest.enclosures().count(), 1, "nor is anything twice");
    }

    #[test]
    fn a_version_has_one_form() {
        let (named, carried) = (sample(), inline());
        for (version, like) in [(2, &named), (1, &named), (3, &carried)] {
            let mut wrong = like.clone();
            wrong.version = version;
            assert!(wrong.seal().is_err(), "version {version}");
        }
        let mut mixed = sample();
        mixed.torch_metadata = carried.torch_metadata;
        assert!(mixed.seal().is_err());
        let mut empty = sample();
        let digest = digest(b"other");
        empty.schema = Enclosed::Named(Enclosure { digest, length: 0 });
        assert!(empty.seal().is_err());
    }

    #[test]
    fn a_manifest_of_version_one_is_still_read() {
        let mut old = inline();
        (old.version, old.run) = (1, RunId::new(2));
        let new_bytes = encode(&old);
        let run = encode(&old.run);
        let at = new_bytes.windows(3).position(|three| three == run).unwrap();
        let bytes = [&new_bytes[..at], &[2], &new_bytes[at + 3..]].concat();
        let expected: Digest = include_str!("../golden/manifest-v1.digest")
            .trim()
            .parse()
            .unwrap();
        let read = ManifestBytes::verify(bytes.clone(), expected).unwrap();
        assert_eq!((read.manifest(), read.bytes()), (&old, &bytes[..]));
    }

    #[test]
    fn every_flipped_byte_and_every_truncation_is_refused() {
        let sealed = sample().seal().unwrap();
        for at in 0..sealed.bytes().len() {
            let mut bytes = sealed.bytes().to_vec();
            bytes[at] ^= 1;
            assert!(ManifestBytes::verify(bytes, sealed.name()).is_err());
            let cut = sealed.bytes()[..at].to_vec();
            assert!(ManifestBytes::verify(cut.clone(), sealed.name()).is_err());
            assert!(ManifestBytes::parse(cut).is_err());
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let mut wrong_count = sample();
        wrong_count.world_size = WorldSize::new(2).unwrap();
        assert!(wrong_count.seal().is_err());
        let mut too_long = sample();
        too_long.shards.push(ShardEntry {
            rank: Rank::new(1),
            length: u64::MAX,
            ..too_long.shards[0].clone()
        });
        too_long.world_size = WorldSize::new(2).unwrap();
        assert!(too_long.seal().is_err());
        let mut twice = sample();
        twice.groups[0].coding = twice.groups[0].data.clone();
        assert!(twice.seal().is_err());
    }
}
