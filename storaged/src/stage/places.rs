//! How many connections a socket has: who may not use it has none of them, and no user has all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use storaged_wire::framing::{FIRST_REQUEST_BYTES_MAX, LOCAL_FRAME_BYTES_MAX, REQUEST_BYTES_MAX};

/// Connections of a socket at once, or fewer: each is a thread of little memory; a node has some dozens of trainers. Of one user half of them,
/// where several may use the socket.
pub const CONNECTIONS_MAX: usize = 1024;
/// Of all who are told that they may not use a socket, or not now.
const TURNED_AWAY_MAX: usize = 16;
/// Bytes of long requests on a socket at once that no other socket can take: two of the longest that are no commits, or the commit of a
/// usual job.
const OWN_BYTES: usize = 2 * REQUEST_BYTES_MAX;
/// Bytes of all other long requests on all sockets: one of the longest.
const SHARED_BYTES: usize = LOCAL_FRAME_BYTES_MAX;

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
    most: usize,
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
    pub fn new(users: Users, most: usize) -> Arc<Self> {
        Arc::new(Self {
            users,
            most,
            taken: Mutex::default(),
        })
    }

    pub fn take(self: &Arc<Self>, user: u32) -> Result<ConnectionPlace, NoPlaceLeft> {
        let mut taken = locked(&self.taken);
        let all: usize = taken.values().sum();
        let own = taken.get(&user).copied().unwrap_or(0);
        if all >= self.most {
            return Err(NoPlaceLeft(all));
        }
        if self.users == Users::Several && own >= self.most.div_ceil(2) {
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

/// Memory for the long requests of all sockets beside what each has of its own. Sockets get it in turn.
#[derive(Debug, Default)]
pub(super) struct LongPool {
    state: Mutex<PoolState>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    held: usize,
    next_ticket: u64,
    /// Sockets that wait, in the order in which they came.
    waiting: BTreeSet<u64>,
}

impl LongPool {
    /// Waits for its turn and for room; whether there was any by then.
    fn take(&self, bytes: usize, end: Instant) -> bool {
        let mut state = locked(&self.state);
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiting.insert(ticket);
        loop {
            let is_next = state.waiting.first() == Some(&ticket);
            let fits = is_next && state.held + bytes <= SHARED_BYTES;
            let left = end.saturating_duration_since(Instant::now());
            if fits || left.is_zero() {
                state.waiting.remove(&ticket);
                state.held += if fits { bytes } else { 0 };
                self.freed.notify_all();
                return fits;
            }
            state = wait(&self.freed, state, left);
        }
    }

    fn give_back(&self, bytes: usize) {
        locked(&self.state).held -= bytes;
        self.freed.notify_all();
    }
}

fn wait<'a, T>(freed: &Condvar, guard: MutexGuard<'a, T>, at_most: Duration) -> MutexGuard<'a, T> {
    let waited = freed.wait_timeout(guard, at_most);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// Memory for the long requests of a socket. Without a limit a thousand connections could have the daemon hold 64 GiB beside its budget.
#[derive(Debug)]
pub(super) struct LongRequests {
    pool: Arc<LongPool>,
    held: Mutex<Held>,
    freed: Condvar,
    decoding: Mutex<()>,
}

/// What a socket's requests hold.
#[derive(Debug, Default)]
struct Held {
    own: usize,
    /// One of them has some of the pool, or waits for it. Were it all of them, others would wait behind each.
    shares: bool,
}

/// Whose memory a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lender {
    Own,
    Pool,
}

/// Memory of one request, until it is answered.
#[derive(Debug)]
pub(super) struct LongRequest {
    all: Arc<LongRequests>,
    bytes: usize,
    source: Lender,
}

impl LongRequests {
    /// Of one more socket.
    pub fn of(pool: &Arc<LongPool>) -> Arc<Self> {
        Arc::new(Self {
            pool: pool.clone(),
            held: Mutex::default(),
            freed: Condvar::new(),
            decoding: Mutex::default(),
        })
    }

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
        let source = self.choose(bytes, end).ok_or(within)?;
        // Dropped without any bytes, it gives its turn to the next one.
        let mut request = LongRequest {
            all: self.clone(),
            bytes: 0,
            source,
        };
        if source == Lender::Pool && !self.pool.take(bytes, end) {
            return Err(within);
        }
        request.bytes = bytes;
        Ok(Some(request))
    }

    /// Where the memory may come from, once it may.
    fn choose(&self, bytes: usize, end: Instant) -> Option<Lender> {
        let mut held = locked(&self.held);
        loop {
            if held.own + bytes <= OWN_BYTES {
                held.own += bytes;
                return Some(Lender::Own);
            }
            if !held.shares {
                held.shares = true;
                return Some(Lender::Pool);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            held = wait(&self.freed, held, left);
        }
    }

    /// The turn to decode one.
    pub fn decoding(&self) -> MutexGuard<'_, ()> {
        locked(&self.decoding)
    }
}

impl Drop for LongRequest {
    fn drop(&mut self) {
        let mut held = locked(&self.all.held);
        match self.source {
            Lender::Own => held.own -= self.bytes,
            Lender::Pool => {
                held.shares = false;
                self.all.pool.give_back(self.bytes);
            }
        }
        drop(held);
        self.all.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_users_cannot_have_all_places() {
        let places = Places::new(Users::Several, CONNECTIONS_MAX);
        let of_one: Vec<ConnectionPlace> = std::iter::from_fn(|| places.take(7).ok()).collect();
        assert_eq!(of_one.len(), CONNECTIONS_MAX / 2);
        let other = places.take(8).unwrap();
        drop(of_one);
        drop(other);
        assert!(locked(&places.taken).is_empty());
        let alone = Places::new(Users::One, CONNECTIONS_MAX);
        let all: Vec<ConnectionPlace> = std::iter::from_fn(|| alone.take(7).ok()).collect();
        assert_eq!(all.len(), CONNECTIONS_MAX);
        assert_eq!(alone.take(8).unwrap_err(), NoPlaceLeft(CONNECTIONS_MAX));
    }

    const SHORT_TIME: Duration = Duration::from_millis(1);

    fn sockets() -> [Arc<LongRequests>; 2] {
        let pool = Arc::default();
        [LongRequests::of(&pool), LongRequests::of(&pool)]
    }

    #[test]
    fn long_requests_wait_for_one_another_and_short_ones_for_none() {
        let [all, _] = sockets();
        let longest = all.hold(LOCAL_FRAME_BYTES_MAX, SHORT_TIME).unwrap();
        assert!(longest.is_some());
        let short = all.hold(FIRST_REQUEST_BYTES_MAX, SHORT_TIME).unwrap();
        assert!(short.is_none());
        let own = all.hold(OWN_BYTES, SHORT_TIME).unwrap();
        assert_eq!(all.hold(1 << 20, SHORT_TIME).unwrap_err(), SHORT_TIME);
        let waits = std::thread::spawn({
            let all = all.clone();
            move || all.hold(1 << 20, Duration::from_secs(600)).unwrap()
        });
        drop(longest);
        drop(waits.join().unwrap());
        drop(own);
        assert_eq!(locked(&all.held).own, 0);
        assert_eq!(locked(&all.pool.state).held, 0);
    }

    #[test]
    fn no_socket_takes_the_memory_of_another() {
        let [first, second] = sockets();
        let held = first.hold(LOCAL_FRAME_BYTES_MAX, SHORT_TIME).unwrap();
        // The second one's own part is there, and no more of the pool.
        let usual = second.hold(OWN_BYTES, SHORT_TIME).unwrap();
        assert!(usual.is_some());
        assert!(second.hold(OWN_BYTES, SHORT_TIME).is_err());
        drop(held);
        assert!(second.hold(OWN_BYTES, SHORT_TIME).is_ok());
    }

    #[test]
    fn sockets_get_the_pool_in_turn() {
        let [first, second] = sockets();
        let held = first.hold(LOCAL_FRAME_BYTES_MAX, SHORT_TIME).unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let wait_as = |name: &'static str, socket: &Arc<LongRequests>| {
            let (socket, order) = (socket.clone(), order.clone());
            std::thread::spawn(move || {
                let held = socket.hold(LOCAL_FRAME_BYTES_MAX, Duration::from_secs(600));
                locked(&order).push(name);
                drop(held);
            })
        };
        let other = wait_as("second", &second);
        while locked(&second.pool.state).waiting.is_empty() {
            std::thread::yield_now();
        }
        let again = [wait_as("first", &first), wait_as("first", &first)];
        drop(held);
        for waiting in again.into_iter().chain([other]) {
            waiting.join().unwrap();
        }
        assert_eq!(*locked(&order), ["second", "first", "first"]);
    }
}
