//! A few nodes, their links and a durable tier, as far as opening runs and committing needs them. No payload exists.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_codec::{ChunkSize, Geometry, digest};
use storaged_core::{
    ConnId, DurableFault, DurablePolicy, Input, Note, RequestId, RunAuthority, RunsWithoutTier,
    Setup,
};
use storaged_plan::homes;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{
    CheckpointState, Enclosed, Manifest, ManifestBytes, NodeName, Rank, Refusal, RunId, ShardEntry,
    Step, WorldSize,
};

use crate::testkit::{
    Answer, CHUNK_BYTES, Course, Event, Pacing, Payload, Pid, Scene, Task, acquire_slot,
    commit_step, geometry, members,
};
pub use crate::testkit::{name, namespace, owner};

const LENGTH: u64 = 5000;
/// A link comes up after at most so many milliseconds, and a message takes at most so many.
const LINK_MS: u64 = 40;
const WAY_MS: u64 = 6;
/// A registry that is well answers within so many milliseconds.
const REGISTRY_MS: u64 = 40;
/// Generations of two seeds differ by up to so much, those of one node by more.
const SALT: u64 = 1 << 40;

pub fn committed(manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::Committed {
        manifest: manifest.bytes().to_vec().into(),
        durable: DurableWish::Never,
    }
}

/// How the durable tier behaves to what is asked from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Absent,
    /// After up to so many milliseconds.
    Answers(u64),
    Hangs,
    Fails,
}

pub struct Runs {
    pub tier: Mood,
    /// So many claims fail, whatever the tier does otherwise.
    pub failing_claims: u32,
    policy: DurablePolicy,
    without_tier: RunsWithoutTier,
    /// Links that are cut.
    apart: Vec<(usize, usize)>,
    silent: Option<usize>,
    /// How the registry answers each node, if runs are opened by it; those that are not in it within some milliseconds.
    pub registry: Option<BTreeMap<usize, Answer>>,
}

pub type World = crate::testkit::World<Runs>;

impl Scene for Runs {
    type Event = ();

    const PAYLOAD: Payload = Payload::Digests;

    fn happens(_: &mut World, (): ()) {}

    fn sets_up(world: &mut World, _: usize, setup: &mut Setup) {
        setup.geometry = (setup.members.len() >= 3).then(|| geometry(2, 1));
        setup.durable = world.scene.policy;
        setup.runs_without_tier = world.scene.without_tier;
        if world.scene.registry.is_some() {
            setup.run_authority = RunAuthority::Registry;
        }
    }

    fn generation(world: &mut World, count: u64) -> u64 {
        count * 2 * SALT + world.random(SALT)
    }

    fn dials_after(world: &mut World, _: usize, _: usize) -> u64 {
        1 + world.random(LINK_MS)
    }

    fn way(world: &mut World, from: usize, _: usize, _: &PeerMessage) -> Option<u64> {
        let way_ms = 1 + world.random(WAY_MS);
        (world.scene.silent != Some(from)).then_some(way_ms)
    }

    fn registry_answers(world: &mut World, node: usize) -> Answer {
        let ms = 1 + world.random(REGISTRY_MS);
        let registry = world.scene.registry.as_ref();
        let told = registry.and_then(|it| it.get(&node)).copied();
        told.unwrap_or(Answer::After(ms))
    }

    fn pacing(_: &World) -> Pacing {
        Pacing::AtOnce
    }

    fn tier_course(world: &mut World, _: Pid, task: &Task) -> Course {
        let lasts_ms = match world.scene.tier {
            Mood::Answers(longest) => longest / 2 + world.random(longest / 2 + 1),
            Mood::Fails => 5,
            Mood::Absent | Mood::Hangs => return Course::Hangs,
        };
        let once = matches!(task, Task::Claim(..)) && world.scene.failing_claims > 0;
        if once {
            world.scene.failing_claims -= 1;
        }
        let fault = match world.scene.tier {
            _ if once => "made to fail once",
            Mood::Fails => "made to fail",
            _ => return Course::well(lasts_ms),
        };
        Course::fails(lasts_ms, DurableFault::Unavailable(fault.into()))
    }
}

impl World {
    pub fn new(nodes: usize, tier: Mood, seed: u64) -> Self {
        Self::with(nodes, tier, seed, RunsWithoutTier::Refused)
    }

    /// All nodes are up and know each other.
    pub fn with(nodes: usize, tier: Mood, seed: u64, without_tier: RunsWithoutTier) -> Self {
        Self::of_scene(Self::scene(tier, without_tier), nodes, seed)
    }

    /// Likewise, of a cluster whose members come from a registry.
    pub fn with_registry(nodes: usize, tier: Mood, seed: u64) -> Self {
        let scene = Runs {
            registry: Some(BTreeMap::new()),
            ..Self::scene(tier, RunsWithoutTier::Refused)
        };
        Self::of_scene(scene, nodes, seed)
    }

    fn scene(tier: Mood, without_tier: RunsWithoutTier) -> Runs {
        Runs {
            tier,
            failing_claims: 0,
            policy: match tier {
                Mood::Absent => DurablePolicy::Absent,
                _ => DurablePolicy::OnRequest,
            },
            without_tier,
            apart: Vec::new(),
            silent: None,
            registry: None,
        }
    }

    fn of_scene(scene: Runs, nodes: usize, seed: u64) -> Self {
        let mut world = Self::of(scene, nodes, seed);
        world.run_for(2 * LINK_MS);
        world
    }

    pub fn nodes(&self) -> usize {
        self.processes.len()
    }

    pub fn start(&mut self, node: usize) {
        self.start_after(0, node);
        self.run_for(0);
    }

    /// Its peers notice at once.
    pub fn kill(&mut self, node: usize) {
        self.end_process(node);
        self.run_for(0);
    }

    /// Links are cut, and those at both ends notice at once.
    pub fn cut(&mut self, some: &[usize], others: &[usize]) {
        let pairs = some
            .iter()
            .flat_map(|a| others.iter().map(move |b| (*a, *b)));
        for (from, to) in pairs.flat_map(|(a, b)| [(a, b), (b, a)]) {
            self.scene.apart.push((from, to));
            let link = self.link_of(from, to);
            link.cut_until = u64::MAX;
            // What is on its way is lost.
            link.number += 1;
            self.part(from, to);
        }
    }

    /// Links that were cut can be made again.
    pub fn mend(&mut self) {
        for (from, to) in std::mem::take(&mut self.scene.apart) {
            self.link_of(from, to).cut_until = 0;
            self.after(1, Event::Dial(from, to));
        }
    }

    /// From now on the registry answers these nodes so, and all others well.
    pub fn registry_answers_so(&mut self, answer: Answer, nodes: &[usize]) {
        let all = nodes.iter().map(|node| (*node, answer));
        self.scene.registry = Some(all.collect());
    }

    /// Its links stay up, and nothing comes from it any more.
    pub fn silence(&mut self, node: usize) {
        self.scene.silent = Some(node);
    }

    pub fn message(&mut self, node: usize, from: &NodeName, message: PeerMessage) {
        let from = from.clone();
        self.tell(node, Input::Message { from, message });
    }

    pub fn open_run(&mut self, node: usize, timeout_ms: u32) -> RequestId {
        let conn = self.try_connect(node, namespace(), Role::Reader);
        let conn = conn.expect("a reader");
        self.send(node, conn, Request::OpenRun { timeout_ms })
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
        self.try_connect(node, namespace(), role)
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

    fn acquire(&mut self, node: usize, conn: ConnId) -> Reply {
        let acquire = acquire_slot(LENGTH, 1_000);
        self.ask(node, conn, acquire)
    }

    /// Whether a trainer is given a slot.
    pub fn may_save(&mut self, node: usize, conn: ConnId) -> bool {
        matches!(self.acquire(node, conn), Reply::SlotGranted { .. })
    }

    /// Seals a shard; false if the trainer is refused.
    pub fn stage(&mut self, node: usize, conn: ConnId, step: u64) -> bool {
        let Reply::SlotGranted { slot, .. } = self.acquire(node, conn) else {
            return false;
        };
        let seal = Request::SealSlot {
            slot,
            step: Step::new(step),
            length: LENGTH,
        };
        matches!(self.ask(node, conn, seal), Reply::Done)
    }

    pub fn commit(&mut self, node: usize, conn: ConnId, step: u64) {
        let commit = commit_step(Step::new(step), DurableWish::Never);
        assert!(matches!(self.ask(node, conn, commit), Reply::Done));
    }

    /// Checkpoints that were called committed.
    pub fn committed(&self) -> Vec<&CheckpointKey> {
        let committed = self.notes.iter().filter_map(|(_, _, note)| match note {
            Note::State { key, state } if *state == CheckpointState::Committed => Some(key),
            _ => None,
        });
        committed.collect()
    }

    /// A manifest of a step of which both nodes are homes.
    pub fn manifest_of_homes(&self, run: RunId, both: [usize; 2]) -> Arc<ManifestBytes> {
        let members = members(self.nodes());
        let is_theirs = |manifest: &Arc<ManifestBytes>| {
            let key = CheckpointKey::of(manifest.manifest());
            let homes = homes(&members, &key, 2);
            both.iter().all(|node| homes.contains(&name(*node)))
        };
        let mut all = (1..).map(|step| self.manifest(run, step));
        all.find(is_theirs).expect("a step")
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
            chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
            shards: vec![ShardEntry {
                rank: Rank::new(0),
                node: name(1),
                length: LENGTH,
                root: digest(b"root"),
            }],
            groups: vec![],
            schema: Enclosed::nothing(),
            torch_metadata: Enclosed::nothing(),
        };
        Arc::new(manifest.seal().unwrap())
    }
}
