//! `storaged ls` and `plan`.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use storaged_sdk::wire::local::{CheckpointInfo, standing};
use storaged_sdk::wire::plan::{RestorePlan, ShardSource, Source, Unrestorable};
use storaged_sdk::wire::{Namespace, RefusalCode, Step};
use storaged_sdk::{Client, ClientError};

use super::plan_encode::{EncodeArgs, ReportFormat, plan_encode};
use super::token::TokenArgs;
use super::verdict::{QuarantineArgs, print_failed, verdict};
use super::{CliError, NamespaceArgs, SocketArgs, parse_step, print, size};

#[derive(Debug, Args)]
pub struct LsArgs {
    /// Only this namespace
    namespace: Option<Namespace>,
    #[command(flatten)]
    socket: SocketArgs,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  storaged plan llama-70b\nAsks every live node and the durable tier; moves nothing.\n  storaged plan llama-70b --verdict --json\nSays what a launcher should do, why, what it takes and what waiting for nodes would gain. Exit codes:\n0 recover-in-place, 10 recover, 11 restart-from-durable, 12 impossible, 13 impossible because nothing was ever saved;\n1 no verdict, 2 wrong arguments. A reason (goes-back) or (too-few-answered), with 0, 10 and 11: loads refuse the step unless it is allowed.\n  storaged plan llama-70b --failed 160\nSays that a restart from step 160 has failed: it is passed over for 10 minutes, then 20, and after the third time until\n  storaged plan llama-70b --lift 160\n  storaged plan --encode --k 8 --m 2 --rate 125MB\nSays which coding plan a group would take; moves nothing."
)]
pub struct PlanArgs {
    /// Namespace of the job
    #[arg(env = "STORAGED_NAMESPACE", required_unless_present = "encode")]
    namespace: Option<Namespace>,
    #[command(flatten)]
    token: TokenArgs,
    /// Step instead of the newest restorable one
    #[arg(long, value_parser = parse_step)]
    step: Option<Step>,
    /// Longest wait, in seconds
    #[arg(long, default_value_t = 60)]
    timeout: u32,
    /// At the end of the wait say what a restart would do that goes back to an older checkpoint than one that is known to
    /// have been protected, because nodes that may hold that one have not answered
    #[arg(long)]
    allow_older: bool,
    /// Say in one word what a launcher should do: recover-in-place, recover, restart-from-durable or impossible; with the
    /// reasons, the expected time, and what waiting for nodes that have not answered would gain
    #[arg(long, conflicts_with_all = ["step", "allow_older", "encode", "failed", "lift"])]
    verdict: bool,
    #[command(flatten)]
    quarantine: QuarantineArgs,
    #[command(flatten)]
    encode: EncodeArgs,
    #[command(flatten)]
    socket: SocketArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn info_json(info: &CheckpointInfo) -> Value {
    json!({
        "namespace": info.namespace.as_str(), "run": info.run.to_string(), "step": info.step.get(),
        "state": info.state.as_str(), "durable": info.durable, "world_size": info.world_size.get(),
        "bytes": info.length, "manifest": info.manifest.map(|name| name.to_string()),
        "bears": info.bears.map(|bears| bears.losses), "bears_full": info.bears.map(|bears| bears.of),
        "superseded": info.kept_for.is_some(), "pinned": info.pinned,
    })
}

/// Checkpoints of the durable tier that proved damaged, as far as the daemon knows.
fn quarantined(client: &mut Client, of: Option<&Namespace>) -> Result<Vec<Value>, CliError> {
    let text = client.status()?;
    let status: Value = serde_json::from_str(&text)
        .map_err(|error| CliError::Unexpected(format!("the daemon sent no JSON: {error}")))?;
    let all = status["quarantined"].as_array().cloned();
    let wanted = |one: &Value| of.is_none_or(|of| one["namespace"] == of.as_str());
    Ok(all.unwrap_or_default().into_iter().filter(wanted).collect())
}

fn quarantined_json(one: &Value) -> Value {
    json!({
        "namespace": one["namespace"], "run": one["run"], "step": one["step"],
        "state": "quarantined", "durable": true, "reason": one["reason"],
    })
}

pub fn ls(args: &LsArgs) -> Result<(), CliError> {
    let mut client = Client::connect_anonymous(&args.socket.path())?;
    let damaged = quarantined(&mut client, args.namespace.as_ref())?;
    let infos = match client.list(args.namespace.clone()) {
        // All that this node knows of the namespace is in the durable tier.
        Err(ClientError::Refused(refusal))
            if refusal.code == RefusalCode::UnknownNamespace && !damaged.is_empty() =>
        {
            Vec::new()
        }
        listed => listed?,
    };
    if args.json {
        let infos = infos.iter().map(info_json);
        let all = infos.chain(damaged.iter().map(quarantined_json)).collect();
        print(&Value::Array(all).to_string());
        return Ok(());
    }
    print(&format!(
        "{:<24} {:>6} {:>10} {:<24} {:>6} {:>10}",
        "NAMESPACE", "RUN", "STEP", "STATE", "RANKS", "SIZE"
    ));
    for info in &infos {
        let pinned = if info.pinned == Some(true) {
            ", pinned"
        } else {
            ""
        };
        print(&format!(
            "{:<24} {:>6} {:>10} {:<24} {:>6} {:>10}",
            info.namespace.as_str(),
            info.run,
            info.step,
            standing(info.state, info.bears, info.kept_for) + pinned,
            info.world_size,
            size(info.length)
        ));
    }
    let text = |value: &Value| value.as_str().map_or(value.to_string(), str::to_owned);
    for one in &damaged {
        print(&format!(
            "quarantined in the durable tier: {} run {} step {}: {}",
            text(&one["namespace"]),
            text(&one["run"]),
            text(&one["step"]),
            text(&one["reason"])
        ));
    }
    Ok(())
}

fn source_json(source: &Source) -> Value {
    match source {
        Source::Ram(node) => json!({"ram": node.as_str()}),
        Source::Decode(nodes) => {
            json!({"decode": nodes.iter().map(|node| node.as_str()).collect::<Vec<_>>()})
        }
        Source::Durable => json!("durable"),
    }
}

fn source_text(source: &Source) -> String {
    match source {
        Source::Ram(node) => format!("RAM of {node}"),
        Source::Decode(nodes) => {
            let names: Vec<&str> = nodes.iter().map(|node| node.as_str()).collect();
            format!("decoded from {}", names.join(", "))
        }
        Source::Durable => "durable tier".into(),
    }
}

pub(super) fn plan_json(plan: &RestorePlan) -> Value {
    json!({
        "namespace": plan.namespace.as_str(), "run": plan.run.to_string(), "step": plan.step.get(),
        "manifest": plan.manifest.to_string(), "world_size": plan.world_size.get(), "state": plan.state.as_str(),
        "expected_ms": plan.expected_ms,
        "shards": plan.shards.iter().map(|shard| json!({
            "rank": shard.rank.get(), "bytes": shard.length, "source": source_json(&shard.source),
        })).collect::<Vec<_>>(),
        "passed_over": plan.passed_over.iter().map(passed_over_json).collect::<Vec<_>>(),
    })
}

pub(super) fn passed_over_json(one: &Unrestorable) -> Value {
    json!({
        "run": one.run.to_string(), "step": one.step.get(), "reason": one.reason,
        "cause": one.cause_word(),
    })
}

pub(super) fn shard_text(shard: &ShardSource) -> String {
    format!(
        "rank {:>4}  {:>10}  {}",
        shard.rank,
        size(shard.length),
        source_text(&shard.source)
    )
}

pub fn plan(args: &PlanArgs) -> Result<ExitCode, CliError> {
    let format = if args.json {
        ReportFormat::Json
    } else {
        ReportFormat::Text
    };
    let namespace = match &args.namespace {
        Some(namespace) if !args.encode.encode => namespace.clone(),
        _ => {
            plan_encode(&args.encode, &args.socket, format)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let of = NamespaceArgs {
        namespace,
        token: args.token.clone(),
        step: args.step,
        timeout: args.timeout,
    };
    let mut client = of.connect(&args.socket)?;
    if args.verdict {
        return verdict(&mut client, of.timeout_ms(), format);
    }
    if args.quarantine.is_said() {
        let failed = args.quarantine.tell(&mut client, of.timeout_ms())?;
        print_failed(&failed, format);
        return Ok(ExitCode::SUCCESS);
    }
    let plan = if args.allow_older {
        client.plan_allowing_older(of.step, of.timeout_ms())?
    } else {
        client.plan(of.step, of.timeout_ms())?
    };
    match format {
        ReportFormat::Json => print(&plan_json(&plan).to_string()),
        ReportFormat::Text => print_plan(&plan),
    }
    Ok(ExitCode::SUCCESS)
}

fn print_plan(plan: &RestorePlan) {
    print(&format!(
        "{} run {} step {} ({}, {} ranks), expected {} ms",
        plan.namespace, plan.run, plan.step, plan.state, plan.world_size, plan.expected_ms
    ));
    print(&format!("manifest {}", plan.manifest));
    for shard in &plan.shards {
        print(&shard_text(shard));
    }
    for one in &plan.passed_over {
        print(&format!(
            "passed over: run {} step {}: {}",
            one.run, one.step, one.reason
        ));
    }
}
