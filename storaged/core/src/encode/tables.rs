//! Tables of a shard's chunk digests and fingerprints that a member needs before its part of a session can begin.
//!
//! A coding node compares its parity with the fingerprints of all data blocks, and keeps their digests so that what is
//! computed from that parity one day can be proved; whoever gets a block back needs that block's table. A table has 48
//! bytes per chunk: for 32 shards of 80 GiB it comes to half a gigabyte. So none travels in a message of the session.
//! The member that needs it fetches it page by page, straight from a node that has it, and asks for the next page only
//! when the last one is here: no queue fills up, and what a link has lost is asked for again. Each page that comes is
//! told to the leader, whose patience ends with progress, not after a fixed time.
//!
//! Digests are proved by the root in the manifest, whoever sent them. Fingerprints are believed, so in an encode the
//! shard's own node is asked for them; only where no link goes there, another one that keeps parity of the same lane is,
//! which has asked that node itself. Without that a single cut link would keep a lane from being coded that a chain
//! leads around the cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::{ChunkSize, Fingerprint, root_digest};
use storaged_plan::Derived;
use storaged_wire::peer::{
    CheckpointKey, PeerMessage, SessionKind, SumChecks, TablePage, TablePlace,
};
use storaged_wire::shape::RepairShape;
use storaged_wire::{Digest, Manifest, NodeName, Rank, SessionId, ShardEntry};

use super::session::{MemberPhase, SessionPlace};
use crate::api::Now;
use crate::catalog::LocalShard;
use crate::context::Context;
use crate::encode::Sessions;
use crate::limits;
use crate::sources::Sources;

/// Pages that others have asked for before this node had their manifest, at most: more are asked for again.
const DEFERRED_MAX: usize = 1_024;

/// The tables of some shards: digests that the manifest proves, and fingerprints, all or none of a shard's.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tables {
    pub(super) leaves: BTreeMap<Rank, Arc<[Digest]>>,
    pub(super) prints: BTreeMap<Rank, Arc<[Fingerprint]>>,
}

impl Tables {
    /// The digests of a shard's chunks.
    pub fn leaves(&self, rank: Rank) -> Option<&Arc<[Digest]>> {
        self.leaves.get(&rank)
    }

    /// Their fingerprints.
    pub fn prints(&self, rank: Rank) -> Option<&Arc<[Fingerprint]>> {
        self.prints.get(&rank)
    }
}

/// A shard whose table is needed, and who may have it, best first.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub rank: Rank,
    pub prints: WantedPrints,
    pub sources: Sources,
}

/// Whether a table without fingerprints will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WantedPrints {
    Needed,
    Needless,
}

/// The tables that one member fetches for one session.
#[derive(Debug, Clone)]
pub(crate) struct TableFetch {
    manifest: Digest,
    /// Those that are still on their way.
    coming: BTreeMap<Rank, ShardFetch>,
    tables: Tables,
    /// When the leader was last told that pages come.
    told_at: Now,
}

/// One table on its way.
#[derive(Debug, Clone)]
struct ShardFetch {
    expected: ShardEntry,
    chunk: ChunkSize,
    prints_wanted: WantedPrints,
    sources: Sources,
    leaves: Vec<Digest>,
    prints: Vec<Fingerprint>,
}

/// What a node can say of a table.
enum TableHere<'a> {
    Known(Arc<[Digest]>, Arc<[Fingerprint]>),
    /// So much of it is here, and nothing proves that yet.
    Coming(&'a [Digest], &'a [Fingerprint]),
    Unknown,
}

/// What a page has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// Nobody had asked for it.
    Nothing,
    /// It was the next one, or the end of what its sender has.
    Moved,
}

impl TableFetch {
    pub(super) fn new(
        name: Digest,
        manifest: &Manifest,
        wanted: impl IntoIterator<Item = Wanted>,
        now: Now,
    ) -> Self {
        let fetch = |wanted: Wanted| {
            let expected = manifest.shard(wanted.rank)?.clone();
            let fetch = ShardFetch {
                expected,
                chunk: manifest.chunk,
                prints_wanted: wanted.prints,
                sources: wanted.sources,
                leaves: Vec::new(),
                prints: Vec::new(),
            };
            Some((wanted.rank, fetch))
        };
        let mut fetch = Self {
            manifest: name,
            coming: wanted.into_iter().filter_map(fetch).collect(),
            tables: Tables::default(),
            told_at: now,
        };
        fetch.settle();
        fetch
    }

    /// Whether nothing is on its way any more: all tables are here, or nobody has them.
    pub(super) fn is_settled(&self) -> bool {
        self.coming.is_empty()
    }

    /// The name of the manifest that the tables are proved by.
    pub(super) fn manifest(&self) -> Digest {
        self.manifest
    }

    /// What is here.
    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The pages to ask for now: those that were not asked for, and those that did not come within a second.
    fn requests(
        &mut self,
        now: Now,
        is_up: impl Fn(&NodeName) -> bool,
    ) -> Vec<(NodeName, TablePlace)> {
        let mut requests = Vec::new();
        for (rank, fetch) in &mut self.coming {
            fetch.skip_silent(now, &is_up);
            if let Some(source) = fetch.sources.ask(now) {
                let place = TablePlace {
                    manifest: self.manifest,
                    rank: *rank,
                    first: fetch.leaves.len() as u64,
                };
                requests.push((source.clone(), place));
            }
        }
        self.settle();
        requests
    }

    fn take(&mut self, from: &NodeName, place: TablePlace, page: &TablePage) -> Taken {
        if place.manifest != self.manifest {
            return Taken::Nothing;
        }
        let Some(fetch) = self.coming.get_mut(&place.rank) else {
            return Taken::Nothing;
        };
        let taken = fetch.take(from, place.first, page);
        self.settle();
        taken
    }

    /// Moves tables that are whole, or that nobody else can be asked for, out of what is on its way.
    fn settle(&mut self) {
        let tables = &mut self.tables;
        self.coming.retain(|rank, fetch| {
            let proven = fetch.is_complete();
            let lacks_prints = fetch.prints_wanted == WantedPrints::Needed
                && fetch.prints.len() != fetch.leaves.len();
            if proven && !(lacks_prints && fetch.sources.count() > 1) {
                tables
                    .leaves
                    .insert(*rank, std::mem::take(&mut fetch.leaves).into());
                if !lacks_prints {
                    let prints = std::mem::take(&mut fetch.prints);
                    tables.prints.insert(*rank, prints.into());
                }
                return false;
            }
            if proven {
                // The digests are right, but whoever sent them does not know the fingerprints: the next one may.
                tables.leaves.insert(*rank, fetch.leaves.clone().into());
                fetch.next_source();
            }
            fetch.sources.count() > 0
        });
    }

    /// Says once a second that pages come.
    fn should_tell(&mut self, now: Now) -> bool {
        let due = now.since(self.told_at) >= limits::REPEAT_MS;
        if due {
            self.told_at = now;
        }
        due
    }
}

impl ShardFetch {
    fn chunks(&self) -> u64 {
        self.chunk.count(self.expected.length)
    }

    fn is_complete(&self) -> bool {
        self.leaves.len() as u64 == self.chunks()
    }

    fn next_source(&mut self) {
        self.sources.next();
        self.leaves.clear();
        self.prints.clear();
    }

    /// Leaves out nodes that are down, and one that has not answered for as long as a session waits.
    fn skip_silent(&mut self, now: Now, is_up: impl Fn(&NodeName) -> bool) {
        while self.sources.is_silent(now, limits::PROPOSE_MAX_MS, &is_up) {
            self.next_source();
        }
    }

    fn take(&mut self, from: &NodeName, first: u64, page: &TablePage) -> Taken {
        if !self.sources.is_asked(from) || first != self.leaves.len() as u64 {
            return Taken::Nothing;
        }
        let room = self.chunks() - first;
        let fits = !page.leaves.is_empty()
            && page.leaves.len() as u64 <= room
            && (page.prints.is_empty() || page.prints.len() == page.leaves.len());
        if !fits {
            self.next_source();
            return Taken::Moved;
        }
        self.sources.answered();
        // Fingerprints count if every page has them.
        if self.prints.len() == self.leaves.len() {
            self.prints.extend_from_slice(&page.prints);
        }
        self.leaves.extend_from_slice(&page.leaves);
        if self.is_complete() {
            let entry = &self.expected;
            let is_proven = root_digest(&self.leaves, entry.length, self.chunk) == entry.root;
            if !is_proven && !planted!("unproven_tables") {
                self.next_source();
            }
        }
        Taken::Moved
    }
}

impl Context {
    /// The tables that this member needs for its part, and who has them.
    pub(super) fn wanted_tables(
        &self,
        key: &CheckpointKey,
        derived: &Derived,
        kind: &SessionKind,
        kept: Option<usize>,
    ) -> Vec<Wanted> {
        let data = derived.blocks.data.len();
        let all_data = || (0..data).collect::<Vec<_>>();
        let (blocks, prints) = match (kind, kept) {
            (SessionKind::Encode { checks, .. }, kept) => {
                let compares = kept.is_some() || *checks == SumChecks::Every;
                let blocks = if compares { all_data() } else { Vec::new() };
                (blocks, WantedPrints::Needed)
            }
            (SessionKind::Repair { .. }, None) => (Vec::new(), WantedPrints::Needless),
            // Whoever gets parity back gets the tables of all shards it covers.
            (SessionKind::Repair { .. }, Some(kept)) if kept >= data => {
                (all_data(), WantedPrints::Needed)
            }
            // The one who gets the block checks every other.
            (SessionKind::Repair { shape, .. }, Some(_)) if *shape == RepairShape::Direct => {
                (all_data(), WantedPrints::Needless)
            }
            (SessionKind::Repair { .. }, Some(kept)) => (vec![kept], WantedPrints::Needless),
        };
        let is_encode = matches!(kind, SessionKind::Encode { .. });
        let wanted = |block: usize| {
            let shard = derived.blocks.data.get(block)?.as_ref()?;
            let known = self.leaves_known(key, shard.rank).is_some()
                && (prints == WantedPrints::Needless
                    || self.prints_known(key, shard.rank).is_some());
            // What another session has left here may be what an encode failed on.
            let is_own = shard.node == *self.me();
            if known && (is_own || !is_encode) {
                return None;
            }
            // The owner knows best. Then those who keep parity: of a repair they are the last that read.
            let (read, keep) = derived.members.split_at(derived.sources.len());
            let of_repair = read.iter().rev().filter(|_| !is_encode);
            let all = std::iter::once(&shard.node).chain(of_repair).chain(keep);
            let mut asked = BTreeSet::from([self.me()]);
            let takes_part = |name: &&NodeName| derived.members.contains(name);
            let sources = all.filter(takes_part).filter(|name| asked.insert(name));
            Some(Wanted {
                rank: shard.rank,
                prints,
                sources: sources.cloned().collect(),
            })
        };
        blocks.into_iter().filter_map(wanted).collect()
    }

    /// The digests of a shard's chunks, if they are known here.
    pub(crate) fn leaves_known(&self, key: &CheckpointKey, rank: Rank) -> Option<Arc<[Digest]>> {
        let checkpoint = self.checkpoints.get(key)?;
        let own = checkpoint.shards.get(&rank).and_then(LocalShard::sealed);
        own.map(|shard| shard.leaves)
            .or_else(|| checkpoint.leaves.get(&rank).cloned())
    }
}

impl Sessions {
    /// Asks for the pages that this member's part still waits for; ready if it waits for nothing any more.
    pub(super) fn prepare(&mut self, leader: &NodeName, session: SessionId, cx: &mut Context) {
        let now = cx.now;
        let (peers, me) = (&cx.peers, &cx.setup.name);
        let is_up = |node: &NodeName| node == me || peers.contains_key(node);
        let Some(joined) = self.joined.get_mut(&SessionPlace::of(leader, session)) else {
            return;
        };
        let MemberPhase::Preparing { needs_slot } = joined.phase else {
            return;
        };
        let requests = joined.fetch.requests(now, is_up);
        if joined.fetch.is_settled() && !needs_slot {
            joined.phase = MemberPhase::Ready;
            return self.say_ready(leader, session, cx);
        }
        for (to, place) in requests {
            cx.send(&to, PeerMessage::TableQuery(place));
        }
    }

    /// Pages that did not come are asked for again.
    pub(crate) fn repeat_preparations(&mut self, cx: &mut Context) {
        let waits = |phase: &MemberPhase| matches!(phase, MemberPhase::Preparing { .. });
        let waiting = self
            .joined
            .iter()
            .filter(|(_, joined)| waits(&joined.phase));
        let places: Vec<_> = waiting.map(|(place, _)| place.clone()).collect();
        for SessionPlace { leader, session } in places {
            self.prepare(&leader, session, cx);
        }
        // Whoever still waits for them asks again as well.
        self.deferred_tables.clear();
    }

    /// A page has come.
    pub(crate) fn table_told(
        &mut self,
        from: &NodeName,
        place: TablePlace,
        page: TablePage,
        cx: &mut Context,
    ) {
        let now = cx.now;
        let mut moved = Vec::new();
        for (session, joined) in &mut self.joined {
            if joined.fetch.take(from, place, &page) == Taken::Moved {
                moved.push((session.clone(), joined.fetch.should_tell(now)));
            }
        }
        for (SessionPlace { leader, session }, tell) in moved {
            if tell {
                cx.send(&leader, PeerMessage::Preparing { session });
            }
            self.prepare(&leader, session, cx);
        }
    }

    /// A member of a session led here is at it.
    pub(crate) fn member_preparing(
        &mut self,
        from: &NodeName,
        session: SessionId,
        cx: &mut Context,
    ) {
        let until = cx.now.plus(limits::PROPOSE_MAX_MS);
        let Some(led) = self.led.get_mut(&session) else {
            let kept = false;
            return cx.send(from, PeerMessage::Close { session, kept });
        };
        if led.begun.is_none() && led.members.contains(from) {
            led.deadline = led.deadline.max(until).min(led.prepare_by);
        }
    }

    /// A peer asks for a page. Without the manifest nothing can be said yet: it is on its way from another node.
    pub(crate) fn table_asked(&mut self, from: &NodeName, place: TablePlace, cx: &mut Context) {
        let Some(key) = cx.by_name.get(&place.manifest) else {
            if self.deferred_tables.len() < DEFERRED_MAX {
                self.deferred_tables.insert((from.clone(), place));
            }
            return;
        };
        let chunks = cx.setup.messages.table_chunks;
        let first = usize::try_from(place.first).unwrap_or(usize::MAX);
        let (leaves, prints) = match self.table_here(key, place, cx) {
            TableHere::Known(leaves, prints) => {
                (part(&leaves, first, chunks), part(&prints, first, chunks))
            }
            // What is here already is a sign of life to whoever waits for all of it. Nothing yet is not: it asks again.
            TableHere::Coming(leaves, prints) if first < leaves.len() => {
                (part(leaves, first, chunks), part(prints, first, chunks))
            }
            TableHere::Coming(..) => return,
            TableHere::Unknown => Default::default(),
        };
        let page = TablePage { leaves, prints };
        cx.send(from, PeerMessage::TablePage { place, page });
    }

    /// A table as far as it is known here: what a session has fetched counts before the session's end.
    fn table_here(&self, key: &CheckpointKey, place: TablePlace, cx: &Context) -> TableHere<'_> {
        let fetches = self.joined.values().map(|joined| &joined.fetch);
        let fetches = fetches.filter(|fetch| fetch.manifest == place.manifest);
        let fetched = fetches.clone().find_map(|fetch| {
            let leaves = fetch.tables.leaves(place.rank)?;
            Some((leaves.clone(), fetch.tables.prints(place.rank)?.clone()))
        });
        if let Some((leaves, prints)) = fetched {
            return TableHere::Known(leaves, prints);
        }
        if let Some(leaves) = cx.leaves_known(key, place.rank) {
            let prints = cx.prints_known(key, place.rank).unwrap_or_default();
            return TableHere::Known(leaves, prints);
        }
        match fetches
            .clone()
            .find_map(|fetch| fetch.coming.get(&place.rank))
        {
            Some(coming) => TableHere::Coming(&coming.leaves, &coming.prints),
            None => TableHere::Unknown,
        }
    }

    /// A manifest is there: pages of its tables can be told.
    pub(super) fn tell_deferred_tables(&mut self, cx: &mut Context) {
        let deferred = std::mem::take(&mut self.deferred_tables);
        for (from, place) in deferred {
            self.table_asked(&from, place, cx);
        }
    }
}

fn part<T: Clone>(table: &[T], first: usize, count: usize) -> Vec<T> {
    table.iter().skip(first).take(count).cloned().collect()
}

#[cfg(test)]
mod tests;
