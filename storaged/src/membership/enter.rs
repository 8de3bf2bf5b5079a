//! How a node gets a place: the one that it fills already, a vacant one, or a new one once enough nodes have come. A node for which
//! there is none is a spare, and waits till a place gets vacant. Which spare takes it the registry settles.

use std::time::Duration;

use storaged_plan::GroupError;
use storaged_wire::{Geometry, NodeName};
use tokio::time::Instant;

use super::registry::{Proposal, Registry, RegistryError, gone_back};
use super::roster::{Arrival, Arrived, Roster};

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
    /// How checkpoints are coded.
    pub geometry: Option<Geometry>,
}

/// A registry that has not answered for so long is away: the node goes by what it remembers.
const AWAY_AFTER: Duration = Duration::from_secs(3);

/// How it goes; said whenever that changes.
#[derive(Debug)]
pub enum Waits {
    /// Not all nodes of a cluster that begins, or grows, have come.
    ForNodes { there: usize, wanted: usize },
    /// All places are filled.
    AsSpare { epoch: u64 },
    /// The operator has replaced it, or removed its place.
    ForAdmission { node: NodeName },
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
            Self::AsSpare { epoch } => write!(
                f,
                "this node is a spare: all places are filled at epoch {epoch}; it takes the next one that gets vacant"
            ),
            Self::ForAdmission { node } => write!(
                f,
                "the operator has replaced this node, or removed its place: `storaged node admit {node}` lets it in again"
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
    /// The place that it had, as it remembers.
    fn remembered_place(&self) -> Option<Entered> {
        let roster = self.remembered.clone()?;
        match roster.arrive(&self.arrival) {
            Arrived::Placed(place) => Some(Entered { roster, place }),
            _ => None,
        }
    }

    /// What this node has seen must still be there: a registry that was put back from an older copy, or is another cluster's,
    /// would give its place away.
    fn check_history(&self, found: Option<&Roster>) -> Result<(), Waits> {
        let Some(known) = &self.remembered else {
            return Ok(());
        };
        let goes_on = |it: &&Roster| it.cluster == known.cluster && it.epoch >= known.epoch;
        match found.filter(goes_on) {
            Some(_) => Ok(()),
            None => Err(Waits::ForRegistry(gone_back(known, found))),
        }
    }

    /// Looks once, and proposes what would give the node a place.
    async fn look(&self) -> Result<Option<Entered>, Waits> {
        let found = self.registry.newest().await.map_err(Waits::ForRegistry)?;
        self.check_history(found.as_ref())?;
        let roster = found.unwrap_or_else(|| self.first.clone());
        match roster.arrive(&self.arrival) {
            Arrived::Placed(place) => Ok(Some(Entered { roster, place })),
            Arrived::Waiting { there, wanted } => Err(Waits::ForNodes { there, wanted }),
            Arrived::Spare => Err(Waits::AsSpare {
                epoch: roster.epoch,
            }),
            Arrived::Dismissed => Err(Waits::ForAdmission {
                node: self.arrival.node.clone(),
            }),
            Arrived::Propose(next) => {
                next.check_groups(self.geometry).map_err(Waits::ForOthers)?;
                let proposed = self.registry.propose(&next).await;
                match proposed.map_err(Waits::ForRegistry)? {
                    Proposal::Taken => {
                        tracing::info!(
                            epoch = next.epoch,
                            change = next.change,
                            "the roster changed"
                        );
                    }
                    // Another node's came first: what it says is looked at.
                    Proposal::Outrun => {}
                }
                Ok(None)
            }
        }
    }
}

/// Waits until the node has a place. What it waits for is said when it begins to, and when that changes.
pub async fn enter(entering: &Entering, mut say: impl FnMut(&Waits)) -> Entered {
    let mut said = String::new();
    let mut away_since = None;
    loop {
        match entering.look().await {
            Ok(Some(entered)) => return entered,
            Ok(None) => {}
            Err(waits) => {
                let now = Instant::now();
                away_since = match &waits {
                    Waits::ForRegistry(_) => away_since.or(Some(now)),
                    _ => None,
                };
                if away_since.is_some_and(|since| now - since >= AWAY_AFTER)
                    && let Some(entered) = entering.remembered_place()
                {
                    let (place, epoch) = (&entered.place, entered.roster.epoch);
                    tracing::warn!(%place, epoch, reason = %waits, "the place is as this node remembers it");
                    return entered;
                }
                let text = waits.to_string();
                if text != said {
                    say(&waits);
                    said = text;
                }
                tokio::time::sleep(entering.poll).await;
            }
        }
    }
}
