//! A small pool of threads for arithmetic, so that no kernel runs on the async threads. Jobs come over a bounded
//! channel (crossbeam), results go back by a oneshot.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::{Sender, bounded};
use tokio::sync::{Semaphore, oneshot};

type Job = Box<dyn FnOnce() + Send>;

/// Threads for arithmetic.
#[derive(Debug, Clone)]
pub struct Pool {
    threads: Option<Threads>,
}

#[derive(Debug, Clone)]
struct Threads {
    jobs: Sender<Job>,
    /// One permit per place in the queue, so that a session waits for a place without blocking its thread.
    places: Arc<Semaphore>,
}

/// The pool's threads are gone: the process is ending.
#[derive(Debug, Clone, Copy)]
pub struct PoolClosed;

impl Pool {
    /// Starts `threads` threads, at least one.
    ///
    /// # Errors
    /// As the system says.
    pub fn start(threads: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        // Twice as many jobs as threads wait: a thread always finds its next one, and no more memory is held.
        let places = 2 * threads;
        let (jobs, queue) = bounded::<Job>(places);
        for index in 0..threads {
            let queue = queue.clone();
            let work = move || {
                for job in queue.iter() {
                    // A broken job ends its own session (its result never comes), not this thread.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            std::thread::Builder::new()
                .name(format!("codec-{index}"))
                .spawn(work)?;
        }
        let places = Arc::new(Semaphore::new(places));
        Ok(Self {
            threads: Some(Threads { jobs, places }),
        })
    }

    /// A pool that computes where it is called, for simulated time.
    pub fn inline() -> Self {
        Self { threads: None }
    }

    /// Queues a computation; the result comes on the receiver. Waits without blocking while the queue is full.
    ///
    /// # Errors
    /// [`PoolClosed`] if there is nobody to compute.
    pub async fn submit<T: Send + 'static>(
        &self,
        compute: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, PoolClosed> {
        let (result, receiver) = oneshot::channel();
        // The receiver is dropped when its session has ended: then nobody wants the result.
        let run = move || drop(result.send(compute()));
        let Some(threads) = &self.threads else {
            run();
            return Ok(receiver);
        };
        let place = threads
            .places
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| PoolClosed)?;
        let job = move || {
            drop(place);
            run();
        };
        // A permit is a place, so the queue is never full here.
        threads
            .jobs
            .try_send(Box::new(job))
            .map_err(|_| PoolClosed)?;
        Ok(receiver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn more_jobs_than_places_all_run() {
        let pool = Pool::start(2).unwrap();
        let jobs = (0..100).map(|number| {
            let pool = pool.clone();
            async move {
                pool.submit(move || number * 2)
                    .await
                    .unwrap()
                    .await
                    .unwrap()
            }
        });
        let results = futures::future::join_all(jobs).await;
        assert_eq!(
            results,
            (0..100).map(|number| number * 2).collect::<Vec<_>>()
        );
    }

    #[tokio::test]
    async fn a_broken_job_does_not_take_its_thread_along() {
        let pool = Pool::start(1).unwrap();
        let broken = pool.submit(|| panic!("on purpose")).await.unwrap();
        assert!(broken.await.is_err());
        assert_eq!(pool.submit(|| 5).await.unwrap().await, Ok(5));
    }
}
