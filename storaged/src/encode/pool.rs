//! A small pool of threads for arithmetic, so that no kernel runs on the async threads. Jobs come over a bounded
//! channel (crossbeam), results go back by a oneshot.

use crossbeam::channel::{Sender, bounded};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Threads for arithmetic.
#[derive(Debug, Clone)]
pub struct Pool {
    jobs: Option<Sender<Job>>,
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
        let (jobs, queue) = bounded::<Job>(2 * threads);
        for index in 0..threads {
            let queue = queue.clone();
            std::thread::Builder::new()
                .name(format!("codec-{index}"))
                .spawn(move || queue.iter().for_each(|job| job()))?;
        }
        Ok(Self { jobs: Some(jobs) })
    }

    /// A pool that computes where it is called, for simulated time.
    pub fn inline() -> Self {
        Self { jobs: None }
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
        let Some(jobs) = &self.jobs else {
            run();
            return Ok(receiver);
        };
        let mut job: Job = Box::new(run);
        loop {
            match jobs.try_send(job) {
                Ok(()) => return Ok(receiver),
                Err(crossbeam::channel::TrySendError::Disconnected(_)) => return Err(PoolClosed),
                Err(crossbeam::channel::TrySendError::Full(back)) => {
                    job = back;
                    tokio::time::sleep(std::time::Duration::from_micros(200)).await;
                }
            }
        }
    }
}
