//! Keys of jobs, by which checkpoints in the durable tier are told from forged ones. A key is made of the token that a trainer or a
//! reader says at its hello. It is kept beside the job's other records as long as the node knows the job, because its checkpoints are
//! published when their trainers may have gone. It is told to a node that is to publish and has none, and to nobody else: not in
//! status, not in logs.

use storaged_wire::peer::{CheckpointKey, HighMark, PeerMessage};
use storaged_wire::provenance::{KeyTold, KeyWanted};
use storaged_wire::{
    CheckpointState, Digest, DurableStep, JobKeys, KeptNamespace, Namespace, NodeName, Owner,
    RunId, Step,
};

use super::identify::Identity;
use crate::api::{Authorship, ConnId, Trust};
use crate::context::Context;
use crate::limits;
use crate::manifest_keys::SaidKeys;

impl Context {
    /// Somebody says a token that was compared. An operator reads in the owner's name without the job's token.
    pub(super) fn keys_said(&mut self, conn: ConnId, namespace: &Namespace, identity: &Identity) {
        let orders = identity.said.map(|said| said.orders);
        let said = identity.keys.clone().map(|keys| SaidKeys { keys, orders });
        match said {
            Some(said) => drop(self.keys.said.insert(conn, said)),
            None => drop(self.keys.said.remove(&conn)),
        }
        if self.owner_of(namespace) == Some(identity.owner) {
            self.keep_key(conn, namespace);
        }
    }

    /// What a connection said are the keys of its job, which is known by now. Its token may have been changed since.
    pub(super) fn keep_key(&mut self, conn: ConnId, namespace: &Namespace) {
        let said = self.keys.said.get(&conn).cloned();
        let proven = self.successions.proven(namespace);
        let is_newest = |said: &SaidKeys| proven.is_none_or(|it| it.is_under(&said.keys.newest));
        if let Some(SaidKeys { keys, orders }) = said.filter(is_newest) {
            self.set_keys(namespace, keys);
            let owner = self.owner_of(namespace);
            if let Some((orders, owner)) = orders.zip(owner)
                && self.keys.note_orders(namespace, owner, orders)
            {
                self.keeping.touch_job(namespace);
            }
        }
    }

    pub(super) fn set_keys(&mut self, namespace: &Namespace, keys: JobKeys) {
        self.keys.asked.remove(namespace);
        let before = self.keys.jobs.insert(namespace.clone(), keys);
        if before.as_ref() != self.keys.of_job(namespace) {
            self.keeping.touch_job(namespace);
        }
    }

    /// An earlier daemon of this node knew it.
    pub(crate) fn recover_key(&mut self, job: &KeptNamespace) {
        if planted!("keys_end_with_the_daemon") {
            return;
        }
        if let Some(newest) = job.manifest_key {
            let retired = job.retired_keys.clone().unwrap_or_default();
            let keys = JobKeys { newest, retired };
            self.keys.jobs.insert(job.namespace.clone(), keys);
        }
        if let Some(orders) = job.order_key {
            self.keys.note_orders(&job.namespace, job.owner, orders);
        }
        if let Some(durable) = job.durable {
            self.keys.durable.insert(job.namespace.clone(), durable);
        }
        if let Some(with_mac) = job.with_mac {
            self.keys.with_mac.insert(job.namespace.clone(), with_mac);
        }
    }

    /// What somebody who said who he is believes of the durable tier.
    pub(crate) fn trust_of(&self, conn: ConnId, owner: Owner) -> Trust {
        match self.keys.said.get(&conn) {
            _ if planted!("forged_steps_believed") => Trust::Anything,
            Some(SaidKeys { keys, .. }) => Trust::Job {
                owner,
                keys: bounded(keys.clone()),
                known: self.known_with_mac(conn),
            },
            None => Trust::Nothing { owner },
        }
    }

    fn known_with_mac(&self, conn: ConnId) -> Option<DurableStep> {
        let namespace = &self.conns.get(&conn)?.namespace;
        self.keys.with_mac(namespace)
    }

    /// By what a checkpoint that is to be published is authenticated; none while peers are asked for it.
    pub(crate) fn authorship(&mut self, key: &CheckpointKey, owner: Owner) -> Option<Authorship> {
        let namespace = &key.namespace;
        let newest = self.keys.durable(namespace);
        let predecessor = newest.filter(|it| (it.run, it.step) < (key.run, key.step));
        let by = |keys| Some(Authorship { keys, predecessor });
        if let Some(known) = self.keys.of_job(namespace) {
            return by(Some(known.clone()));
        }
        let is_first = self.successions.proven(namespace).is_none()
            && !self.keys.retired.contains_key(namespace);
        if is_first && owner == Owner::of_token(b"") {
            return by(Some(JobKeys::of_token(namespace, b"")));
        }
        let now = self.now;
        let since = *self.keys.asked.entry(namespace.clone()).or_insert(now);
        // Behind steps that have a MAC none is offered without one: where the newest key exists, it is waited for.
        let is_late = is_first && now.since(since) >= limits::KEY_WAIT_MS;
        if is_late || planted!("published_without_asking") {
            return by(None);
        }
        self.send_all(&PeerMessage::KeyWanted(KeyWanted {
            namespace: namespace.clone(),
            owner,
        }));
        None
    }

    /// Hears a message about keys; any other comes back.
    pub(super) fn hear_of_keys(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::KeyWanted(KeyWanted { namespace, owner }) => {
                let is_its = self.owner_of(&namespace) == Some(owner);
                if let Some(keys) = self.keys.of_job(&namespace).filter(|_| is_its) {
                    let told = KeyTold {
                        owner,
                        key: keys.newest,
                        retired: Some(keys.retired.clone()),
                        namespace,
                    };
                    self.send(from, PeerMessage::KeyTold(told));
                }
            }
            PeerMessage::KeyTold(KeyTold {
                namespace,
                owner,
                key,
                retired,
            }) => {
                // What a trainer said here counts more than what a peer says, and nobody is believed who was not asked.
                let is_asked = self.keys.asked.contains_key(&namespace);
                let is_its = self.owner_of(&namespace) == Some(owner);
                let proven = self.successions.proven(&namespace);
                let is_newest = proven.is_none_or(|it| it.is_under(&key))
                    && self.keys.retired.get(&namespace) != Some(&key);
                if is_asked && is_its && is_newest && self.keys.of_job(&namespace).is_none() {
                    let keys = JobKeys {
                        newest: key,
                        retired: retired.unwrap_or_default(),
                    };
                    self.set_keys(&namespace, keys);
                    self.start_publishing();
                }
            }
            PeerMessage::Rotated(rotated) => self.rotated_told(from, *rotated),
            PeerMessage::DurableRemoved { namespace, owner } => {
                if self.owner_of(&namespace) == Some(owner) {
                    self.forget_durable(&namespace);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// Whoever owns a job has removed checkpoints of it: nothing that is missing now was taken away by somebody else.
    pub(crate) fn removed_in_order(&mut self, namespace: &Namespace, owner: Owner) {
        self.forget_durable(namespace);
        self.send_all(&PeerMessage::DurableRemoved {
            namespace: namespace.clone(),
            owner,
        });
    }

    fn forget_durable(&mut self, namespace: &Namespace) {
        self.keys.forget_durable(namespace);
        self.keeping.touch_job(namespace);
    }

    /// A checkpoint has reached a state: the newest durable one is remembered, should the tier not list it later.
    pub(crate) fn note_durable_step(&mut self, key: &CheckpointKey, state: CheckpointState) {
        let name = self.checkpoints.get(key).and_then(|it| it.name());
        if let (CheckpointState::Durable, Some(manifest)) = (state, name) {
            let step = DurableStep {
                run: key.run,
                step: key.step,
                manifest,
            };
            self.remember_durable(&key.namespace, step);
        }
    }

    fn remember_durable(&mut self, namespace: &Namespace, step: DurableStep) {
        if self.owner_of(namespace).is_some() {
            self.keys.note_durable(namespace, step);
            self.keeping.touch_job(namespace);
        }
    }

    /// A checkpoint is in the tier with a MAC: a listing has compared it, or this node has published it.
    pub(crate) fn remember_mac(&mut self, namespace: &Namespace, step: DurableStep) {
        self.remember_durable(namespace, step);
        if self.owner_of(namespace).is_some() {
            self.keys.note_mac(namespace, step);
        }
    }

    /// This node has published a checkpoint, with a MAC if it has the key.
    pub(crate) fn note_published(&mut self, key: &CheckpointKey, manifest: Digest) {
        if self.keys.of_job(&key.namespace).is_some() {
            let (run, step) = (key.run, key.step);
            let step = DurableStep {
                run,
                step,
                manifest,
            };
            self.remember_mac(&key.namespace, step);
        }
    }
}

/// A retired key counts for what was durable when its token was changed.
fn bounded(mut keys: JobKeys) -> JobKeys {
    if planted!("retired_keys_count_for_ever") {
        for one in &mut keys.retired {
            one.up_to = Some(HighMark {
                run: RunId::new(limits::RUN_NUMBER_MAX),
                step: Step::new(u64::MAX),
            });
        }
    }
    keys
}
