//! The durable tier as the driver opens it, and the threads of its copies.

use std::sync::{Arc, Weak};
use std::time::Duration;

use storaged_core::{DurableFault, Input, TierNews};
use tokio::sync::{mpsc, watch};

use super::StartError;
use super::shared_reads::LinkedPeers;
use crate::config::Config;
use crate::env::{Environment, Offload};
use crate::memory::Memory;
use crate::net::Net;
use crate::pool::Pool;
use crate::trickle::store::{self, Encrypted, KeyRing, Opening, Store, StoreError, WriteWatch};
use crate::trickle::{Trickle, TrickleThreads};

/// A start waits so long for the first attempt to open the durable tier: what is wrong with its configuration ends it.
const FIRST_ATTEMPT_WAIT: Duration = Duration::from_secs(3);

const LOOK_AT_WRITES_EVERY: Duration = Duration::from_secs(1);

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
    tokio::spawn(watch_tier(lazy.opening(), inputs.clone()));
    tokio::spawn(watch_writes(Arc::downgrade(&lazy.writes()), inputs.clone()));
    Ok(Arc::new(lazy))
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
async fn watch_writes(writes: Weak<WriteWatch>, inputs: mpsc::Sender<Input>) {
    // How many had been answered when it was found that no more are.
    let mut silent_at = None;
    loop {
        tokio::time::sleep(LOOK_AT_WRITES_EVERY).await;
        let Some(writes) = writes.upgrade() else {
            return;
        };
        let answers = writes.answers();
        let state = match (silent_at, writes.silence()) {
            (None, Some(silence)) => {
                silent_at = Some(answers);
                let seconds = silence.as_secs();
                Err(DurableFault::Unavailable(format!(
                    "it hangs: no write has been answered for {seconds} s"
                )))
            }
            // That nobody asks any more makes nothing well.
            (Some(before), None) if answers > before => {
                silent_at = None;
                Ok(())
            }
            _ => continue,
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
