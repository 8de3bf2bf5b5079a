//! Where rosters lie, and runs (`run_records`): one record per number, created by whoever proposes it first and never changed, in a store that is
//! linearizable. Which one that is, [`NumberedRecords`] hides: an object store (`objects`), etcd (`etcd`) or Kubernetes (`kubernetes`).

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_core::limits::EPOCHS_KEPT;
use storaged_wire::{Namespace, RunId};
use thiserror::Error;

use super::cluster_name::ClusterName;
use super::etcd::EtcdError;
use super::kubernetes::KubernetesError;
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
    /// Kubernetes.
    #[error("Kubernetes, the registry of members (membership.registry), cannot be used")]
    Kubernetes(#[from] KubernetesError),
    /// What lies in it.
    #[error(
        "{name} in the registry of members cannot be used (delete it if no node of this cluster has written it)"
    )]
    Roster {
        name: String,
        #[source]
        source: RosterError,
    },
    /// What lies in it under the name of a run.
    #[error(
        "{name} in the registry (membership.registry) is no run of {namespace}: expected {expected}, got {got} (delete it if no node of this cluster has written it)"
    )]
    Run {
        name: String,
        namespace: Namespace,
        expected: String,
        got: String,
    },
    /// A store that is not linearizable, or that somebody changes.
    #[error(
        "the registry (membership.registry) has lost run {run} of {namespace}, which it has just taken"
    )]
    RunLost { namespace: Namespace, run: RunId },
    /// It was given to two clusters.
    #[error(
        "the registry of members is another cluster's: expected {expected} (membership.cluster), got {got}: give each cluster a registry of its own"
    )]
    AnotherCluster { expected: ClusterName, got: String },
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
pub struct NumberedRecord {
    /// As the store names it, which counts down.
    pub name: String,
    /// What lies there.
    pub bytes: Bytes,
}

/// Records by number, in a store that agrees on which of two writers came first. Reads see what was written before they began.
#[async_trait]
pub trait NumberedRecords: fmt::Debug + Send + Sync {
    /// Those of a namespace's runs, in the same store.
    fn runs_of(&self, namespace: &Namespace) -> Arc<dyn NumberedRecords>;

    /// What lies under a number.
    async fn record(&self, number: u64) -> Result<Option<NumberedRecord>, RegistryError>;

    /// The newest one.
    async fn newest(&self) -> Result<Option<NumberedRecord>, RegistryError>;

    /// Creates one, unless another lies there. One that is the same was created by this call, whose answer was lost.
    async fn create(&self, number: u64, record: Bytes) -> Result<Proposal, RegistryError>;

    /// What is not there counts only if the place is still the one that was opened.
    async fn check_place(&self) -> Result<(), RegistryError>;
}

/// Under which name a number lies: the newest sorts first.
pub(super) fn name_of_number(number: u64) -> String {
    format!("{:020}", u64::MAX - number)
}

/// The registry of a cluster.
#[derive(Debug, Clone)]
pub struct Registry {
    pub(super) records: Arc<dyn NumberedRecords>,
    cluster: Option<ClusterName>,
}

impl Registry {
    /// Over records.
    pub fn new(records: Arc<dyn NumberedRecords>) -> Self {
        let cluster = None;
        Self { records, cluster }
    }

    /// That must be this cluster's, if it has a name.
    #[must_use]
    pub fn of_cluster(self, cluster: Option<ClusterName>) -> Self {
        Self { cluster, ..self }
    }

    /// The newest roster; none in an empty registry.
    ///
    /// # Errors
    /// [`RegistryError`] if it cannot be read.
    pub async fn newest(&self) -> Result<Option<Roster>, RegistryError> {
        match self.records.newest().await? {
            Some(found) => Ok(Some(self.checked(&found)?)),
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

    /// The rosters between two, as far as they are remembered. What cannot be read as one is passed over: the newest counts.
    ///
    /// # Errors
    /// [`RegistryError`] if the store does not answer.
    pub(super) async fn between(
        &self,
        known: &Roster,
        newest: &Roster,
    ) -> Result<Vec<Roster>, RegistryError> {
        let first = (known.epoch + 1).max(newest.epoch.saturating_sub(EPOCHS_KEPT as u64 - 1));
        let mut found = Vec::new();
        for epoch in first..newest.epoch {
            match self.read(epoch).await {
                Ok(roster) => found.extend(roster),
                Err(RegistryError::Roster { .. } | RegistryError::AnotherCluster { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
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
        found.as_ref().map(|it| self.checked(it)).transpose()
    }

    fn checked(&self, found: &NumberedRecord) -> Result<Roster, RegistryError> {
        let roster = parsed(found)?;
        match &self.cluster {
            Some(expected) if !expected.is(&roster.cluster) => Err(RegistryError::AnotherCluster {
                expected: expected.clone(),
                got: roster.cluster,
            }),
            _ => Ok(roster),
        }
    }
}

/// What was found, if it is the roster of the epoch that its name ends with.
fn parsed(found: &NumberedRecord) -> Result<Roster, RegistryError> {
    let of_name = |source| RegistryError::Roster {
        name: found.name.clone(),
        source,
    };
    let roster = Roster::parse(&found.bytes).map_err(of_name)?;
    if found.name.ends_with(&name_of_number(roster.epoch)) {
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
