//! A shard that is read while it still comes: a session of the daemon fills the memory, and every chunk that has its digest is there already. What
//! is not there is tried again until the daemon says that all of it has come; so copying overlaps with receiving and decoding, and nothing is
//! believed that was not verified.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use storaged_wire::local::{ByteRange, Reply, Request, Rung};
use storaged_wire::{Digest, ManifestBytes, Rank};

use crate::client::Client;
use crate::connection::Answer;
use crate::error::ClientError;
use crate::restored::{Hand, OpenedShard, RestoredShard};

/// How long a reader that has all that is there leaves it at that before it looks again: so much comes meanwhile that copying it takes longer
/// than asking. It waits itself, as the daemon would have a timer for each reader.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Chunks of one look that were not there yet until it ends. Chunks come in their order, but for those of streams beside one another.
const MISSES_MAX: usize = 8;

/// As many bytes of a chunk's end tell mostly that nothing has been written there.
const TAIL_BYTES: u64 = 64;

/// A look's parts are handed out in turns of so many bytes.
const TURN_BYTES: usize = 4 << 20;

/// A shard, or ranges of it, in this node's RAM or on its way there.
#[derive(Debug)]
pub struct EarlyShard {
    manifest: Digest,
    shard: RestoredShard,
    /// Whoever opened it waits until then for it.
    until: Instant,
    /// All that was asked for is there.
    is_there: bool,
    /// The last look brought nothing: what seems to be missing is compared with its digest all the same, for it may be zeros. Else it would
    /// be waited for until all has come, and that is not heard of while another request has the connection.
    is_thorough: bool,
}

/// What a daemon says of a shard that comes.
#[derive(Debug)]
pub enum Followed {
    /// It still does.
    StillComing,
    /// All that was asked for is in the memory that the reader has.
    Came(Rung),
    /// It comes to other memory now, or is there.
    Elsewhere {
        /// That memory, before anything of it was compared.
        opened: Box<OpenedShard>,
        /// Whether all that was asked for is in it.
        is_there: bool,
    },
}

impl Client {
    /// Like [`Client::open_shard_without`], but gives the shard as soon as its memory is being filled. A daemon of a release that cannot do
    /// that, and one that has the shard in its RAM, give it when it is there.
    ///
    /// # Errors
    /// As `open_shard`; what is found later [`Client::follow_shard`] says.
    pub fn open_shard_early(
        &mut self,
        manifest: &ManifestBytes,
        rank: Rank,
        ranges: Vec<ByteRange>,
        timeout_ms: u32,
        without: Option<Rung>,
    ) -> Result<EarlyShard, ClientError> {
        let request = Request::OpenShard {
            manifest: manifest.name(),
            rank,
            ranges,
            timeout_ms,
            without,
            withheld: None,
            early: Some(true),
        };
        let until = Instant::now() + Duration::from_millis(timeout_ms.into());
        let (reply, fd) = self.call("open shard", &request, Answer::After(timeout_ms))?;
        let is_there = matches!(reply, Reply::ShardOpened { .. });
        let opened = OpenedShard::of("open shard", reply, fd)?;
        Ok(EarlyShard {
            manifest: manifest.name(),
            shard: RestoredShard::new(manifest.manifest(), rank, opened)?,
            until,
            is_there,
            is_thorough: false,
        })
    }

    /// What has become of a shard that this connection has opened early, as it is now. A daemon may take so long to say it: where one is stopped
    /// for a moment, or decoding has its cores, whoever waits for the shard waits for that.
    ///
    /// # Errors
    /// [`ClientError`] if no rung of the ladder has it, or not within the time that it was opened with.
    pub fn follow_shard(
        &mut self,
        manifest: Digest,
        rank: Rank,
        within_ms: u32,
    ) -> Result<Followed, ClientError> {
        let request = Request::FollowShard {
            manifest,
            rank,
            timeout_ms: 0,
        };
        let (reply, fd) = self.call("follow shard", &request, Answer::After(within_ms))?;
        match reply {
            Reply::StillComing => Ok(Followed::StillComing),
            Reply::ShardCame(rung) => Ok(Followed::Came(rung)),
            elsewhere => {
                let is_there = matches!(elsewhere, Reply::ShardOpened { .. });
                let opened = OpenedShard::of("follow shard", elsewhere, fd)?;
                Ok(Followed::Elsewhere {
                    opened: Box::new(opened),
                    is_there,
                })
            }
        }
    }
}

impl EarlyShard {
    /// The same, with every chunk compared with its BLAKE3 digest, also where its fingerprint is known.
    #[must_use]
    pub fn by_digests(self) -> Self {
        Self {
            shard: self.shard.by_digests(),
            ..self
        }
    }

    /// Bytes of the whole shard.
    pub fn length(&self) -> u64 {
        self.shard.length()
    }

    /// The rung of the ladder that it comes from, as far as that is known.
    pub fn rung(&self) -> Rung {
        self.shard.rung()
    }

    /// Until when whoever opened it waits for it.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Whether all that was asked for was there when this was last heard of.
    pub fn is_there(&self) -> bool {
        self.is_there
    }

    /// The shard as one whose chunks all are where they belong.
    ///
    /// # Errors
    /// Itself, while it comes.
    pub fn into_whole(self) -> Result<RestoredShard, Box<Self>> {
        if self.is_there {
            Ok(self.shard)
        } else {
            Err(Box::new(self))
        }
    }

    /// Fills every part, each chunk as soon as it is there, on up to `threads` threads. The ranges must have been opened on this connection.
    ///
    /// # Errors
    /// As [`RestoredShard::read_many`] and [`Client::follow_shard`]; then the parts' contents are of no use.
    pub fn read_many(
        &mut self,
        client: &mut Client,
        parts: Vec<(u64, &mut [u8])>,
        threads: NonZeroUsize,
    ) -> Result<(), ClientError> {
        let (manifest, rank, until) = (self.manifest, self.shard.rank(), self.until);
        let follow = || {
            std::thread::sleep(LOOK_EVERY);
            client.follow_shard(manifest, rank, left_ms(until))
        };
        self.read_many_following(parts, threads, follow, || false)
    }

    /// Like [`EarlyShard::read_many`]; what asks the daemon is the caller's, as is what calls it away.
    ///
    /// # Errors
    /// As `read_many`, whatever `follow` gives, and [`ClientError::CalledAway`].
    pub fn read_many_following(
        &mut self,
        parts: Vec<(u64, &mut [u8])>,
        threads: NonZeroUsize,
        mut follow: impl FnMut() -> Result<Followed, ClientError>,
        mut is_called_away: impl FnMut() -> bool,
    ) -> Result<(), ClientError> {
        let mut left = parts;
        if !self.is_there {
            // What is not in the shard would be waited for in vain.
            for (offset, out) in &left {
                self.shard.check_within(*offset, out.len())?;
            }
            left = cut_at_chunks(left, self.shard.chunk().bytes());
            left.sort_by_key(|(offset, _)| *offset);
        }
        while !self.is_there && !left.is_empty() {
            let before = left.len();
            left = self.copy_what_is_there(left, threads, &mut is_called_away)?;
            if left.is_empty() {
                return Ok(());
            }
            self.is_thorough = left.len() == before;
            match follow()? {
                Followed::StillComing => {}
                Followed::Came(rung) => {
                    self.shard.came_from(rung);
                    self.is_there = true;
                }
                Followed::Elsewhere { opened, is_there } => {
                    self.shard.moves_to(*opened)?;
                    self.is_there = is_there;
                }
            }
        }
        self.shard
            .read_many_unless(&mut left, threads, is_called_away)
    }

    /// What is left.
    fn copy_what_is_there<'b>(
        &self,
        parts: Vec<(u64, &'b mut [u8])>,
        threads: NonZeroUsize,
        is_called_away: &mut impl FnMut() -> bool,
    ) -> Result<Vec<(u64, &'b mut [u8])>, ClientError> {
        let look = Look {
            shard: &self.shard,
            is_thorough: self.is_thorough,
            rest: Mutex::new(parts.into_iter()),
            misses: AtomicUsize::new(0),
        };
        let outcomes = std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads.get())
                .map(|_| scope.spawn(|| look.work(&mut || false)))
                .collect();
            let mut outcomes = vec![look.work(is_called_away)];
            outcomes.extend(workers.into_iter().map(|worker| match worker.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            }));
            outcomes
        });
        let mut left = Vec::new();
        for outcome in outcomes {
            left.extend(outcome?);
        }
        let rest = look.rest.into_inner();
        left.extend(rest.unwrap_or_else(PoisonError::into_inner));
        left.sort_by_key(|(offset, _)| *offset);
        Ok(left)
    }
}

/// One pass over what is left to copy, by several threads.
struct Look<'s, 'b> {
    shard: &'s RestoredShard,
    is_thorough: bool,
    rest: Mutex<std::vec::IntoIter<(u64, &'b mut [u8])>>,
    misses: AtomicUsize,
}

impl<'b> Look<'_, 'b> {
    /// Takes turns until there are none, or enough was not there. Gives back what was not.
    fn work(
        &self,
        is_called_away: &mut impl FnMut() -> bool,
    ) -> Result<Vec<(u64, &'b mut [u8])>, ClientError> {
        let mut missed = Vec::new();
        let mut hand = Hand::new(self.shard.chunk());
        loop {
            if is_called_away() {
                let request = "read a shard";
                return Err(ClientError::CalledAway { request });
            }
            let mut turn = self.turn().into_iter();
            if turn.len() == 0 {
                return Ok(missed);
            }
            for (offset, out) in turn.by_ref() {
                match self.copy(offset, out, &mut hand) {
                    Ok(ControlFlow::Continue(())) => {}
                    Ok(ControlFlow::Break(())) => {
                        missed.push((offset, out));
                        if self.misses.fetch_add(1, Ordering::Relaxed) >= MISSES_MAX {
                            break;
                        }
                    }
                    Err(error) => {
                        self.misses.store(MISSES_MAX, Ordering::Relaxed);
                        return Err(error);
                    }
                }
            }
            missed.extend(turn);
        }
    }

    /// Copies a part of one chunk if that is there; `Break` if it is not yet.
    fn copy(
        &self,
        offset: u64,
        out: &mut [u8],
        hand: &mut Hand,
    ) -> Result<ControlFlow<()>, ClientError> {
        let index = offset / self.shard.chunk().bytes() as u64;
        if !self.is_thorough && !hand.has(index) && self.shard.is_blank(index)? {
            return Ok(ControlFlow::Break(()));
        }
        match self.shard.read_into(offset, out, hand) {
            Ok(()) => Ok(ControlFlow::Continue(())),
            Err(ClientError::Corrupt { .. }) => Ok(ControlFlow::Break(())),
            Err(error) => Err(error),
        }
    }

    fn turn(&self) -> Vec<(u64, &'b mut [u8])> {
        if self.misses.load(Ordering::Relaxed) >= MISSES_MAX {
            return Vec::new();
        }
        let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = 0;
        let mut turn = Vec::new();
        while bytes < TURN_BYTES
            && let Some(part) = rest.next()
        {
            bytes += part.1.len();
            turn.push(part);
        }
        turn
    }
}

impl RestoredShard {
    /// Whether a chunk ends as memory begins that nobody has written to: mostly it is not there yet.
    fn is_blank(&self, index: u64) -> Result<bool, ClientError> {
        if index >= self.chunk().count(self.length()) {
            return Ok(false);
        }
        let range = self.chunk().range(index, self.length());
        let mut tail = [0; TAIL_BYTES as usize];
        let bytes = TAIL_BYTES.min(range.end - range.start);
        let tail = &mut tail[..bytes as usize];
        self.slot().read_at(range.end - bytes, tail)?;
        Ok(tail.iter().all(|byte| *byte == 0))
    }
}

/// What is left until then.
pub fn left_ms(until: Instant) -> u32 {
    let left = until.saturating_duration_since(Instant::now());
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX)
}

/// The parts, none of them in two chunks.
fn cut_at_chunks(parts: Vec<(u64, &mut [u8])>, chunk: usize) -> Vec<(u64, &mut [u8])> {
    let mut pieces = Vec::with_capacity(parts.len());
    for (mut offset, mut out) in parts {
        while !out.is_empty() {
            let into = (offset % chunk as u64) as usize;
            let (piece, rest) = out.split_at_mut((chunk - into).min(out.len()));
            let bytes = piece.len() as u64;
            pieces.push((offset, piece));
            (offset, out) = (offset.saturating_add(bytes), rest);
        }
    }
    pieces
}
