//! What a plan offers in the end, or why nothing.

use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::plan::{RestorePlan, ShardSource, Source, Unrestorable};
use storaged_wire::{CheckpointState, Digest, NodeName, Rank, Refusal, RefusalCode};
use thiserror::Error;

use super::Rates;
use super::holdings::unknown_namespace;
use super::plan::{Older, SurveyInProgress, SurveyPurpose, TierListing};
use crate::context::Context;
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

impl Context {
    pub(super) fn choose(&self, plan: &SurveyInProgress) -> Result<RestorePlan, Refusal> {
        if plan.foreign_owner {
            self.check_owner(&plan.namespace, plan.owner)?;
            return Err(wrong_token(&plan.namespace));
        }
        let mut passed_over = Vec::new();
        for (key, name) in candidates(plan) {
            match self.offer(plan, name, key) {
                Ok(mut offer) => {
                    self.check_newer(plan, Some(key))?;
                    let offered = Some((offer.run, offer.step));
                    plan.survey.pass_over(offered, &mut passed_over);
                    offer.passed_over = passed_over;
                    return Ok(offer);
                }
                Err(error) => passed_over.push(Unrestorable {
                    run: key.run,
                    step: key.step,
                    reason: error.to_string(),
                }),
            }
        }
        plan.survey.pass_over(None, &mut passed_over);
        Err(self.nothing_offered(plan, &passed_over))
    }

    fn nothing_offered(&self, plan: &SurveyInProgress, passed_over: &[Unrestorable]) -> Refusal {
        if let Err(mut refusal) = self.check_newer(plan, None) {
            refusal.message.push_str(&reasons(passed_over));
            return refusal;
        }
        let is_known = self.namespaces.contains_key(&plan.namespace) || self.bar(plan).is_some();
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

    /// Whether what was found may be offered: nothing newer that is known to have been protected, or that a majority
    /// would know of, may be hidden on nodes that have not answered.
    fn check_newer(
        &self,
        plan: &SurveyInProgress,
        found: Option<&CheckpointKey>,
    ) -> Result<(), Refusal> {
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
            return Ok(());
        }
        match (self.bar(plan), found) {
            (Some(bar), Some(key)) if !self.is_high_enough(plan, key) => {
                Err(newer_unreachable(plan, Hidden::Known(bar), &silent, found))
            }
            // Of all that answered, some know of it and none holds anything: what the tier holds is said elsewhere.
            (Some(bar), None) if !silent.is_empty() || torn => {
                Err(newer_unreachable(plan, Hidden::Known(bar), &silent, found))
            }
            // A mark that is known here may be long out of date: only of a majority somebody knows the newest.
            _ if !self.majority_answered(plan) => {
                let members = self.setup.members.len();
                Err(newer_unreachable(
                    plan,
                    Hidden::Unknown { members },
                    &silent,
                    found,
                ))
            }
            _ => Ok(()),
        }
    }

    /// The newest checkpoint that is whole by what is known till now.
    pub(super) fn newest_offer(&self, plan: &SurveyInProgress) -> Option<CheckpointKey> {
        let mut all = candidates(plan).into_iter();
        let is_whole = |name: &Digest| {
            let manifest = plan.survey.manifests.get(name);
            let is_whole = manifest.is_some_and(|it| plan.survey.sources(it).is_whole());
            is_whole || manifest.is_some() && planted!("shard_lost_offered")
        };
        all.find(|(_, name)| is_whole(name))
            .map(|(key, _)| key.clone())
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
        let slowest = shards.iter().map(|shard| self.expected_ms(shard)).max();
        Ok(RestorePlan {
            namespace: key.namespace.clone(),
            run: key.run,
            step: key.step,
            manifest: name,
            world_size: record.world_size,
            state: state.unwrap_or(CheckpointState::Committed),
            expected_ms: slowest.unwrap_or(0),
            shards,
            passed_over: Vec::new(),
        })
    }

    /// Every rank reads its own shard on its own node, all at once.
    fn expected_ms(&self, shard: &ShardSource) -> u64 {
        let ram = Rates::ram_ms(shard.length);
        match &shard.source {
            Source::Ram(_) => ram,
            Source::Decode(_) => ram + self.rates.session_ms(shard.length),
            Source::Durable => ram + Rates::durable_ms(shard.length),
        }
    }
}

/// What was found of the step asked for, newest first.
fn candidates(plan: &SurveyInProgress) -> Vec<(&CheckpointKey, Digest)> {
    let wanted = |key: &CheckpointKey| plan.step.is_none_or(|step| step == key.step);
    let keys = plan.survey.keys.iter();
    let mut found: Vec<(&CheckpointKey, Digest)> = keys
        .filter(|(_, key)| wanted(key))
        .map(|(name, key)| (key, *name))
        .collect();
    found.sort();
    found.reverse();
    found
}

/// What may be hidden on nodes that have not answered.
enum Hidden {
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
        let names = silent.iter().take(LISTED_MAX).map(NodeName::to_string);
        let names = names.collect::<Vec<_>>().join(", ");
        let more = match silent.len().saturating_sub(LISTED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        text.push_str(&format!("; not answered: {names}{more}"));
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
