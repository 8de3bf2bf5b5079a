//! Three nodes and what would be around them, in the smallest form: messages arrive in order, effects succeed, shards
//! are digests without bytes. Whatever was ever sent or asked may come again, twisted.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_core::{
    ConnId, DurableFault, DurableForm, DurablePolicy, Input, MessageLimits, Note, RequestId, Setup,
    UploadTally,
};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, PeerMessage, SessionFault};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    CheckpointState, Generation, NodeName, Rank, RefusalCode, RunId, SlotId, Step, WorldSize,
};

use super::twist::Twist;
use crate::testkit::{
    Event, Pacing, Payload, Pid, Scene, World, acquire_slot, commit_step, geometry, hello, name,
    namespace, open_shard, plan_newest,
};

const NODES: usize = 3;
const LENGTH: u64 = 10_000;
const KEPT: usize = 64;
/// While so much is to come no more messages are carried.
const PLANNED_MAX: usize = 5_000;

/// What was sent and asked, to come again; and what an honest job has come to.
#[derive(Default)]
pub struct Past {
    messages: Vec<(usize, NodeName, PeerMessage)>,
    requests: Vec<(usize, RequestId, Request)>,
    effects: Vec<(usize, Input)>,
    run: Option<RunId>,
    plan: Option<RestorePlan>,
    trainers: BTreeMap<u32, ConnId>,
    asked: BTreeMap<RequestId, (u32, u64)>,
    pub protected: u64,
    pub opened: u64,
    pub refused: Vec<RefusalCode>,
}

pub type Cluster = World<Past>;

impl Scene for Past {
    type Event = ();

    const PAYLOAD: Payload = Payload::Digests;

    fn happens(_: &mut Cluster, (): ()) {}

    fn sets_up(_: &mut Cluster, _: usize, setup: &mut Setup) {
        setup.geometry = Some(geometry(2, 1));
        setup.budget = 40 << 20;
        setup.scrub_period_ms = 1_000;
        setup.durable = DurablePolicy::Every(1);
        setup.durable_form = DurableForm::Increments;
        setup.messages = MessageLimits {
            table_chunks: 2,
            ..MessageLimits::default()
        };
    }

    fn will_hear(world: &mut Cluster, pid: Pid, input: &Input) {
        remember(&mut world.scene.effects, (pid.node, input.clone()));
    }

    fn noted(world: &mut Cluster, _: usize, note: Note) {
        if let Note::State { state, .. } = note {
            world.scene.protected += u64::from(state == CheckpointState::Protected);
        }
    }

    fn replied(world: &mut Cluster, pid: Pid, id: RequestId, reply: Reply, _: Option<SlotId>) {
        world.answered(pid.node, id, reply);
    }

    fn way(world: &mut Cluster, from: usize, to: usize, message: &PeerMessage) -> Option<u64> {
        let sent = (to, name(from), message.clone());
        remember(&mut world.scene.messages, sent);
        (world.planned() < PLANNED_MAX).then_some(1)
    }

    fn pacing(_: &Cluster) -> Pacing {
        Pacing::AtOnce
    }

    /// A node that is lied to publishes anything.
    fn publishes(_: &mut Cluster, _: &CheckpointKey, _: usize) {}

    /// A trainer goes back to a step of its run whose daemon has been restarted with nothing and has taken a lower one since.
    fn overlooks(_: &mut Cluster, pid: Pid, key: &CheckpointKey, _: Rank) {
        let is_first_life = pid.generation <= NODES as u64;
        assert!(
            !is_first_life,
            "what lies in the tier is looked for: {key:?}"
        );
    }
}

impl Cluster {
    pub fn new() -> Self {
        let mut cluster = Self::of(Past::default(), NODES, 0);
        cluster.run_for(1);
        cluster
    }

    /// So much of what is to come, and the ticks in between.
    pub fn settle(&mut self, count: usize) {
        for _ in 0..count + count / 4 {
            self.step();
        }
    }

    fn request(&mut self, node: usize, conn: ConnId, request: Request) -> RequestId {
        let id = self.request_on(conn);
        let asked = (node, id, request.clone());
        remember(&mut self.scene.requests, asked);
        if let Some(pid) = self.pid(node) {
            let input = Box::new(Input::Request { id, request });
            self.after(1, Event::Input(pid, input));
        }
        id
    }

    fn connect(&mut self, node: usize, role: Role) -> ConnId {
        let conn = self.fresh_conn();
        self.request(node, conn, hello(namespace(), role));
        // A client waits for its welcome, and that may wait for the tier.
        self.settle(8);
        conn
    }

    /// Every rank saves a step; the first time, the run is opened before.
    pub fn save(&mut self, step: u64) {
        if self.scene.run.is_none() {
            let conn = self.connect(0, Role::Reader);
            self.request(0, conn, Request::OpenRun { timeout_ms: 9_000 });
            self.settle(200);
        }
        let Some(run) = self.scene.run else { return };
        for rank in 0..NODES as u32 {
            let node = rank as usize;
            let conn = match self.scene.trainers.get(&rank) {
                Some(conn) => *conn,
                None => {
                    let role = Role::Trainer {
                        run,
                        rank: Rank::new(rank),
                        world_size: WorldSize::new(NODES as u32).unwrap(),
                    };
                    let conn = self.connect(node, role);
                    self.scene.trainers.insert(rank, conn);
                    conn
                }
            };
            let acquire = acquire_slot(LENGTH, 9_000);
            let id = self.request(node, conn, acquire);
            self.scene.asked.insert(id, (rank, step + 1));
        }
    }

    fn answered(&mut self, node: usize, id: RequestId, reply: Reply) {
        match reply {
            Reply::RunOpened { run } => self.scene.run = Some(run),
            Reply::Plan(plan) => self.scene.plan = Some(plan),
            Reply::ShardOpened { .. } => self.scene.opened += 1,
            Reply::Refused(refusal) => self.scene.refused.push(refusal.code),
            Reply::SlotGranted { slot, .. } => {
                let Some((rank, step)) = self.scene.asked.remove(&id) else {
                    return;
                };
                let seal = Request::SealSlot {
                    slot,
                    step: Step::new(step),
                    length: LENGTH,
                };
                self.request(node, id.conn, seal);
                if rank == 0 {
                    let commit = commit_step(Step::new(step), DurableWish::Policy);
                    self.request(node, id.conn, commit);
                }
            }
            _ => {}
        }
    }

    /// A plan, and all its shards on one node.
    pub fn restore(&mut self) {
        let conn = self.connect(0, Role::Reader);
        let plan = plan_newest(9_000);
        self.request(0, conn, plan);
        self.settle(200);
        let Some(plan) = self.scene.plan.clone() else {
            return;
        };
        for rank in 0..NODES as u32 {
            let open = open_shard(plan.manifest, Rank::new(rank), 9_000);
            self.request(0, conn, open);
        }
    }

    /// A node dies and starts with nothing.
    pub fn restart(&mut self, node: usize) {
        self.scene.trainers.remove(&(node as u32));
        self.end_process(node);
        self.start_process(node);
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
                self.tell(node, Input::PeerDown { node: other });
            }
            7 => {
                let node_up = name((node + 1) % NODES);
                let generation = Generation::new(twist.number());
                self.tell(
                    node,
                    Input::PeerUp {
                        node: node_up,
                        generation,
                    },
                );
            }
            8 => {
                self.now = self.now.saturating_add(twist.number() % (1 << 40));
                self.tell(node, Input::Tick);
            }
            9..=11 => self.say_again(twist),
            12..=13 => self.ask_again(twist),
            14 => self.effect_again(twist),
            _ => {
                let conn = self
                    .scene
                    .trainers
                    .remove(&(node as u32))
                    .unwrap_or(ConnId(twist.number()));
                self.tell(node, Input::Disconnected { conn });
            }
        }
    }

    /// One node says this to another.
    pub fn hear(&mut self, to: usize, from: usize, message: PeerMessage) {
        let from = name(from);
        self.tell(to, Input::Message { from, message });
    }

    fn say_again(&mut self, twist: &Twist) {
        if self.scene.messages.is_empty() {
            return;
        }
        let (to, from, message) =
            self.scene.messages[twist.pick(self.scene.messages.len())].clone();
        let message = twist.twist(&message);
        self.tell(to, Input::Message { from, message });
    }

    fn ask_again(&mut self, twist: &Twist) {
        if self.scene.requests.is_empty() {
            return;
        }
        let (node, id, request) =
            self.scene.requests[twist.pick(self.scene.requests.len())].clone();
        let request = twist.twist(&request);
        let id = self.request_on(id.conn);
        self.tell(node, Input::Request { id, request });
    }

    /// An effect that ends twice, late, for something else, or badly.
    fn effect_again(&mut self, twist: &Twist) {
        if self.scene.effects.is_empty() {
            return;
        }
        let (node, input) = self.scene.effects[twist.pick(self.scene.effects.len())].clone();
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
                tally,
            } if number.is_multiple_of(2) => {
                let _ = (leaves, prints);
                Input::Digested {
                    slot,
                    leaves: Arc::default(),
                    prints: Arc::default(),
                    root,
                    tally,
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
                    Ok(UploadTally {
                        bytes: number,
                        elapsed_ms: number,
                    })
                } else {
                    Err(fault())
                },
            },
            other => failed(other, fault()),
        };
        self.tell(node, twisted);
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
