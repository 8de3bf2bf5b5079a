//! What this node knows of the namespaces that are used through it: the record, the connections of the ranks that save
//! here, and when a new run must begin.
//!
//! Clients do not say when trainers have been started anew. A save begins with the question for the namespace, from one
//! rank and before any other rank saves. It begins in the run of the last save only if this node has seen that one commit
//! and nobody has read a checkpoint since; else a new run is opened, so that shards that a dead incarnation has left
//! can never become part of a checkpoint of the new one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use storaged_wire::{Rank, RunId, Step};
use tokio::time::{sleep, timeout};

use super::Settings;
use super::fault::ApiFault;
use super::local::{Connector, LocalConn};
use super::names::{Checksum, Creation, HyperName};
use super::record::{self, Anchor, JobRecord};
use super::retain::{Retained, is_short};
use crate::http::OpsState;

/// While shards come in, or so long after, a question for the namespace is somebody's who looks on: trainers that are
/// started anew take longer.
const SAVING: Duration = Duration::from_secs(5);
/// A rank that saves nothing for so long, and a namespace that nobody uses, are let go; `memory.idle_job` counts from then.
const IDLE: Duration = Duration::from_secs(1800);
/// And one that was asked for and is not there, for so long.
const UNKNOWN: Duration = Duration::from_secs(60);
/// Who opened a newer run records it within this time, unless it has died.
const RECORDED_WITHIN: Duration = Duration::from_secs(3);
/// A record that was read so long ago is still believed.
const KNOWN_FOR: Duration = Duration::from_secs(10);
/// A namespace is dropped from RAM within this time.
const DROP_WAIT: Duration = Duration::from_secs(15);
/// How long a request waits for another one of the same rank.
const RANK_WAIT: Duration = Duration::from_secs(30);

/// All of them.
#[derive(Debug)]
pub struct HyperJobs {
    pub connector: Connector,
    pub settings: Settings,
    ops: Arc<OpsState>,
    table: Mutex<BTreeMap<String, Arc<HyperJob>>>,
}

/// One namespace.
#[derive(Debug)]
pub struct HyperJob {
    pub name: HyperName,
    memo: tokio::sync::Mutex<Memo>,
    saving: Mutex<Saving>,
    pub retained: Retained,
    ranks: Mutex<BTreeMap<Rank, Arc<tokio::sync::Mutex<RankSession>>>>,
}

#[derive(Debug, Default)]
struct Memo {
    record: Option<JobRecord>,
    /// When it was read, or could not be.
    read_at: Option<Instant>,
    anchor: Option<Anchor>,
}

/// How the save stands that began here last.
#[derive(Debug)]
struct Saving {
    /// The run that it began in.
    run: Option<RunId>,
    /// When it began, or its last shard came.
    active: Instant,
    /// Shards that are coming.
    coming: usize,
    has_committed: bool,
    was_read: bool,
}

/// A shard that is coming to a namespace.
#[derive(Debug)]
pub struct ShardComes<'a>(&'a HyperJob);

impl Drop for ShardComes<'_> {
    fn drop(&mut self) {
        let mut saving = self.0.saving();
        saving.coming -= 1;
        saving.active = Instant::now();
    }
}

/// One rank that saves through this node.
#[derive(Debug, Default)]
pub struct RankSession {
    trainer: Option<(RunId, LocalConn)>,
    /// What it sealed last, of that run.
    pub last: Option<SealedBody>,
    used: Option<Instant>,
}

/// A body that was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedBody {
    pub step: Step,
    pub length: u64,
    pub checksum: Checksum,
}

impl RankSession {
    /// The connection of this run; none if there is another one or none.
    pub fn of_run(&self, run: RunId) -> Option<&LocalConn> {
        let (of, trainer) = self.trainer.as_ref()?;
        (*of == run).then_some(trainer)
    }

    /// What was sealed last is not known, so that the next shard opens a new run.
    pub fn forget_what_was_last(&mut self) {
        self.last = Some(SealedBody {
            step: Step::new(u64::MAX),
            length: 0,
            checksum: Checksum(0),
        });
    }

    pub fn begin(&mut self, run: RunId, trainer: LocalConn) {
        self.trainer = Some((run, trainer));
        self.last = None;
    }
}

impl Saving {
    fn new() -> Self {
        Self {
            run: None,
            active: Instant::now(),
            coming: 0,
            has_committed: false,
            was_read: false,
        }
    }

    /// Whether the next save may go on in `run`.
    fn goes_on(&self, run: RunId, now: Instant) -> bool {
        let is_under_way = self.coming > 0 || now.duration_since(self.active) < SAVING;
        self.run == Some(run) && !self.was_read && (self.has_committed || is_under_way)
    }
}

impl HyperJob {
    fn new(name: HyperName) -> Self {
        Self {
            name,
            memo: tokio::sync::Mutex::default(),
            saving: Mutex::new(Saving::new()),
            retained: Retained::default(),
            ranks: Mutex::default(),
        }
    }

    fn saving(&self) -> MutexGuard<'_, Saving> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A shard is coming, until what this gives is dropped.
    pub fn shard_comes(&self) -> ShardComes<'_> {
        self.saving().coming += 1;
        ShardComes(self)
    }

    /// A save begins here in `run`.
    fn save_begins(&self, run: RunId) {
        let mut saving = self.saving();
        *saving = Saving {
            run: Some(run),
            coming: saving.coming,
            ..Saving::new()
        };
    }

    /// A step of `run` has committed.
    pub fn has_committed(&self, run: RunId) {
        let mut saving = self.saving();
        if saving.run == Some(run) {
            saving.has_committed = true;
        }
    }

    /// Somebody has asked for the newest step, or for a step's metadata.
    pub fn was_read(&self) {
        self.saving().was_read = true;
    }

    /// The session of a rank, for one request at a time.
    pub async fn rank(
        &self,
        rank: Rank,
    ) -> Result<tokio::sync::OwnedMutexGuard<RankSession>, ApiFault> {
        let session = self.sessions().entry(rank).or_default().clone();
        let guard = timeout(RANK_WAIT, session.lock_owned()).await;
        let mut guard = guard.map_err(|_| ApiFault::RankBusy {
            namespace: self.name.text.clone(),
            rank: rank.get(),
        })?;
        guard.used = Some(Instant::now());
        Ok(guard)
    }

    fn sessions(&self) -> MutexGuard<'_, BTreeMap<Rank, Arc<tokio::sync::Mutex<RankSession>>>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets ranks go that have saved nothing for long; whether there is anything left.
    fn tidy(&self, now: Instant) -> bool {
        if now.duration_since(self.saving().active) > IDLE {
            self.retained.clear();
        }
        self.sessions().retain(|_, session| {
            let Ok(session) = session.try_lock() else {
                return true;
            };
            session
                .used
                .is_none_or(|used| now.duration_since(used) < IDLE)
        });
        let is_known = (self.memo.try_lock()).is_ok_and(|memo| memo.record.is_some());
        let kept_for = if is_known { IDLE } else { UNKNOWN };
        !self.sessions().is_empty() || now.duration_since(self.saving().active) < kept_for
    }
}

impl HyperJobs {
    pub fn new(connector: Connector, settings: Settings, ops: Arc<OpsState>) -> Self {
        Self {
            connector,
            settings,
            ops,
            table: Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Arc<HyperJob>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this node knows of a namespace; it may not exist.
    pub fn job(&self, name: HyperName) -> Arc<HyperJob> {
        let mut table = self.table();
        let job = table.entry(name.text.clone());
        job.or_insert_with(|| Arc::new(HyperJob::new(name))).clone()
    }

    /// Forgets what is of no use any more, and lets needless steps go where memory is short.
    pub fn tidy(&self) {
        let now = Instant::now();
        let is_short = self.is_short_of_memory();
        self.table().retain(|_, job| {
            if is_short && !job.retained.is_empty() {
                tracing::info!(
                    namespace = job.name.text,
                    "older steps give way: memory is short"
                );
                job.retained.clear();
            }
            job.tidy(now)
        });
    }

    pub fn is_short_of_memory(&self) -> bool {
        is_short(self.ops.metrics.memory_used(), self.settings.budget)
    }

    fn unknown(job: &HyperJob) -> ApiFault {
        ApiFault::NoNamespace(job.name.text.clone())
    }

    /// The record as it was not long ago.
    pub async fn known(&self, job: &HyperJob) -> Result<JobRecord, ApiFault> {
        self.read_within(job, KNOWN_FOR).await
    }

    /// The record as it is now.
    pub async fn fresh(&self, job: &HyperJob) -> Result<JobRecord, ApiFault> {
        self.read_within(job, Duration::ZERO).await
    }

    /// The record as it was read within `age`. While it cannot be read, because nodes are away, the last one counts.
    async fn read_within(&self, job: &HyperJob, age: Duration) -> Result<JobRecord, ApiFault> {
        let mut memo = job.memo.lock().await;
        let known = memo.record.clone();
        let is_recent = memo.read_at.is_some_and(|at| at.elapsed() < age);
        if let Some(record) = known.clone().filter(|_| is_recent) {
            return Ok(record);
        }
        let read = self.refresh(job, &mut memo).await;
        memo.read_at = Some(Instant::now());
        match (read, known) {
            (Err(ApiFault::Daemon(_)), Some(known)) => Ok(known),
            (read, _) => read,
        }
    }

    async fn refresh(&self, job: &HyperJob, memo: &mut Memo) -> Result<JobRecord, ApiFault> {
        let found = record::read(&self.connector, &job.name).await?;
        memo.record = found.as_ref().map(|found| found.record.clone());
        memo.read_at = Some(Instant::now());
        match found {
            Some(found) => {
                memo.anchor = found
                    .anchored(&self.connector, &job.name, memo.anchor.take())
                    .await;
                Ok(found.record)
            }
            None => Err(Self::unknown(job)),
        }
    }

    pub async fn create(&self, job: &HyperJob, creation: Creation) -> Result<(), ApiFault> {
        let mut memo = job.memo.lock().await;
        if self.refresh(job, &mut memo).await.is_ok() {
            return Err(ApiFault::NamespaceExists(job.name.text.clone()));
        }
        let run = record::open_run(&self.connector, &job.name).await?;
        let record = JobRecord::new(creation.num_ranks, creation.steps_retained, run);
        self.write(job, &mut memo, record).await?;
        job.save_begins(run);
        Ok(())
    }

    async fn write(
        &self,
        job: &HyperJob,
        memo: &mut Memo,
        record: JobRecord,
    ) -> Result<(), ApiFault> {
        let anchor = memo.anchor.take();
        let written = record::write(&self.connector, &self.settings, &job.name, anchor, &record);
        memo.anchor = Some(written.await?);
        memo.record = Some(record);
        Ok(())
    }

    /// A save begins: gives the record, with the run that it saves in.
    pub async fn begin(&self, job: &HyperJob) -> Result<JobRecord, ApiFault> {
        let mut memo = job.memo.lock().await;
        let mut record = self.refresh(job, &mut memo).await?;
        if !job.saving().goes_on(record.run, Instant::now()) {
            record.run = record::open_run(&self.connector, &job.name).await?;
            self.write(job, &mut memo, record.clone()).await?;
        }
        job.save_begins(record.run);
        Ok(record)
    }

    /// `stale` was found to be of the past, or must be: gives the record with a newer run, opened here if nobody else has
    /// recorded one.
    pub async fn newer(
        &self,
        job: &HyperJob,
        stale: RunId,
        when: Newer,
    ) -> Result<JobRecord, ApiFault> {
        let mut memo = job.memo.lock().await;
        let until = Instant::now() + RECORDED_WITHIN;
        loop {
            let record = self.refresh(job, &mut memo).await?;
            if record.run > stale {
                return Ok(record);
            }
            if when == Newer::Now || Instant::now() > until {
                break;
            }
            sleep(Duration::from_millis(200)).await;
        }
        let mut record = self.refresh(job, &mut memo).await?;
        record.run = record::open_run(&self.connector, &job.name).await?;
        self.write(job, &mut memo, record.clone()).await?;
        Ok(record)
    }

    /// Changes the record, if there is anything to change.
    pub async fn change(
        &self,
        job: &HyperJob,
        change: impl FnOnce(&mut JobRecord) -> bool,
    ) -> Result<(), ApiFault> {
        let mut memo = job.memo.lock().await;
        let mut record = self.refresh(job, &mut memo).await?;
        if change(&mut record) {
            self.write(job, &mut memo, record).await
        } else {
            Ok(())
        }
    }

    /// Deletes the namespace: from RAM of all nodes. What is in the durable tier stays there, and is not seen any more.
    pub async fn delete(&self, job: &HyperJob) -> Result<(), ApiFault> {
        self.change(job, |record| {
            record.gone = true;
            true
        })
        .await?;
        job.sessions().clear();
        job.retained.clear();
        let mut memo = job.memo.lock().await;
        *memo = Memo::default();
        let reader = self.connector.reader(&job.name.shards).await?;
        match reader.drop_job(DROP_WAIT).await {
            Err(fault) if fault.is_nothing_saved() => Ok(()),
            dropped => Ok(dropped?),
        }
    }

    /// All namespaces of which this node knows.
    pub async fn all(&self) -> Result<Vec<Arc<HyperJob>>, ApiFault> {
        let infos = self.connector.anonymous().list(None).await?;
        let names = infos.iter().map(|info| &info.namespace);
        let mut names: Vec<HyperName> = names.filter_map(HyperName::of_record).collect();
        names.dedup();
        Ok(names.into_iter().map(|name| self.job(name)).collect())
    }
}

/// When a newer run is opened if there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Newer {
    /// At once: a rank goes back to a step that it has saved.
    Now,
    /// If nobody records one in time: somebody has opened one.
    WhenNobodyHas,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_goes_on_in_a_run_only_after_one_that_committed_here() {
        let (run, other) = (RunId::new(1), RunId::new(2));
        let mut saving = Saving::new();
        let begin = saving.active;
        let later = begin + SAVING;
        assert!(!saving.goes_on(run, begin), "nothing began here");
        saving.run = Some(run);
        assert!(saving.goes_on(run, begin), "somebody looks on");
        assert!(!saving.goes_on(run, later), "it was left unfinished");
        saving.coming = 1;
        assert!(saving.goes_on(run, later), "it is going on");
        saving.coming = 0;
        saving.has_committed = true;
        assert!(saving.goes_on(run, later));
        assert!(!saving.goes_on(other, later), "another node opened one");
        saving.was_read = true;
        assert!(!saving.goes_on(run, begin), "trainers were started anew");
    }
}
