//! Three nodes and what would be around them, in the smallest form: messages arrive in order, effects succeed, shards
//! are digests without bytes. Whatever was ever sent or asked may come again, twisted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use storaged_codec::{ChunkSize, Digest, Fingerprint, Geometry, leaf_digest, root_digest};
use storaged_core::{
    ClaimedRun, ConnId, DurableFault, DurableForm, DurableListing, DurablePolicy, Input, Node,
    Note, Now, Output, RequestId, RunsWithoutTier, SessionTally, Setup,
};
use storaged_plan::Member;
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::{PeerMessage, SessionFault};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    CheckpointState, Generation, ManifestBytes, Namespace, NodeName, Rank, RefusalCode, RunId,
    SlotId, Step, WorldSize,
};

use crate::twist::Twist;

const NODES: usize = 3;
const CHUNK: u32 = 4096;
const LENGTH: u64 = 10_000;
/// One input may lead to so many outputs: everything that is known, told to everybody, several times over.
const OUTPUTS_MAX: usize = 20_000;
const KEPT: usize = 64;

fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).unwrap()
}

fn index(name: &NodeName) -> Option<usize> {
    name.as_str()
        .strip_prefix('n')?
        .parse()
        .ok()
        .filter(|node| *node < NODES)
}

fn namespace() -> Namespace {
    Namespace::new("job").unwrap()
}

/// Digests of a shard whose bytes nobody needs.
fn leaves(rank: u64, step: u64) -> (Arc<[Digest]>, Digest) {
    let chunk = ChunkSize::new(CHUNK).unwrap();
    let one = |at: u64| leaf_digest(format!("{rank} {step} {at}").as_bytes(), at);
    let all: Vec<Digest> = (0..chunk.count(LENGTH)).map(one).collect();
    let root = root_digest(&all, LENGTH, chunk);
    (all.into(), root)
}

pub struct Cluster {
    nodes: Vec<Node>,
    generation: u64,
    now: u64,
    waiting: VecDeque<(usize, Input)>,
    /// What was sent and asked, to come again.
    messages: Vec<(usize, NodeName, PeerMessage)>,
    requests: Vec<(usize, RequestId, Request)>,
    effects: Vec<(usize, Input)>,
    manifests: BTreeMap<Digest, Arc<ManifestBytes>>,
    published: BTreeSet<Digest>,
    slots: BTreeMap<(usize, SlotId), (u64, u64)>,
    run: Option<RunId>,
    claimed: u64,
    plan: Option<RestorePlan>,
    trainers: BTreeMap<u32, ConnId>,
    asked: BTreeMap<RequestId, (usize, u32, u64)>,
    next: u64,
    pub protected: u64,
    pub sessions: u64,
    pub opened: u64,
    pub refused: Vec<RefusalCode>,
}

fn setup(node: usize, generation: u64) -> Setup {
    let member = |node: usize| Member {
        name: name(node),
        failure_domain: format!("n{node}"),
    };
    Setup {
        name: name(node),
        generation: Generation::new(generation),
        members: (0..NODES).map(member).collect(),
        geometry: Some(Geometry::new(2, 1).unwrap()),
        chunk: ChunkSize::new(CHUNK).unwrap(),
        slots_per_rank: 3,
        budget: 40 << 20,
        link_rates: storaged_core::LinkRates::default(),
        durable: DurablePolicy::Every(1),
        idle_job_ms: 3_600_000,
        durable_form: DurableForm::Increments,
        messages: storaged_core::MessageLimits {
            table_chunks: 2,
            ..storaged_core::MessageLimits::default()
        },
        runs_without_tier: RunsWithoutTier::Refused,
    }
}

impl Cluster {
    pub fn new() -> Self {
        let nodes = (0..NODES).map(|node| Node::new(setup(node, 1 + node as u64)).unwrap());
        let mut cluster = Self {
            nodes: nodes.collect(),
            generation: NODES as u64,
            now: 0,
            waiting: VecDeque::new(),
            messages: Vec::new(),
            requests: Vec::new(),
            effects: Vec::new(),
            manifests: BTreeMap::new(),
            published: BTreeSet::new(),
            slots: BTreeMap::new(),
            run: None,
            claimed: 0,
            plan: None,
            trainers: BTreeMap::new(),
            asked: BTreeMap::new(),
            next: 0,
            protected: 0,
            sessions: 0,
            opened: 0,
            refused: Vec::new(),
        };
        for (a, b) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
            cluster.link(a, b);
        }
        cluster
    }

    pub fn durable(&self) -> usize {
        self.published.len()
    }

    fn link(&mut self, a: usize, b: usize) {
        let generation = Generation::new(self.generation - (NODES - 1 - b) as u64);
        let node = name(b);
        self.waiting
            .push_back((a, Input::PeerUp { node, generation }));
    }

    fn feed(&mut self, node: usize, input: Input) {
        self.now += 1;
        let outputs = self.nodes[node].handle(Now(self.now), input);
        assert!(
            outputs.len() <= OUTPUTS_MAX,
            "{} outputs of one input",
            outputs.len()
        );
        let ledger = self.nodes[node].ledger();
        assert!(
            ledger.used <= ledger.total,
            "memory stays within the budget"
        );
        let _ = self.nodes[node].deadline();
        for output in outputs {
            self.perform(node, output);
        }
    }

    /// So many of what waits, and a tick where nothing does.
    pub fn settle(&mut self, count: usize) {
        for turn in 0..count {
            match self.waiting.pop_front() {
                Some((node, input)) => self.feed(node, input),
                None => {
                    self.now += 300;
                    self.feed(turn % NODES, Input::Tick);
                }
            }
        }
    }

    fn effect(&mut self, node: usize, input: Input) {
        remember(&mut self.effects, (node, input.clone()));
        self.waiting.push_back((node, input));
    }

    fn perform(&mut self, node: usize, output: Output) {
        match output {
            Output::Send { to, message } => {
                let from = name(node);
                let Some(to) = index(&to) else { return };
                if let PeerMessage::Committed { manifest, .. } = &message
                    && let Ok(manifest) = ManifestBytes::parse(manifest.to_vec())
                {
                    self.manifests.insert(manifest.name(), Arc::new(manifest));
                }
                remember(&mut self.messages, (to, from.clone(), message.clone()));
                if self.waiting.len() < 5_000 {
                    self.waiting
                        .push_back((to, Input::Message { from, message }));
                }
            }
            Output::CreateSlot { slot, .. } => self.effect(node, Input::SlotCreated { slot }),
            Output::Digest { slot, .. } => {
                let (rank, step) = self.slots.get(&(node, slot)).copied().unwrap_or((0, 0));
                let (leaves, root) = leaves(rank, step);
                let prints = vec![Fingerprint::ZERO; leaves.len()].into();
                let digested = Input::Digested {
                    slot,
                    leaves,
                    prints,
                    root,
                };
                self.effect(node, digested);
            }
            Output::Run(work) => {
                self.sessions += 1;
                let count = work.chunk.count(work.lane_length);
                let kept = work.keep.as_ref().map(|_| 0..count).into_iter().collect();
                let ended = Input::SessionEnded {
                    leader: work.leader.clone(),
                    session: work.session,
                    outcome: Ok(SessionTally::default()),
                    kept,
                };
                self.effect(node, ended);
            }
            Output::Stop { leader, session } => {
                let ended = Input::SessionEnded {
                    leader,
                    session,
                    outcome: Err(SessionFault::Aborted),
                    kept: vec![],
                };
                self.effect(node, ended);
            }
            Output::Check { query, parts } => {
                let outcomes = parts.iter().map(|_| (0, None)).collect();
                self.effect(node, Input::Checked { query, outcomes });
            }
            Output::Reply { id, reply, .. } => self.answered(id, reply),
            Output::Note(Note::State { state, .. }) => {
                self.protected += u64::from(state == CheckpointState::Protected);
            }
            other => self.perform_durable(node, other),
        }
    }

    fn perform_durable(&mut self, node: usize, output: Output) {
        match output {
            Output::Upload { manifest, rank, .. } => {
                let manifest = manifest.name();
                let outcome = Ok(());
                let uploaded = Input::Uploaded {
                    manifest,
                    rank,
                    outcome,
                };
                self.effect(node, uploaded);
            }
            Output::Publish { manifest } => {
                let name = manifest.name();
                self.published.insert(name);
                self.manifests.insert(name, manifest);
                let outcome = Ok(());
                self.effect(
                    node,
                    Input::Published {
                        manifest: name,
                        outcome,
                    },
                );
            }
            Output::ListDurable { query, .. } => {
                let all = self
                    .published
                    .iter()
                    .filter_map(|name| self.manifests.get(name));
                let manifests: Vec<Arc<ManifestBytes>> = all.take(4).cloned().collect();
                let outcome = Ok(DurableListing {
                    newest_run: manifests.first().map(|it| it.manifest().run),
                    manifests,
                    set_aside: Vec::new(),
                });
                self.effect(node, Input::DurableListed { query, outcome });
            }
            Output::ClaimRun {
                query,
                above,
                identity,
                ..
            } => {
                // Above the last number there is none: the tier claims the last one again, as a lying one might.
                self.claimed = self.claimed.max(above).saturating_add(1);
                let outcome = Ok(RunId::with_identity(self.claimed, identity));
                self.effect(node, Input::RunClaimed { query, outcome });
            }
            Output::FindRun { query, .. } => {
                let outcome = Ok(ClaimedRun::Unknown);
                self.effect(node, Input::RunFound { query, outcome });
            }
            Output::Fetch {
                manifest,
                rank,
                slot,
                ..
            } => {
                let step = manifest.manifest().step.get();
                let outcome = Ok(leaves(u64::from(rank.get()), step).0);
                self.effect(node, Input::Fetched { slot, outcome });
            }
            _ => {}
        }
    }

    fn ask(&mut self, node: usize, conn: ConnId, request: Request) -> RequestId {
        self.next += 1;
        let id = RequestId {
            conn,
            index: self.next,
        };
        remember(&mut self.requests, (node, id, request.clone()));
        self.waiting
            .push_back((node, Input::Request { id, request }));
        id
    }

    fn connect(&mut self, node: usize, role: Role) -> ConnId {
        self.next += 1;
        let conn = ConnId(self.next);
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: namespace(),
            token: b"token".to_vec().into(),
            role,
        };
        self.ask(node, conn, hello);
        conn
    }

    /// Every rank saves a step; the first time, the run is opened before.
    pub fn save(&mut self, step: u64) {
        if self.run.is_none() {
            let conn = self.connect(0, Role::Reader);
            self.ask(0, conn, Request::OpenRun { timeout_ms: 9_000 });
            self.settle(200);
        }
        let Some(run) = self.run else { return };
        for rank in 0..NODES as u32 {
            let node = rank as usize;
            let conn = match self.trainers.get(&rank) {
                Some(conn) => *conn,
                None => {
                    let role = Role::Trainer {
                        run,
                        rank: Rank::new(rank),
                        world_size: WorldSize::new(NODES as u32).unwrap(),
                    };
                    let conn = self.connect(node, role);
                    self.trainers.insert(rank, conn);
                    conn
                }
            };
            let acquire = Request::AcquireSlot {
                bytes: LENGTH,
                timeout_ms: 9_000,
            };
            let id = self.ask(node, conn, acquire);
            self.asked.insert(id, (node, rank, step + 1));
        }
    }

    fn answered(&mut self, id: RequestId, reply: Reply) {
        match reply {
            Reply::RunOpened { run } => self.run = Some(run),
            Reply::Plan(plan) => self.plan = Some(plan),
            Reply::ShardOpened { .. } => self.opened += 1,
            Reply::Refused(refusal) => self.refused.push(refusal.code),
            Reply::SlotGranted { slot, .. } => {
                let Some((node, rank, step)) = self.asked.remove(&id) else {
                    return;
                };
                self.slots.insert((node, slot), (u64::from(rank), step));
                let seal = Request::SealSlot {
                    slot,
                    step: Step::new(step),
                    length: LENGTH,
                };
                self.ask(node, id.conn, seal);
                if rank == 0 {
                    let commit = Request::Commit {
                        step: Step::new(step),
                        schema: vec![].into(),
                        torch_metadata: vec![].into(),
                        durable: DurableWish::Policy,
                    };
                    self.ask(node, id.conn, commit);
                }
            }
            _ => {}
        }
    }

    /// A plan, and all its shards on one node.
    pub fn restore(&mut self) {
        let conn = self.connect(0, Role::Reader);
        let plan = Request::Plan {
            step: None,
            timeout_ms: 9_000,
            allow_older: false,
        };
        self.ask(0, conn, plan);
        self.settle(200);
        let Some(plan) = self.plan.clone() else {
            return;
        };
        for rank in 0..NODES as u32 {
            let open = Request::OpenShard {
                manifest: plan.manifest,
                rank: Rank::new(rank),
                ranges: vec![],
                timeout_ms: 9_000,
                without: None,
            };
            self.ask(0, conn, open);
        }
    }

    /// A node dies and starts with nothing.
    pub fn restart(&mut self, node: usize) {
        self.waiting.retain(|(to, _)| *to != node);
        self.generation += 1;
        let generation = self.generation;
        self.nodes[node] = Node::new(setup(node, generation)).unwrap();
        self.trainers.remove(&(node as u32));
        for other in (0..NODES).filter(|other| *other != node) {
            self.waiting
                .push_back((other, Input::PeerDown { node: name(node) }));
            let up = Input::PeerUp {
                node: name(node),
                generation: Generation::new(generation),
            };
            self.waiting.push_back((other, up));
            let back = Input::PeerUp {
                node: name(other),
                generation: Generation::new(1 + other as u64),
            };
            self.waiting.push_back((node, back));
        }
    }

    /// One move.
    pub fn play(&mut self, kind: u8, who: u8, twist: &Twist) {
        let node = usize::from(who) % NODES;
        match kind % 16 {
            0..=2 => self.settle(1 + usize::from(who) % 40),
            3 => self.save(twist.number().min(1 << 40)),
            4 => self.restore(),
            5 => self.restart(node),
            6 => {
                let other = name((node + 1) % NODES);
                self.feed(node, Input::PeerDown { node: other });
            }
            7 => {
                let node_up = name((node + 1) % NODES);
                let generation = Generation::new(twist.number());
                self.feed(
                    node,
                    Input::PeerUp {
                        node: node_up,
                        generation,
                    },
                );
            }
            8 => {
                self.now = self.now.saturating_add(twist.number() % (1 << 40));
                self.feed(node, Input::Tick);
            }
            9..=11 => self.say_again(twist),
            12..=13 => self.ask_again(twist),
            14 => self.effect_again(twist),
            _ => {
                let conn = self
                    .trainers
                    .remove(&(node as u32))
                    .unwrap_or(ConnId(twist.number()));
                self.feed(node, Input::Disconnected { conn });
            }
        }
    }

    /// One node says this to another.
    pub fn hear(&mut self, to: usize, from: usize, message: PeerMessage) {
        let from = name(from);
        self.feed(to, Input::Message { from, message });
    }

    fn say_again(&mut self, twist: &Twist) {
        if self.messages.is_empty() {
            return;
        }
        let (to, from, message) = self.messages[twist.pick(self.messages.len())].clone();
        let message = twist.twist(&message);
        self.feed(to, Input::Message { from, message });
    }

    fn ask_again(&mut self, twist: &Twist) {
        if self.requests.is_empty() {
            return;
        }
        let (node, id, request) = self.requests[twist.pick(self.requests.len())].clone();
        let request = twist.twist(&request);
        self.next += 1;
        let id = RequestId {
            index: self.next,
            ..id
        };
        self.feed(node, Input::Request { id, request });
    }

    /// An effect that ends twice, late, for something else, or badly.
    fn effect_again(&mut self, twist: &Twist) {
        if self.effects.is_empty() {
            return;
        }
        let (node, input) = self.effects[twist.pick(self.effects.len())].clone();
        let reason = || "made to fail".to_string();
        let fault = || DurableFault::Unavailable(reason());
        let number = twist.number();
        let twisted = match input {
            it if twist.is_plain() => it,
            Input::SlotCreated { slot } => Input::SlotFailed {
                slot,
                reason: reason(),
            },
            Input::Digested {
                slot,
                leaves,
                prints,
                root,
            } if number.is_multiple_of(2) => {
                let _ = (leaves, prints);
                Input::Digested {
                    slot,
                    leaves: Arc::default(),
                    prints: Arc::default(),
                    root,
                }
            }
            Input::Digested { slot, .. } => Input::DigestFailed {
                slot,
                reason: reason(),
            },
            Input::SessionEnded {
                leader,
                session,
                outcome,
                ..
            } => Input::SessionEnded {
                leader,
                session,
                outcome: match number % 3 {
                    0 => outcome,
                    1 => Err(SessionFault::NoBasis),
                    _ => Err(SessionFault::Corrupt("chunk 0".into())),
                },
                kept: vec![number..number.saturating_add(u64::from(u16::MAX)), 0..1],
            },
            Input::Uploaded { manifest, .. } => Input::Uploaded {
                manifest,
                rank: Rank::new(number as u32),
                outcome: if number.is_multiple_of(2) {
                    Ok(())
                } else {
                    Err(fault())
                },
            },
            other => failed(other, fault()),
        };
        self.feed(node, twisted);
    }
}

fn failed(input: Input, fault: DurableFault) -> Input {
    match input {
        Input::Published { manifest, .. } => Input::Published {
            manifest,
            outcome: Err(fault),
        },
        Input::DurableListed { query, .. } => Input::DurableListed {
            query,
            outcome: Err(fault),
        },
        Input::Fetched { slot, .. } => Input::Fetched {
            slot,
            outcome: Err(fault),
        },
        Input::Checked { query, .. } => Input::Checked {
            query,
            outcomes: vec![],
        },
        other => other,
    }
}

fn remember<T>(all: &mut Vec<T>, one: T) {
    if all.len() >= KEPT {
        all.remove(0);
    }
    all.push(one);
}
