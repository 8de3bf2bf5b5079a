//! What a node takes back of a step that the job has given up: its own shard. A step that lacks one shard becomes no
//! checkpoint, so nobody else has to be asked. A manifest that is written at the same time is seen on one side at least:
//! whoever withdraws writes a mark, looks for a manifest, deletes, and looks once more; whoever publishes looks for
//! marks and for every shard once the manifest is there.
//!
//! The mark lies in the step's own folder: a network file system that remembers what was not in a folder asks anew once it has written
//! there itself. Else a manifest of a moment ago would not be seen, and a durable step lose a shard.

use std::time::Duration;

use bytes::Bytes;
use storaged_core::DurableFault;
use storaged_wire::{Manifest, ManifestBytes, Rank, ShardEntry};

use super::chain::{Stored, expected_object};
use super::increment::{index_object, records_object};
use super::index::StepKey;
use super::packed::{frames_object, packed_object};
use super::publish::{Folder, check_there};
use super::store::ObjectKey;
use super::{MANIFEST_OBJECT, Trickle, leaves_object, object, shard_object};

/// How long the tier is asked to delete a shard.
const WITHDRAWAL_LIMIT: Duration = Duration::from_secs(60);

/// While a rank's shard is withdrawn: by each manifest that names it, so that the end of one withdrawal hides no other.
fn withdrawn_object(rank: Rank, manifest: &ManifestBytes) -> String {
    format!("{}{}", withdrawn_prefix(rank), manifest.name())
}

fn withdrawn_prefix(rank: Rank) -> String {
    format!("storaged.withdrawn.{rank}.")
}

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
        let mark = object(record, &withdrawn_object(rank, manifest))?;
        if keys.is_empty() {
            // An earlier try may have come no further.
            return Ok(self.store.delete(&mark).await?);
        }
        // Without it a manifest of this moment might be told as durable. An empty object finds room in most tiers that are full.
        self.store.put_new(&mark, Bytes::new()).await?;
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
        Ok(self.store.delete(&mark).await?)
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
        let folder = self.folder_of(record).await?;
        for (entry, stored) in shards {
            self.check_stays(record, &folder, entry, stored).await?;
        }
        Ok(())
    }

    /// A shard is in the folder, and nobody withdraws it. A manifest that names one which is gone is none: who has withdrawn it may have been
    /// cut off before it looked for one.
    pub(super) async fn check_stays(
        &self,
        record: &Manifest,
        folder: &Folder,
        entry: &ShardEntry,
        stored: &Stored,
    ) -> Result<(), DurableFault> {
        let form = self.store.limits().form;
        if let Err(fault) = check_there(record, folder, entry, stored, form) {
            let (name, _) = expected_object(stored, entry.rank, entry.length);
            // One listing is not believed that much.
            if self.length(&object(record, &name)?).await?.is_none() {
                self.store.delete(&object(record, MANIFEST_OBJECT)?).await?;
            }
            return Err(fault);
        }
        let prefix = withdrawn_prefix(entry.rank);
        let next = folder.range(prefix.clone()..).next();
        if next.is_some_and(|(name, _)| name.starts_with(&prefix)) {
            // Whoever has written the mark sees the manifest, and leaves the step or deletes that.
            return Err(DurableFault::Conflict(format!(
                "the shard of rank {} is being withdrawn",
                entry.rank
            )));
        }
        Ok(())
    }
}
