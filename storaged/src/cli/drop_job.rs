//! `storaged drop`.

use clap::Args;
use serde_json::{Value, json};
use storaged_sdk::WithTrainers;
use storaged_sdk::wire::Namespace;
use storaged_sdk::wire::local::{DropReport, DroppedNode};
use storaged_sdk::wire::peer::DropAnswer;

use super::token::TokenArgs;
use super::{CliError, NamespaceArgs, SocketArgs, print, size};

#[derive(Debug, Args)]
#[command(
    after_help = "What is in the durable tier stays. Exits with 1 if a node refused or did not answer: it may still hold some of it; also if no node held anything."
)]
pub struct DropArgs {
    /// Namespace of the job
    #[arg(env = "STORAGED_NAMESPACE")]
    namespace: Namespace,
    #[command(flatten)]
    token: TokenArgs,
    /// Longest wait for nodes, in seconds
    #[arg(long, default_value_t = 30)]
    timeout: u32,
    /// Also if it has trainers, which go on and save again, or pinned steps
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    socket: SocketArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn drop_job(args: &DropArgs) -> Result<(), CliError> {
    let trainers = if args.force {
        WithTrainers::Too
    } else {
        WithTrainers::Refused
    };
    let of = NamespaceArgs {
        namespace: args.namespace.clone(),
        token: args.token.clone(),
        step: None,
        timeout: args.timeout,
    };
    let mut client = of.connect(&args.socket)?;
    let report = client.drop_job(trainers, of.timeout_ms())?;
    if args.json {
        print(&report_json(&report).to_string());
    } else {
        say(&report);
    }
    let held = |node: &DroppedNode| match node.answer {
        DropAnswer::Freed { bytes, checkpoints } => bytes > 0 || checkpoints > 0,
        DropAnswer::Refused(_) => true,
    };
    if report.silent.is_empty() && !report.nodes.iter().any(held) {
        return Err(CliError::NothingToDrop(args.namespace.clone()));
    }
    let refused = |node: &&DroppedNode| matches!(node.answer, DropAnswer::Refused(_));
    let faults = report.nodes.iter().filter(refused).count() + report.silent.len();
    match faults {
        0 => Ok(()),
        _ => Err(CliError::NotDropped {
            faults,
            nodes: report.nodes.len() + report.silent.len(),
        }),
    }
}

fn say(report: &DropReport) {
    for node in &report.nodes {
        let did = match &node.answer {
            DropAnswer::Freed { bytes, checkpoints } => {
                format!("freed {}, {checkpoints} checkpoints", size(*bytes))
            }
            DropAnswer::Refused(reason) => format!("refused: {reason}"),
        };
        print(&format!("{:<12} {did}", node.node.as_str()));
    }
    for node in &report.silent {
        print(&format!("{:<12} did not answer", node.as_str()));
    }
}

fn report_json(report: &DropReport) -> Value {
    let nodes = report.nodes.iter().map(|node| match &node.answer {
        DropAnswer::Freed { bytes, checkpoints } => {
            json!({"node": node.node.as_str(), "bytes": bytes, "checkpoints": checkpoints})
        }
        DropAnswer::Refused(reason) => json!({"node": node.node.as_str(), "refused": reason}),
    });
    json!({
        "namespace": report.namespace.as_str(),
        "nodes": nodes.collect::<Vec<_>>(),
        "silent": report.silent.iter().map(|node| node.as_str()).collect::<Vec<_>>(),
    })
}
