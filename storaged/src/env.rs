//! What stands between the daemon and the world: sockets, threads, clock and random source. Real ones here; under a simulated
//! network, time is tokio's and the source is seeded.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use storaged_core::Now;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::driver::Members;
use crate::http::{OpsState, RestartAsked};
use crate::keep::{DescriptorStore, KeptName};
use crate::net::SocketFactory;
use crate::pool::Pool;
use crate::stage::{FromStage, SocketFaults, ToDriver};
use crate::trickle::store::Store;

/// What stands between the daemon and the world.
pub struct Environment {
    /// UDP sockets.
    pub sockets: Arc<dyn SocketFactory>,
    /// Random numbers.
    pub entropy: Arc<dyn Entropy>,
    /// Where the network runs: a runtime of its own, so that payload work never delays a keep-alive.
    pub net_runtime: tokio::runtime::Handle,
    /// Threads for arithmetic.
    pub pool: Pool,
    /// Whether slow work may go to other threads, or must be done in place (simulated time).
    pub offload: Offload,
    /// The durable tier instead of the configured one, for tests.
    pub store: Option<Arc<dyn Store>>,
    /// Who holds descriptors for the daemon's next life.
    pub descriptors: Arc<dyn DescriptorStore>,
    /// What the daemon before this one left there.
    pub inherited: Vec<(KeptName, OwnedFd)>,
    /// The operator's HTTP, if it is served already: a node may wait for its place for long.
    pub ops: Option<OpsDoor>,
    /// The sockets of trainers and of the operator, if they are open already.
    pub stage: Option<StageDoor>,
    /// The roster that gave this node its place; none where nodes are listed.
    pub members: Option<Members>,
}

/// The operator's HTTP as the driver has it.
#[derive(Debug)]
pub struct OpsDoor {
    /// What the pages show.
    pub state: Arc<OpsState>,
    /// What is asked there.
    pub asked: mpsc::Receiver<RestartAsked>,
}

/// The sockets of trainers and of the operator as the driver has them.
#[derive(Debug)]
pub struct StageDoor {
    /// Where what clients do goes.
    pub events: ToDriver,
    /// Where it comes from.
    pub received: FromStage,
    /// Sockets through which nobody new gets in.
    pub faults: SocketFaults,
}

/// Where slow work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// On the runtime's blocking threads.
    Threads,
    /// In place.
    Inline,
}

/// Two readings of clocks that are further apart are taken again, so often at most.
const READING_NS_MAX: i64 = 100_000;
const READINGS_MAX: u32 = 10;

/// Milliseconds since the daemon started, by the runtime's clock, which a simulation drives, and what the machine was suspended
/// since: its peers have gone on meanwhile, and the runtime's clock stood still.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
    /// Nanoseconds for which the machine has been suspended, and what a container's clocks differ by.
    suspended: fn() -> i64,
    suspended_before: i64,
}

impl Clock {
    /// Starts at zero.
    pub fn start() -> Self {
        Self::with(suspended)
    }

    fn with(suspended: fn() -> i64) -> Self {
        Self {
            start: Instant::now(),
            suspended,
            suspended_before: suspended(),
        }
    }

    /// Now.
    pub fn now(&self) -> Now {
        let since = self.start.elapsed() + self.suspended_since();
        Now(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    /// The instant of a time of the decisions, if the machine is not suspended until then.
    pub fn instant(&self, at: Now) -> Instant {
        // A far deadline is as good as none; an hour keeps the sum in range.
        let ms = at.0.min(self.now().0.saturating_add(3_600_000));
        self.start + Duration::from_millis(ms).saturating_sub(self.suspended_since())
    }

    /// In whole milliseconds: the two clocks that say it are not read at one instant.
    fn suspended_since(&self) -> Duration {
        let since = (self.suspended)().saturating_sub(self.suspended_before);
        let ms = since.saturating_add(500_000) / 1_000_000;
        Duration::from_millis(u64::try_from(ms).unwrap_or(0))
    }
}

/// By how much one clock of this machine is ahead of the other, which stands still in suspend.
fn suspended() -> i64 {
    let read = |clock| {
        let at = clock_gettime(clock);
        at.tv_sec * 1_000_000_000 + at.tv_nsec
    };
    // Whoever is kept from the processor between the readings would be ahead for a moment.
    let mut best = (i64::MAX, 0);
    for _ in 0..READINGS_MAX {
        let (before, boot) = (read(ClockId::Monotonic), read(ClockId::Boottime));
        let took = read(ClockId::Monotonic) - before;
        if took < best.0 {
            best = (took, boot - before);
        }
        if took < READING_NS_MAX {
            break;
        }
    }
    best.1
}

/// A source of random numbers.
pub trait Entropy: Send + Sync {
    /// The next one.
    fn next(&self) -> u64;
}

/// The system's random source.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn next(&self) -> u64 {
        rand::random()
    }
}

/// A seeded one, for simulation.
#[derive(Debug)]
pub struct SeededEntropy(std::sync::atomic::AtomicU64);

impl SeededEntropy {
    /// From a seed.
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self(seed.into()))
    }
}

impl Entropy for SeededEntropy {
    fn next(&self) -> u64 {
        // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every seed gives a full-period sequence.
        let step = 0x9E37_79B9_7F4A_7C15_u64;
        let state = self
            .0
            .fetch_add(step, std::sync::atomic::Ordering::Relaxed)
            .wrapping_add(step);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static SUSPENDED: Cell<i64> = const { Cell::new(-7_000_000_000) };
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_the_decisions_goes_on_while_the_machine_is_suspended() {
        let clock = Clock::with(|| SUSPENDED.get());
        tokio::time::advance(Duration::from_millis(1_500)).await;
        assert_eq!(clock.now(), Now(1_500));
        let due = clock.instant(Now(22_000));
        assert_eq!(due - Instant::now(), Duration::from_millis(20_500));
        // The runtime's clock stands still. The clocks that say so are not read at one instant.
        SUSPENDED.set(13_000_000_000 - 3_000);
        assert_eq!(clock.now(), Now(21_500));
        let due = clock.instant(Now(22_000));
        assert_eq!(due - Instant::now(), Duration::from_millis(500));
        assert!(clock.instant(Now(20_000)) <= Instant::now(), "it is past");
    }
}
