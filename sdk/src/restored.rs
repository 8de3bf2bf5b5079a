//! Reading a restored shard: bytes leave only after their chunk was compared, and the digests have the manifest's root.
//!
//! What came from elsewhere is compared with its BLAKE3 digest. What never left this node is compared with the fingerprint
//! that its daemon took when it digested the chunk: that finds memory that has changed, at an eighth of the cost (what
//! it does not find: docs/SEMANTICS.md), and [`RestoredShard::by_digests`] asks for the digest all the same.

use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use storaged_arena::Slot;
use storaged_codec::{fingerprint, leaf_digest, root_digest};
use storaged_wire::local::{Reply, Rung};
use storaged_wire::{ChunkSize, Digest, Fingerprint, Manifest, Rank, SharedTable};

use crate::connection::unexpected;
use crate::error::ClientError;

/// What a daemon gave as a shard, before anything of it was compared.
#[derive(Debug)]
pub struct OpenedShard {
    /// Where its bytes are.
    pub slot: Slot,
    /// Bytes of the whole shard.
    pub length: u64,
    /// Size of its chunks.
    pub chunk: ChunkSize,
    /// The chunks' digests.
    pub leaves: SharedTable<Digest>,
    /// The rung of the ladder that it came from.
    pub rung: Rung,
    /// The chunks' fingerprints, if it never left the node.
    pub fingerprints: Option<SharedTable<Fingerprint>>,
}

impl OpenedShard {
    /// What a daemon has said and sent to this request, if that is a shard.
    pub(crate) fn of(
        request: &'static str,
        reply: Reply,
        fd: Option<OwnedFd>,
    ) -> Result<Self, ClientError> {
        let (length, chunk, leaves, rung, fingerprints, fd) = match (reply, fd) {
            (
                Reply::ShardOpened {
                    length,
                    chunk,
                    leaves,
                    rung,
                    fingerprints,
                },
                Some(fd),
            ) => (length, chunk, leaves, rung, fingerprints, fd),
            (
                Reply::ShardComing {
                    length,
                    chunk,
                    leaves,
                    rung,
                },
                Some(fd),
            ) => (length, chunk, leaves, rung, None, fd),
            (other, _) => return Err(unexpected(request, "a shard and its descriptor", &other)),
        };
        Ok(Self {
            slot: Slot::adopt(fd)?,
            length,
            chunk,
            leaves,
            rung,
            fingerprints,
        })
    }
}

/// A shard, or ranges of it, in this node's RAM.
#[derive(Debug)]
pub struct RestoredShard {
    rank: Rank,
    opened: OpenedShard,
}

impl RestoredShard {
    /// What a daemon gave as the shard of `rank`, if its table of digests has the root that the manifest names.
    ///
    /// # Errors
    /// [`ClientError::WrongLeaves`] if it has not.
    pub fn new(
        manifest: &Manifest,
        rank: Rank,
        mut opened: OpenedShard,
    ) -> Result<Self, ClientError> {
        let (length, chunk, leaves) = (opened.length, opened.chunk, &opened.leaves);
        let entry = manifest.shard(rank).filter(|entry| {
            entry.length == length
                && manifest.chunk == chunk
                && leaves.len() as u64 == chunk.count(length)
                && root_digest(leaves, length, chunk) == entry.root
        });
        if entry.is_none() || opened.slot.capacity() < length {
            return Err(ClientError::WrongLeaves { rank: rank.get() });
        }
        // Bytes that came over a network or from the durable tier were never fingerprinted by who vouches for them.
        let count = leaves.len();
        let is_own = opened.rung == Rung::OwnRam;
        opened.fingerprints = opened
            .fingerprints
            .filter(|prints| is_own && prints.len() == count);
        Ok(Self { rank, opened })
    }

    /// The same, with every chunk compared with its BLAKE3 digest, also where its fingerprint is known.
    #[must_use]
    pub fn by_digests(mut self) -> Self {
        self.opened.fingerprints = None;
        self
    }

    /// Bytes of the whole shard.
    pub fn length(&self) -> u64 {
        self.opened.length
    }

    /// Size of its chunks.
    pub fn chunk(&self) -> ChunkSize {
        self.opened.chunk
    }

    /// The rung of the ladder that it came from.
    pub fn rung(&self) -> Rung {
        self.opened.rung
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.opened.slot
    }

    /// Where it came from after all.
    pub(crate) fn came_from(&mut self, rung: Rung) {
        self.opened.rung = rung;
    }

    /// It is in other memory from now on. Its digests are those that have the manifest's root already.
    pub(crate) fn moves_to(&mut self, mut opened: OpenedShard) -> Result<(), ClientError> {
        let known = &self.opened;
        let is_same = opened.length == known.length
            && opened.chunk == known.chunk
            && opened.leaves == known.leaves
            && opened.slot.capacity() >= opened.length;
        if !is_same {
            let rank = self.rank.get();
            return Err(ClientError::WrongLeaves { rank });
        }
        opened.fingerprints = None;
        self.opened = opened;
        Ok(())
    }

    /// Copies bytes out, chunk by chunk, each verified. The ranges must have been opened.
    ///
    /// # Errors
    /// [`ClientError::Corrupt`] if a chunk is not what was saved; then nothing of that chunk is in `out`.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), ClientError> {
        self.read_into(offset, out, &mut Hand::new(self.opened.chunk))
    }

    /// Whether so many bytes from there are in the shard.
    pub(crate) fn check_within(&self, offset: u64, count: usize) -> Result<(), ClientError> {
        let (length, count) = (self.opened.length, count as u64);
        let end = offset.checked_add(count).filter(|end| *end <= length);
        end.map(drop).ok_or(ClientError::Outside {
            length,
            offset,
            count,
        })
    }

    /// A chunk that is wanted whole goes where it is wanted, any other into the hand first.
    pub(crate) fn read_into(
        &self,
        offset: u64,
        out: &mut [u8],
        hand: &mut Hand,
    ) -> Result<(), ClientError> {
        self.check_within(offset, out.len())?;
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let index = at / self.opened.chunk.bytes() as u64;
            let range = self.opened.chunk.range(index, self.opened.length);
            let whole = (range.end - range.start) as usize;
            if at == range.start && out.len() - done >= whole && hand.holds != Some(index) {
                self.bring(index, &mut out[done..done + whole])?;
                done += whole;
                continue;
            }
            let chunk = self.in_hand(index, whole, hand)?;
            let from = (at - range.start) as usize;
            let take = (whole - from).min(out.len() - done);
            out[done..done + take].copy_from_slice(&chunk[from..from + take]);
            done += take;
        }
        Ok(())
    }

    /// Fills every part, each chunk verified first, on up to `threads` threads. Parts in ascending order are cheapest:
    /// neighbours in one chunk are served by one verification.
    ///
    /// # Errors
    /// As `read_at`; then the parts' contents are of no use.
    pub fn read_many(
        &self,
        parts: &mut [(u64, &mut [u8])],
        threads: NonZeroUsize,
    ) -> Result<(), ClientError> {
        self.read_many_unless(parts, threads, || false)
    }

    /// Like [`RestoredShard::read_many`], but asks every now and then, in the calling thread, whether to go on.
    ///
    /// # Errors
    /// As `read_at`, and [`ClientError::CalledAway`] if it was not to go on.
    pub fn read_many_unless(
        &self,
        parts: &mut [(u64, &mut [u8])],
        threads: NonZeroUsize,
        mut is_called_away: impl FnMut() -> bool,
    ) -> Result<(), ClientError> {
        let queue = Queue::new(parts);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads.get().min(queue.turns))
                .map(|_| scope.spawn(|| self.work(&queue, || false)))
                .collect();
            let mut outcomes = vec![self.work(&queue, &mut is_called_away)];
            outcomes.extend(workers.into_iter().map(|worker| match worker.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            }));
            outcomes.into_iter().collect()
        })
    }

    /// Serves turns until there are none, or one failed.
    fn work(
        &self,
        queue: &Queue<'_, '_>,
        mut is_called_away: impl FnMut() -> bool,
    ) -> Result<(), ClientError> {
        let mut hand = Hand::new(self.opened.chunk);
        while let Some(turn) = queue.next() {
            let called_away = is_called_away().then_some(ClientError::CalledAway {
                request: "read a shard",
            });
            let read =
                |(offset, out): &mut (u64, &mut [u8])| self.read_into(*offset, out, &mut hand);
            let outcome = called_away.map_or_else(|| turn.iter_mut().try_for_each(read), Err);
            if outcome.is_err() {
                queue.end();
                return outcome;
            }
        }
        Ok(())
    }

    /// The chunk in the hand, verified when it got there.
    fn in_hand<'h>(
        &self,
        index: u64,
        length: usize,
        hand: &'h mut Hand,
    ) -> Result<&'h [u8], ClientError> {
        if hand.holds != Some(index) {
            hand.holds = None;
            hand.block.resize(self.opened.chunk.bytes(), 0);
            self.bring(index, &mut hand.block[..length])?;
            hand.holds = Some(index);
        }
        Ok(&hand.block[..length])
    }

    /// Brings one chunk to where it is wanted, and verifies it there, in the cache; zeros if it has another digest.
    fn bring(&self, index: u64, out: &mut [u8]) -> Result<(), ClientError> {
        let start = self.opened.chunk.range(index, self.opened.length).start;
        let read = self.opened.slot.read_at(start, out);
        let outcome = read
            .map_err(ClientError::from)
            .and_then(|()| self.verified(index, out));
        if outcome.is_err() {
            out.fill(0);
        }
        outcome
    }

    /// A chunk without its fingerprint may be right all the same, if it is the fingerprint that has rotted: its digest decides.
    fn verified(&self, index: u64, chunk: &[u8]) -> Result<(), ClientError> {
        let prints = self.opened.fingerprints.as_ref();
        if prints.is_some_and(|prints| prints[index as usize] == fingerprint(chunk)) {
            return Ok(());
        }
        let expected = self.opened.leaves[index as usize];
        let got = leaf_digest(chunk, index);
        if got == expected {
            return Ok(());
        }
        let rank = self.rank.get();
        Err(ClientError::Corrupt {
            rank,
            chunk: index,
            expected,
            got,
        })
    }
}

/// What one thread has in hand: a chunk of which less than all was wanted.
pub(crate) struct Hand {
    block: Vec<u8>,
    /// The chunk in the block, verified.
    holds: Option<u64>,
}

impl Hand {
    /// Whether this chunk is in it.
    pub(crate) fn has(&self, index: u64) -> bool {
        self.holds == Some(index)
    }

    pub(crate) fn new(chunk: ChunkSize) -> Self {
        Self {
            block: Vec::with_capacity(chunk.bytes()),
            holds: None,
        }
    }
}

/// A turn is so many bytes, unless one part is longer: some milliseconds, so that no thread is left with much at the end,
/// and signals are heard soon.
const TURN_BYTES: usize = 4 << 20;

/// Parts, handed out in turns of neighbours.
struct Queue<'a, 'b> {
    rest: Mutex<&'a mut [(u64, &'b mut [u8])]>,
    /// At least so many threads have something to do.
    turns: usize,
}

impl<'a, 'b> Queue<'a, 'b> {
    fn new(parts: &'a mut [(u64, &'b mut [u8])]) -> Self {
        let bytes: usize = parts.iter().map(|(_, out)| out.len()).sum();
        Self {
            turns: bytes.div_ceil(TURN_BYTES).min(parts.len()).max(1),
            rest: Mutex::new(parts),
        }
    }

    fn next(&self) -> Option<&'a mut [(u64, &'b mut [u8])]> {
        let mut rest = self.lock();
        let mut bytes = 0;
        let full = rest.iter().position(|(_, out)| {
            bytes += out.len();
            bytes >= TURN_BYTES
        });
        let count = full.map_or(rest.len(), |last| last + 1);
        let (turn, left) = std::mem::take(&mut *rest).split_at_mut(count);
        *rest = left;
        (!turn.is_empty()).then_some(turn)
    }

    /// No more turns: one has failed.
    fn end(&self) {
        *self.lock() = &mut [];
    }

    fn lock(&self) -> MutexGuard<'_, &'a mut [(u64, &'b mut [u8])]> {
        // A thread that panicked did so outside of the lock.
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
