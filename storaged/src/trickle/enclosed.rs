//! Schema and torch metadata in the durable tier: objects of their own beside the manifest that names them. They are written
//! before it, so that a manifest that is there is whole, and compared with its digests whenever they are read.

use std::collections::BTreeMap;

use futures::FutureExt;
use storaged_core::DurableFault;
use storaged_wire::{Digest, Enclosure, EnclosureError, Enclosures, Manifest, SharedBytes};

use super::fault::damaged;
use super::store::{ObjectKey, StoreError};
use super::{Trickle, object};

/// Which of the two.
#[derive(Debug, Clone, Copy)]
enum EnclosedObject {
    Schema,
    /// As the trainer packed it.
    TorchMetadata,
}

impl EnclosedObject {
    /// Its name within a checkpoint's folder.
    fn name(self) -> &'static str {
        match self {
            Self::Schema => "storaged.schema",
            Self::TorchMetadata => "storaged.torch_metadata",
        }
    }

    fn of(self, enclosures: &mut Enclosures) -> &mut SharedBytes {
        match self {
            Self::Schema => &mut enclosures.schema,
            Self::TorchMetadata => &mut enclosures.torch_metadata,
        }
    }
}

/// What became of a search for one of them.
enum Lookup {
    Found(SharedBytes),
    /// What is wrong with it.
    Faulty(String),
}

/// What manifests name, as the tier has it.
#[derive(Debug, Default)]
pub(super) struct NamedObjects {
    pub bytes: BTreeMap<Digest, SharedBytes>,
    /// What is wrong with the others.
    faults: BTreeMap<Digest, String>,
}

impl NamedObjects {
    pub fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Others of the newest steps have some of what these lack.
    pub fn take_from(&mut self, others: &BTreeMap<Digest, SharedBytes>) {
        let found: Vec<Digest> = self.faults.keys().copied().collect();
        for name in found {
            if let Some(bytes) = others.get(&name) {
                let reason = self.faults.remove(&name);
                tracing::warn!(
                    reason,
                    "what a step in the durable tier names is read from another step"
                );
                self.bytes.insert(name, bytes.clone());
            }
        }
    }

    /// What is wrong with something that a manifest names.
    pub fn fault_of(&self, record: &Manifest) -> Option<String> {
        let mut faults = named(record).filter_map(|(_, it)| self.faults.get(&it.digest));
        faults.next().cloned()
    }
}

impl Trickle {
    /// Writes what a manifest names. What an earlier attempt has written stays: the manifest may be there already, and must not
    /// be without it for a moment.
    pub(super) async fn put_enclosures(
        &self,
        record: &Manifest,
        enclosures: &Enclosures,
    ) -> Result<(), DurableFault> {
        let mut enclosures = enclosures.clone();
        for (which, enclosure) in named(record) {
            let key = object(record, which.name())?;
            match self.enclosure_at(&key, enclosure).await {
                Ok(_) => continue,
                Err(DurableFault::Damaged(_)) => {}
                Err(fault) => return Err(fault),
            }
            let bytes = which.of(&mut enclosures).to_vec();
            self.put_mine(&key, bytes.into()).await?;
        }
        Ok(())
    }

    /// Reads what manifests name, newest first, and is not known: each of it once, from the newest that has it.
    pub(super) async fn named_by(
        &self,
        records: &[&Manifest],
        known: &BTreeMap<Digest, SharedBytes>,
    ) -> Result<NamedObjects, DurableFault> {
        let mut wanted: BTreeMap<Digest, Vec<(ObjectKey, Enclosure)>> = BTreeMap::new();
        for record in records {
            for (which, enclosure) in named(record) {
                if !known.contains_key(&enclosure.digest) {
                    let key = object(record, which.name())?;
                    let places = wanted.entry(enclosure.digest).or_default();
                    places.push((key, enclosure));
                }
            }
        }
        let asked = wanted.values().map(|places| self.first_of(places).boxed());
        let read = futures::future::try_join_all(asked).await?;
        let mut found = NamedObjects::default();
        for (name, outcome) in wanted.into_keys().zip(read) {
            match outcome {
                Lookup::Found(bytes) => drop(found.bytes.insert(name, bytes)),
                Lookup::Faulty(reason) => drop(found.faults.insert(name, reason)),
            }
        }
        Ok(found)
    }

    /// The bytes from the first place that has them, or what is wrong at the first.
    async fn first_of(&self, places: &[(ObjectKey, Enclosure)]) -> Result<Lookup, DurableFault> {
        let mut fault = None;
        for (key, enclosure) in places {
            match (self.enclosure_at(key, *enclosure).await, fault.take()) {
                (Ok(bytes), None) => return Ok(Lookup::Found(bytes)),
                (Ok(bytes), Some(reason)) => {
                    tracing::warn!(reason, found = %key, "what a step in the durable tier names is read from another step");
                    return Ok(Lookup::Found(bytes));
                }
                (Err(DurableFault::Damaged(reason) | DurableFault::NotPlain(reason)), first) => {
                    fault = first.or(Some(reason));
                }
                (Err(fault), _) => return Err(fault),
            }
        }
        Ok(Lookup::Faulty(fault.unwrap_or_default()))
    }

    async fn enclosure_at(
        &self,
        key: &ObjectKey,
        enclosure: Enclosure,
    ) -> Result<SharedBytes, DurableFault> {
        let bytes = match self.store.get(key, None).await {
            Err(StoreError::NotFound { .. }) => {
                return Err(damaged(format!(
                    "{key}: expected {} bytes, got no object",
                    enclosure.length
                )));
            }
            outcome => outcome?,
        };
        let prove = move || {
            let proved: Result<(), EnclosureError> = enclosure.prove(&bytes);
            proved.map(|()| SharedBytes::from(bytes.to_vec()))
        };
        let proved = self.compute(prove).await.map_err(super::local)?;
        proved.map_err(|error| damaged(format!("{key}: {error}")))
    }
}

/// What a manifest names.
fn named(record: &Manifest) -> impl Iterator<Item = (EnclosedObject, Enclosure)> {
    let schema = record.schema.to_fetch();
    let schema = schema.map(|it| (EnclosedObject::Schema, it));
    let torch_metadata = record.torch_metadata.to_fetch();
    let torch_metadata = torch_metadata.map(|it| (EnclosedObject::TorchMetadata, it));
    schema.into_iter().chain(torch_metadata)
}
