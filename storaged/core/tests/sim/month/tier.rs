//! The durable tier of a month: well, slow, full, failing, hanging, or lying about what it has. What an upload reads, it
//! reads from the slot until it ends: a slot that is given to others meanwhile makes a wrong object, which no upload
//! may call done.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_core::{
    ClaimFault, ClaimedRun, DurableFault, DurableListing, Input, Output, QueryId, SlotShard,
};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Digest, ManifestBytes, Namespace, Owner, Rank, RunId, SlotId};

use super::super::world::{World, digests};
use super::{FAULTS_END_MS, Happening};

/// What kind of tier a scenario has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    Absent,
    Well,
    /// Uploads take up to 100 steps, publishing and listing up to 10 s.
    Slow,
    /// Full, failing and hanging by turns, and well for a while now and then.
    Failing,
    /// It lists what it had some time ago.
    Lying,
}

/// What it is like just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    Well,
    Slow,
    Full,
    Failing,
    Hanging,
}

/// What the tier does for a node.
#[derive(Debug, Clone)]
pub enum Task {
    Upload(Arc<ManifestBytes>, Rank, SlotShard),
    Publish(Arc<ManifestBytes>),
    List(QueryId, Namespace),
    Fetch(Arc<ManifestBytes>, Rank, SlotId),
    Claim(QueryId, Claim),
    Record(Namespace, Owner, RunId),
    Find(QueryId, Namespace, RunId),
}

/// A run's number is asked for.
#[derive(Debug, Clone)]
pub struct Claim {
    namespace: Namespace,
    owner: Owner,
    above: u64,
    identity: u64,
}

#[derive(Debug, Clone)]
pub struct Work {
    node: usize,
    generation: u64,
    task: Task,
}

/// A manifest in the tier, and since when.
#[derive(Debug, Clone)]
pub struct Published {
    pub at: u64,
    pub manifest: Arc<ManifestBytes>,
}

#[derive(Debug)]
pub struct Tier {
    pub kind: TierKind,
    pub weather: Weather,
    changes_at: u64,
    pub shards: BTreeMap<(Digest, Rank), Vec<u8>>,
    pub published: BTreeMap<CheckpointKey, Published>,
    claims: BTreeMap<(Namespace, u64), (RunId, Owner)>,
    pub uploads: u64,
}

impl Tier {
    pub fn new(kind: TierKind) -> Self {
        let weather = match kind {
            TierKind::Slow => Weather::Slow,
            _ => Weather::Well,
        };
        Self {
            kind,
            weather,
            changes_at: 10_000,
            shards: BTreeMap::new(),
            published: BTreeMap::new(),
            claims: BTreeMap::new(),
            uploads: 0,
        }
    }

    /// The newest of a namespace.
    pub fn newest(&self, namespace: &Namespace) -> Option<&CheckpointKey> {
        let mut all = self.published.keys();
        all.rfind(|key| key.namespace == *namespace)
    }
}

impl World {
    /// The weather changes each 5 to 25 s.
    pub(super) fn tier_weather(&mut self) {
        let now = self.now;
        if self.month().tier.changes_at > now || self.month().tier.kind != TierKind::Failing {
            return;
        }
        let lasts = 5_000 + self.random(20_000);
        let weather = match self.random(4) {
            0 => Weather::Well,
            1 => Weather::Full,
            2 => Weather::Failing,
            _ => Weather::Hanging,
        };
        self.struck("tier outages");
        let tier = &mut self.month().tier;
        tier.changes_at = now + lasts;
        tier.weather = weather;
    }

    pub(super) fn tier_is_well(&mut self) {
        self.month().tier.weather = Weather::Well;
    }

    /// What an output asks of a month's tier; any other output comes back.
    pub fn tier_performs(
        &mut self,
        node: usize,
        generation: u64,
        output: Output,
    ) -> Option<Output> {
        let claims = matches!(
            output,
            Output::ClaimRun { .. } | Output::RecordRun { .. } | Output::FindRun { .. }
        );
        // Where links are cut as well, runs are claimed beside the weather.
        if self.month.is_none() || (claims && self.month().scenario.links) {
            return Some(output);
        }
        let task = match output {
            Output::Upload {
                manifest,
                rank,
                shard,
                ..
            } => Task::Upload(manifest, rank, shard),
            Output::Publish { manifest } => Task::Publish(manifest),
            Output::ListDurable {
                query, namespace, ..
            } => Task::List(query, namespace),
            Output::Fetch {
                manifest,
                rank,
                slot,
                ..
            } => Task::Fetch(manifest, rank, slot),
            Output::ClaimRun {
                query,
                namespace,
                owner,
                above,
                identity,
            } => {
                let claim = Claim {
                    namespace,
                    owner,
                    above,
                    identity,
                };
                Task::Claim(query, claim)
            }
            Output::RecordRun {
                namespace,
                owner,
                run,
            } => Task::Record(namespace, owner, run),
            Output::FindRun {
                query,
                namespace,
                run,
            } => Task::Find(query, namespace, run),
            other => return Some(other),
        };
        self.tier_begins(node, generation, task);
        None
    }

    /// The tier begins a task; what it comes to is decided when it ends.
    fn tier_begins(&mut self, node: usize, generation: u64, task: Task) {
        let lasts = self.lasts(&task);
        let work = Work {
            node,
            generation,
            task,
        };
        self.happens_after(lasts, Happening::Tier(Box::new(work)));
    }

    fn lasts(&mut self, task: &Task) -> u64 {
        let usual = match task {
            Task::Upload(..) | Task::Fetch(..) => 50 + self.random(50),
            _ => 10 + self.random(30),
        };
        match (self.month().tier.weather, task) {
            (Weather::Well, _) => usual,
            (Weather::Slow, Task::Upload(..)) => 300 << self.random(8),
            (Weather::Slow, Task::Fetch(..)) => 10 * usual,
            (Weather::Slow, _) => 100 << self.random(7),
            (Weather::Full | Weather::Failing, _) => 10 + self.random(500),
            // Whoever hangs is let go with the storm.
            (Weather::Hanging, _) => FAULTS_END_MS.saturating_sub(self.now) + self.random(3_000),
        }
    }

    pub(super) fn tier_did(&mut self, work: Work) {
        let Work {
            node,
            generation,
            task,
        } = work;
        let lives = |world: &World| {
            let process = world.processes[node].as_ref();
            process.is_some_and(|process| process.generation == generation)
        };
        if !lives(self) {
            return;
        }
        let input = match task {
            Task::Upload(manifest, rank, shard) => self.uploaded(node, &manifest, rank, &shard),
            Task::Publish(manifest) => self.published(manifest),
            Task::List(query, namespace) => self.listed(query, &namespace),
            Task::Fetch(manifest, rank, slot) => self.fetched(node, &manifest, rank, slot),
            Task::Claim(query, claim) => self.claimed(query, claim),
            Task::Record(namespace, owner, run) => self.recorded(namespace, owner, run),
            Task::Find(query, namespace, run) => self.found(query, namespace, run),
        };
        self.feed(node, generation, input);
    }

    fn writes(&mut self) -> Result<(), DurableFault> {
        match self.month().tier.weather {
            Weather::Full => Err(DurableFault::Full("no space left in the tier".into())),
            Weather::Failing | Weather::Hanging => {
                Err(DurableFault::Unavailable("500 of the tier".into()))
            }
            Weather::Well | Weather::Slow => Ok(()),
        }
    }

    fn reads(&mut self) -> Result<(), DurableFault> {
        match self.month().tier.weather {
            Weather::Failing | Weather::Hanging => {
                Err(DurableFault::Unavailable("500 of the tier".into()))
            }
            _ => Ok(()),
        }
    }

    fn uploaded(
        &mut self,
        node: usize,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        shard: &SlotShard,
    ) -> Input {
        let slots = &self.ram(node).slots;
        let bytes = slots
            .get(&shard.slot)
            .map(|it| it[..shard.length as usize].to_vec());
        let whole = bytes.filter(|bytes| digests(bytes).0 == shard.leaves);
        let name = manifest.name();
        let outcome = self.writes().and_then(|()| {
            let bytes = whole
                .ok_or_else(|| DurableFault::Local("the shard changed under the upload".into()))?;
            self.month().tier.uploads += 1;
            self.month().tier.shards.insert((name, rank), bytes);
            Ok(())
        });
        Input::Uploaded {
            manifest: name,
            rank,
            outcome,
        }
    }

    fn published(&mut self, manifest: Arc<ManifestBytes>) -> Input {
        let (at, name, outcome) = (self.now, manifest.name(), self.writes());
        if outcome.is_ok() {
            let record = manifest.manifest();
            let key = CheckpointKey::of(record);
            let tier = &mut self.month().tier;
            for shard in &record.shards {
                let there = tier.shards.contains_key(&(name, shard.rank));
                assert!(there, "the manifest is written last: {key:?}");
            }
            let published = Published { at, manifest };
            tier.published.entry(key).or_insert(published);
        }
        Input::Published {
            manifest: name,
            outcome,
        }
    }

    /// The first number that nobody has claimed, above every folder and what the node knows.
    fn claimed(&mut self, query: QueryId, claim: Claim) -> Input {
        let outcome = self.writes().map_err(ClaimFault::Durable).map(|()| {
            let tier = &mut self.month().tier;
            let folder = tier.newest(&claim.namespace).map(|key| key.run.number());
            let claims = tier.claims.keys();
            let claimed = claims
                .filter(|(namespace, _)| *namespace == claim.namespace)
                .map(|(_, number)| *number);
            let highest = claimed.chain(folder).max().unwrap_or(0);
            let number = highest.max(claim.above) + 1;
            let run = RunId::with_identity(number, claim.identity);
            let place = (claim.namespace, number);
            tier.claims.insert(place, (run, claim.owner));
            run
        });
        Input::RunClaimed { query, outcome }
    }

    fn recorded(&mut self, namespace: Namespace, owner: Owner, run: RunId) -> Input {
        let outcome = self.writes().map(|()| {
            let place = (namespace.clone(), run.number());
            self.month()
                .tier
                .claims
                .entry(place)
                .or_insert((run, owner));
        });
        Input::RunRecorded {
            namespace,
            run,
            outcome,
        }
    }

    /// What is known of a run: its own claim, and the newest of its namespace.
    fn found(&mut self, query: QueryId, namespace: Namespace, run: RunId) -> Input {
        let outcome = self.reads().map(|()| {
            let claims = &self.month().tier.claims;
            let of_it = claims.keys().filter(|(of, _)| *of == namespace);
            let newest = of_it.map(|(_, number)| *number).max().unwrap_or(0);
            match claims.get(&(namespace.clone(), run.number())) {
                Some((known, _)) if *known == run && newest > run.number() => {
                    ClaimedRun::Superseded { newest }
                }
                Some((known, owner)) if *known == run => ClaimedRun::Newest(*owner),
                _ => ClaimedRun::Unknown,
            }
        });
        Input::RunFound { query, outcome }
    }

    fn listed(&mut self, query: QueryId, namespace: &Namespace) -> Input {
        let lies = self.month().tier.kind == TierKind::Lying && self.now < FAULTS_END_MS;
        let horizon = self.now.saturating_sub(if lies { 15_000 } else { 0 });
        let outcome = self.reads().map(|()| {
            let all = self.month().tier.published.iter();
            let of_it = all.filter(|(key, it)| key.namespace == *namespace && it.at <= horizon);
            let manifests: Vec<_> = of_it
                .rev()
                .take(4)
                .map(|(_, it)| it.manifest.clone())
                .collect();
            DurableListing {
                newest_run: manifests.first().map(|newest| newest.manifest().run),
                manifests,
                set_aside: Vec::new(),
            }
        });
        Input::DurableListed { query, outcome }
    }

    fn fetched(
        &mut self,
        node: usize,
        manifest: &ManifestBytes,
        rank: Rank,
        slot: SlotId,
    ) -> Input {
        let outcome = self.reads().and_then(|()| {
            let shards = &self.month().tier.shards;
            let bytes = shards.get(&(manifest.name(), rank)).cloned();
            let bytes = bytes.ok_or_else(|| DurableFault::Damaged("no such object".into()))?;
            let slots = &mut self.ram(node).slots;
            let room = slots
                .get_mut(&slot)
                .ok_or_else(|| DurableFault::Local("the slot is gone".into()))?;
            room[..bytes.len()].copy_from_slice(&bytes);
            Ok(digests(&bytes).0)
        });
        Input::Fetched { slot, outcome }
    }
}
