//! How long the parts of a restart take, each apart: until a launcher or trainer has its plan, until a shard is there, and until whoever
//! opened it has read it. (That a node is gone is noticed by its links.)

use std::collections::BTreeMap;
use std::time::Instant;

use storaged_core::{ConnId, RequestId};
use storaged_wire::local::{Reply, Request, Rung};
use storaged_wire::{Digest, Rank};

use crate::metrics::Metrics;

/// A shard that a connection has opened. It may open one again, for other ranges; the last time counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Opened {
    conn: ConnId,
    manifest: Digest,
    rank: Rank,
}

/// What is being measured.
#[derive(Debug, Default)]
pub(super) struct RestoreTimes {
    asked: BTreeMap<RequestId, RestoreAsked>,
    open: BTreeMap<Opened, (Rung, Instant)>,
    /// Since when shards are asked for that their readers have while they still come.
    coming: BTreeMap<Opened, Instant>,
}

#[derive(Debug)]
struct RestoreAsked {
    at: Instant,
    for_what: AskedFor,
}

#[derive(Debug, Clone, Copy)]
enum AskedFor {
    Plan,
    Shard(Opened),
    /// News of one that its reader has already.
    News(Opened),
}

impl RestoreTimes {
    /// A request has come. One that closes a shard ends its reading.
    pub fn asks(&mut self, id: RequestId, request: &Request, metrics: &Metrics) {
        let conn = id.conn;
        let opened = |manifest: &Digest, rank: &Rank| Opened {
            conn,
            manifest: *manifest,
            rank: *rank,
        };
        let mut at = Instant::now();
        let for_what = match request {
            Request::Plan { .. } => AskedFor::Plan,
            // A drill restores nothing.
            Request::OpenShard {
                withheld: Some(_), ..
            } => return,
            Request::OpenShard { manifest, rank, .. } => {
                let opened = opened(manifest, rank);
                self.coming.remove(&opened);
                AskedFor::Shard(opened)
            }
            Request::FollowShard { manifest, rank, .. } => {
                let opened = opened(manifest, rank);
                let Some(since) = self.coming.remove(&opened) else {
                    return;
                };
                at = since;
                AskedFor::News(opened)
            }
            Request::CloseShard { manifest, rank } => {
                return self.closed(opened(manifest, rank), metrics);
            }
            _ => return,
        };
        self.asked.insert(id, RestoreAsked { at, for_what });
    }

    /// It is answered. What was refused has no time of its own: it waited for as long as its caller wanted.
    pub fn answers(&mut self, id: RequestId, reply: &Reply, metrics: &Metrics) {
        let Some(RestoreAsked { at, for_what }) = self.asked.remove(&id) else {
            return;
        };
        let (opened, since) = match for_what {
            AskedFor::Plan => {
                if let Reply::Plan(_) = reply {
                    metrics.observe_restore_plan(at.elapsed());
                }
                return;
            }
            AskedFor::Shard(opened) => (opened, Instant::now()),
            AskedFor::News(opened) => {
                let since = self.open.get(&opened).map(|(_, since)| *since);
                (opened, since.unwrap_or_else(Instant::now))
            }
        };
        match reply {
            Reply::ShardOpened { rung, .. } | Reply::ShardCame(rung) => {
                metrics.observe_restore_open(*rung, at.elapsed());
                self.open.insert(opened, (*rung, since));
            }
            Reply::ShardComing { rung, .. } => {
                self.open.insert(opened, (*rung, since));
                self.coming.insert(opened, at);
            }
            Reply::StillComing => drop(self.coming.insert(opened, at)),
            // What comes no more was never there.
            _ => drop(self.open.remove(&opened)),
        }
    }

    /// Whoever opened it has read it. What has all been copied before it was said to be there was there by now.
    fn closed(&mut self, opened: Opened, metrics: &Metrics) {
        let Some((rung, since)) = self.open.remove(&opened) else {
            return;
        };
        if let Some(at) = self.coming.remove(&opened) {
            metrics.observe_restore_open(rung, at.elapsed());
        }
        metrics.observe_restore_read(rung, since.elapsed());
    }

    /// A connection is gone. What it had open was read in part, or not at all.
    pub fn forget(&mut self, conn: ConnId) {
        self.asked.retain(|id, _| id.conn != conn);
        self.open.retain(|opened, _| opened.conn != conn);
        self.coming.retain(|opened, _| opened.conn != conn);
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::{ChunkSize, Refusal, RefusalCode};

    use super::*;

    fn id(conn: u64, index: u64) -> RequestId {
        let conn = ConnId(conn);
        RequestId { conn, index }
    }

    fn open() -> Request {
        Request::OpenShard {
            manifest: Digest::from_bytes(&[7; 32]),
            rank: Rank::new(0),
            ranges: Vec::new(),
            timeout_ms: 1,
            without: None,
            withheld: None,
            early: None,
        }
    }

    fn close() -> Request {
        Request::CloseShard {
            manifest: Digest::from_bytes(&[7; 32]),
            rank: Rank::new(0),
        }
    }

    fn opened(rung: Rung) -> Reply {
        Reply::ShardOpened {
            length: 0,
            chunk: ChunkSize::new(4096).expect("a size"),
            leaves: Vec::new().into(),
            rung,
            fingerprints: None,
        }
    }

    fn counts(metrics: &Metrics, name: &str) -> Vec<String> {
        let text = metrics.text();
        let lines = text.lines();
        let begin = format!("storaged_restore_{name}_seconds_count");
        lines
            .filter(|line| line.starts_with(&begin))
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn each_part_is_counted_by_where_the_bytes_came_from_and_nothing_stays() {
        let metrics = Metrics::new();
        let mut times = RestoreTimes::default();
        for (conn, rung) in [(1, Rung::OwnRam), (2, Rung::Durable), (3, Rung::Durable)] {
            times.asks(id(conn, 0), &open(), &metrics);
            times.answers(id(conn, 0), &opened(rung), &metrics);
        }
        let of = |name, rung, count| {
            format!("storaged_restore_{name}_seconds_count{{source=\"{rung}\"}} {count}")
        };
        let all = [of("open", "durable", 2), of("open", "own-ram", 1)];
        let mut found = counts(&metrics, "open");
        found.sort();
        assert_eq!(found, all);
        times.asks(id(2, 1), &close(), &metrics);
        times.asks(id(2, 2), &close(), &metrics);
        assert_eq!(counts(&metrics, "read"), [of("read", "durable", 1)]);
        times.forget(ConnId(1));
        times.forget(ConnId(3));
        assert!(times.open.is_empty() && times.asked.is_empty());
    }

    #[test]
    fn a_shard_that_is_read_while_it_comes_is_open_when_it_has_come_or_is_closed() {
        let metrics = Metrics::new();
        let mut times = RestoreTimes::default();
        let follow = Request::FollowShard {
            manifest: Digest::from_bytes(&[7; 32]),
            rank: Rank::new(0),
            timeout_ms: 1,
        };
        let comes = Reply::ShardComing {
            length: 0,
            chunk: ChunkSize::new(4096).expect("a size"),
            leaves: Vec::new().into(),
            rung: Rung::Decoded,
        };
        for conn in [1, 2] {
            times.asks(id(conn, 0), &open(), &metrics);
            times.answers(id(conn, 0), &comes, &metrics);
            times.asks(id(conn, 1), &follow, &metrics);
            times.answers(id(conn, 1), &Reply::StillComing, &metrics);
        }
        assert_eq!(counts(&metrics, "open"), [""; 0]);
        // What comes no more was never open.
        times.asks(id(3, 0), &open(), &metrics);
        times.answers(id(3, 0), &comes, &metrics);
        times.asks(id(3, 1), &follow, &metrics);
        let refusal = Refusal::new(RefusalCode::TooManyLost, "three of six are gone");
        times.answers(id(3, 1), &Reply::Refused(refusal), &metrics);
        times.asks(id(3, 2), &close(), &metrics);
        assert_eq!(counts(&metrics, "read"), [""; 0]);
        times.asks(id(1, 2), &follow, &metrics);
        times.answers(id(1, 2), &Reply::ShardCame(Rung::Decoded), &metrics);
        let one = "storaged_restore_open_seconds_count{source=\"decoded\"} 1";
        assert_eq!(counts(&metrics, "open"), [one]);
        for conn in [1, 2] {
            times.asks(id(conn, 3), &close(), &metrics);
        }
        for name in ["open", "read"] {
            let two = format!("storaged_restore_{name}_seconds_count{{source=\"decoded\"}} 2");
            assert_eq!(counts(&metrics, name), [two]);
        }
        // One that is opened again counts for the last time.
        times.asks(id(4, 0), &open(), &metrics);
        times.answers(id(4, 0), &comes, &metrics);
        times.asks(id(4, 1), &open(), &metrics);
        times.answers(id(4, 1), &opened(Rung::Decoded), &metrics);
        times.asks(id(4, 2), &close(), &metrics);
        let three = "storaged_restore_open_seconds_count{source=\"decoded\"} 3";
        assert_eq!(counts(&metrics, "open"), [three]);
        let left = (times.asked.len(), times.open.len(), times.coming.len());
        assert_eq!(left, (0, 0, 0));
    }

    #[test]
    fn what_is_refused_has_no_time() {
        let metrics = Metrics::new();
        let mut times = RestoreTimes::default();
        let refusal = Refusal::new(RefusalCode::TimedOut, "it has waited long enough");
        times.asks(id(1, 0), &open(), &metrics);
        times.answers(id(1, 0), &Reply::Refused(refusal), &metrics);
        assert_eq!(counts(&metrics, "open"), [""; 0]);
        assert!(times.open.is_empty() && times.asked.is_empty());
    }
}
