//! Real daemons, each in a network namespace of its own, on shaped links: every single and double loss by SIGKILL while
//! a step is encoded and while lost blocks are repaired, partitions that heal, and the bound on memory. What comes back
//! is compared byte for byte. Needs root, ip, tc and nft; without them each test says so and ends well.
//!
//! `site` is a cluster and the steps of a case, `cases` what happens to it; `places` a cluster whose machines come and go.

mod cases;
mod places;
mod site;

use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use storaged::encode::ExecutorLimits;
use storaged_bench::net::command::obstacle;
use storaged_bench::net::network::{LinkRate, remove_leftovers};

use cases::{EncodeLoss, Partition, RepairLoss};
use site::{Checkpoint, K, M, NODES, Site, SiteSpec};

/// Shards of about 1 MB on links so slow that an encode takes well over a second, whatever else the cores do.
const SMALL: SiteSpec = SiteSpec {
    rate: LinkRate::megabits(8),
    chunk: 16 << 10,
    budget: 24 << 20,
    shards: [700_000, 800_003, 900_006, 1_000_009],
};

/// Shards of many times what may be in flight of them.
const LARGE: SiteSpec = SiteSpec {
    rate: LinkRate::megabits(100),
    chunk: 64 << 10,
    budget: 64 << 20,
    shards: [12 << 20; K],
};

/// Unread bytes that a stream between daemons may have in flight: docs/operate/transport.md.
const STREAM_WINDOW_BYTES: u64 = 4 << 20;

/// Clusters that work on the cases of a test at once: most of their time is spent waiting.
const CLUSTERS: usize = 3;

/// Blocks that a node holds at once, at most: per session and stripe in flight the m sums of a chain received, the
/// local block and m results, and per session a stream's window of blocks that are not acknowledged.
fn blocks_max(spec: &SiteSpec, sessions: u64) -> u64 {
    let stripes = ExecutorLimits::default().stripes_in_flight as u64;
    sessions * (stripes * (2 * M as u64 + 1) + STREAM_WINDOW_BYTES / spec.chunk)
}

/// Whether networks can be made here; if not, the reason is printed, past the capture of the test's output.
fn can_run() -> bool {
    static OBSTACLE: OnceLock<Option<String>> = OnceLock::new();
    let obstacle = OBSTACLE.get_or_init(|| {
        let obstacle = obstacle();
        if obstacle.is_none()
            && let Err(error) = remove_leftovers()
        {
            return Some(format!(
                "what an earlier run left cannot be removed: {error:#}"
            ));
        }
        obstacle
    });
    if let Some(obstacle) = obstacle {
        // Nobody reads what cannot be written.
        let _ = writeln!(
            std::io::stderr(),
            "a test in network namespaces is skipped: {obstacle}"
        );
    }
    obstacle.is_none()
}

type Run<C> = fn(&C, &mut Site<'_>, Checkpoint) -> Result<Checkpoint>;

/// Has a few clusters work off the cases; a cluster on which one failed is made anew.
fn run_all<C: std::fmt::Debug + Send + Sync>(name: &str, cases: Vec<C>, run: Run<C>) -> Result<()> {
    if !can_run() {
        return Ok(());
    }
    let count = cases.len();
    let queue = Mutex::new(VecDeque::from(cases));
    let failures = Mutex::new(Vec::new());
    let started = Instant::now();
    thread::scope(|threads| {
        for cluster in 0..CLUSTERS.min(count) {
            let (queue, failures) = (&queue, &failures);
            threads.spawn(move || {
                let place = format!("{name}-{cluster}");
                let mut left = count;
                while !locked(queue).is_empty() {
                    if let Err(error) = work_off(&place, queue, run) {
                        locked(failures).push(format!("{error:#}"));
                        // A cluster that does not even start would be made for ever.
                        let before = std::mem::replace(&mut left, locked(queue).len());
                        if left == before {
                            locked(queue).clear();
                        }
                    }
                }
            });
        }
    });
    let failures = failures
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    println!(
        "{name}: {count} cases in {:.0} s",
        started.elapsed().as_secs_f64()
    );
    ensure!(
        failures.is_empty(),
        "{} of {count} cases failed:\n{}",
        failures.len(),
        failures.join("\n")
    );
    Ok(())
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cases on one cluster, until none is left or one fails.
fn work_off<C: std::fmt::Debug>(
    place: &str,
    queue: &Mutex<VecDeque<C>>,
    run: Run<C>,
) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let network = Site::network(&SMALL)?;
    let mut site = Site::start(SMALL, &network, directory.path().join("cluster"))?;
    let mut base = site.save_protected()?;
    site.end_training();
    loop {
        let Some(case) = locked(queue).pop_front() else {
            return Ok(());
        };
        let started = Instant::now();
        let outcome = run(&case, &mut site, base).and_then(|newer| {
            // A new step is encoded and an older one healed at once.
            site.check_bounds(blocks_max(&SMALL, 2))?;
            Ok(newer)
        });
        println!(
            "{place}: {case:?} took {:.1} s",
            started.elapsed().as_secs_f64()
        );
        base = outcome.with_context(|| format!("{case:?}; logs in {}", keep_logs(place, &site)))?;
    }
}

/// Writes the logs where they outlive the test.
fn keep_logs(place: &str, site: &Site<'_>) -> String {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("namespaces-{place}.log"));
    match fs::write(&path, site.logs()) {
        Ok(()) => path.display().to_string(),
        Err(error) => format!("none, since {error}"),
    }
}

/// A part of an encode or repair, another for each case.
fn part(case: usize) -> f64 {
    (case % 5) as f64 / 10.0
}

fn singles() -> impl Iterator<Item = Vec<usize>> {
    (0..NODES).map(|node| vec![node])
}

fn doubles() -> impl Iterator<Item = Vec<usize>> {
    (0..NODES).flat_map(|a| (a + 1..NODES).map(move |b| vec![a, b]))
}

#[test]
fn every_single_and_double_loss_while_a_step_is_encoded() -> Result<()> {
    let losses = singles().chain(doubles()).enumerate();
    let cases = losses.map(|(case, lost)| EncodeLoss {
        lost,
        part: part(case),
    });
    run_all("encode", cases.collect(), EncodeLoss::run)
}

/// Every pair of a lost node and one that is lost during its repair, the replacement itself included.
#[test]
fn every_single_loss_while_a_lost_block_is_repaired() -> Result<()> {
    let pairs = doubles().enumerate().map(|(case, pair)| match case % 2 {
        0 => (pair[0], pair[1]),
        _ => (pair[1], pair[0]),
    });
    let again = (0..NODES).map(|node| (node, node));
    let losses = pairs.chain(again).enumerate();
    let cases = losses.map(|(case, (first, then))| RepairLoss {
        first: vec![first],
        then: vec![then],
        part: part(case),
    });
    run_all("repair", cases.collect(), RepairLoss::run)
}

#[test]
fn every_double_loss_that_comes_again_while_it_is_repaired() -> Result<()> {
    let cases = doubles().enumerate().map(|(case, lost)| RepairLoss {
        first: lost.clone(),
        then: lost,
        part: part(case),
    });
    run_all("repair-again", cases.collect(), RepairLoss::run)
}

/// With the first one they are more than m.
#[test]
fn double_losses_while_a_lost_block_is_repaired_get_a_clear_error() -> Result<()> {
    let cases = doubles().enumerate().map(|(case, then)| {
        let others = (0..NODES).filter(|node| !then.contains(node));
        RepairLoss {
            first: vec![others.cycle().nth(case).unwrap_or_default()],
            then,
            part: part(case),
        }
    });
    run_all("repair-beyond", cases.collect(), RepairLoss::run_beyond)
}

#[test]
fn a_partition_while_a_step_is_encoded_heals() -> Result<()> {
    let sides = [vec![0, 1, 2], vec![5], vec![0], vec![3, 4]];
    let cases = sides.into_iter().enumerate().map(|(case, side)| Partition {
        side,
        // Links notice after 2 s, so shorter and longer than that.
        lasts: Duration::from_secs([1, 4][case % 2]),
    });
    run_all("partition", cases.collect(), Partition::run)
}

#[test]
fn memory_is_bounded_before_a_slow_hop() -> Result<()> {
    if !can_run() {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let network = Site::network(&LARGE)?;
    let mut site = Site::start(LARGE, &network, directory.path().join("cluster"))?;
    // The last hop of every chain; repairs of two lost blocks cannot do without it either.
    network.shape(NODES - 1, LinkRate::megabits(30))?;
    let checkpoint = site.save_protected()?;
    site.check_bounds(blocks_max(&LARGE, 1))?;
    site.lose(&[0, K])?;
    site.replace(&[0, K])?;
    site.wait_links()?;
    site.restore(checkpoint)?;
    // An opening and a healing may decode the same block at once.
    site.check_bounds(blocks_max(&LARGE, 2))
}
