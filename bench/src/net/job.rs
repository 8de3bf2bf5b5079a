//! A training job on the daemons, through the SDK: content that can be made again for any chunk at any version, steps
//! saved and timed, shards brought back and compared byte for byte.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged::cluster::{Cluster, Hosts};
use storaged_sdk::wire::local::{ByteRange, DurableWish, Role, Rung};
use storaged_sdk::wire::{CheckpointState, ManifestBytes, Namespace, Rank, RunId, Step, WorldSize};
use storaged_sdk::{Client, ConnectOptions, RestoredShard, Trainer};

/// Any wait of the bench.
const WAIT_MS: u32 = 300_000;

/// A job with ranks on the first nodes.
#[derive(Debug)]
pub struct Job {
    namespace: Namespace,
    run: RunId,
    trainers: Vec<Trainer>,
    ranks: usize,
    /// How often each chunk was changed; the same chunks change on all ranks.
    versions: Vec<u64>,
    chunk: usize,
    step: u64,
    /// Whether steps go to the durable tier.
    pub durable: DurableWish,
}

/// What the shards are made of.
#[derive(Debug, Clone, Copy)]
pub struct Chunks {
    /// How many a shard has.
    pub count: usize,
    /// Bytes of each: those of the daemons' configuration.
    pub bytes: u64,
}

/// Whose shard is wanted, and at which node.
#[derive(Debug, Clone, Copy)]
pub struct ShardAt {
    pub rank: usize,
    pub node: usize,
}

/// Times of a step, from its last seal on.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// Until it was committed: digests, mostly.
    pub committed: Duration,
    /// Until it was protected.
    pub protected: Duration,
}

impl Job {
    /// Connects `ranks` trainers, in turns to all nodes.
    ///
    /// # Errors
    /// If a daemon refuses.
    pub fn open(daemons: &Cluster<impl Hosts>, ranks: usize, chunks: Chunks) -> Result<Self> {
        Self::open_among(daemons, daemons.nodes(), ranks, chunks)
    }

    /// The same, to the first `nodes` nodes alone.
    ///
    /// # Errors
    /// If a daemon refuses.
    pub fn open_among(
        daemons: &Cluster<impl Hosts>,
        nodes: usize,
        ranks: usize,
        chunks: Chunks,
    ) -> Result<Self> {
        let mut job = Self {
            namespace: Namespace::new("bench")?,
            run: RunId::new(0),
            trainers: Vec::new(),
            ranks,
            versions: vec![0; chunks.count],
            chunk: usize::try_from(chunks.bytes)?,
            step: 0,
            durable: DurableWish::Never,
        };
        job.run = job.reader(daemons, 0)?.open_run(WAIT_MS)?;
        let world = WorldSize::new(u32::try_from(ranks)?)?;
        for rank in 0..ranks {
            let options = job.options(daemons, rank % nodes);
            let rank = Rank::new(u32::try_from(rank)?);
            job.trainers
                .push(Trainer::connect(options, job.run, rank, world)?);
        }
        Ok(job)
    }

    /// Bytes of a shard.
    pub fn shard_bytes(&self) -> u64 {
        (self.versions.len() * self.chunk) as u64
    }

    /// Changes `share` of the chunks, spread evenly, on every rank; saves, and waits until the step is protected.
    ///
    /// # Errors
    /// If it does not get there.
    pub fn save(&mut self, daemons: &Cluster<impl Hosts>, share: f64) -> Result<Saved> {
        let sealed = self.stage(share)?;
        self.protect(daemons, sealed)
    }

    /// The first half of [`Job::save`]: every rank has sealed and the step commits. Gives the time of the last seal.
    ///
    /// # Errors
    /// If a daemon refuses.
    pub fn stage(&mut self, share: f64) -> Result<Instant> {
        self.step += 1;
        for index in spread(self.versions.len(), share) {
            self.versions[index] += 1;
        }
        let length = self.shard_bytes();
        let step = Step::new(self.step);
        let mut block = vec![0; self.chunk];
        for (rank, trainer) in self.trainers.iter_mut().enumerate() {
            let slot = trainer
                .acquire(length, WAIT_MS)
                .context("acquiring a slot")?;
            for (index, version) in self.versions.iter().enumerate() {
                fill(&mut block, rank, index, *version);
                slot.copy_in(index * self.chunk, &block)?;
            }
            trainer.seal(&slot, step, length).context("sealing")?;
        }
        let sealed = Instant::now();
        self.trainers[0]
            .commit(step, Vec::new(), Vec::new(), self.durable)
            .context("committing")?;
        Ok(sealed)
    }

    /// The second half: waits until the step is protected.
    ///
    /// # Errors
    /// If it never will be.
    pub fn protect(&self, daemons: &Cluster<impl Hosts>, sealed: Instant) -> Result<Saved> {
        let committed = self.committed(daemons, sealed)?;
        self.reach(daemons, CheckpointState::Protected)?;
        Ok(Saved {
            committed,
            protected: sealed.elapsed(),
        })
    }

    /// Waits until the newest step is committed; the time from its seal until then.
    ///
    /// # Errors
    /// If it never will be.
    pub fn committed(&self, daemons: &Cluster<impl Hosts>, sealed: Instant) -> Result<Duration> {
        self.reach(daemons, CheckpointState::Committed)?;
        Ok(sealed.elapsed())
    }

    /// Waits until the newest step is as safe as that.
    ///
    /// # Errors
    /// If it never will be.
    pub fn reach(&self, daemons: &Cluster<impl Hosts>, state: CheckpointState) -> Result<()> {
        let step = Step::new(self.step);
        let reached = self
            .reader(daemons, 0)?
            .wait(self.run, step, state, WAIT_MS);
        reached.with_context(|| format!("waiting for step {step} to be {state}"))?;
        Ok(())
    }

    /// Ends the trainers; what they saved stays.
    pub fn end_training(&mut self) {
        self.trainers.clear();
    }

    /// What to bring back: the newest step.
    ///
    /// # Errors
    /// If a node knows of none.
    pub fn manifest(&self, daemons: &Cluster<impl Hosts>, node: usize) -> Result<ManifestBytes> {
        let mut reader = self.reader(daemons, node)?;
        let plan = reader.plan(Some(Step::new(self.step)), WAIT_MS)?;
        Ok((*reader.manifest(plan.manifest)?).clone())
    }

    /// Decodes a rank's shard, or the given chunks of it, into the RAM of a node; gives the time until they are there,
    /// verified. Compares every byte afterwards.
    ///
    /// # Errors
    /// If the shard does not come back by decoding, or with other bytes.
    pub fn decode(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        rank: usize,
        node: usize,
        chunks: &[usize],
    ) -> Result<Duration> {
        let wanted = ShardAt { rank, node };
        self.open_from(daemons, manifest, wanted, chunks, &[Rung::Decoded])
    }

    /// Brings a rank's whole shard to a node from one of these; the time until it is there, verified. Compares every byte afterwards.
    ///
    /// # Errors
    /// If it does not come back, from elsewhere, or with other bytes.
    pub fn bring(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        wanted: ShardAt,
        from: &[Rung],
    ) -> Result<Duration> {
        self.open_from(daemons, manifest, wanted, &[], from)
    }

    /// Brings a rank's whole shard to its node, from wherever it is, and reads it into this. Whoever has it back checks it.
    ///
    /// # Errors
    /// If it does not come back.
    pub fn bring_back(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        rank: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        let shard = self.open_shard(daemons, manifest, ShardAt { rank, node: rank })?;
        Ok(shard.read_at(0, bytes)?)
    }

    /// The same, copied while it still comes, as a trainer does.
    ///
    /// # Errors
    /// If it cannot be had.
    pub fn bring_back_early(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        rank: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        let at = Rank::new(u32::try_from(rank)?);
        let mut reader = self.reader(daemons, rank)?;
        let mut shard = reader.open_shard_early(manifest, at, Vec::new(), WAIT_MS, None)?;
        Ok(shard.read_many(&mut reader, vec![(0, bytes)], NonZeroUsize::MIN)?)
    }

    /// Opens a rank's whole shard at a node.
    ///
    /// # Errors
    /// If it cannot be had.
    pub fn open_shard(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        wanted: ShardAt,
    ) -> Result<RestoredShard> {
        let rank = Rank::new(u32::try_from(wanted.rank)?);
        let mut reader = self.reader(daemons, wanted.node)?;
        Ok(reader.open_shard(manifest, rank, Vec::new(), WAIT_MS)?)
    }

    /// Whether these are a rank's bytes of the newest step.
    ///
    /// # Errors
    /// If they are not.
    pub fn check(&self, rank: usize, bytes: &[u8]) -> Result<()> {
        let mut expected = vec![0; self.chunk];
        for (index, got) in bytes.chunks(self.chunk).enumerate() {
            fill(&mut expected, rank, index, self.versions[index]);
            ensure!(
                got == expected,
                "chunk {index} of rank {rank} came back with other bytes"
            );
        }
        Ok(())
    }

    /// How many ranks it has.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Compares every byte of a rank's shard that its node has in RAM.
    ///
    /// # Errors
    /// If it is not there, or has other bytes.
    pub fn compare(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        rank: usize,
    ) -> Result<()> {
        let wanted = ShardAt { rank, node: rank };
        self.open_from(daemons, manifest, wanted, &[], &[Rung::OwnRam])
            .map(|_| ())
    }

    fn open_from(
        &self,
        daemons: &Cluster<impl Hosts>,
        manifest: &ManifestBytes,
        wanted: ShardAt,
        chunks: &[usize],
        rungs: &[Rung],
    ) -> Result<Duration> {
        let ShardAt { rank, node } = wanted;
        let mut reader = self.reader(daemons, node)?;
        let range = |index: &usize| ByteRange {
            offset: (index * self.chunk) as u64,
            length: self.chunk as u64,
        };
        let ranges = chunks.iter().map(range).collect();
        let wanted = Rank::new(u32::try_from(rank)?);
        let started = Instant::now();
        let shard = reader
            .open_shard(manifest, wanted, ranges, WAIT_MS)
            .with_context(|| {
                format!(
                    "bringing the shard of rank {rank} to {}",
                    daemons.name(node)
                )
            })?;
        let elapsed = started.elapsed();
        ensure!(
            rungs.contains(&shard.rung()),
            "expected a shard by {rungs:?}, got one by {:?}",
            shard.rung()
        );
        let all: Vec<usize> = (0..self.versions.len()).collect();
        let compared = if chunks.is_empty() { &all } else { chunks };
        let (mut got, mut expected) = (vec![0; self.chunk], vec![0; self.chunk]);
        for index in compared {
            shard.read_at((index * self.chunk) as u64, &mut got)?;
            fill(&mut expected, rank, *index, self.versions[*index]);
            ensure!(
                got == expected,
                "chunk {index} of rank {rank} came back with other bytes"
            );
        }
        Ok(elapsed)
    }

    fn options(&self, daemons: &Cluster<impl Hosts>, node: usize) -> ConnectOptions {
        ConnectOptions {
            socket: daemons.socket(node),
            namespace: self.namespace.clone(),
            token: Vec::new(),
            role: Role::Reader,
        }
    }

    fn reader(&self, daemons: &Cluster<impl Hosts>, node: usize) -> Result<Client> {
        Ok(Client::connect(&self.options(daemons, node))?.0)
    }
}

/// Indices of `share` of `count` things, at least one, spread evenly.
fn spread(count: usize, share: f64) -> impl Iterator<Item = usize> {
    let some = ((count as f64 * share).round() as usize).clamp(1, count);
    (0..some).map(move |turn| turn * count / some)
}

/// The content of a chunk: random words (xorshift, Marsaglia 2003) from a seed of its rank, index and version.
fn fill(block: &mut [u8], rank: usize, index: usize, version: u64) {
    let seed = (rank as u64) << 48 ^ (index as u64) << 16 ^ version;
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for word in block.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::{fill, spread};

    #[test]
    fn a_share_is_spread_and_never_nothing() {
        assert_eq!(spread(1000, 0.001).collect::<Vec<_>>(), [0]);
        assert_eq!(spread(10, 0.0).count(), 1);
        assert_eq!(
            spread(10, 1.0).collect::<Vec<_>>(),
            (0..10).collect::<Vec<_>>()
        );
        assert_eq!(spread(10, 0.6).collect::<Vec<_>>(), [0, 1, 3, 5, 6, 8]);
    }

    #[test]
    fn every_rank_chunk_and_version_has_content_of_its_own() {
        let made = |rank, index, version| {
            let mut block = [0; 20];
            fill(&mut block, rank, index, version);
            block
        };
        assert_eq!(made(1, 2, 3), made(1, 2, 3));
        for other in [made(2, 2, 3), made(1, 3, 3), made(1, 2, 4)] {
            assert_ne!(made(1, 2, 3), other);
        }
    }
}
