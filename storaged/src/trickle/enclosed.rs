//! Schema and torch metadata in the durable tier: objects of their own beside the manifest that names them. They are written
//! before it, so that a manifest that is there is whole, and compared with its digests whenever they are read.

use storaged_core::DurableFault;
use storaged_wire::{Enclosure, EnclosureError, Enclosures, Manifest, ManifestBytes, SharedBytes};

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

    /// Reads what a manifest names, or says which of it is not there or not what it should be.
    pub(super) async fn enclosures(
        &self,
        manifest: &ManifestBytes,
    ) -> Result<Enclosures, DurableFault> {
        let record = manifest.manifest();
        let mut found = Enclosures::default();
        for (which, enclosure) in named(record) {
            let key = object(record, which.name())?;
            *which.of(&mut found) = self.enclosure_at(&key, enclosure).await?;
        }
        Ok(found)
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
