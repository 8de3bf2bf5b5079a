//! `storaged status`.

use clap::Args;
use serde_json::Value;
use storaged_sdk::Client;

use super::{CliError, SocketArgs, print, size};
use crate::waiting_room::OUT_OF_USE;

#[derive(Debug, Args)]
#[command(
    after_help = "Of each step: the epoch whose groups code it, the nodes that decide of it (they alone count what it lacks: ask one of them), those that\nlead its coding and repair, and what nodes have still to get back. `storaged node ls --config FILE` shows the registry's own record."
)]
pub struct StatusArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print nothing: exit code 0 if the daemon answers (live), if it is ready too (ready), or if it is ready or without a place on
    /// purpose, as spares are (rollout). For probes: no program without a right to the socket can hold them up, as it can those over HTTP
    #[arg(long, value_enum, conflicts_with = "json")]
    probe: Option<Probe>,
}

/// What a probe asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Probe {
    Live,
    Ready,
    Rollout,
}

impl Probe {
    fn look(self, status: &Value) -> Result<(), CliError> {
        if self == Self::Live || status["ready"] == true {
            return Ok(());
        }
        // A DaemonSet's rollout waits for all pods but a few: a spare that is never ready would hold it up for good.
        let is_out_of_use = OUT_OF_USE.iter().any(|it| status["waiting"]["as"] == *it);
        if self == Self::Rollout && is_out_of_use {
            return Ok(());
        }
        let reasons = status["not_ready"].as_array().into_iter().flatten();
        let mut reasons: Vec<&str> = reasons.filter_map(Value::as_str).collect();
        if status["waiting"].is_object() {
            reasons.push("this node waits for a place");
        }
        Err(CliError::NotReady(reasons.join("; ")))
    }
}

pub fn status(args: &StatusArgs) -> Result<(), CliError> {
    let text = Client::connect_anonymous(&args.socket.path())?.status()?;
    if args.json {
        print(&text);
        return Ok(());
    }
    let status: Value =
        serde_json::from_str(&text).map_err(|error| CliError::Unexpected(error.to_string()))?;
    if let Some(probe) = args.probe {
        return probe.look(&status);
    }
    if status["waiting"].is_object() {
        print_waiting(&status);
        return Ok(());
    }
    let memory = &status["memory"];
    print(&format!(
        "node {}  geometry {}  ready {}",
        status["node"].as_str().unwrap_or_default(),
        status["geometry"].as_str().unwrap_or("none"),
        status["ready"]
    ));
    for reason in status["not_ready"].as_array().into_iter().flatten() {
        print(&format!(
            "not ready: {}",
            reason.as_str().unwrap_or_default()
        ));
    }
    print_about_nodes(&status);
    if let Some(expires) = status["certificate_expires"].as_i64() {
        print(&format!(
            "certificate until {}",
            crate::driver::date(expires)
        ));
    }
    print(&format!(
        "memory {} of {}  slots {}  parity sets {}",
        bytes(&memory["used"]),
        bytes(&memory["budget"]),
        memory["slots"],
        memory["parity_sets"]
    ));
    if let Some(kept) = kept(&status) {
        print(&format!("memory kept by {kept}"));
    }
    print_scrub(&status["scrub"]);
    if let Some(state) = status["durable"]["state"].as_str() {
        let fault = status["durable"]["fault"].as_str();
        let fault = fault.map_or(String::new(), |fault| format!("  {fault}"));
        print(&format!("durable tier {state}{fault}"));
    }
    for peer in status["peers"].as_array().into_iter().flatten() {
        let state = if peer["up"] == true { "up" } else { "DOWN" };
        let doubt = if peer["believed"] == false {
            "  NOT BELIEVED: it has said what cannot be so; restart its daemon"
        } else {
            ""
        };
        print(&format!(
            "peer {}  {state}{doubt}",
            peer["node"].as_str().unwrap_or_default()
        ));
    }
    print_owed(&status["to_put_back"]);
    for job in status["runs"].as_array().into_iter().flatten() {
        print_job(job);
    }
    for one in status["checkpoints"].as_array().into_iter().flatten() {
        print_step(one);
    }
    Ok(())
}

fn text<'v>(of: &'v Value, key: &str) -> &'v str {
    of[key].as_str().unwrap_or_default()
}

fn bytes(value: &Value) -> String {
    size(value.as_u64().unwrap_or(0))
}

/// So many names as fit a line.
const NAMES_SHOWN: usize = 8;

fn names(of: &Value) -> String {
    let all = of.as_array().map_or(&[][..], Vec::as_slice);
    let shown = all.iter().filter_map(Value::as_str).take(NAMES_SHOWN);
    let shown = shown.collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(NAMES_SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn blocks(of: &Value) -> String {
    let (count, bytes) = (of["blocks"].as_u64().unwrap_or(0), bytes(&of["bytes"]));
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} block{plural}, {bytes}")
}

/// What nodes have still to get back, of the steps that this node counts as one of their home nodes.
fn print_owed(owed: &Value) {
    if owed["blocks"].as_u64().unwrap_or(0) > 0 {
        print(&format!("to put back {}", blocks(owed)));
    }
}

fn print_job(job: &Value) {
    let trainers = names(&job["trainers_on"]);
    let trainers = if trainers.is_empty() {
        "no trainers".into()
    } else {
        format!("trainers on {trainers}")
    };
    print(&format!(
        "job {}  run {}  {trainers}",
        text(job, "namespace"),
        text(job, "run")
    ));
}

fn print_step(one: &Value) {
    let pinned = if one["pinned"] == true {
        ", pinned"
    } else {
        ""
    };
    print(&format!(
        "{}  run {}  step {}  {}{pinned}  shards here {}  parity here {}",
        text(one, "namespace"),
        one["run"],
        one["step"],
        text(one, "standing"),
        one["shards_here"],
        one["parity_here"]
    ));
    if let Some(why) = one["no_room"].as_str() {
        print(&format!("  cannot be protected: {why}"));
    }
    if let Some(epoch) = one["epoch"].as_u64() {
        let (homes, leaders) = (names(&one["homes"]), names(&one["led_by"]));
        let leads = if leaders.is_empty() {
            String::new()
        } else {
            format!("  coding led by {leaders}")
        };
        print(&format!("  epoch {epoch}  decided by {homes}{leads}"));
    }
    for node in one["lacking"].as_array().into_iter().flatten() {
        let down = if node["down"] == true { " (DOWN)" } else { "" };
        print(&format!(
            "  {}{down} lacks {}",
            text(node, "node"),
            blocks(node)
        ));
    }
}

/// Peers that should be configured as this node, and nodes that are cordoned.
fn print_about_nodes(status: &Value) {
    for peer in status["differing"].as_array().into_iter().flatten() {
        print(&format!(
            "differs: {}",
            peer["reason"].as_str().unwrap_or_default()
        ));
    }
    print_membership(&status["membership"]);
    if let Some(fault) = registry_fault(status) {
        print(&fault);
    }
    let cordoned = status["membership"]["cordoned"].as_array();
    for node in cordoned.into_iter().flatten() {
        print(&format!("cordoned: {}", node.as_str().unwrap_or_default()));
    }
}

/// The roster that this node goes by, and how many places it has put into other groups.
fn print_membership(roster: &Value) {
    let Some(places) = roster["places"].as_array() else {
        return;
    };
    print(&format!(
        "epoch {} of cluster {}  {} of {} places, {} vacant  {}: {} in other groups than before",
        roster["epoch"],
        text(roster, "cluster"),
        places.len(),
        roster["size"],
        roster["vacant"],
        text(roster, "change"),
        roster["regrouped"]
    ));
}

/// Why the registry is not followed; none while it is. It keeps a node ready, so nothing else says it.
fn registry_fault(status: &Value) -> Option<String> {
    let fault = status["membership_fault"].as_str()?;
    let seconds = status["membership_fault_seconds"].as_u64().unwrap_or(0);
    Some(format!(
        "registry not followed for {seconds} s: {fault}; jobs go on, nobody who is lost is replaced"
    ))
}

/// Who has the memory once the daemon has ended; none where that is not said, as by one of an earlier release.
fn kept(status: &Value) -> Option<String> {
    let by = status["kept_by"].as_str()?;
    let since = status["holder_lacks_since"].as_i64();
    let unheld = status["unheld"].as_u64().unwrap_or(0);
    let kept = match (by, status["holder"].as_str()) {
        ("nobody", _) => return Some("nobody: it ends with the daemon".into()),
        ("keeper", Some("has-all")) if unheld > 0 => "keeper and holder".into(),
        ("keeper", Some("has-all")) => "keeper and holder: it outlives the pod".into(),
        ("keeper", Some("lacks")) => format!(
            "the keeper alone: the holder has not had all of it since {}",
            crate::driver::date(since.unwrap_or(0))
        ),
        ("keeper", Some("absent")) => "the keeper alone: there is no holder".into(),
        ("keeper", _) => "the keeper, which has not said whether a holder has it too".into(),
        (other, _) => other.into(),
    };
    Some(if unheld > 0 {
        format!("{kept}, but for {unheld} slots or segments of parity that were not taken")
    } else {
        kept
    })
}

/// A node that has no place in its cluster yet.
fn print_waiting(status: &Value) {
    let node = status["node"].as_str().unwrap_or_default();
    let waiting = &status["waiting"];
    match (waiting["as"].as_str(), waiting["epoch"].as_u64()) {
        (Some("spare"), Some(epoch)) => print(&format!(
            "node {node}  spare of epoch {epoch}, waiting for a place"
        )),
        _ => print(&format!("node {node}  waiting for a place")),
    }
    for reason in status["not_ready"].as_array().into_iter().flatten() {
        print(&format!(
            "not ready: {}",
            reason.as_str().unwrap_or_default()
        ));
    }
}

/// Within how long RAM is read again, and what came of it; nothing where it is not.
fn print_scrub(scrub: &Value) {
    let seconds = |key: &str| scrub[key].as_u64().unwrap_or(0).div_ceil(1_000);
    if seconds("period_ms") > 0 {
        print(&format!(
            "scrub every {} s  all read within {} s  rotten chunks {}",
            seconds("period_ms"),
            seconds("age_ms"),
            scrub["rotten_chunks"]
        ));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_registry_that_is_not_followed_is_said_in_one_line() {
        let away = json!({"membership_fault": "expected a directory, got none", "membership_fault_seconds": 12});
        let expected = "registry not followed for 12 s: expected a directory, got none; jobs go on, nobody who is lost is replaced";
        assert_eq!(registry_fault(&away).as_deref(), Some(expected));
        let there = json!({"membership_fault": null, "membership_fault_seconds": null});
        assert_eq!(registry_fault(&there), None);
        // A node without a registry, or of an earlier release.
        assert_eq!(registry_fault(&json!({})), None);
    }

    #[test]
    fn whether_memory_outlives_the_pod_is_said_in_one_line() {
        let said = |holder: Value| {
            kept(&json!({"kept_by": "keeper", "holder": holder, "holder_lacks_since": 86_400}))
        };
        let has_all = said(json!("has-all")).expect("a line");
        assert!(has_all.contains("outlives the pod"), "{has_all}");
        let lacks = said(json!("lacks")).expect("a line");
        assert!(lacks.contains("since 1970-01-02T00:00:00Z"), "{lacks}");
        for holder in [json!("absent"), json!("lacks"), Value::Null] {
            let line = said(holder).expect("a line");
            assert!(line.contains("the keeper") && !line.contains("outlives"));
        }
        for by in ["nobody", "systemd"] {
            let line = kept(&json!({"kept_by": by, "holder": null})).expect("a line");
            assert!(line.starts_with(by), "{line}");
        }
        let part = json!({"kept_by": "keeper", "holder": "has-all", "unheld": 2});
        let part = kept(&part).expect("a line");
        assert!(part.contains("but for 2 slots") && !part.contains("outlives"));
        // A node of an earlier release.
        assert_eq!(kept(&json!({})), None);
    }

    #[test]
    fn a_rollout_waits_for_no_node_that_is_out_of_use_on_purpose() {
        let waits = |kind: &str| json!({"ready": false, "not_ready": ["a reason"], "waiting": {"as": kind}});
        let good = json!({"ready": true});
        for kind in OUT_OF_USE {
            assert!(Probe::Rollout.look(&waits(kind)).is_ok(), "{kind}");
            assert!(Probe::Ready.look(&waits(kind)).is_err(), "{kind}");
        }
        for kind in ["new-node", "unknown", "twin", "unplaceable"] {
            assert!(Probe::Rollout.look(&waits(kind)).is_err(), "{kind}");
            assert!(Probe::Live.look(&waits(kind)).is_ok(), "{kind}");
        }
        let with_place = json!({"ready": false, "not_ready": ["n2 is down"]});
        let error = Probe::Rollout.look(&with_place).unwrap_err();
        assert!(error.to_string().contains("n2 is down"), "{error}");
        assert!(Probe::Rollout.look(&good).is_ok() && Probe::Ready.look(&good).is_ok());
    }
}
