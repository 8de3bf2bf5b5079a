//! One pass over what there was when it began: which piece comes next, and when. Pieces come evenly, by the bytes that there are
//! and the time that the pass has; after a hold-up not in one burst.

use std::collections::VecDeque;
use std::ops::Range;

use storaged_wire::ChunkSize;
use storaged_wire::peer::CheckpointKey;

use crate::api::{HeldBlock, Now, QueryId};
use crate::limits;

/// A block that is read in a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub key: CheckpointKey,
    pub held: HeldBlock,
    pub chunk: ChunkSize,
    /// How many it has.
    pub chunks: u64,
    /// The first that has not been read.
    pub next: u64,
}

impl Block {
    /// What is read of it at once.
    pub fn next_chunks(&self) -> Range<u64> {
        let some = (limits::SCRUB_PIECE_BYTES / self.chunk.bytes() as u64).max(1);
        self.next..self.chunks.min(self.next + some)
    }

    fn bytes_left(&self) -> u64 {
        (self.chunks - self.next) * self.chunk.bytes() as u64
    }
}

/// Whether a save would be held up by the next piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    Wanted,
    Needless,
}

#[derive(Debug)]
struct Reading {
    query: QueryId,
    began: Now,
}

/// A pass.
#[derive(Debug)]
pub(super) struct Pass {
    began: Now,
    /// What it is to take.
    length_ms: u64,
    /// How far it may lag behind that so that saves go first.
    lag_max_ms: u64,
    blocks: VecDeque<Block>,
    bytes: u64,
    done: u64,
    reading: Option<Reading>,
    /// Nothing is read before.
    rests_until: Now,
}

impl Pass {
    /// Over these blocks, in this order.
    pub fn begin(now: Now, period_ms: u64, blocks: Vec<Block>) -> Self {
        let blocks: VecDeque<Block> = blocks.into_iter().filter(|it| it.chunks > 0).collect();
        Self {
            began: now,
            // Read first in one pass and last in the next, a byte waits for two of them and their lag.
            length_ms: period_ms * 2 / 5,
            lag_max_ms: period_ms / 10,
            bytes: blocks.iter().map(Block::bytes_left).sum(),
            blocks,
            done: 0,
            reading: None,
            rests_until: now,
        }
    }

    pub fn began(&self) -> Now {
        self.began
    }

    /// When the next one begins, however soon this one was over.
    pub fn next_begins(&self) -> Now {
        self.began.plus(self.length_ms.max(1))
    }

    /// The block in turn.
    pub fn block(&self) -> Option<&Block> {
        self.blocks.front()
    }

    /// The block in turn is not there any more.
    pub fn skip_block(&mut self) {
        if let Some(block) = self.blocks.pop_front() {
            self.done += block.bytes_left();
        }
        self.reading = None;
    }

    /// When the next piece is due.
    fn due(&self) -> Now {
        if planted!("scrub_in_one_burst") {
            return self.began;
        }
        let share = u128::from(self.length_ms) * u128::from(self.done);
        let after = share / u128::from(self.bytes.max(1));
        self.began.plus(u64::try_from(after).unwrap_or(u64::MAX))
    }

    /// Whether the next piece may be read now; if not, when to ask again is in the deadline.
    pub fn is_time(&mut self, now: Now, pause: Pause) -> bool {
        let due = self.due();
        if self.reading.is_some() || now < due || now < self.rests_until {
            return false;
        }
        let lags = now.since(due) >= self.lag_max_ms;
        if pause == Pause::Wanted && !lags {
            let again = limits::SCRUB_YIELD_MS.min(self.lag_max_ms).max(1);
            self.rests_until = now.plus(again);
            return false;
        }
        true
    }

    /// The next piece is being read.
    pub fn reads(&mut self, query: QueryId, now: Now) {
        self.reading = Some(Reading { query, began: now });
    }

    /// A piece was read. The block that it was of, if that is the one in turn.
    pub fn has_read(&mut self, query: QueryId, now: Now) -> Option<Block> {
        let reading = self.reading.take_if(|reading| reading.query == query)?;
        let block = self.blocks.front_mut()?;
        let of = block.clone();
        let before = block.bytes_left();
        block.next = block.next_chunks().end;
        let read = before - block.bytes_left();
        if block.next == block.chunks {
            self.blocks.pop_front();
        }
        self.done += read;
        let usual = u128::from(self.length_ms) * u128::from(read) / u128::from(self.bytes.max(1));
        let usual = u64::try_from(usual).unwrap_or(u64::MAX);
        // A pass that lags goes at twice its rate at most, and never takes more than half of a thread.
        let rest = now.since(reading.began).max(usual / 2);
        self.rests_until = now.plus(rest);
        Some(of)
    }

    /// When to look again; none while a piece is being read.
    pub fn deadline(&self) -> Option<Now> {
        let is_reading = self.reading.is_some();
        (!is_reading).then(|| self.due().max(self.rests_until))
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::{Namespace, Rank, RunId, SlotId, Step};

    use super::*;

    const PERIOD_MS: u64 = 100_000;

    fn block(step: u64, bytes: u64) -> Block {
        let chunk = ChunkSize::new(1 << 20).expect("a size");
        Block {
            key: CheckpointKey {
                namespace: Namespace::new("job").expect("a name"),
                run: RunId::ZERO,
                step: Step::new(step),
            },
            held: HeldBlock::Shard(Rank::new(0), SlotId::new(step)),
            chunk,
            chunks: chunk.count(bytes),
            next: 0,
        }
    }

    /// Goes through a pass, each piece taking so long; when pieces were begun.
    fn run(mut pass: Pass, takes_ms: u64, pause: Pause) -> Vec<u64> {
        let (mut now, mut begun) = (Now(0), Vec::new());
        while pass.block().is_some() {
            if pass.is_time(now, pause) {
                let query = QueryId(begun.len() as u64);
                begun.push(now.0);
                pass.reads(query, now);
                now = now.plus(takes_ms);
                assert!(pass.has_read(query, now).is_some());
            } else {
                now = pass
                    .deadline()
                    .expect("nothing is being read")
                    .max(now.plus(1));
            }
        }
        begun
    }

    fn ten_pieces() -> Pass {
        let blocks = vec![block(2, 5 * (32 << 20)), block(1, 5 * (32 << 20))];
        Pass::begin(Now(0), PERIOD_MS, blocks)
    }

    #[test]
    fn pieces_come_evenly_over_two_fifths_of_the_period() {
        let begun = run(ten_pieces(), 10, Pause::Needless);
        let expected: Vec<u64> = (0..10)
            .map(|piece| piece * PERIOD_MS * 2 / 5 / 10)
            .collect();
        assert_eq!(begun, expected);
    }

    #[test]
    fn saves_go_first_and_the_pass_is_over_before_half_of_the_period_all_the_same() {
        let begun = run(ten_pieces(), 10, Pause::Wanted);
        assert_eq!(begun.len(), 10);
        assert_eq!(begun[0], PERIOD_MS / 10);
        assert!(*begun.last().expect("pieces") < PERIOD_MS / 2, "{begun:?}");
    }

    #[test]
    fn what_was_held_up_does_not_come_in_one_burst() {
        let mut pass = ten_pieces();
        // The process was stopped for all of the pass.
        let mut now = Now(PERIOD_MS);
        let mut gaps = Vec::new();
        for piece in 0..10 {
            assert!(pass.is_time(now, Pause::Wanted));
            pass.reads(QueryId(piece), now);
            pass.has_read(QueryId(piece), now.plus(5));
            let next = pass.deadline().expect("nothing is being read");
            gaps.push(next.since(now));
            now = next;
        }
        assert!(gaps.iter().all(|gap| *gap >= PERIOD_MS / 50), "{gaps:?}");
    }

    #[test]
    fn a_thread_that_takes_longer_than_the_period_has_rests_as_long_as_it_reads() {
        let begun = run(ten_pieces(), 30_000, Pause::Needless);
        let gaps: Vec<u64> = begun.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().all(|gap| *gap == 60_000), "{gaps:?}");
    }

    #[test]
    fn an_answer_to_another_question_changes_nothing() {
        let mut pass = ten_pieces();
        pass.reads(QueryId(7), Now(0));
        assert_eq!(pass.has_read(QueryId(6), Now(1)), None);
        assert!(!pass.is_time(Now(1), Pause::Needless), "one is being read");
        assert!(pass.has_read(QueryId(7), Now(2)).is_some());
    }
}
