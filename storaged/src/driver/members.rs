//! What the driver makes of the roster: whom it links to, what the decisions are told, and that another node has this one's place.

use std::sync::Arc;

use serde_json::{Value, json};
use storaged_core::{EpochMembers, Input, QueryId, RegistryFault};
use storaged_plan::Cordon;
use storaged_wire::{Namespace, NodeName, RunId};
use tokio::sync::{Notify, mpsc, watch};

use super::{Daemon, chain};
use crate::membership::{Change, Place, Registry, Remembered, Roster, Sight};
use crate::net::NetError;

/// The roster of a running node, and who follows it.
#[derive(Debug)]
pub struct Members {
    /// The newest one that this node goes by.
    pub roster: Roster,
    /// Where it lies.
    pub registry: Registry,
    /// Where it is remembered.
    pub remembered: Remembered,
    /// What the follower tells.
    pub changes: mpsc::Receiver<Change>,
    /// What it is told.
    pub sight: watch::Sender<Sight>,
    /// And that there is something that the roster does not say.
    pub news: Arc<Notify>,
    /// And that this node goes for good.
    pub going: Arc<Notify>,
}

/// Another node fills this one's place, or nobody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceTaken {
    /// The newest epoch when this node heard of it.
    pub epoch: u64,
    /// What that one changed: another place, if several epochs had passed.
    pub change: String,
    /// What has become of the place.
    pub place: String,
}

impl PlaceTaken {
    fn by(roster: &Roster, own: &NodeName) -> Self {
        let place = match roster.place(own).map(|place| place.node.as_ref()) {
            Some(Some(node)) => format!("{node} has the place {own} of this node"),
            Some(None) => format!("the place {own} of this node is vacant"),
            None => format!("the place {own} of this node was removed"),
        };
        Self {
            epoch: roster.epoch,
            change: roster.change.clone(),
            place,
        }
    }
}

/// What a change of the roster means for the loop.
#[derive(Debug)]
pub(super) enum MembersNews {
    /// The decisions hear of it, if they need to.
    Taken(Option<Input>),
    /// The node ends.
    Over(PlaceTaken),
}

/// The next change; none ever where nodes are listed.
pub(super) async fn next_change(members: &mut Option<Members>) -> Change {
    let next = match members {
        Some(members) => members.changes.recv().await,
        None => None,
    };
    match next {
        Some(change) => change,
        // Whoever follows has ended with this daemon, or there is nobody.
        None => std::future::pending().await,
    }
}

impl Members {
    /// As the status shows it.
    fn status(&self) -> Value {
        let place = |place: &Place| {
            json!({
                "place": place.name.as_str(),
                "node": place.node.as_ref().map(|node| node.as_str()),
                "address": place.address.to_string(),
                "cordoned": self.roster.cordon_of(place) == Cordon::Cordoned,
            })
        };
        json!({
            "epoch": self.roster.epoch,
            "cluster": self.roster.cluster,
            "size": self.roster.size,
            "change": self.roster.change,
            "regrouped": self.roster.regrouped,
            "vacant": self.roster.vacant().count(),
            "cordoned": self.roster.cordoned.iter().map(NodeName::as_str).collect::<Vec<_>>(),
            "places": self.roster.places.iter().map(place).collect::<Vec<_>>(),
        })
    }
}

impl Daemon {
    pub(super) fn members_changed(&mut self, change: Change) -> MembersNews {
        match change {
            Change::Roster { roster, passed } => {
                MembersNews::Taken(self.take_roster(*roster, passed))
            }
            Change::Fault(fault) => {
                match &fault {
                    Some(fault) => tracing::warn!(fault, "the roster is not followed"),
                    None => tracing::info!("the roster is followed again"),
                }
                self.links.note_registry(fault);
                self.show();
                MembersNews::Taken(None)
            }
            Change::PlaceTaken(roster) => {
                // Were it forgotten, the node would take the place again should it find the registry away at its next start.
                if let Some(members) = &self.members {
                    members.remembered.write(&roster);
                }
                MembersNews::Over(PlaceTaken::by(&roster, &self.config.name))
            }
        }
    }

    fn take_roster(&mut self, roster: Roster, passed: Vec<EpochMembers>) -> Option<Input> {
        let mut taken = self.config.clone();
        let place = roster.place(&self.config.name)?.clone();
        if let Err(error) = taken.take_roster(&roster, &place) {
            tracing::error!(
                epoch = roster.epoch,
                error = chain(&error),
                "the old members stay"
            );
            self.links.note_registry(Some(chain(&error)));
            return None;
        }
        // An earlier one may have been refused, of which whoever follows knows nothing.
        self.links.note_registry(None);
        let input = self.reload_peers(&taken, passed);
        if let Some(members) = &mut self.members {
            members.roster = roster;
        }
        self.show_members();
        self.show();
        input
    }

    /// Whoever follows the roster hears which nodes are in sight.
    pub(super) fn tell_sight(&self) {
        if let Some(members) = &self.members {
            let up = self.links.up.keys().cloned().collect();
            members.sight.send_replace(Sight { up });
        }
    }

    /// A machine with a certificate of this cluster takes itself for a member, or for another one than it is by the roster: it may have a
    /// place since an epoch of which this node has not heard, and without it is not linked to before it has.
    pub(super) fn may_have_a_place(&self, error: &NetError) {
        let is_member = matches!(
            error,
            NetError::UnknownPeer(_) | NetError::AnotherMachine { .. }
        );
        if let Some(members) = self.members.as_ref().filter(|_| is_member) {
            members.news.notify_one();
        }
    }

    /// Asks the registry whether a run has its number.
    pub(super) fn register_run(&self, query: QueryId, namespace: Namespace, run: RunId) {
        let members = self.members.as_ref();
        let asked = members.map(|it| (it.registry.clone(), it.roster.clone()));
        self.when_done(async move {
            let outcome = match asked {
                Some((registry, known)) => registry.register_run(&known, &namespace, run).await,
                // Runs are opened by a registry only where there is one.
                None => std::future::pending().await,
            };
            let outcome = outcome.map_err(|error| RegistryFault(chain(&error)));
            Input::RunRegistered {
                query,
                run,
                outcome,
            }
        });
    }

    pub(super) fn show_members(&mut self) {
        let Some(members) = &self.members else {
            return;
        };
        members.remembered.write(&members.roster);
        self.links.membership = Some(members.status());
        let own = members.roster.place(&self.config.name);
        let cordon = own.map_or(Cordon::Open, |place| members.roster.cordon_of(place));
        self.ops.set_cordon(cordon);
        self.ops.metrics.observe_roster(&members.roster);
    }
}
