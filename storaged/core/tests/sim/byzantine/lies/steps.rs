//! Lies of steps: what was sealed, what was committed, how safe it is, who holds what of it, and that it has ended.

use storaged_codec::{ChunkSize, Digest, digest};
use storaged_plan::{Group, groups};
use storaged_wire::local::VerifiedPart;
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{
    CheckpointKey, Holding, Lane, NamespaceMark, PeerMessage, SealedShard, UnowedCause,
};
use storaged_wire::{
    Enclosed, Enclosure, Manifest, Owner, Rank, ShardEntry, SharedBytes, WorldSize,
};

use super::super::super::world::World;
use super::super::kinds::Kind;
use super::super::known::Address;
use super::OWN_TOKEN;
use crate::testkit::{CHUNK_BYTES, TORCH_METADATA, geometry, members, owner, schema_of};

/// The number of questions that are asked for repairs.
const REPAIR_QUERY: u64 = 0;

impl World {
    pub(super) fn lie_of_shards(&mut self, at: Address) -> PeerMessage {
        let shard = |world: &mut Self, rank| SealedShard {
            rank,
            length: match world.random(2) {
                0 => 3_000,
                _ => world.limit_number(),
            },
            root: world.some_digest(),
        };
        let ranks = self.some_ranks();
        PeerMessage::ShardsSealed {
            key: self.some_key(at.by),
            owner: self.some_owner(),
            world_size: self.some_world(),
            shards: ranks.into_iter().map(|rank| shard(self, rank)).collect(),
            digesting: self.random(2) as u32,
        }
    }

    pub(super) fn lie_of_noted_shards(&mut self, at: Address) -> PeerMessage {
        let quiet_ms = self.limit_number() as u32;
        PeerMessage::SealedNoted {
            key: self.some_key(at.by),
            shards: (self.random(2) == 0).then(|| self.some_manifest_name(at.by)),
            description: (self.random(2) == 0).then(|| self.some_digest()),
            quiet_ms,
        }
    }

    /// What a trainer says of a step, or what none says.
    pub(super) fn lie_of_a_description(&mut self, at: Address) -> PeerMessage {
        let key = self.some_key(at.by);
        let (schema, torch_metadata) = match self.random(3) {
            0 => (schema_of(key.step), TORCH_METADATA.to_vec()),
            _ => (b"schema".to_vec(), b"metadata".to_vec()),
        };
        let torch_metadata = Enclosure::of(&torch_metadata);
        let length = self.limit_number();
        let torch_metadata = self.one_of(&[
            torch_metadata,
            Enclosure {
                length,
                ..torch_metadata
            },
        ]);
        let epoch = self.limit_number();
        PeerMessage::Description {
            key,
            owner: self.some_owner(),
            world_size: self.some_world(),
            schema: Enclosure::of(&schema),
            torch_metadata,
            durable: self.some_wish(),
            epoch: self.one_of(&[1, epoch]),
        }
    }

    /// A manifest of its own making, sound in itself.
    fn forged_manifest(&mut self, key: &CheckpointKey) -> Option<Manifest> {
        let limits = self.scene.limits;
        let all = groups(&members(limits.nodes), geometry(limits.k, limits.m)).ok()?;
        let root = self.some_digest();
        let data: Vec<_> = all.iter().flat_map(|it| it.data.clone()).collect();
        let ranks = (0u32..).zip(&data).take(limits.ranks as usize);
        let shards: Vec<ShardEntry> = ranks
            .map(|(rank, node)| ShardEntry {
                rank: Rank::new(rank),
                node: node.clone(),
                length: 3_000,
                root,
            })
            .collect();
        let holds = |group: &Group| shards.iter().any(|it| group.data.contains(&it.node));
        let groups = all.iter().filter(|group| holds(group));
        Some(Manifest {
            version: Manifest::VERSION,
            namespace: key.namespace.clone(),
            owner: owner(),
            run: key.run,
            step: key.step,
            world_size: WorldSize::new(u32::try_from(shards.len()).ok()?).ok()?,
            epoch: 1,
            geometry: geometry(limits.k, limits.m),
            chunk: ChunkSize::new(CHUNK_BYTES).ok()?,
            groups: groups
                .map(|group| GroupEntry {
                    data: group.data.clone(),
                    coding: group.coding.clone(),
                })
                .collect(),
            shards,
            schema: Enclosed::nothing(),
            torch_metadata: Enclosed::nothing(),
        })
    }

    /// A manifest that is one, but for something.
    fn twisted_manifest(&mut self, at: Address) -> Option<Manifest> {
        let mut manifest = self.some_true_manifest(at.by)?;
        let shards = manifest.shards.len() as u64;
        let one = self.random(shards) as usize;
        match self.random(8) {
            0 => manifest.shards[one].root = self.some_digest(),
            1 => manifest.shards[one].length = self.limit_number(),
            2 => manifest.shards[one].node = self.some_node(),
            3 => manifest.owner = Owner::of_token(OWN_TOKEN),
            4 => manifest.epoch = self.limit_number(),
            5 => manifest.groups.reverse(),
            6 => manifest.schema = Enclosed::naming(b"schema"),
            _ => {
                let CheckpointKey { run, step, .. } = self.some_key(at.by);
                (manifest.run, manifest.step) = (run, step);
            }
        }
        Some(manifest)
    }

    /// Bytes of a manifest, and its name.
    pub(super) fn some_manifest(&mut self, at: Address) -> Option<(Digest, SharedBytes)> {
        let manifest = match self.random(4) {
            0 => self.some_true_manifest(at.by),
            1 => self.twisted_manifest(at),
            _ => None,
        };
        let key = self.some_key(at.by);
        let manifest = manifest.or_else(|| self.forged_manifest(&key))?;
        let sealed = manifest.seal().ok()?;
        Some((sealed.name(), sealed.shared()))
    }

    /// A commit that nobody has made, and all that may follow from one.
    pub(in super::super) fn lies_of_a_forged_step(&mut self, at: Address) -> Vec<PeerMessage> {
        let Some((manifest, bytes)) = self.some_manifest(at) else {
            return Vec::new();
        };
        let bears = self.some_losses();
        let committed = PeerMessage::Committed {
            manifest: bytes,
            durable: self.some_wish(),
        };
        let protected = PeerMessage::Protected { manifest, bears };
        vec![committed, protected, PeerMessage::Durable { manifest }]
    }

    pub(super) fn lie_of_a_commit(&mut self, at: Address) -> Option<PeerMessage> {
        let manifest = match self.random(8) {
            0 => b"no manifest".to_vec().into(),
            _ => self.some_manifest(at)?.1,
        };
        let durable = self.some_wish();
        Some(PeerMessage::Committed { manifest, durable })
    }

    pub(super) fn lie_of_a_stored_manifest(&mut self, at: Address) -> PeerMessage {
        PeerMessage::ManifestStored {
            manifest: self.some_manifest_name(at.by),
            state: self.some_state(),
            bears: self.some_losses(),
        }
    }

    /// That can be, or not.
    fn some_losses(&mut self) -> u32 {
        let most = self.scene.limits.m as u64;
        match self.random(8) {
            0 if !self.is_careful() => self.limit_number() as u32,
            1 if !self.is_careful() => most as u32 + 1,
            _ => self.random(most + 1) as u32,
        }
    }

    pub(super) fn lie_of_protection(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Protected {
            manifest: self.some_manifest_name(at.by),
            bears: self.some_losses(),
        }
    }

    pub(super) fn lie_of_a_durable_step(&mut self, at: Address) -> PeerMessage {
        let manifest = self.some_manifest_name(at.by);
        PeerMessage::Durable { manifest }
    }

    pub(super) fn lie_of_an_abandoned_step(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Abandoned {
            key: self.some_key(at.by),
            reason: self.some_reason(),
        }
    }

    pub(super) fn lie_of_a_superseded_step(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Superseded {
            key: self.some_key(at.by),
            reason: self.some_reason(),
        }
    }

    fn some_parity(&mut self) -> Vec<(Lane, u32)> {
        let count = self.random(4);
        let parity = |world: &mut Self| (world.some_lane(), world.some_losses());
        (0..count).map(|_| parity(self)).collect()
    }

    pub(super) fn lie_of_blocks(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Held {
            manifest: self.some_manifest_name(at.by),
            version: self.some_losses(),
            shards: self.some_ranks(),
            parity: self.some_parity(),
            enclosures: self.some_enclosures(),
        }
    }

    pub(super) fn lie_of_noted_blocks(&mut self, at: Address) -> PeerMessage {
        let noted = self.heard(Kind::Held, |it| it.from == at.to);
        if let Some(PeerMessage::Held {
            manifest, version, ..
        }) = noted.map(|it| it.message)
        {
            return PeerMessage::HeldNoted { manifest, version };
        }
        PeerMessage::HeldNoted {
            manifest: self.some_manifest_name(at.by),
            version: self.some_losses(),
        }
    }

    pub(super) fn lie_of_a_debt(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Owed {
            manifest: self.some_manifest_name(at.by),
            done: self.some_ranks(),
        }
    }

    pub(super) fn lie_of_no_debt(&mut self, at: Address) -> PeerMessage {
        let reason = self.some_reason();
        PeerMessage::Unowed {
            manifest: self.some_manifest_name(at.by),
            cause: self.one_of(&[UnowedCause::Retired, UnowedCause::GivenUp(reason)]),
        }
    }

    pub(super) fn lie_of_a_failed_upload(&mut self, at: Address) -> PeerMessage {
        PeerMessage::DurableFailed {
            manifest: self.some_manifest_name(at.by),
            reason: self.some_reason(),
        }
    }

    pub(super) fn lie_of_a_damaged_copy(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Quarantined {
            manifest: self.some_manifest_name(at.by),
            key: self.some_key(at.by),
            reason: self.some_reason(),
        }
    }

    pub(super) fn lie_of_no_room(&mut self, at: Address) -> PeerMessage {
        PeerMessage::NoRoom {
            manifest: self.some_manifest_name(at.by),
            node: self.some_node(),
            reason: self.some_reason(),
        }
    }

    pub(super) fn lie_of_a_mark(&mut self, at: Address) -> PeerMessage {
        let key = self.some_key(at.by);
        PeerMessage::Marks(vec![NamespaceMark {
            mark: key.mark(),
            namespace: key.namespace,
            owner: self.some_owner(),
        }])
    }

    pub(super) fn question_of_holdings(&mut self) -> PeerMessage {
        PeerMessage::HoldingsQuery {
            query: self.limit_number(),
            namespace: self.some_job(),
        }
    }

    /// To a plan, to whoever repairs, or to nobody.
    pub(super) fn lie_of_holdings(&mut self, at: Address) -> PeerMessage {
        let query = match self.random(3) {
            0 => REPAIR_QUERY,
            _ => self.some_query(at, Kind::HoldingsQuery),
        };
        let key = self.some_key(at.by);
        let mark = key.mark();
        let holding = Holding {
            manifest: self.some_manifest_name(at.by),
            key,
            state: self.some_state(),
            shards: self.some_ranks(),
            parity: self.some_parity(),
            enclosures: self.some_enclosures(),
        };
        PeerMessage::Holdings {
            query,
            owner: (self.random(4) > 0).then(|| self.some_owner()),
            holdings: (0..self.random(3)).map(|_| holding.clone()).collect(),
            mark: (self.random(2) == 0).then_some(mark),
            copied: (self.random(2) == 0).then_some(mark),
        }
    }

    pub(super) fn question_of_a_manifest(&mut self, at: Address) -> PeerMessage {
        PeerMessage::ManifestQuery {
            query: self.limit_number(),
            manifest: self.some_manifest_name(at.by),
        }
    }

    pub(super) fn lie_of_a_manifest(&mut self, at: Address) -> PeerMessage {
        let query = self.some_query(at, Kind::ManifestQuery);
        let manifest = match self.random(4) {
            0 => None,
            1 => Some(digest(b"no manifest").as_bytes().to_vec()),
            _ => self.some_manifest(at).map(|(_, bytes)| bytes.to_vec()),
        };
        PeerMessage::ManifestAnswer {
            query: (self.random(4) > 0).then_some(query),
            manifest: manifest.map(Into::into),
        }
    }

    pub(super) fn question_of_a_check(&mut self, at: Address) -> PeerMessage {
        PeerMessage::VerifyQuery {
            query: self.limit_number(),
            manifest: self.some_manifest_name(at.by),
        }
    }

    pub(super) fn lie_of_a_check(&mut self, at: Address) -> PeerMessage {
        let part = |world: &mut Self| VerifiedPart {
            node: world.some_node(),
            what: "shard of rank 0".to_owned(),
            bytes: world.limit_number(),
            fault: (world.random(2) == 0).then(|| world.some_reason()),
        };
        PeerMessage::VerifyAnswer {
            query: self.some_query(at, Kind::VerifyQuery),
            parts: (0..self.random(4)).map(|_| part(self)).collect(),
        }
    }
}
