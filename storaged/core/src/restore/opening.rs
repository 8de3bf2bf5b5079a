//! One opening of a shard: what is asked for, what has been tried, and which session may serve it next.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_plan::LaneBlocks;
use storaged_wire::local::{ByteRange, Rung};
use storaged_wire::peer::{CheckpointKey, SessionKind};
use storaged_wire::shape::RepairShape;
use storaged_wire::{
    CheckpointState, ChunkSize, Digest, ManifestBytes, Namespace, NodeName, Rank, Refusal,
    RefusalCode, SharedTable,
};

use super::cluster_view::ClusterView;
use super::source_fault::SourceFault;
use crate::api::{DurablePolicy, Now, RequestId};
use crate::context::Context;
use crate::encode::Sessions;
use crate::limits;
use crate::stage::slot_capacity;

/// What an `OpenShard` asks for.
#[derive(Debug, Clone)]
pub(crate) struct OpenRequest {
    pub manifest: Digest,
    pub rank: Rank,
    pub ranges: Vec<Range<u64>>,
    /// The ranges that were named are all of it.
    pub all_by_ranges: bool,
    pub deadline: Now,
    /// The rung that gave the reader wrong bytes.
    pub without: Option<Rung>,
    /// Nodes that are taken for lost: a drill.
    pub withheld: BTreeSet<NodeName>,
    /// A heal was waited for and did not bring the shard back.
    pub healed_in_vain: bool,
    /// Those who were to give it had it no more, and all have been asked once more.
    pub looked_anew: bool,
}

impl OpenRequest {
    /// As a reader says it, to be answered by a time.
    pub fn new(
        manifest: Digest,
        rank: Rank,
        ranges: Vec<ByteRange>,
        without: Option<Rung>,
        deadline: Now,
    ) -> Self {
        let ranges = ranges.into_iter();
        Self {
            manifest,
            rank,
            ranges: ranges
                .map(|r| r.offset..r.offset.saturating_add(r.length))
                .collect(),
            all_by_ranges: false,
            deadline,
            without,
            withheld: BTreeSet::new(),
            healed_in_vain: false,
            looked_anew: false,
        }
    }

    /// The shard's length, if the rank and the ranges are in the checkpoint.
    pub(super) fn check_ranges(&mut self, manifest: &ManifestBytes) -> Result<u64, Refusal> {
        let record = manifest.manifest();
        let rank = self.rank;
        let Some(entry) = record.shard(rank) else {
            let text = format!(
                "expected a rank below the checkpoint's world size {}, got {rank}",
                record.world_size
            );
            return Err(Refusal::new(RefusalCode::WorldSize, text));
        };
        let length = entry.length;
        if let Some(outside) = self.ranges.iter().find(|range| range.end > length) {
            let text = format!(
                "expected ranges within the {length} bytes of rank {rank}'s shard, got {} bytes at {}",
                outside.end - outside.start,
                outside.start
            );
            return Err(Refusal::new(RefusalCode::Malformed, text));
        }
        self.whole_if_all(length);
        Ok(length)
    }

    /// Ranges that are all of a shard of this length ask for the whole shard. A trainer that loads what it saved asks so, and its node must not
    /// decode beside the heal that brings the shard back, nor let go what it has decoded.
    fn whole_if_all(&mut self, length: u64) {
        let mut ranges: Vec<&Range<u64>> = self.ranges.iter().collect();
        ranges.sort_by_key(|range| range.start);
        let covered = ranges.into_iter().fold(0, |end, range| match range {
            next if next.start <= end => next.end.max(end),
            _ => end,
        });
        if covered >= length && !planted!("ranges_are_never_a_whole_shard") {
            self.all_by_ranges |= !self.ranges.is_empty();
            self.ranges.clear();
        }
    }

    /// The same without these nodes.
    pub fn withholding(self, withheld: Option<Vec<NodeName>>) -> Self {
        let withheld = withheld.unwrap_or_default().into_iter().collect();
        Self { withheld, ..self }
    }

    /// Whether it only tries out what the loss of nodes would do: it may take nothing from the durable tier, and no room from others.
    pub fn is_drill(&self) -> bool {
        !self.withheld.is_empty()
    }
}

impl Context {
    /// Takes up a checkpoint as a survey found it. What it is said to be one of those that answered may have made up, and older steps go
    /// for one that is protected: two must say so, or home nodes do later. Of one that is said to be durable the tier itself is asked,
    /// because the next copy builds on it.
    pub(super) fn adopt_surveyed(&mut self, manifest: &Arc<ManifestBytes>, survey: &ClusterView) {
        let name = manifest.name();
        let said = survey.states.get(&name).copied();
        let said = said.unwrap_or(CheckpointState::Committed);
        if said >= CheckpointState::Durable && survey.durable.contains(&name) {
            return self.adopt_found(manifest.clone(), said);
        }
        let sayers = survey.called_protected_by(name);
        let words = sayers.filter(|node| *node != self.me() && self.is_believed(node));
        let enough = words.count() >= limits::WORDS_NEEDED || planted!("one_holder_is_enough");
        let state = if enough {
            CheckpointState::Protected
        } else {
            CheckpointState::Committed
        };
        self.adopt_found(manifest.clone(), said.min(state));
        if said >= CheckpointState::Durable && self.setup.durable != DurablePolicy::Absent {
            self.ask_tier(&CheckpointKey::of(manifest.manifest()), name);
        }
    }

    /// A drill takes what is free: no job that has ended gives way to it.
    pub(super) fn has_room_for_drill(&self, length: u64, of: &Namespace) -> Result<(), Refusal> {
        let bytes = slot_capacity(length);
        if bytes <= self.budget.room_of(of) || planted!("drills_evict") {
            return Ok(());
        }
        Err(self.no_budget(
            bytes,
            "is more than is free, and nothing gives way to a drill",
            of,
        ))
    }

    /// A shard of this node's RAM was opened. Whoever tries out a loss does not go on from it.
    pub(super) fn note_opening(&mut self, wish: &OpenRequest) {
        let key = self.by_name.get(&wish.manifest);
        if let Some(key) = key.filter(|_| !wish.is_drill()).cloned() {
            self.note_opened(&key);
        }
    }
}

/// A shard on its way into this node's RAM, or there for a reader.
#[derive(Debug, Clone)]
pub(crate) struct ShardOpen {
    pub id: RequestId,
    pub manifest: Arc<ManifestBytes>,
    pub rank: Rank,
    pub deadline: Now,
    pub(super) ranges: Vec<Range<u64>>,
    pub(super) all_by_ranges: bool,
    pub(super) survey: ClusterView,
    pub(super) excluded: BTreeSet<NodeName>,
    pub(super) faults: Vec<SourceFault>,
    /// Nothing is lost: what comes is for its reader alone.
    pub(super) is_drill: bool,
    /// Nobody is asked another time.
    pub(super) looked_anew: bool,
    pub(super) attempts: usize,
    pub(super) rung: Rung,
    /// A block came out wrong: from now on every block is checked by this node.
    pub(super) wary: bool,
    pub(super) open: bool,
    /// Its reader took it early, has what it needs and has given it up: it comes for the node alone.
    pub(super) is_released: bool,
    /// Since when the durable tier has been asked for it.
    pub(super) fetched_since: Option<Now>,
}

impl ShardOpen {
    /// It was opened. Whoever tries out a loss does not go on from it.
    pub(super) fn note_opened(&self, cx: &mut Context) {
        if !self.is_drill {
            cx.note_opened(&CheckpointKey::of(self.manifest.manifest()));
        }
    }

    /// Whether the reader has the shard.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Whether the shard is its node's own from now on. What a reader named by ranges and the durable tier brought is its reader's alone: nothing
    /// in RAM lacks it, and who reads one shard after the other need not have room for all.
    pub(super) fn stays(&self) -> bool {
        let is_for_reader = self.all_by_ranges && self.rung == Rung::Durable;
        self.ranges.is_empty() && !is_for_reader
    }

    /// Whether its reader has found what this node holds to be wrong.
    pub(super) fn own_is_wrong(&self) -> bool {
        let mut faults = self.faults.iter();
        faults.any(|fault| matches!(fault, SourceFault::FoundByReader(Rung::OwnRam)))
    }

    /// Bytes that are asked for.
    pub(super) fn bytes(&self) -> u64 {
        match self.ranges.as_slice() {
            [] => {
                let entry = self.manifest.manifest().shard(self.rank);
                entry.map_or(0, |entry| entry.length)
            }
            ranges => ranges
                .iter()
                .map(|it| it.end.saturating_sub(it.start))
                .sum(),
        }
    }

    /// The session of the next rung: a copy from whoever holds the shard, or decoding.
    pub(super) fn session_for(
        &self,
        sessions: &Sessions,
        cx: &Context,
    ) -> Option<(storaged_wire::peer::Lane, SessionKind, Rung)> {
        let manifest = self.manifest.manifest();
        let (lane, block) = LaneBlocks::to_read(&self.manifest, self.rank)?;
        let blocks = LaneBlocks::of_read(&self.manifest, lane)?;
        // A session's members must know the manifest, this node too.
        cx.manifest_named(self.manifest.name())?;
        let usable: Vec<usize> = self
            .survey
            .sources(&self.manifest)
            .available(lane, &blocks)
            .into_iter()
            .filter(|block| {
                blocks
                    .node(*block)
                    .is_some_and(|node| cx.is_up(node) && !self.excluded.contains(node))
            })
            .collect();
        let shape = if self.wary {
            RepairShape::Direct
        } else {
            RepairShape::Chain
        };
        let fast = |block: &usize| {
            let node = blocks.node(*block);
            node.is_some_and(|node| !sessions.links(cx).is_slow(node))
        };
        let first: Vec<usize> = usable.iter().copied().filter(fast).collect();
        let others = sessions.survivors(&blocks, [&first, &[]], 1, shape, cx);
        // A copy over a slow link takes longer than decoding from others, if they are enough.
        let copies = usable.contains(&block) && (first.contains(&block) || others.is_none());
        let (survivors, rung) = if copies {
            (vec![block], Rung::PeerRam)
        } else {
            let any = || sessions.survivors(&blocks, [&first, &usable], 1, shape, cx);
            (others.or_else(any)?, Rung::Decoded)
        };
        let kind = SessionKind::Repair {
            lane,
            survivors: survivors.into_iter().map(|block| block as u32).collect(),
            wanted: vec![(block as u32, cx.me().clone())],
            stripes: stripes_of(&self.ranges, manifest.chunk),
            shape,
        };
        Some((lane, kind, rung))
    }
}

/// Chunks that cover byte ranges, as (first, count), ascending and disjoint; empty for the whole shard.
fn stripes_of(ranges: &[Range<u64>], chunk: ChunkSize) -> Vec<(u64, u64)> {
    let bytes = chunk.bytes() as u64;
    let covering = ranges.iter().filter(|range| !range.is_empty());
    let mut wanted: Vec<Range<u64>> = covering
        .map(|r| r.start / bytes..r.end.div_ceil(bytes))
        .collect();
    wanted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in wanted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
        .into_iter()
        .map(|range| (range.start, range.end - range.start))
        .collect()
}

/// What a reader of own RAM is told beside the digests. Fingerprints of a shard that a repair put back come later, when it was
/// digested here; those of a shard of very many chunks never, because the reply would be longer than a frame.
pub(super) fn fingerprints_told(
    leaves: &[Digest],
    prints: &Arc<[Fingerprint]>,
) -> Option<SharedTable<Fingerprint>> {
    let fits = leaves.len() <= limits::FINGERPRINTS_TOLD_MAX;
    (fits && prints.len() == leaves.len()).then(|| prints.clone().into())
}

#[cfg(test)]
mod tests {
    use storaged_wire::encode;
    use storaged_wire::framing::LOCAL_FRAME_BYTES_MAX;
    use storaged_wire::local::Reply;

    use super::*;

    /// Its chunks are as small as they may be: whether the reply with the fingerprints fits a frame, and whether they are told.
    fn opened_of(chunks: usize) -> (bool, bool) {
        let leaves = vec![Digest::from_bytes(&[7; 32]); chunks];
        let prints = vec![Fingerprint::from_bytes([9; 16]); chunks].into();
        let chunk = ChunkSize::new(4096).unwrap();
        let fingerprints = fingerprints_told(&leaves, &prints);
        let is_told = fingerprints.is_some();
        let reply = Reply::ShardOpened {
            length: (chunks * chunk.bytes()) as u64,
            chunk,
            leaves: leaves.into(),
            rung: Rung::OwnRam,
            fingerprints,
        };
        (encode(&reply).len() <= LOCAL_FRAME_BYTES_MAX, is_told)
    }

    #[test]
    fn fingerprints_are_told_only_where_the_reply_still_fits_a_frame() {
        assert_eq!(opened_of(0), (true, true));
        assert_eq!(opened_of(limits::FINGERPRINTS_TOLD_MAX), (true, true));
        assert_eq!(opened_of(limits::FINGERPRINTS_TOLD_MAX + 1), (true, false));
        assert_eq!(opened_of(LOCAL_FRAME_BYTES_MAX / 51 + 1), (true, false));
    }

    #[test]
    fn the_longest_shard_that_is_taken_fits_a_frame_when_it_is_opened() {
        let most = usize::try_from(limits::SHARD_CHUNKS_MAX).unwrap();
        assert_eq!(opened_of(most), (true, false));
        assert_eq!(opened_of(most + most / 500), (false, false));
    }

    #[test]
    fn ranges_that_are_all_of_a_shard_ask_for_the_whole_shard() {
        let left = |ranges: &[(u64, u64)], length| {
            let ranges = ranges
                .iter()
                .map(|&(offset, length)| ByteRange { offset, length });
            let name = Digest::from_bytes(&[7; 32]);
            let mut wish = OpenRequest::new(name, Rank::new(0), ranges.collect(), None, Now(1_000));
            wish.whole_if_all(length);
            wish.ranges.len()
        };
        assert_eq!(left(&[(0, 100)], 100), 0);
        assert_eq!(left(&[(60, 40), (0, 50), (40, 20)], 100), 0);
        assert_eq!(left(&[(0, 99)], 100), 1);
        assert_eq!(left(&[(0, 50), (51, 49)], 100), 2);
        assert_eq!(left(&[(1, 99)], 100), 1);
        assert_eq!(left(&[(0, 0)], 0), 0);
    }

    #[test]
    fn ranges_become_disjoint_chunks() {
        let chunk = ChunkSize::new(4096).unwrap();
        assert_eq!(
            stripes_of(&[0..1, 4095..4097, 20000..20001], chunk),
            [(0, 2), (4, 1)]
        );
        assert!(stripes_of(&[], chunk).is_empty());
        let empty = 5..5;
        assert!(stripes_of(std::slice::from_ref(&empty), chunk).is_empty());
    }
}
