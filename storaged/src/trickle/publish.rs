//! The end of an upload: every shard is there, so what the manifest names, `.metadata`, the entry in the index and the manifest
//! are written, in this order. A manifest without an entry would be a durable checkpoint that no listing finds.

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::{Authorship, DurableFault};
use storaged_wire::provenance::IndexDigest;
use storaged_wire::{Enclosures, Manifest, ManifestBytes, ShardEntry};

use super::chain::{Stored, expected_object};
use super::index::{Mark, StepKey, read_bases, write_bases};
use super::store::{KeyPrefix, StoreError, StoredForm};
use super::{MANIFEST_OBJECT, Trickle, increment, manifest_object, object, packed};

/// Names and lengths of the objects in a checkpoint's folder.
pub(super) type Folder = BTreeMap<String, u64>;

impl Trickle {
    /// Writes what the manifest names and `.metadata`, then the manifest: all shards are there.
    ///
    /// # Errors
    /// Why not; it can be tried again.
    pub async fn publish(
        &self,
        manifest: &ManifestBytes,
        enclosures: &Enclosures,
        authorship: &Authorship,
    ) -> Result<(), DurableFault> {
        match self.publish_checked(manifest, enclosures, authorship).await {
            Ok(()) => Ok(()),
            Err(fault) => {
                // If something is missing, it must be looked at and sent again.
                self.sent.forget(manifest.name());
                Err(self.of_writing(fault).await)
            }
        }
    }

    async fn publish_checked(
        &self,
        manifest: &ManifestBytes,
        enclosures: &Enclosures,
        authorship: &Authorship,
    ) -> Result<(), DurableFault> {
        let record = manifest.manifest();
        let folder = self.folder_of(record).await?;
        let mut bases = BTreeSet::new();
        let form = self.store.limits().form;
        let mut all_raw = form == StoredForm::Plain;
        let mut increments = Vec::new();
        let mut shards = Vec::new();
        for entry in &record.shards {
            let stored = self.stored_in(&folder, manifest, entry).await?;
            all_raw &= matches!(stored, Stored::Raw);
            self.check_stays(record, &folder, entry, &stored).await?;
            if let Stored::Increment(index, digest) = &stored {
                increments.push(IndexDigest {
                    rank: entry.rank,
                    digest: *digest,
                });
                let (run, step) = (index.base.run, index.base.step);
                bases.insert(StepKey { run, step });
            }
            shards.push((entry, stored));
        }
        self.put_enclosures(record, enclosures).await?;
        if all_raw && !enclosures.torch_metadata.is_empty() {
            let packed = &enclosures.torch_metadata;
            self.put_torch_metadata(record, packed).await?;
        }
        self.enter(record, bases).await?;
        self.put_provenance(manifest, authorship, increments)
            .await?;
        let key = object(record, MANIFEST_OBJECT)?;
        self.store.put_new(&key, manifest_object(manifest)).await?;
        self.check_not_withdrawn(record, &shards).await?;
        // Asked behind the manifest: either this sees the change of the token, or who changes it sees this checkpoint.
        match &authorship.keys {
            Some(keys) => self.check_key(&record.namespace, &keys.newest).await,
            None => Ok(()),
        }
    }

    /// One listing instead of a question for each object.
    pub(super) async fn folder_of(&self, record: &Manifest) -> Result<Folder, DurableFault> {
        let folder = format!(
            "{}/run-{}/step-{}",
            record.namespace, record.run, record.step
        );
        let under = KeyPrefix::folder(folder.parse()?);
        let prefix = under.text();
        let entries = self.store.list(&under).await?;
        let name = |key: &str| key.strip_prefix(&prefix).map(str::to_owned);
        Ok(entries
            .into_iter()
            .filter_map(|entry| Some((name(entry.key.as_str())?, entry.length)))
            .collect())
    }

    async fn stored_in(
        &self,
        folder: &Folder,
        manifest: &ManifestBytes,
        entry: &ShardEntry,
    ) -> Result<Stored, DurableFault> {
        let has = |name: String| folder.contains_key(&name);
        let other =
            has(increment::index_object(entry.rank)) || has(packed::frames_object(entry.rank));
        if other {
            self.stored(manifest, entry.rank).await
        } else {
            Ok(Stored::Raw)
        }
    }

    /// Enters the checkpoint in the index: an increment with all that it builds on, down to full copies.
    async fn enter(
        &self,
        record: &Manifest,
        mut bases: BTreeSet<StepKey>,
    ) -> Result<(), DurableFault> {
        let (namespace, place) = (&record.namespace, StepKey::of(record));
        if bases.is_empty() {
            return self.mark(namespace, place, Mark::Full, "").await;
        }
        for base in bases.clone() {
            if self
                .find_manifest(namespace, base.run, base.step)
                .await?
                .is_none()
            {
                return Err(DurableFault::Conflict(format!(
                    "{place} of {namespace} builds on {base}, which was removed meanwhile"
                )));
            }
            let says = self.said(namespace, base, Mark::Increment).await?;
            bases.extend(read_bases(&says));
        }
        let says = write_bases(bases);
        self.mark(namespace, place, Mark::Increment, &says).await
    }
}

pub(super) fn check_there(
    record: &Manifest,
    folder: &Folder,
    entry: &ShardEntry,
    stored: &Stored,
    form: StoredForm,
) -> Result<(), DurableFault> {
    let (name, length) = expected_object(stored, entry.rank, entry.length);
    let got = folder.get(&name);
    let expected = form.stored_bytes(length);
    // A node that has not been told to encrypt yet may have written it.
    if got == Some(&expected) || got == Some(&length) {
        return Ok(());
    }
    let got = got.map_or("no object".into(), |got| format!("{got} bytes"));
    let key = object(record, &name)?;
    Err(DurableFault::ShardMissing {
        rank: entry.rank,
        text: format!("{key}: expected {expected} bytes, got {got}"),
    })
}

impl Trickle {
    /// Writes a small object of this upload in place of whatever an earlier one left under its name.
    pub(super) async fn put_mine(
        &self,
        key: &super::ObjectKey,
        bytes: bytes::Bytes,
    ) -> Result<(), DurableFault> {
        match self.store.put_new(key, bytes.clone()).await {
            Err(StoreError::AlreadyExists { .. }) => {
                tracing::info!(%key, "leftovers of an earlier upload are replaced");
                self.store.delete(key).await?;
                Ok(self.store.put_new(key, bytes).await?)
            }
            outcome => Ok(outcome?),
        }
    }

    /// What a failed write says: where the place itself is gone, that comes first; damage is nothing that a writer can
    /// find.
    pub(super) async fn of_writing(&self, fault: DurableFault) -> DurableFault {
        let DurableFault::Damaged(text) = fault else {
            return fault;
        };
        match self.store.check_place().await {
            Ok(()) => DurableFault::Unavailable(text),
            Err(error) => error.into(),
        }
    }
}
