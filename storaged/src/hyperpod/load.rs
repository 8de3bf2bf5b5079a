//! A shard goes out: from this node's RAM, from a peer's, decoded, or from the durable tier, as the daemon finds it.
//! Every chunk is verified before a byte of it leaves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures::{StreamExt, stream};
use storaged_sdk::{ClientError, OpenedShard, RestoredShard};
use storaged_wire::local::{ByteRange, CheckpointInfo, Rung};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{CheckpointState, DescribedManifest, Rank, RunId, Step};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::fault::ApiFault;
use super::footer::{FOOTER_BYTES, Footer};
use super::jobs::{HyperJob, HyperJobs};
use super::local::{CallFault, LocalConn};
use super::names::{HyperName, Wanted};
use super::record::JobRecord;
use super::save::SCHEMA;

/// The client gives up after 60 s: this for the plan, the next for the shard.
const PLAN_WAIT: Duration = Duration::from_secs(15);
const OPEN_WAIT: Duration = Duration::from_secs(40);
/// A step that is whole is as safe as it can be within this time, also while a node is away.
const SAFE_WAIT: Duration = Duration::from_secs(10);
const SAFE_POLL: Duration = Duration::from_millis(250);
/// Bytes that are verified and sent at once; as many are read ahead.
const PIECE: u64 = 1 << 20;
/// Steps that are looked into for a listing.
const LISTED_MAX: usize = 16;

/// A shard that is ready to be sent.
pub struct Outgoing {
    pub footer: Footer,
    pub wanted: Wanted,
    pub rung: Rung,
    /// Bytes of the answer's body.
    pub length: u64,
    pub body: Body,
}

/// Where a shard is read from; the connection keeps it open.
struct ShardReader {
    conn: LocalConn,
    manifest: DescribedManifest,
    rank: Rank,
    ranges: Vec<ByteRange>,
    shard: Mutex<Arc<RestoredShard>>,
}

impl ShardReader {
    async fn open(
        conn: LocalConn,
        manifest: DescribedManifest,
        rank: Rank,
        ranges: Vec<ByteRange>,
    ) -> Result<Self, ApiFault> {
        let shard = open(&conn, &manifest, rank, ranges.clone(), None).await?;
        Ok(Self {
            conn,
            manifest,
            rank,
            ranges,
            shard: Mutex::new(Arc::new(shard)),
        })
    }

    /// Verified bytes; what is found damaged in this node's own RAM comes from elsewhere.
    async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, ApiFault> {
        let shard = self.shard.lock().await.clone();
        match read(shard, offset, length).await {
            Err(ApiFault::Shard(ClientError::Corrupt { .. })) => {}
            outcome => return outcome,
        }
        let ranges = self.ranges.clone();
        let without = Some(Rung::OwnRam);
        let shard = open(&self.conn, &self.manifest, self.rank, ranges, without).await?;
        let shard = Arc::new(shard);
        *self.shard.lock().await = shard.clone();
        read(shard, offset, length).await
    }

    async fn footer(&self) -> Result<Footer, ApiFault> {
        let length = self.shard.lock().await.length();
        let start = length.checked_sub(FOOTER_BYTES).ok_or(ApiFault::Foreign)?;
        let bytes = self.read(start, FOOTER_BYTES).await?;
        let bytes = bytes.try_into().map_err(|_| ApiFault::Foreign)?;
        Footer::decode(&bytes, length).ok_or(ApiFault::Foreign)
    }
}

async fn open(
    conn: &LocalConn,
    manifest: &DescribedManifest,
    rank: Rank,
    ranges: Vec<ByteRange>,
    without: Option<Rung>,
) -> Result<RestoredShard, ApiFault> {
    let opened = conn.open_shard(manifest.name(), rank, ranges, without, OPEN_WAIT);
    let opened = opened.await?;
    let shard = OpenedShard {
        slot: opened.slot.try_clone()?,
        length: opened.length,
        chunk: opened.chunk,
        leaves: opened.leaves,
        rung: opened.rung,
        fingerprints: opened.fingerprints,
    };
    Ok(RestoredShard::new(manifest.manifest(), rank, shard)?)
}

async fn read(shard: Arc<RestoredShard>, offset: u64, length: u64) -> Result<Vec<u8>, ApiFault> {
    let reading = spawn_blocking(move || {
        let mut bytes = vec![0; length as usize];
        shard.read_at(offset, &mut bytes).map(|()| bytes)
    });
    Ok(reading.await.map_err(|_| ApiFault::Ended)??)
}

/// A shard that was found and not opened yet.
struct Found {
    conn: LocalConn,
    manifest: DescribedManifest,
    /// Bytes, its footer included.
    length: u64,
}

fn no_shard(job: &HyperJob, rank: Rank, step: Step) -> ApiFault {
    ApiFault::NoShard {
        namespace: job.name.text.clone(),
        rank: rank.get(),
        step: step.get(),
    }
}

async fn find(jobs: &HyperJobs, job: &HyperJob, rank: Rank, step: Step) -> Result<Found, ApiFault> {
    let missing = || no_shard(job, rank, step);
    let record = jobs.known(job).await?;
    if record.is_deleted(step, rank) {
        return Err(missing());
    }
    let conn = jobs.connector.reader(&job.name.shards).await?;
    let plan = match conn.plan(Some(step), PLAN_WAIT).await {
        Err(fault) if fault.is_nothing_saved() => return Err(missing()),
        plan => plan?,
    };
    let manifest = match conn.manifest(plan.manifest).await {
        // A newer step took its place since it was planned.
        Err(fault) if fault.is_nothing_saved() => return Err(missing()),
        manifest => manifest?,
    };
    let length = manifest.manifest().shard(rank).map(|entry| entry.length);
    let length = length.filter(|_| plan.run >= record.since);
    let length = length.ok_or_else(missing)?;
    if manifest.schema()[..] != *SCHEMA || length < FOOTER_BYTES {
        return Err(ApiFault::Foreign);
    }
    Ok(Found {
        conn,
        manifest,
        length,
    })
}

/// Fails if there is no such shard.
pub async fn check_there(
    jobs: &HyperJobs,
    job: &HyperJob,
    rank: Rank,
    step: Step,
) -> Result<(), ApiFault> {
    find(jobs, job, rank, step).await.map(|_| ())
}

/// Opens a shard for sending. `range` is the request's header.
pub async fn load(
    jobs: &HyperJobs,
    job: &HyperJob,
    rank: Rank,
    step: Step,
    range: Option<&str>,
) -> Result<Outgoing, ApiFault> {
    let Found {
        conn,
        manifest,
        length,
    } = find(jobs, job, rank, step).await?;
    if rank.get() + 1 == manifest.manifest().world_size.get() {
        job.was_read();
    }
    let wanted = Wanted::parse(range, length - FOOTER_BYTES)?;
    let source = match ShardReader::open(conn, manifest, rank, ranges(wanted, length)).await {
        // A newer step took its place since it was found.
        Err(ApiFault::Daemon(fault)) if fault.is_nothing_saved() => {
            return Err(no_shard(job, rank, step));
        }
        source => source?,
    };
    outgoing(source, wanted).await
}

/// What must be in RAM for it.
fn ranges(wanted: Wanted, shard_length: u64) -> Vec<ByteRange> {
    match wanted {
        Wanted::All => Vec::new(),
        Wanted::Part { first, last } => vec![
            ByteRange {
                offset: first,
                length: last - first + 1,
            },
            ByteRange {
                offset: shard_length - FOOTER_BYTES,
                length: FOOTER_BYTES,
            },
        ],
    }
}

async fn outgoing(source: ShardReader, wanted: Wanted) -> Result<Outgoing, ApiFault> {
    let footer = source.footer().await?;
    let rung = source.shard.lock().await.rung();
    let (start, end) = match wanted {
        Wanted::All => (0, footer.length),
        Wanted::Part { first, last } => (first, last + 1),
    };
    let source = Arc::new(source);
    let pieces = (start..end).step_by(PIECE as usize).map(move |at| {
        let source = source.clone();
        async move { source.read(at, PIECE.min(end - at)).await.map(Bytes::from) }
    });
    let body = if start == end {
        Body::empty()
    } else {
        Body::from_stream(stream::iter(pieces).buffered(2))
    };
    Ok(Outgoing {
        footer,
        wanted,
        rung,
        length: end - start,
        body,
    })
}

/// The newest steps of which every shard is safe, newest first. While the only ones are on their way there, they are waited
/// for: that there is nothing would make trainers begin from scratch.
pub async fn latest(jobs: &HyperJobs, job: &HyperJob, limit: usize) -> Result<Vec<u64>, ApiFault> {
    let record = jobs.fresh(job).await?;
    job.was_read();
    let limit = limit.min(LISTED_MAX).min(record.steps_retained as usize);
    let conn = jobs.connector.reader(&job.name.shards).await?;
    let until = Instant::now() + SAFE_WAIT;
    loop {
        let newest = match conn.plan(None, PLAN_WAIT).await {
            Err(fault) if fault.is_nothing_saved() => return Ok(Vec::new()),
            plan => plan?,
        };
        let older = older(jobs, &job.name, &record, &newest).await?;
        let mut steps = Vec::new();
        if is_offered(jobs, &record, newest.run, newest.step, newest.state) {
            steps.push(newest.step.get());
        }
        add_readable(&mut steps, &conn, &older, limit).await?;
        let may_come = newest.run >= record.since
            && !record.has_deleted(newest.step)
            && newest.state < jobs.settings.offered;
        if !steps.is_empty() || !may_come {
            return Ok(steps);
        }
        if Instant::now() > until {
            let step = newest.step.get();
            return Err(ApiFault::NotSafeYet { step });
        }
        sleep(SAFE_POLL).await;
    }
}

/// Adds those that can be read, until there are as many steps as are asked for.
async fn add_readable(
    steps: &mut Vec<u64>,
    conn: &LocalConn,
    older: &[CheckpointInfo],
    limit: usize,
) -> Result<(), CallFault> {
    for older in older {
        if steps.len() >= limit {
            break;
        }
        if can_be_read(conn, older).await? {
            steps.push(older.step.get());
        }
    }
    steps.truncate(limit);
    Ok(())
}

fn is_offered(
    jobs: &HyperJobs,
    record: &JobRecord,
    run: RunId,
    step: Step,
    state: CheckpointState,
) -> bool {
    let is_safe = state >= jobs.settings.offered && state != CheckpointState::Retired;
    is_safe && run >= record.since && !record.has_deleted(step)
}

/// Others that this node knows to be safe, newest first. Clients take the highest step: one above the newest belongs to a
/// past that the job has gone back from.
async fn older(
    jobs: &HyperJobs,
    name: &HyperName,
    record: &JobRecord,
    newest: &RestorePlan,
) -> Result<Vec<CheckpointInfo>, CallFault> {
    let anybody = jobs.connector.anonymous();
    let mut infos = match anybody.list(Some(name.shards.clone())).await {
        Err(fault) if fault.is_nothing_saved() => Vec::new(),
        infos => infos?,
    };
    infos.retain(|info| {
        let is_older = (info.run, info.step) < (newest.run, newest.step);
        let state = if info.durable {
            CheckpointState::Durable
        } else {
            info.state
        };
        is_older
            && info.step < newest.step
            && info.kept_for.is_none()
            && is_offered(jobs, record, info.run, info.step, state)
    });
    infos.sort_by_key(|info| std::cmp::Reverse(info.step));
    infos.dedup_by_key(|info| info.step);
    Ok(infos)
}

async fn can_be_read(conn: &LocalConn, info: &CheckpointInfo) -> Result<bool, CallFault> {
    match conn.plan(Some(info.step), PLAN_WAIT).await {
        Ok(plan) => Ok(plan.run == info.run),
        Err(CallFault::Refused(_)) => Ok(false),
        Err(fault) => Err(fault),
    }
}
