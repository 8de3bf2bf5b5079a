//! What a person asks of the durable tier: to keep a checkpoint whatever the retention says, or to remove some.

use storaged_wire::local::{LiveRun, PinnedOnes, Removal, Reply};
use storaged_wire::{Namespace, Refusal, RefusalCode, RunId};

use super::durable_unavailable;
use crate::api::{Curation, CurationFault, DurablePolicy, Output, Removed, RequestId};
use crate::context::Context;
use crate::stage::nothing_removed;

impl Context {
    /// Removes checkpoints. Those of a job's newest run are what its next restart hangs on: while it trains they go only
    /// if that is said too.
    pub(crate) fn remove_durable(
        &mut self,
        id: RequestId,
        removal: Removal,
        live: LiveRun,
        pinned: PinnedOnes,
    ) -> Result<(), Refusal> {
        let namespace = &self.attached(id)?.namespace;
        let spared = match live {
            LiveRun::Spared => self.live_run(namespace),
            LiveRun::Too => None,
        };
        let curation = Curation::Remove {
            removal,
            spared,
            pinned,
        };
        self.curate(id, curation)
    }

    /// The newest run of a job that has trainers.
    fn live_run(&self, namespace: &Namespace) -> Option<RunId> {
        let has_trainers = !self.nodes_attached(namespace).is_empty();
        // A node that has not heard of any run yet spares all.
        let newest = self.namespaces.get(namespace).map(|table| table.fence);
        has_trainers.then(|| newest.unwrap_or(RunId::new(0)))
    }

    pub(crate) fn curate(&mut self, id: RequestId, curation: Curation) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        if self.setup.durable == DurablePolicy::Absent {
            let text = "expected a durable tier, got none in this node's configuration: ask a node that has [durable]";
            return Err(Refusal::new(RefusalCode::DurableUnavailable, text));
        }
        self.check_owner(&attached.namespace, attached.owner)?;
        self.out.push(Output::Curate {
            id,
            namespace: attached.namespace,
            owner: attached.owner,
            curation,
        });
        Ok(())
    }

    pub(crate) fn curated(&mut self, id: RequestId, outcome: Result<Removed, CurationFault>) {
        let in_ram = self.kept_in_ram.remove(&id);
        let is_kept_in_ram = in_ram == Some(Ok(()));
        let Ok(attached) = self.attached(id) else {
            return;
        };
        let (namespace, owner) = (attached.namespace.clone(), attached.owner);
        if outcome
            .as_ref()
            .is_ok_and(|removed| removed.checkpoints > 0)
        {
            self.removed_in_order(&namespace, owner);
        }
        let reply = match outcome {
            Ok(removed) => Reply::Removed {
                checkpoints: removed.checkpoints,
                objects: removed.objects,
            },
            // The tier need not have what is in RAM; what is in neither is refused as RAM refused it.
            Err(CurationFault::NoSuch(_)) if in_ram.is_some() => match in_ram {
                Some(Err(refusal)) => Reply::Refused(refusal),
                Some(Ok(())) | None => nothing_removed(),
            },
            Err(CurationFault::Durable(fault)) => {
                self.tier_answered(Some(&fault));
                let mut refusal = durable_unavailable(&namespace, &fault);
                if is_kept_in_ram {
                    refusal
                        .message
                        .insert_str(0, "done in RAM, not in the durable tier: ");
                }
                Reply::Refused(refusal)
            }
            Err(fault) => {
                let code = match fault {
                    CurationFault::WrongOwner => RefusalCode::WrongToken,
                    CurationFault::Live(_) | CurationFault::Pinned(_) => RefusalCode::InUse,
                    CurationFault::NoSuch(_) => RefusalCode::NoCheckpoint,
                    CurationFault::Needed(_) | CurationFault::Durable(_) => RefusalCode::Busy,
                };
                Reply::Refused(Refusal::new(
                    code,
                    format!("namespace {namespace}: {fault}"),
                ))
            }
        };
        self.reply(id, reply);
    }
}
