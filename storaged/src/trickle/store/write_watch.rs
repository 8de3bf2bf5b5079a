//! Whether a store still answers who writes. A file system that hangs ends no call with an error, its reads may go on, and copies that are given
//! up for newer ones end before any limit: nobody would hear of it.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::StoreError;

/// Longer than most parts take. Whether the store hangs or is slow, a small write says (`driver/tier.rs`).
const SILENT_AFTER: Duration = Duration::from_secs(90);
/// Calls that were broken off count for so long. While a file system hangs there may be no newer ones: these hold all room for copies.
const ASKED_WITHIN: Duration = Duration::from_secs(600);

/// Calls that were broken off since the last write that was answered.
#[derive(Debug, Clone, Copy)]
struct BrokenOff {
    first: Instant,
    last: Instant,
}

#[derive(Debug, Default)]
struct Calls {
    /// When those began that wait for an answer, by their numbers.
    waiting: BTreeMap<u64, Instant>,
    broken_off: Option<BrokenOff>,
    begun: u64,
    /// Writes that were answered, and when the last one was.
    answers: u64,
    answered_at: Option<Instant>,
}

/// Looks at the calls of a store. What writes and is answered ends a silence. What only asks may hang as well, but that it is answered
/// says nothing of writes: a file system may read from its cache, and begin an upload without a byte that is written.
#[derive(Debug, Default)]
pub struct WriteWatch(Mutex<Calls>);

/// A call until it is answered.
struct Unanswered<'a> {
    watch: &'a WriteWatch,
    number: u64,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let mut calls = self.watch.calls();
        if let Some(began) = calls.waiting.remove(&self.number) {
            let first = calls.broken_off.map_or(began, |it| it.first.min(began));
            let last = calls.broken_off.map_or(began, |it| it.last.max(began));
            calls.broken_off = Some(BrokenOff { first, last });
        }
    }
}

/// That time was up says nothing of the store.
fn is_answer<T>(outcome: &Result<T, StoreError>) -> bool {
    !matches!(outcome, Err(StoreError::Timeout { .. }))
}

impl WriteWatch {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a write.
    ///
    /// # Errors
    /// As it does.
    pub async fn write<T>(
        &self,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let unanswered = self.begins();
        let outcome = work.await;
        if is_answer(&outcome) {
            unanswered.is_answered();
            self.note_answered();
        }
        outcome
    }

    /// Does what writes in the end, but nothing yet, or need not: begins of uploads. Where that is refused, so are writes.
    ///
    /// # Errors
    /// As it does.
    pub async fn begin<T>(
        &self,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let outcome = self.ask(work).await;
        if let Err(StoreError::Full { .. } | StoreError::Denied { .. }) = &outcome {
            self.note_answered();
        }
        outcome
    }

    /// Does what writes nothing. That a read is refused says nothing of writes either: a file system that hangs may know by heart who may read.
    ///
    /// # Errors
    /// As it does.
    pub async fn ask<T>(
        &self,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let unanswered = self.begins();
        let outcome = work.await;
        if is_answer(&outcome) {
            unanswered.is_answered();
        }
        outcome
    }

    /// A write was answered.
    pub fn note_answered(&self) {
        let mut calls = self.calls();
        calls.answers += 1;
        calls.answered_at = Some(Instant::now());
        calls.broken_off = None;
    }

    fn begins(&self) -> Unanswered<'_> {
        let mut calls = self.calls();
        // Of one that was broken off long ago nobody knows what would have come.
        if calls.waiting.is_empty() && !calls.were_broken_off_lately() {
            calls.broken_off = None;
        }
        calls.begun += 1;
        let number = calls.begun;
        calls.waiting.insert(number, Instant::now());
        Unanswered {
            watch: self,
            number,
        }
    }

    /// How many writes were answered.
    pub fn answers(&self) -> u64 {
        self.calls().answers
    }

    /// For how long no write has been answered, though some call was not; none while that is no cause to look.
    pub fn silence(&self) -> Option<Duration> {
        let calls = self.calls();
        let waits = calls.waiting.values().min().copied();
        let broken_off = calls.broken_off.filter(|_| calls.were_broken_off_lately());
        // Others may wait still while writes are answered.
        let first = waits.into_iter().chain(broken_off.map(|it| it.first)).min();
        let silent = first?.max(calls.answered_at.unwrap_or(first?)).elapsed();
        (silent >= SILENT_AFTER).then_some(silent)
    }
}

impl Calls {
    fn were_broken_off_lately(&self) -> bool {
        let last = self.broken_off.map(|it| it.last);
        last.is_some_and(|last| last.elapsed() < ASKED_WITHIN)
    }
}

impl Unanswered<'_> {
    fn is_answered(&self) {
        self.watch.calls().waiting.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn passes(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    /// A write that is never answered, and is given up after so long.
    async fn is_given_up(watch: &WriteWatch, after: u64) {
        let hangs = watch.write(std::future::pending::<Result<(), StoreError>>());
        let ended = tokio::time::timeout(Duration::from_secs(after), hangs).await;
        assert!(ended.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn writes_that_are_given_up_one_after_another_are_a_silence() {
        let watch = WriteWatch::default();
        for _ in 0..29 {
            is_given_up(&watch, 3).await;
        }
        assert_eq!(watch.silence(), None, "not for long enough");
        is_given_up(&watch, 3).await;
        assert!(watch.silence().is_some());
        // Whoever refuses answers, too.
        let refused = StoreError::NotFound {
            what: "a bucket".into(),
        };
        assert!(watch.write(async { Err::<(), _>(refused) }).await.is_err());
        assert_eq!(watch.silence(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_write_that_waits_is_a_silence_and_one_that_was_broken_off_long_ago_is_none() {
        let watch = WriteWatch::default();
        passes(1_000).await;
        assert_eq!(watch.silence(), None, "nobody has asked");
        let mut hangs = Box::pin(watch.write(std::future::pending::<Result<(), StoreError>>()));
        assert!(futures::poll!(&mut hangs).is_pending());
        passes(100).await;
        assert!(watch.silence().is_some());
        drop(hangs);
        assert!(watch.silence().is_some(), "it was not answered");
        passes(600).await;
        assert_eq!(watch.silence(), None, "nobody asks any more");
        is_given_up(&watch, 3).await;
        assert_eq!(watch.silence(), None, "it may be well again");
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_several_that_is_not_answered_is_a_silence() {
        let watch = WriteWatch::default();
        let mut hangs = Box::pin(watch.write(std::future::pending::<Result<(), StoreError>>()));
        assert!(futures::poll!(&mut hangs).is_pending());
        assert!(watch.write(async { Ok(()) }).await.is_ok());
        passes(80).await;
        assert_eq!(watch.silence(), None, "not for long enough");
        passes(20).await;
        assert!(watch.silence().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn what_writes_nothing_ends_no_silence_and_is_one_only_if_it_is_not_answered() {
        let watch = WriteWatch::default();
        let mut long = Box::pin(watch.ask(async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            Ok(())
        }));
        assert!(futures::poll!(&mut long).is_pending());
        assert!(watch.ask(async { Ok(()) }).await.is_ok());
        assert!(long.await.is_ok());
        passes(100).await;
        assert_eq!(watch.silence(), None, "both were answered");
        let hangs = watch.ask(std::future::pending::<Result<(), StoreError>>());
        let ended = tokio::time::timeout(Duration::from_secs(3), hangs).await;
        assert!(ended.is_err());
        assert!(watch.ask(async { Ok(()) }).await.is_ok());
        passes(100).await;
        assert!(watch.silence().is_some(), "another one was not");
        let full = StoreError::Full {
            what: "a disk".into(),
            source: "no space left".into(),
        };
        let denied = StoreError::Denied {
            what: "a folder".into(),
            source: "permission denied".into(),
        };
        assert!(watch.ask(async { Err::<(), _>(denied) }).await.is_err());
        assert!(watch.silence().is_some(), "it says nothing of writes");
        assert!(watch.begin(async { Err::<(), _>(full) }).await.is_err());
        assert_eq!(watch.silence(), None, "whoever refuses answers");
    }

    #[tokio::test(start_paused = true)]
    async fn that_a_limit_was_reached_is_no_answer() {
        let watch = WriteWatch::default();
        for _ in 0..5 {
            let late = async {
                tokio::time::sleep(Duration::from_secs(20)).await;
                Err::<(), _>(StoreError::Timeout {
                    what: "put_part".into(),
                    limit: Duration::from_secs(20),
                })
            };
            assert!(watch.write(late).await.is_err());
        }
        assert!(watch.silence().is_some());
    }
}
