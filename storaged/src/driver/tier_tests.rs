//! A durable tier that hangs, and one that only seems to.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_core::DurableFault;
use tokio::sync::watch;

use super::tier::WriteLook;
use crate::trickle::store::{
    Attempt, FakeStore, KeyPrefix, Lazy, ListPage, ObjectEntry, ObjectKey, Opening, PartBytes,
    PartNumber, PartState, Store, StoreError, StoreLimits, Upload,
};

/// How a tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GateState {
    Well,
    Hangs,
    /// Its file system is not mounted any more.
    Gone,
    /// It answers by errors, after 200 ms.
    Errs,
    /// The answer to one small write is lost on the way, which is noticed after 20 s.
    LosesOne,
}

/// Whoever asks waits while it hangs.
#[derive(Debug)]
struct Gate {
    fake: Arc<FakeStore>,
    state: watch::Receiver<GateState>,
    small_writes: AtomicUsize,
}

impl Gate {
    async fn passed(&self) -> Result<&FakeStore, StoreError> {
        let mut state = self.state.clone();
        let answers = state.wait_for(|state| *state != GateState::Hangs).await;
        let answers = answers.map(|state| *state);
        match answers.expect("a tier that somebody has") {
            GateState::Gone => Err(StoreError::NotFound {
                what: "a directory".into(),
            }),
            GateState::Errs => {
                tokio::time::sleep(Duration::from_millis(200)).await;
                Err(StoreError::Unavailable {
                    what: "a server".into(),
                    source: "slow down".into(),
                })
            }
            _ => Ok(&self.fake),
        }
    }
}

#[async_trait]
impl Store for Gate {
    fn limits(&self) -> StoreLimits {
        self.fake.limits()
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        self.passed().await?.begin(key, part_bytes).await
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        self.passed().await?.resume(key, part_bytes).await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        self.passed().await?.put_part(upload, part, bytes).await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        self.passed().await?.complete(upload, length).await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.passed().await?.abort(upload).await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        self.passed().await?.unfinished(under).await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.passed().await?.put_new(key, bytes).await
    }

    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let is_first = self.small_writes.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first && *self.state.borrow() == GateState::LosesOne {
            let limit = Duration::from_secs(20);
            tokio::time::sleep(limit).await;
            let what = "put_new_once".into();
            return Err(StoreError::Timeout { what, limit });
        }
        self.put_new(key, bytes).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        self.passed().await?.get(key, range).await
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        self.passed().await?.length(key).await
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        self.passed().await?.list(under).await
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        self.passed().await?.list_page(under, after, limit).await
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        self.passed().await?.list_folders(under).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.passed().await?.delete(key).await
    }
}

/// A tier that is open, and whoever looks at its writes.
struct WatchedTier {
    fake: Arc<FakeStore>,
    lazy: Arc<Lazy>,
    state: watch::Sender<GateState>,
    look: WriteLook,
}

impl WatchedTier {
    async fn opened() -> Self {
        let (state, seen) = watch::channel(GateState::Well);
        let fake = Arc::new(FakeStore::new());
        let gate: Arc<dyn Store> = Arc::new(Gate {
            fake: fake.clone(),
            state: seen,
            small_writes: AtomicUsize::new(0),
        });
        let limits = gate.limits();
        let attempt: Attempt = Box::new(move || Box::pin(std::future::ready(Ok(gate.clone()))));
        let lazy = Arc::new(Lazy::new(limits, attempt));
        let mut opening = lazy.opening();
        let open = opening.wait_for(|now| matches!(now, Opening::Open(_)));
        assert!(open.await.is_ok());
        let look = WriteLook::default();
        Self {
            fake,
            lazy,
            state,
            look,
        }
    }

    /// What the decisions are told within so many seconds, one after the other.
    async fn told_within(&mut self, seconds: u64) -> Vec<Result<(), DurableFault>> {
        let mut told = Vec::new();
        for _ in 0..seconds {
            tokio::time::sleep(Duration::from_secs(1)).await;
            told.extend(self.look.again(&self.lazy));
        }
        told
    }

    /// Somebody writes, and is answered.
    async fn writes(&self, name: &str) {
        let key: ObjectKey = name.parse().expect("a key");
        let bytes = Bytes::from_static(b"bytes");
        self.lazy.put_new(&key, bytes).await.expect("it is well");
    }

    /// Reads, and gives up after 3 s; whether it was answered.
    async fn lists(&self) -> bool {
        let all = KeyPrefix::root();
        let listed = tokio::time::timeout(Duration::from_secs(3), self.lazy.list(&all)).await;
        listed.is_ok()
    }
}

/// As when a copy is given up, and nothing is to be copied for long.
#[tokio::test(start_paused = true)]
async fn a_tier_that_is_well_is_not_said_to_hang_where_nobody_writes() {
    let mut tier = WatchedTier::opened().await;
    let key: ObjectKey = "job/run-1/step-1/shard".parse().expect("a key");
    let bytes = PartBytes::new(5 << 20, &tier.lazy.limits()).expect("a size");
    tier.lazy.begin(&key, bytes).await.expect("it is well");
    assert!(tier.lists().await);
    assert_eq!(tier.told_within(1_000).await, Vec::new());
    assert_eq!(tier.fake.requests(), 2, "and nothing more is asked of it");
    // One call that was broken off, for whatever reason, makes it ask once.
    tier.state.send_replace(GateState::Hangs);
    assert!(!tier.lists().await);
    tier.state.send_replace(GateState::Well);
    assert_eq!(tier.told_within(1_000).await, Vec::new());
    let asked = tier.fake.requests() - 2;
    assert!((1..=2).contains(&asked), "{asked}");
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_is_said_to_and_then_to_be_well_again_though_nobody_writes() {
    let mut tier = WatchedTier::opened().await;
    tier.state.send_replace(GateState::Hangs);
    assert!(
        !tier.lists().await,
        "reads hang, and so nobody comes to write"
    );
    let told = tier.told_within(200).await;
    assert!(
        matches!(&told[..], [Err(DurableFault::Unavailable(why))] if why.contains("it hangs")),
        "{told:?}"
    );
    assert_eq!(tier.told_within(2_000).await, Vec::new(), "it is said once");
    tier.state.send_replace(GateState::Gone);
    assert_eq!(tier.told_within(200).await, Vec::new(), "that is not well");
    tier.state.send_replace(GateState::Well);
    assert_eq!(tier.told_within(35).await, [Ok(())]);
    assert_eq!(tier.told_within(1_000).await, Vec::new());
}

/// As of a gateway that has taken a request and was then taken away.
#[tokio::test(start_paused = true)]
async fn a_small_write_whose_answer_was_lost_is_no_tier_that_hangs() {
    let mut tier = WatchedTier::opened().await;
    tier.state.send_replace(GateState::Hangs);
    assert!(!tier.lists().await);
    tier.state.send_replace(GateState::LosesOne);
    assert_eq!(tier.told_within(1_000).await, Vec::new());
}

/// Of a directory nothing ends a small write: it says no more once others are answered.
#[tokio::test(start_paused = true)]
async fn a_small_write_that_hangs_alone_says_nothing_once_others_are_answered() {
    let mut tier = WatchedTier::opened().await;
    tier.state.send_replace(GateState::Hangs);
    assert!(!tier.lists().await);
    assert_eq!(tier.told_within(200).await.len(), 1);
    // As what is answered by another thread of the file system.
    tier.lazy.writes().note_answered();
    assert_eq!(tier.told_within(2).await, [Ok(())]);
    assert_eq!(tier.told_within(85).await, Vec::new());
    tier.state.send_replace(GateState::Well);
    tier.writes("job/run-1/step-2/shard").await;
    assert_eq!(tier.told_within(1_000).await, Vec::new());
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_answers_by_errors_is_not_said_to_hang() {
    let mut tier = WatchedTier::opened().await;
    tier.state.send_replace(GateState::Hangs);
    assert!(!tier.lists().await);
    tier.state.send_replace(GateState::Errs);
    assert_eq!(tier.told_within(1_000).await, Vec::new());
}
