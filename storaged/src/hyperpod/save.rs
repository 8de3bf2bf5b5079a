//! A shard comes in: straight into a slot of the daemon's shared memory, its checksum taken on the way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use futures::StreamExt;
use storaged_arena::Slot;
use storaged_wire::local::DurableWish;
use storaged_wire::{CheckpointState, Rank, RefusalCode, RunId, SlotId, Step};
use tokio::time::timeout;
use twox_hash::xxhash3_128::Hasher;

use super::fault::ApiFault;
use super::footer::{FOOTER_BYTES, Footer};
use super::jobs::{HyperJob, HyperJobs, Newer, RankSession, SealedBody};
use super::local::CallFault;
use super::names::Checksum;
use super::record::{JobRecord, is_fenced};
use super::retain;

/// A client must send so many bytes, or what is left, in every such time.
pub const STALL_BYTES: u64 = 64 << 10;
const STALL_WITHIN: Duration = Duration::from_secs(10);
/// A slot is waited for so long: the client gives up after 60 s.
const SLOT_WAIT: Duration = Duration::from_secs(20);
/// Of a body that was refused no more than this is read and thrown away, so that its sender hears why.
const DRAIN_MAX: u64 = 256 << 20;
/// Runs that may end between two tries of one request.
const TRIES: usize = 4;

/// What describes a checkpoint that was saved through this interface.
pub const SCHEMA: &[u8] = b"{\"hyperpod\":1}";

/// What is to be saved.
pub struct Incoming {
    pub rank: Rank,
    pub step: Step,
    pub length: u64,
    /// As the client has it, if it says so.
    pub checksum: Option<Checksum>,
}

/// A slot that waits for a body.
struct Reserved {
    run: RunId,
    slot: SlotId,
    memory: Arc<Slot>,
}

enum Prepared {
    Slot(Reserved),
    /// The very same body was sealed before: its sender has not heard of it.
    Repeated(RunId),
}

/// Saves a shard; how safe its step is then.
pub async fn save(
    jobs: &Arc<HyperJobs>,
    job: &Arc<HyperJob>,
    incoming: &Incoming,
    mut body: Body,
) -> Result<CheckpointState, ApiFault> {
    let (record, run) = match receive(jobs, job, incoming, &mut body).await {
        Ok(received) => received,
        Err(fault) => {
            drain(body).await;
            return Err(fault);
        }
    };
    let (rank, step) = (incoming.rank, incoming.step);
    let shard = retain::SavedShard { run, step, rank };
    retain::retain(jobs, job, shard, record.steps_retained);
    if incoming.rank == record.last_rank() {
        await_safety(jobs, job, run, incoming.step).await
    } else {
        Ok(CheckpointState::Staged)
    }
}

async fn receive(
    jobs: &HyperJobs,
    job: &HyperJob,
    incoming: &Incoming,
    body: &mut Body,
) -> Result<(JobRecord, RunId), ApiFault> {
    let most = jobs.settings.budget.saturating_sub(FOOTER_BYTES);
    if incoming.length > most {
        let got = incoming.length;
        return Err(ApiFault::TooLarge { most, got });
    }
    let record = jobs.known(job).await?;
    check_rank(job, &record, incoming.rank)?;
    let mut session = job.rank(incoming.rank).await?;
    let _coming = job.shard_comes();
    let (record, prepared) = prepare(jobs, job, &mut session, record, incoming).await?;
    check_rank(job, &record, incoming.rank)?;
    let run = match prepared {
        Prepared::Repeated(run) => {
            drain(std::mem::take(body)).await;
            run
        }
        Prepared::Slot(reserved) => {
            fill_and_seal(&mut session, &record, incoming, body, &reserved).await?;
            reserved.run
        }
    };
    if record.has_deleted(incoming.step) {
        jobs.change(job, |record| record.revive(incoming.step))
            .await?;
    }
    Ok((record, run))
}

fn check_rank(job: &HyperJob, record: &JobRecord, rank: Rank) -> Result<(), ApiFault> {
    if record.world().holds(rank) {
        Ok(())
    } else {
        Err(ApiFault::RankOutside {
            namespace: job.name.text.clone(),
            rank: rank.get(),
            num_ranks: record.world().get(),
        })
    }
}

/// Gets a slot in the run that saves now, in a newer one if this rank goes back.
async fn prepare(
    jobs: &HyperJobs,
    job: &HyperJob,
    session: &mut RankSession,
    mut record: JobRecord,
    incoming: &Incoming,
) -> Result<(JobRecord, Prepared), ApiFault> {
    for _ in 0..TRIES {
        let when = match try_prepare(jobs, job, session, &record, incoming).await {
            Ok(Some(prepared)) => return Ok((record, prepared)),
            Ok(None) => Newer::Now,
            Err(fault) if is_fenced(&fault) => Newer::WhenNobodyHas,
            Err(fault) => return Err(fault.into()),
        };
        record = jobs.newer(job, record.run, when).await?;
    }
    let reason = "newer runs were opened while it came: is the job started twice?".into();
    let step = incoming.step.get();
    Err(ApiFault::GivenUp { step, reason })
}

/// None if the rank has saved this step or a later one in this run.
async fn try_prepare(
    jobs: &HyperJobs,
    job: &HyperJob,
    session: &mut RankSession,
    record: &JobRecord,
    incoming: &Incoming,
) -> Result<Option<Prepared>, CallFault> {
    let run = record.run;
    if session.of_run(run).is_none() {
        let name = &job.name.shards;
        let trainer = jobs
            .connector
            .trainer(name, run, incoming.rank, record.world());
        session.begin(run, trainer.await?);
    }
    let Some(trainer) = session.of_run(run) else {
        return Ok(None);
    };
    if let Some(last) = session.last.filter(|last| last.step >= incoming.step) {
        let same = SealedBody {
            step: incoming.step,
            length: incoming.length,
            checksum: incoming.checksum.unwrap_or(Checksum(0)),
        };
        let staged = CheckpointState::Staged;
        let is_there = trainer.wait(run, same.step, staged, Duration::ZERO).await;
        let repeated = last == same && incoming.checksum.is_some() && is_there.is_ok();
        return Ok(repeated.then_some(Prepared::Repeated(run)));
    }
    let bytes = incoming.length + FOOTER_BYTES;
    let (slot, memory) = trainer.acquire(bytes, SLOT_WAIT).await?;
    Ok(Some(Prepared::Slot(Reserved { run, slot, memory })))
}

async fn fill_and_seal(
    session: &mut RankSession,
    record: &JobRecord,
    incoming: &Incoming,
    body: &mut Body,
    reserved: &Reserved,
) -> Result<(), ApiFault> {
    let filled = fill(incoming, body, &reserved.memory).await;
    let Some(trainer) = session.of_run(reserved.run) else {
        return Err(ApiFault::Ended);
    };
    let checksum = match filled {
        Ok(checksum) => checksum,
        Err(fault) => {
            // What is in it does not matter: the next one begins from its first byte.
            let _ = trainer.release(reserved.slot).await;
            return Err(fault);
        }
    };
    let (step, length) = (incoming.step, incoming.length);
    let sealed = trainer.seal(reserved.slot, step, length + FOOTER_BYTES);
    let outcome = match sealed.await {
        Ok(()) if incoming.rank == record.last_rank() => {
            let schema = SCHEMA.to_vec();
            trainer.commit(step, schema, DurableWish::Policy).await
        }
        Ok(()) => Ok(()),
        Err(fault) => {
            let _ = trainer.release(reserved.slot).await;
            session.forget_what_was_last();
            return Err(fault.into());
        }
    };
    session.last = Some(SealedBody {
        step,
        length,
        checksum,
    });
    Ok(outcome?)
}

/// Fills a slot with the body and its footer, and compares the checksum.
async fn fill(incoming: &Incoming, body: &mut Body, memory: &Slot) -> Result<Checksum, ApiFault> {
    let expected = incoming.length;
    let mut stream = std::mem::take(body).into_data_stream();
    let (mut hasher, mut pace, mut got) = (Hasher::new(), Pace::new(), 0);
    while got < expected {
        let Some(frame) = pace.next(stream.next(), got, expected).await? else {
            return Err(ApiFault::Truncated { expected, got });
        };
        let frame = frame.map_err(ApiFault::Receiving)?;
        let frame = &frame[..frame.len().min((expected - got) as usize)];
        memory.write_at(got, frame)?;
        hasher.write(frame);
        got += frame.len() as u64;
    }
    let checksum = Checksum(hasher.finish_128());
    if let Some(said) = incoming.checksum.filter(|said| *said != checksum) {
        return Err(ApiFault::Checksum {
            expected: said.base64(),
            got: checksum.base64(),
        });
    }
    let length = expected;
    memory.write_at(length, &Footer { length, checksum }.encode())?;
    Ok(checksum)
}

/// Sees to it that a sender gets on.
struct Pace {
    since: Instant,
    had: u64,
}

impl Pace {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            had: 0,
        }
    }

    async fn next<T>(
        &mut self,
        next: impl Future<Output = T>,
        got: u64,
        of: u64,
    ) -> Result<T, ApiFault> {
        if got - self.had >= STALL_BYTES {
            *self = Self {
                since: Instant::now(),
                had: got,
            };
        }
        let left = STALL_WITHIN.saturating_sub(self.since.elapsed());
        let outcome = timeout(left, next).await;
        outcome.map_err(|_| ApiFault::Stalled {
            least: STALL_BYTES.min(of - self.had),
            got: got - self.had,
            within: STALL_WITHIN,
        })
    }
}

/// Reads what is left of a body, if it is not too much, within its time, and throws it away.
pub async fn drain(body: Body) {
    if axum::body::HttpBody::size_hint(&body).lower() > DRAIN_MAX {
        return;
    }
    let mut stream = body.into_data_stream();
    let reading = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = timeout(STALL_WITHIN, reading).await;
}

/// The step's last shard is in: waits until it is as safe as it can be, within the time that is configured for it.
async fn await_safety(
    jobs: &HyperJobs,
    job: &HyperJob,
    run: RunId,
    step: Step,
) -> Result<CheckpointState, ApiFault> {
    let reader = jobs.connector.reader(&job.name.shards).await?;
    let given_up = |fault: CallFault| match &fault {
        CallFault::Refused(refusal)
            if refusal.code == RefusalCode::Abandoned || is_fenced(&fault) =>
        {
            ApiFault::GivenUp {
                step: step.get(),
                reason: refusal.message.clone(),
            }
        }
        _ => fault.into(),
    };
    let limit = jobs.settings.save_wait;
    let until = Instant::now() + limit;
    let committed = CheckpointState::Committed;
    match reader.wait(run, step, committed, limit).await {
        Err(_) if limit.is_zero() => return Ok(CheckpointState::Staged),
        Err(CallFault::Refused(refusal)) if refusal.code == RefusalCode::TimedOut => {
            let (step, reason) = (step.get(), refusal.message);
            return Err(ApiFault::NotCommitted { step, reason });
        }
        outcome => drop(outcome.map_err(given_up)?),
    };
    job.has_committed(run);
    let left = until.saturating_duration_since(Instant::now());
    match reader.wait(run, step, jobs.settings.safe, left).await {
        Err(fault) if fault.code() == Some(RefusalCode::TimedOut) => Ok(committed),
        outcome => outcome.map(|(state, _)| state).map_err(given_up),
    }
}
