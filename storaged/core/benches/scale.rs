//! What decisions cost one home node, by the size of the job: `make bench-scale`, or `cargo bench -p storaged-core --bench
//! scale -- 1024 10000` for these sizes alone; `--write FILE` keeps the figures (docs/bench/scale.json). The node is
//! driven alone, with the messages that all others would send: a save is committed, protected and acknowledged, time
//! passes, two nodes are lost, and a reader asks what a restart would get. CPU time of this thread, in milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::process::exit;

use rustix::time::{ClockId, clock_gettime};
use storaged_codec::{ChunkSize, Geometry, digest};
use storaged_core::{
    ConnId, DurableForm, DurablePolicy, Input, LinkRates, Node, Now, Output, RequestId,
    RunsWithoutTier, Setup,
};
use storaged_plan::{LaneBlocks, Member, groups, homes, lanes_of};
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, Fence, Holding, Lane, ParcelPlace, PeerMessage};
use storaged_wire::{
    CheckpointState, Digest, Generation, ManifestBytes, Namespace, NodeName, Owner, Rank, RunId,
    SharedBytes, Step, WorldSize, decode, encode,
};

const RANKS_PER_NODE: usize = 8;
const SHARD_BYTES: u64 = 1 << 30;
const SCHEMA_BYTES_PER_RANK: usize = 200;
const TOKEN: &[u8] = b"token";
/// The sizes that are measured without others being named.
const RANKS: &[usize] = &[128, 1_024, 2_560, 10_000];

/// CPU time of this thread so far.
fn cpu_ms() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

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
    node: Node,
    me: NodeName,
    now: u64,
    cost: Cost,
    traffic: Traffic,
}

impl Driver {
    fn feed(&mut self, input: Input) -> Vec<Output> {
        let before = cpu_ms();
        let outputs = self.node.handle(Now(self.now), input);
        let took = cpu_ms() - before;
        self.cost.longest = self.cost.longest.max(took);
        self.cost.all += took;
        for output in &outputs {
            if let Output::Send { message, .. } = output {
                let bytes = encode(message).len();
                self.traffic.longest = self.traffic.longest.max(bytes);
                self.traffic.all += bytes;
            }
        }
        outputs
    }

    fn hear(&mut self, from: &NodeName, message: PeerMessage) -> Vec<Output> {
        let from = from.clone();
        self.feed(Input::Message { from, message })
    }

    fn since(&mut self) -> Cost {
        std::mem::take(&mut self.cost)
    }

    fn tick(&mut self) {
        self.now += 1_000;
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

fn name(node: usize) -> NodeName {
    NodeName::new(format!("trainer-pool-a-node-{node:05}")).expect("a name")
}

fn geometry() -> Geometry {
    Geometry::new(8, 2).expect("a geometry")
}

fn owner() -> Owner {
    Owner::of_token(TOKEN)
}

fn started(ranks: usize) -> (Driver, Job) {
    let count = ranks.div_ceil(RANKS_PER_NODE) + 1;
    let member = |node| Member {
        name: name(node),
        failure_domain: node.to_string(),
    };
    let members: Vec<Member> = (0..count).map(member).collect();
    let coding: Vec<NodeName> = groups(&members, geometry())
        .expect("groups")
        .into_iter()
        .flat_map(|group| group.coding)
        .collect();
    let key = |step| CheckpointKey {
        namespace: Namespace::new("job").expect("a name"),
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
    let node = Node::new(Setup {
        name: me.clone(),
        generation: Generation::new(1),
        members: members.clone(),
        geometry: Some(geometry()),
        chunk: ChunkSize::new(256 << 10).expect("a size"),
        slots_per_rank: 3,
        budget: 1 << 40,
        idle_job_ms: 3_600_000,
        link_rates: LinkRates::default(),
        durable: DurablePolicy::Absent,
        messages: storaged_core::MessageLimits::default(),
        runs_without_tier: RunsWithoutTier::Refused,
        durable_form: DurableForm::Full,
    });
    let mut driver = Driver {
        node: node.expect("groups"),
        me,
        now: 0,
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
    let description = PeerMessage::Description {
        key: job.key.clone(),
        owner: owner(),
        world_size: job.world_size,
        schema: vec![7; SCHEMA_BYTES_PER_RANK * job.nodes.len()].into(),
        torch_metadata: vec![].into(),
        durable: DurableWish::Never,
    };
    driver.hear(&job.nodes[0], description);
    let mut committed = None;
    let mut told = BTreeMap::new();
    for (rank, node) in (0u32..).zip(&job.nodes) {
        let sealed = PeerMessage::ShardSealed {
            key: job.key.clone(),
            owner: owner(),
            world_size: job.world_size,
            rank: Rank::new(rank),
            length: SHARD_BYTES,
            root: digest(&rank.to_le_bytes()),
        };
        for output in driver.hear(node, sealed) {
            if let Output::Send { to, message } = &output
                && let PeerMessage::Parcel { parcel, length, .. } = message
            {
                told.insert(to.clone(), (*parcel, *length));
            }
            if let Output::Send { message, .. } = output
                && let Some(manifest) = manifest_in(driver, message)
            {
                committed.get_or_insert(manifest);
            }
        }
    }
    let manifest = committed.expect("the last shard commits");
    let manifest = ManifestBytes::parse(manifest).expect("a sound manifest");
    (manifest, told)
}

/// The manifest that a message tells of.
fn manifest_in(driver: &Driver, message: PeerMessage) -> Option<SharedBytes> {
    match message {
        PeerMessage::Committed { manifest, .. } => Some(manifest),
        PeerMessage::Parcel { parcel, .. } => {
            let bytes = driver.node.parcel(parcel)?;
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

/// Everybody has the manifest, and all blocks are made.
fn protect(driver: &mut Driver, job: &Job, manifest: &ManifestBytes) {
    let held = held(job, manifest);
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
            let parity = match with_parity {
                true => parity.clone(),
                false => Vec::new(),
            };
            let message = PeerMessage::Held {
                manifest: manifest.name(),
                version,
                shards: shards.clone(),
                parity,
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
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: job.key.namespace.clone(),
        token: TOKEN.to_vec().into(),
        role: Role::Reader,
    };
    let id = RequestId { conn, index: 0 };
    let request = hello;
    driver.feed(Input::Request { id, request });
    driver.since();
    let request = Request::Plan {
        step: None,
        timeout_ms: 60_000,
        allow_older: false,
    };
    let id = RequestId { conn, index: 1 };
    let asked = driver.feed(Input::Request { id, request });
    let query = asked.iter().find_map(|output| match output {
        Output::Send {
            message: PeerMessage::HoldingsQuery { query, .. },
            ..
        } => Some(*query),
        _ => None,
    });
    let query = query.expect("all are asked");
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
        };
        let message = PeerMessage::Holdings {
            query,
            owner: Some(owner()),
            holdings: vec![holding],
            mark: None,
        };
        let outputs = driver.hear(&node, message);
        answered |= outputs.iter().any(|output| {
            matches!(
                output,
                Output::Reply {
                    reply: Reply::Plan(_),
                    ..
                }
            )
        });
    }
    // The limit for those that are down.
    for _ in 0..4 {
        if !answered {
            driver.now += 1_000;
            let outputs = driver.feed(Input::Tick);
            answered = outputs.iter().any(|output| {
                matches!(
                    output,
                    Output::Reply {
                        reply: Reply::Plan(_),
                        ..
                    }
                )
            });
        }
    }
    assert!(answered, "expected a plan");
}

/// CPU milliseconds of one size.
struct Figures {
    ranks: usize,
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
            let page = answer.iter().find_map(|output| match output {
                Output::Send {
                    message: PeerMessage::ParcelPage { bytes, .. },
                    ..
                } => Some(bytes.len() as u64),
                _ => None,
            });
            offset += page.filter(|bytes| *bytes > 0).expect("a page");
        }
    }
}

fn measure(ranks: usize) -> Figures {
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
    let shown = driver.node.shown();
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
    let figures = Figures {
        ranks,
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
             {home_bytes_per_rank:.0} bytes per rank from a home node, longest message {longest_message}",
            commit.all, commit.longest, protect.all, protect.longest, plan.all, plan.longest,
        );
    }

    fn longest(&self) -> f64 {
        let all = [self.commit, self.protect, self.plan];
        all.map(|cost| cost.longest)
            .into_iter()
            .fold(self.idle_tick, f64::max)
    }

    fn keys(&self) -> [(String, f64); 7] {
        let named = |what: &str| format!("{what}_{}", self.ranks);
        [
            (named("commit_ms"), self.commit.all),
            (named("protect_ms"), self.protect.all),
            (named("idle_tick_ms"), self.idle_tick),
            (named("plan_two_lost_ms"), self.plan.all),
            (named("longest_input_ms"), self.longest()),
            (named("home_bytes_per_rank"), self.home_bytes_per_rank),
            (named("message_bytes_max"), self.longest_message),
        ]
    }
}

/// The exponent by which a cost grows with the ranks, from the second size that was measured to the last.
fn slope(all: &[Figures], of: impl Fn(&Figures) -> f64) -> Option<f64> {
    let (from, to) = (all.get(1)?, all.last()?);
    let ranks = to.ranks as f64 / from.ranks as f64;
    (ranks > 1.0).then(|| (of(to) / of(from)).ln() / ranks.ln())
}

/// The figures, behind those of other benches that the file has already.
fn json(all: &[Figures], before: &str) -> String {
    let slopes = [
        ("slope_commit", slope(all, |it| it.commit.all)),
        ("slope_tick", slope(all, |it| it.idle_tick)),
    ];
    let slopes = slopes
        .into_iter()
        .filter_map(|(name, slope)| Some((name.to_owned(), slope?)));
    let figures: Vec<(String, f64)> = all.iter().flat_map(Figures::keys).chain(slopes).collect();
    let is_new = |line: &str| {
        let starts = |name: &str| line.starts_with(&format!("  \"{name}\":"));
        figures.iter().any(|(name, _)| starts(name))
    };
    let kept = before
        .lines()
        .filter(|line| line.starts_with("  \"") && !is_new(line));
    let kept = kept.map(|line| line.trim_end_matches(',').to_owned());
    let new = (figures.iter()).map(|(name, figure)| format!("  \"{name}\": {figure:.3}"));
    let lines: Vec<String> = kept.chain(new).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let named: Vec<usize> = words.iter().filter_map(|it| it.parse().ok()).collect();
    if cfg!(debug_assertions) {
        eprintln!("expected a release build, got one with debug assertions: its times say nothing");
        exit(1);
    }
    let sizes = if named.is_empty() { RANKS } else { &named };
    let all: Vec<Figures> = sizes.iter().map(|ranks| measure(*ranks)).collect();
    let mut after = words.iter().skip_while(|word| *word != "--write");
    if let Some(path) = after.nth(1) {
        let before = std::fs::read_to_string(path).unwrap_or_default();
        std::fs::write(path, json(&all, &before)).expect("the file can be written");
    }
}
