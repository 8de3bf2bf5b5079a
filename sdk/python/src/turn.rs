//! One call at a time on a connection: whoever comes while another is on waits for its turn, within its own limit.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use storaged_sdk::{ClientError, Patience};

use crate::fault::{is_signalled, raised};

/// A turn is looked for this often.
const KNOCK: Duration = Duration::from_millis(5);

/// What a call waits with: its limit, and Ctrl-C.
pub(crate) fn patience(limit_ms: u32) -> Patience {
    limit(limit_ms).unless(is_signalled)
}

/// The limit alone.
pub(crate) fn limit(limit_ms: u32) -> Patience {
    Patience::of(Duration::from_millis(limit_ms.into()))
}

/// Runs `call` with the connection and the milliseconds that are left, without the interpreter lock.
pub(crate) fn take_turn<C: Send, T: Send>(
    py: Python<'_>,
    connection: &Mutex<C>,
    limit_ms: u32,
    call: impl FnOnce(&mut C, u32) -> Result<T, ClientError> + Send,
) -> PyResult<T> {
    py.detach(|| {
        let started = Instant::now();
        let mut connection = lock_within(connection, started, limit_ms)?;
        let waited = u32::try_from(started.elapsed().as_millis()).unwrap_or(u32::MAX);
        call(&mut connection, limit_ms.saturating_sub(waited))
    })
    .map_err(|error| raised(py, &error))
}

fn lock_within<C>(
    connection: &Mutex<C>,
    started: Instant,
    limit_ms: u32,
) -> Result<MutexGuard<'_, C>, ClientError> {
    let request = "the call before this one";
    loop {
        match connection.try_lock() {
            Ok(guard) => return Ok(guard),
            // It only says that another thread panicked between two calls; the connection knows if it is broken.
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        if is_signalled() {
            return Err(ClientError::CalledAway { request });
        }
        if started.elapsed() >= Duration::from_millis(limit_ms.into()) {
            let limit_ms = limit_ms.into();
            return Err(ClientError::TimedOut { request, limit_ms });
        }
        std::thread::sleep(KNOCK);
    }
}
