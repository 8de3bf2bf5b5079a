//! Where copies compute: what is short, on the codec's threads; what waits for the tier between two pieces, on threads of
//! its own, so that a slow tier keeps no session and no restore from the codec. Both are on the cores that the operator
//! names.

use tokio::sync::oneshot;

use super::Trickle;
use crate::pool::{Pool, PoolClosed};

/// The threads of copies.
#[derive(Debug, Clone)]
pub struct TrickleThreads {
    /// The codec's: reads of a part, digests, zstd, putting increments together.
    pub short: Pool,
    /// For making increments, part by part as the tier takes them.
    pub long: Pool,
}

impl Trickle {
    /// Computes on these threads from now on; without them on the runtime's.
    #[must_use]
    pub fn on(mut self, threads: TrickleThreads) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Does a short piece of work.
    pub(super) async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PoolClosed> {
        match &self.threads {
            Some(threads) => threads.short.compute(work).await,
            None => tokio::task::spawn_blocking(work)
                .await
                .map_err(|_| PoolClosed),
        }
    }

    /// Begins work that goes on while what it makes is taken away.
    pub(super) async fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, PoolClosed> {
        match &self.threads {
            Some(threads) => threads.long.submit(work).await,
            None => {
                let (result, receiver) = oneshot::channel();
                // Whoever waits may have gone.
                tokio::task::spawn_blocking(move || drop(result.send(work())));
                Ok(receiver)
            }
        }
    }
}
