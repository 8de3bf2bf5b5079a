//! Digests and checks of whole shards, on the codec's threads and no others. A shard is done window by window, so that
//! a large one does not keep sessions from the threads, and several threads share it.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use storaged_codec::{ChunkSize, root_digest};
use storaged_core::{CheckPart, ParityId, ScrubPiece, ScrubTally, SlotShard, Unread};
use storaged_wire::{Enclosure, SharedBytes, SlotId};
use thiserror::Error;

use crate::driver::timed;
use crate::memory::{Digested, Memory, ReadError, ShardSize};
use crate::pool::Pool;

/// Bytes of a window: a few milliseconds of one thread.
const WINDOW_BYTES: usize = 8 << 20;
/// Windows of one shard that are in the threads' queue beyond one for each thread: whoever ends one finds the next there, also while the
/// oldest, whose result comes first, takes longer. A window that waits is a range; one that is computed has a chunk's block.
const WINDOWS_WAITING: usize = 2;

/// Why a shard has no digest.
#[derive(Debug, Error)]
pub enum DigestError {
    /// The slot.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The threads: the daemon stops, or the computation broke.
    #[error("expected a result of the codec's threads, got none: the daemon is stopping")]
    Stopped,
}

fn windows(count: u64, chunk: ChunkSize) -> Vec<Range<u64>> {
    let step = (WINDOW_BYTES / chunk.bytes()).max(1);
    let starts = (0..count).step_by(step);
    starts
        .map(|start| start..count.min(start + step as u64))
        .collect()
}

/// Computes on the pool; nothing if it is gone.
async fn compute<T: Send + 'static>(
    pool: &Pool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DigestError> {
    let submitted = pool.submit(work).await;
    let result = submitted.map_err(|_| DigestError::Stopped)?;
    result.await.map_err(|_| DigestError::Stopped)
}

/// Computes all of them on all threads, and gives the results in order.
fn in_order<'a, T: Send + 'static, W: FnOnce() -> T + Send + 'static>(
    pool: &'a Pool,
    works: impl Iterator<Item = W> + 'a,
) -> impl Stream<Item = Result<T, DigestError>> + 'a {
    let computed = works.map(move |work| compute(pool, work));
    futures::stream::iter(computed).buffered(pool.threads() + WINDOWS_WAITING)
}

/// Digests the shard of this size in a slot, chunk by chunk.
///
/// # Errors
/// [`DigestError`] if the slot cannot be read, or the daemon stops.
pub async fn digest(
    pool: &Pool,
    memory: &Arc<Memory>,
    slot: SlotId,
    size: ShardSize,
) -> Result<Digested, DigestError> {
    let ShardSize { length, chunk } = size;
    let windows = windows(chunk.count(length), chunk).into_iter();
    let works = windows.map(|window| {
        let memory = memory.clone();
        move || timed(|| memory.digest(slot, length, chunk, window))
    });
    let mut parts = in_order(pool, works);
    let (mut leaves, mut prints) = (Vec::new(), Vec::new());
    let mut busy = Duration::ZERO;
    while let Some(part) = parts.next().await {
        let (digests, took) = part?;
        let (more_leaves, more_prints) = digests?;
        busy += took;
        leaves.extend(more_leaves);
        prints.extend(more_prints);
    }
    Ok(Digested {
        root: root_digest(&leaves, length, chunk),
        leaves: leaves.into(),
        prints: prints.into(),
        read: length,
        busy,
    })
}

/// The same of a shard that is back: one whose chunks were all verified as they were put there is not read.
///
/// # Errors
/// As [`digest`].
pub async fn digest_restored(
    pool: &Pool,
    memory: &Arc<Memory>,
    slot: SlotId,
    size: ShardSize,
) -> Result<Digested, DigestError> {
    let from = memory.clone();
    let put_back = compute(pool, move || from.take_put_back(slot, size)).await??;
    let Some(noted) = put_back else {
        return digest(pool, memory, slot, size).await;
    };
    Ok(Digested {
        root: root_digest(&noted.leaves, size.length, size.chunk),
        leaves: noted.leaves,
        prints: noted.prints,
        read: 0,
        busy: Duration::ZERO,
    })
}

/// Reads and checks parts one after the other: the bytes that are good, and what is wrong, if anything.
pub async fn check_all(
    pool: &Pool,
    memory: &Arc<Memory>,
    parts: Vec<CheckPart>,
) -> Vec<(u64, Option<String>)> {
    let mut outcomes = Vec::with_capacity(parts.len());
    for part in parts {
        outcomes.push(match part {
            CheckPart::Shard(shard) => check_shard(pool, memory, shard).await,
            CheckPart::Parity(set) => check_parity(pool, memory, set).await,
            CheckPart::Enclosure { name, bytes } => check_enclosure(pool, name, bytes).await,
        });
    }
    outcomes
}

async fn check_shard(pool: &Pool, memory: &Arc<Memory>, shard: SlotShard) -> (u64, Option<String>) {
    let shard = Arc::new(shard);
    let all = windows(shard.chunk.count(shard.length), shard.chunk).into_iter();
    let works = all.map(|window| {
        let (memory, shard) = (memory.clone(), shard.clone());
        move || memory.check_shard(&shard, window)
    });
    first_fault(in_order(pool, works)).await
}

async fn check_enclosure(
    pool: &Pool,
    name: Enclosure,
    bytes: SharedBytes,
) -> (u64, Option<String>) {
    let prove = move || name.prove(&bytes).map_err(|error| error.to_string());
    match pool.compute(prove).await {
        Ok(Ok(())) => (name.length, None),
        Ok(Err(fault)) => (0, Some(fault)),
        Err(_) => (0, Some(DigestError::Stopped.to_string())),
    }
}

async fn check_parity(pool: &Pool, memory: &Arc<Memory>, set: ParityId) -> (u64, Option<String>) {
    let Some((blocks, chunk)) = memory.parity_blocks(set) else {
        return (0, Some("the parity set is gone".into()));
    };
    let works = windows(blocks, chunk).into_iter().map(|window| {
        let memory = memory.clone();
        move || memory.check_parity(set, window)
    });
    first_fault(in_order(pool, works)).await
}

/// Reads a piece again, one window after the other: at most one thread is at it. With the time that threads were.
pub async fn scrub(
    pool: &Pool,
    memory: &Arc<Memory>,
    piece: ScrubPiece,
) -> (Result<ScrubTally, Unread>, Duration) {
    let (mut all, mut busy) = (ScrubTally::default(), Duration::ZERO);
    let piece = Arc::new(piece);
    for window in windows_of(&piece) {
        let (memory, piece) = (memory.clone(), piece.clone());
        let work = move || timed(|| scrub_window(&memory, &piece, window));
        let (tally, took) = match compute(pool, work).await {
            Ok((Ok(tally), took)) => (tally, took),
            Ok((Err(unread), took)) => return (Err(unread), busy + took),
            Err(_) => return (Err(Unread::Stopped), busy),
        };
        busy += took;
        all.bytes += tally.bytes;
        all.known += tally.known;
        all.rotten.extend(tally.rotten);
    }
    (Ok(all), busy)
}

fn windows_of(piece: &ScrubPiece) -> Vec<Range<u64>> {
    let (chunks, chunk) = match piece {
        ScrubPiece::Shard { shard, chunks } => (chunks, shard.chunk),
        ScrubPiece::Parity { stripes, chunk, .. } => (stripes, *chunk),
    };
    let all = windows(chunks.end - chunks.start, chunk).into_iter();
    all.map(|window| chunks.start + window.start..chunks.start + window.end)
        .collect()
}

fn scrub_window(
    memory: &Memory,
    piece: &ScrubPiece,
    window: Range<u64>,
) -> Result<ScrubTally, Unread> {
    match piece {
        ScrubPiece::Shard { shard, .. } => memory.scrub_shard(shard, window),
        ScrubPiece::Parity {
            set,
            stripes,
            prints,
            ..
        } => {
            let from = usize::try_from(window.start - stripes.start).unwrap_or(usize::MAX);
            let prints = prints.as_ref().and_then(|prints| prints.get(from..));
            memory.scrub_parity(*set, window, prints)
        }
    }
}

/// Bytes up to the first fault, in order.
async fn first_fault(
    checked: impl Stream<Item = Result<(u64, Option<String>), DigestError>>,
) -> (u64, Option<String>) {
    let mut checked = pin!(checked);
    let mut read = 0;
    while let Some(outcome) = checked.next().await {
        let (bytes, fault) = outcome.unwrap_or_else(|error| (0, Some(error.to_string())));
        read += bytes;
        if fault.is_some() {
            return (read, fault);
        }
    }
    (read, None)
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use storaged_core::Source;
    use storaged_wire::peer::SessionFault;

    use super::*;
    use crate::encode::{BlockState, Blocks, Proof};
    use crate::keep::NoStore;

    /// Names of the threads that a digest and a check ran on would be the pool's: with a pool that is closed nothing
    /// runs anywhere.
    #[tokio::test]
    async fn digests_and_checks_run_on_the_codecs_threads() {
        let (memory, slot) = (Arc::new(Memory::new(Arc::new(NoStore))), SlotId::new(1));
        let chunk = ChunkSize::new(1 << 16).unwrap();
        let length = (WINDOW_BYTES * 5 + 7) as u64;
        memory.create_slot(slot, length).unwrap();
        let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        memory.slot(slot).unwrap().write_at(0, &bytes).unwrap();
        let pool = Pool::start(2).unwrap();
        let size = ShardSize { length, chunk };
        let digested = digest(&pool, &memory, slot, size).await.unwrap();
        assert_eq!(digested.leaves.len() as u64, chunk.count(length));
        let whole = memory
            .digest(slot, length, chunk, 0..chunk.count(length))
            .unwrap();
        assert_eq!(
            (&digested.leaves[..], &digested.prints[..]),
            (&whole.0[..], &whole.1[..])
        );
        let shard = SlotShard {
            slot,
            length,
            chunk,
            leaves: digested.leaves,
            prints: digested.prints,
        };
        let piece = || ScrubPiece::Shard {
            shard: shard.clone(),
            chunks: 3..chunk.count(length),
        };
        let read = length - 3 * chunk.bytes() as u64;
        let scrubbed = |rotten: &[u64]| {
            Ok(ScrubTally {
                bytes: read,
                rotten: rotten.to_vec(),
                known: 0,
            })
        };
        assert_eq!(scrub(&pool, &memory, piece()).await.0, scrubbed(&[]));
        let parts = vec![CheckPart::Shard(shard.clone())];
        assert_eq!(
            check_all(&pool, &memory, parts.clone()).await,
            [(length, None)]
        );
        memory
            .slot(slot)
            .unwrap()
            .write_at(length - 1, &[0xff])
            .unwrap();
        let last = chunk.count(length) - 1;
        assert_eq!(scrub(&pool, &memory, piece()).await.0, scrubbed(&[last]));
        let stopped = scrub(&Pool::closed(), &memory, piece()).await.0;
        assert_eq!(stopped, Err(Unread::Stopped));
        let (read, fault) = check_all(&pool, &memory, parts).await.remove(0);
        assert!(read < length && fault.is_some());
        assert!(
            check_all(&Pool::closed(), &memory, vec![CheckPart::Shard(shard)]).await[0]
                .1
                .is_some()
        );
        assert!(matches!(
            digest(&Pool::closed(), &memory, slot, size).await,
            Err(DigestError::Stopped)
        ));
    }

    /// One shard keeps every thread busy, however many there are: each stays in its window until all are in one.
    #[tokio::test]
    async fn all_threads_are_at_one_shard_at_the_same_time() {
        const THREADS: usize = 8;
        let pool = Pool::start(THREADS).unwrap();
        let all = Arc::new((Mutex::new(0), Condvar::new()));
        let works = (0..2 * THREADS).map(|window| {
            let all = all.clone();
            move || {
                let (count, changed) = &*all;
                let mut count = count.lock().unwrap();
                *count += 1;
                changed.notify_all();
                let few = |count: &mut usize| *count < THREADS;
                let waited = changed.wait_timeout_while(count, Duration::from_secs(10), few);
                (window, *waited.unwrap().0)
            }
        });
        let seen: Vec<(usize, usize)> = in_order(&pool, works).map(Result::unwrap).collect().await;
        let windows = seen.iter().map(|(window, _)| *window);
        assert!(windows.eq(0..2 * THREADS), "{seen:?}");
        assert!(
            seen.iter().all(|(_, together)| *together >= THREADS),
            "{seen:?}"
        );
    }

    /// A node compares its own bytes with their fingerprints where it has taken them, with their digests where it has not, and not at all
    /// where who keeps what is made of them does that.
    #[test]
    fn a_changed_chunk_is_found_by_whoever_has_to() {
        let (memory, slot) = (Memory::new(Arc::new(NoStore)), SlotId::new(1));
        let chunk = ChunkSize::new(1 << 12).unwrap();
        let length = 3 * 4096 + 7;
        memory.create_slot(slot, length).unwrap();
        let write = |at: u64, bytes: &[u8]| memory.slot(slot).unwrap().write_at(at, bytes).unwrap();
        write(0, &vec![7; length as usize]);
        let (leaves, prints) = memory.digest(slot, length, chunk, 0..4).unwrap();
        let by_print = SlotShard {
            slot,
            length,
            chunk,
            leaves: leaves.into(),
            prints: prints.into(),
        };
        let by_digest = SlotShard {
            prints: Arc::default(),
            ..by_print.clone()
        };
        write(length - 1, &[8]);
        for shard in [by_print, by_digest] {
            let mut own = vec![1; 4096];
            assert_eq!(
                memory.read_own_chunk(&shard, 2, &mut own),
                Ok(Some(&[7; 4096][..]))
            );
            let wrong = memory.read_own_chunk(&shard, 3, &mut own);
            assert!(matches!(wrong, Err(SessionFault::Corrupt(_))), "{wrong:?}");
            assert_eq!(memory.read_own_chunk(&shard, 4, &mut own), Ok(None));
            let source = Source::Shard { shard, basis: None };
            let mut out = vec![1; 4096];
            let mut read = |stripe, proof| memory.read(&source, stripe, proof, &mut out);
            let wrong = read(3, Proof::Reader);
            assert!(matches!(wrong, Err(SessionFault::Corrupt(_))), "{wrong:?}");
            assert_eq!(read(3, Proof::Keeper), Ok(BlockState::Dirty));
            assert_eq!(
                (&out[..8], out[8..] == [0; 4088]),
                (&[7, 7, 7, 7, 7, 7, 8, 0][..], true)
            );
        }
    }
}
