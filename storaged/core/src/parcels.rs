//! Large messages as parcels. A manifest of ten thousand ranks with its schema has tens of megabytes, and a home node tells
//! it to every node that it concerns, again each second until that has answered. Sent as they are, such messages would
//! stand before everything else on their links, in memory once per node, and above the limit of a frame they would end
//! the link that carries them, for ever.
//!
//! So what is larger than [`crate::MessageLimits::inline`] is encoded once and kept; the peer is told its digest and length, and
//! fetches it page by page. A digest that comes from several nodes is fetched once, and counts as said by each of them.
//! What a manifest names and does not carry (`enclosures`) is fetched in the same way, from whoever holds it.
//! Nothing here is certain to arrive: a sender that still cares says it again, as it does with any message.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::{ParcelPlace, Relay};
use storaged_wire::{Digest, Enclosure, NodeName, SharedBytes};

use crate::api::Now;
use crate::limits;
use crate::sources::Sources;

/// Parcels that are kept for whoever fetches them, and those that are fetched.
#[derive(Debug, Default)]
pub(crate) struct Parcels {
    kept: BTreeMap<Digest, KeptParcel>,
    coming: BTreeMap<Digest, Incoming>,
    /// Whole ones that are being read.
    opening: BTreeMap<Digest, Incoming>,
    /// Wanted, and nobody who was asked has it.
    given_up: BTreeSet<Digest>,
}

/// What a node says again and again of a checkpoint: it is encoded once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Notice {
    Committed,
    /// The answer to whoever asks for its manifest.
    Answer,
}

/// A parcel that is here.
#[derive(Debug)]
pub(crate) struct KeptParcel {
    pub bytes: SharedBytes,
    /// The manifest that it brings.
    pub manifest: Option<Digest>,
    /// Nobody has asked for it or told of it since: it goes.
    until: Now,
}

/// Whether what comes is something that manifests name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EnclosureWish {
    /// It is only what nodes tell of.
    NotWanted,
    Wanted,
}

/// A parcel on its way here.
#[derive(Debug)]
pub(crate) struct Incoming {
    length: u64,
    pub enclosure: EnclosureWish,
    sources: Sources,
    /// Who says so.
    pub tellers: BTreeSet<NodeName>,
    /// Who has a node say so, and who is to hear of it from here.
    pub relays: Relays,
    bytes: Vec<u8>,
}

/// In whose name nodes are told of a parcel from here, and who.
pub(crate) type Relays = BTreeMap<NodeName, Vec<NodeName>>;

impl Parcels {
    /// Keeps bytes for whoever asks for them.
    pub fn keep(&mut self, name: Digest, bytes: SharedBytes, now: Now) {
        let kept = KeptParcel {
            bytes,
            manifest: None,
            until: now.plus(limits::PARCEL_KEPT_MS),
        };
        self.kept.insert(name, kept);
        self.make_room();
    }

    /// A parcel that is here; it stays for some more time.
    pub fn kept(&mut self, name: Digest, now: Now) -> Option<&mut KeptParcel> {
        let kept = self.kept.get_mut(&name)?;
        kept.until = now.plus(limits::PARCEL_KEPT_MS);
        Some(kept)
    }

    /// A parcel that is here.
    pub fn shown(&self, name: Digest) -> Option<SharedBytes> {
        self.kept.get(&name).map(|kept| kept.bytes.clone())
    }

    /// Bytes of all that is here and on its way. What is wanted will be here as a whole, and so is what is being read.
    pub fn lengths(&self) -> BTreeMap<Digest, u64> {
        let kept = self.kept.iter();
        let kept = kept.map(|(name, kept)| (*name, kept.bytes.len() as u64));
        let coming = self.coming.iter().map(|(name, it)| (*name, it.takes()));
        let opening = self.opening.iter().map(|(name, it)| (*name, it.length));
        coming.chain(opening).chain(kept).collect()
    }

    /// Drops those that go soonest until the rest fits.
    fn make_room(&mut self) {
        let mut total: u64 = self.kept.values().map(|kept| kept.bytes.len() as u64).sum();
        while total > limits::PARCELS_BYTES_MAX && self.kept.len() > 1 {
            let soonest = self.kept.iter().min_by_key(|(_, kept)| kept.until);
            let Some((name, kept)) = soonest.map(|(name, kept)| (*name, kept.bytes.len())) else {
                return;
            };
            self.kept.remove(&name);
            total -= kept as u64;
        }
    }

    /// A node says that it has something for this one.
    pub fn told(&mut self, from: &NodeName, name: Digest, length: u64, relay: Option<Relay>) {
        if let Some(opening) = self.opening.get_mut(&name) {
            return opening.add_teller(from, relay);
        }
        if !self.coming.contains_key(&name) && self.told_by(from) >= limits::PARCELS_PER_PEER_MAX {
            return;
        }
        if let Some(incoming) = self.comes(name, length) {
            incoming.sources.add(from);
            incoming.add_teller(from, relay);
        }
    }

    /// Parcels on their way here that nobody but this peer has told of: of so many, others have no room.
    fn told_by(&self, peer: &NodeName) -> usize {
        let all = self.coming.values();
        all.filter(|it| it.sources.count() == 1 && it.sources.is_asked(peer))
            .count()
    }

    /// Something that a manifest names is wanted, from one of these nodes.
    pub fn want(&mut self, Enclosure { digest, length }: Enclosure, from: &[NodeName]) {
        if let Some(opening) = self.opening.get_mut(&digest) {
            opening.enclosure = EnclosureWish::Wanted;
            return;
        }
        if from.is_empty() {
            return;
        }
        if let Some(incoming) = self.comes(digest, length) {
            incoming.enclosure = EnclosureWish::Wanted;
            from.iter().for_each(|node| incoming.sources.add(node));
        }
    }

    /// What is on its way under a name, if there is room for it.
    fn comes(&mut self, name: Digest, length: u64) -> Option<&mut Incoming> {
        let all = || self.coming.values().chain(self.opening.values());
        let is_full = all().count() >= limits::PARCELS_COMING_MAX;
        let coming: u64 = all().map(|incoming| incoming.length).sum();
        let is_known = self.coming.contains_key(&name);
        if !is_known && (is_full || coming.saturating_add(length) > limits::PARCELS_BYTES_MAX) {
            return None;
        }
        let new = || Incoming::new(length);
        Some(self.coming.entry(name).or_insert_with(new))
    }

    /// Whether something that was wanted may still come.
    pub fn may_come(&self, name: Digest) -> bool {
        self.coming.contains_key(&name) || self.opening.contains_key(&name)
    }

    /// A node tells of a parcel that is here and was of no use when it came: its bytes are read once more.
    pub fn told_again(&mut self, from: &NodeName, name: Digest, length: u64, relay: Option<Relay>) {
        let new = || Incoming::new(length);
        let opening = self.opening.entry(name).or_insert_with(new);
        opening.add_teller(from, relay);
    }

    /// Whether a parcel is being read.
    pub fn is_opening(&self, name: Digest) -> bool {
        self.opening.contains_key(&name)
    }

    /// A parcel has been read. Gives who told of it.
    pub fn opened(&mut self, name: Digest) -> Option<Incoming> {
        self.opening.remove(&name)
    }

    /// What was read is not what was told of: the next who has it is asked.
    pub fn was_wrong(&mut self, name: Digest) {
        if let Some(mut incoming) = self.opening.remove(&name) {
            incoming.next_source();
            self.coming.insert(name, incoming);
        }
    }

    /// The pages to ask for now.
    pub fn requests(
        &mut self,
        now: Now,
        is_up: impl Fn(&NodeName) -> bool,
    ) -> Vec<(NodeName, ParcelPlace)> {
        let mut requests = Vec::new();
        let given_up = &mut self.given_up;
        self.coming.retain(|name, incoming| {
            incoming.skip_silent(now, &is_up);
            if let Some(source) = incoming.sources.ask(now) {
                let place = ParcelPlace {
                    parcel: *name,
                    offset: incoming.bytes.len() as u64,
                };
                requests.push((source.clone(), place));
            }
            // Whoever still wants it to be heard says so again.
            let may_come = incoming.sources.count() > 0;
            if !may_come && incoming.enclosure == EnclosureWish::Wanted {
                given_up.insert(*name);
            }
            may_come
        });
        requests
    }

    /// What was wanted and will not come.
    pub fn take_given_up(&mut self) -> BTreeSet<Digest> {
        std::mem::take(&mut self.given_up)
    }

    /// A page has come. Gives the parcel once it is whole; whether it is what its name says is not known yet.
    pub fn take(
        &mut self,
        from: &NodeName,
        place: ParcelPlace,
        page: &[u8],
    ) -> Option<SharedBytes> {
        let incoming = self.coming.get_mut(&place.parcel)?;
        if !incoming.sources.is_asked(from) || place.offset != incoming.bytes.len() as u64 {
            return None;
        }
        let room = incoming.length - place.offset;
        if page.is_empty() || page.len() as u64 > room {
            incoming.next_source();
            return None;
        }
        incoming.sources.answered();
        if incoming.bytes.is_empty() {
            // As a whole it stays where it is: all that comes is within `PARCELS_BYTES_MAX`.
            let length = usize::try_from(incoming.length).unwrap_or_default();
            incoming.bytes.reserve_exact(length);
        }
        incoming.bytes.extend_from_slice(page);
        if (incoming.bytes.len() as u64) < incoming.length {
            return None;
        }
        let mut whole = self.coming.remove(&place.parcel)?;
        let bytes = std::mem::take(&mut whole.bytes);
        self.opening.insert(place.parcel, whole);
        Some(bytes.into())
    }

    /// Forgets what nobody has spoken of for a while.
    pub fn expire(&mut self, now: Now) {
        self.kept.retain(|_, kept| kept.until > now);
    }
}

impl Incoming {
    fn new(length: u64) -> Self {
        Self {
            length,
            enclosure: EnclosureWish::NotWanted,
            sources: Sources::default(),
            tellers: BTreeSet::new(),
            relays: BTreeMap::new(),
            bytes: Vec::new(),
        }
    }

    fn takes(&self) -> u64 {
        match self.enclosure {
            EnclosureWish::Wanted => self.length,
            EnclosureWish::NotWanted => self.bytes.len() as u64,
        }
    }

    fn add_teller(&mut self, from: &NodeName, relay: Option<Relay>) {
        match relay {
            Some(relay) => drop(self.relays.insert(relay.of, relay.to)),
            None => drop(self.tellers.insert(from.clone())),
        }
    }

    fn next_source(&mut self) {
        self.sources.next();
        self.bytes.clear();
    }

    fn skip_silent(&mut self, now: Now, is_up: impl Fn(&NodeName) -> bool) {
        while self.sources.is_silent(now, limits::QUERY_MAX_MS, &is_up) {
            self.next_source();
        }
    }
}

#[cfg(test)]
mod tests;
