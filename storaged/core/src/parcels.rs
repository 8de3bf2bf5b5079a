//! Large messages as parcels. A manifest of ten thousand ranks with its schema has tens of megabytes, and a home node tells
//! it to every node that it concerns, again each second until that has answered. Sent as they are, such messages would
//! stand before everything else on their links, in memory once per node, and above the limit of a frame they would end
//! the link that carries them, for ever.
//!
//! So what is larger than [`crate::MessageLimits::inline`] is encoded once and kept; the peer is told its digest and length, and
//! fetches it page by page. A digest that comes from several nodes is fetched once, and counts as said by each of them. No digest proves
//! a length: what is told of under one digest with two lengths are two parcels, so that a forged length spoils none but its own.
//! What a manifest names and does not carry (`enclosures`) is fetched in the same way, from whoever holds it.
//! Nothing here is certain to arrive: a sender that still cares says it again, as it does with any message.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use storaged_wire::peer::{ParcelPlace, Relay};
use storaged_wire::{Digest, Enclosure, NodeName, SharedBytes};

use crate::api::Now;
use crate::limits;
use crate::sources::Sources;

/// Parcels that are kept for whoever fetches them, and those that are fetched.
#[derive(Debug, Default)]
pub(crate) struct Parcels {
    kept: BTreeMap<Digest, KeptParcel>,
    coming: BTreeMap<Enclosure, Incoming>,
    /// Whole ones that are being read.
    opening: BTreeMap<Enclosure, Incoming>,
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum EnclosureWish {
    /// It is only what nodes tell of.
    #[default]
    NotWanted,
    Wanted,
}

/// A peer alone has told of as much as it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ToldTooMuch;

/// What a page was good for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// Nothing, or more pages are to come.
    Part,
    /// The parcel is whole; whether it is what its name says is not known yet.
    Whole(SharedBytes),
    /// Whoever has told of so many bytes sends more.
    Beyond { told: u64 },
}

/// A parcel on its way here.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
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
        let mut lengths: BTreeMap<Digest, u64> = BTreeMap::new();
        for (named, incoming) in &self.coming {
            *lengths.entry(named.digest).or_default() += incoming.takes(named);
        }
        let opening = self.opening.keys().map(|it| (it.digest, it.length));
        let kept = self.kept.iter();
        let kept = kept.map(|(name, kept)| (*name, kept.bytes.len() as u64));
        lengths.extend(opening.chain(kept));
        lengths
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
    pub fn told(
        &mut self,
        from: &NodeName,
        named: Enclosure,
        relay: Option<Relay>,
    ) -> Result<(), ToldTooMuch> {
        if let Some(opening) = self.opening.get_mut(&named) {
            opening.add_teller(from, relay);
            return Ok(());
        }
        let known = self.coming.contains_key(&named);
        if !known && self.alone_from(from).count() >= limits::PARCELS_PER_PEER_MAX {
            return Ok(());
        }
        if let Some(incoming) = self.comes(named, std::slice::from_ref(from))? {
            incoming.add_teller(from, relay);
        }
        Ok(())
    }

    /// Lengths of parcels on their way here that nobody but this peer has: of so many, others have no room.
    fn alone_from(&self, peer: &NodeName) -> impl Iterator<Item = u64> {
        let all = self.coming.iter();
        let its = all.filter(|(_, it)| it.sources.count() == 1 && it.sources.is_asked(peer));
        its.map(|(named, _)| named.length)
    }

    /// Something that a manifest names is wanted, from one of these nodes.
    pub fn want(&mut self, named: Enclosure, from: &[NodeName]) -> Result<(), ToldTooMuch> {
        if let Some(opening) = self.opening.get_mut(&named) {
            opening.enclosure = EnclosureWish::Wanted;
            return Ok(());
        }
        if let Some(incoming) = self.comes(named, from)? {
            incoming.enclosure = EnclosureWish::Wanted;
        }
        Ok(())
    }

    /// What is on its way under a name from these nodes, if there is room for it. Room is taken by lengths that nobody has proved: one
    /// peer that tells of the longest again and again and never sends it would else keep all others' from coming.
    fn comes(
        &mut self,
        named: Enclosure,
        from: &[NodeName],
    ) -> Result<Option<&mut Incoming>, ToldTooMuch> {
        if !self.coming.contains_key(&named) {
            if let [alone] = from
                && sum(self.alone_from(alone), named.length) > limits::PARCEL_BYTES_PER_PEER_MAX
            {
                return Err(ToldTooMuch);
            }
            let all = || self.coming.keys().chain(self.opening.keys());
            let is_full = all().count() >= limits::PARCELS_COMING_MAX;
            let bytes = sum(all().map(|it| it.length), named.length);
            if is_full || from.is_empty() || bytes > limits::PARCELS_BYTES_MAX {
                return Ok(None);
            }
        }
        let incoming = self.coming.entry(named).or_default();
        from.iter().for_each(|node| incoming.sources.add(node));
        Ok(Some(incoming))
    }

    /// Whether something that was wanted may still come.
    pub fn may_come(&self, named: &Enclosure) -> bool {
        self.coming.contains_key(named) || self.opening.contains_key(named)
    }

    /// A node tells of a parcel that is here and was of no use when it came: its bytes are read once more.
    pub fn told_again(&mut self, from: &NodeName, named: Enclosure, relay: Option<Relay>) {
        let opening = self.opening.entry(named).or_default();
        opening.add_teller(from, relay);
    }

    /// Whether a parcel is being read.
    pub fn is_opening(&self, named: &Enclosure) -> bool {
        self.opening.contains_key(named)
    }

    /// A parcel has been read. Gives who told of it.
    pub fn opened(&mut self, named: &Enclosure) -> Option<Incoming> {
        self.opening.remove(named)
    }

    /// What was read is not what was told of: the next who has it is asked.
    pub fn was_wrong(&mut self, named: Enclosure) {
        if let Some(mut incoming) = self.opening.remove(&named) {
            incoming.next_source();
            self.coming.insert(named, incoming);
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
        self.coming.retain(|named, incoming| {
            incoming.skip_silent(now, &is_up);
            if let Some(source) = incoming.sources.ask(now) {
                let place = ParcelPlace {
                    parcel: named.digest,
                    offset: incoming.bytes.len() as u64,
                };
                requests.push((source.clone(), place));
            }
            // Whoever still wants it to be heard says so again.
            let may_come = incoming.sources.count() > 0;
            if !may_come && incoming.enclosure == EnclosureWish::Wanted {
                given_up.insert(named.digest);
            }
            may_come
        });
        requests
    }

    /// What was wanted and will not come.
    pub fn take_given_up(&mut self) -> BTreeSet<Digest> {
        std::mem::take(&mut self.given_up)
    }

    /// A page has come. It is one of each parcel of its digest that waits for it.
    pub fn take(&mut self, from: &NodeName, place: ParcelPlace, page: &[u8]) -> PageUse {
        let waits =
            |it: &Incoming| it.sources.is_asked(from) && place.offset == it.bytes.len() as u64;
        let of_name = self.coming.range(named_so(place.parcel));
        let waiting: Vec<Enclosure> = of_name
            .filter(|(_, incoming)| waits(incoming))
            .map(|(named, _)| *named)
            .collect();
        let mut used = PageUse::Part;
        for named in waiting {
            match self.take_for(named, page) {
                PageUse::Part => {}
                other => used = other,
            }
        }
        used
    }

    fn take_for(&mut self, named: Enclosure, page: &[u8]) -> PageUse {
        let Some(incoming) = self.coming.get_mut(&named) else {
            return PageUse::Part;
        };
        let room = named.length - incoming.bytes.len() as u64;
        if page.is_empty() || page.len() as u64 > room {
            let is_told_by_it = incoming.enclosure == EnclosureWish::NotWanted;
            incoming.next_source();
            return match page {
                [_, ..] if is_told_by_it => PageUse::Beyond { told: named.length },
                // Who names what a manifest has is not who sends it.
                _ => PageUse::Part,
            };
        }
        incoming.sources.answered();
        if incoming.bytes.is_empty() {
            // As a whole it stays where it is: all that comes is within `PARCELS_BYTES_MAX`.
            let length = usize::try_from(named.length).unwrap_or_default();
            incoming.bytes.reserve_exact(length);
        }
        incoming.bytes.extend_from_slice(page);
        if (incoming.bytes.len() as u64) < named.length {
            return PageUse::Part;
        }
        let Some(mut whole) = self.coming.remove(&named) else {
            return PageUse::Part;
        };
        let bytes = std::mem::take(&mut whole.bytes);
        self.opening.insert(named, whole);
        PageUse::Whole(bytes.into())
    }

    /// Forgets what nobody has spoken of for a while.
    pub fn expire(&mut self, now: Now) {
        self.kept.retain(|_, kept| kept.until > now);
    }
}

/// So many bytes more.
fn sum(lengths: impl Iterator<Item = u64>, more: u64) -> u64 {
    lengths.fold(more, u64::saturating_add)
}

/// All parcels of a digest, whatever their length is said to be.
fn named_so(digest: Digest) -> RangeInclusive<Enclosure> {
    let of = |length| Enclosure { digest, length };
    of(0)..=of(u64::MAX)
}

impl Incoming {
    fn takes(&self, named: &Enclosure) -> u64 {
        match self.enclosure {
            EnclosureWish::Wanted => named.length,
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
