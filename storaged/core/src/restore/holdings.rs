//! What nodes hold of a namespace: asked before a plan is made, and by the leaders of lanes that heal.

use std::sync::Arc;

use minicbor::bytes::ByteVec;
use storaged_wire::local::{CheckpointInfo, Reply};
use storaged_wire::peer::{Holding, PeerMessage};
use storaged_wire::{
    CheckpointState, Digest, ManifestBytes, Namespace, NodeName, Refusal, RefusalCode,
};

use super::plan::SurveyPurpose;
use super::reading::ManifestRequest;
use crate::api::RequestId;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::parcels::Notice;
use crate::place::wrong_token;
use crate::restore::Restores;

/// Longest search for a manifest that is not known here: the durable tier is asked too.
pub(super) const MANIFEST_WAIT_MS: u32 = 10_000;

impl Context {
    pub(crate) fn holdings_of(&self, namespace: &Namespace) -> Vec<Holding> {
        self.checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace)
            .filter_map(|c| {
                let manifest = c.manifest.as_ref()?.manifest();
                let mut holding = c.holding(self.enclosures_held(manifest))?;
                if planted!("tables_answer_for_shards") {
                    holding.shards.extend(c.own_tables(self.me()));
                }
                Some(holding)
            })
            .collect()
    }

    pub(crate) fn holdings_asked(&mut self, from: &NodeName, query: u64, namespace: &Namespace) {
        // Leaders of lanes ask without a number; whoever plans uses the job.
        if query != 0 {
            self.touch(namespace);
        }
        // What was only promised is nobody's yet: its owner would be refused his plan where somebody else had wanted a run.
        let is_opened = self.has_heard_of(namespace)
            || self.has_checkpoints(namespace)
            || planted!("promises_refuse_plans");
        let owner = self.owner_of(namespace).filter(|_| is_opened);
        let holdings = self.holdings_of(namespace);
        self.send(
            from,
            PeerMessage::Holdings {
                query,
                owner,
                holdings,
                mark: self.mark_of(namespace),
                copied: self.copied_of(namespace),
            },
        );
    }

    /// Whoever knows the name of a manifest may read its bytes in its job's name alone: names stand in logs.
    pub(crate) fn check_readable(
        &self,
        id: RequestId,
        manifest: &Arc<ManifestBytes>,
    ) -> Result<(), Refusal> {
        let attached = self.attached(id)?;
        let wanted = manifest.manifest();
        if wanted.namespace != attached.namespace && !planted!("manifest_names_open_all") {
            return Err(unknown_manifest(manifest.name()));
        }
        if wanted.owner != attached.owner {
            return Err(wrong_token(&wanted.namespace));
        }
        Ok(())
    }

    pub(crate) fn list(
        &mut self,
        id: RequestId,
        namespace: Option<&Namespace>,
    ) -> Result<(), Refusal> {
        let viewer = self.viewer(id.conn);
        let namespace = namespace.map(|name| viewer.resolve(name)).transpose()?;
        if let Some(name) = &namespace
            && !self.namespaces.contains_key(name)
        {
            return Err(unknown_namespace(name));
        }
        let infos = self
            .checkpoints
            .values()
            .filter(|c| viewer.sees(&c.key.namespace))
            .filter(|c| {
                namespace
                    .as_ref()
                    .is_none_or(|name| c.key.namespace == *name)
            })
            .map(|c| self.info(c))
            .collect();
        self.reply(id, Reply::Checkpoints(infos));
        Ok(())
    }

    fn info(&self, checkpoint: &Checkpoint) -> CheckpointInfo {
        let sealed = checkpoint.shards.values().map(|shard| shard.length).sum();
        let length = checkpoint
            .manifest
            .as_ref()
            .map_or(sealed, |m| m.manifest().length());
        CheckpointInfo {
            namespace: checkpoint.key.namespace.clone(),
            run: checkpoint.key.run,
            step: checkpoint.key.step,
            state: checkpoint.state,
            durable: checkpoint.state == CheckpointState::Durable,
            world_size: checkpoint.world_size,
            length,
            manifest: checkpoint.name(),
            bears: self.bears(checkpoint),
            kept_for: self.kept_for(checkpoint),
            pinned: Some(self.is_pinned(&checkpoint.key)),
        }
    }
}

impl Restores {
    pub(crate) fn manifest_asked(
        &mut self,
        from: &NodeName,
        query: u64,
        name: Digest,
        cx: &mut Context,
    ) {
        let known = self.known_manifest(name, cx);
        let length = known.as_ref().map_or(0, |manifest| manifest.bytes().len());
        let answer = |query| PeerMessage::ManifestAnswer {
            query,
            manifest: known.map(|manifest| ByteVec::from(manifest.bytes().to_vec())),
        };
        let message = match cx.by_name.get(&name).cloned() {
            Some(key) if length > cx.setup.messages.inline => {
                cx.wrap_again(&key, Notice::Answer, || answer(None))
            }
            _ => answer(Some(query)),
        };
        cx.send(from, message);
    }

    pub(crate) fn get_manifest(
        &mut self,
        id: RequestId,
        name: Digest,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        if let Some(manifest) = self.known_manifest(name, cx) {
            let deadline = cx.answer_by(MANIFEST_WAIT_MS);
            let request = ManifestRequest {
                id,
                manifest,
                deadline,
            };
            return self.read_manifest(request, Vec::new(), cx);
        }
        // A node that has just started may not know what rank 0's node planned with: it asks around.
        let surveyor = cx.surveyor(id)?;
        self.survey(
            surveyor,
            None,
            MANIFEST_WAIT_MS,
            SurveyPurpose::Manifest(name),
            cx,
        );
        Ok(())
    }
}

pub(crate) fn unknown_manifest(name: Digest) -> Refusal {
    Refusal::new(
        RefusalCode::NoCheckpoint,
        format!(
            "no checkpoint with manifest {name} is known here: ask for a plan first and use its digest"
        ),
    )
}

pub(crate) fn unknown_namespace(name: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::UnknownNamespace,
        format!(
            "no namespace {name} on this node, on any live peer or in the durable tier: check STORAGED_NAMESPACE"
        ),
    )
}
