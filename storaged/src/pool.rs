//! A small pool of threads for arithmetic, so that no kernel runs on the async threads: codec, digests, checks,
//! compression and deltas all run here, on the cores that the operator names and no others. Jobs come over a bounded
//! channel (crossbeam), results go back by a oneshot.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::{Sender, bounded};
use tokio::sync::{Semaphore, oneshot};

use crate::cores::{WorkerThreads, pin};

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
    count: usize,
}

/// The pool's threads are gone: the process is ending.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("expected a result of the codec's threads, got none: the daemon is stopping")]
pub struct PoolClosed;

impl Pool {
    /// Starts `threads` threads, at least one.
    ///
    /// # Errors
    /// As the system says.
    pub fn start(threads: usize) -> std::io::Result<Self> {
        Self::start_each("codec", &vec![None; threads.max(1)])
    }

    /// Starts threads of this name: so many, or one on each of these cores, which it never leaves.
    ///
    /// # Errors
    /// As the system says, also if there is no such core or this process may not use it.
    pub fn start_named(name: &str, threads: &WorkerThreads) -> std::io::Result<Self> {
        Self::start_each(name, &threads.cores())
    }

    /// One thread for each, on that core if one is named.
    fn start_each(name: &str, cores: &[Option<usize>]) -> std::io::Result<Self> {
        let threads = cores.len();
        // Twice as many jobs as threads wait: a thread always finds its next one, and no more memory is held.
        let places = 2 * threads;
        let (jobs, queue) = bounded::<Job>(places);
        for (index, core) in cores.iter().copied().enumerate() {
            let queue = queue.clone();
            let (pinned, told) = std::sync::mpsc::channel();
            let work = move || {
                let outcome = core.map_or(Ok(()), pin);
                let runs = outcome.is_ok();
                // Whoever started this thread waits for the word.
                let _ = pinned.send(outcome);
                if !runs {
                    return;
                }
                for job in queue.iter() {
                    // A broken job ends its own session (its result never comes), not this thread.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(work)?;
            told.recv().map_err(std::io::Error::other)??;
        }
        let places = Arc::new(Semaphore::new(places));
        Ok(Self {
            threads: Some(Threads {
                jobs,
                places,
                count: threads,
            }),
        })
    }

    /// How many computations go on at the same time, at most.
    pub fn threads(&self) -> usize {
        self.threads.as_ref().map_or(1, |threads| threads.count)
    }

    /// A pool that computes where it is called, for simulated time.
    pub fn inline() -> Self {
        Self { threads: None }
    }

    /// A pool whose threads are gone, for tests.
    #[cfg(test)]
    pub fn closed() -> Self {
        let (jobs, _) = bounded(1);
        let places = Arc::new(Semaphore::new(1));
        Self {
            threads: Some(Threads {
                jobs,
                places,
                count: 1,
            }),
        }
    }

    /// Queues a computation; the result comes on the receiver. Waits without blocking while the queue is full.
    ///
    /// # Errors
    /// `PoolClosed` if there is nobody to compute.
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

    /// Computes here, and waits for the result.
    ///
    /// # Errors
    /// `PoolClosed` if there is nobody to compute, or the computation broke.
    pub async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PoolClosed> {
        self.submit(work).await?.await.map_err(|_| PoolClosed)
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::CpuSet;

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
    async fn a_thread_stays_on_the_core_that_it_was_given() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU)
            .find(|core| allowed.is_set(*core))
            .unwrap();
        let pool = Pool::start_named("codec", &WorkerThreads::Cores(vec![core])).unwrap();
        let where_it_may_run = || rustix::thread::sched_getaffinity(None).unwrap();
        let its = pool.submit(where_it_may_run).await.unwrap().await.unwrap();
        assert!(its.is_set(core) && its.count() == 1);
    }

    #[test]
    fn a_core_that_is_not_there_is_refused() {
        for core in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU] {
            let error = Pool::start_named("codec", &WorkerThreads::Cores(vec![0, core]))
                .unwrap_err()
                .to_string();
            assert!(error.contains(&core.to_string()), "{error}");
        }
    }

    #[tokio::test]
    async fn a_broken_job_does_not_take_its_thread_along() {
        let pool = Pool::start(1).unwrap();
        let broken = pool.submit(|| panic!("on purpose")).await.unwrap();
        assert!(broken.await.is_err());
        assert_eq!(pool.submit(|| 5).await.unwrap().await, Ok(5));
    }
}
