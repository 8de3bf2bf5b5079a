//! When a checkpoint leaves RAM: once a newer one is as safe as this node can make it, or when it is given up.

use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{CheckpointState, Namespace, Rank, RunId};

use crate::budget::Purpose;
use crate::io::{Note, Output};
use crate::limits;
use crate::node::Node;
use crate::table::{Checkpoint, Upload};

/// Reasons kept for those who ask late, per namespace.
const ABANDONED_KEPT: usize = 64;

impl Node {
    /// The state from which a newer checkpoint makes older ones needless.
    pub(crate) fn safe_state(&self) -> CheckpointState {
        match self.setup.geometry {
            Some(_) => CheckpointState::Protected,
            None => CheckpointState::Committed,
        }
    }

    /// Retires what the newest safe checkpoint of the namespace makes needless.
    pub(crate) fn retire_older(&mut self, namespace: &Namespace) {
        let safe = self.safe_state();
        let newest = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace && c.state >= safe)
            .map(|c| c.key.clone())
            .next_back();
        let Some(newest) = newest else {
            return;
        };
        let base = self.base_to_keep(&newest);
        if let Some(base) = &base {
            self.make_base(base);
        }
        let older: Vec<CheckpointKey> = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace && c.key < newest && !self.is_pinned(c))
            .filter(|c| Some(&c.key) != base.as_ref())
            .map(|c| c.key.clone())
            .collect();
        for key in older {
            if self.checkpoints[&key].manifest.is_none() {
                self.abandon(
                    &key,
                    &format!(
                        "step {} of run {} was protected first",
                        newest.step, newest.run
                    ),
                );
            } else {
                self.retire(&key);
            }
        }
    }

    /// Readers have it open, or its way to the durable tier is not at its end.
    fn is_pinned(&self, checkpoint: &Checkpoint) -> bool {
        let read = checkpoint
            .shards
            .values()
            .any(|shard| !shard.readers.is_empty());
        let owed = self.wants_durable(checkpoint)
            && checkpoint.state >= self.safe_state()
            && checkpoint.state < CheckpointState::Durable;
        read || owed
    }

    pub(crate) fn retire(&mut self, key: &CheckpointKey) {
        self.remove(key);
        self.note(Note::State {
            key: key.clone(),
            state: CheckpointState::Retired,
        });
    }

    /// Frees all that the checkpoint has here.
    fn remove(&mut self, key: &CheckpointKey) {
        self.end_sessions_of(key);
        let Some(checkpoint) = self.checkpoints.remove(key) else {
            return;
        };
        if let Some(name) = checkpoint.name() {
            self.by_name.remove(&name);
        }
        for set in checkpoint.parity.into_values() {
            self.budget.release(Purpose::Parity(set));
            self.out.push(Output::DropParity { set });
        }
        for shard in checkpoint.shards.into_values() {
            self.free_slot_again(shard.slot);
        }
    }

    /// The checkpoint will never commit or be whole: free it, and tell those who wait for it.
    pub(crate) fn abandon(&mut self, key: &CheckpointKey, reason: &str) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if checkpoint.state >= CheckpointState::Protected {
            return;
        }
        let owner = checkpoint.owner;
        self.remove(key);
        let table = self.namespace_table(&key.namespace, owner);
        table.abandoned.insert((key.run, key.step), reason.into());
        while table.abandoned.len() > ABANDONED_KEPT {
            table.abandoned.pop_first();
        }
        self.note(Note::Abandoned {
            key: key.clone(),
            reason: reason.into(),
        });
        self.wake(key);
    }

    /// Gives up a checkpoint and tells the peers to.
    pub(crate) fn abandon_everywhere(&mut self, key: &CheckpointKey, reason: &str) {
        for peer in self.peers.keys().cloned().collect::<Vec<_>>() {
            let message = PeerMessage::Abandoned {
                key: key.clone(),
                reason: reason.into(),
            };
            self.send(&peer, message);
        }
        self.abandon(key, reason);
    }

    /// Checkpoints whose commit did not come in time are given up, by every node for itself.
    pub(crate) fn give_up_old_commits(&mut self) {
        let now = self.now;
        let late: Vec<(CheckpointKey, String)> = self
            .checkpoints
            .values()
            .filter(|c| c.manifest.is_none() && now.since(c.first_seen) >= limits::COMMIT_MAX_MS)
            .map(|c| {
                (
                    c.key.clone(),
                    format!("it did not commit within 120 s{}", self.why_not_yet(&c.key)),
                )
            })
            .collect();
        for (key, reason) in late {
            self.abandon(&key, &reason);
        }
    }

    /// A newer run needs slots that hold what older runs left unprotected, newest last.
    pub(crate) fn give_up_stale(&mut self, namespace: &Namespace, rank: Rank) {
        let fence = self
            .namespaces
            .get(namespace)
            .map_or(RunId::new(0), |table| table.fence);
        let safe = self.safe_state();
        let stale: Vec<CheckpointKey> = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace && c.key.run < fence && c.state < safe)
            .filter(|c| {
                c.shards
                    .get(&rank)
                    .is_some_and(|shard| shard.readers.is_empty())
            })
            .map(|c| c.key.clone())
            .collect();
        for key in stale {
            self.abandon(
                &key,
                "a newer run of the job needs its slot, and it was not protected",
            );
        }
    }

    pub(crate) fn close_readers(&mut self, conn: crate::io::ConnId) {
        let mut namespaces = Vec::new();
        for checkpoint in self.checkpoints.values_mut() {
            for shard in checkpoint.shards.values_mut() {
                if shard.readers.remove(&conn) {
                    namespaces.push(checkpoint.key.namespace.clone());
                }
            }
        }
        for namespace in namespaces {
            self.retire_older(&namespace);
        }
        self.drop_guests_of(conn);
    }

    /// The slot of a shard that is already in the durable tier may go as soon as RAM needs it.
    pub(crate) fn upload_is_over(upload: Upload) -> bool {
        upload == Upload::Done
    }
}
