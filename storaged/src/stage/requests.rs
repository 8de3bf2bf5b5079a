//! Requests as they come on a connection: each within its length and its time.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storaged_arena::{PassingError, Wait, Wish, begin_frame, ready_within, recv_body};
use storaged_wire::framing::{FIRST_REQUEST_BYTES_MAX, RANGES_MAX};
use storaged_wire::local::{ByteRange, Request};
use storaged_wire::{Refusal, RefusalCode};

use super::places::{LongRequest, LongRequests};

/// A request that has begun ends within this time, and a long one within what so many bytes take beside.
const REQUEST_WAIT: Duration = Duration::from_secs(5);
const BYTES_PER_SECOND: u64 = 16 << 20;
/// A long request waits so long for the memory of others.
const MEMORY_WAIT: Duration = Duration::from_secs(30);
/// So much of a request says what it is.
const START_BYTES: usize = 16;

/// What a connection may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Greeted {
    NotYet,
    Yes,
}

/// Waits for a socket until a moment.
#[derive(Debug, Clone, Copy)]
pub(super) enum Patience {
    /// As long as nothing has come at all; then each byte is due.
    ForTheFirst,
    Until(Instant),
}

/// One look at a socket on which nothing is due.
const LOOK: Duration = Duration::from_secs(3600);

impl Patience {
    pub fn of(time: Duration) -> Self {
        Self::Until(Instant::now() + time)
    }
}

impl Wait for Patience {
    fn until(&mut self, stream: &UnixStream, wish: Wish) -> io::Result<()> {
        loop {
            let left = match self {
                Self::ForTheFirst => LOOK,
                Self::Until(end) => end.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if ready_within(stream, wish, left)? {
                if matches!(self, Self::ForTheFirst) {
                    *self = Self::of(REQUEST_WAIT);
                }
                return Ok(());
            }
        }
    }
}

/// A request, and the memory that its bytes take until it is answered.
pub(super) struct Received {
    pub request: Request,
    pub memory: Option<LongRequest>,
}

/// No request.
pub(super) enum Unreceived {
    /// The connection has ended, or is of no use any more.
    Ended,
    /// It is not one, and those after it may be.
    Malformed(Refusal),
    /// What follows on the connection cannot be told from the rest of it.
    Refused(Refusal),
}

impl From<PassingError> for Unreceived {
    fn from(_: PassingError) -> Self {
        Self::Ended
    }
}

fn too_long(what: &str, length: usize, most: usize) -> Unreceived {
    let text = format!("expected {what} of at most {most} bytes, got {length}");
    Unreceived::Refused(Refusal::new(RefusalCode::Malformed, text))
}

/// A request of which it is known what it is and how long.
pub(super) struct BegunRequest {
    start: Vec<u8>,
    length: usize,
    memory: Option<LongRequest>,
}

/// The next request of a connection that does not block, as soon as it has begun and there is room for all of it.
pub(super) fn begin(
    stream: &UnixStream,
    greeted: Greeted,
    long: &Arc<LongRequests>,
) -> Result<BegunRequest, Unreceived> {
    let frame = begin_frame(stream, &mut Patience::ForTheFirst)?;
    let length = frame.length;
    if greeted == Greeted::NotYet && length > FIRST_REQUEST_BYTES_MAX {
        return Err(too_long("a hello first", length, FIRST_REQUEST_BYTES_MAX));
    }
    let mut body = Vec::new();
    let mut soon = Patience::of(REQUEST_WAIT);
    recv_body(stream, length.min(START_BYTES), &mut body, &mut soon)?;
    let most = Request::bytes_max(&body);
    if length > most {
        return Err(too_long("a request", length, most));
    }
    let memory = long.hold(length, MEMORY_WAIT).map_err(|waited| {
        let text = format!("no room for a request of {length} bytes in {waited:?}: long ones of others wait on this socket; try again");
        Unreceived::Refused(Refusal::new(RefusalCode::Busy, text))
    })?;
    Ok(BegunRequest {
        start: body,
        length,
        memory,
    })
}

impl BegunRequest {
    /// Its bytes, if they are so many that they count in the budget while they are here.
    pub fn counted_bytes(&self) -> Option<u64> {
        self.memory.as_ref().map(|_| self.length as u64)
    }

    /// All of it.
    pub fn receive(
        self,
        stream: &UnixStream,
        long: &Arc<LongRequests>,
    ) -> Result<Received, Unreceived> {
        let Self {
            start: mut body,
            length,
            memory,
        } = self;
        // Its memory is held: grown by doubling, it would take half as much again.
        body.reserve_exact(length.saturating_sub(body.len()));
        let sending = Duration::from_secs(length as u64 / BYTES_PER_SECOND);
        recv_body(
            stream,
            length,
            &mut body,
            &mut Patience::of(REQUEST_WAIT + sending),
        )?;
        // Long ones of a socket one after the other: a core that decodes serves nobody else.
        let _turn = memory.as_ref().map(|_| long.decoding());
        let request = Request::read(body).map_err(|error| malformed(error.to_string()))?;
        let request = with_ranges_merged(request)?;
        Ok(Received { request, memory })
    }
}

fn malformed(text: String) -> Unreceived {
    Unreceived::Malformed(Refusal::new(RefusalCode::Malformed, text))
}

/// Ranges become few here, where only who asks for them waits for that.
fn with_ranges_merged(mut request: Request) -> Result<Request, Unreceived> {
    if let Request::OpenShard { ranges, .. } = &mut request {
        *ranges = ByteRange::merged(std::mem::take(ranges));
        if ranges.len() > RANGES_MAX {
            return Err(malformed(format!(
                "expected at most {RANGES_MAX} ranges of chunks that are no neighbours, got {}: ask for them in parts, or for the whole shard",
                ranges.len()
            )));
        }
    }
    Ok(request)
}
