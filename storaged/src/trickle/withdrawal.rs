//! What a node takes back of a step that the job has given up: its own shard. A step that lacks one shard becomes no
//! checkpoint, so nobody else has to be asked. A manifest that is written at the same time is seen on one side at least:
//! whoever withdraws writes a mark, looks for a manifest, deletes, and looks once more; whoever publishes looks for the
//! mark and for every shard once the manifest is there.

use std::time::Duration;

use storaged_core::DurableFault;
use storaged_wire::{Manifest, ManifestBytes, Rank, ShardEntry};

use super::chain::Stored;
use super::increment::{index_object, records_object};
use super::index::{Mark, StepKey, mark_key};
use super::packed::{frames_object, packed_object};
use super::publish::check_there;
use super::store::ObjectKey;
use super::{MANIFEST_OBJECT, Trickle, leaves_object, object, shard_object};

/// How long the tier is asked to delete a shard.
const WITHDRAWAL_LIMIT: Duration = Duration::from_secs(60);

impl Trickle {
    /// The step is given up: nothing of this node's shard stays. Where all checkpoints are kept nothing that is finished is
    /// deleted either, and what has a manifest is never touched.
    pub async fn withdraw(&self, manifest: &ManifestBytes, rank: Rank) {
        if self.limits.retention.keep_last.is_some() {
            let withdrawn = self.withdraw_finished(manifest, rank);
            let withdrawn = tokio::time::timeout(WITHDRAWAL_LIMIT, withdrawn).await;
            let fault = match withdrawn {
                Ok(Ok(())) => None,
                Ok(Err(fault)) => Some(fault.to_string()),
                Err(_) => Some(format!("no answer within {WITHDRAWAL_LIMIT:?}")),
            };
            if let Some(fault) = fault {
                let record = manifest.manifest();
                tracing::info!(namespace = %record.namespace, run = %record.run, step = %record.step, %rank, fault,
                    "a shard of a step that was given up stays in the durable tier for now");
            }
        }
        // Behind it: a full tier has room for that now.
        self.drop_upload(manifest, rank).await;
    }

    async fn withdraw_finished(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
    ) -> Result<(), DurableFault> {
        let record = manifest.manifest();
        let (namespace, place) = (&record.namespace, StepKey::of(record));
        self.sent.forget(manifest.name());
        let keys = self.finished_of(record, rank).await?;
        if keys.is_empty() {
            return Ok(());
        }
        self.mark_removing(namespace, place).await?;
        let published = object(record, MANIFEST_OBJECT)?;
        if self.length(&published).await?.is_none() {
            for key in &keys {
                self.store.delete(key).await?;
            }
            if self.length(&published).await?.is_some() {
                tracing::info!(%namespace, run = %place.run, step = %place.step, %rank,
                    "a manifest was written while a shard that it names was withdrawn: it goes too");
                self.store.delete(&published).await?;
            }
            tracing::info!(%namespace, run = %place.run, step = %place.step, %rank, objects = keys.len(),
                "a shard of a step that was given up is removed from the durable tier");
        }
        self.unmark(namespace, place, Mark::Removing).await
    }

    /// Objects of a rank that are there, in whichever form.
    async fn finished_of(
        &self,
        record: &Manifest,
        rank: Rank,
    ) -> Result<Vec<ObjectKey>, DurableFault> {
        let folder = self.folder_of(record).await?;
        // The table first: without it nothing counts as whole.
        let names = [
            leaves_object(rank),
            index_object(rank),
            frames_object(rank),
            shard_object(rank),
            packed_object(rank),
            records_object(rank),
        ];
        let there = names.iter().filter(|name| folder.contains_key(*name));
        there.map(|name| object(record, name)).collect()
    }

    /// The manifest is there, and was written when all shards were. If one has gone meanwhile, the step is no checkpoint.
    pub(super) async fn check_not_withdrawn(
        &self,
        record: &Manifest,
        shards: &[(&ShardEntry, Stored)],
    ) -> Result<(), DurableFault> {
        let (namespace, place) = (&record.namespace, StepKey::of(record));
        let removing = mark_key(namespace, place, Mark::Removing)?;
        if self.length(&removing).await?.is_some() {
            // Whoever has written the mark sees the manifest.
            return Err(DurableFault::Conflict(format!(
                "{place} of {namespace} is being removed"
            )));
        }
        let folder = self.folder_of(record).await?;
        let form = self.store.limits().form;
        for (entry, stored) in shards {
            if let Err(fault) = check_there(record, &folder, entry, stored, form) {
                let published = object(record, MANIFEST_OBJECT)?;
                self.store.delete(&published).await?;
                return Err(fault);
            }
        }
        Ok(())
    }
}
