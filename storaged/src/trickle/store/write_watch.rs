//! Whether a store still answers who writes. A file system that hangs ends no call with an error, its reads may go on, and copies that are given
//! up for newer ones end before any limit: nobody would hear of it.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::StoreError;

/// Longer than a large part takes on a slow line.
const SILENT_AFTER: Duration = Duration::from_secs(90);
/// Calls that were broken off count for so long. While a file system hangs there may be no newer ones: these hold all room for copies.
const ASKED_WITHIN: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
struct Writes {
    /// The first write that was begun since the last answer.
    silent_since: Option<Instant>,
    /// The last one that was begun.
    last: Option<Instant>,
    /// Writes that wait for an answer.
    waiting: usize,
    /// Those that were answered.
    answers: u64,
}

impl Writes {
    fn are_recent(&self) -> bool {
        self.last.is_some_and(|last| last.elapsed() < ASKED_WITHIN)
    }
}

/// Looks at the writes of a store: of parts, objects and ends of uploads. That an upload begins may be answered without a byte that is written.
#[derive(Debug, Default)]
pub struct WriteWatch(Mutex<Writes>);

/// A write that is broken off waits no more, and was not answered.
struct Unanswered<'a>(&'a WriteWatch);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.writes().waiting -= 1;
    }
}

impl WriteWatch {
    fn writes(&self) -> MutexGuard<'_, Writes> {
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
        let _unanswered = self.begins();
        let outcome = work.await;
        // That time was up says nothing of the store.
        if !matches!(outcome, Err(StoreError::Timeout { .. })) {
            let mut writes = self.writes();
            writes.answers += 1;
            // Others may wait still.
            writes.silent_since = (writes.waiting > 1).then(Instant::now);
        }
        outcome
    }

    /// Begins an upload: it may hang as a write does, and that it does not says nothing of writes.
    ///
    /// # Errors
    /// As it does.
    pub async fn begin<T>(
        &self,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let _unanswered = self.begins();
        work.await
    }

    fn begins(&self) -> Unanswered<'_> {
        let mut writes = self.writes();
        let now = Instant::now();
        // Of one that was broken off long ago nobody knows what would have come.
        if writes.waiting == 0 && !writes.are_recent() {
            writes.silent_since = None;
        }
        writes.last = Some(now);
        writes.silent_since.get_or_insert(now);
        writes.waiting += 1;
        Unanswered(self)
    }

    /// How many writes were answered.
    pub fn answers(&self) -> u64 {
        self.writes().answers
    }

    /// For how long no write has been answered, though some were asked for; none while that is no cause for alarm.
    pub fn silence(&self) -> Option<Duration> {
        let writes = self.writes();
        let is_asked = writes.waiting > 0 || writes.are_recent();
        let silent = writes.silent_since?.elapsed();
        (is_asked && silent >= SILENT_AFTER).then_some(silent)
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
