//! The durable tier's opening: in the background, so that a tier that is down holds up no start.

use std::sync::Arc;
use std::time::Duration;

use storaged_core::{DurableFault, Input};
use tokio::sync::{mpsc, watch};

use crate::trickle::store::{self, Opening, Store, StoreError};

/// A start waits so long for the first attempt to open the durable tier: what is wrong with its configuration ends it.
const FIRST_ATTEMPT_WAIT: Duration = Duration::from_secs(3);

/// Begins to open the durable tier. A start waits a moment for the first attempt, but not for a tier that is down.
pub(super) async fn open_tier(
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
            let _ = inputs.send(Input::DurableState(state)).await;
        }
        if last || opening.changed().await.is_err() {
            return;
        }
    }
}
