//! The table of what is known of jobs for the durable tier: their keys, and what was durable. What is made of it is in
//! `stage/manifest_key.rs`.

use std::collections::BTreeMap;

use storaged_wire::peer::OrderKey;
use storaged_wire::{DurableStep, JobKeys, ManifestKey, Namespace, Owner};

use crate::api::{ConnId, Now};

/// What a token that was said gives.
#[derive(Debug, Clone)]
pub(crate) struct SaidKeys {
    pub keys: JobKeys,
    /// None for an operator who reads without the token that opens the job.
    pub orders: Option<OrderKey>,
}

/// What is known of jobs beside their tables.
#[derive(Debug, Default)]
pub(crate) struct ManifestKeys {
    /// By whom it was said.
    pub said: BTreeMap<ConnId, SaidKeys>,
    pub jobs: BTreeMap<Namespace, JobKeys>,
    /// Of jobs whose token was said here: what proves an order to let a job go.
    orders: BTreeMap<Namespace, (Owner, OrderKey)>,
    /// The newest checkpoint known to have been durable.
    pub durable: BTreeMap<Namespace, DurableStep>,
    /// The newest known to have a MAC: a release before MACs may have published others.
    pub with_mac: BTreeMap<Namespace, DurableStep>,
    /// Those that the tier says were retired: peers that have not heard of it tell them.
    pub retired: BTreeMap<Namespace, ManifestKey>,
    /// Since when peers are asked for a key.
    pub asked: BTreeMap<Namespace, Now>,
}

impl ManifestKeys {
    pub fn of_job(&self, namespace: &Namespace) -> Option<&JobKeys> {
        self.jobs.get(namespace)
    }

    pub fn durable(&self, namespace: &Namespace) -> Option<DurableStep> {
        self.durable.get(namespace).copied()
    }

    pub fn with_mac(&self, namespace: &Namespace) -> Option<DurableStep> {
        self.with_mac.get(namespace).copied()
    }

    /// That of a job which belongs to this owner.
    pub fn orders(&self, namespace: &Namespace, owner: Owner) -> Option<OrderKey> {
        let (of, key) = self.orders.get(namespace)?;
        (*of == owner).then_some(*key)
    }

    /// Whether it was not known.
    pub fn note_orders(&mut self, namespace: &Namespace, owner: Owner, key: OrderKey) -> bool {
        self.orders.insert(namespace.clone(), (owner, key)) != Some((owner, key))
    }

    /// A connection is gone.
    pub fn forget(&mut self, conn: ConnId) {
        self.said.remove(&conn);
    }

    /// The node knows nothing of a job any more.
    pub fn forget_job(&mut self, namespace: &Namespace) {
        self.jobs.remove(namespace);
        self.orders.remove(namespace);
        self.retired.remove(namespace);
        self.durable.remove(namespace);
        self.with_mac.remove(namespace);
        self.asked.remove(namespace);
    }

    /// The job's owner has removed checkpoints: none of them is missed.
    pub fn forget_durable(&mut self, namespace: &Namespace) {
        self.durable.remove(namespace);
        self.with_mac.remove(namespace);
    }

    pub fn note_durable(&mut self, namespace: &Namespace, step: DurableStep) {
        remember(&mut self.durable, namespace, step);
    }

    pub fn note_mac(&mut self, namespace: &Namespace, step: DurableStep) {
        remember(&mut self.with_mac, namespace, step);
    }
}

fn remember(
    steps: &mut BTreeMap<Namespace, DurableStep>,
    namespace: &Namespace,
    step: DurableStep,
) {
    let known = steps.entry(namespace.clone()).or_insert(step);
    *known = (*known).max(step);
}
