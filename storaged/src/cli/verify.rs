//! `storaged verify`: every byte of a checkpoint is read where it lies and compared with its digest.

use clap::Args;
use serde_json::{Value, json};
use storaged_sdk::wire::local::VerifyReport;

use super::drill::{DrillArgs, drill};
use super::{CliError, NamespaceArgs, SocketArgs, print, size};

#[derive(Debug, Args)]
#[command(
    after_help = "Exits with 1 if any part has a fault, or any decode of a drill failed.\n\nExamples:\n  storaged verify llama-70b\n  storaged verify llama-70b --drill --sample 8\nThe second decodes chunks without every m nodes of their group in turn, in RAM; nothing that is held changes. It takes the newest\nprotected step, or that of --step, which it drills as far as it is coded; more than m nodes that are down are not waited for."
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
    let report = client.verify(args.namespace.step, args.namespace.timeout_ms())?;
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
