//! Lies of sessions, as their leader and as a member, and of tables and parcels, which are fetched page by page.

use storaged_codec::{Digest, Fingerprint, digest};
use storaged_wire::encode;
use storaged_wire::peer::{
    ParcelPlace, PeerMessage, Relay, SessionKind, SessionRecord, SumChecks, TablePage, TablePlace,
};
use storaged_wire::shape::RepairShape;

use super::super::super::world::World;
use super::super::kinds::{KINDS, Kind};
use super::super::known::Address;
use crate::testkit::name;

/// Bytes of a page that it sends.
const PAGE_BYTES: usize = 150;
/// Parcels of its own that it has to send.
const SERVED_MAX: usize = 32;

impl World {
    /// One that it leads, of a step that there is, or one that it has heard of, in its own name.
    pub(super) fn some_session_record(&mut self, at: Address) -> SessionRecord {
        let heard = self.heard(Kind::Propose, |_| true).map(|it| it.message);
        if let Some(PeerMessage::Propose(record)) = heard
            && self.random(3) == 0
        {
            return record;
        }
        SessionRecord {
            session: self.some_session(at.by),
            manifest: self.some_manifest_name(at.by),
            kind: self.some_session_kind(at),
        }
    }

    /// A session that is over before it has begun.
    pub(in super::super) fn lies_of_an_undone_session(&mut self, at: Address) -> Vec<PeerMessage> {
        let record = self.some_session_record(at);
        let session = record.session;
        let closed = PeerMessage::Close {
            session,
            kept: true,
        };
        vec![PeerMessage::Propose(record), closed]
    }

    fn some_session_kind(&mut self, at: Address) -> SessionKind {
        let lane = self.some_lane();
        if self.random(2) == 0 {
            let parities = match self.random(2) {
                0 => self.some_blocks(),
                _ => (0..self.scene.limits.m as u32).collect(),
            };
            return SessionKind::Encode {
                lane,
                basis: (self.random(3) == 0).then(|| self.some_manifest_name(at.by)),
                checks: self.one_of(&[SumChecks::Parity, SumChecks::Every]),
                parities,
            };
        }
        let (k, m) = (self.scene.limits.k as u32, self.scene.limits.m as u32);
        let wanted = self.random(u64::from(k + m)) as u32;
        let others: Vec<u32> = (0..k + m).filter(|block| *block != wanted).collect();
        let survivors = match self.random(3) {
            0 => self.some_blocks(),
            1 => vec![wanted],
            _ => others.into_iter().take(k as usize).collect(),
        };
        let node = match self.random(4) {
            0 => self.some_node(),
            1 => name(at.by),
            _ => name(at.to),
        };
        let stripes = match self.random(3) {
            0 => vec![(self.limit_number(), self.limit_number())],
            1 => vec![(0, 1)],
            _ => Vec::new(),
        };
        SessionKind::Repair {
            lane,
            survivors,
            wanted: vec![(wanted, node)],
            stripes,
            shape: self.one_of(&[RepairShape::Chain, RepairShape::Gather, RepairShape::Direct]),
        }
    }

    pub(super) fn lie_of_readiness(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Ready {
            session: self.some_session(at.to),
            stripes: self.some_stripes(),
        }
    }

    pub(super) fn lie_of_preparations(&mut self, at: Address) -> PeerMessage {
        let session = self.some_session(at.to);
        PeerMessage::Preparing { session }
    }

    pub(super) fn lie_of_an_awaited_repair(&mut self, at: Address) -> PeerMessage {
        PeerMessage::RepairAwaited {
            leader: self.some_node(),
            session: self.some_session(at.to),
        }
    }

    pub(super) fn lie_of_a_failed_session(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Failed {
            session: self.some_session(at.to),
            fault: self.some_fault(),
        }
    }

    pub(super) fn lie_of_a_beginning(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Begin {
            session: self.some_session(at.by),
            stripes: self.some_stripes(),
            shape: self.some_shape(),
        }
    }

    pub(super) fn lie_of_a_finished_part(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Finished {
            session: self.some_session(at.to),
            tally: self.some_tally(),
        }
    }

    pub(super) fn lie_of_progress(&mut self, at: Address) -> PeerMessage {
        PeerMessage::Progress {
            session: self.some_session(at.to),
            tally: self.some_tally(),
        }
    }

    pub(super) fn lie_of_a_closed_session(&mut self, at: Address) -> PeerMessage {
        let kept = self.random(2) == 0;
        PeerMessage::Close {
            session: self.some_session(at.by),
            kept,
        }
    }

    pub(super) fn some_table(&mut self, at: Address) -> TablePlace {
        let first = self.limit_number();
        TablePlace {
            manifest: self.some_manifest_name(at.by),
            rank: self.some_rank(),
            first: self.one_of(&[0, first]),
        }
    }

    /// The page that it was asked for, of nothing.
    pub(super) fn lie_of_a_table(&mut self, at: Address) -> PeerMessage {
        let asked = self.heard(Kind::TableQuery, |it| it.from == at.to);
        let place = match asked.map(|it| it.message) {
            Some(PeerMessage::TableQuery(place)) if self.random(4) > 0 => place,
            _ => self.some_table(at),
        };
        let (leaves, prints) = (self.random(4), self.random(4));
        let print = |world: &mut Self| Fingerprint::from_bytes([world.random(256) as u8; 16]);
        let page = TablePage {
            leaves: (0..leaves).map(|_| self.some_digest()).collect(),
            prints: (0..prints).map(|_| print(self)).collect(),
        };
        PeerMessage::TablePage { place, page }
    }

    /// A lie of another kind in a parcel that can be had, or one that it never sends; in its own name or in another one's.
    pub(super) fn lie_of_a_parcel(&mut self, at: Address) -> PeerMessage {
        let relay = (self.random(3) == 0).then(|| Relay {
            of: self.some_node(),
            to: self.some_nodes(),
        });
        let kind = match self.random(2) {
            0 => Kind::Committed,
            _ => self.one_of(KINDS),
        };
        // No parcel brings another one.
        let inner = match kind {
            Kind::Parcel => None,
            other => self.lie_of_kind(at, other),
        };
        let (parcel, length) = match inner.filter(|_| self.random(4) > 0) {
            Some(message) => {
                let bytes = encode(&message);
                let (parcel, length) = (digest(&bytes), bytes.len() as u64);
                self.will_send(parcel, bytes);
                (parcel, length)
            }
            None => (self.some_parcel(), self.limit_number()),
        };
        let beside = self.limit_number();
        PeerMessage::Parcel {
            parcel,
            length: match self.random(8) {
                0 => beside,
                _ => length,
            },
            relay,
        }
    }

    fn will_send(&mut self, parcel: Digest, bytes: Vec<u8>) {
        let served = &mut self.scene.byzantine.served;
        if served.len() >= SERVED_MAX {
            served.pop_first();
        }
        served.insert(parcel, bytes);
    }

    /// One that others tell of, or none.
    fn some_parcel(&mut self) -> Digest {
        let told = self.heard(Kind::Parcel, |_| true).map(|it| it.message);
        match told {
            Some(PeerMessage::Parcel { parcel, .. }) if self.random(3) > 0 => parcel,
            _ => self.some_digest(),
        }
    }

    pub(super) fn some_page(&mut self, _: Address) -> ParcelPlace {
        let offset = self.limit_number();
        ParcelPlace {
            parcel: self.some_parcel(),
            offset: self.one_of(&[0, offset]),
        }
    }

    /// The page that it was asked for, of something else.
    pub(super) fn lie_of_a_page(&mut self, at: Address) -> PeerMessage {
        let asked = self.heard(Kind::ParcelQuery, |it| it.from == at.to);
        let place = match asked.map(|it| it.message) {
            Some(PeerMessage::ParcelQuery(place)) if self.random(4) > 0 => place,
            _ => self.some_page(at),
        };
        let bytes = vec![self.random(256) as u8; self.random(400) as usize];
        PeerMessage::ParcelPage {
            place,
            bytes: bytes.into(),
        }
    }

    /// Somebody fetches what it has told of.
    pub(in super::super) fn sends_its_parcel(&mut self, at: Address, place: ParcelPlace) {
        let Some(bytes) = self.scene.byzantine.served.get(&place.parcel) else {
            return;
        };
        let offset = usize::try_from(place.offset).unwrap_or(usize::MAX);
        let rest = bytes.get(offset..).unwrap_or_default();
        let page = rest[..rest.len().min(PAGE_BYTES)].to_vec();
        let bytes = page.into();
        self.byzantine_says(at, PeerMessage::ParcelPage { place, bytes });
    }
}
