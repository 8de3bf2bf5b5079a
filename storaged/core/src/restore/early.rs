//! Readers that take a shard while it still comes. Whoever opens one so is answered once a session fills memory with it, with that memory and
//! the digests of its chunks: a chunk that has its digest is there, and copying it need not wait for the others. What comes
//! of the opening is told to `FollowShard`. A request is answered once, so what the ladder says of an opening whose reader has the memory
//! goes by way of this table.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_wire::local::{Reply, Rung};
use storaged_wire::{ChunkSize, Digest, Rank, SlotId};

use crate::api::{ConnId, Now, RequestId};

/// So many shards a connection has early, or has not asked about in the end; others it is given when they are there.
const EARLY_PER_CONN_MAX: usize = 64;

/// What a request is answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub reply: Reply,
    /// The memory that goes with it.
    pub descriptor: Option<SlotId>,
}

impl Answer {
    /// Without memory.
    pub fn plain(reply: Reply) -> Self {
        Self {
            reply,
            descriptor: None,
        }
    }

    /// Whether the ladder has come to an end by it.
    fn is_final(&self) -> bool {
        !matches!(self.reply, Reply::ShardComing { .. })
    }
}

/// A shard that a session is filling a slot of this node with.
#[derive(Debug, Clone)]
pub(crate) struct ComingShard {
    pub slot: SlotId,
    /// Whether the slot is that of one opening; else it is filled for the node, whoever waits.
    pub is_of_opening: bool,
    pub length: u64,
    pub chunk: ChunkSize,
    /// They have the manifest's root.
    pub leaves: Arc<[Digest]>,
    pub rung: Rung,
}

/// Which shard it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenedEarly {
    pub manifest: Digest,
    pub rank: Rank,
}

/// Openings that may be answered early, by the request that asked for them.
#[derive(Debug, Default)]
pub(crate) struct EarlyReaders {
    readers: BTreeMap<RequestId, EarlyReader>,
    /// Those who wait for what becomes of it, by the same request. A connection asks one thing at a time, so there are few.
    followers: BTreeMap<RequestId, Follower>,
}

#[derive(Debug)]
struct EarlyReader {
    of: OpenedEarly,
    /// The memory that it has been given, and how the shard comes there.
    given: Option<GivenMemory>,
    /// What it has not been told yet.
    untold: Option<Answer>,
    /// It has given the shard up, or opened it anew.
    is_closed: bool,
}

#[derive(Debug, Clone, Copy)]
struct GivenMemory {
    slot: SlotId,
    rung: Rung,
}

#[derive(Debug, Clone, Copy)]
struct Follower {
    id: RequestId,
    until: Now,
}

impl EarlyReader {
    fn is_followed_by(&self, of: OpenedEarly) -> bool {
        self.of == of && self.given.is_some() && !self.is_closed
    }

    /// As it is said to a reader that has this memory.
    fn said(&self, answer: Answer) -> Answer {
        match (&answer.reply, self.given) {
            (Reply::ShardOpened { rung, .. }, Some(given))
                if answer.descriptor == Some(given.slot) =>
            {
                // A heal has filled this node's own RAM, from elsewhere.
                let came_from = match rung {
                    Rung::OwnRam => given.rung,
                    other => *other,
                };
                Answer::plain(Reply::ShardCame(came_from))
            }
            _ => answer,
        }
    }

    /// It is told so now.
    fn tell(&mut self, answer: Answer) -> Answer {
        let said = self.said(answer);
        if let (Reply::ShardComing { rung, .. }, Some(slot)) = (&said.reply, said.descriptor) {
            self.given = Some(GivenMemory { slot, rung: *rung });
        }
        said
    }
}

impl EarlyReaders {
    /// A request to open a shard may be answered early. Whoever opens a shard again follows that opening, not the one before.
    pub fn wants(&mut self, id: RequestId, of: OpenedEarly) {
        let before = self
            .of_conn(id.conn)
            .filter(|(_, it)| it.is_followed_by(of));
        let before: Vec<RequestId> = before.map(|(id, _)| id).collect();
        for opened in before {
            self.close(opened);
        }
        if self.of_conn(id.conn).count() >= EARLY_PER_CONN_MAX && !planted!("early_without_end") {
            return;
        }
        let reader = EarlyReader {
            of,
            given: None,
            untold: None,
            is_closed: false,
        };
        self.readers.insert(id, reader);
    }

    fn of_conn(&self, conn: ConnId) -> impl Iterator<Item = (RequestId, &EarlyReader)> {
        let (first, last) = (0, u64::MAX);
        let ids = RequestId { conn, index: first }..=RequestId { conn, index: last };
        self.readers.range(ids).map(|(id, reader)| (*id, reader))
    }

    /// What the ladder says in the end, and to which request: none if nobody is to hear it, or not yet.
    pub fn heard(&mut self, id: RequestId, answer: Answer) -> Option<(RequestId, Answer)> {
        let Some(reader) = self.readers.get_mut(&id) else {
            return Some((id, answer));
        };
        if reader.given.is_none() || reader.is_closed {
            let is_told = reader.given.is_none();
            self.readers.remove(&id);
            return is_told.then_some((id, answer));
        }
        match self.followers.remove(&id) {
            Some(follower) => {
                let said = reader.tell(answer);
                self.readers.remove(&id);
                Some((follower.id, said))
            }
            None => {
                reader.untold = Some(answer);
                None
            }
        }
    }

    /// Memory that a session fills, for the reader of this request: to be told to which request, if it is news and somebody asks.
    pub fn comes(&mut self, id: RequestId, coming: &ComingShard) -> Option<(RequestId, Answer)> {
        let reader = self.readers.get_mut(&id).filter(|it| !it.is_closed)?;
        let given = reader.given.map(|given| given.slot);
        if given == Some(coming.slot) {
            // It comes there again, and not to where it has come meanwhile.
            reader.untold = None;
            return None;
        }
        let answer = Answer {
            reply: Reply::ShardComing {
                length: coming.length,
                chunk: coming.chunk,
                leaves: coming.leaves.clone().into(),
                rung: coming.rung,
            },
            descriptor: Some(coming.slot),
        };
        if given.is_none() {
            return Some((id, reader.tell(answer)));
        }
        match self.followers.remove(&id) {
            Some(follower) => Some((follower.id, reader.tell(answer))),
            None => {
                reader.untold = Some(answer);
                None
            }
        }
    }

    /// A request follows a shard, until then. Gives what is to be said now, and to which request; none if nobody has been given that shard
    /// early on this connection. Memory that is not there any more is not told of.
    pub fn follows(
        &mut self,
        id: RequestId,
        of: OpenedEarly,
        until: Now,
        is_there: impl Fn(SlotId) -> bool,
    ) -> Option<Vec<(RequestId, Answer)>> {
        let opened = self.followed(id.conn, of)?;
        let reader = self.readers.get_mut(&opened)?;
        let untold = reader.untold.take();
        let untold = untold.filter(|it| it.is_final() || it.descriptor.is_some_and(&is_there));
        if let Some(answer) = untold {
            let is_final = answer.is_final();
            let said = reader.tell(answer);
            if is_final {
                self.readers.remove(&opened);
            }
            return Some(vec![(id, said)]);
        }
        let before = self.followers.insert(opened, Follower { id, until });
        let still = |before: Follower| (before.id, Answer::plain(Reply::StillComing));
        Some(before.map(still).into_iter().collect())
    }

    fn followed(&self, conn: ConnId, of: OpenedEarly) -> Option<RequestId> {
        let mut known = self.of_conn(conn);
        let (opened, _) = known.find(|(_, reader)| reader.is_followed_by(of))?;
        Some(opened)
    }

    /// Those whose time is over.
    pub fn late(&mut self, now: Now) -> Vec<RequestId> {
        let is_late = |it: &Follower| it.until <= now;
        let late = self.followers.values().filter(|it| is_late(it));
        let late: Vec<RequestId> = late.map(|follower| follower.id).collect();
        self.followers.retain(|_, follower| !is_late(follower));
        late
    }

    /// Whether the reader of this request has been given memory.
    pub fn is_told(&self, id: RequestId) -> bool {
        let reader = self.readers.get(&id);
        reader.is_some_and(|reader| reader.given.is_some())
    }

    /// The reader of this request needs the shard no more, which may still come: nobody hears what becomes of it.
    pub fn close(&mut self, id: RequestId) {
        self.followers.remove(&id);
        let Some(reader) = self.readers.get_mut(&id) else {
            return;
        };
        reader.is_closed = true;
        if reader.untold.take().is_some_and(|it| it.is_final()) {
            self.readers.remove(&id);
        }
    }

    /// Nothing is said of this request any more.
    pub fn forget(&mut self, id: RequestId) {
        self.readers.remove(&id);
        self.followers.remove(&id);
    }

    /// A connection has given up a shard: of openings that have ended it hears no more.
    pub fn forget_ended(&mut self, conn: ConnId, of: OpenedEarly) {
        let ended = self.of_conn(conn).filter(|(_, reader)| {
            reader.of == of && reader.untold.as_ref().is_some_and(Answer::is_final)
        });
        let ended: Vec<RequestId> = ended.map(|(id, _)| id).collect();
        for id in ended {
            self.forget(id);
        }
    }

    /// A connection is gone. What goes on coming for the node itself is answered to nobody.
    pub fn forget_conn(&mut self, conn: ConnId, goes_on: impl Fn(RequestId) -> bool) {
        let open = self.of_conn(conn).filter(|(id, _)| !goes_on(*id));
        let open: Vec<RequestId> = open.map(|(id, _)| id).collect();
        for id in open {
            self.forget(id);
        }
    }

    /// When whoever follows is to be answered.
    pub fn deadlines(&self) -> impl Iterator<Item = Now> {
        self.followers.values().map(|follower| follower.until)
    }

    /// Openings that are not over for whoever asked.
    pub fn count(&self) -> usize {
        self.readers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(rank: u32) -> OpenedEarly {
        OpenedEarly {
            manifest: Digest::from_bytes(&[7; 32]),
            rank: Rank::new(rank),
        }
    }

    fn id(index: u64) -> RequestId {
        let conn = ConnId(1);
        RequestId { conn, index }
    }

    fn chunk() -> ChunkSize {
        ChunkSize::new(4096).unwrap()
    }

    fn coming(slot: u64) -> ComingShard {
        ComingShard {
            slot: SlotId::new(slot),
            is_of_opening: true,
            length: 9,
            chunk: chunk(),
            leaves: Arc::default(),
            rung: Rung::Decoded,
        }
    }

    fn opened(slot: u64, rung: Rung) -> Answer {
        Answer {
            reply: Reply::ShardOpened {
                length: 9,
                chunk: chunk(),
                leaves: Vec::new().into(),
                rung,
                fingerprints: None,
            },
            descriptor: Some(SlotId::new(slot)),
        }
    }

    fn told(said: Option<(RequestId, Answer)>) -> (u64, Option<u64>) {
        let (id, answer) = said.expect("it is told");
        assert!(
            matches!(answer.reply, Reply::ShardComing { .. }),
            "{answer:?}"
        );
        (id.index, answer.descriptor.map(SlotId::get))
    }

    /// What is said to request `index`, which follows; the slots up to `there` are there.
    fn follow(early: &mut EarlyReaders, index: u64, there: u64) -> Vec<Answer> {
        let is_there = |slot: SlotId| slot.get() <= there;
        let said = early.follows(id(index), shard(3), Now(1_000), is_there);
        let said = said.expect("it is known");
        said.into_iter().map(|(_, answer)| answer).collect()
    }

    fn given_first() -> EarlyReaders {
        let mut early = EarlyReaders::default();
        early.wants(id(1), shard(3));
        assert_eq!(told(early.comes(id(1), &coming(1))), (1, Some(1)));
        assert!(early.comes(id(1), &coming(1)).is_none(), "it is no news");
        early
    }

    #[test]
    fn a_reader_that_was_not_told_of_other_memory_hears_where_the_shard_is() {
        let mut early = given_first();
        assert!(early.comes(id(1), &coming(2)).is_none(), "nobody asks");
        assert!(early.heard(id(1), opened(2, Rung::Decoded)).is_none());
        assert_eq!(follow(&mut early, 2, 9), [opened(2, Rung::Decoded)]);
        assert_eq!(early.count(), 0);
    }

    #[test]
    fn a_reader_that_was_told_of_other_memory_hears_that_it_came_there() {
        let mut early = given_first();
        assert!(follow(&mut early, 2, 9).is_empty());
        assert_eq!(told(early.comes(id(1), &coming(2))), (2, Some(2)));
        assert!(early.heard(id(1), opened(2, Rung::Decoded)).is_none());
        let came = Answer::plain(Reply::ShardCame(Rung::Decoded));
        assert_eq!(follow(&mut early, 3, 9), [came]);
    }

    #[test]
    fn memory_that_is_gone_is_not_told_of() {
        let mut early = given_first();
        assert!(early.comes(id(1), &coming(2)).is_none());
        assert!(follow(&mut early, 2, 1).is_empty(), "it waits on");
        let (to, _) = early.heard(id(1), opened(3, Rung::Decoded)).unwrap();
        assert_eq!(to, id(2));
    }

    #[test]
    fn what_came_back_to_the_first_memory_is_not_elsewhere() {
        let mut early = given_first();
        assert!(early.comes(id(1), &coming(2)).is_none());
        assert!(early.comes(id(1), &coming(1)).is_none());
        assert!(follow(&mut early, 2, 9).is_empty());
    }

    #[test]
    fn a_heal_comes_from_elsewhere_and_the_tier_may_fill_the_same_memory() {
        for (rung, said) in [
            (Rung::OwnRam, Rung::Decoded),
            (Rung::Durable, Rung::Durable),
        ] {
            let mut early = given_first();
            assert!(early.heard(id(1), opened(1, rung)).is_none());
            let came = Answer::plain(Reply::ShardCame(said));
            assert_eq!(follow(&mut early, 2, 9), [came]);
        }
    }

    #[test]
    fn whoever_opens_again_follows_the_last_opening() {
        let mut early = given_first();
        early.wants(id(5), shard(3));
        assert_eq!(told(early.comes(id(5), &coming(5))), (5, Some(5)));
        assert!(early.heard(id(1), opened(1, Rung::Decoded)).is_none());
        assert!(follow(&mut early, 6, 9).is_empty());
        let (to, _) = early.heard(id(5), opened(5, Rung::Decoded)).unwrap();
        assert_eq!((to, early.count()), (id(6), 0));
    }

    #[test]
    fn a_connection_that_never_asks_how_it_ended_leaves_no_more_than_so_many() {
        let mut early = EarlyReaders::default();
        for index in 0..1_000 {
            early.wants(id(index), shard(index as u32));
            let given = early.comes(id(index), &coming(index));
            let ended = early.heard(id(index), opened(index, Rung::Decoded));
            assert_eq!(given.is_none(), ended.is_some(), "one of both is told");
        }
        assert_eq!(early.count(), EARLY_PER_CONN_MAX);
        early.forget_conn(ConnId(1), |_| false);
        assert_eq!(early.count(), 0);
    }

    #[test]
    fn who_follows_too_long_is_answered_once() {
        let mut early = given_first();
        assert!(follow(&mut early, 2, 9).is_empty());
        assert_eq!(early.late(Now(999)), []);
        assert_eq!(early.late(Now(1_000)), [id(2)]);
        assert_eq!(early.late(Now(2_000)), []);
        assert!(early.heard(id(1), opened(1, Rung::Decoded)).is_none());
    }
}
