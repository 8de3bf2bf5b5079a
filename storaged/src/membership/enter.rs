//! How a node gets a place: the one that it fills already, a vacant one, or a new one once enough nodes have come. A node for which
//! there is none is a spare, and waits till a place gets vacant. Which spare takes it the registry settles.

use std::sync::Arc;
use std::time::Duration;

use storaged_plan::GroupError;
use storaged_wire::{Geometry, NodeName};
use tokio::time::Instant;

use super::registry::{Proposal, Registry, RegistryError, gone_back};
use super::remembered::Remembered;
use super::roster::{Arrival, Arrived, Roster};
use super::twin::{Presence, Twin};

/// What a node that has no place yet goes by.
#[derive(Debug, Clone)]
pub struct Entering {
    /// Where rosters lie.
    pub registry: Registry,
    /// The node.
    pub arrival: Arrival,
    /// Places of a cluster that begins now, and its name. One that is there has its own.
    pub first: Roster,
    /// How often it looks.
    pub poll: Duration,
    /// What it saw last, before it was started again.
    pub remembered: Option<Roster>,
    /// Where it remembers what it sees.
    pub memory: Option<Remembered>,
    /// How checkpoints are coded.
    pub geometry: Option<Geometry>,
    /// Who answers where.
    pub presence: Arc<dyn Presence>,
}

/// A registry that has not answered for so long is away: the node goes by what it remembers.
const AWAY_AFTER: Duration = Duration::from_secs(3);

/// A spare asks so many times within `poll` whether there is a next epoch, and no more often than this: its place may be the next to be
/// vacant, and until it is there a step bears one loss less. That is one small request; a look lists.
const SPARE_ASKS: u32 = 4;
const SPARE_ASKS_AFTER: Duration = Duration::from_millis(500);

/// A cluster that is to have more places gives them to the nodes that have come once no other has come for so long: groups change once for
/// nodes that come together, and nobody waits for machines that may never come.
const GROW_QUIET: Duration = Duration::from_secs(15);

/// What it has seen of the registry.
#[derive(Debug)]
struct History {
    /// The newest roster, of this life or of the one before. A spare that forgot it would found a cluster of its own with other spares in
    /// a registry that was emptied.
    known: Option<Roster>,
    quiet: Quiet,
}

/// Since when the roster has been as it is.
#[derive(Debug, Default)]
struct Quiet(Option<(u64, Instant)>);

impl Quiet {
    /// Whether this epoch has been the newest for long enough.
    fn is_over(&mut self, epoch: u64, now: Instant) -> bool {
        let (known, since) = *self.0.get_or_insert((epoch, now));
        if known != epoch {
            self.0 = Some((epoch, now));
            return false;
        }
        now - since >= GROW_QUIET
    }
}

/// How it goes; said whenever that changes.
#[derive(Debug)]
pub enum Waits {
    /// Not all nodes of a cluster that begins have come.
    ForNodes { there: usize, wanted: usize },
    /// It has come while a cluster grows: others may come with it.
    ToGrow { there: usize, wanted: usize },
    /// Another machine is this node.
    Twin(Twin),
    /// All places are filled.
    AsSpare { epoch: u64 },
    /// The operator has replaced it, or removed its place.
    ForAdmission { node: NodeName },
    /// An operator has cordoned it.
    Cordoned { node: NodeName },
    /// With it no checkpoint could be coded.
    ForOthers(GroupError),
    /// The registry does not answer, or has gone back.
    ForRegistry(RegistryError),
}

impl std::fmt::Display for Waits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ForNodes { there, wanted } => {
                write!(f, "waiting for nodes: {there} of {wanted} have come")
            }
            Self::ToGrow { there, wanted } => write!(
                f,
                "waiting for other nodes that come too: there are {there}, and places for {wanted}; once none has come for {} s this one gets a place",
                GROW_QUIET.as_secs()
            ),
            Self::Twin(twin) => twin.fmt(f),
            Self::AsSpare { epoch } => write!(
                f,
                "this node is a spare: all places are filled at epoch {epoch}; it takes the next one that gets vacant"
            ),
            Self::ForAdmission { node } => write!(
                f,
                "the operator has replaced this node, or removed its place: `storaged node admit {node}` lets it in again"
            ),
            Self::Cordoned { node } => write!(
                f,
                "the operator has cordoned this node, and it had no place: `storaged node uncordon {node}` lets it take one"
            ),
            Self::ForOthers(error) => write!(
                f,
                "this node gets no place, because no checkpoint could be coded then: {error}; see node.failure_domain"
            ),
            Self::ForRegistry(error) => write!(f, "waiting: {}", crate::driver::chain(error)),
        }
    }
}

/// A node's place, and the roster that gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entered {
    /// The newest roster.
    pub roster: Roster,
    /// The place.
    pub place: NodeName,
}

impl Entering {
    /// The place that it had by the newest roster that it has seen: one that it remembers from before may have given its place to another
    /// node since.
    fn remembered_place(&self, history: &History) -> Option<Entered> {
        let roster = history.known.clone()?;
        match roster.arrive(&self.arrival) {
            Arrived::Placed(place) => Some(Entered { roster, place }),
            _ => None,
        }
    }

    /// A node that has lost its place would take it again, should it find the registry away at its next start.
    fn remember(&self, roster: &Roster) {
        if let Some(memory) = &self.memory {
            memory.write(roster);
        }
    }

    /// What this node has seen must still be there: a registry that was put back from an older copy, or is another cluster's,
    /// would give its place away.
    async fn check_history(
        &self,
        history: &mut History,
        found: Option<&Roster>,
    ) -> Result<(), Waits> {
        let Some(known) = &history.known else {
            history.known = found.cloned();
            if let Some(found) = found {
                self.remember(found);
            }
            return Ok(());
        };
        let goes_on = |it: &&Roster| it.cluster == known.cluster && it.epoch >= known.epoch;
        let Some(found) = found.filter(goes_on) else {
            return Err(Waits::ForRegistry(gone_back(known, found)));
        };
        if found != known {
            let confirmed = self.registry.confirm(known).await;
            confirmed.map_err(Waits::ForRegistry)?;
            self.remember(found);
            history.known = Some(found.clone());
        }
        Ok(())
    }

    /// Looks once, and proposes what would give the node a place.
    async fn look(&self, history: &mut History) -> Result<Option<Entered>, Waits> {
        let found = self.registry.newest().await.map_err(Waits::ForRegistry)?;
        self.check_history(history, found.as_ref()).await?;
        let roster = found.unwrap_or_else(|| self.first.clone());
        let is_over = history.quiet.is_over(roster.epoch, Instant::now());
        let next = match roster.arrive(&self.arrival) {
            Arrived::Placed(place) => return Ok(Some(Entered { roster, place })),
            Arrived::Waiting { there, wanted } if roster.places.is_empty() => {
                return Err(Waits::ForNodes { there, wanted });
            }
            Arrived::Waiting { there, wanted } if !is_over => {
                return Err(Waits::ToGrow { there, wanted });
            }
            Arrived::Waiting { .. } => roster.grown(),
            Arrived::Spare => {
                let epoch = roster.epoch;
                return Err(Waits::AsSpare { epoch });
            }
            Arrived::Cordoned => {
                let node = self.arrival.node.clone();
                return Err(Waits::Cordoned { node });
            }
            Arrived::Dismissed => {
                let node = self.arrival.node.clone();
                return Err(Waits::ForAdmission { node });
            }
            Arrived::Propose(next) => *next,
        };
        self.check_twin(&roster).await?;
        self.propose(&next.seated_after(&roster, self.geometry))
            .await?;
        Ok(None)
    }

    /// Until the next look.
    async fn rest(&self, waits: &Waits, history: &History) {
        let until = Instant::now() + self.poll;
        let known = history.known.as_ref();
        let (Waits::AsSpare { .. }, Some(known)) = (waits, known) else {
            return tokio::time::sleep_until(until).await;
        };
        let every = (self.poll / SPARE_ASKS).max(SPARE_ASKS_AFTER);
        while Instant::now() + every < until {
            tokio::time::sleep(every).await;
            // What is wrong with it, the next look says: a registry that fails is not to be asked for more, more often.
            if matches!(self.registry.newer_than(known).await, Ok(Some(_))) {
                return;
            }
        }
        tokio::time::sleep_until(until).await;
    }

    /// A place that this node fills at another address is its own if it has moved, and not if another machine answers there.
    async fn check_twin(&self, roster: &Roster) -> Result<(), Waits> {
        let node = &self.arrival.node;
        let elsewhere = roster.filled_by(node).map(|place| &place.address);
        let Some(address) = elsewhere.filter(|there| **there != self.arrival.address) else {
            return Ok(());
        };
        if !self.presence.answers(node, address).await {
            return Ok(());
        }
        Err(Waits::Twin(Twin {
            node: node.clone(),
            address: address.clone(),
        }))
    }

    async fn propose(&self, next: &Roster) -> Result<(), Waits> {
        next.check_groups(self.geometry).map_err(Waits::ForOthers)?;
        let proposed = self.registry.propose(next).await;
        match proposed.map_err(Waits::ForRegistry)? {
            Proposal::Taken => {
                let (epoch, change) = (next.epoch, &next.change);
                tracing::info!(epoch, change, "the roster changed");
            }
            // Another node's came first: what it says is looked at.
            Proposal::Outrun => {}
        }
        Ok(())
    }
}

/// Waits until the node has a place. What it waits for is said when it begins to, and when that changes.
///
/// # Errors
/// [`Twin`] if another machine has the node's name and certificate, and its place.
pub async fn enter(entering: &Entering, mut say: impl FnMut(&Waits)) -> Result<Entered, Twin> {
    let mut said = String::new();
    let mut history = History {
        known: entering.remembered.clone(),
        quiet: Quiet::default(),
    };
    let mut away_since = None;
    loop {
        match entering.look(&mut history).await {
            Ok(Some(entered)) => return Ok(entered),
            Ok(None) => {}
            Err(Waits::Twin(twin)) => return Err(twin),
            Err(waits) => {
                let now = Instant::now();
                away_since = match &waits {
                    Waits::ForRegistry(_) => away_since.or(Some(now)),
                    _ => None,
                };
                if away_since.is_some_and(|since| now - since >= AWAY_AFTER)
                    && let Some(entered) = entering.remembered_place(&history)
                {
                    let (place, epoch) = (&entered.place, entered.roster.epoch);
                    tracing::warn!(%place, epoch, reason = %waits, "the place is as this node remembers it");
                    return Ok(entered);
                }
                let text = waits.to_string();
                if text != said {
                    say(&waits);
                    said = text;
                }
                entering.rest(&waits, &history).await;
            }
        }
    }
}
