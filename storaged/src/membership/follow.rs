//! How a running node keeps up with the roster, and when it gives up the place of a node that is lost.
//!
//! A place is given up by a node that has a majority of the places' nodes in sight and has not had that one in sight for
//! `membership.replace_after`, counted from when its link was lost and to the moment, whenever the registry is looked at next. Giving up wrongly loses nothing that another node has: the node that comes back takes its place again
//! if no spare has, with its memory. A minority gives up nobody, so that of two halves of a cluster only one goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use storaged_core::EpochMembers;
use storaged_core::limits::EPOCHS_KEPT;
use storaged_wire::{Geometry, NodeName};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::registry::{Proposal, Registry, RegistryError};
use super::roster::{Arrival, Arrived, Comeback, Roster};

/// A node that has never been in sight gets so long: after a power cut some machines boot for minutes.
const FIRST_SIGHT: Duration = Duration::from_secs(180);
/// After so many looks the known epoch is read again, to see that the registry has not gone back.
const CONFIRM_EVERY: u32 = 30;
/// Whoever sees nothing for so long beside its looks was stopped itself, and has not seen anybody missing.
const OWN_PAUSE: Duration = Duration::from_secs(1);
/// News have it look no sooner than so long after a look.
const NEWS_GAP: Duration = Duration::from_millis(500);
/// Nor more often than so many times within `poll`, which is longer where the registry has many nodes to answer. A machine that takes a
/// place has all of them look, and they do so one after the other within one such part of it.
const NEWS_LOOKS: u32 = 16;
/// Between two looks it sees so often that it runs: they may be a minute apart, and a node that was stopped for half of one would
/// wake to find that somebody's time is over who came back meanwhile.
const AWAKE_EVERY: Duration = Duration::from_millis(500);

/// Places whose node is linked to this one now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sight {
    /// By the names of the places.
    pub up: BTreeSet<NodeName>,
}

/// What the follower tells the driver.
#[derive(Debug)]
pub enum Change {
    /// There is another roster, in which this node still fills its place.
    Roster {
        roster: Box<Roster>,
        /// Epochs before it of which the driver has not heard.
        passed: Vec<EpochMembers>,
    },
    /// Another node fills this one's place, or it was removed.
    PlaceTaken(Box<Roster>),
    /// Why the registry cannot be used now; none: it can again.
    Fault(Option<String>),
}

/// What a node that has a place goes by.
#[derive(Debug)]
pub struct Following {
    /// Where rosters lie.
    pub registry: Registry,
    /// This node.
    pub arrival: Arrival,
    /// Its place.
    pub place: NodeName,
    /// The newest roster that is known.
    pub roster: Roster,
    /// How its places are coded.
    pub geometry: Option<Geometry>,
    /// How often it looks.
    pub poll: Duration,
    /// When the place of a node that is not in sight is given up; none: by the operator alone.
    pub replace_after: Option<Duration>,
    /// The driver has not heard of the roster yet.
    pub is_news: bool,
    /// Nor of these, which came before.
    pub passed: Vec<EpochMembers>,
    /// The registry did not have the known epoch when it was looked at last.
    pub is_doubtful: bool,
    /// Told when there is something that the known roster does not say.
    pub news: Arc<Notify>,
    /// Told when the node goes for good.
    pub going: Arc<Notify>,
    /// It was told so.
    pub is_going: bool,
}

/// Since when nodes are not in sight.
#[derive(Debug, Default)]
pub(super) struct Absences {
    looked_at: Option<Instant>,
    /// When it was seen last between two looks that this node runs.
    awake_at: Option<Instant>,
    since: BTreeMap<NodeName, Absence>,
    seen: BTreeSet<(NodeName, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct Absence {
    term: u64,
    since: Instant,
}

impl Absences {
    /// Takes what is in sight now. Whoever is not is missed from now on; who comes and goes between two looks is not one that has
    /// yet to come.
    pub fn note(&mut self, following: &Following, sight: &Sight, now: Instant) {
        for place in &following.roster.places {
            let is_there = place.name == following.place || sight.up.contains(&place.name);
            if is_there {
                self.seen.insert((place.name.clone(), place.term));
            }
            if is_there || place.node.is_none() {
                self.since.remove(&place.name);
                continue;
            }
            let (term, since) = (place.term, now);
            let absence = self.since.entry(place.name.clone());
            let absence = absence.or_insert(Absence { term, since });
            // Another node has the place now: it has time of its own to come.
            if absence.term != term {
                *absence = Absence { term, since };
            }
        }
        let names: BTreeSet<_> = following.roster.places.iter().map(|it| &it.name).collect();
        self.since.retain(|name, _| names.contains(name));
    }

    /// Looks at what is in sight now.
    pub fn look(&mut self, following: &Following, sight: &Sight, now: Instant) {
        let most = following.poll * 2 + OWN_PAUSE;
        if self.looked_at.is_some_and(|at| now - at > most) {
            self.since.clear();
        }
        self.looked_at = Some(now);
        self.note(following, sight, now);
    }

    /// This node has looked, which may take as long as the registry does, and rests from now on.
    fn rests(&mut self, now: Instant) {
        self.awake_at = Some(now);
    }

    /// This node rests, and runs.
    fn runs(&mut self, now: Instant) {
        let most = AWAKE_EVERY + OWN_PAUSE;
        if self.awake_at.is_some_and(|at| now - at > most) {
            self.since.clear();
        }
        self.awake_at = Some(now);
    }

    /// The place that this node should give up now, if any.
    pub fn to_give_up(
        &self,
        following: &Following,
        sight: &Sight,
        now: Instant,
    ) -> Option<NodeName> {
        let (due, name) = self.next_due(following, sight)?;
        (now >= due).then(|| name.clone())
    }

    /// The place that this node gives up next if nobody fills it, and when: of the nodes in sight the first in order does, and the next
    /// ones only if it has not for some time.
    fn next_due(&self, following: &Following, sight: &Sight) -> Option<(Instant, &NodeName)> {
        let after = following.replace_after?;
        let filled = following
            .roster
            .places
            .iter()
            .filter(|it| it.node.is_some());
        let up: Vec<&NodeName> = filled
            .map(|place| &place.name)
            .filter(|name| **name == following.place || sight.up.contains(*name))
            .collect();
        if up.len() * 2 <= following.roster.places.len() {
            return None;
        }
        let turn = up.iter().position(|name| **name == following.place)?;
        let later = following.poll * 2 * u32::try_from(turn).unwrap_or(u32::MAX).min(10);
        let due = |(name, absence): (_, &Absence)| {
            let was_seen = self.seen.contains(&(NodeName::clone(name), absence.term));
            let patience = if was_seen {
                after
            } else {
                after.max(FIRST_SIGHT)
            };
            (absence.since + patience + later, name)
        };
        self.since.iter().map(due).min()
    }
}

impl Following {
    /// When to look after news that have come now, if the last look was then.
    pub(super) fn looks_after_news(&self, looked_at: Instant, now: Instant) -> Instant {
        let part = self.poll / NEWS_LOOKS;
        let places = &self.roster.places;
        let own = places.iter().position(|place| place.name == self.place);
        let count = |some: usize| u32::try_from(some).unwrap_or(u32::MAX);
        let turn = part * count(own.unwrap_or(0)) / count(places.len()).max(1);
        (now + turn).max(looked_at + part.max(NEWS_GAP))
    }

    /// Reads what is newer. What of it the driver must hear: also when the registry failed in between, and answers again.
    async fn read(&mut self) -> Result<Option<Change>, RegistryError> {
        self.catch_up().await?;
        if !self.is_news {
            return Ok(None);
        }
        let change = self.settle().await?;
        self.is_news = false;
        Ok(Some(change))
    }

    /// Takes what is newest in the registry; whether it was news.
    async fn catch_up(&mut self) -> Result<bool, RegistryError> {
        let Some(newer) = self.registry.newer_than(&self.roster).await? else {
            return Ok(false);
        };
        let between = self.registry.between(&self.roster, &newer).await?;
        self.take(newer, &between);
        Ok(true)
    }

    fn take(&mut self, newer: Roster, between: &[Roster]) {
        tracing::info!(
            epoch = newer.epoch,
            change = newer.change,
            "the roster changed"
        );
        let untold = Some(&self.roster).filter(|_| self.is_news);
        let passed = untold.into_iter().chain(between).map(Roster::passed);
        self.passed.extend(passed);
        // No more than are remembered: the registry may fail in between for long.
        let excess = (self.passed.len() + 1).saturating_sub(EPOCHS_KEPT);
        self.passed.drain(..excess);
        self.roster = newer;
        self.is_news = true;
    }

    /// What a roster means for this node. Where its place is vacant it takes that again: it was thought lost.
    async fn settle(&mut self) -> Result<Change, RegistryError> {
        loop {
            let place = self.roster.filled_by(&self.arrival.node);
            if let Some(place) = place.filter(|place| place.name == self.place) {
                if place.address != self.arrival.address {
                    let (there, here) = (&place.address, &self.arrival.address);
                    tracing::error!(%there, %here, "another machine has this node's name and certificate, and has said that it is at its place");
                }
                return Ok(Change::Roster {
                    roster: Box::new(self.roster.clone()),
                    passed: std::mem::take(&mut self.passed),
                });
            }
            let own = self.roster.place(&self.place);
            let node = &self.arrival.node;
            let is_vacant = own.is_some_and(|it| it.last == *node && it.node.is_none());
            let next = match self.roster.arrive(&self.arrival) {
                Arrived::Propose(next) if is_vacant => next,
                _ => return Ok(self.taken()),
            };
            let next = next.seated_after(&self.roster, self.geometry);
            match self.registry.propose(&next).await? {
                Proposal::Taken => self.take(next, &[]),
                Proposal::Outrun => {
                    self.catch_up().await?;
                }
            }
        }
    }

    fn taken(&self) -> Change {
        Change::PlaceTaken(Box::new(self.roster.clone()))
    }

    /// Gives up this node's own place, for good: it goes.
    async fn leave(&mut self) -> Result<Option<Change>, RegistryError> {
        self.registry.confirm(&self.roster).await?;
        while let Some(next) = self.roster.left_by(&self.arrival.node, "it was drained") {
            let next = next.seated_after(&self.roster, self.geometry);
            if self.registry.propose(&next).await? == Proposal::Taken {
                self.take(next, &[]);
            } else if !self.catch_up().await? {
                // Outrun by what cannot be read yet: the next look comes soon.
                return Ok(None);
            }
        }
        Ok(Some(self.taken()))
    }

    async fn give_up(&mut self, name: &NodeName) -> Result<Option<Change>, RegistryError> {
        let after = self.replace_after.unwrap_or_default().as_secs();
        let why = format!("{} has not seen it for {after} s", self.place);
        // A place that is vacant already, or gone, needs nothing.
        let Ok(next) = self.roster.vacated(name, Comeback::Allowed, &why) else {
            return Ok(None);
        };
        self.registry.confirm(&self.roster).await?;
        let next = next.seated_after(&self.roster, self.geometry);
        if self.registry.propose(&next).await? == Proposal::Taken {
            self.take(next, &[]);
        }
        self.read().await
    }
}

/// Until the next look: after `poll`, soon after news, or when somebody's time is over. None if nobody listens any more.
async fn rest(
    following: &mut Following,
    absences: &mut Absences,
    sight: &mut watch::Receiver<Sight>,
) -> Option<()> {
    let (news, going) = (following.news.clone(), following.going.clone());
    let mut after_news = None;
    let began = Instant::now();
    absences.rests(began);
    loop {
        let due = absences.next_due(following, &sight.borrow());
        // What was due before has had its look: a registry that is away is asked no more often for it.
        let due = due.map(|(due, _)| due).filter(|due| *due > began);
        let sooner = due.into_iter().chain(after_news).min();
        let over = began + following.poll;
        let wakes_at = sooner.map_or(over, |at| at.min(over));
        let now = Instant::now();
        if now >= wakes_at {
            return Some(());
        }
        tokio::select! {
            () = tokio::time::sleep_until(wakes_at.min(now + AWAKE_EVERY)) => {}
            () = going.notified() => {
                following.is_going = true;
                return Some(());
            }
            () = news.notified() => {
                after_news.get_or_insert(following.looks_after_news(began, Instant::now()));
            }
            changed = sight.changed() => changed.ok()?,
        }
        let (seen, now) = (sight.borrow_and_update(), Instant::now());
        absences.runs(now);
        absences.note(following, &seen, now);
    }
}

/// Follows the registry until the node has lost its place, or nobody listens any more.
pub async fn follow(
    mut following: Following,
    mut sight: watch::Receiver<Sight>,
    changes: mpsc::Sender<Change>,
) {
    let mut absences = Absences::default();
    absences.note(&following, &sight.borrow_and_update(), Instant::now());
    let mut fault: Option<String> = None;
    for turn in 1_u32.. {
        if rest(&mut following, &mut absences, &mut sight)
            .await
            .is_none()
        {
            return;
        }
        let looked = look(&mut following, &mut absences, &sight, turn).await;
        let now = looked
            .as_ref()
            .err()
            .map(|error| crate::driver::chain(error));
        if now != fault {
            fault.clone_from(&now);
            if changes.send(Change::Fault(now)).await.is_err() {
                return;
            }
        }
        let Ok(Some(change)) = looked else {
            continue;
        };
        let is_over = matches!(change, Change::PlaceTaken(_));
        if changes.send(change).await.is_err() || is_over {
            return;
        }
    }
}

async fn look(
    following: &mut Following,
    absences: &mut Absences,
    sight: &watch::Receiver<Sight>,
    turn: u32,
) -> Result<Option<Change>, RegistryError> {
    if following.is_going {
        return following.leave().await;
    }
    if following.is_doubtful || turn.is_multiple_of(CONFIRM_EVERY) {
        following.is_doubtful = true;
        following.registry.confirm(&following.roster).await?;
        following.is_doubtful = false;
    }
    if let Some(change) = following.read().await? {
        return Ok(Some(change));
    }
    let (sight, now) = (sight.borrow().clone(), Instant::now());
    absences.look(following, &sight, now);
    match absences.to_give_up(following, &sight, now) {
        Some(name) => following.give_up(&name).await,
        None => Ok(None),
    }
}
