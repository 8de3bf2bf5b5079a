//! What a plan offers in the end, or why nothing.

use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::plan::{PassedOverCause, RestorePlan, ShardSource, Unrestorable};
use storaged_wire::{CheckpointState, Digest, NodeName, Rank, Refusal, RefusalCode};
use thiserror::Error;

use super::holdings::unknown_namespace;
use super::plan::{Older, SurveyInProgress, SurveyPurpose, TierListing};
use crate::context::Context;
use crate::failed_steps::Quarantine;
use crate::place::wrong_token;

/// Reasons and names that a refusal lists.
const LISTED_MAX: usize = 5;

/// Why a checkpoint is passed over.
#[derive(Debug, Error)]
enum NotWhole {
    #[error("its manifest was not found on any live node")]
    NoManifest,
    #[error(
        "its schema and metadata were not found on any live node, and it is not in the durable tier"
    )]
    NotDescribed,
    #[error(
        "{} of {shards} shards are lost and cannot be decoded (ranks {:?}), and it is not in the durable tier",
        ranks.len(),
        &ranks[..ranks.len().min(8)]
    )]
    ShardsLost { ranks: Vec<Rank>, shards: usize },
}

impl NotWhole {
    fn cause(&self) -> PassedOverCause {
        match self {
            Self::NoManifest => PassedOverCause::NoManifest,
            Self::NotDescribed => PassedOverCause::NotDescribed,
            Self::ShardsLost { .. } => PassedOverCause::ShardsLost,
        }
    }

    fn passed_over(&self, key: &CheckpointKey) -> Unrestorable {
        Unrestorable {
            run: key.run,
            step: key.step,
            reason: self.to_string(),
            cause: Some(self.cause()),
            copy: None,
        }
    }
}

/// The newest checkpoint that is whole, if there is one, and what is newer and is not.
pub(super) struct Newest {
    pub offer: Option<RestorePlan>,
    pub passed_over: Vec<Unrestorable>,
}

impl Context {
    pub(super) fn choose(&self, plan: &SurveyInProgress) -> Result<RestorePlan, Refusal> {
        self.check_planner(plan)?;
        let Newest { offer, passed_over } = self.newest(plan);
        let Some(offer) = offer else {
            return Err(self.nothing_offered(plan, &passed_over));
        };
        self.check_newer(plan, Some(&key_of(&offer)))?;
        Ok(RestorePlan {
            passed_over,
            ..offer
        })
    }

    /// Whether the job is the planner's, by what those say who answered.
    pub(super) fn check_planner(&self, plan: &SurveyInProgress) -> Result<(), Refusal> {
        self.check_owner(&plan.namespace, plan.owner)?;
        if !plan.foreign_owner {
            return Ok(());
        }
        Err(wrong_token(&plan.namespace))
    }

    pub(super) fn newest(&self, plan: &SurveyInProgress) -> Newest {
        let mut passed_over = Vec::new();
        let mut offer = None;
        for (key, name) in self.candidates(plan) {
            match self.offer(plan, name, key) {
                Ok(whole) => {
                    offer = Some(whole);
                    break;
                }
                Err(error) => passed_over.push(error.passed_over(key)),
            }
        }
        for (key, name) in self.quarantined(plan) {
            // Rather a step that has failed once than none; not one that fails again and again.
            let ends = self.quarantine_of(plan, key.mark()) != Quarantine::ForGood;
            match self.offer(plan, name, key) {
                Ok(whole) if offer.is_none() && ends => offer = Some(whole),
                _ => passed_over.push(self.failed_before(key)),
            }
        }
        let above = |one: &Unrestorable| {
            let offered = offer.as_ref().map(|offer| (offer.run, offer.step));
            offered.is_none_or(|offered| (one.run, one.step) > offered)
        };
        passed_over.retain(above);
        let offered = offer.as_ref().map(|offer| (offer.run, offer.step));
        plan.survey.pass_over(offered, &mut passed_over);
        Newest { offer, passed_over }
    }

    fn nothing_offered(&self, plan: &SurveyInProgress, passed_over: &[Unrestorable]) -> Refusal {
        if let Err(mut refusal) = self.check_newer(plan, None) {
            refusal.message.push_str(&reasons(passed_over));
            return refusal;
        }
        // A listing of one step is empty where the tier has others.
        let is_known = self.namespaces.contains_key(&plan.namespace)
            || self.bar(plan).is_some()
            || plan.survey.durable_run.is_some();
        let was_read = matches!(plan.tier, TierListing::Absent | TierListing::Read);
        let is_empty = plan.survey.keys.is_empty() && plan.survey.set_aside.is_empty();
        let silent = self.silent(plan);
        if is_empty && !is_known && was_read {
            let mut refusal = unknown_namespace(&plan.namespace);
            refusal.message.push_str(&not_answered(plan, &silent));
            return refusal;
        }
        nothing_restorable(plan, passed_over, &silent)
    }

    /// Whether what was found may be offered.
    fn check_newer(
        &self,
        plan: &SurveyInProgress,
        found: Option<&CheckpointKey>,
    ) -> Result<(), Refusal> {
        let hidden = self.hidden(plan, found);
        let refusal =
            hidden.map(|hidden| newer_unreachable(plan, hidden, &self.silent(plan), found));
        refusal.map_or(Ok(()), Err)
    }

    /// What is newer than what was found, is known to have been protected, or a majority would know of, and may be on
    /// nodes that have not answered.
    pub(super) fn hidden(
        &self,
        plan: &SurveyInProgress,
        found: Option<&CheckpointKey>,
    ) -> Option<Hidden> {
        let silent = self.silent(plan);
        let torn = self.is_torn(plan);
        let all_heard = silent.is_empty()
            && matches!(plan.tier, TierListing::Absent | TierListing::Read)
            && !torn;
        let asked_for = plan.step.is_some() && found.is_some();
        if all_heard
            || asked_for
            || matches!(
                plan.then,
                SurveyPurpose::Verify | SurveyPurpose::Offer(Older::Allowed)
            )
        {
            return None;
        }
        match (self.floor(plan), found) {
            (Some(bar), Some(key)) if !self.is_high_enough(plan, key) => Some(Hidden::Known(bar)),
            // Of all that answered, some know of it and none holds anything: what the tier holds is said elsewhere.
            (Some(bar), None) if !silent.is_empty() || torn => Some(Hidden::Known(bar)),
            // A mark that is known here may be long out of date: only of a majority somebody knows the newest.
            _ if !self.majority_answered(plan) => {
                let members = self.setup.members.len();
                Some(Hidden::Unknown { members })
            }
            _ => None,
        }
    }

    /// The newest checkpoint that is whole by what is known till now.
    pub(super) fn newest_offer(&self, plan: &SurveyInProgress) -> Option<CheckpointKey> {
        let mut all = self.candidates(plan).into_iter();
        let is_whole = |name: &Digest| {
            let manifest = plan.survey.manifests.get(name);
            let is_whole = manifest.is_some_and(|it| plan.survey.sources(it).is_whole());
            is_whole || manifest.is_some() && planted!("shard_lost_offered")
        };
        all.find(|(_, name)| is_whole(name))
            .map(|(key, _)| key.clone())
    }

    /// What was found of the step asked for, newest first, without what restarts have failed from.
    pub(super) fn candidates<'a>(
        &self,
        plan: &'a SurveyInProgress,
    ) -> Vec<(&'a CheckpointKey, Digest)> {
        let wanted = |key: &CheckpointKey| plan.step.is_none_or(|step| step == key.step);
        let mut found = self.found(plan);
        found.retain(|(key, _)| {
            wanted(key) && self.quarantine_of(plan, key.mark()) == Quarantine::None
        });
        found
    }

    /// What restarts have failed from, newest first.
    fn quarantined<'a>(&self, plan: &'a SurveyInProgress) -> Vec<(&'a CheckpointKey, Digest)> {
        let mut found = self.found(plan);
        found.retain(|(key, _)| self.quarantine_of(plan, key.mark()) != Quarantine::None);
        found
    }

    pub(super) fn found<'a>(&self, plan: &'a SurveyInProgress) -> Vec<(&'a CheckpointKey, Digest)> {
        let keys = plan.survey.keys.iter();
        let mut found: Vec<(&CheckpointKey, Digest)> =
            keys.map(|(name, key)| (key, *name)).collect();
        found.sort();
        found.reverse();
        found
    }

    fn offer(
        &self,
        plan: &SurveyInProgress,
        name: Digest,
        key: &CheckpointKey,
    ) -> Result<RestorePlan, NotWhole> {
        let manifest = plan.survey.manifests.get(&name);
        let manifest = manifest.ok_or(NotWhole::NoManifest)?;
        let record = manifest.manifest();
        let mut shards = Vec::with_capacity(record.shards.len());
        let mut lost = Vec::new();
        let sources = plan.survey.sources(manifest);
        if !sources.is_described() {
            return Err(NotWhole::NotDescribed);
        }
        for entry in &record.shards {
            match sources.of(entry.rank, self.me()) {
                Some(source) => shards.push(ShardSource {
                    rank: entry.rank,
                    length: entry.length,
                    source,
                }),
                None => lost.push(entry.rank),
            }
        }
        if !lost.is_empty() && !planted!("shard_lost_offered") {
            return Err(NotWhole::ShardsLost {
                ranks: lost,
                shards: record.shards.len(),
            });
        }
        let state = plan.survey.states.get(&name).copied();
        let slowest = self.slowest(record, &shards);
        Ok(RestorePlan {
            namespace: key.namespace.clone(),
            run: key.run,
            step: key.step,
            manifest: name,
            world_size: record.world_size,
            state: state.unwrap_or(CheckpointState::Committed),
            expected_ms: slowest.iter().map(|part| part.ms).sum(),
            shards,
            passed_over: Vec::new(),
        })
    }
}

pub(super) fn key_of(offer: &RestorePlan) -> CheckpointKey {
    CheckpointKey {
        namespace: offer.namespace.clone(),
        run: offer.run,
        step: offer.step,
    }
}

/// What may be hidden on nodes that have not answered.
#[derive(Debug, Clone, Copy)]
pub(super) enum Hidden {
    /// This one was protected.
    Known(HighMark),
    /// Too few have answered to know.
    Unknown { members: usize },
}

fn newer_unreachable(
    plan: &SurveyInProgress,
    hidden: Hidden,
    silent: &[NodeName],
    found: Option<&CheckpointKey>,
) -> Refusal {
    let namespace = &plan.namespace;
    let mut text = match hidden {
        Hidden::Known(bar) => format!(
            "run {} step {} of {namespace} was protected, and what answered in time does not make it whole",
            bar.run, bar.step
        ),
        Hidden::Unknown { members } => format!(
            "expected a majority of the {members} nodes to say in time what is the newest of {namespace}, got {}",
            plan.answered.len()
        ),
    };
    if let Some(key) = found {
        text.push_str(&format!("; older: run {} step {}", key.run, key.step));
    }
    text.push_str(&not_answered(plan, silent));
    text.push_str(
        "; start them or wait and ask again, or allow an older one (`storaged plan --allow-older`, \
         `allow_older=True`): what is newer is lost then",
    );
    Refusal::new(RefusalCode::NewerUnreachable, text)
}

/// Who has not said what it holds.
fn not_answered(plan: &SurveyInProgress, silent: &[NodeName]) -> String {
    let mut text = String::new();
    if !silent.is_empty() {
        text.push_str(&format!("; not answered: {}", listed(silent)));
    }
    match &plan.tier {
        TierListing::Unreadable(error) => {
            text.push_str(&format!("; the durable tier could not be read: {error}"));
        }
        TierListing::Unasked | TierListing::Asked => {
            text.push_str("; the durable tier did not answer in time")
        }
        TierListing::Absent | TierListing::Read => {}
    }
    text
}

/// The first of them, and how many more there are.
pub(super) fn listed(nodes: &[NodeName]) -> String {
    let names = nodes.iter().take(LISTED_MAX).map(NodeName::as_str);
    let names = names.collect::<Vec<_>>().join(", ");
    match nodes.len().saturating_sub(LISTED_MAX) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

fn reasons(passed_over: &[Unrestorable]) -> String {
    let listed = passed_over.iter().take(LISTED_MAX);
    listed
        .map(|one| format!("; run {} step {}: {}", one.run, one.step, one.reason))
        .collect()
}

fn nothing_restorable(
    plan: &SurveyInProgress,
    passed_over: &[Unrestorable],
    silent: &[NodeName],
) -> Refusal {
    let wanted = match plan.step {
        Some(step) => format!("checkpoint of step {step}"),
        None => "checkpoint".into(),
    };
    let mut text = format!(
        "no restorable {wanted} of {} in RAM, on peers or in the durable tier",
        plan.namespace
    );
    text.push_str(&reasons(passed_over));
    text.push_str(&not_answered(plan, silent));
    let newest = plan.survey.keys.values().max();
    if let Some(newest) = newest.filter(|_| plan.step.is_some()) {
        text.push_str(&format!(
            "; newest known: run {} step {}",
            newest.run, newest.step
        ));
    }
    let code = match &plan.tier {
        TierListing::Unreadable(_) | TierListing::Unasked | TierListing::Asked => {
            RefusalCode::DurableUnavailable
        }
        _ if passed_over.is_empty() => RefusalCode::NoCheckpoint,
        _ => RefusalCode::TooManyLost,
    };
    Refusal::new(code, text)
}
