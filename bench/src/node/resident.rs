//! Memory that a daemon has of its own: beside slots and parity, which are memfds, and files that it has mapped.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use storaged::cluster::Cluster;

use crate::net::network::Network;

/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// The most that any of the daemons has now.
///
/// # Errors
/// If one does not run.
pub fn own_bytes(daemons: &Cluster<&Network>) -> Result<u64> {
    let mut most = 0;
    for node in 0..daemons.nodes() {
        most = most.max(daemons.resident(node)?.own);
    }
    Ok(most)
}

/// Does something, and notes the most that any of the daemons has meanwhile.
///
/// # Errors
/// Those of the work.
pub fn watched<T: Send>(
    daemons: &Cluster<&Network>,
    most: &mut u64,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (ended, seen) = (AtomicBool::new(false), AtomicU64::new(*most));
    let done = thread::scope(|threads| {
        threads.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let nodes = 0..daemons.nodes();
                for resident in nodes.filter_map(|node| daemons.resident(node).ok()) {
                    seen.fetch_max(resident.own, Ordering::Relaxed);
                }
                thread::sleep(LOOK);
            }
        });
        let done = work();
        ended.store(true, Ordering::Relaxed);
        done
    });
    *most = seen.into_inner();
    done
}

/// In the unit of the figures.
pub fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
