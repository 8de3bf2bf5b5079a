//! Steps that restarts have failed from. A launcher says so; all nodes that are up hear of it, and the next daemon of a node finds it.
//! Such a step is passed over for a time that doubles, unless nothing else is restorable, and after [`limits::FAILURES_MAX`] times for
//! good: the same step is never tried for ever. An operator lifts it.

use storaged_wire::failed::{FailedRestart, FailureReport, NamespaceFailures};
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, HighMark, PeerMessage};
use storaged_wire::plan::{PassedOverCause, Unrestorable};
use storaged_wire::{Namespace, NodeName, Refusal, RefusalCode, RunId, Step};

use super::plan::{SurveyInProgress, SurveyPurpose};
use crate::api::RequestId;
use crate::context::Context;
use crate::failed_steps::Quarantine;
use crate::limits;
use crate::restore::Restores;

impl Context {
    /// How a checkpoint stands in a survey. Whoever asks for a step by its number gets it.
    pub(super) fn quarantine_of(&self, plan: &SurveyInProgress, at: HighMark) -> Quarantine {
        let heeds = matches!(plan.then, SurveyPurpose::Offer(_) | SurveyPurpose::Verdict)
            && plan.step.is_none()
            && !planted!("failed_steps_offered");
        let table = self.namespaces.get(&plan.namespace).filter(|_| heeds);
        table.map_or(Quarantine::None, |it| it.failed.of(at, self.now).0)
    }

    /// A checkpoint that is passed over because restarts from it have failed.
    pub(super) fn failed_before(&self, key: &CheckpointKey) -> Unrestorable {
        let at = key.mark();
        let table = self.namespaces.get(&key.namespace);
        let (quarantine, times) =
            table.map_or((Quarantine::None, 0), |it| it.failed.of(at, self.now));
        let again = match quarantine {
            Quarantine::Until(until) => format!(
                "it is offered again in {} s, or if nothing else is restorable",
                until.since(self.now).div_ceil(1_000)
            ),
            Quarantine::None | Quarantine::ForGood => {
                format!(
                    "it is offered again when an operator lifts that, once the fault is mended: `storaged plan JOB --lift {}`",
                    key.step
                )
            }
        };
        Unrestorable {
            run: key.run,
            step: key.step,
            reason: format!("quarantined: restarts from it have failed, {times} by now; {again}"),
            cause: Some(PassedOverCause::Quarantined),
            copy: None,
        }
    }

    fn tell_failed_of(&mut self, namespace: &Namespace) {
        let told = self.namespace_failures(namespace);
        self.send_all(&PeerMessage::FailedRestarts(told.into_iter().collect()));
    }

    fn namespace_failures(&self, namespace: &Namespace) -> Option<NamespaceFailures> {
        let table = self.namespaces.get(namespace)?;
        let failed = table.failed.told(self.now);
        (!failed.is_empty()).then(|| NamespaceFailures {
            namespace: namespace.clone(),
            owner: table.owner,
            failed,
        })
    }

    /// What a peer that has just come up may not know.
    pub(crate) fn tell_failed(&mut self, node: &NodeName) {
        let all: Vec<NamespaceFailures> = self
            .namespaces
            .keys()
            .filter_map(|namespace| self.namespace_failures(namespace))
            .collect();
        for told in all.chunks(limits::FAILURES_TOLD_MAX) {
            self.send(node, PeerMessage::FailedRestarts(told.to_vec()));
        }
    }

    /// A launcher may run on any node: nothing tells a node that makes failures up from one whose launcher says so.
    pub(super) fn learn_failed(&mut self, from: &NodeName, all: Vec<NamespaceFailures>) {
        let now = self.now;
        for told in all {
            if !self.may_be_its(&told.namespace, told.owner) {
                continue;
            }
            if !self.may_tell_of(from, &told.namespace) {
                continue;
            }
            let table = self.namespace_table(&told.namespace, told.owner);
            for failed in &told.failed {
                table.failed.learn(failed, now);
            }
        }
    }

    /// An operator takes back what was said of a step: that restarts have failed from it, at all nodes, and that its copy in the durable tier
    /// is damaged, at this one.
    pub(crate) fn lift_quarantine(&mut self, id: RequestId, step: Step) -> Result<(), Refusal> {
        let attached = self.attached(id)?;
        let (namespace, owner) = (attached.namespace.clone(), attached.owner);
        self.check_owner(&namespace, owner)?;
        let table = self.namespaces.get_mut(&namespace);
        let lifted = table.map_or(Vec::new(), |table| table.failed.lift(step));
        let mut mended = self.lift_damage(&namespace, step);
        if lifted.is_empty() && mended.is_empty() {
            let text = format!(
                "expected a step of {namespace} that restarts have failed from, or whose copy in the durable tier this node has found or heard to be damaged, got step {step}: \
                 `storaged plan --verdict` names them; a mark in the tier stays until it is deleted there"
            );
            return Err(Refusal::new(RefusalCode::NoCheckpoint, text));
        }
        mended.retain(|at| !lifted.contains(at));
        self.keeping.touch_job(&namespace);
        if !lifted.is_empty() {
            self.tell_failed_of(&namespace);
        }
        let mut stands = self.failures_at(&namespace, &lifted);
        stands.extend(mended.into_iter().map(never_failed));
        self.reply(id, Reply::RestartsFailed(stands));
        Ok(())
    }

    fn answer_failed(&mut self, id: RequestId, namespace: &Namespace, of: &[HighMark]) {
        self.keeping.touch_job(namespace);
        self.tell_failed_of(namespace);
        let failed = self.failures_at(namespace, of);
        self.reply(id, Reply::RestartsFailed(failed));
    }

    fn failures_at(&self, namespace: &Namespace, of: &[HighMark]) -> Vec<FailedRestart> {
        let told = self.namespace_failures(namespace);
        let mut failed = told.map_or(Vec::new(), |told| told.failed);
        failed.retain(|it| {
            of.contains(&HighMark {
                run: it.run,
                step: it.step,
            })
        });
        failed
    }
}

/// How a step stands of which no restart was said to have failed.
fn never_failed(at: HighMark) -> FailedRestart {
    FailedRestart {
        run: at.run,
        step: at.step,
        times: 0,
        wait_ms: None,
        changes: 0,
    }
}

impl Restores {
    /// A launcher says that a restart from a step has failed. Who holds it is asked first: they know whose it is, and of which run.
    pub(crate) fn restart_failed(
        &mut self,
        id: RequestId,
        report: FailureReport,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let surveyor = cx.surveyor(id)?;
        let FailureReport {
            run,
            step,
            timeout_ms,
        } = report;
        self.survey(
            surveyor,
            Some(step),
            timeout_ms,
            SurveyPurpose::Failed(run),
            cx,
        );
        Ok(())
    }
}

impl Context {
    /// The step was looked for: the newest run's, or that of the run that was named.
    pub(super) fn count_failed(
        &mut self,
        plan: &SurveyInProgress,
        run: Option<RunId>,
    ) -> Result<(), Refusal> {
        self.check_planner(plan)?;
        let mut keys = self.candidates(plan).into_iter().map(|(key, _)| key.mark());
        let Some(at) = keys.find(|at| run.is_none_or(|run| run == at.run)) else {
            let text = format!(
                "expected a checkpoint of {} that a restart can have failed from, got none of that step{}",
                plan.namespace,
                run.map_or(String::new(), |run| format!(" in run {run}"))
            );
            return Err(Refusal::new(RefusalCode::NoCheckpoint, text));
        };
        let now = self.now;
        let table = self.namespace_table(&plan.namespace, plan.owner);
        table.failed.count(at, now);
        table.opened.failed(at);
        self.answer_failed(plan.id, &plan.namespace, &[at]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::local::{LOCAL_VERSION, Request, Role};
    use storaged_wire::{ManifestBytes, Owner};

    use super::*;
    use crate::api::{ConnId, Input, Now, Output};
    use crate::testkit::{at, hear, job, last_of, unknown_to_peers};

    fn manifest() -> ManifestBytes {
        let root = storaged_codec::digest(b"any");
        let manifest = crate::testkit::manifest(7, &["a", "b"], &["c"], 5, root);
        manifest.seal().expect("a sound manifest")
    }

    /// This node has never heard of the job: whose it is, those say who hold its checkpoints.
    #[test]
    fn a_failure_in_anothers_name_is_refused_and_not_counted() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let id = |index| RequestId {
            conn: ConnId(1),
            index,
        };
        let mut ask = |index, request| {
            let input = Input::Request {
                id: id(index),
                request,
            };
            let outputs = node.handle(Now(1_000), input);
            unknown_to_peers(&mut node, Now(1_000), outputs)
        };
        ask(
            0,
            Request::Hello {
                version: LOCAL_VERSION,
                namespace: job(),
                token: b"of somebody else".to_vec().into(),
                role: Role::Reader,
            },
        );
        let outputs = ask(
            1,
            Request::RestartFailed(FailureReport {
                run: None,
                step: Step::new(7),
                timeout_ms: 5_000,
            }),
        );
        let query = outputs.iter().find_map(|output| match output {
            Output::Send {
                message: PeerMessage::HoldingsQuery { query, .. },
                ..
            } => Some(*query),
            _ => None,
        });
        let query = query.expect("all are asked");
        let holding = storaged_wire::peer::Holding {
            manifest: manifest().name(),
            key: CheckpointKey::of(manifest().manifest()),
            state: storaged_wire::CheckpointState::Protected,
            shards: Vec::new(),
            parity: Vec::new(),
            enclosures: storaged_wire::EnclosuresHeld::All,
        };
        let mut outputs = Vec::new();
        for from in ["a", "b"] {
            let told = PeerMessage::Holdings {
                query,
                owner: Some(crate::testkit::owner()),
                holdings: vec![holding.clone()],
                mark: None,
                copied: None,
            };
            outputs.extend(hear(&mut node, 1_001, from, told));
            let manifest = Some(manifest().bytes().to_vec().into());
            let query = Some(query);
            let known = PeerMessage::ManifestAnswer { query, manifest };
            outputs.extend(hear(&mut node, 1_002, from, known));
        }
        let refused = outputs.iter().find_map(|output| match output {
            Output::Reply {
                reply: Reply::Refused(refusal),
                ..
            } => Some(refusal.code),
            _ => None,
        });
        assert_eq!(refused, Some(RefusalCode::WrongToken), "{outputs:?}");
        assert!(!node.context().namespaces.contains_key(&job()));
    }

    /// A peer cannot speak in another owner's name either.
    #[test]
    fn what_a_peer_says_in_anothers_name_is_not_believed() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let told = |owner| {
            PeerMessage::FailedRestarts(vec![NamespaceFailures {
                namespace: job(),
                owner,
                failed: vec![FailedRestart {
                    run: RunId::new(1),
                    step: Step::new(7),
                    times: 1,
                    wait_ms: Some(1_000),
                    changes: 1,
                }],
            }])
        };
        let context = node.context_mut();
        let table = context.namespace_table(&job(), crate::testkit::owner());
        table.fence = RunId::new(1);
        let quarantine = |node: &crate::node::Node| {
            let table = &node.context().namespaces[&job()];
            table.failed.of(at(7), Now(1_500)).0
        };
        hear(&mut node, 1_000, "a", told(Owner::of_token(b"another")));
        assert_eq!(quarantine(&node), Quarantine::None);
        hear(&mut node, 1_000, "a", told(crate::testkit::owner()));
        assert_eq!(quarantine(&node), Quarantine::Until(Now(2_000)));
    }
}
