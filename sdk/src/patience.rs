//! How long a caller waits, and what may call it away before: every wait of the client goes through here.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storaged_arena::{Wait, Wish, connect_waiting, ready_within};

/// The caller is asked this often whether it was called away: Ctrl-C is heard within it.
const SLICE: Duration = Duration::from_millis(50);
/// A daemon whose queue is full, or that is being started again, is tried this often.
const KNOCK: Duration = Duration::from_millis(20);
/// How long an answer may take that has no time of its own, unless the caller says.
const ANSWER: Duration = Duration::from_secs(15);

/// Says whether the caller was called away.
type Called = Arc<dyn Fn() -> bool + Send + Sync>;

/// How long to wait for an answer that has no time of its own (also for a connection), and what ends every wait early.
#[derive(Clone)]
pub struct Patience {
    answer: Duration,
    called_away: Option<Called>,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: ANSWER,
            called_away: None,
        }
    }
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience")
            .field("answer", &self.answer)
            .finish_non_exhaustive()
    }
}

impl Patience {
    /// Waits this long where a request has no time of its own.
    pub fn of(answer: Duration) -> Self {
        Self {
            answer,
            called_away: None,
        }
    }

    /// Ends every wait within a twentieth of a second after `called_away` says so.
    #[must_use]
    pub fn unless(mut self, called_away: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.called_away = Some(Arc::new(called_away));
        self
    }

    /// How long an answer may take that has no time of its own.
    pub(crate) fn answer(&self) -> Duration {
        self.answer
    }

    /// Whether the caller was called away.
    pub(crate) fn is_called_away(&self) -> bool {
        self.called_away.as_ref().is_some_and(|called| called())
    }

    /// The one wait of a call that must end by then.
    pub(crate) fn until(&self, deadline: Instant) -> Deadline<'_> {
        Deadline {
            patience: self,
            deadline,
        }
    }
}

/// A wait that ends at a time, or when the caller is called away.
pub(crate) struct Deadline<'a> {
    patience: &'a Patience,
    deadline: Instant,
}

impl Deadline<'_> {
    /// The time left; an error if there is none or the caller was called away.
    fn left(&self) -> io::Result<Duration> {
        if self.patience.is_called_away() {
            return Err(called_away());
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(left)
    }

    /// Waits a moment for a daemon that may be there soon.
    pub(crate) fn pause(&self) -> io::Result<()> {
        std::thread::sleep(self.left()?.min(KNOCK));
        Ok(())
    }

    /// Connects; the stream does not block.
    pub(crate) fn connect(&mut self, socket: &Path) -> io::Result<UnixStream> {
        connect_waiting(socket, &mut || self.pause())
    }
}

impl Wait for Deadline<'_> {
    fn until(&mut self, stream: &UnixStream, wish: Wish) -> io::Result<()> {
        loop {
            let slice = self.left()?.min(SLICE);
            if ready_within(stream, wish, slice)? {
                return Ok(());
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the caller was called away")]
struct CalledAway;

fn called_away() -> io::Error {
    io::Error::other(CalledAway)
}

/// Whether a wait was ended by the caller, not by its limit.
pub(crate) fn was_called_away(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<CalledAway>())
}
