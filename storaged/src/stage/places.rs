//! How many connections a socket has: who may not use it has none of them, and no user has all.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use storaged_wire::framing::{FIRST_REQUEST_BYTES_MAX, LOCAL_FRAME_BYTES_MAX};

/// Connections of a socket at once: each is a thread of little memory; a node has some dozens of trainers.
const CONNECTIONS_MAX: usize = 1024;
/// Of one user, where several may use the socket.
const CONNECTIONS_OF_USER_MAX: usize = 512;
/// Of all who are told that they may not use a socket, or not now.
const TURNED_AWAY_MAX: usize = 16;
/// Bytes of long requests on a socket at once: one of the longest.
const LONG_BYTES_MAX: usize = LOCAL_FRAME_BYTES_MAX;

/// Which users may have how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Users {
    One,
    Several,
}

/// A socket's connections by their users.
#[derive(Debug)]
pub(super) struct Places {
    users: Users,
    taken: Mutex<BTreeMap<u32, usize>>,
}

/// A connection's place; it is free when this is dropped.
#[derive(Debug)]
pub(super) struct ConnectionPlace {
    places: Arc<Places>,
    user: u32,
}

/// Why there is no place: so many are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoPlaceLeft(pub usize);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Places {
    pub fn new(users: Users) -> Arc<Self> {
        Arc::new(Self {
            users,
            taken: Mutex::default(),
        })
    }

    pub fn take(self: &Arc<Self>, user: u32) -> Result<ConnectionPlace, NoPlaceLeft> {
        let mut taken = locked(&self.taken);
        let all: usize = taken.values().sum();
        let own = taken.get(&user).copied().unwrap_or(0);
        if all >= CONNECTIONS_MAX {
            return Err(NoPlaceLeft(all));
        }
        if self.users == Users::Several && own >= CONNECTIONS_OF_USER_MAX {
            return Err(NoPlaceLeft(own));
        }
        taken.insert(user, own + 1);
        Ok(ConnectionPlace {
            places: self.clone(),
            user,
        })
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut taken = locked(&self.places.taken);
        if let Some(own) = taken.get_mut(&self.user) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.user);
            }
        }
    }
}

/// Room for those who are told that they may not connect. Nobody else waits for it.
#[derive(Debug, Default)]
pub(super) struct Porch(Mutex<usize>);

/// A place on it.
#[derive(Debug)]
pub(super) struct PorchPlace(Arc<Porch>);

impl Porch {
    /// None: it is full, and whoever comes is sent away without a word.
    pub fn step_on(self: &Arc<Self>) -> Option<PorchPlace> {
        let mut there = locked(&self.0);
        if *there >= TURNED_AWAY_MAX {
            return None;
        }
        *there += 1;
        Some(PorchPlace(self.clone()))
    }
}

impl Drop for PorchPlace {
    fn drop(&mut self) {
        *locked(&self.0.0) -= 1;
    }
}

/// Memory for the long requests of a socket. Without a limit a thousand connections could have the daemon hold 64 GiB beside its budget.
#[derive(Debug, Default)]
pub(super) struct LongRequests {
    held: Mutex<usize>,
    freed: Condvar,
}

/// Memory of one request, until it is answered.
#[derive(Debug)]
pub(super) struct LongRequest {
    all: Arc<LongRequests>,
    bytes: usize,
}

impl LongRequests {
    /// Waits for room for a request of so many bytes; none for one that is short. `Err`: there was none within this time.
    pub fn hold(
        self: &Arc<Self>,
        bytes: usize,
        within: Duration,
    ) -> Result<Option<LongRequest>, Duration> {
        if bytes <= FIRST_REQUEST_BYTES_MAX {
            return Ok(None);
        }
        let end = Instant::now() + within;
        let mut held = locked(&self.held);
        while *held + bytes > LONG_BYTES_MAX {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(within);
            }
            let waited = self.freed.wait_timeout(held, left);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *held += bytes;
        Ok(Some(LongRequest {
            all: self.clone(),
            bytes,
        }))
    }
}

impl Drop for LongRequest {
    fn drop(&mut self) {
        *locked(&self.all.held) -= self.bytes;
        self.all.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_users_cannot_have_all_places() {
        let places = Places::new(Users::Several);
        let of_one: Vec<ConnectionPlace> = std::iter::from_fn(|| places.take(7).ok()).collect();
        assert_eq!(of_one.len(), CONNECTIONS_OF_USER_MAX);
        let other = places.take(8).unwrap();
        drop(of_one);
        drop(other);
        assert!(locked(&places.taken).is_empty());
        let alone = Places::new(Users::One);
        let all: Vec<ConnectionPlace> = std::iter::from_fn(|| alone.take(7).ok()).collect();
        assert_eq!(all.len(), CONNECTIONS_MAX);
        assert_eq!(alone.take(8).unwrap_err(), NoPlaceLeft(CONNECTIONS_MAX));
    }

    #[test]
    fn long_requests_wait_for_one_another_and_short_ones_for_none() {
        let all = Arc::new(LongRequests::default());
        let short_time = Duration::from_millis(1);
        let first = all.hold(LONG_BYTES_MAX, short_time).unwrap();
        assert!(first.is_some());
        assert!(
            all.hold(FIRST_REQUEST_BYTES_MAX, short_time)
                .unwrap()
                .is_none()
        );
        assert_eq!(all.hold(1 << 20, short_time).unwrap_err(), short_time);
        let waits = std::thread::spawn({
            let all = all.clone();
            move || all.hold(1 << 20, Duration::from_secs(600)).unwrap()
        });
        drop(first);
        drop(waits.join().unwrap());
        assert_eq!(*locked(&all.held), 0);
    }
}
