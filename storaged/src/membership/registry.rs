//! Where rosters lie: one record per epoch, created by whoever proposes it first and never changed, in a store that is linearizable. Which
//! one that is, [`EpochRecords`] hides: an object store (`objects`) or etcd (`etcd`).

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use thiserror::Error;

use super::etcd::EtcdError;
use super::roster::{Roster, RosterError};
use crate::trickle::store::StoreError;

/// Why the roster cannot be read or changed.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// The store.
    #[error(
        "the registry of members (membership.registry, whose keys are those of [durable]) cannot be used"
    )]
    Store(#[from] StoreError),
    /// etcd.
    #[error("etcd, the registry of members (membership.registry), cannot be used")]
    Etcd(#[from] EtcdError),
    /// What lies in it.
    #[error(
        "{name} in the registry of members cannot be used (delete it if no node of this cluster has written it)"
    )]
    Roster {
        name: String,
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

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochRecord {
    /// As the store names it, which counts down.
    pub name: String,
    /// What lies there.
    pub bytes: Bytes,
}

/// EpochRecords by epoch, in a store that agrees on which of two writers came first. Reads see what was written before they began.
#[async_trait]
pub trait EpochRecords: fmt::Debug + Send + Sync {
    /// What lies under an epoch.
    async fn record(&self, epoch: u64) -> Result<Option<EpochRecord>, RegistryError>;

    /// The newest one.
    async fn newest(&self) -> Result<Option<EpochRecord>, RegistryError>;

    /// Creates one, unless another lies there. One that is the same was created by this call, whose answer was lost.
    async fn create(&self, epoch: u64, record: Bytes) -> Result<Proposal, RegistryError>;

    /// What is not there counts only if the place is still the one that was opened.
    async fn check_place(&self) -> Result<(), RegistryError>;
}

/// Under which name an epoch lies: the newest sorts first.
pub(super) fn name_of_epoch(epoch: u64) -> String {
    format!("{:020}", u64::MAX - epoch)
}

/// The registry of a cluster.
#[derive(Debug, Clone)]
pub struct Registry {
    records: Arc<dyn EpochRecords>,
}

impl Registry {
    /// Over records.
    pub fn new(records: Arc<dyn EpochRecords>) -> Self {
        Self { records }
    }

    /// The newest roster; none in an empty registry.
    ///
    /// # Errors
    /// [`RegistryError`] if it cannot be read.
    pub async fn newest(&self) -> Result<Option<Roster>, RegistryError> {
        match self.records.newest().await? {
            Some(found) => Ok(Some(parsed(&found)?)),
            // An empty place counts only if it is still the one that was opened.
            None => {
                self.records.check_place().await?;
                Ok(None)
            }
        }
    }

    /// The newest roster above a known one, which it goes on from; none if that is the newest. One small request where nothing has changed.
    ///
    /// # Errors
    /// [`RegistryError`] if it cannot be read, or has gone back and on another way: what others have agreed on there since knows nothing of
    /// what this node has seen.
    pub async fn newer_than(&self, known: &Roster) -> Result<Option<Roster>, RegistryError> {
        let Some(next) = self.read(known.epoch + 1).await? else {
            return Ok(None);
        };
        self.confirm(known).await?;
        let newest = self.newest().await?;
        let found = newest.filter(|it| it.epoch >= next.epoch && it.cluster == known.cluster);
        found.map(Some).ok_or_else(|| gone_back(known, None))
    }

    /// Whether the roster that is known here is still part of the registry: one that was put back from an older copy has
    /// other epochs, or none.
    ///
    /// # Errors
    /// [`RegistryError::GoneBack`] if it is not.
    pub async fn confirm(&self, known: &Roster) -> Result<(), RegistryError> {
        match self.read(known.epoch).await? {
            Some(found) if found == *known => Ok(()),
            Some(found) => Err(gone_back(known, Some(&found))),
            None => {
                self.records.check_place().await?;
                Err(gone_back(known, None))
            }
        }
    }

    /// Proposes the next epoch.
    ///
    /// # Errors
    /// [`RegistryError`] if the store does not answer: then it may have been taken all the same, which the next read tells.
    pub async fn propose(&self, roster: &Roster) -> Result<Proposal, RegistryError> {
        let bytes = Bytes::from(roster.bytes());
        self.records.create(roster.epoch, bytes).await
    }

    async fn read(&self, epoch: u64) -> Result<Option<Roster>, RegistryError> {
        let found = self.records.record(epoch).await?;
        found.as_ref().map(parsed).transpose()
    }
}

/// What was found, if it is the roster of the epoch that its name ends with.
fn parsed(found: &EpochRecord) -> Result<Roster, RegistryError> {
    let of_name = |source| RegistryError::Roster {
        name: found.name.clone(),
        source,
    };
    let roster = Roster::parse(&found.bytes).map_err(of_name)?;
    if found.name.ends_with(&name_of_epoch(roster.epoch)) {
        return Ok(roster);
    }
    let epoch = roster.epoch;
    let reason = "it lies under the name of another epoch".into();
    Err(of_name(RosterError::Inconsistent { epoch, reason }))
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
