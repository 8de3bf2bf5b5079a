//! `storaged plan --verdict`: what a launcher should make of a restart, for people, as JSON, and as an exit code.

use std::process::ExitCode;

use serde_json::{Value, json};
use storaged_sdk::Client;
use storaged_sdk::wire::peer::HighMark;
use storaged_sdk::wire::verdict::{
    ExpectedTime, RateSource, ReasonCode, RestartVerdict, Returning, Verdict, WaitingGain,
};

use super::inspect::{passed_over_json, plan_json, shard_text};
use super::plan_encode::ReportFormat;
use super::{CliError, print};

/// What a script sees of a verdict. 1 and 2 are failures of the command, 74, 75 and 78 are the daemon's.
const EXIT_IN_PLACE: u8 = 0;
const EXIT_RECOVER: u8 = 10;
const EXIT_DURABLE: u8 = 11;
const EXIT_IMPOSSIBLE: u8 = 12;
const EXIT_NOTHING_SAVED: u8 = 13;

fn exit_code(verdict: &RestartVerdict) -> u8 {
    match verdict.verdict {
        Verdict::RecoverInPlace => EXIT_IN_PLACE,
        Verdict::Recover => EXIT_RECOVER,
        Verdict::RestartFromDurable => EXIT_DURABLE,
        Verdict::Impossible if verdict.has_reason(ReasonCode::NothingSaved) => EXIT_NOTHING_SAVED,
        Verdict::Impossible => EXIT_IMPOSSIBLE,
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
    Ok(exit_code(&verdict).into())
}

fn verdict_json(verdict: &RestartVerdict) -> Value {
    json!({
        "namespace": verdict.namespace.as_str(),
        "verdict": verdict.verdict.as_str(),
        "exit_code": exit_code(verdict),
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
