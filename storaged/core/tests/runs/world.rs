//! A few nodes, their links and a durable tier, as far as opening runs and committing needs them. No payload exists.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::{ChunkSize, Fingerprint, Geometry, digest, root_digest};
use storaged_core::{
    ClaimFault, ClaimedRun, ConnId, DurableFault, DurableForm, DurablePolicy, Input, LinkRates,
    Node, Note, Now, Output, RequestId, RunsWithoutTier, Setup,
};
use storaged_plan::Member;
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{
    CheckpointState, Generation, Manifest, ManifestBytes, Namespace, NodeName, Owner, Rank,
    Refusal, RunId, ShardEntry, Step, WorldSize,
};

const CHUNK: u32 = 4096;
const LENGTH: u64 = 5000;
const TOKEN: &[u8] = b"token";
/// A link comes up after at most so many milliseconds, and a message takes at most so many.
const LINK_MS: u64 = 40;
const WAY_MS: u64 = 6;

pub fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).unwrap()
}

pub fn namespace() -> Namespace {
    Namespace::new("job").unwrap()
}

pub fn owner() -> Owner {
    Owner::of_token(TOKEN)
}

pub fn committed(manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::Committed {
        manifest: manifest.bytes().to_vec().into(),
        durable: DurableWish::Never,
    }
}

/// How the durable tier behaves to what is asked from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Absent,
    /// After up to so many milliseconds.
    Answers(u64),
    Hangs,
    Fails,
}

enum Event {
    Input(Input),
    /// On the link from this node, if both ends are what they were.
    Message(usize, u64, PeerMessage),
    Link(usize),
    Start,
}

struct Process {
    node: Node,
    generation: u64,
    began: u64,
}

pub struct World {
    pub now: u64,
    pub tier: Tier,
    pub claims: BTreeMap<u64, RunId>,
    /// So many claims fail, whatever the tier does otherwise.
    pub failing_claims: u32,
    pub owner_in_tier: Option<Owner>,
    pub committed: BTreeSet<CheckpointKey>,
    nodes: Vec<Option<Process>>,
    with_tier: bool,
    without_tier: RunsWithoutTier,
    /// (time, order): at which node, in which generation (0: any), what.
    events: BTreeMap<(u64, u64), (usize, u64, Event)>,
    order: u64,
    generation: u64,
    random: u64,
    links: BTreeMap<(usize, usize), u64>,
    /// Messages keep their order on a link.
    last_on_link: BTreeMap<(usize, usize), u64>,
    apart: BTreeSet<(usize, usize)>,
    silent: BTreeSet<usize>,
    replies: BTreeMap<RequestId, Reply>,
    next: u64,
    states: BTreeSet<CheckpointState>,
}

impl World {
    pub fn new(nodes: usize, tier: Tier, seed: u64) -> Self {
        Self::with(nodes, tier, seed, RunsWithoutTier::Refused)
    }

    /// All nodes are up and know each other.
    pub fn with(nodes: usize, tier: Tier, seed: u64, without_tier: RunsWithoutTier) -> Self {
        let mut world = Self {
            now: 0,
            tier,
            claims: BTreeMap::new(),
            failing_claims: 0,
            owner_in_tier: None,
            committed: BTreeSet::new(),
            nodes: (0..nodes).map(|_| None).collect(),
            with_tier: tier != Tier::Absent,
            without_tier,
            events: BTreeMap::new(),
            order: 0,
            generation: 0,
            random: seed,
            links: BTreeMap::new(),
            last_on_link: BTreeMap::new(),
            apart: BTreeSet::new(),
            silent: BTreeSet::new(),
            replies: BTreeMap::new(),
            next: 0,
            states: BTreeSet::new(),
        };
        (0..nodes).for_each(|node| world.start(node));
        world.run_for(2 * LINK_MS);
        world
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    pub fn random(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn at(&mut self, time: u64, node: usize, generation: u64, event: Event) {
        self.order += 1;
        self.events
            .insert((time.max(self.now), self.order), (node, generation, event));
    }

    pub fn start(&mut self, node: usize) {
        self.at(self.now, node, 0, Event::Start);
        self.run_for(0);
    }

    fn begin(&mut self, node: usize) {
        self.generation += 1;
        let generation = self.generation;
        let members = (0..self.nodes.len()).map(|other| Member {
            name: name(other),
            failure_domain: format!("n{other}"),
        });
        let geometry = (self.nodes.len() >= 3).then(|| Geometry::new(2, 1).unwrap());
        let setup = Setup {
            name: name(node),
            generation: Generation::new(generation * 0x1234_5678_9abc + self.random),
            members: members.collect(),
            geometry,
            chunk: ChunkSize::new(CHUNK).unwrap(),
            slots_per_rank: 3,
            budget: 1 << 30,
            link_rates: LinkRates::default(),
            durable: match self.with_tier {
                true => DurablePolicy::OnRequest,
                false => DurablePolicy::Absent,
            },
            messages: storaged_core::MessageLimits::default(),
            runs_without_tier: self.without_tier,
            idle_job_ms: 3_600_000,
            durable_form: DurableForm::Full,
        };
        self.nodes[node] = Some(Process {
            node: Node::new(setup).unwrap(),
            generation,
            began: self.now,
        });
        self.feed(node, Input::Tick);
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            for (from, to) in [(node, other), (other, node)] {
                let delay = 1 + self.random(LINK_MS);
                self.at(self.now + delay, from, 0, Event::Link(to));
            }
        }
    }

    /// Its peers notice at once.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node] = None;
        for other in 0..self.nodes.len() {
            self.unlink(other, node);
            self.links.remove(&(node, other));
        }
    }

    fn unlink(&mut self, from: usize, to: usize) {
        if self.links.remove(&(from, to)).is_some() {
            self.feed(from, Input::PeerDown { node: name(to) });
        }
    }

    pub fn cut(&mut self, some: &[usize], others: &[usize]) {
        for (a, b) in some
            .iter()
            .flat_map(|a| others.iter().map(move |b| (*a, *b)))
        {
            for (from, to) in [(a, b), (b, a)] {
                self.apart.insert((from, to));
                self.unlink(from, to);
            }
        }
    }

    pub fn join(&mut self) {
        for (from, to) in std::mem::take(&mut self.apart) {
            self.at(self.now + 1, from, 0, Event::Link(to));
        }
    }

    /// Its links stay up, and nothing comes from it any more.
    pub fn silence(&mut self, node: usize) {
        self.silent.insert(node);
    }

    fn link(&mut self, from: usize, to: usize) {
        let Some(far) = self.nodes[to].as_ref().map(|process| process.generation) else {
            return;
        };
        if self.apart.contains(&(from, to)) || self.links.get(&(from, to)) == Some(&far) {
            return;
        }
        self.unlink(from, to);
        if self.nodes[from].is_some() {
            self.links.insert((from, to), far);
            let generation = Generation::new(far);
            let node = name(to);
            self.feed(from, Input::PeerUp { node, generation });
        }
    }

    pub fn run_for(&mut self, ms: u64) {
        let end = self.now + ms;
        while self
            .events
            .first_key_value()
            .is_some_and(|((time, _), _)| *time <= end)
        {
            self.happen_next();
        }
        self.now = end;
    }

    pub fn run_until_answered(&mut self, ids: &[RequestId]) {
        let began = self.now;
        while !ids.iter().all(|id| self.replies.contains_key(id)) {
            assert!(self.now < began + 120_000, "no answer in 120 s");
            self.happen_next();
        }
    }

    fn happen_next(&mut self) {
        let ((time, _), (node, generation, event)) = self.events.pop_first().expect("an event");
        self.now = time;
        let here = self.nodes[node].as_ref().map(|process| process.generation);
        if generation != 0 && here != Some(generation) {
            return;
        }
        match event {
            Event::Input(input) => self.feed(node, input),
            Event::Message(from, far, message) => {
                if self.links.get(&(from, node)) == Some(&far) {
                    self.message(node, &name(from), message);
                }
            }
            Event::Link(to) => self.link(node, to),
            Event::Start => self.begin(node),
        }
    }

    fn feed(&mut self, node: usize, input: Input) {
        let Some(process) = &mut self.nodes[node] else {
            return;
        };
        let local = Now(self.now - process.began);
        let generation = process.generation;
        let outputs = process.node.handle(local, input);
        let deadline = process.began + process.node.deadline().0.min(local.0 + 3_600_000);
        for output in outputs {
            self.perform(node, generation, output);
        }
        let deadline = deadline.max(self.now + 1);
        self.at(deadline, node, generation, Event::Input(Input::Tick));
    }

    pub fn message(&mut self, node: usize, from: &NodeName, message: PeerMessage) {
        let from = from.clone();
        self.feed(node, Input::Message { from, message });
    }

    fn perform(&mut self, node: usize, generation: u64, output: Output) {
        match output {
            Output::Reply { id, reply, .. } => {
                self.replies.insert(id, reply);
            }
            Output::Send { to, message } => self.send(node, &to, message),
            Output::CreateSlot { slot, .. } => {
                let input = Input::SlotCreated { slot };
                self.at(self.now + 1, node, generation, Event::Input(input));
            }
            Output::Digest {
                slot,
                length,
                chunk,
            } => {
                let leaves: Vec<_> = (0..chunk.count(length)).map(|_| digest(b"x")).collect();
                let root = root_digest(&leaves, length, chunk);
                let input = Input::Digested {
                    slot,
                    prints: leaves.iter().map(|_| Fingerprint::ZERO).collect(),
                    leaves: leaves.into(),
                    root,
                };
                self.at(self.now + 1, node, generation, Event::Input(input));
            }
            Output::Note(Note::State { key, state }) => {
                self.states.insert(state);
                if state == CheckpointState::Committed {
                    self.committed.insert(key);
                }
            }
            Output::ClaimRun {
                query,
                above,
                identity,
                owner,
                ..
            } => self.claim(node, generation, (query, owner), (above, identity)),
            Output::RecordRun { namespace, run, .. } => {
                let outcome = self.tier_answers();
                if outcome.is_ok() {
                    self.claims.insert(run.number(), run);
                }
                let input = |outcome| Input::RunRecorded {
                    namespace,
                    run,
                    outcome,
                };
                self.back(node, generation, input(outcome));
            }
            Output::FindRun { query, run, .. } => {
                let newest = self.claims.keys().next_back().copied().unwrap_or(0);
                let found = match self.claims.get(&run.number()) == Some(&run) {
                    true if newest > run.number() => ClaimedRun::Superseded { newest },
                    true => ClaimedRun::Newest(owner()),
                    false => ClaimedRun::Unknown,
                };
                let outcome = self.tier_answers().map(|()| found);
                self.back(node, generation, Input::RunFound { query, outcome });
            }
            _ => {}
        }
    }

    fn tier_answers(&self) -> Result<(), DurableFault> {
        match self.tier {
            Tier::Fails => Err(DurableFault::Unavailable("made to fail".into())),
            _ => Ok(()),
        }
    }

    fn claim(
        &mut self,
        node: usize,
        generation: u64,
        (query, owner): (storaged_core::QueryId, Owner),
        (above, identity): (u64, u64),
    ) {
        let mut answers = self.tier_answers();
        if self.failing_claims > 0 {
            self.failing_claims -= 1;
            answers = Err(DurableFault::Unavailable("made to fail once".into()));
        }
        let outcome = match answers {
            Err(fault) => Err(ClaimFault::Durable(fault)),
            Ok(()) if self.owner_in_tier.is_some_and(|known| known != owner) => {
                Err(ClaimFault::WrongOwner)
            }
            Ok(()) => {
                let highest = self.claims.keys().next_back().copied().unwrap_or(0);
                let run = RunId::with_identity(highest.max(above) + 1, identity);
                if self.tier != Tier::Hangs {
                    self.claims.insert(run.number(), run);
                }
                Ok(run)
            }
        };
        self.back(node, generation, Input::RunClaimed { query, outcome });
    }

    fn back(&mut self, node: usize, generation: u64, input: Input) {
        let latency = match self.tier {
            Tier::Answers(longest) => longest / 2 + self.random(longest / 2 + 1),
            Tier::Fails => 5,
            Tier::Absent | Tier::Hangs => return,
        };
        self.at(self.now + latency, node, generation, Event::Input(input));
    }

    fn send(&mut self, node: usize, to: &NodeName, message: PeerMessage) {
        let to: usize = to.as_str()[1..].parse().unwrap();
        let Some(far) = self.links.get(&(node, to)).copied() else {
            return;
        };
        if self.silent.contains(&node) {
            return;
        }
        let way = 1 + self.random(WAY_MS);
        let last = self.last_on_link.entry((node, to)).or_insert(0);
        let time = (self.now + way).max(*last);
        *last = time;
        self.at(time, to, far, Event::Message(node, far, message));
    }

    fn ask(&mut self, node: usize, conn: ConnId, request: Request) -> RequestId {
        self.next += 1;
        let id = RequestId {
            conn,
            index: self.next,
        };
        self.feed(node, Input::Request { id, request });
        id
    }

    pub fn answer(&self, id: RequestId) -> Option<&Reply> {
        self.replies.get(&id)
    }

    fn connect(&mut self, node: usize, role: Role) -> Result<ConnId, Refusal> {
        self.next += 1;
        let conn = ConnId(self.next);
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: namespace(),
            token: TOKEN.to_vec().into(),
            role,
        };
        let id = self.ask(node, conn, hello);
        self.run_until_answered(&[id]);
        match self.replies.remove(&id) {
            Some(Reply::Refused(refusal)) => Err(refusal),
            _ => Ok(conn),
        }
    }

    pub fn open_run(&mut self, node: usize, timeout_ms: u32) -> RequestId {
        let conn = self.connect(node, Role::Reader).expect("a reader");
        self.ask(node, conn, Request::OpenRun { timeout_ms })
    }

    /// Opens a run and waits for it.
    pub fn opened(&mut self, node: usize) -> RunId {
        let id = self.open_run(node, 60_000);
        self.run_until_answered(&[id]);
        match self.answer(id) {
            Some(Reply::RunOpened { run }) => *run,
            other => panic!("expected a run, got {other:?}"),
        }
    }

    pub fn disconnect(&mut self, node: usize, id: RequestId) {
        self.feed(node, Input::Disconnected { conn: id.conn });
    }

    pub fn hello(&mut self, node: usize, run: RunId, rank: u32) -> Result<ConnId, Refusal> {
        self.hello_in_world_of(node, run, rank, 1)
    }

    pub fn hello_in_world_of(
        &mut self,
        node: usize,
        run: RunId,
        rank: u32,
        world: u32,
    ) -> Result<ConnId, Refusal> {
        let role = Role::Trainer {
            run,
            rank: Rank::new(rank),
            world_size: WorldSize::new(world).unwrap(),
        };
        self.connect(node, role)
    }

    /// What the node holds lower runs off with, as a trainer of the lowest run hears it.
    pub fn fence(&mut self, node: usize) -> RunId {
        let Err(refusal) = self.hello(node, RunId::ZERO, 0) else {
            return RunId::ZERO;
        };
        let words = refusal.message.split_whitespace();
        let run = words.skip_while(|word| *word != "run").nth(1);
        run.and_then(|run| run.parse().ok()).unwrap_or(RunId::ZERO)
    }

    /// Whether a trainer is given a slot.
    pub fn may_save(&mut self, node: usize, conn: ConnId) -> bool {
        let acquire = Request::AcquireSlot {
            bytes: LENGTH,
            timeout_ms: 1_000,
        };
        let id = self.ask(node, conn, acquire);
        self.run_until_answered(&[id]);
        matches!(self.answer(id), Some(Reply::SlotGranted { .. }))
    }

    /// Seals a shard; false if the trainer is refused.
    pub fn stage(&mut self, node: usize, conn: ConnId, step: u64) -> bool {
        let acquire = Request::AcquireSlot {
            bytes: LENGTH,
            timeout_ms: 1_000,
        };
        let id = self.ask(node, conn, acquire);
        self.run_until_answered(&[id]);
        let Some(Reply::SlotGranted { slot, .. }) = self.replies.remove(&id) else {
            return false;
        };
        let seal = Request::SealSlot {
            slot,
            step: Step::new(step),
            length: LENGTH,
        };
        let id = self.ask(node, conn, seal);
        self.run_until_answered(&[id]);
        matches!(self.answer(id), Some(Reply::Done))
    }

    pub fn commit(&mut self, node: usize, conn: ConnId, step: u64) {
        let commit = Request::Commit {
            step: Step::new(step),
            schema: vec![].into(),
            torch_metadata: vec![].into(),
            durable: DurableWish::Never,
        };
        let id = self.ask(node, conn, commit);
        self.run_until_answered(&[id]);
        assert!(matches!(self.answer(id), Some(Reply::Done)));
    }

    pub fn reached(&self, state: CheckpointState) -> bool {
        self.states.contains(&state)
    }

    pub fn manifest(&self, run: RunId, step: u64) -> Arc<ManifestBytes> {
        let manifest = Manifest {
            version: Manifest::VERSION,
            namespace: namespace(),
            owner: owner(),
            run,
            step: Step::new(step),
            world_size: WorldSize::new(1).unwrap(),
            epoch: 1,
            geometry: Geometry::new(2, 1).unwrap(),
            chunk: ChunkSize::new(CHUNK).unwrap(),
            shards: vec![ShardEntry {
                rank: Rank::new(0),
                node: name(1),
                length: LENGTH,
                root: digest(b"root"),
            }],
            groups: vec![],
            schema: vec![].into(),
            torch_metadata: vec![].into(),
        };
        Arc::new(manifest.seal().unwrap())
    }
}
