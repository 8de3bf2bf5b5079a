//! A durable tier that need not be there when the daemon starts: it is opened in the background, again and again until
//! that succeeds, and every call until then ends in what the last attempt said.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use storaged_core::Leftovers;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Randomness,
    Store, StoreError, StoreLimits, SystemRandomness, Upload, WriteWatch,
};

/// Pauses between attempts; a call that is made meanwhile ends the pause, but not before the first of them.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long a call waits for the attempt that it has asked for.
const ATTEMPT_WAIT: Duration = Duration::from_secs(6);

/// One attempt to open the store.
pub type Attempt =
    Box<dyn Fn() -> BoxFuture<'static, Result<Arc<dyn Store>, StoreError>> + Send + Sync>;

/// How far the opening is.
#[derive(Debug, Clone)]
pub enum Opening {
    /// The first attempt runs.
    First,
    /// So many attempts failed; the last one so.
    Failed(u64, Arc<StoreError>),
    /// It is open.
    Open(Arc<dyn Store>),
}

/// A store that opens by itself.
pub struct Lazy {
    limits: StoreLimits,
    opening: watch::Receiver<Opening>,
    wake: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
    writes: Arc<WriteWatch>,
    /// What is written to find out whether writes are answered: of this daemon alone.
    small: ObjectKey,
}

impl fmt::Debug for Lazy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lazy")
            .field("opening", &*self.opening.borrow())
            .finish_non_exhaustive()
    }
}

impl Drop for Lazy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Lazy {
    /// Begins to open a store with these limits.
    pub fn new(limits: StoreLimits, attempt: Attempt) -> Self {
        let (told, opening) = watch::channel(Opening::First);
        let wake = Arc::new(Notify::new());
        let task = tokio::spawn(open_at_last(attempt, told, wake.clone()));
        Self {
            limits,
            opening,
            wake,
            task,
            writes: Arc::default(),
            small: ObjectKey::of_probe(SystemRandomness.next_u64()),
        }
    }

    /// Whether writes are answered.
    pub fn writes(&self) -> Arc<WriteWatch> {
        self.writes.clone()
    }

    /// Writes a small object and removes it again: whether writes are answered, where none was for long.
    ///
    /// # Errors
    /// As the store says of the write.
    pub async fn write_small(&self) -> Result<(), StoreError> {
        let key = &self.small;
        let store = self.open().await?;
        let bytes = Bytes::from_static(b"storaged was here");
        let written = self.writes.begin(store.put_new_once(key, bytes)).await;
        if written.is_ok() {
            self.writes.note_answered();
            // It is no more than litter.
            let _ = timeout(ATTEMPT_WAIT, self.delete(key)).await;
        }
        written
    }

    /// How far it is, now and whenever that changes.
    pub fn opening(&self) -> watch::Receiver<Opening> {
        self.opening.clone()
    }

    async fn open(&self) -> Result<Arc<dyn Store>, StoreError> {
        let mut opening = self.opening.clone();
        let failed = match &*opening.borrow_and_update() {
            Opening::Open(store) => return Ok(store.clone()),
            Opening::First => 0,
            Opening::Failed(attempts, _) => *attempts,
        };
        self.wake.notify_one();
        let tried = opening.wait_for(|now| match now {
            Opening::First => false,
            Opening::Failed(attempts, _) => *attempts > failed,
            Opening::Open(_) => true,
        });
        let _ = timeout(ATTEMPT_WAIT, tried).await;
        match &*self.opening.borrow() {
            Opening::Open(store) => Ok(store.clone()),
            Opening::Failed(_, error) => Err(error.again()),
            Opening::First => Err(StoreError::Timeout {
                what: "opening the durable tier".into(),
                limit: ATTEMPT_WAIT,
            }),
        }
    }
}

async fn open_at_last(attempt: Attempt, told: watch::Sender<Opening>, wake: Arc<Notify>) {
    let mut pause = PAUSE_FIRST;
    for attempts in 1.. {
        let began = Instant::now();
        match attempt().await {
            Ok(store) => {
                // Nobody listens any more if the daemon is going down.
                let _ = told.send(Opening::Open(store));
                return;
            }
            Err(error) => {
                let _ = told.send(Opening::Failed(attempts, Arc::new(error)));
            }
        }
        tokio::time::sleep_until(began + PAUSE_FIRST).await;
        let _ = timeout(pause, wake.notified()).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[async_trait]
impl Store for Lazy {
    fn limits(&self) -> StoreLimits {
        self.limits
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        let store = self.open().await?;
        self.writes.begin(store.begin(key, part_bytes)).await
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        let store = self.open().await?;
        self.writes.begin(store.resume(key, part_bytes)).await
    }

    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        let store = self.open().await?;
        let begins = store.resume_or_begin(key, part_bytes, leftovers);
        self.writes.begin(begins).await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        let store = self.open().await?;
        self.writes.write(store.put_part(upload, part, bytes)).await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        let store = self.open().await?;
        self.writes.write(store.complete(upload, length)).await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.abort(upload)).await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.unfinished(under)).await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let store = self.open().await?;
        self.writes.write(store.put_new(key, bytes)).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.get(key, range)).await
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.length(key)).await
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.list(under)).await
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.list_page(under, after, limit)).await
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.list_folders(under)).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.delete(key)).await
    }

    async fn check_place(&self) -> Result<(), StoreError> {
        let store = self.open().await?;
        self.writes.ask(store.check_place()).await
    }
}
