//! What a drill is offered: the newest protected step, or the one that is asked for, as far as what is in RAM decodes it. A drill tries out
//! what is there: it waits for no node that is down, and says at once what is missing and what could be tried all the same.

use std::collections::BTreeSet;

use storaged_plan::LaneBlocks;
use storaged_wire::local::Reply;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::plan::{PassedOverCause, RestorePlan, ShardSource, Source, Unrestorable};
use storaged_wire::{
    CheckpointState, Digest, ManifestBytes, NodeName, Rank, Refusal, RefusalCode, Step,
};
use thiserror::Error;

use super::offer::listed;
use super::plan::{SurveyInProgress, SurveyPurpose};
use crate::api::RequestId;
use crate::context::Context;
use crate::restore::Restores;

/// Steps that a refusal names beside the one that cannot be drilled.
const NAMED_MAX: usize = 3;

/// Why a step cannot be drilled, or not all of it.
#[derive(Debug, Error)]
enum Undrillable {
    #[error("its manifest was not found on any live node")]
    NoManifest,
    #[error("it was saved without [coding]: no loss can be borne")]
    NotCoded,
    #[error(
        "{} of {shards} shards are in lanes of which fewer blocks are left than it takes to decode one (ranks {:?})",
        ranks.len(),
        &ranks[..ranks.len().min(8)]
    )]
    BlocksLost { ranks: Vec<Rank>, shards: usize },
}

impl Undrillable {
    fn cause(&self) -> Option<PassedOverCause> {
        match self {
            Self::NoManifest => Some(PassedOverCause::NoManifest),
            Self::NotCoded => None,
            Self::BlocksLost { .. } => Some(PassedOverCause::ShardsLost),
        }
    }

    fn passed_over(&self, key: &CheckpointKey) -> Unrestorable {
        Unrestorable {
            run: key.run,
            step: key.step,
            reason: self.to_string(),
            cause: self.cause(),
            copy: None,
        }
    }
}

impl Restores {
    /// Asks around what a drill could decode.
    pub(crate) fn drill(
        &mut self,
        id: RequestId,
        step: Option<Step>,
        timeout_ms: u32,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        self.survey_for(id, step, timeout_ms, SurveyPurpose::Drill, cx)
    }

    pub(super) fn drill_surveyed(&mut self, plan: &SurveyInProgress, cx: &mut Context) {
        let reply = match cx.choose_for_drill(plan) {
            Ok(offer) => {
                self.remember_planned(plan.survey.manifests[&offer.manifest].clone());
                Reply::Plan(offer)
            }
            Err(refusal) => Reply::Refused(refusal),
        };
        cx.reply(plan.id, reply);
    }
}

impl Context {
    fn choose_for_drill(&self, plan: &SurveyInProgress) -> Result<RestorePlan, Refusal> {
        self.check_planner(plan)?;
        let mut found = self.found(plan).into_iter();
        let wanted = found.find(|(key, name)| match plan.step {
            Some(step) => key.step == step,
            None => is_protected(plan, *name),
        });
        let (key, name) = wanted.ok_or_else(|| self.nothing_protected(plan))?;
        self.drillable(plan, key, name).map_err(|why| {
            let older = found.filter(|(_, name)| is_protected(plan, *name));
            let others = older.filter(|(key, name)| self.drillable(plan, key, *name).is_ok());
            let others: Vec<&CheckpointKey> = others.map(|(key, _)| key).take(NAMED_MAX).collect();
            self.undrillable(plan, key, &why, &others)
        })
    }

    /// The shards of the lanes that have enough blocks, and why not the others.
    fn drillable(
        &self,
        plan: &SurveyInProgress,
        key: &CheckpointKey,
        name: Digest,
    ) -> Result<RestorePlan, Undrillable> {
        let manifest = plan.survey.manifests.get(&name);
        let manifest = manifest.ok_or(Undrillable::NoManifest)?;
        let record = manifest.manifest();
        let (mut shards, mut ranks) = (Vec::new(), Vec::new());
        for entry in &record.shards {
            match self.lane_sources(plan, manifest, entry.rank) {
                Some(nodes) => shards.push(ShardSource {
                    rank: entry.rank,
                    length: entry.length,
                    source: Source::Decode(nodes),
                }),
                None => ranks.push(entry.rank),
            }
        }
        if LaneBlocks::all(manifest).is_empty() {
            return Err(Undrillable::NotCoded);
        }
        let all = record.shards.len();
        let lost = (!ranks.is_empty()).then_some(Undrillable::BlocksLost { ranks, shards: all });
        let passed_over: Vec<Unrestorable> =
            lost.iter().map(|lost| lost.passed_over(key)).collect();
        match lost {
            Some(lost) if shards.is_empty() => Err(lost),
            _ => Ok(RestorePlan {
                namespace: key.namespace.clone(),
                run: key.run,
                step: key.step,
                manifest: name,
                world_size: record.world_size,
                state: state_of(plan, name),
                expected_ms: 0,
                shards,
                passed_over,
            }),
        }
    }

    /// Nodes whose blocks suffice to decode a shard of this lane.
    fn lane_sources(
        &self,
        plan: &SurveyInProgress,
        manifest: &ManifestBytes,
        rank: Rank,
    ) -> Option<Vec<NodeName>> {
        let (lane, _) = LaneBlocks::find(manifest, rank)?;
        let blocks = LaneBlocks::of(manifest, lane)?;
        let there = plan.survey.sources(manifest).available(lane, &blocks);
        let chosen = blocks.enough(&there)?.into_iter();
        Some(chosen.filter_map(|it| blocks.node(it).cloned()).collect())
    }

    fn nothing_protected(&self, plan: &SurveyInProgress) -> Refusal {
        let job = &plan.namespace;
        let mut text = match plan.step {
            Some(step) => {
                format!("expected step {step} of {job} in RAM to drill it, found nothing of it")
            }
            None => format!("expected a protected step of {job} in RAM to drill it, found none"),
        };
        match self.found(plan).first() {
            Some((key, name)) => {
                let state = state_of(plan, *name);
                text.push_str(&format!(
                    "; the newest is step {} of run {}, {state}: wait until it is protected, or name it with --step",
                    key.step, key.run
                ));
            }
            None => text.push_str("; nobody who answered holds anything of the job"),
        }
        if self.setup.geometry.is_none() {
            text.push_str("; this node saves without [coding]: no loss can be borne");
        }
        text.push_str(&self.not_heard(plan));
        Refusal::new(RefusalCode::NoCheckpoint, text)
    }

    fn undrillable(
        &self,
        plan: &SurveyInProgress,
        key: &CheckpointKey,
        why: &Undrillable,
        others: &[&CheckpointKey],
    ) -> Refusal {
        let state = plan.survey.keys.iter().find(|(_, it)| *it == key);
        let state = state.map_or(CheckpointState::Committed, |(name, _)| {
            state_of(plan, *name)
        });
        let mut text = format!(
            "step {} of run {} ({state}) cannot be drilled: {why}{}",
            key.step,
            key.run,
            self.not_heard(plan)
        );
        let named: BTreeSet<Step> = others.iter().map(|key| key.step).collect();
        let named: Vec<String> = named.iter().map(|step| format!("--step {step}")).collect();
        match named.as_slice() {
            [] => text.push_str("; no other protected step could be drilled now"),
            named => text.push_str(&format!("; could be drilled now: {}", named.join(", "))),
        }
        Refusal::new(RefusalCode::TooManyLost, text)
    }

    fn not_heard(&self, plan: &SurveyInProgress) -> String {
        match self.silent(plan).as_slice() {
            [] => String::new(),
            silent => format!("; not answered: {}", listed(silent)),
        }
    }
}

fn state_of(plan: &SurveyInProgress, name: Digest) -> CheckpointState {
    let state = plan.survey.states.get(&name).copied();
    state.unwrap_or(CheckpointState::Committed)
}

/// Whether a step was coded. One that is durable may have gone to the durable tier before it was.
fn is_protected(plan: &SurveyInProgress, name: Digest) -> bool {
    let is_coded = || {
        let manifest = plan.survey.manifests.get(&name)?;
        let sources = plan.survey.sources(manifest);
        let has_parity = |(lane, blocks): &(_, LaneBlocks)| {
            let there = sources.available(*lane, blocks);
            there.iter().any(|block| *block >= blocks.data.len())
        };
        let lanes = LaneBlocks::all(manifest);
        Some(!lanes.is_empty() && lanes.iter().all(has_parity))
    };
    match state_of(plan, name) {
        CheckpointState::Protected => true,
        CheckpointState::Durable => is_coded().unwrap_or(false),
        _ => planted!("drills_of_the_committed"),
    }
}
