//! The roster: the places of a cluster and who fills them. A value; each change makes the next epoch's.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use storaged_core::EpochMembers;
use storaged_plan::{Cordon, GroupError, Member, Seat, groups, has_levels, levels_shared};
use storaged_wire::{Geometry, IdError, NodeName};
use thiserror::Error;

use super::seats::SeatRecord;
use crate::net::{AddressError, Peer, PeerAddress};

/// Layout of the record.
const VERSION: u32 = 1;
/// Of one that cordons nodes. A release that passed over that would make other groups of it, so it must not read it.
const VERSION_WITH_CORDONS: u32 = 2;
/// Of one whose groups follow from those before. A release that passed over that would make other groups of it.
const VERSION_WITH_SEATS: u32 = 3;
/// Of one whose failure domains have levels. A release that passed over that would make other groups of it.
const VERSION_WITH_LEVELS: u32 = 4;
/// A cluster has no more places.
pub const PLACES_MAX: usize = 20_000;

/// A record that is none.
#[derive(Debug, Error)]
pub enum RosterError {
    /// Not the record at all.
    #[error("expected a roster, got {reason}")]
    Form { reason: String },
    /// Written by another release.
    #[error(
        "the roster is of layout {got}, and this release reads layouts {VERSION} to {VERSION_WITH_LEVELS}: upgrade it"
    )]
    Version { got: u32 },
    /// A name in it.
    #[error(transparent)]
    Name(#[from] IdError),
    /// An address in it.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// What it says contradicts itself.
    #[error("the roster of epoch {epoch} contradicts itself: {reason}")]
    Inconsistent { epoch: u64, reason: String },
}

/// A change that the roster does not allow.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ChangeError {
    /// No such place.
    #[error("expected the name of a place, got {got}: there are {known}")]
    Unknown { got: String, known: String },
    /// Nobody fills it already.
    #[error("the place {0} is vacant already: the next spare node takes it")]
    Vacant(NodeName),
    /// One replacement at a time.
    #[error(
        "the place {vacant} is vacant yet: wait until a spare has it and `storaged restart-safe` on another node says that it is safe, or remove it first"
    )]
    AnotherVacant { vacant: NodeName },
    /// It may get a place as it is.
    #[error("{0} was neither replaced nor removed: it gets a place as any other node does")]
    NotDismissed(NodeName),
    /// A spare is in no roster, and one that was mistyped is nowhere.
    #[error(
        "expected the name of a node, as in its certificate, got {got}: there are {known}; a spare is known to its own configuration file alone (--config)"
    )]
    UnknownNode { got: NodeName, known: String },
    /// There would be none.
    #[error("{0} is the only place: a cluster has at least one")]
    Last(NodeName),
    /// Places go by name only.
    #[error(
        "expected at least the {places} places that there are, got {got}: remove places by their names (`storaged node remove`)"
    )]
    Smaller { places: usize, got: usize },
    /// More than a cluster has.
    #[error("expected at most {PLACES_MAX} places, got {0}")]
    Larger(usize),
}

/// Whether a node that loses its place may take one again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comeback {
    /// It was thought lost.
    Allowed,
    /// The operator has replaced it: started again, it would be back before any spare, in its place or in another one.
    Refused,
}

/// A place of the cluster: what groups, manifests and home nodes are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its name, which stays.
    pub name: NodeName,
    /// The node that fills it; none while it is vacant.
    pub node: Option<NodeName>,
    /// The node that filled it last: it comes first when it is there again, with what is in its memory.
    pub last: NodeName,
    /// Where that node listens.
    pub address: PeerAddress,
    /// What fails together with it, if that node said so.
    pub failure_domain: Option<String>,
    /// How often another node has taken it.
    pub term: u64,
    /// Where it is in the groups of this epoch; none where these follow from the places alone.
    pub seat: Option<Seat>,
}

/// A node that wants a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Its name, as in its certificate.
    pub node: NodeName,
    /// Where peers reach it.
    pub address: PeerAddress,
    /// What fails together with it.
    pub failure_domain: Option<String>,
}

/// What the roster has for a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrived {
    /// It fills this place.
    Placed(NodeName),
    /// It has said that it is there; the places are given when enough nodes are.
    Waiting { there: usize, wanted: usize },
    /// This epoch must be proposed for it to get one.
    Propose(Box<Roster>),
    /// All places are filled.
    Spare,
    /// An operator has cordoned it: it gets no place but the one that it had.
    Cordoned,
    /// The operator has replaced it, or removed its place.
    Dismissed,
}

/// One epoch's places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    /// Which cluster: two that share a bucket by mistake must not mix.
    pub cluster: String,
    /// Counted from 1.
    pub epoch: u64,
    /// How many places there are to be.
    pub size: usize,
    /// By name.
    pub places: Vec<Place>,
    /// Nodes that wait until as many are there as are wanted: so groups change once, not with each of them.
    pub arriving: Vec<Arrival>,
    /// Nodes that the operator has replaced or removed: they get no place.
    pub dismissed: Vec<NodeName>,
    /// Nodes that an operator expects to lose, by name: they serve and repair what they have, and are given nothing new where others do.
    pub cordoned: Vec<NodeName>,
    /// Places that are in other groups than in the epoch before: their next checkpoints are coded whole.
    pub regrouped: usize,
    /// What this epoch changed, for people.
    pub change: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct PlaceRecord {
    name: String,
    node: Option<String>,
    last: String,
    address: String,
    failure_domain: Option<String>,
    term: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seat: Option<SeatRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ArrivalRecord {
    node: String,
    address: String,
    failure_domain: Option<String>,
}

/// As it is stored: JSON, because people look into the store when nothing else answers.
#[derive(Debug, Serialize, Deserialize)]
struct RosterRecord {
    version: u32,
    cluster: String,
    epoch: u64,
    size: usize,
    places: Vec<PlaceRecord>,
    arriving: Vec<ArrivalRecord>,
    dismissed: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cordoned: Vec<String>,
    #[serde(default)]
    regrouped: usize,
    change: String,
}

impl Arrival {
    fn of(record: ArrivalRecord) -> Result<Self, RosterError> {
        Ok(Self {
            node: NodeName::new(record.node)?,
            address: record.address.parse()?,
            failure_domain: record.failure_domain,
        })
    }

    fn record(&self) -> ArrivalRecord {
        ArrivalRecord {
            node: self.node.to_string(),
            address: self.address.to_string(),
            failure_domain: self.failure_domain.clone(),
        }
    }

    fn takes(self, name: NodeName) -> Place {
        Place {
            name,
            node: Some(self.node.clone()),
            last: self.node,
            address: self.address,
            failure_domain: self.failure_domain,
            term: 1,
            seat: None,
        }
    }
}

impl Place {
    fn of(record: PlaceRecord) -> Result<Self, RosterError> {
        Ok(Self {
            name: NodeName::new(record.name)?,
            node: record.node.map(NodeName::new).transpose()?,
            last: NodeName::new(record.last)?,
            address: record.address.parse()?,
            failure_domain: record.failure_domain,
            term: record.term,
            seat: record.seat.map(SeatRecord::seat),
        })
    }

    fn record(&self) -> PlaceRecord {
        PlaceRecord {
            name: self.name.to_string(),
            node: self.node.as_ref().map(ToString::to_string),
            last: self.last.to_string(),
            address: self.address.to_string(),
            failure_domain: self.failure_domain.clone(),
            term: self.term,
            seat: self.seat.as_ref().map(SeatRecord::of),
        }
    }

    /// What fails together with it: by default the place alone, whichever node fills it.
    fn domain(&self) -> String {
        let own = || self.name.to_string();
        self.failure_domain.clone().unwrap_or_else(own)
    }

    fn fill(&mut self, arrival: &Arrival) {
        if self.last != arrival.node {
            self.term += 1;
        }
        self.node = Some(arrival.node.clone());
        self.last = arrival.node.clone();
        self.address = arrival.address.clone();
        self.failure_domain.clone_from(&arrival.failure_domain);
    }

    fn is_as(&self, arrival: &Arrival) -> bool {
        self.address == arrival.address && self.failure_domain == arrival.failure_domain
    }
}

impl Roster {
    /// Before anybody is there.
    pub fn empty(cluster: String, size: usize) -> Self {
        Self {
            cluster,
            epoch: 0,
            size,
            places: Vec::new(),
            arriving: Vec::new(),
            dismissed: Vec::new(),
            cordoned: Vec::new(),
            regrouped: 0,
            change: String::new(),
        }
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`RosterError`] if it is none, or of another release.
    pub fn parse(bytes: &[u8]) -> Result<Self, RosterError> {
        let form = |error: serde_json::Error| RosterError::Form {
            reason: error.to_string(),
        };
        let value: serde_json::Value = serde_json::from_slice(bytes).map_err(form)?;
        let version = value["version"].as_u64();
        let version = version.and_then(|it| u32::try_from(it).ok());
        match version {
            Some(VERSION..=VERSION_WITH_LEVELS) => {}
            Some(got) => return Err(RosterError::Version { got }),
            None => {
                let reason = "a record without a version".into();
                return Err(RosterError::Form { reason });
            }
        }
        let record: RosterRecord = serde_json::from_value(value).map_err(form)?;
        let roster = Self {
            cluster: record.cluster,
            epoch: record.epoch,
            size: record.size,
            places: (record.places.into_iter().map(Place::of)).collect::<Result<_, _>>()?,
            arriving: (record.arriving.into_iter().map(Arrival::of)).collect::<Result<_, _>>()?,
            dismissed: (record.dismissed.into_iter().map(NodeName::new))
                .collect::<Result<_, _>>()?,
            cordoned: (record.cordoned.into_iter().map(NodeName::new)).collect::<Result<_, _>>()?,
            regrouped: record.regrouped,
            change: record.change,
        };
        roster.check()?;
        Ok(roster)
    }

    /// The record.
    pub fn bytes(&self) -> Vec<u8> {
        let record = RosterRecord {
            version: self.layout(),
            cluster: self.cluster.clone(),
            epoch: self.epoch,
            size: self.size,
            places: self.places.iter().map(Place::record).collect(),
            arriving: self.arriving.iter().map(Arrival::record).collect(),
            dismissed: self.dismissed.iter().map(ToString::to_string).collect(),
            cordoned: self.cordoned.iter().map(ToString::to_string).collect(),
            regrouped: self.regrouped,
            change: self.change.clone(),
        };
        serde_json::to_vec_pretty(&record).unwrap_or_default()
    }

    fn layout(&self) -> u32 {
        let placed = self.places.iter().map(|it| &it.failure_domain);
        let waiting = self.arriving.iter().map(|it| &it.failure_domain);
        let mut domains = placed.chain(waiting).flatten();
        if domains.any(|domain| has_levels(domain)) {
            VERSION_WITH_LEVELS
        } else if self.places.iter().any(|place| place.seat.is_some()) {
            VERSION_WITH_SEATS
        } else if self.cordoned.is_empty() {
            VERSION
        } else {
            VERSION_WITH_CORDONS
        }
    }

    fn check(&self) -> Result<(), RosterError> {
        let wrong = |reason: &str| RosterError::Inconsistent {
            epoch: self.epoch,
            reason: reason.into(),
        };
        let names: BTreeSet<&NodeName> = self.places.iter().map(|place| &place.name).collect();
        if names.len() < self.places.len() {
            return Err(wrong("two places have one name"));
        }
        let filling = self.places.iter().filter_map(|place| place.node.as_ref());
        let waiting = self.arriving.iter().map(|arrival| &arrival.node);
        let nodes: Vec<&NodeName> = filling.chain(waiting).collect();
        if nodes.iter().collect::<BTreeSet<_>>().len() < nodes.len() {
            return Err(wrong("a node is in it twice"));
        }
        // A change makes the next epoch's, and the next term.
        let is_last = self.epoch == u64::MAX || self.places.iter().any(|it| it.term == u64::MAX);
        if self.epoch == 0 || is_last || self.size < self.places.len() || self.size > PLACES_MAX {
            return Err(wrong("its epoch, its size or a term cannot be"));
        }
        Ok(())
    }

    /// The place that a node fills.
    pub fn filled_by(&self, node: &NodeName) -> Option<&Place> {
        let mut places = self.places.iter();
        places.find(|place| place.node.as_ref() == Some(node))
    }

    /// The place of a name.
    pub fn place(&self, name: &NodeName) -> Option<&Place> {
        self.places.iter().find(|place| place.name == *name)
    }

    /// Places that nobody fills.
    pub fn vacant(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| place.node.is_none())
    }

    /// As the decisions hear of it when a newer one is there already.
    pub fn passed(&self) -> EpochMembers {
        EpochMembers {
            epoch: self.epoch,
            members: self.members(),
        }
    }

    /// What groups are made of.
    pub fn members(&self) -> Vec<Member> {
        let member = |place: &Place| Member {
            name: place.name.clone(),
            failure_domain: place.domain(),
            cordon: self.cordon_of(place),
            seat: place.seat.clone(),
        };
        self.places.iter().map(member).collect()
    }

    /// Whether the node of a place is cordoned; of a vacant one, whether the node is that left it last and may come back.
    pub fn cordon_of(&self, place: &Place) -> Cordon {
        let node = place.node.as_ref().unwrap_or(&place.last);
        if self.cordoned.contains(node) {
            Cordon::Cordoned
        } else {
            Cordon::Open
        }
    }

    /// Whom the node of a place links to.
    pub fn peers_of(&self, own: &NodeName) -> Vec<Peer> {
        let others = self.places.iter().filter(|place| place.name != *own);
        let peer = |place: &Place| {
            Some(Peer {
                name: place.name.clone(),
                node: place.node.clone()?,
                address: place.address.clone(),
            })
        };
        others.filter_map(peer).collect()
    }

    pub(super) fn next(&self, change: String) -> Self {
        Self {
            epoch: self.epoch + 1,
            regrouped: 0,
            change,
            ..self.clone()
        }
    }

    /// What there is for a node that has come.
    pub fn arrive(&self, arrival: &Arrival) -> Arrived {
        let node = &arrival.node;
        if let Some(place) = self.filled_by(node) {
            if place.is_as(arrival) {
                return Arrived::Placed(place.name.clone());
            }
            let name = place.name.clone();
            let domain = arrival.failure_domain.as_deref().unwrap_or("its own");
            let change = format!(
                "{node}, which fills {name}, is at {} now, in the failure domain {domain}",
                arrival.address
            );
            return Arrived::Propose(Box::new(self.filling(&name, arrival, change)));
        }
        if self.dismissed.contains(node) {
            return Arrived::Dismissed;
        }
        let is_cordoned = self.cordoned.contains(node);
        let own = self.vacant().find(|place| place.last == *node);
        // Its own place it takes all the same: what is in its memory is that place's.
        if is_cordoned && own.is_none() {
            return Arrived::Cordoned;
        }
        if let Some(vacant) = self.best_vacant(arrival) {
            let change = format!("{node} takes the place {vacant}");
            return Arrived::Propose(Box::new(self.filling(&vacant, arrival, change)));
        }
        let there = self.places.len() + self.arriving.len();
        if self.arriving.contains(arrival) {
            let wanted = self.size;
            return Arrived::Waiting { there, wanted };
        }
        let known = self.arriving.iter().any(|it| it.node == *node);
        if there >= self.size && !known {
            return Arrived::Spare;
        }
        Arrived::Propose(Box::new(self.with_arrival(arrival)))
    }

    /// The vacant place that a node takes: the one that it left; else one whose failure domain is its own, so that no group
    /// changes; else one in a domain that shares the most levels with its own.
    fn best_vacant(&self, arrival: &Arrival) -> Option<NodeName> {
        let distance = |place: &&Place| {
            let was_its = place.last == arrival.node;
            let is_alike = place.failure_domain == arrival.failure_domain;
            let both = place
                .failure_domain
                .as_deref()
                .zip(arrival.failure_domain.as_deref());
            let shared = both.map_or(0, |(there, here)| levels_shared(there, here));
            (!was_its, !is_alike, Reverse(shared))
        };
        Some(self.vacant().min_by_key(distance)?.name.clone())
    }

    fn filling(&self, name: &NodeName, arrival: &Arrival, change: String) -> Self {
        let mut next = self.next(change);
        let place = next.places.iter_mut().find(|place| place.name == *name);
        if let Some(place) = place {
            place.fill(arrival);
        }
        next.arriving.retain(|it| it.node != arrival.node);
        next
    }

    fn with_arrival(&self, arrival: &Arrival) -> Self {
        let (there, wanted) = (self.places.len() + self.arriving.len() + 1, self.size);
        let node = &arrival.node;
        let mut next = self.next(format!("{node} has come, {there} of {wanted}"));
        next.arriving.retain(|it| it.node != *node);
        next.arriving.push(arrival.clone());
        next.give_places();
        next
    }

    /// Gives places to those that wait, once there are enough.
    fn give_places(&mut self) {
        if self.arriving.is_empty() || self.places.len() + self.arriving.len() < self.size {
            return;
        }
        self.place_arriving();
    }

    fn place_arriving(&mut self) {
        for arrival in std::mem::take(&mut self.arriving) {
            let name = self.free_name(&arrival.node);
            self.places.push(arrival.takes(name));
        }
        self.places.sort_by(|one, other| one.name.cmp(&other.name));
    }

    /// With places for the nodes that have come, though there are to be more.
    pub fn grown(&self) -> Self {
        let come: Vec<&str> = self.arriving.iter().map(|it| it.node.as_str()).collect();
        let (come, wanted) = (come.join(", "), self.size);
        let mut next = self.next(format!(
            "{come} got places, of {wanted} that there are to be"
        ));
        next.place_arriving();
        next
    }

    /// Whether new checkpoints could be coded by its places, as far as they have been given.
    ///
    /// # Errors
    /// [`GroupError`] with the places for which there are too few others.
    pub fn check_groups(&self, geometry: Option<Geometry>) -> Result<(), GroupError> {
        match geometry {
            Some(geometry) if !self.places.is_empty() => {
                groups(&self.members(), geometry).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// With a node that had been replaced or removed among those that may get a place.
    ///
    /// # Errors
    /// [`ChangeError`] if it was not.
    pub fn admitted(&self, node: &NodeName) -> Result<Self, ChangeError> {
        if !self.dismissed.contains(node) {
            return Err(ChangeError::NotDismissed(node.clone()));
        }
        let mut next = self.next(format!("{node} may get a place again"));
        next.dismissed.retain(|it| it != node);
        Ok(next)
    }

    /// A new place is named after its first node, unless a place has that name which another node fills now.
    fn free_name(&self, node: &NodeName) -> NodeName {
        let is_free = |name: &NodeName| self.place(name).is_none();
        let with = |suffix: String| {
            let most = storaged_wire::NAME_BYTES_MAX - suffix.len();
            let short = &node.as_str()[..node.as_str().len().min(most)];
            NodeName::new(format!("{short}{suffix}")).ok()
        };
        let later = (0_u32..).filter_map(|turn| with(format!(".e{}.{turn}", self.epoch)));
        let mut names = std::iter::once(node.clone()).chain(later);
        names.find(is_free).unwrap_or_else(|| node.clone())
    }

    fn known(&self, name: &NodeName) -> Result<&Place, ChangeError> {
        self.place(name).ok_or_else(|| {
            let names: Vec<&str> = self.places.iter().map(|it| it.name.as_str()).collect();
            ChangeError::Unknown {
                got: name.to_string(),
                known: names.join(", "),
            }
        })
    }

    /// The node of a place has left it, or is lost: the next one that comes takes it.
    ///
    /// # Errors
    /// [`ChangeError`] if there is no such place, or nobody fills it.
    pub fn vacated(
        &self,
        name: &NodeName,
        comeback: Comeback,
        why: &str,
    ) -> Result<Self, ChangeError> {
        let Some(node) = &self.known(name)?.node else {
            return Err(ChangeError::Vacant(name.clone()));
        };
        if comeback == Comeback::Refused
            && let Some(other) = self.vacant().next()
        {
            let vacant = other.name.clone();
            return Err(ChangeError::AnotherVacant { vacant });
        }
        Ok(self.without(node, comeback, why))
    }

    /// Without a node that goes by itself. Whether another place is vacant does not matter to it: it is going.
    pub fn left_by(&self, node: &NodeName, why: &str) -> Option<Self> {
        self.filled_by(node)?;
        Some(self.without(node, Comeback::Refused, why))
    }

    fn without(&self, node: &NodeName, comeback: Comeback, why: &str) -> Self {
        let name = self.filled_by(node).map_or("none", |it| it.name.as_str());
        let mut next = self.next(format!("{node} no longer fills {name}: {why}"));
        let mut places = next.places.iter_mut();
        if let Some(place) = places.find(|place| place.node.as_ref() == Some(node)) {
            place.node = None;
        }
        if comeback == Comeback::Refused {
            next.dismissed.push(node.clone());
        }
        next
    }

    /// Without a place: new checkpoints are coded by the others.
    ///
    /// # Errors
    /// [`ChangeError`] if there is no such place, or no other one.
    pub fn removed(&self, name: &NodeName) -> Result<Self, ChangeError> {
        let node = self.known(name)?.node.clone();
        if self.places.len() < 2 {
            return Err(ChangeError::Last(name.clone()));
        }
        let mut next = self.next(format!("the place {name} was removed"));
        next.places.retain(|place| place.name != *name);
        // Were there to be more places than there are, the node would come at once and get another one.
        next.size = next.places.len();
        next.arriving.clear();
        next.dismissed.extend(node);
        Ok(next)
    }

    /// With room for so many: the next nodes that come are given places, those that come together at once. There is no place before there
    /// is a node for it: a group with places that nobody has ever filled could protect nothing.
    ///
    /// # Errors
    /// [`ChangeError`] if there are more places already.
    pub fn resized(&self, size: usize) -> Result<Self, ChangeError> {
        if size < self.places.len() {
            let (places, got) = (self.places.len(), size);
            return Err(ChangeError::Smaller { places, got });
        }
        if size > PLACES_MAX {
            return Err(ChangeError::Larger(size));
        }
        let mut next = self.next(format!("there are to be {size} places"));
        next.size = size;
        // More wait than fit now: those that came last are spares.
        next.arriving.truncate(size - next.places.len());
        next.give_places();
        Ok(next)
    }
}
