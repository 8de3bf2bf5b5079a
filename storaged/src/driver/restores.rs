//! How long the parts of a restart take, each apart: until a launcher or trainer has its plan, until a shard is there, and until whoever
//! opened it has read it. (That a node is gone is noticed by its links.)

use std::collections::BTreeMap;
use std::time::Instant;

use storaged_core::{ConnId, RequestId};
use storaged_wire::local::{Reply, Request, Rung};
use storaged_wire::{Digest, Rank};

use crate::metrics::Metrics;

/// A shard that a connection has opened. It may open one again, for other ranges; the last time counts.
type Opened = (ConnId, Digest, Rank);

/// What is being measured.
#[derive(Debug, Default)]
pub(super) struct RestoreTimes {
    asked: BTreeMap<RequestId, RestoreAsked>,
    open: BTreeMap<Opened, (Rung, Instant)>,
}

#[derive(Debug)]
struct RestoreAsked {
    at: Instant,
    shard: Option<(Digest, Rank)>,
}

impl RestoreTimes {
    /// A request has come. One that closes a shard ends its reading.
    pub fn asks(&mut self, id: RequestId, request: &Request, metrics: &Metrics) {
        let at = Instant::now();
        let shard = match request {
            Request::Plan { .. } => None,
            // A drill restores nothing.
            Request::OpenShard {
                withheld: Some(_), ..
            } => return,
            Request::OpenShard { manifest, rank, .. } => Some((*manifest, *rank)),
            Request::CloseShard { manifest, rank } => {
                let read = self.open.remove(&(id.conn, *manifest, *rank));
                if let Some((rung, since)) = read {
                    metrics.observe_restore_read(rung, since.elapsed());
                }
                return;
            }
            _ => return,
        };
        self.asked.insert(id, RestoreAsked { at, shard });
    }

    /// It is answered. What was refused has no time of its own: it waited for as long as its caller wanted.
    pub fn answers(&mut self, id: RequestId, reply: &Reply, metrics: &Metrics) {
        let Some(RestoreAsked { at, shard }) = self.asked.remove(&id) else {
            return;
        };
        match (reply, shard) {
            (Reply::Plan(_), None) => metrics.observe_restore_plan(at.elapsed()),
            (Reply::ShardOpened { rung, .. }, Some((manifest, rank))) => {
                metrics.observe_restore_open(*rung, at.elapsed());
                let opened = (id.conn, manifest, rank);
                self.open.insert(opened, (*rung, Instant::now()));
            }
            _ => {}
        }
    }

    /// A connection is gone. What it had open was read in part, or not at all.
    pub fn forget(&mut self, conn: ConnId) {
        self.asked.retain(|id, _| id.conn != conn);
        self.open.retain(|(by, ..), _| *by != conn);
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
            leaves: Vec::new(),
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
