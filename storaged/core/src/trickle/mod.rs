//! Policy of the verb *trickle*: which checkpoints go to the durable tier, and in which order: every shard first,
//! by the node that holds it, then the manifest, by one of the home nodes. `base` has what increments build on.

mod base;
mod curate;
mod health;
mod leaving;
mod owed;
mod quarantine;
mod tier;

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_plan::uncoded_node;
use storaged_wire::local::DurableWish;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, Digest, ManifestBytes, Namespace, Rank};

use crate::api::{DurableFault, DurablePolicy, Leftovers, Output, UploadTally};
use crate::catalog::{Checkpoint, Upload};
use crate::context::Context;
use crate::limits;

pub(crate) use health::{TierHealth, plain};
pub use leaving::{LastWork, Unfinished, not_an_operator};
pub(crate) use tier::durable_unavailable;

impl Context {
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

    /// Whether it is on its way there: safe in RAM or as safe as it can be made while nodes are gone, and not given up.
    pub(crate) fn is_due(&self, checkpoint: &Checkpoint) -> bool {
        let open =
            checkpoint.state < CheckpointState::Durable && checkpoint.owing.given_up.is_none();
        open && self.wants_durable(checkpoint)
            && (checkpoint.state >= self.safe_state() || self.stays_unprotected(checkpoint))
    }

    /// A committed checkpoint that is not protected because nodes are gone, or because one with a shard of it had no place in its
    /// epoch: the durable tier is all the safety it can have.
    fn stays_unprotected(&self, checkpoint: &Checkpoint) -> bool {
        let waited = checkpoint.committed_at.map_or(0, |at| self.now.since(at));
        let Some(manifest) = &checkpoint.manifest else {
            return false;
        };
        let is_uncoded = uncoded_node(manifest).is_some();
        waited >= limits::UPLOAD_UNPROTECTED_AFTER_MS
            && (is_uncoded || !self.gone_nodes(manifest).is_empty())
    }

    /// The checkpoint of a namespace that is being uploaded: the oldest that is due.
    pub(crate) fn upload_in_turn(&self, namespace: &Namespace) -> Option<CheckpointKey> {
        let mut of_it = self.checkpoints.values();
        let due = of_it.find(|c| c.key.namespace == *namespace && self.is_due(c))?;
        Some(due.key.clone())
    }

    /// Starts the uploads of shards of the checkpoint in turn. The next one waits: it would only take its share of the link
    /// from the one that is to be finished, and should that one take long, it is a newer one that is wanted by then.
    pub(crate) fn start_uploads(&mut self) {
        let now = self.now;
        let namespaces: BTreeSet<Namespace> = self.namespaces.keys().cloned().collect();
        let in_turn = namespaces
            .iter()
            .filter_map(|name| self.upload_in_turn(name));
        let mut due: Vec<(CheckpointKey, Rank)> = Vec::new();
        for key in in_turn {
            for (rank, shard) in &self.checkpoints[&key].shards {
                let ready = match shard.upload {
                    Upload::Fresh | Upload::Idle => true,
                    Upload::RetryAt(at) => at <= now,
                    Upload::Running | Upload::Done => false,
                };
                if ready && shard.digests.is_some() {
                    due.push((key.clone(), *rank));
                }
            }
        }
        for (key, rank) in due {
            self.start_upload(&key, rank);
        }
    }

    fn start_upload(&mut self, key: &CheckpointKey, rank: Rank) {
        let base = self.upload_base(key, rank);
        let all_in_sight = self.peers.len() + 1 >= self.setup.members.len();
        let me = self.me().clone();
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
        // Where two processes claim one rank, the node that the manifest names copies its shard too.
        let is_named = manifest.manifest().shard(rank).map(|it| &it.node) == Some(&me);
        let leftovers = match local.upload {
            Upload::Fresh if all_in_sight && is_named => Leftovers::None,
            _ if planted!("leftovers_not_looked_for") => Leftovers::None,
            _ => Leftovers::Perhaps,
        };
        local.upload = Upload::Running;
        self.out.push(Output::Upload {
            manifest,
            rank,
            shard,
            base,
            leftovers,
        });
    }

    /// A node comes or goes. While it was not in sight it may have thought this one lost, and copied shards in its place.
    pub(crate) fn look_for_leftovers(&mut self) {
        if planted!("nothing_left_by_others") {
            return;
        }
        let shards = self
            .checkpoints
            .values_mut()
            .flat_map(|checkpoint| checkpoint.shards.values_mut());
        for shard in shards.filter(|shard| shard.upload == Upload::Fresh) {
            shard.upload = Upload::Idle;
        }
    }

    pub(crate) fn uploaded(
        &mut self,
        name: Digest,
        rank: Rank,
        outcome: Result<UploadTally, DurableFault>,
    ) {
        self.tier_answered(outcome.as_ref().err());
        if let Ok(tally) = &outcome {
            self.rates.upload(tally, self.now);
        }
        let retry = Upload::RetryAt(self.now.plus(limits::UPLOAD_RETRY_MS));
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let key = checkpoint.key.clone();
        let Some(shard) = checkpoint.shards.get_mut(&rank) else {
            return;
        };
        match outcome {
            Ok(_) => {
                shard.upload = Upload::Done;
                self.note_copied(&key);
                self.report_owed(&key);
                self.start_uploads();
            }
            Err(reason) => {
                shard.upload = retry;
                self.tell_durable_failed(&key, reason.to_string());
            }
        }
    }

    /// The first home node that is up writes the manifest once every shard is there, and others if it does not.
    pub(crate) fn start_publishing(&mut self) {
        let now = self.now;
        let due: Vec<(CheckpointKey, Arc<ManifestBytes>)> = self
            .checkpoints
            .values()
            .filter(|c| self.is_due(c))
            .filter(|c| match c.publishing {
                Upload::Fresh | Upload::Idle => true,
                Upload::RetryAt(at) => at <= now,
                Upload::Running | Upload::Done => false,
            })
            .filter_map(|c| Some((c.key.clone(), c.manifest.clone()?)))
            .collect();
        for (key, manifest) in due {
            if !self.is_to_publish(&key) {
                continue;
            }
            // It was restarted and is fetching them.
            let Some(enclosures) = self.enclosures_of(manifest.manifest()) else {
                continue;
            };
            let Some(authorship) = self.authorship(&key, manifest.manifest().owner) else {
                continue;
            };
            if let Some(checkpoint) = self.checkpoints.get_mut(&key) {
                checkpoint.publishing = Upload::Running;
            }
            self.out.push(Output::Publish {
                manifest,
                enclosures,
                authorship,
            });
        }
    }

    /// Whether this node writes the manifest: it is the first home node that is up and has not let the checkpoint go, or those before it have
    /// failed or had their time. Were they waited for, one that hangs or cannot reach the tier would keep this copy, and all later ones, from
    /// coming to an end. Of two that write it the first one's stays.
    fn is_to_publish(&self, key: &CheckpointKey) -> bool {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return false;
        };
        let owing = &checkpoint.owing;
        let homes = self.homes_of(key).into_iter();
        let mut able = homes.filter(|home| {
            let is_able = self.is_up(home) && !owing.retired_at.contains(home);
            let has_failed = owing.unpublished_by.contains(home) && *home != *self.me();
            is_able && (!has_failed || planted!("manifests_wait_for_their_first_home"))
        });
        let turn = able.position(|home| home == *self.me());
        let waited_ms = owing.copied_at.map(|at| self.now.since(at));
        let (Some(turn), Some(waited_ms)) = (turn, waited_ms) else {
            return false;
        };
        let has_time = planted!("manifests_wait_for_their_first_home");
        let ranks = u64::from(checkpoint.world_size.get());
        let time_ms = limits::PUBLISHING_MS + ranks * limits::PUBLISHING_RANK_MS;
        turn == 0 || (waited_ms >= turn as u64 * time_ms && !has_time)
    }

    pub(crate) fn published(&mut self, name: Digest, outcome: Result<(), DurableFault>) {
        self.tier_answered(outcome.as_ref().err());
        let retry = Upload::RetryAt(self.now.plus(limits::UPLOAD_RETRY_MS));
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let key = checkpoint.key.clone();
        match outcome {
            Ok(()) => {
                checkpoint.publishing = Upload::Done;
                self.note_published(&key, name);
                if !planted!("retired_before_told") {
                    self.tell_durable(&key);
                }
                self.reach(&key, CheckpointState::Durable);
            }
            // Another home node has written it meanwhile.
            Err(_) if checkpoint.state >= CheckpointState::Durable => {
                checkpoint.publishing = Upload::Done;
            }
            Err(reason) => {
                checkpoint.publishing = retry;
                if let DurableFault::ShardMissing { rank, .. } = &reason {
                    self.have_copy_said_again(&key, *rank);
                }
                if matches!(reason, DurableFault::TokenChanged(_)) {
                    self.learn_of_successions(&key.namespace);
                }
                self.tell_durable_failed(&key, reason.to_string());
            }
        }
    }

    /// A shard that was copied is missing. Whoever has given the step up has withdrawn its own, and says so once it is asked for it; else its
    /// node says again that it is there. What a node has copied that is down is taken for copied.
    fn have_copy_said_again(&mut self, key: &CheckpointKey, rank: Rank) {
        let manifest = self
            .checkpoints
            .get(key)
            .and_then(|it| it.manifest.as_ref());
        let entry = manifest.and_then(|it| it.manifest().shard(rank).cloned());
        if !entry.is_some_and(|entry| self.is_up(&entry.node)) {
            return;
        }
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.shards_durable.remove(&rank);
            checkpoint.owing.copied_at = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use storaged_codec::digest;
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::{CheckpointKey, PeerMessage};
    use storaged_wire::{ManifestBytes, Rank, SlotId};

    use crate::api::{ConnId, DurableFault, DurablePolicy, Leftovers, Now, Output};
    use crate::catalog::{LocalShard, SlotUse, Upload};
    use crate::node::Node;
    use crate::testkit::{
        chunk, committed, hear, hear_from_all, last_of, last_with_tier, manifest,
    };

    fn sealed(rank: u32) -> LocalShard {
        LocalShard {
            slot: SlotId::new(u64::from(rank)),
            length: 4096,
            chunk: chunk(),
            digests: Some(([digest(b"chunk")].into(), digest(b"root"))),
            prints: [].into(),
            readers: BTreeSet::new(),
            upload: Upload::Fresh,
            sealed_at: Now(10),
        }
    }

    /// `e` is cut down to what a reader has open of a step, for a newer one, before it hears that the older one is protected too. What has
    /// gone would be waited for.
    #[test]
    fn a_step_that_is_cut_down_to_what_is_read_is_not_copied_any_more() {
        let every = DurablePolicy::Every(1);
        let mut node = last_with_tier(&["a", "b", "c", "d", "e"], 2, 2, every);
        let steps = [1, 2].map(|step| {
            let it = manifest(step, &["a", "e"], &["c", "d"], 4096, digest(b"root"));
            it.seal().expect("a sound manifest")
        });
        let protected = |it: &ManifestBytes| PeerMessage::Protected {
            manifest: it.name(),
            bears: 2,
        };
        for step in &steps {
            hear_from_all(&mut node, 1, &committed(step));
            let cx = node.context_mut();
            let key = cx.by_name[&step.name()].clone();
            for rank in [0, 1] {
                let used_for = SlotUse::Sealed(key.clone());
                let slot = cx.reserve_slot(&key.namespace, Rank::new(rank), 4096, used_for);
                let slot = slot.expect("there is room");
                let shard = LocalShard {
                    slot,
                    ..sealed(rank)
                };
                let checkpoint = cx.checkpoints.get_mut(&key).expect("it is known");
                checkpoint.shards.insert(Rank::new(rank), shard);
            }
            let checkpoint = cx.checkpoints.get_mut(&key).expect("it is known");
            let read = checkpoint.shards.get_mut(&Rank::new(0));
            read.expect("a shard").readers.insert(ConnId(7));
        }
        let [older, newer] = &steps;
        hear_from_all(&mut node, 2, &protected(newer));
        let left = |node: &Node| {
            let cx = node.context();
            let checkpoint = &cx.checkpoints[&cx.by_name[&older.name()]];
            (checkpoint.shards.len(), cx.is_due(checkpoint))
        };
        assert_eq!(left(&node), (1, false), "it stays for its reader");
        hear_from_all(&mut node, 3, &protected(older));
        assert_eq!(left(&node), (1, false), "what has gone is not waited for");
    }

    /// `b` has a shard of rank 0 too, which is on `a` by the manifest: two processes claim that rank.
    #[test]
    fn only_the_node_that_a_manifest_names_looks_for_nothing_in_the_tier() {
        let mut node = last_of(&["a", "c", "b"], 2, 1);
        let manifest = manifest(2, &["a", "b"], &["c"], 4096, digest(b"root"));
        let key = CheckpointKey::of(&manifest);
        let manifest = manifest.seal().expect("a sound manifest");
        let committed = PeerMessage::Committed {
            manifest: manifest.bytes().to_vec().into(),
            durable: DurableWish::Never,
        };
        hear(&mut node, 10, "a", committed);
        let cx = node.context_mut();
        let checkpoint = cx.checkpoint_named(manifest.name());
        let checkpoint = checkpoint.expect("it is known");
        for rank in [0, 1] {
            checkpoint.shards.insert(Rank::new(rank), sealed(rank));
        }
        for rank in [0, 1] {
            cx.start_upload(&key, Rank::new(rank));
        }
        let uploads = cx.out.iter().filter_map(|output| match output {
            Output::Upload {
                rank, leftovers, ..
            } => Some((rank.get(), *leftovers)),
            _ => None,
        });
        let uploads: Vec<(u32, Leftovers)> = uploads.collect();
        assert_eq!(uploads, [(0, Leftovers::Perhaps), (1, Leftovers::None)]);
    }

    /// `b` has heard of a step of `a` and `b` that is committed.
    fn knowing_a_step() -> (Node, CheckpointKey, ManifestBytes) {
        let mut node = last_of(&["a", "c", "b"], 2, 1);
        let manifest = manifest(2, &["a", "b"], &["c"], 4096, digest(b"root"));
        let key = CheckpointKey::of(&manifest);
        let manifest = manifest.seal().expect("a sound manifest");
        hear(&mut node, 10, "a", committed(&manifest));
        (node, key, manifest)
    }

    /// `b` copies rank 0 too, which is on `a` by the manifest: `a` may still be at it, or have given it up.
    #[test]
    fn a_step_that_is_given_up_is_withdrawn_from_the_tier_by_the_node_that_a_manifest_names() {
        let retry = Upload::RetryAt(Now(20));
        for upload in [Upload::Running, Upload::Done, retry, Upload::Fresh] {
            let (mut node, key, manifest) = knowing_a_step();
            let cx = node.context_mut();
            let checkpoint = cx.checkpoint_named(manifest.name());
            let checkpoint = checkpoint.expect("it is known");
            for (rank, upload) in [(0, Upload::Running), (1, upload)] {
                let shard = LocalShard {
                    upload,
                    ..sealed(rank)
                };
                checkpoint.shards.insert(Rank::new(rank), shard);
            }
            for _ in 0..2 {
                cx.note_given_up(&key, "a newer step needs its slot");
            }
            let mut stopped = Vec::new();
            let mut withdrawn = Vec::new();
            for output in &cx.out {
                match output {
                    Output::StopUpload { rank, .. } => stopped.push(rank.get()),
                    Output::Withdraw { rank, .. } => withdrawn.push(rank.get()),
                    _ => {}
                }
            }
            let is_fresh = upload == Upload::Fresh;
            let expected = Vec::from_iter((!is_fresh).then_some(1));
            assert_eq!((stopped, withdrawn), (vec![0], expected), "{upload:?}");
            let left = cx.checkpoints[&key].shards[&Rank::new(1)].upload;
            let expected = if is_fresh { upload } else { Upload::Idle };
            assert_eq!(left, expected);
        }
    }

    /// Who has withdrawn its shard says that it has given the step up.
    #[test]
    fn a_home_node_that_finds_a_shard_missing_waits_until_it_is_said_to_be_there_again() {
        let (mut node, key, manifest) = knowing_a_step();
        let cx = node.context_mut();
        let text = || "made to fail".to_owned();
        let missing = DurableFault::ShardMissing {
            rank: Rank::new(0),
            text: text(),
        };
        for (fault, copied) in [(DurableFault::Unavailable(text()), 2), (missing, 1)] {
            let checkpoint = cx.checkpoints.get_mut(&key).expect("it is known");
            checkpoint.shards_durable.extend([0, 1].map(Rank::new));
            checkpoint.owing.copied_at = Some(Now(20));
            cx.published(manifest.name(), Err(fault));
            let checkpoint = &cx.checkpoints[&key];
            assert_eq!(checkpoint.shards_durable.len(), copied);
            assert_eq!(checkpoint.owing.copied_at.is_some(), copied > 1);
        }
    }
}
