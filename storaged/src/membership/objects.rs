//! Rosters in an object store: one object per epoch. Their names count down, so that the newest is the first of a listing.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::registry::{EpochRecord, EpochRecords, Proposal, RegistryError, name_of_epoch};
use crate::trickle::store::{KeyPrefix, ObjectKey, Store, StoreError};

/// The folder of the epochs.
const FOLDER: &str = "epochs";
/// What sorts before the newest epoch and is none, such as a file that a file system has hidden, is passed over.
const LOOKED_AT: usize = 50;

/// EpochRecords that are objects.
#[derive(Debug)]
pub struct ObjectRecords {
    store: Arc<dyn Store>,
}

fn key(epoch: u64) -> Result<ObjectKey, StoreError> {
    format!("{FOLDER}/{}", name_of_epoch(epoch)).parse()
}

fn is_epoch(key: &ObjectKey) -> bool {
    let (_, name) = key.as_str().rsplit_once('/').unwrap_or_default();
    name.len() == name_of_epoch(0).len() && name.bytes().all(|byte| byte.is_ascii_digit())
}

impl ObjectRecords {
    /// In a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }
}

#[async_trait]
impl EpochRecords for ObjectRecords {
    async fn record(&self, epoch: u64) -> Result<Option<EpochRecord>, RegistryError> {
        let key = key(epoch)?;
        match self.store.get(&key, None).await {
            Ok(bytes) => Ok(Some(EpochRecord {
                name: key.to_string(),
                bytes,
            })),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn newest(&self) -> Result<Option<EpochRecord>, RegistryError> {
        let folder: KeyPrefix = KeyPrefix::folder(FOLDER.parse()?);
        let page = self.store.list_page(&folder, None, LOOKED_AT).await?;
        let Some(entry) = page.entries.iter().find(|entry| is_epoch(&entry.key)) else {
            return Ok(None);
        };
        Ok(Some(EpochRecord {
            name: entry.key.to_string(),
            bytes: self.store.get(&entry.key, None).await?,
        }))
    }

    async fn create(&self, epoch: u64, record: Bytes) -> Result<Proposal, RegistryError> {
        match self.store.put_new(&key(epoch)?, record).await {
            Ok(()) => Ok(Proposal::Taken),
            Err(StoreError::AlreadyExists { .. }) => Ok(Proposal::Outrun),
            Err(error) => Err(error.into()),
        }
    }

    async fn check_place(&self) -> Result<(), RegistryError> {
        Ok(self.store.check_place().await?)
    }
}
