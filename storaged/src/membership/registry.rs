//! Where rosters lie: one object per epoch, created by whoever proposes it first and never changed. The names count down, so that
//! the newest is the first of a listing.

use std::sync::Arc;

use bytes::Bytes;
use thiserror::Error;

use super::roster::{Roster, RosterError};
use crate::trickle::store::{KeyPrefix, ObjectKey, Store, StoreError};

/// The folder of the epochs.
const FOLDER: &str = "epochs";

/// What sorts before the newest epoch and is none, such as a file that a file system has hidden, is passed over.
const LOOKED_AT: usize = 50;
/// Digits of an object's name.
const DIGITS: usize = 20;

fn is_epoch(key: &ObjectKey) -> bool {
    let (_, name) = key.as_str().rsplit_once('/').unwrap_or_default();
    name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_digit())
}

/// Why the roster cannot be read or changed.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// The store.
    #[error(
        "the registry of members (membership.registry, whose keys are those of [durable]) cannot be used"
    )]
    Store(#[from] StoreError),
    /// What lies in it.
    #[error("{key} in the registry of members cannot be used")]
    Roster {
        key: ObjectKey,
        #[source]
        source: RosterError,
    },
    /// Somebody has put an older state of the store back.
    #[error(
        "the registry of members has gone back: expected the roster of epoch {known}, got {found}; what is known here stays, and nothing is proposed"
    )]
    GoneBack { known: u64, found: String },
}

/// How a proposal went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proposal {
    /// It is the newest epoch.
    Taken,
    /// Somebody else's came first: read that and think again.
    Outrun,
}

/// The registry of a cluster.
#[derive(Debug, Clone)]
pub struct Registry {
    store: Arc<dyn Store>,
}

fn key(epoch: u64) -> Result<ObjectKey, StoreError> {
    format!("{FOLDER}/{:020}", u64::MAX - epoch).parse()
}

impl Registry {
    /// In a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// The newest roster; none in an empty registry.
    ///
    /// # Errors
    /// [`RegistryError`] if it cannot be read.
    pub async fn newest(&self) -> Result<Option<Roster>, RegistryError> {
        let folder: KeyPrefix = KeyPrefix::folder(FOLDER.parse()?);
        let page = self.store.list_page(&folder, None, LOOKED_AT).await?;
        match page.entries.iter().find(|entry| is_epoch(&entry.key)) {
            Some(entry) => Ok(Some(self.read(&entry.key).await?)),
            // An empty place counts only if it is still the one that was opened.
            None => {
                self.store.check_place().await?;
                Ok(None)
            }
        }
    }

    /// The newest roster above a known one; none if that is the newest. One small request where nothing has changed.
    ///
    /// # Errors
    /// [`RegistryError`] if it cannot be read.
    pub async fn newer_than(&self, known: &Roster) -> Result<Option<Roster>, RegistryError> {
        match self.read(&key(known.epoch + 1)?).await {
            Err(RegistryError::Store(StoreError::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
            Ok(next) => {
                let newest = self.newest().await?;
                let found =
                    newest.filter(|it| it.epoch >= next.epoch && it.cluster == known.cluster);
                found.map(Some).ok_or_else(|| gone_back(known, None))
            }
        }
    }

    /// Whether the roster that is known here is still part of the registry: one that was put back from an older copy has
    /// other epochs, or none.
    ///
    /// # Errors
    /// [`RegistryError::GoneBack`] if it is not.
    pub async fn confirm(&self, known: &Roster) -> Result<(), RegistryError> {
        match self.read(&key(known.epoch)?).await {
            Ok(found) if found == *known => Ok(()),
            Ok(found) => Err(gone_back(known, Some(&found))),
            Err(RegistryError::Store(StoreError::NotFound { .. })) => {
                self.store.check_place().await?;
                Err(gone_back(known, None))
            }
            Err(error) => Err(error),
        }
    }

    /// Proposes the next epoch.
    ///
    /// # Errors
    /// [`RegistryError`] if the store does not answer: then it may have been taken all the same, which the next read tells.
    pub async fn propose(&self, roster: &Roster) -> Result<Proposal, RegistryError> {
        let bytes = Bytes::from(roster.bytes());
        match self.store.put_new(&key(roster.epoch)?, bytes).await {
            Ok(()) => Ok(Proposal::Taken),
            Err(StoreError::AlreadyExists { .. }) => Ok(Proposal::Outrun),
            Err(error) => Err(error.into()),
        }
    }

    async fn read(&self, key: &ObjectKey) -> Result<Roster, RegistryError> {
        let bytes = self.store.get(key, None).await?;
        let of_key = |source| RegistryError::Roster {
            key: key.clone(),
            source,
        };
        let roster = Roster::parse(&bytes).map_err(of_key)?;
        if self::key(roster.epoch)? == *key {
            return Ok(roster);
        }
        let epoch = roster.epoch;
        let reason = "it lies under the name of another epoch".into();
        Err(of_key(RosterError::Inconsistent { epoch, reason }))
    }
}

pub(super) fn gone_back(known: &Roster, found: Option<&Roster>) -> RegistryError {
    RegistryError::GoneBack {
        known: known.epoch,
        found: found.map_or_else(
            || "none".into(),
            |it| format!("another one ({})", it.change),
        ),
    }
}
