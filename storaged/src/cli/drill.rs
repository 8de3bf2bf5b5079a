//! `storaged verify --drill`: chunks of a protected checkpoint are decoded as if nodes were lost, m of a group at a time, and compared
//! with their digests, which the manifest's roots prove. It goes the way of a restart, session by session, into RAM that is given back;
//! nothing that is held changes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use clap::Args;
use rand::Rng;
use rand::seq::IteratorRandom;
use serde_json::{Value, json};
use storaged_plan::LaneBlocks;
use storaged_sdk::wire::local::{ByteRange, Rung};
use storaged_sdk::wire::peer::Lane;
use storaged_sdk::wire::plan::RestorePlan;
use storaged_sdk::wire::{
    CheckpointState, ManifestBytes, NodeName, Rank, RefusalCode, ShardEntry, Step,
};
use storaged_sdk::{Client, ClientError};

use super::inspect::passed_over_json;
use super::{CliError, print, size};

#[derive(Debug, Args)]
pub struct DrillArgs {
    /// Decode a sample of chunks as if nodes were lost, instead of reading everything where it lies
    #[arg(long)]
    pub drill: bool,
    /// With --drill: chunks of each shard
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024), requires = "drill")]
    sample: u32,
    /// With --drill: lanes (of the stripes of a group), drawn by chance where there are more
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..), requires = "drill")]
    lanes: u32,
    /// With --drill: sets of m lost nodes per lane, drawn by chance where there are more
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..), requires = "drill")]
    subsets: u32,
}

/// A step that a newer one has replaced is gone from all nodes so soon.
const LETS_GO_WITHIN: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// So many steps are begun with, each replaced by a newer one while it is drilled.
const STEPS_MAX: usize = 10;

/// A decode that did not give the bytes.
#[derive(Debug)]
struct Failure {
    rank: Rank,
    /// Nodes that were taken for lost.
    lost: Vec<NodeName>,
    reason: String,
}

/// What a lane's drill came to.
#[derive(Debug)]
struct LaneReport {
    lane: Lane,
    /// Sets of m blocks that there are, and those that were tried.
    subsets: u64,
    tried: u64,
}

/// What a drill came to.
#[derive(Debug)]
pub(super) struct DrillReport {
    plan: RestorePlan,
    lanes_all: usize,
    lanes: Vec<LaneReport>,
    decodes: usize,
    bytes: u64,
    failures: Vec<Failure>,
}

/// Drills the newest protected step, or the one that is asked for. A step that newer ones replace meanwhile says nothing any more: the
/// newest is taken instead.
///
/// # Errors
/// [`CliError`] if there is nothing to drill, or the daemon does not answer.
pub(super) fn drill(
    client: &mut Client,
    args: &DrillArgs,
    step: Option<Step>,
    timeout_ms: u32,
) -> Result<DrillReport, CliError> {
    for _ in 0..STEPS_MAX {
        let plan = client.plan_drill(step, timeout_ms)?;
        let mut drilling = Drilling {
            client,
            args,
            step,
            timeout_ms,
            report: DrillReport::of(plan),
        };
        if drilling.all()? == Course::Ended {
            return Ok(drilling.report);
        }
    }
    Err(CliError::DrillOvertaken { steps: STEPS_MAX })
}

/// How far a drill came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    Ended,
    /// A newer step has replaced the one that was drilled.
    Overtaken,
}

/// A drill of one step.
struct Drilling<'a> {
    client: &'a mut Client,
    args: &'a DrillArgs,
    /// The one that was asked for.
    step: Option<Step>,
    timeout_ms: u32,
    report: DrillReport,
}

impl Drilling<'_> {
    fn all(&mut self) -> Result<Course, CliError> {
        let manifest = match self.client.manifest(self.report.plan.manifest) {
            Err(error) if is_gone(&error) && self.step.is_none() => return Ok(Course::Overtaken),
            found => found?,
        };
        let ranks: BTreeSet<Rank> = self.report.plan.shards.iter().map(|it| it.rank).collect();
        let lanes = LaneBlocks::all(&manifest);
        self.report.lanes_all = lanes.len();
        let some = (lanes.iter())
            .filter(|(_, blocks)| {
                blocks
                    .data
                    .iter()
                    .flatten()
                    .any(|it| ranks.contains(&it.rank))
            })
            .choose_multiple(&mut rand::rng(), self.args.lanes as usize);
        for (lane, blocks) in some {
            if self.lane(&manifest, *lane, blocks)? == Course::Overtaken {
                return Ok(Course::Overtaken);
            }
        }
        Ok(Course::Ended)
    }

    fn lane(
        &mut self,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
    ) -> Result<Course, CliError> {
        let m = manifest.manifest().geometry.m();
        let subsets = subsets(blocks.blocks(), m, u64::from(self.args.subsets));
        self.report.lanes.push(LaneReport {
            lane,
            subsets: choose(blocks.blocks() as u64, m as u64),
            tried: subsets.len() as u64,
        });
        for subset in subsets {
            if self.without(manifest, blocks, &subset)? == Course::Overtaken {
                return Ok(Course::Overtaken);
            }
        }
        Ok(Course::Ended)
    }

    /// Decodes what these blocks of a lane hold of data from the others.
    fn without(
        &mut self,
        manifest: &ManifestBytes,
        blocks: &LaneBlocks,
        subset: &BTreeSet<usize>,
    ) -> Result<Course, CliError> {
        let nodes = subset.iter().filter_map(|it| blocks.node(*it));
        let lost: Vec<NodeName> = nodes.cloned().collect();
        let shards = (subset.iter()).filter_map(|it| blocks.data.get(*it)?.as_ref());
        for shard in shards {
            let ranges = sample(manifest, shard, self.args.sample as usize);
            let (client, timeout_ms) = (&mut *self.client, self.timeout_ms);
            match decode(client, manifest, shard.rank, ranges, timeout_ms, &lost) {
                Ok(bytes) => self.report.bytes += bytes,
                Err(DecodeError::Client(error)) if !may_go_on(&error) => return Err(error.into()),
                Err(_) if self.is_overtaken()? => return Ok(Course::Overtaken),
                Err(error) => self.report.failures.push(Failure {
                    rank: shard.rank,
                    lost: lost.clone(),
                    reason: error.to_string(),
                }),
            }
            self.report.decodes += 1;
        }
        Ok(Course::Ended)
    }

    /// Whether the step was let go for a newer one: what could not be decoded is no fault then.
    fn is_overtaken(&mut self) -> Result<bool, CliError> {
        // Nodes let go of it one after the other. After the first failure it is known to stay.
        let until = Instant::now() + LETS_GO_WITHIN;
        while self.is_as_it_was()? {
            // The failure is its own, however many steps have come since.
            if !self.report.failures.is_empty() || Instant::now() >= until {
                return Ok(false);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        match self.client.plan_drill(self.step, self.timeout_ms) {
            Ok(now) => Ok(now.manifest != self.report.plan.manifest),
            Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::TooManyLost => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn is_as_it_was(&mut self) -> Result<bool, CliError> {
        let was = &self.report.plan;
        match self.client.plan_drill(Some(was.step), self.timeout_ms) {
            Ok(now) => Ok(now.manifest == was.manifest && now.shards.len() == was.shards.len()),
            Err(ClientError::Refused(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether nobody has the checkpoint any more.
fn is_gone(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused(refusal) if refusal.code == RefusalCode::NoCheckpoint)
}

impl DrillReport {
    fn of(plan: RestorePlan) -> Self {
        Self {
            plan,
            lanes_all: 0,
            lanes: Vec::new(),
            decodes: 0,
            bytes: 0,
            failures: Vec::new(),
        }
    }

    fn is_protected(&self) -> bool {
        self.plan.state >= CheckpointState::Protected
    }

    fn subsets(&self) -> (u64, u64) {
        let lanes = self.lanes.iter();
        lanes.fold((0, 0), |(all, tried), lane| {
            (all + lane.subsets, tried + lane.tried)
        })
    }

    fn json(&self) -> Value {
        let lane = |one: &LaneReport| {
            json!({
                "group": one.lane.group, "lane": one.lane.index, "subsets": one.subsets, "subsets_tried": one.tried,
                "subsets_drawn": one.tried < one.subsets,
            })
        };
        let failure = |one: &Failure| {
            let lost: Vec<&str> = one.lost.iter().map(|node| node.as_str()).collect();
            json!({"rank": one.rank.get(), "without": lost, "reason": one.reason})
        };
        json!({
            "manifest": self.plan.manifest.to_string(), "step": self.plan.step.get(), "state": self.plan.state.as_str(),
            "protected": self.is_protected(),
            "not_drilled": self.plan.passed_over.iter().map(passed_over_json).collect::<Vec<_>>(),
            "lanes": self.lanes.iter().map(lane).collect::<Vec<_>>(), "lanes_of": self.lanes_all,
            "subsets_tried": self.subsets().1, "decodes": self.decodes, "bytes_decoded": self.bytes,
            "failures": self.failures.iter().map(failure).collect::<Vec<_>>(),
        })
    }

    pub(super) fn print_json(&self) {
        print(&self.json().to_string());
    }

    pub(super) fn print_text(&self) {
        let (all, tried) = self.subsets();
        let drawn = if tried < all {
            "drawn by chance"
        } else {
            "all"
        };
        print(&format!(
            "step {} ({})  manifest {}\n{} of {} lanes, {tried} of {all} sets of lost nodes ({drawn}), {} decodes, {} decoded",
            self.plan.step,
            self.plan.state,
            self.plan.manifest,
            self.lanes.len(),
            self.lanes_all,
            self.decodes,
            size(self.bytes)
        ));
        if !self.is_protected() {
            print(&format!(
                "step {} is not protected, only {}: losses that it does not bear yet are no fault of its memory",
                self.plan.step, self.plan.state
            ));
        }
        for one in &self.plan.passed_over {
            print(&format!("not drilled: {}", one.reason));
        }
        for one in &self.failures {
            let lost: Vec<&str> = one.lost.iter().map(|node| node.as_str()).collect();
            print(&format!(
                "rank {} without {}: {}",
                one.rank,
                lost.join(", "),
                one.reason
            ));
        }
    }

    pub(super) fn outcome(&self) -> Result<(), CliError> {
        let in_part = self.plan.passed_over.first();
        match (self.failures.len(), in_part) {
            (0, None) => Ok(()),
            (0, Some(one)) => Err(CliError::DrillInPart {
                reason: one.reason.clone(),
            }),
            (failures, _) => Err(CliError::Drill {
                failures,
                tried: self.decodes,
            }),
        }
    }
}

/// Why a shard's chunks were not decoded.
#[derive(Debug, thiserror::Error)]
enum DecodeError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(
        "expected the chunks to be decoded, got them from {0:?}: the daemon is of a release that knows no drills"
    )]
    NotDecoded(Rung),
}

/// Whether it is about this decode, and the daemon answers.
fn may_go_on(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Refused(_) | ClientError::Corrupt { .. } | ClientError::WrongLeaves { .. }
    )
}

/// Decodes ranges of a shard and compares each chunk with its digest; how many bytes there were.
fn decode(
    client: &mut Client,
    manifest: &ManifestBytes,
    rank: Rank,
    ranges: Vec<ByteRange>,
    timeout_ms: u32,
    lost: &[NodeName],
) -> Result<u64, DecodeError> {
    let opened = client.open_shard_as_if_lost(manifest, rank, ranges.clone(), timeout_ms, lost)?;
    let read = (|| {
        if opened.rung() != Rung::Decoded {
            return Err(DecodeError::NotDecoded(opened.rung()));
        }
        let mut bytes = 0;
        for range in ranges {
            let mut chunk = vec![0; usize::try_from(range.length).unwrap_or(usize::MAX)];
            opened.read_at(range.offset, &mut chunk)?;
            bytes += range.length;
        }
        Ok(bytes)
    })();
    drop(opened);
    client.close_shard(manifest.name(), rank)?;
    read
}

/// Some chunks of a shard, as byte ranges: the first and the last, where lengths differ, and others by chance.
fn sample(manifest: &ManifestBytes, shard: &ShardEntry, count: usize) -> Vec<ByteRange> {
    let chunk = manifest.manifest().chunk;
    let chunks = chunk.count(shard.length);
    let mut drawn: BTreeSet<u64> = [0, chunks.saturating_sub(1)]
        .into_iter()
        .take(count)
        .collect();
    let mut random = rand::rng();
    while (drawn.len() as u64) < chunks.min(count as u64) {
        drawn.insert(random.random_range(0..chunks));
    }
    let range = |index| {
        let range = chunk.range(index, shard.length);
        ByteRange {
            offset: range.start,
            length: range.end - range.start,
        }
    };
    drawn
        .into_iter()
        .map(range)
        .filter(|range| range.length > 0)
        .collect()
}

/// Sets of `m` out of `blocks`: all of them, or as many by chance.
fn subsets(blocks: usize, m: usize, most: u64) -> Vec<BTreeSet<usize>> {
    if choose(blocks as u64, m as u64) <= most {
        return all_subsets(blocks, m);
    }
    let mut random = rand::rng();
    let mut drawn: BTreeSet<BTreeSet<usize>> = BTreeSet::new();
    while (drawn.len() as u64) < most {
        let subset = (0..blocks).choose_multiple(&mut random, m);
        drawn.insert(subset.into_iter().collect());
    }
    drawn.into_iter().collect()
}

fn all_subsets(blocks: usize, m: usize) -> Vec<BTreeSet<usize>> {
    if m == 0 {
        return vec![BTreeSet::new()];
    }
    let with_last = |last: usize| {
        let mut smaller = all_subsets(last, m - 1);
        for subset in &mut smaller {
            subset.insert(last);
        }
        smaller
    };
    (m - 1..blocks).flat_map(with_last).collect()
}

/// How many sets of `m` out of `n` there are, or more than fit.
fn choose(n: u64, m: u64) -> u64 {
    let mut ways: u64 = 1;
    for turn in 0..m.min(n) {
        // Divisible at every turn: it is the number of sets of turn + 1.
        match ways.checked_mul(n - turn) {
            Some(product) => ways = product / (turn + 1),
            None => return u64::MAX,
        }
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sets_of_lost_blocks_are_tried_or_as_many_as_asked_for() {
        for (blocks, m) in [(3, 1), (6, 2), (10, 2), (7, 3), (4, 4)] {
            let all = choose(blocks as u64, m as u64);
            let made = all_subsets(blocks, m);
            let different: BTreeSet<_> = made.iter().collect();
            assert_eq!((made.len() as u64, different.len() as u64), (all, all));
            assert!(
                made.iter()
                    .all(|set| set.len() == m && set.iter().all(|it| *it < blocks))
            );
        }
        assert_eq!(choose(10, 2), 45);
        assert_eq!(choose(200, 100), u64::MAX);
        let drawn = subsets(36, 4, 50);
        assert_eq!(drawn.len(), 50);
        assert!(drawn.iter().all(|set| set.len() == 4));
    }
}
