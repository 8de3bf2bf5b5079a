//! Steps that a newer one has made needless, as many as the namespace asks for, on a node without peers. The core keeps a
//! shard as long as somebody on this node has it open: so this has them open. They give way as soon as RAM is needed for
//! anything else. Where there are peers, a step that is kept in this way could be read only on the nodes of its shards.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use storaged_wire::local::Rung;
use storaged_wire::{CheckpointState, Rank, RunId, Step};

use super::jobs::{HyperJob, HyperJobs};
use super::local::{CallFault, LocalConn};

/// A step that has not committed by then never does.
const COMMIT_WAIT: Duration = Duration::from_secs(130);
/// What is in this node's RAM is opened at once.
const OPEN_WAIT: Duration = Duration::from_secs(5);
/// While more of the budget is used, in percent, nothing needless is kept: what the newest step needs comes first.
const USED_MAX_PERCENT: u64 = 60;

/// A rank's shard of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedShard {
    pub run: RunId,
    pub step: Step,
    pub rank: Rank,
}

/// Shards of one namespace that are kept open, by rank, the oldest first.
#[derive(Debug, Default)]
pub struct Retained {
    open: Mutex<BTreeMap<Rank, VecDeque<OpenShard>>>,
}

/// The connection keeps it open.
#[derive(Debug)]
struct OpenShard {
    shard: SavedShard,
    _conn: LocalConn,
}

impl Retained {
    fn open(&self) -> MutexGuard<'_, BTreeMap<Rank, VecDeque<OpenShard>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, shard: SavedShard, conn: LocalConn, most: usize) {
        let mut open = self.open();
        let its = open.entry(shard.rank).or_default();
        its.retain(|open| open.shard != shard);
        its.push_back(OpenShard { shard, _conn: conn });
        while its.len() > most {
            its.pop_front();
        }
    }

    /// Lets all of them go.
    pub fn clear(&self) {
        self.open().clear();
    }

    pub fn is_empty(&self) -> bool {
        self.open().is_empty()
    }
}

/// Keeps a shard that was just sealed, once its step has committed.
pub fn retain(jobs: &Arc<HyperJobs>, job: &Arc<HyperJob>, shard: SavedShard, steps: u32) {
    if steps < 2 || jobs.settings.has_peers {
        return;
    }
    let (jobs, job) = (jobs.clone(), job.clone());
    tokio::spawn(async move {
        match opened(&jobs, &job, shard).await {
            Ok(Some(conn)) => job.retained.push(shard, conn, steps as usize),
            Ok(None) => {}
            Err(error) => {
                let (namespace, step) = (&job.name.text, shard.step.get());
                tracing::debug!(namespace, step, %error, "a step is not kept beyond the next");
            }
        }
    });
}

async fn opened(
    jobs: &HyperJobs,
    job: &HyperJob,
    shard: SavedShard,
) -> Result<Option<LocalConn>, CallFault> {
    let conn = jobs.connector.reader(&job.name.shards).await?;
    let committed = CheckpointState::Committed;
    let reached = conn.wait(shard.run, shard.step, committed, COMMIT_WAIT);
    let (_, manifest) = reached.await?;
    let Some(manifest) = manifest.filter(|_| !jobs.is_short_of_memory()) else {
        return Ok(None);
    };
    let opened = conn.open_shard(manifest, shard.rank, Vec::new(), None, OPEN_WAIT);
    Ok((opened.await?.rung == Rung::OwnRam).then_some(conn))
}

/// Whether the newest steps may soon need what the needless ones take.
pub fn is_short(used: u64, budget: u64) -> bool {
    used.saturating_mul(100) > budget.saturating_mul(USED_MAX_PERCENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_when_more_than_three_fifths_are_used() {
        assert!(!is_short(60, 100) && is_short(61, 100));
        assert!(is_short(1, 0) && !is_short(0, 0));
    }
}
