//! What a node says to many or at length: as it is if it fits a message, else as a parcel, which its peers fetch and hand on
//! (`parcels` has what is kept and what is coming).

use std::collections::{BTreeMap, BTreeSet};

use minicbor::bytes::ByteVec;
use storaged_codec::digest;
use storaged_wire::peer::{CheckpointKey, ParcelPlace, PeerMessage, Relay, SessionKind};
use storaged_wire::{Digest, NodeName, decode, encode};

use crate::api::{MessageLimits, Note};
use crate::context::Context;
use crate::event::Event;
use crate::limits;
use crate::parcels::{Notice, Relays};

impl Context {
    /// Hears a message about parcels; any other comes back.
    pub(crate) fn hear_parcel(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::Parcel {
                parcel,
                length,
                relay,
            } => self.parcel_told(from, (parcel, length), relay),
            PeerMessage::ParcelQuery(place) => self.parcel_asked(from, place),
            PeerMessage::ParcelPage { place, bytes } => self.parcel_page(from, place, &bytes),
            other => return Some(other),
        }
        None
    }

    /// The message as it goes to peers: itself, or where it can be fetched.
    pub(crate) fn wrap(&mut self, message: PeerMessage) -> PeerMessage {
        let MessageLimits { inline, .. } = self.setup.messages;
        if size_hint(&message) <= inline {
            return message;
        }
        let bytes = encode(&message);
        if bytes.len() <= inline {
            return message;
        }
        let (parcel, length) = (digest(&bytes), bytes.len() as u64);
        self.parcels.keep(parcel, bytes.into(), self.now);
        PeerMessage::Parcel {
            parcel,
            length,
            relay: None,
        }
    }

    /// The same of what is said of a checkpoint to many nodes, and again each second.
    pub(crate) fn wrap_again(
        &mut self,
        key: &CheckpointKey,
        notice: Notice,
        message: impl FnOnce() -> PeerMessage,
    ) -> PeerMessage {
        let now = self.now;
        let checkpoint = self.checkpoints.get(key);
        let known = checkpoint.and_then(|c| c.parcels.get(&notice).copied());
        if let Some((parcel, length)) = known
            && self.parcels.kept(parcel, now).is_some()
        {
            return PeerMessage::Parcel {
                parcel,
                length,
                relay: None,
            };
        }
        let message = self.wrap(message());
        if let PeerMessage::Parcel { parcel, length, .. } = message
            && let Some(checkpoint) = self.checkpoints.get_mut(key)
        {
            checkpoint.parcels.insert(notice, (parcel, length));
        }
        message
    }

    /// A peer has something to say that does not fit a message.
    fn parcel_told(
        &mut self,
        from: &NodeName,
        (parcel, length): (Digest, u64),
        relay: Option<Relay>,
    ) {
        let now = self.now;
        let Some(kept) = self.parcels.kept(parcel, now) else {
            self.parcels.told(from, (parcel, length), relay);
            return self.fetch_parcels();
        };
        let (bytes, manifest) = (kept.bytes.clone(), kept.manifest);
        let (tellers, relays) = match relay {
            Some(relay) => (BTreeSet::new(), BTreeMap::from([(relay.of, relay.to)])),
            None => (BTreeSet::from([from.clone()]), BTreeMap::new()),
        };
        // Several home nodes say the same, and each wants an answer.
        let known = manifest.and_then(|name| Some((name, self.by_name.get(&name)?.clone())));
        if let Some((name, key)) = known {
            for teller in tellers.iter().chain(relays.keys()) {
                self.say_stored(teller, &key, name);
            }
            return self.hand_on((parcel, length), relays);
        }
        self.open_parcel((parcel, &bytes), tellers, relays);
    }

    /// Tells others of a parcel that is here: to each of a few its share, which that one is to tell. Whoever does not hear of it
    /// so is told by the home nodes themselves when they say it again.
    pub(crate) fn spread(&mut self, parcel: Digest, length: u64, relay: &Relay) {
        let MessageLimits { fan_out, .. } = self.setup.messages;
        let shares = fan_out.max(relay.to.len().div_ceil(limits::RELAY_NAMES_MAX));
        let share = relay.to.len().div_ceil(shares.max(1)).max(1);
        for share in relay.to.chunks(share) {
            let Some(head) = share.iter().find(|node| self.peers.contains_key(*node)) else {
                continue;
            };
            let to = share.iter().filter(|node| *node != head).cloned().collect();
            let of = relay.of.clone();
            let message = PeerMessage::Parcel {
                parcel,
                length,
                relay: Some(Relay { of, to }),
            };
            let head = head.clone();
            self.send(&head, message);
        }
    }

    /// Tells others of a commit as peers have asked this node to, and no more of them than there are.
    fn hand_on(&mut self, (parcel, length): (Digest, u64), relays: Relays) {
        for (of, mut to) in relays {
            to.truncate(self.setup.members.len());
            self.spread(parcel, length, &Relay { of, to });
        }
    }

    fn fetch_parcels(&mut self) {
        let peers = &self.peers;
        let requests = self
            .parcels
            .requests(self.now, |node| peers.contains_key(node));
        for (to, place) in requests {
            self.send(&to, PeerMessage::ParcelQuery(place));
        }
    }

    /// Asks again for what did not come, and forgets what nobody wants.
    pub(crate) fn repeat_parcels(&mut self) {
        self.parcels.expire(self.now);
        self.fetch_parcels();
    }

    /// A peer fetches.
    fn parcel_asked(&mut self, from: &NodeName, place: ParcelPlace) {
        let (now, most) = (self.now, self.setup.messages.page);
        let offset = usize::try_from(place.offset).unwrap_or(usize::MAX);
        let page = self.parcels.kept(place.parcel, now).and_then(|kept| {
            let bytes = &kept.bytes;
            let end = bytes.len().min(offset.saturating_add(most));
            bytes.get(offset..end).map(<[u8]>::to_vec)
        });
        let bytes = ByteVec::from(page.unwrap_or_default());
        self.send(from, PeerMessage::ParcelPage { place, bytes });
    }

    /// A page has come.
    fn parcel_page(&mut self, from: &NodeName, place: ParcelPlace, bytes: &[u8]) {
        if let Some((bytes, told)) = self.parcels.take(from, place, bytes) {
            self.parcels.keep(place.parcel, bytes.clone(), self.now);
            self.open_parcel((place.parcel, &bytes), told.tellers, told.relays);
        }
        self.fetch_parcels();
    }

    /// Hears what a parcel says, from each that told of it. In another one's name a commit alone is believed: who tells of it
    /// makes no difference to that.
    fn open_parcel(
        &mut self,
        (parcel, bytes): (Digest, &[u8]),
        tellers: BTreeSet<NodeName>,
        relays: Relays,
    ) {
        let message = match decode::<PeerMessage>("message", bytes) {
            // A parcel in a parcel would be a way to keep this node busy.
            Ok(PeerMessage::Parcel { .. } | PeerMessage::ParcelPage { .. }) => {
                return self.parcel_is_wrong(tellers, "sent a parcel that holds another one");
            }
            Err(error) => return self.parcel_is_wrong(tellers, &error.to_string()),
            Ok(message) => message,
        };
        if let PeerMessage::Committed { manifest, .. } = &message {
            if let Some(kept) = self.parcels.kept(parcel, self.now) {
                kept.manifest = Some(digest(manifest));
            }
            for of in relays.keys() {
                self.emit(Event::Message(of.clone(), message.clone()));
            }
            self.hand_on((parcel, bytes.len() as u64), relays);
        }
        for from in tellers {
            self.emit(Event::Message(from, message.clone()));
        }
    }

    fn parcel_is_wrong(&mut self, tellers: BTreeSet<NodeName>, reason: &str) {
        for node in tellers {
            let reason = reason.to_owned();
            self.note(Note::PeerFault { node, reason });
        }
    }
}

/// About how many bytes a message takes, without encoding it: never much less than it does take.
fn size_hint(message: &PeerMessage) -> usize {
    const RECORD: usize = 160;
    match message {
        PeerMessage::Committed { manifest, .. } => manifest.len() + RECORD,
        PeerMessage::Description {
            schema,
            torch_metadata,
            ..
        } => schema.len() + torch_metadata.len() + 2 * RECORD,
        PeerMessage::ManifestAnswer { manifest, .. } => {
            manifest.as_ref().map_or(0, |bytes| bytes.len()) + RECORD
        }
        PeerMessage::Fences(fences) => fences.len() * 3 * RECORD,
        PeerMessage::Marks(marks) => marks.len() * 2 * RECORD,
        PeerMessage::Attached(namespaces) => namespaces.len() * 2 * RECORD,
        PeerMessage::Holdings { holdings, .. } => {
            let blocks = holdings
                .iter()
                .map(|held| held.shards.len() * 5 + held.parity.len() * 20);
            blocks.sum::<usize>() + (holdings.len() + 1) * 3 * RECORD
        }
        PeerMessage::Held { shards, parity, .. } => shards.len() * 5 + parity.len() * 20 + RECORD,
        PeerMessage::Owed { done, .. } => done.len() * 5 + RECORD,
        PeerMessage::VerifyAnswer { parts, .. } => parts.len() * 4 * RECORD,
        PeerMessage::Ready { stripes, .. } | PeerMessage::Begin { stripes, .. } => {
            stripes.as_ref().map_or(0, |map| map.bits.len()) + 4 * RECORD
        }
        PeerMessage::Propose(record) => match &record.kind {
            SessionKind::Encode { .. } => 4 * RECORD,
            SessionKind::Repair { stripes, .. } => stripes.len() * 18 + 8 * RECORD,
        },
        _ => RECORD,
    }
}
