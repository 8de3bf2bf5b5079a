//! `storaged plan --encode`: which coding plan the daemon would choose, what each candidate would take, and why.

use bytesize::ByteSize;
use clap::Args;
use serde_json::{Value, json};
use storaged_plan::chooser::{
    Bound, Choice, CodingNodes, Dirty, EncodeCase, GroupFacts, NodeMeasure, choose_encode,
};
use storaged_plan::{Group, Member, groups};
use storaged_sdk::Client;
use storaged_sdk::wire::{ChunkSize, Geometry, NodeName};
use thiserror::Error;

use super::{CliError, SocketArgs, print, size};

/// Of a link whose rate nobody said: 10 Gbit/s.
const RATE_ASSUMED: u64 = 1_250_000_000;
const MILLION: f64 = 1e6;

#[derive(Debug, Args)]
#[command(next_help_heading = "With --encode")]
pub struct EncodeArgs {
    /// Show how a group would encode instead: the candidates, what each would take, and why one is chosen
    #[arg(long)]
    pub encode: bool,
    /// Data nodes of a group; by default as the daemon has it
    #[arg(long, requires = "m")]
    k: Option<usize>,
    /// Coding nodes of a group; by default as the daemon has it
    #[arg(long, requires = "k")]
    m: Option<usize>,
    /// Nodes of the cluster, all with shards, of which groups that code for each other are made; by default as the
    /// daemon has it, or with --k one group and coding nodes without shards
    #[arg(long)]
    nodes: Option<usize>,
    /// Which of the daemon's groups
    #[arg(long, default_value_t = 0, conflicts_with_all = ["k", "nodes"])]
    group: usize,
    /// Bytes of the longest shard
    #[arg(long, default_value = "1GiB")]
    shard: ByteSize,
    /// Bytes of a chunk; by default as the daemon has it, or 256KiB
    #[arg(long)]
    chunk: Option<ByteSize>,
    /// Share of the chunks that changed since the last protected step, from 0 to 1
    #[arg(long, default_value_t = 1.0)]
    dirty: f64,
    /// Bytes per second of every link, each way; by default what the daemon has measured, else its encode.link_rate
    #[arg(long)]
    rate: Option<ByteSize>,
    /// Another rate of one data node's link, as INDEX=RATE; may come several times
    #[arg(long = "node-rate", value_parser = node_rate)]
    node_rates: Vec<(usize, ByteSize)>,
}

/// A text that is no rate of a node.
#[derive(Debug, Error)]
#[error("expected INDEX=RATE such as 5=12MB, got {got:?}")]
struct NodeRateError {
    got: String,
}

fn node_rate(text: &str) -> Result<(usize, ByteSize), NodeRateError> {
    let expected = || NodeRateError { got: text.into() };
    let (index, rate) = text.split_once('=').ok_or_else(expected)?;
    let index = index.parse().map_err(|_| expected())?;
    Ok((index, rate.parse().map_err(|_| expected())?))
}

/// Where a value comes from, for the reader to judge by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Flag,
    Measured,
    Daemon,
    Assumed,
}

impl Origin {
    fn as_str(self) -> &'static str {
        match self {
            Self::Flag => "given",
            Self::Measured => "measured by the daemon",
            Self::Daemon => "configured",
            Self::Assumed => "assumed",
        }
    }
}

/// What the plans are made for.
#[derive(Debug)]
struct Question {
    geometry: Geometry,
    nodes: usize,
    facts: GroupFacts,
    rate_from: Origin,
    /// Data and coding nodes that have another rate than the rest, and what is known of it.
    others: Vec<String>,
    case: EncodeCase,
}

/// How the candidates are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportFormat {
    Text,
    Json,
}

/// Shows the candidates.
pub fn plan_encode(
    args: &EncodeArgs,
    socket: &SocketArgs,
    format: ReportFormat,
) -> Result<(), CliError> {
    // Only what no flag says is asked of a daemon, so that the flags alone work anywhere.
    let status = match args.k {
        Some(_) => Value::Null,
        None => status(socket)?,
    };
    let question = question(args, &status)?;
    let choice = choose_encode(&question.case);
    let choice = choice.map_err(usage)?;
    match format {
        ReportFormat::Json => print(&to_json(&question, &choice).to_string()),
        ReportFormat::Text => to_text(&question, &choice)
            .iter()
            .for_each(|line| print(line)),
    }
    Ok(())
}

fn status(socket: &SocketArgs) -> Result<Value, CliError> {
    let text = Client::connect_anonymous(&socket.path())?.status()?;
    serde_json::from_str(&text).map_err(|error| CliError::Unexpected(error.to_string()))
}

/// What does not fit together comes from the flags: a daemon's own figures do.
fn usage(error: impl ToString) -> CliError {
    CliError::Usage(error.to_string())
}

fn question(args: &EncodeArgs, status: &Value) -> Result<Question, CliError> {
    let geometry = geometry(args, status)?;
    let peers = status["peers"].as_array().map(|peers| peers.len() + 1);
    let told = args.nodes.or(peers);
    let nodes = told.unwrap_or(geometry.n());
    let chunk = args.chunk.map(|chunk| chunk.as_u64());
    let chunk = chunk
        .or(status["chunk_bytes"].as_u64())
        .unwrap_or(256 << 10);
    let chunk = ChunkSize::new(u32::try_from(chunk).unwrap_or(u32::MAX)).map_err(usage)?;
    let (rate, rate_from) = rate(args, status);
    let facts = GroupFacts {
        shard_bytes: args.shard.as_u64(),
        chunk,
        dirty: dirty(args.dirty)?,
        link_bytes_per_s: rate,
    };
    let own = match (args.k, args.nodes) {
        (None, None) => daemon_groups(status)?,
        _ => Vec::new(),
    };
    let groups = if own.is_empty() {
        made_groups(geometry, told)?
    } else {
        own
    };
    // The last group has fewer than k data nodes, and so have all of a small cluster.
    let data = groups.get(args.group).map_or(0, |group| group.data.len());
    let sources: Vec<usize> = (0..data).collect();
    let mut case = EncodeCase::of_group(&groups, args.group, &sources, &facts).map_err(usage)?;
    let others = match args.k {
        Some(_) => Vec::new(),
        None => known_rates(&mut case, &groups[args.group], rate, status),
    };
    for (index, rate) in &args.node_rates {
        let expected = format!(
            "expected a data node from 0 to {} in --node-rate, got {index}",
            data.saturating_sub(1)
        );
        let node = case.data.get_mut(*index).ok_or(usage(expected))?;
        *node = NodeMeasure::on_link(rate.as_u64());
    }
    Ok(Question {
        geometry,
        nodes,
        facts,
        rate_from,
        others,
        case,
    })
}

fn rate(args: &EncodeArgs, status: &Value) -> (u64, Origin) {
    let encode = &status["encode"];
    let (measured, told) = (&encode["link_rate_measured"], &encode["link_rate"]);
    match (args.rate, measured.as_u64(), told.as_u64()) {
        (Some(rate), _, _) => (rate.as_u64(), Origin::Flag),
        (None, Some(rate), _) => (rate, Origin::Measured),
        (None, None, Some(rate)) => (rate, Origin::Daemon),
        (None, None, None) => (RATE_ASSUMED, Origin::Assumed),
    }
}

/// Groups of nodes that nobody has named; one only, if nobody said how many nodes there are.
fn made_groups(geometry: Geometry, nodes: Option<usize>) -> Result<Vec<Group>, CliError> {
    let told = nodes.is_some();
    let nodes = nodes.unwrap_or(geometry.n());
    let members: Vec<Member> = (0..nodes).map(member).collect::<Result<_, _>>()?;
    let mut groups = groups(&members, geometry).map_err(usage)?;
    if !told {
        groups.truncate(1);
    }
    Ok(groups)
}

/// The daemon's own groups; none if it does not say.
fn daemon_groups(status: &Value) -> Result<Vec<Group>, CliError> {
    let names = |names: &Value| -> Result<Vec<NodeName>, CliError> {
        let names = names.as_array().into_iter().flatten();
        names
            .map(|name| NodeName::new(name.as_str().unwrap_or_default()).map_err(usage))
            .collect()
    };
    let groups = status["groups"].as_array().into_iter().flatten();
    let group = |group: &Value| {
        Ok(Group {
            data: names(&group["data"])?,
            coding: names(&group["coding"])?,
        })
    };
    groups.map(group).collect()
}

/// Puts in what the daemon knows of single nodes, as its leaders do: measured if slow, and what is configured.
fn known_rates(case: &mut EncodeCase, group: &Group, usual: u64, status: &Value) -> Vec<String> {
    let CodingNodes::Dedicated(coding) = &mut case.coding else {
        return Vec::new();
    };
    let measures = case.data.iter_mut().chain(coding);
    let mut others = Vec::new();
    for (measure, node) in measures.zip(group.data.iter().chain(&group.coding)) {
        let encode = &status["encode"];
        let told = share_told(encode, node.as_str(), usual);
        let mut links = encode["links"].as_array().into_iter().flatten();
        let link = links.find(|link| link["node"] == node.as_str());
        let slow = |side: &str| link.and_then(|link| link[side]["slow_ppm"].as_u64());
        let share = |side: &str| {
            let measured = slow(side).map_or(1.0, |ppm| ppm as f64 / MILLION);
            measured.min(told)
        };
        let (up, down) = (share("up"), share("down"));
        measure.up_bytes_per_s = ((usual as f64 * up) as u64).max(1);
        measure.down_bytes_per_s = ((usual as f64 * down) as u64).max(1);
        if up.min(down) < 1.0 {
            let origin = match slow("up").or(slow("down")) {
                Some(_) => "measured",
                None => "configured",
            };
            let share = up.min(down);
            others.push(format!("{node} at {share:.2} of the usual rate ({origin})"));
        }
    }
    others
}

/// What the operator says of a node, as a share of the usual rate: of the configured one, if there is one.
fn share_told(encode: &Value, node: &str, measured: u64) -> f64 {
    let (own, usual) = (&encode["node_rates"][node], &encode["link_rate"]);
    match (own.as_f64(), usual.as_f64()) {
        (Some(own), Some(usual)) => own / usual.max(1.0),
        (Some(own), None) => (own / measured.max(1) as f64).min(1.0),
        (None, _) => 1.0,
    }
}

fn member(index: usize) -> Result<Member, CliError> {
    let name = NodeName::new(format!("n{index:05}")).map_err(usage)?;
    let failure_domain = name.to_string();
    Ok(Member {
        name,
        failure_domain,
        cordon: Default::default(),
        seat: None,
    })
}

fn geometry(args: &EncodeArgs, status: &Value) -> Result<Geometry, CliError> {
    if let (Some(k), Some(m)) = (args.k, args.m) {
        return Geometry::new(k, m).map_err(usage);
    }
    let text = status["geometry"].as_str().ok_or_else(|| {
        usage("the daemon codes nothing: give --k and --m, or set [coding] in its configuration")
    })?;
    let parts = text.split_once('+');
    let numbers = parts.and_then(|(k, m)| Some((k.parse().ok()?, m.parse().ok()?)));
    let (k, m) = numbers.ok_or_else(|| usage(format!("expected a geometry k+m, got {text:?}")))?;
    Geometry::new(k, m).map_err(usage)
}

/// Changes are taken to lie in the same chunks at all nodes as far as they can: the honest middle between shards that
/// change alike and shards that change apart is not known, so the union is what was said.
fn dirty(share: f64) -> Result<Dirty, CliError> {
    if !(0.0..=1.0).contains(&share) {
        let expected = format!("expected a share from 0 to 1 in --dirty, got {share}");
        return Err(usage(expected));
    }
    let ppm = (share * MILLION).round() as u32;
    Ok(Dirty {
        union_ppm: ppm,
        own_ppm: ppm,
    })
}

fn bound_text(bound: Bound) -> String {
    match bound {
        Bound::Up(node) => format!("uplink of node {node}"),
        Bound::Down(node) => format!("downlink of node {node}"),
        Bound::Processor(node) => format!("processor of node {node}"),
        Bound::Connection(from, to) => format!("connection from node {from} to node {to}"),
        Bound::Delay => "the way of one stripe".into(),
    }
}

fn to_json(question: &Question, choice: &Choice) -> Value {
    let candidates = choice.candidates.iter().map(|candidate| {
        let estimate = &candidate.estimate;
        json!({
            "plan": candidate.plan.name(), "seconds": estimate.seconds,
            "delay_seconds": estimate.delay_seconds, "bound": bound_text(estimate.bound),
            "busiest_link_bytes": estimate.busiest_bytes, "total_bytes": estimate.total_bytes,
            "connections": estimate.connections, "blocks_in_flight_max": estimate.blocks_in_flight_max,
            "reason": candidate.reason,
        })
    });
    let facts = &question.facts;
    json!({
        "k": question.geometry.k(), "m": question.geometry.m(), "nodes": question.nodes,
        "shard_bytes": facts.shard_bytes, "chunk_bytes": facts.chunk.bytes(),
        "dirty": f64::from(facts.dirty.union_ppm) / MILLION,
        "link_rate": facts.link_bytes_per_s, "link_rate_from": question.rate_from.as_str(),
        "other_rates": question.others,
        "chosen": choice.best().plan.name(),
        "candidates": candidates.collect::<Vec<_>>(),
    })
}

fn to_text(question: &Question, choice: &Choice) -> Vec<String> {
    let facts = &question.facts;
    let mut lines = vec![format!(
        "geometry {}  nodes {}  shard {}  chunk {}  dirty {}  links {}/s ({})",
        question.geometry,
        question.nodes,
        size(facts.shard_bytes),
        size(facts.chunk.bytes() as u64),
        f64::from(facts.dirty.union_ppm) / MILLION,
        size(facts.link_bytes_per_s),
        question.rate_from.as_str()
    )];
    if question.rate_from == Origin::Assumed {
        lines.push(
            "no rate is known, so a daemon takes the chain until its sessions have measured one: give --rate here, \
             set encode.link_rate there"
                .into(),
        );
    }
    lines.extend(question.others.iter().cloned());
    for (place, candidate) in choice.candidates.iter().enumerate() {
        let mark = if place == 0 { "chosen" } else { "      " };
        lines.push(format!("{mark}  {}", candidate.reason));
    }
    lines
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        encode: EncodeArgs,
    }

    fn ask(line: &str, status: &Value) -> Result<(Question, Choice), CliError> {
        let words = std::iter::once("plan").chain(line.split_whitespace());
        let args = Line::try_parse_from(words).expect("arguments").encode;
        let question = question(&args, status)?;
        let choice = choose_encode(&question.case).map_err(usage)?;
        Ok((question, choice))
    }

    #[test]
    fn the_flags_alone_give_an_answer_with_reasons() {
        let line = "--encode --k 8 --m 2 --rate 125MB --shard 1GiB";
        let (question, choice) = ask(line, &Value::Null).unwrap();
        let value = to_json(&question, &choice);
        assert_eq!(value["chosen"], "rotating gather at the data nodes");
        assert_eq!(value["link_rate"], 125_000_000);
        assert_eq!(value["link_rate_from"], "given");
        let seconds = value["candidates"][0]["seconds"].as_f64().unwrap();
        // 1.125 shards of 1 GiB at 125 MB/s.
        assert!((9.6..9.8).contains(&seconds), "{seconds}");
        let text = to_text(&question, &choice).join("\n");
        assert!(text.contains("chosen  rotating gather"), "{text}");
        assert!(text.contains("times as long"), "{text}");
    }

    #[test]
    fn what_no_flag_says_is_the_daemons() {
        let status = json!({
            "geometry": "4+2", "chunk_bytes": 65536, "encode": {"link_rate": 1_000_000},
            "peers": [{}, {}, {}, {}, {}],
        });
        let (question, _) = ask("--encode", &status).unwrap();
        assert_eq!((question.nodes, question.geometry.n()), (6, 6));
        assert_eq!(question.facts.chunk.bytes(), 65536);
        assert_eq!(question.rate_from, Origin::Daemon);
        // The coding nodes are data nodes of the other group, whose parity two of these keep.
        assert_eq!(question.case.codes_for, [1, 1, 0, 0]);
    }

    #[test]
    fn what_the_daemon_measured_counts_in_its_own_groups() {
        let group = |data: [&str; 4], coding: [&str; 2]| json!({"data": data, "coding": coding});
        let mut status = json!({
            "geometry": "4+2", "chunk_bytes": 65536, "peers": [{}, {}, {}, {}, {}],
            "encode": {
                "link_rate": 50_000_000, "node_rates": {"d": 25_000_000}, "link_rate_measured": 100_000_000,
                "links": [
                    {"node": "b", "up": {"rate": 9_000_000, "slow_ppm": 90_000}, "down": null},
                    {"node": "e", "up": null, "down": {"rate": 99_000_000, "slow_ppm": null}},
                ],
            },
            "groups": [group(["a", "b", "c", "d"], ["e", "f"]), group(["e", "f", "a", "b"], ["c", "d"])],
        });
        let (question, choice) = ask("--encode", &status).unwrap();
        assert_eq!(question.rate_from, Origin::Measured);
        let rates: Vec<(u64, u64)> = (question.case.data.iter())
            .map(|node| {
                (
                    node.up_bytes_per_s / 1_000_000,
                    node.down_bytes_per_s / 1_000_000,
                )
            })
            .collect();
        assert_eq!(rates, [(100, 100), (9, 100), (100, 100), (50, 50)]);
        let text = to_text(&question, &choice).join("\n");
        assert!(text.contains("(measured by the daemon)"), "{text}");
        assert!(
            text.contains("b at 0.09 of the usual rate (measured)"),
            "{text}"
        );
        assert!(
            text.contains("d at 0.50 of the usual rate (configured)"),
            "{text}"
        );
        let (other, _) = ask("--encode --group 1", &status).unwrap();
        assert_eq!(other.case.data[3].up_bytes_per_s, 9_000_000);
        assert!(ask("--encode --group 2", &status).is_err());
        // Nothing measured, and names that cannot be.
        status["groups"] = json!([{"data": ["no name"], "coding": []}]);
        assert!(ask("--encode", &status).is_err());
    }

    #[test]
    fn without_a_rate_the_daemon_takes_the_chain_and_the_answer_says_so() {
        let (question, choice) = ask("--encode --k 4 --m 2", &Value::Null).unwrap();
        assert_eq!(question.rate_from, Origin::Assumed);
        let text = to_text(&question, &choice).join("\n");
        assert!(text.contains("a daemon takes the chain"), "{text}");
    }

    #[test]
    fn a_slow_node_changes_the_answer() {
        let line = "--encode --k 8 --m 2 --rate 125MB --node-rate 5=12MB";
        let (_, choice) = ask(line, &Value::Null).unwrap();
        assert!(
            choice.best().reason.contains("data node 5"),
            "{}",
            choice.best().reason
        );
    }

    #[test]
    fn groups_with_fewer_data_nodes_are_coded_too() {
        for line in [
            "--encode --k 4 --m 2 --nodes 5",
            "--encode --k 4 --m 2 --nodes 3 --rate 125MB",
        ] {
            let (question, _) = ask(line, &Value::Null).unwrap();
            assert!(question.case.data.len() < 4, "{line}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (line, expected) in [
            ("--encode --k 0 --m 2", "expected k >= 1"),
            ("--encode --k 4 --m 2 --dirty 1.5", "a share from 0 to 1"),
            ("--encode --k 4 --m 2 --nodes 2", "coding nodes"),
            ("--encode --k 4 --m 2 --chunk 5KiB", "chunk"),
            ("--encode --k 4 --m 2 --rate 0B", "rate of 0"),
            ("--encode --k 4 --m 2 --node-rate 4=1MB", "from 0 to 3"),
            ("--encode", "codes nothing"),
        ] {
            let error = ask(line, &Value::Null).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(node_rate("5").is_err() && node_rate("x=1MB").is_err());
    }
}
