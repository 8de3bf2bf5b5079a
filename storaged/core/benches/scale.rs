//! What decisions cost one home node, by the size of the job: `make bench-scale`, or `cargo bench -p storaged-core --bench
//! scale -- 1024 10000` for these sizes alone; `--write FILE` keeps the figures (docs/bench/scale.json). The node is
//! driven alone, with the messages that all others would send: a save is committed, protected and acknowledged, time
//! passes, two nodes are lost, and a reader asks what a restart would get. CPU time of this thread, in milliseconds.

mod common;
#[path = "../tests/testkit/mod.rs"]
mod testkit;

use std::collections::{BTreeMap, BTreeSet};

use common::{
    K, M, RANKS_PER_NODE, SCHEMA_BYTES_PER_RANK, cpu_seconds, members, setup, words, write,
};
use storaged_codec::{ChunkSize, digest, fingerprint};
use storaged_core::{ConnId, Input, MessageLimits};
use storaged_plan::{LaneBlocks, Member, groups, homes, lanes_of};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::{
    CheckpointKey, Fence, Holding, Lane, ParcelPlace, PeerMessage, SealedShard, TablePage,
    TablePlace,
};
use storaged_wire::shape::{EncodeShape, StripeMap};
use storaged_wire::{
    CheckpointState, Digest, Enclosure, EnclosuresHeld, Generation, ManifestBytes, NodeName, Rank,
    RunId, SessionId, SharedBytes, Step, WorldSize, decode, encode,
};
use testkit::{Alone, Wanted, geometry, hello, namespace, owner};

const SHARD_BYTES: u64 = 1 << 30;
/// The sizes that are measured without others being named.
const RANKS: &[usize] = &[128, 1_024, 2_560, 10_000, 100_000];

/// What a node has sent: the longest message, and all bytes.
#[derive(Default, Clone, Copy)]
struct Traffic {
    longest: usize,
    all: usize,
}

/// The longest of some inputs, and all of them together.
#[derive(Default, Clone, Copy)]
struct Cost {
    longest: f64,
    all: f64,
}

struct Driver {
    alone: Alone,
    me: NodeName,
    members: Vec<Member>,
    cost: Cost,
    traffic: Traffic,
}

impl Driver {
    fn feed(&mut self, input: Input) -> Wanted {
        self.measure(|alone| alone.handle(input))
    }

    fn hear(&mut self, from: &NodeName, message: PeerMessage) -> Wanted {
        let from = from.clone();
        self.feed(Input::Message { from, message })
    }

    fn measure(&mut self, what: impl FnOnce(&mut Alone) -> Wanted) -> Wanted {
        let before = cpu_seconds();
        let mut wanted = what(&mut self.alone);
        let took = (cpu_seconds() - before) * 1e3;
        self.cost.longest = self.cost.longest.max(took);
        self.cost.all += took;
        for (_, message) in wanted.sent() {
            let bytes = encode(message).len();
            self.traffic.longest = self.traffic.longest.max(bytes);
            self.traffic.all += bytes;
        }
        // What is prepared is done at once, on another thread's time.
        for work in wanted.take_preparations() {
            let more = self.feed(Input::Prepared(work.run()));
            wanted.and(more);
        }
        wanted
    }

    fn since(&mut self) -> Cost {
        std::mem::take(&mut self.cost)
    }

    fn tick(&mut self) {
        self.alone.now += 1_000;
        self.feed(Input::Tick);
    }
}

/// A job of eight ranks per node, seen from a home node of its checkpoint that has no ranks and codes nothing.
struct Job {
    key: CheckpointKey,
    world_size: WorldSize,
    /// The node of each rank.
    nodes: Vec<NodeName>,
}

fn started(ranks: usize) -> (Driver, Job) {
    let count = ranks.div_ceil(RANKS_PER_NODE) + 1;
    let members = members(count);
    let coding: Vec<NodeName> = groups(&members, geometry(K, M))
        .expect("groups")
        .into_iter()
        .flat_map(|group| group.coding)
        .collect();
    let key = |step| CheckpointKey {
        namespace: namespace(),
        run: RunId::new(1),
        step: Step::new(step),
    };
    let home_of = |step: &u64| homes(&members, &key(*step), 1).remove(0);
    let step = (1..)
        .find(|step| !coding.contains(&home_of(step)))
        .expect("some step has a home that codes nothing");
    let me = home_of(&step);
    let nodes = members
        .iter()
        .filter(|member| member.name != me)
        .flat_map(|member| std::iter::repeat_n(member.name.clone(), RANKS_PER_NODE))
        .take(ranks)
        .collect();
    let alone = Alone::new(setup(me.clone(), members.clone()));
    let mut driver = Driver {
        alone,
        me,
        members: members.clone(),
        cost: Cost::default(),
        traffic: Traffic::default(),
    };
    for member in members {
        if member.name != driver.me {
            let generation = Generation::new(1);
            let node = member.name;
            driver.feed(Input::PeerUp { node, generation });
        }
    }
    (0..10).for_each(|_| driver.tick());
    let job = Job {
        key: key(step),
        world_size: WorldSize::new(ranks as u32).expect("ranks"),
        nodes,
    };
    let fence = Fence {
        namespace: job.key.namespace.clone(),
        owner: owner(),
        run: job.key.run,
        promised: job.key.run,
    };
    driver.hear(&job.nodes[0], PeerMessage::Fences(vec![fence]));
    (driver, job)
}

/// All shards are sealed and described. Gives the manifest, and which nodes were told to fetch it.
fn commit(driver: &mut Driver, job: &Job) -> (ManifestBytes, BTreeMap<NodeName, (Digest, u64)>) {
    let schema = vec![7; SCHEMA_BYTES_PER_RANK * job.nodes.len()];
    let description = PeerMessage::Description {
        key: job.key.clone(),
        owner: owner(),
        world_size: job.world_size,
        schema: Enclosure::of(&schema),
        torch_metadata: Enclosure::of(&[]),
        durable: DurableWish::Never,
        epoch: 1,
    };
    let asked = driver.hear(&job.nodes[0], description);
    give(driver, &job.nodes[0], asked, &schema);
    let mut committed = None;
    let mut told = BTreeMap::new();
    for (node, ranks) in ranks_by_node(job) {
        let shard = |rank: u32| SealedShard {
            rank: Rank::new(rank),
            length: SHARD_BYTES,
            root: digest(&rank.to_le_bytes()),
        };
        let sealed = PeerMessage::ShardsSealed {
            key: job.key.clone(),
            owner: owner(),
            world_size: job.world_size,
            shards: ranks.into_iter().map(shard).collect(),
            digesting: 0,
        };
        for (to, message) in driver.hear(node, sealed).sent() {
            if let PeerMessage::Parcel { parcel, length, .. } = message {
                told.insert(to.clone(), (*parcel, *length));
            }
            if let Some(manifest) = manifest_in(driver, message.clone()) {
                committed.get_or_insert(manifest);
            }
        }
    }
    let manifest = committed.expect("the last shard commits");
    let manifest = ManifestBytes::parse(manifest).expect("a sound manifest");
    (manifest, told)
}

/// A node gives the schema that it is asked for, page by page.
fn give(driver: &mut Driver, node: &NodeName, mut asked: Wanted, schema: &[u8]) {
    let place = |asked: &Wanted| {
        asked.sent().find_map(|(_, message)| match message {
            PeerMessage::ParcelQuery(place) => Some(*place),
            _ => None,
        })
    };
    while let Some(place) = place(&asked) {
        let first = place.offset as usize;
        let end = schema.len().min(first + MessageLimits::default().page);
        let bytes = schema[first..end].to_vec().into();
        asked = driver.hear(node, PeerMessage::ParcelPage { place, bytes });
    }
}

/// The nodes with their ranks.
fn ranks_by_node(job: &Job) -> BTreeMap<&NodeName, Vec<u32>> {
    let mut ranks: BTreeMap<&NodeName, Vec<u32>> = BTreeMap::new();
    for (rank, node) in (0u32..).zip(&job.nodes) {
        ranks.entry(node).or_default().push(rank);
    }
    ranks
}

/// The manifest that a message tells of.
fn manifest_in(driver: &Driver, message: PeerMessage) -> Option<SharedBytes> {
    match message {
        PeerMessage::Committed { manifest, .. } => Some(manifest),
        PeerMessage::Parcel { parcel, .. } => {
            let bytes = driver.alone.node.parcel(parcel)?;
            manifest_in(driver, decode("message", &bytes).ok()?)
        }
        _ => None,
    }
}

/// Shards and parity of one node.
type Blocks = (Vec<Rank>, Vec<(Lane, u32)>);

/// What each node holds of a protected checkpoint.
fn held(job: &Job, manifest: &ManifestBytes) -> BTreeMap<NodeName, Blocks> {
    let mut held: BTreeMap<NodeName, Blocks> = BTreeMap::new();
    for (rank, node) in (0u32..).zip(&job.nodes) {
        held.entry(node.clone())
            .or_default()
            .0
            .push(Rank::new(rank));
    }
    for (lane, blocks) in LaneBlocks::all(manifest) {
        for (index, node) in (0u32..).zip(&blocks.coding) {
            held.entry(node.clone()).or_default().1.push((lane, index));
        }
    }
    held
}

/// The home nodes have what the manifest names.
fn enclosures_on(homes: &[NodeName], node: &NodeName) -> EnclosuresHeld {
    if homes.contains(node) {
        EnclosuresHeld::All
    } else {
        EnclosuresHeld::NotAll
    }
}

/// Everybody has the manifest, and all blocks are made.
fn protect(driver: &mut Driver, job: &Job, manifest: &ManifestBytes) {
    let held = held(job, manifest);
    let homes = homes(&driver.members, &job.key, M + 1);
    let nodes: Vec<NodeName> = held.keys().cloned().collect();
    let stored = |state, bears| PeerMessage::ManifestStored {
        manifest: manifest.name(),
        state,
        bears,
    };
    for node in &nodes {
        driver.hear(node, stored(CheckpointState::Committed, 0));
    }
    for (version, with_parity) in [(1, false), (2, true)] {
        for (node, (shards, parity)) in &held {
            let parity = if with_parity {
                parity.clone()
            } else {
                Vec::new()
            };
            let message = PeerMessage::Held {
                manifest: manifest.name(),
                version,
                shards: shards.clone(),
                parity,
                enclosures: enclosures_on(&homes, node),
            };
            driver.hear(node, message);
        }
    }
    for node in &nodes {
        driver.hear(node, stored(CheckpointState::Protected, 2));
    }
}

/// Two nodes are lost; a reader asks for the newest checkpoint.
fn plan_two_lost(driver: &mut Driver, job: &Job, manifest: &ManifestBytes) {
    let lost = [&job.nodes[0], &job.nodes[job.nodes.len() - 1]];
    for node in lost {
        let node = node.clone();
        driver.feed(Input::PeerDown { node });
    }
    let conn = ConnId(1);
    let hello = hello(job.key.namespace.clone(), Role::Reader);
    driver.measure(|alone| alone.ask(conn, hello));
    driver.since();
    let request = Request::Plan {
        step: None,
        timeout_ms: 60_000,
        allow_older: false,
    };
    let asked = driver.measure(|alone| alone.ask(conn, request));
    let query = asked.sent().find_map(|(_, message)| match message {
        PeerMessage::HoldingsQuery { query, .. } => Some(*query),
        _ => None,
    });
    let query = query.expect("all are asked");
    let homes = homes(&driver.members, &job.key, M + 1);
    let mut answered = false;
    for (node, (shards, parity)) in held(job, manifest) {
        if lost.contains(&&node) {
            continue;
        }
        let holding = Holding {
            manifest: manifest.name(),
            key: job.key.clone(),
            state: CheckpointState::Protected,
            shards,
            parity,
            enclosures: enclosures_on(&homes, &node),
        };
        let message = PeerMessage::Holdings {
            query,
            owner: Some(owner()),
            holdings: vec![holding],
            mark: None,
            copied: None,
        };
        answered |= offers(&driver.hear(&node, message));
    }
    // The limit for those that are down.
    for _ in 0..4 {
        if !answered {
            driver.alone.now += 1_000;
            answered = offers(&driver.feed(Input::Tick));
        }
    }
    assert!(answered, "expected a plan");
}

fn offers(wanted: &Wanted) -> bool {
    matches!(wanted.reply(), Some(Reply::Plan(_)))
}

/// CPU milliseconds of one size.
struct Figures {
    ranks: usize,
    /// What the process took more for this size.
    memory_mib: f64,
    commit: Cost,
    protect: Cost,
    idle_tick: f64,
    plan: Cost,
    /// Bytes that a home node sends for one step, per rank, if every node fetches the manifest from it.
    home_bytes_per_rank: f64,
    longest_message: f64,
}

/// Every node fetches what it was told of.
fn fetch(driver: &mut Driver, job: &Job, told: &BTreeMap<NodeName, (Digest, u64)>) {
    for node in job.nodes.iter().collect::<BTreeSet<_>>() {
        let Some((parcel, length)) = told.get(node).copied() else {
            continue;
        };
        let mut offset = 0;
        while offset < length {
            let place = ParcelPlace { parcel, offset };
            let answer = driver.hear(node, PeerMessage::ParcelQuery(place));
            let page = answer.sent().find_map(|(_, message)| match message {
                PeerMessage::ParcelPage { bytes, .. } => Some(bytes.len() as u64),
                _ => None,
            });
            offset += page.filter(|bytes| *bytes > 0).expect("a page");
        }
    }
}

/// What this process holds in RAM now, MiB.
fn rss_mib() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|it| it.parse::<f64>().ok());
    pages.unwrap_or(f64::NAN) * rustix::param::page_size() as f64 / (1 << 20) as f64
}

fn measure(ranks: usize) -> Figures {
    let rss_before = rss_mib();
    let (mut driver, job) = started(ranks);
    driver.since();
    driver.traffic = Traffic::default();
    let (manifest, told) = commit(&mut driver, &job);
    let commit = driver.since();
    fetch(&mut driver, &job, &told);
    let served = driver.since();
    let commit = Cost {
        longest: commit.longest.max(served.longest),
        all: commit.all + served.all,
    };
    protect(&mut driver, &job, &manifest);
    let protect = driver.since();
    let home_bytes_per_rank = driver.traffic.all as f64 / ranks as f64;
    let shown = driver.alone.node.shown();
    let found = shown.iter().find(|it| it.key == job.key);
    assert_eq!(found.and_then(|it| it.bears), Some(2), "it is protected");
    (0..3).for_each(|_| driver.tick());
    driver.since();
    let mut idle_tick = f64::MAX;
    for _ in 0..3 {
        driver.tick();
        idle_tick = idle_tick.min(driver.since().all);
    }
    plan_two_lost(&mut driver, &job, &manifest);
    let plan = driver.since();
    // The bench's own tables too, of all messages that the others would send.
    let memory_mib = rss_mib() - rss_before;
    let figures = Figures {
        ranks,
        memory_mib,
        commit,
        protect,
        idle_tick,
        plan,
        home_bytes_per_rank,
        longest_message: driver.traffic.longest as f64,
    };
    figures.print(lanes_of(&manifest).len());
    figures
}

impl Figures {
    fn print(&self, lanes: usize) {
        let Self {
            ranks,
            memory_mib,
            commit,
            protect,
            idle_tick,
            plan,
            home_bytes_per_rank,
            longest_message,
        } = self;
        println!(
            "{ranks:>7} ranks, {lanes:>5} lanes: commit {:8.2} ms, longest input {:7.2}; protection {:8.2}, {:7.2}; \
             idle second {idle_tick:7.3}; plan with two nodes lost {:8.2}, {:7.2}; \
             {home_bytes_per_rank:.0} bytes per rank from a home node, longest message {longest_message}; {memory_mib:.0} MiB",
            commit.all, commit.longest, protect.all, protect.longest, plan.all, plan.longest,
        );
    }

    fn longest(&self) -> f64 {
        let all = [self.commit, self.protect, self.plan];
        all.map(|cost| cost.longest)
            .into_iter()
            .fold(self.idle_tick, f64::max)
    }

    fn keys(&self) -> [(String, f64); 8] {
        let named = |what: &str| format!("{what}_{}", self.ranks);
        [
            (named("commit_ms"), self.commit.all),
            (named("protect_ms"), self.protect.all),
            (named("idle_tick_ms"), self.idle_tick),
            (named("plan_two_lost_ms"), self.plan.all),
            (named("longest_input_ms"), self.longest()),
            (named("home_bytes_per_rank"), self.home_bytes_per_rank),
            (named("message_bytes_max"), self.longest_message),
            (named("core_memory_mib"), self.memory_mib),
        ]
    }
}

/// The exponent by which a cost grows with the ranks, from the second size that was measured to the last.
fn slope(all: &[Figures], of: impl Fn(&Figures) -> f64) -> Option<f64> {
    let (from, to) = (all.get(1)?, all.last()?);
    let ranks = to.ranks as f64 / from.ranks as f64;
    (ranks > 1.0).then(|| (of(to) / of(from)).ln() / ranks.ln())
}

/// The longest message with which an encode of shards of 80 GiB begins, for 32 data nodes, whatever changed: which stripes a
/// member needs, their union, and a page of a shard's table, which is as long as a page gets.
fn begin_bytes() -> usize {
    const DATA_NODES: u32 = 32;
    let chunks = ChunkSize::new(256 << 10).expect("a size").count(80 << 30);
    let (session, any) = (SessionId::new(u64::MAX), digest(b"any"));
    let stripes = || StripeMap {
        stripes: chunks,
        bits: vec![0xFF; chunks.div_ceil(8) as usize].into(),
    };
    let page = MessageLimits::default().table_chunks.min(chunks as usize);
    let order = (0..DATA_NODES).collect();
    let messages = [
        PeerMessage::Ready {
            session,
            stripes: Some(stripes()),
        },
        PeerMessage::Begin {
            session,
            stripes: Some(stripes()),
            shape: Some(EncodeShape::Chain { order }),
        },
        PeerMessage::TablePage {
            place: TablePlace {
                manifest: any,
                rank: Rank::new(DATA_NODES - 1),
                first: chunks,
            },
            page: TablePage {
                leaves: vec![any; page],
                prints: vec![fingerprint(b"any"); page],
            },
        },
    ];
    let lengths = messages.iter().map(|message| encode(message).len());
    lengths.max().unwrap_or(0)
}

/// What is kept of all sizes.
fn figures(all: &[Figures]) -> Vec<(String, f64)> {
    let slopes = [
        ("slope_commit", slope(all, |it| it.commit.all)),
        ("slope_tick", slope(all, |it| it.idle_tick)),
    ];
    let slopes = slopes
        .into_iter()
        .filter_map(|(name, slope)| Some((name.to_owned(), slope?)));
    let begin = ("begin_bytes_max_80gib_k32".to_owned(), begin_bytes() as f64);
    let figures = all.iter().flat_map(Figures::keys).chain(slopes);
    figures.chain([begin]).collect()
}

fn main() {
    let words = words();
    let named: Vec<usize> = words.iter().filter_map(|it| it.parse().ok()).collect();
    let sizes = if named.is_empty() { RANKS } else { &named };
    let all: Vec<Figures> = sizes.iter().map(|ranks| measure(*ranks)).collect();
    println!(
        "longest message of an encode's start, 80 GiB and k = 32: {} bytes",
        begin_bytes()
    );
    write(&words, &figures(&all));
}
