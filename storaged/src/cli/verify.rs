//! `storaged verify`: every byte of a checkpoint is read where it lies and compared with its digest.

use clap::Args;
use serde_json::{Value, json};
use storaged_sdk::wire::Step;
use storaged_sdk::wire::local::VerifyReport;
use storaged_sdk::{Client, ClientError};

use super::drill::{DrillArgs, drill};
use super::{CliError, NamespaceArgs, SocketArgs, print, size};

/// So many steps are read while newer ones replace them.
const STEPS_MAX: usize = 3;

#[derive(Debug, Args)]
#[command(
    after_help = "Without --step that is the newest protected step, since of one that is still being coded parity is missing; where none is protected it is\nthe newest restorable one. Exits with 1 if any part has a fault, or any decode of a drill failed.\n\nExamples:\n  storaged verify llama-70b\n  storaged verify llama-70b --drill --sample 8\nThe second decodes chunks without every m nodes of their group in turn, in RAM; nothing that is held changes. The step of\n--step it drills as far as it is coded; more than m nodes that are down are not waited for."
)]
pub struct VerifyArgs {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    socket: SocketArgs,
    #[command(flatten)]
    drill: DrillArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn report_json(report: &VerifyReport) -> Value {
    json!({
        "manifest": report.manifest.to_string(), "step": report.step.get(),
        "parts": report.parts.iter().map(|part| json!({
            "node": part.node.as_str(), "what": part.what, "bytes": part.bytes, "fault": part.fault,
        })).collect::<Vec<_>>(),
    })
}

/// Of the newest protected step. What is missing of one that a newer one has replaced meanwhile is no fault: that one is read.
fn of_newest(client: &mut Client, timeout_ms: u32) -> Result<VerifyReport, CliError> {
    for _ in 1..STEPS_MAX {
        let Some(step) = newest_protected(client, timeout_ms)? else {
            break;
        };
        let report = match client.verify(Some(step), timeout_ms) {
            Err(ClientError::Refused(_)) => continue,
            report => report?,
        };
        let is_good = report.parts.iter().all(|part| part.fault.is_none());
        if is_good || newest_protected(client, timeout_ms)? == Some(step) {
            return Ok(report);
        }
    }
    Ok(client.verify(None, timeout_ms)?)
}

/// None where the daemon knows of none, or nothing of it is left.
fn newest_protected(client: &mut Client, timeout_ms: u32) -> Result<Option<Step>, CliError> {
    match client.plan_drill(None, timeout_ms) {
        Ok(plan) => Ok(Some(plan.step)),
        Err(ClientError::Refused(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub fn verify(args: &VerifyArgs) -> Result<(), CliError> {
    let mut client = args.namespace.connect(&args.socket)?;
    if args.drill.drill {
        let (step, timeout_ms) = (args.namespace.step, args.namespace.timeout_ms());
        let report = drill(&mut client, &args.drill, step, timeout_ms)?;
        if args.json {
            report.print_json();
        } else {
            report.print_text();
        }
        return report.outcome();
    }
    let timeout_ms = args.namespace.timeout_ms();
    let report = match args.namespace.step {
        Some(step) => client.verify(Some(step), timeout_ms)?,
        None => of_newest(&mut client, timeout_ms)?,
    };
    if args.json {
        print(&report_json(&report).to_string());
    } else {
        print(&format!(
            "step {}  manifest {}",
            report.step, report.manifest
        ));
        for part in &report.parts {
            let outcome = part.fault.as_deref().unwrap_or("good");
            print(&format!(
                "{:<12} {:<32} {:>10}  {outcome}",
                part.node.as_str(),
                part.what,
                size(part.bytes)
            ));
        }
    }
    let faults = report
        .parts
        .iter()
        .filter(|part| part.fault.is_some())
        .count();
    match faults {
        0 => Ok(()),
        _ => Err(CliError::Faults {
            faults,
            parts: report.parts.len(),
        }),
    }
}
