//! The durable tier as the driver opens it, and the threads of its copies.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt;
use storaged_core::{DurableFault, Input, TierNews};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::StartError;
use super::shared_reads::LinkedPeers;
use crate::config::Config;
use crate::env::{Environment, Offload};
use crate::memory::Memory;
use crate::net::Net;
use crate::pool::Pool;
use crate::trickle::store::{self, Encrypted, KeyRing, Lazy, Opening, Store, StoreError};
use crate::trickle::{Trickle, TrickleThreads};

/// A start waits so long for the first attempt to open the durable tier: what is wrong with its configuration ends it.
const FIRST_ATTEMPT_WAIT: Duration = Duration::from_secs(3);

const LOOK_AT_WRITES_EVERY: Duration = Duration::from_secs(1);
/// A store that has not done a small write within so long hangs.
const SMALL_WRITE_WITHIN: Duration = Duration::from_secs(30);

/// Begins to open the durable tier. A start waits a moment for the first attempt, but not for a tier that is down.
async fn open_tier(
    config: &store::StoreConfig,
    inputs: &mpsc::Sender<Input>,
) -> Result<Arc<dyn Store>, StoreError> {
    let lazy = store::open_lazily(config, Arc::new(store::SystemRandomness))?;
    let mut opening = lazy.opening();
    let first = opening.wait_for(|now| !matches!(now, Opening::First));
    let _ = tokio::time::timeout(FIRST_ATTEMPT_WAIT, first).await;
    if let Opening::Failed(_, error) = &*opening.borrow()
        && let StoreError::Invalid { .. } = **error
    {
        return Err(error.again());
    }
    let lazy = Arc::new(lazy);
    tokio::spawn(watch_tier(lazy.opening(), inputs.clone()));
    tokio::spawn(watch_writes(Arc::downgrade(&lazy), inputs.clone()));
    Ok(lazy)
}

/// Tells the decisions how the opening goes.
async fn watch_tier(mut opening: watch::Receiver<Opening>, inputs: mpsc::Sender<Input>) {
    loop {
        let (state, last) = match &*opening.borrow_and_update() {
            Opening::First => (None, false),
            Opening::Failed(_, error) => (Some(Err(DurableFault::from(&**error))), false),
            Opening::Open(_) => (Some(Ok(())), true),
        };
        if let Some(state) = state {
            let _ = inputs
                .send(Input::DurableState(TierNews::Opened(state)))
                .await;
        }
        if last || opening.changed().await.is_err() {
            return;
        }
    }
}

/// Tells the decisions whether writes are answered, while there is a store.
async fn watch_writes(store: Weak<Lazy>, inputs: mpsc::Sender<Input>) {
    let mut look = WriteLook::default();
    loop {
        tokio::time::sleep(LOOK_AT_WRITES_EVERY).await;
        let Some(store) = store.upgrade() else {
            return;
        };
        let Some(state) = look.again(&store) else {
            continue;
        };
        if inputs
            .send(Input::DurableState(TierNews::Writes(state)))
            .await
            .is_err()
        {
            return;
        }
    }
}

/// Finds out whether a store hangs. Where no write was answered for long, none may have been asked for, or a slow one may be on its way: a
/// small one of its own tells. It is not broken off, so that a file system that hangs has one of them at a time, whose answer says that
/// all is well again; stores behind a network end it themselves (`Store::put_new_once`).
#[derive(Debug, Default)]
pub(super) struct WriteLook {
    small: Option<SmallWrite>,
    /// The store has answered, by an error: that is no silence, and the next small write is soon enough then.
    rests_until: Option<Instant>,
    /// How many writes had been answered when it was told that no more are.
    told_at: Option<u64>,
}

#[derive(Debug)]
struct SmallWrite {
    task: JoinHandle<Result<(), StoreError>>,
    /// Of the first one.
    began: Instant,
}

/// Whether the store has done what it was asked for, or can say why it does no such thing: then it hangs no more. A mount that has gone, or
/// a server that answers by errors, is not well yet.
fn is_well(written: &Result<(), StoreError>) -> bool {
    use StoreError::{AlreadyExists, Denied, Full};
    matches!(
        written,
        Ok(()) | Err(Full { .. } | Denied { .. } | AlreadyExists { .. })
    )
}

impl SmallWrite {
    fn begin(store: &Arc<Lazy>) -> JoinHandle<Result<(), StoreError>> {
        let store = store.clone();
        tokio::spawn(async move { store.write_small().await })
    }

    /// What the store has said of it. One that took too long is begun anew.
    fn said(&mut self, store: &Arc<Lazy>) -> Option<Result<(), StoreError>> {
        match (&mut self.task).now_or_never()? {
            Err(_) | Ok(Err(StoreError::Timeout { .. })) => {
                self.task = Self::begin(store);
                None
            }
            Ok(written) => Some(written),
        }
    }
}

impl WriteLook {
    /// What is news of it: that it hangs, or answers again.
    pub fn again(&mut self, store: &Arc<Lazy>) -> Option<Result<(), DurableFault>> {
        let writes = store.writes();
        // It was slow; what others are told in errors they tell themselves. One small write that is not answered all the same says no
        // more: it may have been lost on the way.
        if self.told_at.is_some_and(|before| writes.answers() > before) {
            (self.told_at, self.rests_until) = (None, None);
            if let Some(small) = &mut self.small {
                small.began = Instant::now();
            }
            return Some(Ok(()));
        }
        let now = Instant::now();
        if self.rests_until.is_some_and(|until| now < until) {
            return None;
        }
        let Some(small) = &mut self.small else {
            if self.told_at.is_none() {
                writes.silence()?;
            }
            let task = SmallWrite::begin(store);
            self.small = Some(SmallWrite { task, began: now });
            return None;
        };
        if let Some(written) = small.said(store) {
            self.small = None;
            if is_well(&written) {
                return self.told_at.take().map(|_| Ok(()));
            }
            // Who has not been told hears of errors from what fails by them.
            self.rests_until = Some(now + SMALL_WRITE_WITHIN);
            return None;
        }
        if self.told_at.is_some() || small.began.elapsed() < SMALL_WRITE_WITHIN {
            return None;
        }
        let seconds = writes.silence()?.as_secs();
        self.told_at = Some(writes.answers());
        Some(Err(DurableFault::Unavailable(format!(
            "it hangs: no write has been answered for {seconds} s"
        ))))
    }
}

/// What of the daemon the tier's copies need.
pub(super) struct TierParts<'a> {
    pub memory: &'a Arc<Memory>,
    pub keys: &'a Arc<KeyRing>,
    /// The links, if there are any.
    pub net: Option<&'a Arc<Net>>,
}

impl<'a> TierParts<'a> {
    pub fn of(memory: &'a Arc<Memory>, keys: &'a Arc<KeyRing>, net: Option<&'a Arc<Net>>) -> Self {
        Self { memory, keys, net }
    }
}

/// What copies to the configured tier, or to a test's.
pub(super) async fn start_trickle(
    config: &Config,
    env: &Environment,
    parts: TierParts<'_>,
    inputs: &mpsc::Sender<Input>,
) -> Result<Option<Arc<Trickle>>, StartError> {
    let TierParts { memory, keys, net } = parts;
    let store = match (&env.store, &config.durable) {
        (Some(store), _) => store.clone(),
        (None, Some(config)) => open_tier(config, inputs).await?,
        (None, None) => return Ok(None),
    };
    let threads = trickle_threads(config, env)?;
    let store = Arc::new(match &config.encryption {
        Some(encryption) => {
            let pool = threads.as_ref().map(|threads| threads.short.clone());
            Encrypted::new(store, keys.clone(), encryption.plain, pool)
        }
        None => Encrypted::without_keys(store),
    });
    let trickle = Trickle::new(store, memory.clone(), config.trickle);
    let mut trickle = trickle.sharing(&config.shares.trickle_rates);
    if let Some(net) = net.filter(|_| config.shares_reads()) {
        let peers = LinkedPeers::new(config.name.clone(), net.clone());
        trickle = trickle.reading_with(Arc::new(peers));
    }
    Ok(Some(Arc::new(match threads {
        Some(threads) => trickle.on(threads),
        None => trickle,
    })))
}

/// Threads of copies: the codec's and, on the same cores, some that may wait for the tier. None under simulated time.
fn trickle_threads(
    config: &Config,
    env: &Environment,
) -> Result<Option<TrickleThreads>, StartError> {
    if env.offload == Offload::Inline {
        return Ok(None);
    }
    let long = Pool::start_named("tier", &config.codec_threads);
    let long = long.map_err(|source| StartError::Start {
        what: "the threads of the durable tier",
        source,
    })?;
    let short = env.pool.clone();
    Ok(Some(TrickleThreads { short, long }))
}
