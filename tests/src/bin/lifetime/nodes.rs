//! What all parts do with nodes: wait, kill, save.

use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::Signal;
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::system::{System, shards};

/// Longer than anything takes that comes about at all.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What is about to end when nodes are stopped has ended after this time; nobody misses them so soon.
pub const ENDED: Duration = Duration::from_millis(50);
/// Sessions that a node takes part in.
const SESSIONS: &str = "storaged_sessions";

/// Sends all of them a signal.
pub fn tell(system: &System, nodes: &[usize], signal: Signal) -> Result<()> {
    let mut nodes = nodes.iter();
    nodes.try_for_each(|node| Ok(system.cluster.signal(*node, signal)?))
}

/// Whether one of these takes part in a session.
pub fn are_in_session(system: &System, nodes: &[usize]) -> bool {
    let sessions = |node: &usize| system.cluster.metric::<u64>(*node, SESSIONS);
    nodes
        .iter()
        .any(|node| sessions(node).is_ok_and(|it| it > 0))
}

/// Looks until it is so; how long that took.
pub fn until(what: &str, mut look: impl FnMut() -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    loop {
        match look() {
            Ok(()) => return Ok(began.elapsed()),
            Err(error) if began.elapsed() > PATIENCE => {
                return Err(error.context(format!("waited for {what}")));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// A shard's bytes, unlike those of other steps and ranks (xorshift, Marsaglia 2003).
pub fn filled(length: usize, step: u64, rank: u32) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(rank) + 1);
    let words = (0..length / 8).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().collect()
}

/// A step is saved and protected as every node of these sees it.
pub fn save(
    system: &System,
    run: RunId,
    trainers: &mut [Trainer],
    step: u64,
    nodes: impl IntoIterator<Item = usize>,
) -> Result<()> {
    let shards = shards(u32::try_from(trainers.len())?, step);
    system.save(trainers, step, &shards, DurableWish::Never)?;
    let mut nodes = nodes.into_iter();
    nodes.try_for_each(|node| system.wait(node, run, step, CheckpointState::Protected))
}
