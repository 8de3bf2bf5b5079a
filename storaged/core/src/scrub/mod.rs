//! Reading RAM again: shards and parity that counted when a pass began are read in it and compared with their digests and
//! fingerprints, piece by piece, so that what has rotted is found while others can still put it back.
//!
//! A pass takes two fifths of the period, and lets saves go first for up to half as long again of a fifth. Two passes in a row are
//! over within the period, so that no byte goes unread for longer. One piece is read at a time, and at least as long nothing is.

mod pass;

use std::sync::Arc;

use storaged_codec::{CodingMatrix, Fingerprint, engine};
use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Lane};

use pass::{Block, Pass, Pause};

use crate::api::{HeldBlock, Note, Now, Output, QueryId, ScrubPiece, ScrubTally, Unread};
use crate::catalog::{Checkpoint, LocalShard};
use crate::context::Context;
use crate::encode::Sessions;

/// What is scrubbed, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct Scrub {
    pass: Option<Pass>,
    next_pass_at: Now,
    /// When the last pass that has ended began.
    covered_since: Option<Now>,
    passes: u64,
    bytes: u64,
    rotten: u64,
}

/// What the operator is shown of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubState {
    /// 0: RAM is not scrubbed.
    pub period_ms: u64,
    /// Passes that have ended.
    pub passes: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Chunks found rotten since the daemon started.
    pub rotten: u64,
    /// Whatever has been here for longer than this was read within it: the time since the last pass that has ended began, or since
    /// the start.
    pub age_ms: u64,
}

impl Scrub {
    /// When to look again.
    pub fn deadline(&self, cx: &Context) -> Option<Now> {
        (cx.setup.scrub_period_ms > 0).then_some(())?;
        match &self.pass {
            Some(pass) => pass.deadline(),
            None => Some(self.next_pass_at),
        }
    }

    /// Begins the next piece if it is time for it.
    pub fn advance(&mut self, sessions: &Sessions, cx: &mut Context) {
        if cx.setup.scrub_period_ms == 0 {
            return;
        }
        if self.pass.is_none() && cx.now >= self.next_pass_at {
            let blocks = cx.blocks_to_scrub();
            self.pass = Some(Pass::begin(cx.now, cx.setup.scrub_period_ms, blocks));
        }
        let pause = if is_saving(sessions, cx) {
            Pause::Wanted
        } else {
            Pause::Needless
        };
        while let Some(pass) = self.pass.as_mut() {
            let Some(block) = pass.block() else {
                return self.end_pass();
            };
            let Some(piece) = cx.piece_of(block) else {
                pass.skip_block();
                continue;
            };
            if pass.is_time(cx.now, pause) {
                let query = QueryId(cx.fresh());
                pass.reads(query, cx.now);
                cx.out.push(Output::Scrub { query, piece });
            }
            return;
        }
    }

    fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take() {
            self.covered_since = Some(pass.began());
            self.next_pass_at = pass.next_begins();
            self.passes += 1;
            if planted!("rotten_count_forgotten") {
                self.rotten = 0;
            }
        }
    }

    /// A piece was read.
    pub fn scrubbed(
        &mut self,
        query: QueryId,
        outcome: Result<ScrubTally, Unread>,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let Some(block) = self
            .pass
            .as_mut()
            .and_then(|pass| pass.has_read(query, cx.now))
        else {
            return;
        };
        if let Ok(tally) = outcome {
            self.bytes += tally.bytes;
            if !tally.rotten.is_empty() {
                let fresh = (tally.rotten.len() as u64).saturating_sub(tally.known);
                self.found(&block.key, block.held, &tally.rotten, fresh, sessions, cx);
            }
        }
        self.advance(sessions, cx);
    }

    /// These chunks of a block were found rotten, so many of them for the first time.
    pub fn found(
        &mut self,
        key: &CheckpointKey,
        block: HeldBlock,
        rotten: &[u64],
        fresh: u64,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        if !cx.holds(key, block) {
            return;
        }
        self.count(key, block, fresh, cx);
        sessions.block_rotted(key, block, rotten, cx);
    }

    /// So many chunks of a block have rotted that had not been found before.
    pub fn count(&mut self, key: &CheckpointKey, block: HeldBlock, chunks: u64, cx: &mut Context) {
        self.rotten += chunks;
        let key = key.clone();
        cx.note(Note::Rotten { key, block, chunks });
    }

    /// For the operator.
    pub fn state(&self, cx: &Context) -> ScrubState {
        let since = self.covered_since.or(cx.started).unwrap_or(cx.now);
        ScrubState {
            period_ms: cx.setup.scrub_period_ms,
            passes: self.passes,
            bytes: self.bytes,
            rotten: self.rotten,
            age_ms: cx.now.since(since),
        }
    }
}

/// Whether the codec's threads have something to do for a save, or a session.
fn is_saving(sessions: &Sessions, cx: &Context) -> bool {
    let mut shards = cx.checkpoints.values().flat_map(|c| c.shards.values());
    sessions.count() > 0 || shards.any(|shard| shard.digests.is_none())
}

impl Context {
    /// What counts: of the newest protected checkpoint first, then of older ones, then of those that are only committed.
    fn blocks_to_scrub(&self) -> Vec<Block> {
        let committed = self.checkpoints.values().filter(|c| c.manifest.is_some());
        let (safe, others): (Vec<&Checkpoint>, Vec<&Checkpoint>) =
            committed.rev().partition(|c| c.state >= self.safe_state());
        let all = safe.into_iter().chain(others);
        all.flat_map(|c| self.blocks_of(c)).collect()
    }

    fn blocks_of(&self, checkpoint: &Checkpoint) -> Vec<Block> {
        let Some(manifest) = &checkpoint.manifest else {
            return Vec::new();
        };
        let chunk = manifest.manifest().chunk;
        let block = |held: HeldBlock, length: u64| Block {
            key: checkpoint.key.clone(),
            held,
            chunk,
            chunks: chunk.count(length),
            next: 0,
        };
        let shards = checkpoint.shards.iter();
        let sealed = shards.filter(|(_, shard)| shard.digests.is_some());
        let sealed =
            sealed.map(|(rank, shard)| block(HeldBlock::Shard(*rank, shard.slot), shard.length));
        let parity = checkpoint.parity.iter();
        let parity = parity.filter(|_| !planted!("scrub_skips_parity"));
        let parity = parity.map(|((lane, index), set)| {
            let length = LaneBlocks::of(manifest, *lane).map_or(0, |blocks| blocks.length);
            block(HeldBlock::Parity(*lane, *index, *set), length)
        });
        sealed.chain(parity).collect()
    }

    /// What is to be read next of a block; none once it does not count any more.
    fn piece_of(&self, block: &Block) -> Option<ScrubPiece> {
        if !self.holds(&block.key, block.held) {
            return None;
        }
        let checkpoint = self.checkpoints.get(&block.key)?;
        let chunks = block.next_chunks();
        Some(match block.held {
            HeldBlock::Shard(rank, _) => ScrubPiece::Shard {
                shard: checkpoint.shards.get(&rank).and_then(LocalShard::sealed)?,
                chunks,
            },
            HeldBlock::Parity(lane, index, set) => ScrubPiece::Parity {
                set,
                chunk: block.chunk,
                prints: self.prints_of_parity(checkpoint, lane, index, &chunks),
                stripes: chunks,
            },
        })
    }

    /// What stripes of parity must have by the fingerprints of the data in their lane.
    fn prints_of_parity(
        &self,
        checkpoint: &Checkpoint,
        lane: Lane,
        index: u32,
        stripes: &std::ops::Range<u64>,
    ) -> Option<Arc<[Fingerprint]>> {
        let manifest = checkpoint.manifest.as_ref()?;
        let blocks = LaneBlocks::of(manifest, lane)?;
        let matrix = CodingMatrix::cauchy(manifest.manifest().geometry);
        let (from, to) = (stripes.start as usize, stripes.end as usize);
        let mut sum = vec![0; (to - from) * Fingerprint::BYTES];
        for (block, entry) in blocks.data.iter().enumerate() {
            let Some(shard) = entry else { continue };
            let known = self.prints_known(&checkpoint.key, shard.rank)?;
            let some = known.get(from.min(known.len())..to.min(known.len()))?;
            let bytes: Vec<u8> = some.iter().flat_map(|print| *print.as_bytes()).collect();
            let coefficient = matrix.coefficient(index as usize, block);
            engine().fold(&mut [&mut sum[..bytes.len()]], &[coefficient], &bytes);
        }
        let expected = sum.as_chunks().0.iter().copied();
        Some(expected.map(Fingerprint::from_bytes).collect())
    }
}
