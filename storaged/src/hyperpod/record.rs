//! The record of a namespace: what every node must know of it. It is the description of a checkpoint of one rank and one
//! byte in a namespace beside, so it is coded, survives nodes and is found from every node as checkpoints are. The newest
//! one counts.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use storaged_wire::local::DurableWish;
use storaged_wire::{CheckpointState, Rank, RefusalCode, RunId, Step, WorldSize};

use super::Settings;
use super::fault::ApiFault;
use super::local::{CallFault, Connector, LocalConn};
use super::names::HyperName;

/// A record is read within this time: it asks all nodes.
const READ_WAIT: Duration = Duration::from_secs(10);
/// Opening a run takes a majority, or the durable tier.
const OPEN_WAIT: Duration = Duration::from_secs(15);
/// A record is as safe as it can be after so long, or as safe as it is.
const KEEP_WAIT: Duration = Duration::from_secs(5);
/// Shards that somebody has deleted, the last so many.
const DELETED_MAX: usize = 256;
/// What this release writes.
const VERSION: u32 = 1;

/// What is known of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    hyperpod_record: u32,
    num_ranks: u32,
    pub steps_retained: u32,
    /// The run that saves now.
    #[serde(with = "run_text")]
    pub run: RunId,
    /// The run that it was created with: what is older belongs to a namespace of this name that was deleted.
    #[serde(with = "run_text")]
    pub since: RunId,
    /// Steps and ranks of shards that were deleted.
    deleted: BTreeSet<(u64, u32)>,
    /// Whether the namespace was deleted.
    pub gone: bool,
}

mod run_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use storaged_wire::RunId;

    pub fn serialize<S: Serializer>(run: &RunId, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(run)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<RunId, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl JobRecord {
    pub fn new(num_ranks: WorldSize, steps_retained: u32, run: RunId) -> Self {
        Self {
            hyperpod_record: VERSION,
            num_ranks: num_ranks.get(),
            steps_retained,
            run,
            since: run,
            deleted: BTreeSet::new(),
            gone: false,
        }
    }

    pub fn world(&self) -> WorldSize {
        WorldSize::new(self.num_ranks).expect("a record was parsed or made with a world size")
    }

    /// The rank that is saved last, of the metadata, and commits the step.
    pub fn last_rank(&self) -> Rank {
        Rank::new(self.num_ranks - 1)
    }

    pub fn is_deleted(&self, step: Step, rank: Rank) -> bool {
        self.deleted.contains(&(step.get(), rank.get()))
    }

    /// Whether a shard of the step was deleted, so that it is whole no more.
    pub fn has_deleted(&self, step: Step) -> bool {
        self.deleted.iter().any(|(of, _)| *of == step.get())
    }

    pub fn delete(&mut self, step: Step, rank: Rank) {
        self.deleted.insert((step.get(), rank.get()));
        while self.deleted.len() > DELETED_MAX {
            self.deleted.pop_first();
        }
    }

    /// A step that is saved anew is there again.
    pub fn revive(&mut self, step: Step) -> bool {
        let before = self.deleted.len();
        self.deleted.retain(|(of, _)| *of != step.get());
        before != self.deleted.len()
    }

    fn parse(schema: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(schema).ok()?;
        WorldSize::new(record.num_ranks).ok()?;
        (record.hyperpod_record == VERSION).then_some(record)
    }
}

/// A record, and the run of the record's own namespace that it was saved in.
pub struct FoundRecord {
    pub record: JobRecord,
    run: RunId,
}

/// Reads the record; none if the namespace was never created, and if it was deleted.
pub async fn read(
    connector: &Connector,
    name: &HyperName,
) -> Result<Option<FoundRecord>, ApiFault> {
    let found = read_any(connector, name).await?;
    Ok(found.filter(|found| !found.record.gone))
}

/// Also that of a namespace that was deleted.
async fn read_any(
    connector: &Connector,
    name: &HyperName,
) -> Result<Option<FoundRecord>, CallFault> {
    let reader = connector.reader(&name.record).await?;
    let plan = match reader.plan(None, READ_WAIT).await {
        Err(fault) if fault.is_nothing_saved() => return Ok(None),
        plan => plan?,
    };
    let manifest = reader.manifest(plan.manifest).await?;
    let record = JobRecord::parse(manifest.schema());
    let run = plan.run;
    Ok(record.map(|record| FoundRecord { record, run }))
}

impl FoundRecord {
    /// The anchor there is if it is of this run, else one that holds the record only.
    pub async fn anchored(
        &self,
        connector: &Connector,
        name: &HyperName,
        anchor: Option<Anchor>,
    ) -> Option<Anchor> {
        match anchor.filter(|anchor| anchor.run == self.run) {
            Some(anchor) => Some(anchor),
            None => Anchor::attach(connector, name, self.run).await.ok(),
        }
    }
}

/// A connection as a trainer that saves the record: as long as some node has one, the record is not taken for that of a
/// job that has ended.
#[derive(Debug)]
pub struct Anchor {
    trainer: LocalConn,
    run: RunId,
    /// The next step, if this node opened the run: two nodes never save in one.
    next: Option<Step>,
}

/// Opens a run of the namespace's checkpoints.
pub async fn open_run(connector: &Connector, name: &HyperName) -> Result<RunId, CallFault> {
    connector
        .reader(&name.shards)
        .await?
        .open_run(OPEN_WAIT)
        .await
}

/// Saves a record as the newest; gives back what keeps it.
pub async fn write(
    connector: &Connector,
    settings: &Settings,
    name: &HyperName,
    anchor: Option<Anchor>,
    record: &JobRecord,
) -> Result<Anchor, CallFault> {
    if let Some(mut anchor) = anchor.filter(|anchor| anchor.next.is_some()) {
        match anchor.save(connector, settings, name, record).await {
            Err(fault) if is_fenced(&fault) => {}
            saved => return saved.map(|()| anchor),
        }
    }
    let mut anchor = Anchor::open(connector, name).await?;
    anchor.save(connector, settings, name, record).await?;
    Ok(anchor)
}

/// Whether a newer run was opened, here or on another node.
pub fn is_fenced(fault: &CallFault) -> bool {
    let fenced = [
        RefusalCode::OlderRun,
        RefusalCode::UnknownRun,
        RefusalCode::NotAttached,
        RefusalCode::WorldSize,
    ];
    fault.code().is_some_and(|code| fenced.contains(&code))
}

impl Anchor {
    async fn open(connector: &Connector, name: &HyperName) -> Result<Self, CallFault> {
        let run = connector
            .reader(&name.record)
            .await?
            .open_run(OPEN_WAIT)
            .await?;
        let attached = Self::attach(connector, name, run).await?;
        Ok(Self {
            next: Some(Step::new(1)),
            ..attached
        })
    }

    async fn attach(
        connector: &Connector,
        name: &HyperName,
        run: RunId,
    ) -> Result<Self, CallFault> {
        let world = WorldSize::new(1).expect("one rank is a world");
        let trainer = connector.trainer(&name.record, run, Rank::new(0), world);
        Ok(Self {
            trainer: trainer.await?,
            run,
            next: None,
        })
    }

    async fn save(
        &mut self,
        connector: &Connector,
        settings: &Settings,
        name: &HyperName,
        record: &JobRecord,
    ) -> Result<(), CallFault> {
        let step = self.next.unwrap_or(Step::new(1));
        self.next = Some(Step::new(step.get() + 1));
        let (slot, _) = self.trainer.acquire(1, OPEN_WAIT).await?;
        self.trainer.seal(slot, step, 1).await?;
        let schema = serde_json::to_vec(record).unwrap_or_default();
        self.trainer.commit(step, schema, settings.wish()).await?;
        let reader = connector.reader(&name.record).await?;
        let committed = CheckpointState::Committed;
        reader.wait(self.run, step, committed, OPEN_WAIT).await?;
        // Without all nodes it is less safe, and there all the same.
        let _ = reader.wait(self.run, step, settings.safe, KEEP_WAIT).await;
        Ok(())
    }
}

impl Settings {
    /// A record must outlive what it describes.
    fn wish(&self) -> DurableWish {
        if self.has_tier {
            DurableWish::Required
        } else {
            DurableWish::Policy
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_and_a_strange_one_is_none() {
        let run = RunId::with_identity(7, 9);
        let mut record = JobRecord::new(WorldSize::new(3).unwrap(), 2, run);
        record.delete(Step::new(5), Rank::new(1));
        let bytes = serde_json::to_vec(&record).unwrap();
        assert_eq!(JobRecord::parse(&bytes), Some(record.clone()));
        assert!(record.has_deleted(Step::new(5)) && record.revive(Step::new(5)));
        assert!(!record.has_deleted(Step::new(5)) && !record.revive(Step::new(5)));
        let text = String::from_utf8(bytes).unwrap();
        for strange in [
            String::new(),
            text.replace("\"num_ranks\":3", "\"num_ranks\":0"),
            text.replace("\"hyperpod_record\":1", "\"hyperpod_record\":2"),
            text.replace("7-", "x-"),
        ] {
            assert_eq!(JobRecord::parse(strange.as_bytes()), None, "{strange}");
        }
    }
}
