//! What unit tests of decisions share: one node, its peers, and the manifest of a small job.

use std::collections::BTreeMap;

use storaged_codec::{ChunkSize, Digest, Geometry};
use storaged_plan::Member;
use storaged_wire::local::DurableWish;
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{HighMark, PeerMessage};
use storaged_wire::{
    Enclosed, Generation, Manifest, ManifestBytes, Namespace, NodeName, Owner, Rank, RunId,
    ShardEntry, Step, WorldSize,
};

use crate::api::{
    DurableForm, DurablePolicy, Input, LinkRates, Now, Output, RunAuthority, RunsWithoutTier, Setup,
};
use crate::node::Node;

/// The token that the job's namespace belongs to.
pub const TOKEN: &[u8] = b"a token of tests";

pub fn name(text: &str) -> NodeName {
    NodeName::new(text).expect("a name")
}

pub fn job() -> Namespace {
    Namespace::new("job").expect("a name")
}

pub fn owner() -> Owner {
    Owner::of_token(TOKEN)
}

pub fn chunk() -> ChunkSize {
    ChunkSize::new(65_536).expect("a size")
}

/// A step of the first run.
pub fn at(step: u64) -> HighMark {
    HighMark {
        run: RunId::new(1),
        step: Step::new(step),
    }
}

fn geometry(k: usize, m: usize) -> Geometry {
    Geometry::new(k, m).expect("a geometry")
}

/// The last of these members, without a durable tier and with a budget that nothing exceeds. Its links are up.
pub fn last_of(members: &[&str], k: usize, m: usize) -> Node {
    last_with_tier(members, k, m, DurablePolicy::Absent)
}

/// The same with what goes to a durable tier.
pub fn last_with_tier(members: &[&str], k: usize, m: usize, durable: DurablePolicy) -> Node {
    linked(unlinked(members, geometry(k, m), durable), members)
}

/// The last of these members, which keeps so many steps. Its links are up.
pub fn last_that_keeps(keep_steps: usize, members: &[&str], k: usize, m: usize) -> Node {
    let mut setup = setup_of_last(members, geometry(k, m), DurablePolicy::Absent);
    setup.keep_steps = keep_steps;
    linked(Node::new(setup).expect("groups"), members)
}

fn linked(mut node: Node, members: &[&str]) -> Node {
    let (_, peers) = members.split_last().expect("a member");
    for peer in peers {
        let generation = Generation::new(1);
        let node_up = Input::PeerUp {
            node: name(peer),
            generation,
        };
        node.handle(Now(0), node_up);
    }
    node
}

/// What a node does when a peer says something.
pub fn hear(node: &mut Node, at: u64, from: &str, message: PeerMessage) -> Vec<Output> {
    let from = name(from);
    let outputs = node.handle(Now(at), Input::Message { from, message });
    prepared(node, Now(at), outputs)
}

/// What a node does when all of its peers that are up say the same, its home nodes among them.
pub fn hear_from_all(node: &mut Node, at: u64, message: &PeerMessage) -> Vec<Output> {
    let peers: Vec<NodeName> = node.context().peers.keys().cloned().collect();
    let mut all = Vec::new();
    for from in peers {
        all.extend(hear(node, at, from.as_str(), message.clone()));
    }
    all
}

/// What a node does, with all peers that it asks for a job saying at once that they do not know it.
pub fn unknown_to_peers(node: &mut Node, now: Now, outputs: Vec<Output>) -> Vec<Output> {
    let mut all = outputs;
    let asked: Vec<(NodeName, u64)> = all.iter().filter_map(asked_for_job).collect();
    for (from, query) in asked {
        let message = PeerMessage::RunAnswer { query, fence: None };
        all.extend(node.handle(now, Input::Message { from, message }));
    }
    all
}

fn asked_for_job(output: &Output) -> Option<(NodeName, u64)> {
    match output {
        Output::Send {
            to,
            message: PeerMessage::RunQuery { query, .. },
        } => Some((to.clone(), *query)),
        _ => None,
    }
}

/// What a node does, with what it has prepared done at once.
pub fn prepared(node: &mut Node, now: Now, outputs: Vec<Output>) -> Vec<Output> {
    let mut all = Vec::new();
    for output in outputs {
        match output {
            Output::Prepare(work) => {
                let outputs = node.handle(now, Input::Prepared(work.run()));
                all.extend(prepared(node, now, outputs));
            }
            other => all.push(other),
        }
    }
    all
}

/// The messages among what it does.
pub fn sent(outputs: Vec<Output>) -> Vec<PeerMessage> {
    let sent = outputs.into_iter().filter_map(|output| match output {
        Output::Send { message, .. } => Some(message),
        _ => None,
    });
    sent.collect()
}

/// The manifest of a step of run 1: a shard of so many bytes, with this root, on each data node, and parity on the coding nodes.
pub fn manifest(step: u64, data: &[&str], coding: &[&str], length: u64, root: Digest) -> Manifest {
    let names = |nodes: &[&str]| nodes.iter().map(|node| name(node)).collect::<Vec<_>>();
    let shard = |(rank, node): (u32, &&str)| ShardEntry {
        rank: Rank::new(rank),
        node: name(node),
        length,
        root,
    };
    Manifest {
        version: Manifest::VERSION,
        namespace: job(),
        owner: owner(),
        run: RunId::new(1),
        step: Step::new(step),
        world_size: WorldSize::new(data.len() as u32).expect("ranks"),
        epoch: 1,
        geometry: geometry(data.len(), coding.len()),
        chunk: chunk(),
        shards: (0u32..).zip(data).map(shard).collect(),
        groups: vec![GroupEntry {
            data: names(data),
            coding: names(coding),
        }],
        schema: Enclosed::nothing(),
        torch_metadata: Enclosed::nothing(),
    }
}

/// That a home node tells of a commit.
pub fn committed(manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::Committed {
        manifest: manifest.bytes().to_vec().into(),
        durable: DurableWish::Policy,
    }
}

/// The last of so many members `n00`, `n01` ..., to which nobody has linked up.
pub fn alone_of(nodes: usize) -> Node {
    let members: Vec<String> = (0..nodes).map(|node| format!("n{node:02}")).collect();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    unlinked(&members, geometry(2, 1), DurablePolicy::Absent)
}

/// The last of these members, to which nobody has linked up.
pub fn alone_among(members: &[&str], k: usize, m: usize) -> Node {
    unlinked(members, geometry(k, m), DurablePolicy::Absent)
}

fn unlinked(members: &[&str], geometry: Geometry, durable: DurablePolicy) -> Node {
    Node::new(setup_of_last(members, geometry, durable)).expect("groups")
}

fn setup_of_last(members: &[&str], geometry: Geometry, durable: DurablePolicy) -> Setup {
    let member = |text: &&str| Member {
        name: name(text),
        failure_domain: (*text).into(),
        cordon: Default::default(),
        seat: None,
    };
    let me = members.last().expect("a member");
    Setup {
        name: name(me),
        generation: Generation::new(1),
        members: members.iter().map(member).collect(),
        epoch: 1,
        geometry: Some(geometry),
        chunk: chunk(),
        slots_per_rank: 3,
        keep_steps: 1,
        budget: u64::MAX,
        shares: BTreeMap::new(),
        idle_job_ms: 3_600_000,
        scrub_period_ms: 0,
        link_rates: LinkRates::default(),
        durable,
        messages: crate::api::MessageLimits::default(),
        runs_without_tier: RunsWithoutTier::Refused,
        run_authority: RunAuthority::Members,
        durable_form: DurableForm::Full,
    }
}
