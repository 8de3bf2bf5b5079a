//! Policy of the verb *trickle*: which checkpoints go to the durable tier, and in which order: every shard first,
//! by the node that holds it, then the manifest, by one of the home nodes. `base` has what increments build on.

mod base;

use std::sync::Arc;

use storaged_wire::local::DurableWish;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{CheckpointState, Digest, ManifestBytes, Rank};

use crate::io::{Note, Output};
use crate::limits;
use crate::node::{DurablePolicy, Node};
use crate::table::{Checkpoint, LocalShard, Upload};

pub use base::UploadBase;

impl Node {
    /// Whether the policy and the trainer want this checkpoint in the durable tier.
    pub(crate) fn wants_durable(&self, checkpoint: &Checkpoint) -> bool {
        match (self.setup.durable, checkpoint.durable_wish) {
            (DurablePolicy::Absent, _) | (_, DurableWish::Never) => false,
            (_, DurableWish::Required) => true,
            (DurablePolicy::OnRequest, DurableWish::Policy) => false,
            (DurablePolicy::Every(steps), DurableWish::Policy) => {
                steps > 0 && checkpoint.key.step.get().is_multiple_of(steps)
            }
        }
    }

    fn is_due(&self, checkpoint: &Checkpoint) -> bool {
        self.wants_durable(checkpoint)
            && checkpoint.state >= self.safe_state()
            && checkpoint.state < CheckpointState::Durable
    }

    /// Starts the uploads of shards here that are due; one at a time per rank, oldest checkpoint first.
    pub(crate) fn start_uploads(&mut self) {
        let now = self.now;
        let mut due: Vec<(CheckpointKey, Rank)> = Vec::new();
        for checkpoint in self.checkpoints.values().filter(|c| self.is_due(c)) {
            let ready = |shard: &LocalShard| match shard.upload {
                Upload::Idle => true,
                Upload::RetryAt(at) => at <= now,
                Upload::Running | Upload::Done => false,
            };
            let shards = checkpoint.shards.iter();
            let ready = shards.filter(|(_, shard)| ready(shard) && shard.digests.is_some());
            due.extend(ready.map(|(rank, _)| (checkpoint.key.clone(), *rank)));
        }
        for (key, rank) in due {
            self.start_upload(&key, rank);
        }
    }

    fn start_upload(&mut self, key: &CheckpointKey, rank: Rank) {
        let base = self.upload_base(key, rank);
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let (Some(manifest), Some(local)) = (
            checkpoint.manifest.clone(),
            checkpoint.shards.get_mut(&rank),
        ) else {
            return;
        };
        let Some(shard) = local.sealed() else {
            return;
        };
        local.upload = Upload::Running;
        self.out.push(Output::Upload {
            manifest,
            rank,
            shard,
            base,
        });
    }

    pub(crate) fn uploaded(&mut self, name: Digest, rank: Rank, outcome: Result<(), String>) {
        let retry = Upload::RetryAt(self.now.plus(limits::UPLOAD_RETRY_MS));
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let key = checkpoint.key.clone();
        let Some(shard) = checkpoint.shards.get_mut(&rank) else {
            return;
        };
        match outcome {
            Ok(()) => {
                shard.upload = Upload::Done;
                for home in self.homes_of(&key) {
                    self.send(
                        &home,
                        PeerMessage::ShardDurable {
                            manifest: name,
                            rank,
                        },
                    );
                }
            }
            Err(reason) => {
                shard.upload = retry;
                self.note(Note::DurableFailed { key, reason });
            }
        }
    }

    pub(crate) fn shard_durable(&mut self, name: Digest, rank: Rank) {
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        checkpoint.shards_durable.insert(rank);
        self.start_publishing();
    }

    /// The first home node that is up writes the manifest once every shard is there.
    pub(crate) fn start_publishing(&mut self) {
        let now = self.now;
        let due: Vec<(CheckpointKey, Arc<ManifestBytes>)> = self
            .checkpoints
            .values()
            .filter(|c| self.is_due(c) && c.shards_durable.len() == c.world_size.get() as usize)
            .filter(|c| match c.publishing {
                Upload::Idle => true,
                Upload::RetryAt(at) => at <= now,
                Upload::Running | Upload::Done => false,
            })
            .filter_map(|c| Some((c.key.clone(), c.manifest.clone()?)))
            .collect();
        for (key, manifest) in due {
            let first_up = self
                .homes_of(&key)
                .into_iter()
                .find(|home| self.is_up(home));
            if first_up.as_ref() != Some(self.me()) {
                continue;
            }
            if let Some(checkpoint) = self.checkpoints.get_mut(&key) {
                checkpoint.publishing = Upload::Running;
            }
            self.out.push(Output::Publish { manifest });
        }
    }

    pub(crate) fn published(&mut self, name: Digest, outcome: Result<(), String>) {
        let retry = Upload::RetryAt(self.now.plus(limits::UPLOAD_RETRY_MS));
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let key = checkpoint.key.clone();
        match outcome {
            Ok(()) => {
                checkpoint.publishing = Upload::Done;
                self.reach(&key, CheckpointState::Durable);
                self.tell_all();
            }
            Err(reason) => {
                checkpoint.publishing = retry;
                self.note(Note::DurableFailed { key, reason });
            }
        }
    }
}
