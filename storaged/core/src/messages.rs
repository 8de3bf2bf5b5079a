//! What a node says to many or at length: as it is if it fits a message, else as a parcel, which its peers fetch and hand on
//! (`parcels` has what is kept and what is coming).

use std::collections::{BTreeMap, BTreeSet};

use minicbor::bytes::ByteVec;
use storaged_codec::digest;
use storaged_wire::peer::{CheckpointKey, ParcelPlace, PeerMessage, Relay, SessionKind};
use storaged_wire::{Digest, Enclosure, NodeName, SharedBytes, encode};

use crate::api::{
    FalseStatement, MessageLimits, Note, Output, ParcelContents, ParcelFault, Preparation, QueryId,
};
use crate::context::Context;
use crate::event::Event;
use crate::limits;
use crate::parcels::{EnclosureWish, Incoming, Notice, PageUse, Relays};

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
            } => {
                let digest = parcel;
                self.parcel_told(from, Enclosure { digest, length }, relay);
            }
            PeerMessage::ParcelQuery(place) => self.parcel_asked(from, place),
            PeerMessage::ParcelPage { place, bytes } => self.parcel_page(from, place, &bytes),
            other => return Some(other),
        }
        None
    }

    /// The message as it goes to peers: itself, or where it can be fetched.
    pub(crate) fn wrap(&mut self, message: PeerMessage) -> PeerMessage {
        let MessageLimits { inline, .. } = self.setup.messages;
        self.wrap_above(inline, message)
    }

    fn wrap_above(&mut self, most: usize, message: PeerMessage) -> PeerMessage {
        if size_hint(&message) <= most {
            return message;
        }
        let bytes = encode(&message);
        if bytes.len() <= most {
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
        // Every node gets a commit, and each of the home nodes would send it to all of them.
        let most = match notice {
            Notice::Committed => self.setup.messages.spread,
            Notice::Answer => self.setup.messages.inline,
        };
        let message = self.wrap_above(most, message());
        if let PeerMessage::Parcel { parcel, length, .. } = message
            && let Some(checkpoint) = self.checkpoints.get_mut(key)
        {
            checkpoint.parcels.insert(notice, (parcel, length));
        }
        message
    }

    /// A peer has something to say that does not fit a message.
    fn parcel_told(&mut self, from: &NodeName, named: Enclosure, relay: Option<Relay>) {
        // Nobody hands on to a node what that one has said: it would believe itself, whatever that is.
        let is_its_own = relay.as_ref().is_some_and(|it| it.of == *self.me());
        if is_its_own && !planted!("told_in_its_own_name") {
            return;
        }
        let (now, parcel) = (self.now, named.digest);
        let Some(kept) = self.parcels.kept(parcel, now) else {
            if self.parcels.told(from, named, relay).is_err() {
                self.is_false(from, FalseStatement::TooMuch);
            }
            return self.fetch_parcels();
        };
        let (bytes, manifest) = (kept.bytes.clone(), kept.manifest);
        let (said, is) = (named.length, bytes.len() as u64);
        if said != is {
            return self.is_false(from, FalseStatement::OtherLength { said, is });
        }
        // Several home nodes say the same, and each wants an answer.
        let known = manifest.and_then(|name| Some((name, self.by_name.get(&name)?.clone())));
        let Some((name, key)) = known else {
            let is_opening = self.parcels.is_opening(&named);
            self.parcels.told_again(from, named, relay);
            if !is_opening {
                self.prepare(Preparation::Open { parcel, bytes });
            }
            return;
        };
        let teller = relay.as_ref().map_or(from, |relay| &relay.of).clone();
        self.is_taken_up_again(&teller, name);
        self.say_stored(&teller, &key, name);
        if let Some(relay) = relay {
            self.hand_on(parcel, is, BTreeMap::from([(relay.of, relay.to)]));
        }
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
    fn hand_on(&mut self, parcel: Digest, length: u64, relays: Relays) {
        for (of, mut to) in relays {
            to.truncate(self.setup.members.len());
            self.spread(parcel, length, &Relay { of, to });
        }
    }

    pub(crate) fn fetch_parcels(&mut self) {
        let peers = &self.peers;
        let requests = self
            .parcels
            .requests(self.now, |node| peers.contains_key(node));
        for (to, place) in requests {
            self.send(&to, PeerMessage::ParcelQuery(place));
        }
        self.emit_enclosures_given_up();
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
        let kept = self.parcels.kept(place.parcel, now);
        let bytes = kept.map(|kept| kept.bytes.clone());
        let bytes = bytes.or_else(|| self.enclosures.get(place.parcel));
        let page = bytes.and_then(|bytes| {
            let end = bytes.len().min(offset.saturating_add(most));
            bytes.get(offset..end).map(<[u8]>::to_vec)
        });
        let bytes = ByteVec::from(page.unwrap_or_default());
        self.send(from, PeerMessage::ParcelPage { place, bytes });
    }

    /// A page has come.
    fn parcel_page(&mut self, from: &NodeName, place: ParcelPlace, bytes: &[u8]) {
        match self.parcels.take(from, place, bytes) {
            PageUse::Part => {}
            PageUse::Whole(bytes) => {
                let parcel = place.parcel;
                self.prepare(Preparation::Open { parcel, bytes });
            }
            PageUse::Beyond { told } => {
                let node = from.clone();
                let reason = format!("sent more than the {told} bytes of a parcel that it told of");
                self.note(Note::PeerFault { node, reason });
            }
        }
        self.fetch_parcels();
    }

    /// Has a whole manifest worked on while this node goes on.
    pub(crate) fn prepare(&mut self, work: Preparation) {
        self.out.push(Output::Prepare(work));
    }

    /// Hears what a parcel says, from each that told of it. In another one's name a commit alone is believed: who tells of it
    /// makes no difference to that.
    pub(crate) fn parcel_opened(
        &mut self,
        parcel: Digest,
        bytes: SharedBytes,
        outcome: Result<ParcelContents, ParcelFault>,
    ) {
        let length = bytes.len() as u64;
        let digest = parcel;
        let named = Enclosure { digest, length };
        if matches!(outcome, Err(ParcelFault::Digest)) && !planted!("enclosures_unproven") {
            self.parcels.was_wrong(named);
            return self.fetch_parcels();
        }
        let Some(Incoming {
            enclosure,
            tellers,
            relays,
            ..
        }) = self.parcels.opened(&named)
        else {
            return;
        };
        if enclosure == EnclosureWish::Wanted {
            self.enclosure_came(parcel, bytes.clone());
        }
        if tellers.is_empty() && relays.is_empty() {
            return;
        }
        self.parcels.keep(parcel, bytes, self.now);
        match outcome {
            Err(fault) => self.parcel_is_wrong(tellers, &fault),
            Ok(ParcelContents::Commit { manifest, durable }) => {
                if let Some(kept) = self.parcels.kept(parcel, self.now) {
                    kept.manifest = Some(manifest.name());
                }
                // In whose name a relay speaks nobody can check: one node alone could speak for two.
                let homes = self.homes_of(&CheckpointKey::of(manifest.manifest()));
                let homes = relays.keys().filter(|of| homes.contains(of));
                for of in homes.chain(&tellers) {
                    self.emit(Event::CommitTold(of.clone(), manifest.clone(), durable));
                }
                self.hand_on(parcel, length, relays);
            }
            Ok(ParcelContents::Manifest { query, manifest }) => {
                for from in tellers {
                    let query = query.map(QueryId);
                    self.emit(Event::ManifestTold(from, query, manifest.clone()));
                }
            }
            Ok(ParcelContents::Message(message)) => {
                for from in tellers {
                    self.emit(Event::Message(from, (*message).clone()));
                }
            }
        }
    }

    fn parcel_is_wrong(&mut self, tellers: BTreeSet<NodeName>, fault: &ParcelFault) {
        for node in tellers {
            let reason = fault.to_string();
            self.note(Note::PeerFault { node, reason });
        }
    }
}

/// About how many bytes a message takes, without encoding it: never much less than it does take.
fn size_hint(message: &PeerMessage) -> usize {
    const RECORD: usize = 160;
    match message {
        PeerMessage::Committed { manifest, .. } => manifest.len() + RECORD,
        PeerMessage::Description { .. } => 2 * RECORD,
        PeerMessage::ManifestAnswer { manifest, .. } => {
            manifest.as_ref().map_or(0, |bytes| bytes.len()) + RECORD
        }
        PeerMessage::ShardsSealed { shards, .. } => shards.len() * 64 + 2 * RECORD,
        PeerMessage::Fences(fences) => fences.len() * 3 * RECORD,
        PeerMessage::Marks(marks) => marks.len() * 2 * RECORD,
        PeerMessage::FailedRestarts(all) => {
            let failed = all.iter().map(|told| told.failed.len() + 2);
            failed.sum::<usize>() * RECORD
        }
        PeerMessage::Pins(_, of) => (of.pins.len() + 2) * RECORD,
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
