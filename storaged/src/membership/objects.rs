//! Numbered records in an object store, one object each. Their names count down, so that the newest is the first of a listing.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_wire::Namespace;

use super::registry::{NumberedRecord, NumberedRecords, Proposal, RegistryError, name_of_number};
use crate::trickle::store::{KeyPrefix, ObjectKey, Store, StoreError};

/// The folder of the epochs.
const FOLDER: &str = "epochs";
/// What sorts before the newest record and is none, such as a file that a file system has hidden, is passed over.
const LOOKED_AT: usize = 50;

/// Records that are objects of one folder.
#[derive(Debug)]
pub struct ObjectRecords {
    store: Arc<dyn Store>,
    folder: String,
}

fn is_record(key: &ObjectKey) -> bool {
    let (_, name) = key.as_str().rsplit_once('/').unwrap_or_default();
    name.len() == name_of_number(0).len() && name.bytes().all(|byte| byte.is_ascii_digit())
}

impl ObjectRecords {
    /// The epochs in a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        let folder = FOLDER.into();
        Self { store, folder }
    }

    fn key(&self, number: u64) -> Result<ObjectKey, StoreError> {
        format!("{}/{}", self.folder, name_of_number(number)).parse()
    }
}

#[async_trait]
impl NumberedRecords for ObjectRecords {
    fn runs_of(&self, namespace: &Namespace) -> Arc<dyn NumberedRecords> {
        Arc::new(Self {
            store: self.store.clone(),
            folder: format!("runs/{namespace}"),
        })
    }

    async fn record(&self, number: u64) -> Result<Option<NumberedRecord>, RegistryError> {
        let key = self.key(number)?;
        match self.store.get(&key, None).await {
            Ok(bytes) => Ok(Some(NumberedRecord {
                name: key.to_string(),
                bytes,
            })),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn newest(&self) -> Result<Option<NumberedRecord>, RegistryError> {
        let folder: KeyPrefix = KeyPrefix::folder(self.folder.parse()?);
        let page = self.store.list_page(&folder, None, LOOKED_AT).await?;
        let Some(entry) = page.entries.iter().find(|entry| is_record(&entry.key)) else {
            return Ok(None);
        };
        Ok(Some(NumberedRecord {
            name: entry.key.to_string(),
            bytes: self.store.get(&entry.key, None).await?,
        }))
    }

    async fn create(&self, number: u64, record: Bytes) -> Result<Proposal, RegistryError> {
        match self.store.put_new(&self.key(number)?, record).await {
            Ok(()) => Ok(Proposal::Taken),
            Err(StoreError::AlreadyExists { .. }) => Ok(Proposal::Outrun),
            Err(error) => Err(error.into()),
        }
    }

    async fn check_place(&self) -> Result<(), RegistryError> {
        Ok(self.store.check_place().await?)
    }
}
