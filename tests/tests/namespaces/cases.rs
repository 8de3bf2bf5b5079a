//! What happens to a cluster, one function for each kind of case. Each begins and ends with a cluster that is whole.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use storaged_sdk::ClientError;
use storaged_sdk::wire::{ManifestBytes, Rank, RefusalCode, Step};

use crate::site::{Checkpoint, K, NODES, Site};

/// A case whose encode or repair had ended before the loss does not count, and is tried so often.
const TRIES: i32 = 4;
/// A typed answer to what cannot be had comes within this time, the answer's own wait included.
const REFUSAL_WAIT_MS: u32 = 20_000;

/// A machine that is busy with other work may sleep too long, so each attempt strikes earlier than the one before.
fn earlier(part: f64, attempt: i32) -> f64 {
    part / 4f64.powi(attempt)
}

/// Nodes are lost while a step is encoded.
#[derive(Clone, Debug)]
pub struct EncodeLoss {
    pub lost: Vec<usize>,
    /// After this part of the encode.
    pub part: f64,
}

impl EncodeLoss {
    /// The newest checkpoint that was protected comes back. So may the interrupted one, whole, and it does if all of
    /// its shards live.
    pub fn run(&self, site: &mut Site<'_>, base: Checkpoint) -> Result<Checkpoint> {
        let mut base = base;
        for attempt in 0..TRIES {
            let step = site.begin_encode(earlier(self.part, attempt))?;
            let early = site.is_protected(step);
            site.lose(&self.lost)?;
            let counts = !early && !site.is_protected(step);
            site.replace(&self.lost)?;
            site.wait_links()?;
            let shards_live = self.lost.iter().all(|node| *node >= K);
            if shards_live {
                site.wait_protected(step)?;
            }
            let offered = site.offered()?;
            let expected = if counts && !shards_live {
                vec![base, step]
            } else {
                vec![step]
            };
            ensure!(
                expected.contains(&offered),
                "expected one of {expected:?} to be offered, got {offered:?}"
            );
            site.restore(offered)?;
            base = offered;
            if counts {
                return Ok(base);
            }
        }
        bail!("the encode had ended before the loss in each of {TRIES} tries")
    }
}

/// Nodes are lost and replaced, and while what they held is repaired, others (or the replacements) are lost.
#[derive(Clone, Debug)]
pub struct RepairLoss {
    pub first: Vec<usize>,
    pub then: Vec<usize>,
    /// After this part of the repair.
    pub part: f64,
}

impl RepairLoss {
    /// No more than m blocks are missing at any time: all comes back, and heals.
    pub fn run(&self, site: &mut Site<'_>, base: Checkpoint) -> Result<Checkpoint> {
        for attempt in 0..TRIES {
            let counts = self.strike(site, base, earlier(self.part, attempt))?;
            let offered = site.offered()?;
            ensure!(
                offered == base,
                "expected {base:?} to be offered, got {offered:?}"
            );
            site.restore(base)?;
            if counts {
                return Ok(base);
            }
        }
        bail!("the repair had ended before the loss in each of {TRIES} tries")
    }

    /// More than m blocks are missing: every node says so, nobody gets wrong bytes or waits for ever, and the next
    /// checkpoint is protected as ever.
    pub fn run_beyond(&self, site: &mut Site<'_>, base: Checkpoint) -> Result<Checkpoint> {
        let mut base = base;
        for attempt in 0..TRIES {
            let manifest = manifest(site, base)?;
            // What the last survivors had sent may complete the first repair: then m blocks are missing and no more.
            let counts = self.strike(site, base, earlier(self.part, attempt))?
                && !site.has_block(self.first[0], base);
            if counts {
                self.is_refused(site, base, &manifest)?;
            }
            base = site.save_protected()?;
            site.end_training();
            if counts {
                return Ok(base);
            }
        }
        bail!("the repair had ended before the loss in each of {TRIES} tries")
    }

    /// Gives whether the repair was under way when the second loss came.
    fn strike(&self, site: &mut Site<'_>, base: Checkpoint, part: f64) -> Result<bool> {
        site.lose(&self.first)?;
        site.begin_repair(&self.first, part)?;
        let early = self.first.iter().all(|node| site.has_block(*node, base));
        site.lose(&self.then)?;
        let has_left = |node: &usize| self.then.contains(node) || !site.has_block(*node, base);
        let counts = !early && self.first.iter().any(has_left);
        site.replace(&self.then)?;
        site.wait_links()?;
        Ok(counts)
    }

    fn is_refused(
        &self,
        site: &Site<'_>,
        Checkpoint { run, step }: Checkpoint,
        manifest: &ManifestBytes,
    ) -> Result<()> {
        for node in 0..NODES {
            let plan = site.clients.reader(node)?.plan(None, REFUSAL_WAIT_MS);
            match plan {
                Err(ClientError::Refused(refusal)) => ensure!(
                    matches!(
                        refusal.code,
                        RefusalCode::NoCheckpoint | RefusalCode::TooManyLost
                    ),
                    "n{node} refused a plan otherwise: {refusal:?}"
                ),
                Err(error) => bail!("n{node} failed to plan: {error}"),
                Ok(plan) => bail!("n{node} offers {run}/{step}, which is lost: {plan:?}"),
            }
        }
        let lost = self.first.iter().chain(&self.then);
        for rank in lost.copied().filter(|node| *node < K) {
            let reader =
                (0..NODES).find(|node| !self.first.contains(node) && !self.then.contains(node));
            let mut reader = site.clients.reader(reader.context("no survivor")?)?;
            let opened =
                reader.open_shard(manifest, Rank::new(rank as u32), vec![], REFUSAL_WAIT_MS);
            match opened {
                Err(ClientError::Refused(_)) => {}
                Err(error) => bail!("opening rank {rank}: expected a refusal, got {error}"),
                Ok(shard) => bail!("rank {rank} is lost, and came by {:?}", shard.rung()),
            }
        }
        Ok(())
    }
}

fn manifest(site: &Site<'_>, base: Checkpoint) -> Result<ManifestBytes> {
    let mut reader = site.clients.reader(0)?;
    let plan = reader.plan(Some(Step::new(base.step)), REFUSAL_WAIT_MS)?;
    Ok((*reader.manifest(plan.manifest)?).clone())
}

/// The network is parted while a step is encoded, and joined again.
#[derive(Clone, Debug)]
pub struct Partition {
    /// The nodes on one side.
    pub side: Vec<usize>,
    pub lasts: Duration,
}

impl Partition {
    /// The step is protected afterwards, and comes back.
    pub fn run(&self, site: &mut Site<'_>, _: Checkpoint) -> Result<Checkpoint> {
        for _ in 0..TRIES {
            let step = site.begin_encode(0.0)?;
            site.network.part(&self.side)?;
            sleep(self.lasts);
            let counts = !site.is_protected(step);
            site.network.rejoin()?;
            site.wait_links()?;
            site.wait_protected(step)?;
            let offered = site.offered()?;
            ensure!(
                offered == step,
                "expected {step:?} to be offered, got {offered:?}"
            );
            site.restore(step)?;
            if counts {
                return Ok(step);
            }
        }
        bail!("the encode had ended before the partition in each of {TRIES} tries")
    }
}
