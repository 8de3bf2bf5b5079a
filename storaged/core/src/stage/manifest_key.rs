//! Keys of jobs, by which checkpoints in the durable tier are told from forged ones. A key is made of the token that a trainer or a
//! reader says at its hello. It is kept beside the job's other records as long as the node knows the job, because its checkpoints are
//! published when their trainers may have gone. It is told to a node that is to publish and has none, and to nobody else: not in
//! status, not in logs.

use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::provenance::{KeyTold, KeyWanted};
use storaged_wire::{
    CheckpointState, Digest, DurableStep, KeptNamespace, ManifestKey, Namespace, NodeName, Owner,
};

use crate::api::{Authorship, ConnId, Trust};
use crate::context::Context;
use crate::limits;

impl Context {
    /// Somebody says a token whose owner was compared. An operator reads in the owner's name without the job's token.
    pub(super) fn key_said(
        &mut self,
        conn: ConnId,
        namespace: &Namespace,
        owner: Owner,
        token: &[u8],
    ) {
        let key = if owner == Owner::of_token(token) {
            Some(ManifestKey::of_token(namespace, token))
        } else {
            self.keys.of_job(namespace)
        };
        match key {
            Some(key) => drop(self.keys.said.insert(conn, key)),
            None => drop(self.keys.said.remove(&conn)),
        }
        if self.owner_of(namespace) == Some(owner) {
            self.keep_key(conn, namespace);
        }
    }

    /// What a connection said is the key of its job, which is known by now.
    pub(super) fn keep_key(&mut self, conn: ConnId, namespace: &Namespace) {
        if let Some(key) = self.keys.said.get(&conn).copied() {
            self.set_key(namespace, key);
        }
    }

    fn set_key(&mut self, namespace: &Namespace, key: ManifestKey) {
        self.keys.asked.remove(namespace);
        if self.keys.jobs.insert(namespace.clone(), key) != Some(key) {
            self.keeping.touch_job(namespace);
        }
    }

    /// An earlier daemon of this node knew it.
    pub(crate) fn recover_key(&mut self, job: &KeptNamespace) {
        if planted!("keys_end_with_the_daemon") {
            return;
        }
        if let Some(key) = job.manifest_key {
            self.keys.jobs.insert(job.namespace.clone(), key);
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
            Some(key) => Trust::Job {
                owner,
                key: *key,
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
        let by = |key| Some(Authorship { key, predecessor });
        if let Some(known) = self.keys.of_job(namespace) {
            return by(Some(known));
        }
        if owner == Owner::of_token(b"") {
            return by(Some(ManifestKey::of_token(namespace, b"")));
        }
        let now = self.now;
        let since = *self.keys.asked.entry(namespace.clone()).or_insert(now);
        if now.since(since) >= limits::KEY_WAIT_MS || planted!("published_without_asking") {
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
                if let Some(key) = self.keys.of_job(&namespace).filter(|_| is_its) {
                    let told = KeyTold {
                        namespace,
                        owner,
                        key,
                    };
                    self.send(from, PeerMessage::KeyTold(told));
                }
            }
            PeerMessage::KeyTold(KeyTold {
                namespace,
                owner,
                key,
            }) => {
                // What a trainer said here counts more than what a peer says, and nobody is believed who was not asked.
                let is_asked = self.keys.asked.contains_key(&namespace);
                let is_its = self.owner_of(&namespace) == Some(owner);
                if is_asked && is_its && self.keys.of_job(&namespace).is_none() {
                    self.set_key(&namespace, key);
                    self.start_publishing();
                }
            }
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
        if self.namespaces.contains_key(namespace) {
            self.keys.note_durable(namespace, step);
            self.keeping.touch_job(namespace);
        }
    }

    /// A checkpoint is in the tier with a MAC: a listing has compared it, or this node has published it.
    pub(crate) fn remember_mac(&mut self, namespace: &Namespace, step: DurableStep) {
        self.remember_durable(namespace, step);
        if self.namespaces.contains_key(namespace) {
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
