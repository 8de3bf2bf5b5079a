//! A shard that is read while it still comes. What becomes of it is asked on the connection that opened it.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use storaged_sdk::wire::local::Rung;
use storaged_sdk::wire::{Digest, Rank};
use storaged_sdk::{ClientError, EarlyShard, Followed, LOOK_EVERY, left_ms};

use crate::fault::{Signals, is_signalled};
use crate::turn::limit;

/// The connection that a shard was opened on.
pub(crate) struct Opener {
    pub connection: Arc<Mutex<storaged_sdk::Client>>,
    pub is_hung_up: Arc<AtomicBool>,
    pub manifest: Digest,
    pub rank: Rank,
}

/// A shard that still came when it was opened.
pub(crate) struct Coming {
    opener: Opener,
    length: u64,
    shard: Mutex<EarlyShard>,
    /// As far as it is known. Apart from the shard, which is locked for as long as somebody reads.
    rung: Mutex<Rung>,
}

impl Coming {
    pub fn new(shard: EarlyShard, opener: Opener) -> Self {
        Self {
            opener,
            length: shard.length(),
            rung: Mutex::new(shard.rung()),
            shard: Mutex::new(shard),
        }
    }

    pub fn length(&self) -> u64 {
        self.length
    }

    pub fn rung(&self) -> Rung {
        *locked(&self.rung)
    }

    /// Fills every part as soon as it is there, without the interpreter lock.
    pub fn read_many(
        &self,
        parts: Vec<(u64, &mut [u8])>,
        threads: NonZeroUsize,
    ) -> Result<(), ClientError> {
        let mut shard = locked(&self.shard);
        let mut signals = Signals::default();
        let until = shard.until();
        let follow = || self.opener.follow(until);
        let read = shard.read_many_following(parts, threads, follow, || signals.came());
        *locked(&self.rung) = shard.rung();
        read
    }
}

impl Opener {
    fn follow(&self, until: Instant) -> Result<Followed, ClientError> {
        std::thread::sleep(LOOK_EVERY);
        let request = "follow shard";
        if self.is_hung_up.load(Ordering::Relaxed) {
            return Err(ClientError::CalledAway { request });
        }
        let mut client = match self.connection.try_lock() {
            Ok(client) => client,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread opens the next shard on it.
            Err(TryLockError::WouldBlock) => return Ok(Followed::StillComing),
        };
        let is_hung_up = self.is_hung_up.clone();
        let is_ended = move || is_hung_up.load(Ordering::Relaxed) || is_signalled();
        let left_ms = left_ms(until);
        client.be_patient(limit(left_ms).unless(is_ended));
        client.follow_shard(self.manifest, self.rank, left_ms)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked did so between two whole states.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
