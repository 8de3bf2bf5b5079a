//! A whole cluster of deciding nodes, without bytes: `make bench-scale`, or `cargo bench -p storaged-core --bench cluster -- 128`
//! for another number of ranks than 10,000; `--write FILE` keeps the figures (docs/bench/scale.json). All nodes link up, a job of
//! eight ranks per node opens a run and saves, two nodes are lost and start anew with nothing, and every rank of the job
//! asks for its shard. Messages arrive at once and in order, effects succeed at once. CPU time of all nodes together.

mod common;
#[path = "../tests/testkit/mod.rs"]
mod testkit;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use common::{
    RANKS_PER_NODE, SCHEMA_BYTES_PER_RANK, chunk, cpu_seconds, members, name, setup, words, write,
};
use storaged_codec::{Fingerprint, leaf_digest, root_digest};
use storaged_core::{
    ConnId, DigestTally, Input, Node, Now, Output, Preparation, Prepared, RequestId, SessionTally,
    Setup, Sink,
};
use storaged_plan::Member;
use storaged_wire::local::{DurableWish, Reply, Request, Role, Rung};
use storaged_wire::plan::Source;
use storaged_wire::{
    CheckpointState, Digest, Generation, NodeName, Rank, RunId, SlotId, Step, WorldSize, encode,
};
use testkit::{acquire_slot, hello, namespace, open_shard, plan_newest};

const SHARD_BYTES: u64 = 1 << 20;
/// What takes longer than that will never be.
const SECONDS_MAX: u64 = 120;

/// What a trainer says of a step beside its shards, in bytes per rank.
#[derive(Clone, Copy)]
struct Described {
    schema: usize,
    torch_metadata: usize,
}

/// A small job's.
const SMALL: Described = Described {
    schema: SCHEMA_BYTES_PER_RANK,
    torch_metadata: 0,
};

/// 700 tensors that are sharded over all ranks, of which zstd leaves some bytes per piece: 2 MiB each at 1,024 ranks.
const LARGE: Described = Described {
    schema: 2_048,
    torch_metadata: 2_048,
};

/// The ranks of the save whose bytes are counted.
const COUNTED_RANKS: usize = 1_024;

struct Cluster {
    members: Arc<[Member]>,
    nodes: Vec<Node>,
    generations: Vec<u64>,
    queue: VecDeque<(usize, Input)>,
    now: u64,
    replies: BTreeMap<RequestId, Reply>,
    /// Digests of the chunks of what is in a slot.
    leaves: BTreeMap<(usize, SlotId), Arc<[Digest]>>,
    /// Parcels that some node has read: their contents are the same memory for all.
    prepared: BTreeMap<Digest, Prepared>,
    asked: u64,
    sessions: u64,
    messages: u64,
    message_bytes: u64,
    longest_message: usize,
}

fn index(name: &NodeName) -> usize {
    let number = name.as_str().rsplit('-').next().map(str::parse);
    number.expect("a number").expect("a number")
}

impl Cluster {
    fn new(count: usize) -> Self {
        let mut cluster = Self {
            members: members(count).into(),
            nodes: Vec::new(),
            generations: vec![1; count],
            queue: VecDeque::new(),
            now: 0,
            replies: BTreeMap::new(),
            leaves: BTreeMap::new(),
            prepared: BTreeMap::new(),
            asked: 0,
            sessions: 0,
            messages: 0,
            message_bytes: 0,
            longest_message: 0,
        };
        let nodes = (0..count).map(|node| cluster.started(node)).collect();
        cluster.nodes = nodes;
        cluster
    }

    fn started(&self, node: usize) -> Node {
        let setup = Setup {
            generation: Generation::new(self.generations[node]),
            ..setup(name(node), self.members.to_vec())
        };
        Node::new(setup).expect("groups")
    }

    fn up(&self, node: usize) -> Input {
        Input::PeerUp {
            node: name(node),
            generation: Generation::new(self.generations[node]),
        }
    }

    fn link_all(&mut self) {
        for node in 0..self.nodes.len() {
            for other in (0..self.nodes.len()).filter(|other| *other != node) {
                let up = self.up(other);
                self.feed(node, up);
            }
        }
        self.drain();
    }

    /// A node dies and starts with nothing; all others see both.
    fn restart(&mut self, node: usize) {
        self.generations[node] += 1;
        self.nodes[node] = self.started(node);
        self.leaves.retain(|(at, _), _| *at != node);
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            self.feed(other, Input::PeerDown { node: name(node) });
            let up = self.up(node);
            self.feed(other, up);
            let up = self.up(other);
            self.feed(node, up);
        }
    }

    fn feed(&mut self, node: usize, input: Input) {
        for output in self.nodes[node].handle(Now(self.now), input) {
            self.perform(node, output);
        }
    }

    fn drain(&mut self) {
        while let Some((node, input)) = self.queue.pop_front() {
            self.feed(node, input);
        }
    }

    /// Time passes until something holds.
    fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let limit = self.now + SECONDS_MAX * 1_000;
        self.drain();
        while !holds(self) {
            assert!(self.now < limit, "expected {what} within {SECONDS_MAX} s");
            self.now += 250;
            for node in 0..self.nodes.len() {
                if self.nodes[node].deadline().0 <= self.now {
                    self.feed(node, Input::Tick);
                }
            }
            self.drain();
        }
    }

    fn perform(&mut self, node: usize, output: Output) {
        match output {
            Output::Send { to, message } => {
                let bytes = encode(&message).len();
                self.messages += 1;
                self.message_bytes += bytes as u64;
                self.longest_message = self.longest_message.max(bytes);
                let from = name(node);
                self.queue
                    .push_back((index(&to), Input::Message { from, message }));
            }
            Output::CreateSlot { slot, .. } => {
                self.queue.push_back((node, Input::SlotCreated { slot }));
            }
            Output::Digest { slot, length, .. } => self.digest(node, slot, length),
            Output::Run(work) => {
                self.sessions += 1;
                if let Some(Sink::Shard(shard)) = &work.keep {
                    self.leaves.insert((node, shard.slot), shard.leaves.clone());
                }
                let stripes = 0..work.chunk.count(work.lane_length);
                let kept = work.keep.iter().map(|_| stripes.clone()).collect();
                let ended = Input::SessionEnded {
                    leader: work.leader,
                    session: work.session,
                    outcome: Ok(SessionTally::default()),
                    kept,
                };
                self.queue.push_back((node, ended));
            }
            Output::Prepare(work) => {
                let prepared = self.prepare(work);
                self.queue.push_back((node, Input::Prepared(prepared)));
            }
            Output::Reply { id, reply, .. } => drop(self.replies.insert(id, reply)),
            _ => {}
        }
    }

    fn digest(&mut self, node: usize, slot: SlotId, length: u64) {
        let made = || {
            let leaf = |at: u64| leaf_digest(format!("{node} {slot} {at}").as_bytes(), at);
            (0..chunk().count(length)).map(leaf).collect()
        };
        let leaves = self.leaves.entry((node, slot)).or_insert_with(made).clone();
        let digested = Input::Digested {
            slot,
            root: root_digest(&leaves, length, chunk()),
            tally: DigestTally::default(),
            prints: vec![Fingerprint::ZERO; leaves.len()].into(),
            leaves,
        };
        self.queue.push_back((node, digested));
    }

    fn prepare(&mut self, work: Preparation) -> Prepared {
        match work {
            Preparation::Open { parcel, .. } => {
                let known = self.prepared.entry(parcel);
                known.or_insert_with(|| work.run()).clone()
            }
            work => work.run(),
        }
    }

    fn ask(&mut self, node: usize, conn: ConnId, request: Request) -> RequestId {
        self.asked += 1;
        let index = self.asked;
        let id = RequestId { conn, index };
        self.queue.push_back((node, Input::Request { id, request }));
        id
    }

    fn connect(&mut self, node: usize, role: Role) -> ConnId {
        self.asked += 1;
        let conn = ConnId(self.asked);
        self.ask(node, conn, hello(namespace(), role));
        conn
    }

    fn all_answered(&self, ids: &[RequestId]) -> bool {
        ids.iter().all(|id| self.replies.contains_key(id))
    }
}

/// The node of a rank.
fn node_of(rank: usize) -> usize {
    rank / RANKS_PER_NODE
}

fn open_run(cluster: &mut Cluster) -> RunId {
    let conn = cluster.connect(0, Role::Reader);
    let timeout_ms = 60_000;
    let id = cluster.ask(0, conn, Request::OpenRun { timeout_ms });
    cluster.until("a run", |it| it.replies.contains_key(&id));
    match &cluster.replies[&id] {
        Reply::RunOpened { run } => *run,
        other => panic!("expected a run, got {other:?}"),
    }
}

/// Every rank's trainer connects.
fn attach(cluster: &mut Cluster, run: RunId, ranks: usize) -> Vec<ConnId> {
    let world_size = WorldSize::new(ranks as u32).expect("ranks");
    (0..ranks)
        .map(|rank| {
            let rank_id = Rank::new(rank as u32);
            let role = Role::Trainer {
                run,
                rank: rank_id,
                world_size,
            };
            cluster.connect(node_of(rank), role)
        })
        .collect()
}

/// Every rank saves, and rank 0 waits until it is protected. Gives the manifest's name.
fn save(
    cluster: &mut Cluster,
    run: RunId,
    step: Step,
    trainers: &[ConnId],
    described: Described,
) -> Digest {
    let ranks = trainers.len();
    let acquired: Vec<RequestId> = (trainers.iter().enumerate())
        .map(|(rank, conn)| cluster.ask(node_of(rank), *conn, acquire_slot(SHARD_BYTES, 60_000)))
        .collect();
    cluster.until("slots", |it| it.all_answered(&acquired));
    for (rank, id) in acquired.iter().enumerate() {
        let slot = match &cluster.replies[id] {
            Reply::SlotGranted { slot, .. } => *slot,
            other => panic!("expected a slot, got {other:?}"),
        };
        let length = SHARD_BYTES;
        let seal = Request::SealSlot { slot, step, length };
        cluster.ask(node_of(rank), id.conn, seal);
    }
    let commit = Request::Commit {
        step,
        schema: vec![7; described.schema * ranks].into(),
        torch_metadata: vec![8; described.torch_metadata * ranks].into(),
        durable: DurableWish::Never,
    };
    cluster.ask(0, trainers[0], commit);
    let wait = Request::Wait {
        run,
        step,
        state: CheckpointState::Protected,
        timeout_ms: 120_000,
    };
    let waits = cluster.ask(0, trainers[0], wait);
    cluster.until("a protected step", |it| it.replies.contains_key(&waits));
    match &cluster.replies[&waits] {
        Reply::Reached { manifest, .. } => manifest.expect("a manifest"),
        other => panic!("expected it to be protected, got {other:?}"),
    }
}

/// Two nodes have started anew: a plan, and every rank's shard. Gives how many were decoded, by plan and by the openings.
fn restore(cluster: &mut Cluster, manifest: Digest, ranks: usize) -> (usize, usize) {
    let conn = cluster.connect(0, Role::Reader);
    let asked = cluster.ask(0, conn, plan_newest(60_000));
    cluster.until("a plan", |it| it.replies.contains_key(&asked));
    let Reply::Plan(plan) = &cluster.replies[&asked] else {
        panic!("expected a plan, got {:?}", cluster.replies[&asked]);
    };
    assert_eq!((plan.manifest, plan.shards.len()), (manifest, ranks));
    let decoded = |source: &&Source| matches!(source, Source::Decode(_));
    let planned = plan.shards.iter().map(|it| &it.source).filter(decoded);
    let planned = planned.count();
    let opened: Vec<RequestId> = (0..ranks)
        .map(|rank| {
            let conn = cluster.connect(node_of(rank), Role::Reader);
            let open = open_shard(manifest, Rank::new(rank as u32), 60_000);
            cluster.ask(node_of(rank), conn, open)
        })
        .collect();
    cluster.until("all shards", |it| it.all_answered(&opened));
    let rungs = opened.iter().map(|id| match &cluster.replies[id] {
        Reply::ShardOpened { rung, .. } => *rung,
        other => panic!("expected a shard, got {other:?}"),
    });
    let elsewhere = rungs.filter(|rung| *rung != Rung::OwnRam).count();
    (planned, elsewhere)
}

/// CPU seconds of all parts together.
fn measure(ranks: usize) -> f64 {
    let nodes = ranks.div_ceil(RANKS_PER_NODE).max(11);
    let mut cluster = Cluster::new(nodes);
    let began = cpu_seconds();
    let mut last = began;
    let mut part = |cluster: &Cluster, what: &str| {
        let now = cpu_seconds();
        let took = now - last;
        last = now;
        let Cluster {
            messages,
            message_bytes,
            longest_message,
            sessions,
            ..
        } = cluster;
        println!(
            "{what:>8} {took:8.2} CPU s; so far {messages} messages, {} MB, longest {longest_message} bytes; {sessions} parts \
             of sessions",
            message_bytes >> 20,
        );
    };
    cluster.link_all();
    part(&cluster, "link");
    cluster.until("a settled cluster", |it| it.now >= 5_000);
    let run = open_run(&mut cluster);
    part(&cluster, "run");
    let trainers = attach(&mut cluster, run, ranks);
    let manifest = save(&mut cluster, run, Step::new(1), &trainers, SMALL);
    part(&cluster, "save");
    let lost = [0, nodes / 2];
    for node in lost {
        cluster.restart(node);
    }
    let (planned, elsewhere) = restore(&mut cluster, manifest, ranks);
    part(&cluster, "restart");
    println!(
        "{planned} shards planned to be decoded; {elsewhere} opened from elsewhere than their own RAM"
    );
    cpu_seconds() - began
}

/// Bytes that all nodes send for a step until they have nothing left to say of it, per rank: of a job's first, and of the next
/// one, whose schema and metadata are the same.
fn saved_bytes() -> [f64; 2] {
    let mut cluster = Cluster::new(COUNTED_RANKS / RANKS_PER_NODE);
    cluster.link_all();
    cluster.until("a settled cluster", |it| it.now >= 5_000);
    let run = open_run(&mut cluster);
    let trainers = attach(&mut cluster, run, COUNTED_RANKS);
    [1, 2].map(|step| {
        let before = cluster.message_bytes;
        save(&mut cluster, run, Step::new(step), &trainers, LARGE);
        let end = cluster.now + 5_000;
        cluster.until("all to be told", |it| it.now >= end);
        (cluster.message_bytes - before) as f64 / COUNTED_RANKS as f64
    })
}

fn main() {
    let words = words();
    let named = words.iter().find_map(|it| it.parse().ok());
    let ranks: usize = named.unwrap_or(10_000);
    let [first, next] = saved_bytes();
    println!("a step of {COUNTED_RANKS} ranks: {first:.0} bytes per rank, the next one {next:.0}");
    let seconds = measure(ranks);
    let nodes = ranks.div_ceil(RANKS_PER_NODE);
    let figures = [
        (format!("scale_{nodes}_nodes_seconds"), seconds),
        ("save_bytes_per_rank_1024".into(), first),
        ("save_again_bytes_per_rank_1024".into(), next),
    ];
    write(&words, &figures);
}
