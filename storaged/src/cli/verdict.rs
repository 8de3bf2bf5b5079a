//! `storaged plan --verdict`: what a launcher should make of a restart, for people, as JSON, and as an exit code.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use storaged_sdk::Client;
use storaged_sdk::wire::failed::FailedRestart;
use storaged_sdk::wire::peer::HighMark;
use storaged_sdk::wire::verdict::{
    ExpectedTime, RateSource, RestartVerdict, Returning, WaitingGain,
};
use storaged_sdk::wire::{RunId, Step};

use super::inspect::{passed_over_json, plan_json, shard_text};
use super::plan_encode::ReportFormat;
use super::{CliError, parse_step, print};

/// What a launcher or an operator says of a step.
#[derive(Debug, Args)]
pub struct QuarantineArgs {
    /// Say that a restart from this step has failed: it is passed over for 10 minutes, then for 20, after the third time until it
    /// is lifted; earlier only if nothing else is restorable. Said again within 30 s it is the same restart
    #[arg(long, value_name = "STEP", value_parser = parse_step, conflicts_with_all = ["step", "allow_older", "encode", "lift"])]
    failed: Option<Step>,
    /// Run of the step that has failed, if several have it [default: the newest]
    #[arg(long, requires = "failed")]
    run: Option<RunId>,
    /// Offer this step again: forget that restarts have failed from it, at all nodes, and what this node has found or heard of a damaged copy
    /// of it in the durable tier. A mark there stays until it is deleted
    #[arg(long, value_name = "STEP", value_parser = parse_step, conflicts_with_all = ["step", "allow_older", "encode"])]
    lift: Option<Step>,
}

impl QuarantineArgs {
    /// Whether anything is said.
    pub fn is_said(&self) -> bool {
        self.failed.is_some() || self.lift.is_some()
    }

    /// Says it; how the step stands then.
    ///
    /// # Errors
    /// [`CliError`] if nobody has such a step, or nothing was said of the one to be lifted.
    pub fn tell(
        &self,
        client: &mut Client,
        timeout_ms: u32,
    ) -> Result<Vec<FailedRestart>, CliError> {
        let mut all = Vec::new();
        if let Some(step) = self.failed {
            all.extend(client.restart_failed(self.run, step, timeout_ms)?);
        }
        if let Some(step) = self.lift {
            all.extend(client.lift_quarantine(step)?);
        }
        Ok(all)
    }
}

/// How steps stand that restarts have failed from.
pub fn print_failed(failed: &[FailedRestart], format: ReportFormat) {
    let of = |one: &FailedRestart| {
        json!({
            "run": one.run.to_string(), "step": one.step.get(), "times": one.times, "wait_ms": one.wait_ms,
        })
    };
    match format {
        ReportFormat::Json => print(&Value::Array(failed.iter().map(of).collect()).to_string()),
        ReportFormat::Text => failed.iter().for_each(|one| print(&failed_text(one))),
    }
}

fn failed_text(one: &FailedRestart) -> String {
    let (run, step, times) = (one.run, one.step, one.times);
    match (times, one.wait_ms) {
        (0, _) => format!(
            "run {run} step {step}: lifted, it is offered again unless the durable tier has a mark of it"
        ),
        (_, Some(ms)) => format!(
            "run {run} step {step}: restarts have failed, {times} by now; passed over for {} s, unless nothing else is restorable",
            ms.div_ceil(1_000)
        ),
        (_, None) => format!(
            "run {run} step {step}: restarts have failed, {times} by now; passed over until `storaged plan JOB --lift {step}`, once the fault is mended"
        ),
    }
}

/// Asks for the verdict and prints it.
///
/// # Errors
/// [`CliError`] if there is none: the job belongs to another token, or the daemon does not answer.
pub fn verdict(
    client: &mut Client,
    timeout_ms: u32,
    format: ReportFormat,
) -> Result<ExitCode, CliError> {
    let verdict = client.verdict(timeout_ms)?;
    match format {
        ReportFormat::Json => print(&verdict_json(&verdict).to_string()),
        ReportFormat::Text => print_text(&verdict),
    }
    Ok(verdict.exit_code().into())
}

fn verdict_json(verdict: &RestartVerdict) -> Value {
    json!({
        "namespace": verdict.namespace.as_str(),
        "verdict": verdict.verdict.as_str(),
        "exit_code": verdict.exit_code(),
        "reasons": verdict.reasons.iter().map(|reason| json!({
            "code": reason.code.as_str(), "text": reason.text,
        })).collect::<Vec<_>>(),
        "plan": verdict.plan.as_ref().map(plan_json),
        "expected": verdict.expected.iter().map(expected_json).collect::<Vec<_>>(),
        "newest_seen": verdict.newest_seen.as_ref().map(mark_json),
        "passed_over": verdict.passed_over.iter().map(passed_over_json).collect::<Vec<_>>(),
        "waiting": verdict.waiting.iter().map(gain_json).collect::<Vec<_>>(),
    })
}

fn mark_json(mark: &HighMark) -> Value {
    json!({"run": mark.run.to_string(), "step": mark.step.get()})
}

fn expected_json(part: &ExpectedTime) -> Value {
    json!({"stretch": part.stretch.as_str(), "ms": part.ms, "rate": part.rate.as_str()})
}

fn gain_json(gain: &WaitingGain) -> Value {
    json!({
        "run": gain.at.run.to_string(), "step": gain.at.step.get(), "verdict": gain.verdict.as_str(),
        "returning": gain.returning.iter().map(returning_json).collect::<Vec<_>>(),
        "text": gain.to_string(),
    })
}

fn returning_json(returning: &Returning) -> Value {
    json!({
        "any": returning.any,
        "of": returning.of.iter().map(|node| node.as_str()).collect::<Vec<_>>(),
        "basis": returning.basis.as_str(),
    })
}

fn print_text(verdict: &RestartVerdict) {
    print(&format!("{}: {}", verdict.namespace, verdict.verdict));
    if let Some(plan) = &verdict.plan {
        print(&format!(
            "run {} step {} ({}, {} ranks), expected {} ms{}",
            plan.run,
            plan.step,
            plan.state,
            plan.world_size,
            plan.expected_ms,
            expected_text(&verdict.expected)
        ));
    }
    for reason in &verdict.reasons {
        print(&format!(
            "because: {} ({})",
            reason.text,
            reason.code.as_str()
        ));
    }
    for shard in verdict.plan.iter().flat_map(|plan| &plan.shards) {
        print(&shard_text(shard));
    }
    for one in &verdict.passed_over {
        print(&format!(
            "passed over: run {} step {}: {}",
            one.run, one.step, one.reason
        ));
    }
    for gain in &verdict.waiting {
        print(&format!("waiting would gain {gain}"));
    }
}

/// Which parts are measured, and which are first guesses.
fn expected_text(parts: &[ExpectedTime]) -> String {
    let said = |part: &ExpectedTime| {
        let rate = match part.rate {
            RateSource::Measured => "measured",
            RateSource::FirstGuess => "a first guess",
        };
        format!("{} {} ms, {rate}", part.stretch.as_str(), part.ms)
    };
    match parts {
        [] => String::new(),
        parts => format!(
            " ({})",
            parts.iter().map(said).collect::<Vec<_>>().join("; ")
        ),
    }
}
