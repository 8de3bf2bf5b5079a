//! Large messages as parcels. A manifest of ten thousand ranks with its schema has tens of megabytes, and a home node tells
//! it to every node that it concerns, again each second until that has answered. Sent as they are, such messages would
//! stand before everything else on their links, in memory once per node, and above the limit of a frame they would end
//! the link that carries them, for ever.
//!
//! So what is larger than [`crate::MessageLimits::inline`] is encoded once and kept; the peer is told its digest and length, and
//! fetches it page by page. A digest that comes from several nodes is fetched once, and counts as said by each of them.
//! Nothing here is certain to arrive: a sender that still cares says it again, as it does with any message.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::digest;
use storaged_wire::peer::{ParcelPlace, Relay};
use storaged_wire::{Digest, NodeName, SharedBytes};

use crate::api::Now;
use crate::limits;
use crate::sources::Sources;

/// Parcels that are kept for whoever fetches them, and those that are fetched.
#[derive(Debug, Default)]
pub(crate) struct Parcels {
    kept: BTreeMap<Digest, KeptParcel>,
    coming: BTreeMap<Digest, Incoming>,
}

/// What a node says again and again of a checkpoint: it is encoded once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Notice {
    Committed,
    Description,
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

/// A parcel on its way here.
#[derive(Debug)]
pub(crate) struct Incoming {
    length: u64,
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
    pub fn told(&mut self, from: &NodeName, (name, length): (Digest, u64), relay: Option<Relay>) {
        let is_full = self.coming.len() >= limits::PARCELS_COMING_MAX;
        let coming: u64 = self.coming.values().map(|incoming| incoming.length).sum();
        if !self.coming.contains_key(&name)
            && (is_full || coming.saturating_add(length) > limits::PARCELS_BYTES_MAX)
        {
            return;
        }
        let incoming = self.coming.entry(name).or_insert_with(|| Incoming {
            length,
            sources: Sources::default(),
            tellers: BTreeSet::new(),
            relays: BTreeMap::new(),
            bytes: Vec::new(),
        });
        incoming.sources.add(from);
        match relay {
            Some(relay) => drop(incoming.relays.insert(relay.of, relay.to)),
            None => drop(incoming.tellers.insert(from.clone())),
        }
    }

    /// The pages to ask for now.
    pub fn requests(
        &mut self,
        now: Now,
        is_up: impl Fn(&NodeName) -> bool,
    ) -> Vec<(NodeName, ParcelPlace)> {
        let mut requests = Vec::new();
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
            incoming.sources.count() > 0
        });
        requests
    }

    /// A page has come. Gives the parcel once it is whole and is what its name says, with those who told of it.
    pub fn take(
        &mut self,
        from: &NodeName,
        place: ParcelPlace,
        page: &[u8],
    ) -> Option<(SharedBytes, Incoming)> {
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
        incoming.bytes.extend_from_slice(page);
        if (incoming.bytes.len() as u64) < incoming.length {
            return None;
        }
        if digest(&incoming.bytes) != place.parcel {
            incoming.next_source();
            return None;
        }
        let mut whole = self.coming.remove(&place.parcel)?;
        Some((std::mem::take(&mut whole.bytes).into(), whole))
    }

    /// Forgets what nobody has spoken of for a while.
    pub fn expire(&mut self, now: Now) {
        self.kept.retain(|_, kept| kept.until > now);
    }
}

impl Incoming {
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
