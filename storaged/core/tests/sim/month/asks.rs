//! Requests of a month's jobs, and what becomes of their answers.

use storaged_core::{ConnId, Input, RequestId};
use storaged_wire::local::{Keep, Reply, Request, Role};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Rank, RunId, SlotId, Step};

use super::super::world::World;
use super::early::ComingMemory;
use super::jobs::{IncarnationId, Place};
use crate::testkit::{Pid, hello};

/// Connections of a month are numbered from here.
const FIRST_CONN: u64 = 1 << 32;

/// What was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    Hello,
    Plan(Option<Step>),
    /// A plan for the protected step before the newest.
    KeptStep(CheckpointKey),
    /// A step is to be pinned or let go.
    Keep(Keep, CheckpointKey),
    Run,
    Shard(Rank),
    /// The same, but not of own RAM.
    ShardElsewhere(Rank),
    Close,
    /// A launcher says that a restart has failed.
    Failed,
    Slot(Rank, Step),
    Seal(Rank, Step),
    /// A seal with a step that is not newer.
    SealBack,
    Commit,
    Wait,
    /// A hello that lies about its run.
    Lie(RunId),
}

/// A request that has not been answered.
#[derive(Debug, Clone)]
pub struct Asked {
    pub job: usize,
    pub incarnation: u64,
    pub pid: Pid,
    pub at: u64,
    pub limit_ms: u64,
    pub what: What,
    /// What was known to be safe when it was asked.
    pub floor: Option<CheckpointKey>,
    /// Nobody who could be asked then knew of that.
    pub floor_is_out_of_reach: bool,
    /// Since when somebody can be asked who does.
    pub in_reach_since: Option<u64>,
    /// A majority could be asked.
    pub reaches_majority: bool,
    /// The newest that was in the durable tier then.
    pub durable: Option<CheckpointKey>,
}

/// What is asked on a connection once its hello is answered: one request at a time.
#[derive(Debug)]
pub struct Held {
    whose: IncarnationId,
    request: Request,
    limit_ms: u64,
    what: What,
}

/// Whether a reply is for a job of a month.
pub fn is_of_month(id: RequestId) -> bool {
    id.conn.0 >= FIRST_CONN
}

impl World {
    pub(super) fn connect_in_month(
        &mut self,
        whose: IncarnationId,
        node: usize,
        role: Role,
        what: What,
    ) -> Place {
        let conn = ConnId(FIRST_CONN + self.month().jobs.fresh());
        let nobody = Pid {
            node,
            generation: 0,
        };
        let pid = self.pid(node).unwrap_or(nobody);
        let place = Place { pid, conn };
        let namespace = self.month().jobs.all[whose.job].namespace.clone();
        let hello = hello(namespace, role);
        let limit = 5_000;
        self.ask_in_month(whose, place, hello, limit, what);
        place
    }

    pub(super) fn ask_in_month(
        &mut self,
        whose: IncarnationId,
        Place { pid, conn }: Place,
        request: Request,
        limit_ms: u64,
        what: What,
    ) {
        if let Some(held) = self.month().jobs.held.get_mut(&conn) {
            return held.push(Held {
                whose,
                request,
                limit_ms,
                what,
            });
        }
        if what == What::Hello {
            self.month().jobs.held.insert(conn, Vec::new());
        }
        let IncarnationId {
            job,
            id: incarnation,
        } = whose;
        let index = self.month().jobs.fresh();
        let id = RequestId { conn, index };
        let (at, floor) = (self.now, self.known_safe(job));
        let durable = self.known_durable(job);
        let out_of_reach = floor.as_ref();
        let out_of_reach = out_of_reach.is_some_and(|it| self.is_out_of_reach(pid.node, it));
        let reaches_majority = self.reaches_majority(pid.node);
        let asked = Asked {
            job,
            incarnation,
            pid,
            at,
            limit_ms,
            what,
            floor,
            floor_is_out_of_reach: out_of_reach,
            in_reach_since: None,
            reaches_majority,
            durable,
        };
        self.month().jobs.asked.insert(id, asked);
        self.back(pid, 1, Input::Request { id, request });
    }

    pub fn answered_in_month(&mut self, id: RequestId, reply: Reply, slot: Option<SlotId>) {
        let Some(asked) = self.month().jobs.asked.remove(&id) else {
            return;
        };
        let held = self.month().jobs.held.remove(&id.conn);
        if !self.lives(asked.pid) {
            return;
        }
        let whose = IncarnationId {
            job: asked.job,
            id: asked.incarnation,
        };
        if let What::Lie(run) = asked.what {
            return self.a_run_counts_only_if_it_was_opened(&asked, run, &reply);
        }
        if self.month().jobs.incarnation(whose.job, whose.id).is_none() {
            return;
        }
        match (&asked.what, reply) {
            (What::Plan(wish), Reply::Plan(plan)) => {
                self.a_plan_names_every_shard(&plan);
                if wish.is_none() {
                    self.no_plan_goes_below(&asked, &plan);
                    self.failed_steps_are_passed_over(&asked, &plan);
                }
                self.open_run_in_month(whose, Some(plan));
            }
            (What::KeptStep(key), Reply::Plan(plan)) => self.a_kept_step_is_offered(key, &plan),
            (What::Keep(keep, key), Reply::Removed { .. }) => self.is_kept_as_asked(*keep, key),
            (What::Run, Reply::RunOpened { run }) => {
                self.run_numbers_are_unique(&asked, run);
                self.restore_in_month(whose, run);
            }
            (What::Shard(rank), Reply::ShardComing { length, .. }) => {
                let slot = slot.unwrap();
                self.shard_comes_in_month(whose, *rank, ComingMemory { slot, length });
            }
            (What::Shard(rank), Reply::StillComing) => self.follows_in_month(whose, *rank),
            (What::Shard(rank), Reply::ShardCame(_)) => self.shard_came_in_month(whose, *rank),
            (What::Shard(rank), Reply::ShardOpened { length, .. }) => {
                let bytes =
                    self.ram(asked.pid.node).mapped(slot.unwrap())[..length as usize].to_vec();
                self.shard_is_back_in_month(whose, *rank, &bytes);
            }
            (What::ShardElsewhere(rank), Reply::ShardOpened { length, .. }) => {
                let bytes =
                    self.ram(asked.pid.node).mapped(slot.unwrap())[..length as usize].to_vec();
                self.bytes_are_what_was_sealed(whose, *rank, &bytes);
                self.shard_is_back_in_month(whose, *rank, &bytes);
            }
            (What::Failed, Reply::RestartsFailed(all)) => self.failure_is_known(whose, &all),
            (What::Slot(rank, step), Reply::SlotGranted { slot, .. }) => {
                self.fill(whose, *rank, *step, slot);
            }
            (What::Seal(rank, step), Reply::Done) => self.sealed(whose, *rank, *step),
            (What::SealBack, Reply::Done) => panic!("a step that is not newer was sealed"),
            (What::Hello, Reply::Welcome { .. }) => {
                let place = Place {
                    pid: asked.pid,
                    conn: id.conn,
                };
                for held in held.into_iter().flatten() {
                    self.ask_in_month(held.whose, place, held.request, held.limit_ms, held.what);
                }
            }
            (What::Commit | What::Close, Reply::Done) | (What::Wait, Reply::Reached { .. }) => {}
            (_, Reply::Refused(refusal)) => self.refused(&asked, &refusal),
            (what, reply) => panic!("unexpected answer to {what:?}: {reply:?}"),
        }
    }
}
