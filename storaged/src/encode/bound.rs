//! How fast a node sends lost blocks while it protects a save. Until a step is coded it does not survive a node, and repairs go over
//! the same links and cores: at full speed they would take half of both. So beside a save the frames of all repairs here wait for
//! their turn at a rate (the generic cell rate algorithm, as in `net/pace.rs`); without one they do not wait at all, nor does ever
//! what a reader waits for.
//!
//! A frame waits for a hundredth of the stall limit at most, however small the rate is, and for less in sessions of many members. So
//! a repair always goes on, and whoever gets its bytes never takes the sender for one that has stopped: what has waited at every hop
//! of the longest chain is a quarter of that limit late, and of a gather, where stripes in flight wait for one another, a third.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// So many waits of a frame one after the other, in a chain of one hop per member, are as long as a stall.
const WAITS_PER_MEMBER: u32 = 4;
/// And of a session of any size, of which 33 may follow one another: two hops of each of 16 stripes in flight that are gathered at one
/// node, and the first. More stripes may be in flight there (`pipeline`), those of which it sends its own block alone: these wait one hop each,
/// on links to different nodes, where a frame goes in each tenth of a second.
const WAITS_MIN: u32 = 100;

/// Timers are late by up to a millisecond, and a chunk takes two at the usual rate: what was not sent in this time may be made up for.
const MADE_UP: Duration = Duration::from_millis(10);

/// A frame of a repair that is about to be sent.
#[derive(Debug)]
pub(super) struct RepairFrame<'a> {
    /// Its blocks.
    pub bytes: u64,
    /// Members of its session.
    pub members: usize,
    /// Says once that a reader waits for the session.
    pub awaited: &'a CancellationToken,
}

/// The bound of one executor, for all its repairs together.
#[derive(Debug)]
pub(super) struct RepairBound {
    /// Bytes per second; none for no bound.
    rate: Option<NonZeroU64>,
    /// Sessions end when nothing moves for so long.
    stall: Duration,
    /// Saves that are being protected here.
    saves: watch::Sender<usize>,
    /// When those before it will have had their time.
    until: Mutex<Instant>,
    held_us: AtomicU64,
}

/// A save is being protected here, until this is dropped.
#[derive(Debug)]
pub struct SaveGuard {
    bound: Arc<RepairBound>,
}

impl RepairBound {
    /// Of an executor whose sessions end when nothing moves for `stall`.
    pub fn new(rate: Option<NonZeroU64>, stall: Duration) -> Arc<Self> {
        Arc::new(Self {
            rate,
            stall,
            saves: watch::Sender::new(0),
            until: Mutex::new(Instant::now()),
            held_us: AtomicU64::new(0),
        })
    }

    /// A save begins to be protected.
    pub fn beside_save(self: &Arc<Self>) -> SaveGuard {
        self.saves.send_modify(|saves| *saves += 1);
        SaveGuard {
            bound: self.clone(),
        }
    }

    /// How long frames have waited till now, all streams added up.
    pub fn held(&self) -> Duration {
        Duration::from_micros(self.held_us.load(Ordering::Relaxed))
    }

    /// Waits until a frame may go.
    pub async fn wait_for_turn(&self, frame: RepairFrame<'_>) {
        let Some(rate) = self.rate else {
            return;
        };
        let mut saves = self.saves.subscribe();
        if *saves.borrow_and_update() == 0 || frame.awaited.is_cancelled() {
            return;
        }
        let now = Instant::now();
        let turn = self.take_turn(now, &frame, rate);
        if turn == now {
            return;
        }
        let _held = HeldFrame::begin(&self.held_us);
        tokio::select! {
            () = tokio::time::sleep_until(turn) => {}
            _ = saves.wait_for(|saves| *saves == 0) => {}
            () = frame.awaited.cancelled() => {}
        }
    }

    /// When the frame's turn comes. Of what was let through early the next ones owe two waits at most: one would be over when theirs
    /// is, and the first of them would not wait at all.
    fn take_turn(&self, now: Instant, frame: &RepairFrame<'_>, rate: NonZeroU64) -> Instant {
        let takes = Duration::from_secs_f64(frame.bytes as f64 / rate.get() as f64);
        let members = u32::try_from(frame.members).unwrap_or(u32::MAX);
        let waits = members.saturating_mul(WAITS_PER_MEMBER).max(WAITS_MIN);
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = (*until).clamp(now, now + self.stall / waits);
        let latest = now + 2 * self.stall / WAITS_MIN;
        let earliest = now.checked_sub(MADE_UP).unwrap_or(now);
        *until = ((*until).max(earliest) + takes).min(latest);
        turn
    }
}

impl Drop for SaveGuard {
    fn drop(&mut self) {
        self.bound.saves.send_modify(|saves| *saves -= 1);
    }
}

/// Adds the time of a wait to all others', also of one that is given up.
struct HeldFrame<'a> {
    since: Instant,
    total_us: &'a AtomicU64,
}

impl<'a> HeldFrame<'a> {
    fn begin(total_us: &'a AtomicU64) -> Self {
        let since = Instant::now();
        Self { since, total_us }
    }
}

impl Drop for HeldFrame<'_> {
    fn drop(&mut self) {
        let held = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.total_us.fetch_add(held, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(10);
    const HELD_MAX: Duration = Duration::from_millis(100);

    fn bound(bytes_per_s: u64) -> Arc<RepairBound> {
        RepairBound::new(NonZeroU64::new(bytes_per_s), STALL)
    }

    fn frame(bytes: u64, awaited: &CancellationToken) -> RepairFrame<'_> {
        RepairFrame {
            bytes,
            members: 10,
            awaited,
        }
    }

    /// How long so many frames of a stream take, sent as soon as they may be.
    async fn stream(bound: &RepairBound, frames: u64, bytes: u64) -> Duration {
        let (began, awaited) = (Instant::now(), CancellationToken::new());
        for _ in 0..frames {
            bound.wait_for_turn(frame(bytes, &awaited)).await;
        }
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn beside_a_save_all_streams_together_keep_to_the_rate() {
        let bound = bound(1_000_000);
        let _save = bound.beside_save();
        let (one, other) = tokio::join!(stream(&bound, 500, 10_000), stream(&bound, 500, 10_000));
        // The first two frames of all go at once.
        let rate = 9_980_000.0 / one.max(other).as_secs_f64();
        assert!((990_000.0..=1_000_000.0).contains(&rate), "{rate}");
        assert!(bound.held() > Duration::from_secs(15), "{:?}", bound.held());
    }

    /// 128 MiB/s of chunks of 256 KiB: one in 1.95 ms, with timers of a millisecond.
    #[tokio::test(start_paused = true)]
    async fn a_stream_alone_has_all_of_the_rate() {
        let bound = bound(128 << 20);
        let _save = bound.beside_save();
        let took = stream(&bound, 5_120, 256 << 10).await.as_secs_f64();
        assert!((9.9..=10.1).contains(&took), "{took}");
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_save_or_a_rate_nothing_waits() {
        let slow = bound(1);
        assert_eq!(stream(&slow, 1_000, 1_000).await, Duration::ZERO);
        drop(slow.beside_save());
        assert_eq!(stream(&slow, 1_000, 1_000).await, Duration::ZERO);
        let none = bound(0);
        let _save = none.beside_save();
        assert_eq!(stream(&none, 1_000, 1_000).await, Duration::ZERO);
        assert_eq!((slow.held(), none.held()), (Duration::ZERO, Duration::ZERO));
    }

    /// At a byte per second a frame would wait for twenty minutes, and its receiver ten seconds.
    #[tokio::test(start_paused = true)]
    async fn each_stream_goes_on_however_small_the_rate_is() {
        let bound = bound(1);
        let _save = bound.beside_save();
        let streams = (0..40).map(|_| stream(&bound, 20, 1_000_000));
        let took = futures::future::join_all(streams).await;
        assert!(took.iter().all(|took| *took <= 20 * HELD_MAX), "{took:?}");
        assert!(took.iter().all(|took| *took >= 18 * HELD_MAX), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_goes_at_once_when_the_save_is_over() {
        let (bound, awaited) = (bound(1), CancellationToken::new());
        let save = bound.beside_save();
        let other = bound.beside_save();
        bound.wait_for_turn(frame(1_000, &awaited)).await;
        let began = Instant::now();
        let ends = async {
            drop(other);
            tokio::time::sleep(HELD_MAX / 10).await;
            drop(save);
        };
        tokio::join!(bound.wait_for_turn(frame(1_000, &awaited)), ends);
        assert_eq!(began.elapsed(), HELD_MAX / 10);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_goes_at_once_when_a_reader_waits_for_it() {
        let (bound, awaited) = (bound(1), CancellationToken::new());
        let _save = bound.beside_save();
        bound.wait_for_turn(frame(1_000, &awaited)).await;
        let began = Instant::now();
        let reader = async {
            tokio::time::sleep(HELD_MAX / 10).await;
            awaited.cancel();
        };
        tokio::join!(bound.wait_for_turn(frame(1_000, &awaited)), reader);
        assert_eq!(began.elapsed(), HELD_MAX / 10);
        bound.wait_for_turn(frame(1_000, &awaited)).await;
        assert_eq!(began.elapsed(), HELD_MAX / 10);
    }
}
