//! The daemon's own local protocol without a socket: requests go straight to the driver, and a slot comes back as the
//! daemon's own memory. A connection that is dropped is gone for the daemon, and with it what it held.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use storaged_arena::Slot;
use storaged_core::{ConnId, RequestId};
use storaged_wire::local::{
    ByteRange, CheckpointInfo, DurableWish, LOCAL_VERSION, Reply, Request, Role, Rung,
};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    CheckpointState, DescribedManifest, Digest, Enclosures, Fingerprint, Namespace, Rank, Refusal,
    RefusalCode, RunId, SharedTable, SlotId, Step, WorldSize,
};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::stage::{Answer, StageEvent};

/// Connections of the sockets count from 1; these count from here.
const CONNS_FROM: u64 = 1 << 63;
/// An answer without a time of its own.
const PROMPT: Duration = Duration::from_secs(15);
/// What an answer may take beyond the wait that its request asks for.
const GRACE: Duration = Duration::from_secs(2);

/// Why a request to the daemon was not done.
#[derive(Debug, Error)]
pub enum CallFault {
    /// It said no, and why.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It is going down.
    #[error("the daemon is stopping: try again when it is back")]
    Stopping,
    /// It did not answer.
    #[error("expected an answer of the daemon within {} s, got none", .0.as_secs())]
    Silent(Duration),
    /// It answered with something else.
    #[error("expected {expected} of the daemon, got another answer")]
    Unexpected { expected: &'static str },
    /// What it sent as a manifest is none.
    #[error("the manifest could not be verified")]
    Manifest(#[from] storaged_wire::manifest::ManifestError),
}

impl CallFault {
    /// The refusal's code, if it is one.
    pub fn code(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused(refusal) => Some(refusal.code),
            _ => None,
        }
    }

    /// Whether it means that nothing was ever saved there.
    pub fn is_nothing_saved(&self) -> bool {
        let nothing = [RefusalCode::NoCheckpoint, RefusalCode::UnknownNamespace];
        self.code().is_some_and(|code| nothing.contains(&code))
    }
}

/// Makes connections, all with one token.
#[derive(Debug, Clone)]
pub struct Connector {
    events: mpsc::Sender<StageEvent>,
    next: Arc<AtomicU64>,
    token: Arc<[u8]>,
}

impl Connector {
    pub fn new(events: mpsc::Sender<StageEvent>, token: &str) -> Self {
        Self {
            events,
            next: Arc::new(AtomicU64::new(CONNS_FROM)),
            token: token.as_bytes().into(),
        }
    }

    /// A connection that has not said who it is: enough to list.
    pub fn anonymous(&self) -> LocalConn {
        LocalConn {
            events: self.events.clone(),
            conn: ConnId(self.next.fetch_add(1, Ordering::Relaxed)),
            index: AtomicU64::new(0),
        }
    }

    pub async fn reader(&self, namespace: &Namespace) -> Result<LocalConn, CallFault> {
        self.hello(namespace, Role::Reader).await
    }

    pub async fn trainer(
        &self,
        namespace: &Namespace,
        run: RunId,
        rank: Rank,
        world_size: WorldSize,
    ) -> Result<LocalConn, CallFault> {
        let role = Role::Trainer {
            run,
            rank,
            world_size,
        };
        self.hello(namespace, role).await
    }

    async fn hello(&self, namespace: &Namespace, role: Role) -> Result<LocalConn, CallFault> {
        let conn = self.anonymous();
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: namespace.clone(),
            token: self.token.to_vec().into(),
            role,
        };
        match conn.call(hello, PROMPT).await?.reply {
            Reply::Welcome { .. } => Ok(conn),
            _ => Err(unexpected("a welcome")),
        }
    }
}

/// A shard in this node's RAM, not verified yet.
pub struct OpenedShard {
    pub slot: Arc<Slot>,
    pub length: u64,
    pub chunk: storaged_wire::ChunkSize,
    pub leaves: SharedTable<Digest>,
    pub rung: Rung,
    pub fingerprints: Option<SharedTable<Fingerprint>>,
}

/// One connection.
#[derive(Debug)]
pub struct LocalConn {
    events: mpsc::Sender<StageEvent>,
    conn: ConnId,
    index: AtomicU64,
}

impl LocalConn {
    async fn call(&self, request: Request, limit: Duration) -> Result<Answer, CallFault> {
        let (answer, answered) = oneshot::channel();
        let id = RequestId {
            conn: self.conn,
            index: self.index.fetch_add(1, Ordering::Relaxed),
        };
        let event = StageEvent::Request {
            id,
            request,
            answer,
        };
        let exchange = async {
            self.events.send(event).await.ok()?;
            answered.await.ok()
        };
        let outcome = timeout(limit + GRACE, exchange).await;
        match outcome.map_err(|_| CallFault::Silent(limit))? {
            None => Err(CallFault::Stopping),
            Some(Answer {
                reply: Reply::Refused(refusal),
                ..
            }) => Err(refusal.into()),
            Some(answer) => Ok(answer),
        }
    }

    async fn done(&self, request: Request) -> Result<(), CallFault> {
        match self.call(request, PROMPT).await?.reply {
            Reply::Done => Ok(()),
            _ => Err(unexpected("done")),
        }
    }

    pub async fn open_run(&self, limit: Duration) -> Result<RunId, CallFault> {
        let timeout_ms = ms(limit);
        match self
            .call(Request::OpenRun { timeout_ms }, limit)
            .await?
            .reply
        {
            Reply::RunOpened { run } => Ok(run),
            _ => Err(unexpected("a run")),
        }
    }

    pub async fn acquire(
        &self,
        bytes: u64,
        limit: Duration,
    ) -> Result<(SlotId, Arc<Slot>), CallFault> {
        let timeout_ms = ms(limit);
        let request = Request::AcquireSlot { bytes, timeout_ms };
        match self.call(request, limit).await? {
            Answer {
                reply: Reply::SlotGranted { slot, .. },
                slot: Some(memory),
            } => Ok((slot, memory)),
            _ => Err(unexpected("a slot")),
        }
    }

    pub async fn release(&self, slot: SlotId) -> Result<(), CallFault> {
        self.done(Request::ReleaseSlot { slot }).await
    }

    pub async fn seal(&self, slot: SlotId, step: Step, length: u64) -> Result<(), CallFault> {
        self.done(Request::SealSlot { slot, step, length }).await
    }

    pub async fn commit(
        &self,
        step: Step,
        schema: Vec<u8>,
        durable: DurableWish,
    ) -> Result<(), CallFault> {
        let request = Request::Commit {
            step,
            schema: schema.into(),
            torch_metadata: Vec::new().into(),
            durable,
        };
        self.done(request).await
    }

    /// How far the checkpoint has come, once it is at least in `state`, and its manifest.
    pub async fn wait(
        &self,
        run: RunId,
        step: Step,
        state: CheckpointState,
        limit: Duration,
    ) -> Result<(CheckpointState, Option<Digest>), CallFault> {
        let request = Request::Wait {
            run,
            step,
            state,
            timeout_ms: ms(limit),
        };
        match self.call(request, limit).await?.reply {
            Reply::Reached {
                state, manifest, ..
            } => Ok((state, manifest)),
            _ => Err(unexpected("a state")),
        }
    }

    pub async fn plan(
        &self,
        step: Option<Step>,
        limit: Duration,
    ) -> Result<RestorePlan, CallFault> {
        let request = Request::Plan {
            step,
            timeout_ms: ms(limit),
            allow_older: false,
        };
        match self.call(request, limit).await?.reply {
            Reply::Plan(plan) => Ok(plan),
            _ => Err(unexpected("a plan")),
        }
    }

    pub async fn manifest(&self, name: Digest) -> Result<DescribedManifest, CallFault> {
        let request = Request::GetManifest { manifest: name };
        match self.call(request, PROMPT).await?.reply {
            Reply::Manifest {
                bytes,
                schema,
                torch_metadata,
            } => {
                let given = Enclosures {
                    schema,
                    torch_metadata,
                };
                Ok(DescribedManifest::verify(bytes, &given, name)?)
            }
            _ => Err(unexpected("a manifest")),
        }
    }

    pub async fn open_shard(
        &self,
        manifest: Digest,
        rank: Rank,
        ranges: Vec<ByteRange>,
        without: Option<Rung>,
        limit: Duration,
    ) -> Result<OpenedShard, CallFault> {
        let request = Request::OpenShard {
            manifest,
            rank,
            ranges,
            timeout_ms: ms(limit),
            without,
            withheld: None,
            early: None,
        };
        match self.call(request, limit).await? {
            Answer {
                reply:
                    Reply::ShardOpened {
                        length,
                        chunk,
                        leaves,
                        rung,
                        fingerprints,
                    },
                slot: Some(slot),
            } => Ok(OpenedShard {
                slot,
                length,
                chunk,
                leaves,
                rung,
                fingerprints,
            }),
            _ => Err(unexpected("a shard and its memory")),
        }
    }

    pub async fn list(
        &self,
        namespace: Option<Namespace>,
    ) -> Result<Vec<CheckpointInfo>, CallFault> {
        match self.call(Request::List { namespace }, PROMPT).await?.reply {
            Reply::Checkpoints(infos) => Ok(infos),
            _ => Err(unexpected("a listing")),
        }
    }

    /// Drops all of the job's checkpoints from the RAM of all nodes.
    pub async fn drop_job(&self, limit: Duration) -> Result<(), CallFault> {
        let request = Request::Drop {
            force: true,
            timeout_ms: ms(limit),
        };
        match self.call(request, limit).await?.reply {
            Reply::Dropped(_) => Ok(()),
            _ => Err(unexpected("a report")),
        }
    }
}

impl Drop for LocalConn {
    fn drop(&mut self) {
        let gone = StageEvent::Gone { conn: self.conn };
        let Err(mpsc::error::TrySendError::Full(gone)) = self.events.try_send(gone) else {
            return;
        };
        let events = self.events.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { events.send(gone).await });
        }
    }
}

fn ms(limit: Duration) -> u32 {
    u32::try_from(limit.as_millis()).unwrap_or(u32::MAX)
}

fn unexpected(expected: &'static str) -> CallFault {
    CallFault::Unexpected { expected }
}
