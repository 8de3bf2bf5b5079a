//! Policy of the verb *restore*: the plan before action (`plan` asks, `cluster_view` has what was told, `settle` says for how
//! long, `offer` what comes of it, `marks` what it must not go below, `expected` and `rates` how long it takes), what a launcher is
//! told of it (`verdict`, `waiting`) and says of it (`failed`), the ladder per shard (`open`), openings that a
//! heal serves (`await_repair`), readers that take a shard while it comes (`early`, `follow`), what is not lost but was let go (`let_go`), what a drill decodes (`drill_plan`), what nodes hold (`holdings`), what readers get of a manifest (`reading`), and checking a whole checkpoint (`verify`).

mod ask_again;
mod await_repair;
mod cluster_view;
mod drill_plan;
mod early;
mod expected;
mod failed;
mod follow;
mod hear;
mod holdings;
mod let_go;
mod marks;
mod offer;
mod open;
mod opening;
mod plan;
mod rates;
mod reading;
#[cfg(test)]
mod scene;
mod settle;
mod source_fault;
mod verdict;
mod verify;
mod waiting;

pub(crate) use early::{Answer, ComingShard, EarlyReaders, OpenedEarly};
pub(crate) use plan::Older;
pub(crate) use rates::Rates;
pub(crate) use source_fault::is_wrong;

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_wire::{ManifestBytes, Namespace, SlotId};

use await_repair::AwaitedRepair;
use opening::ShardOpen;
use plan::SurveyInProgress;
use reading::ManifestWait;
use verify::VerifyWork;

use crate::api::{Now, QueryId};

/// Plans, openings and verifications that are asked for here.
#[derive(Debug, Default)]
pub(crate) struct Restores {
    plans: BTreeMap<QueryId, SurveyInProgress>,
    openings: BTreeMap<SlotId, ShardOpen>,
    awaited_repairs: Vec<AwaitedRepair>,
    verifies: BTreeMap<QueryId, VerifyWork>,
    manifest_waits: Vec<ManifestWait>,
    /// Manifests of the last plans, for the requests that follow them.
    planned: Vec<Arc<ManifestBytes>>,
    /// Openings for which the durable tier is listed, since memory did not give them what they need.
    listed_for: BTreeMap<QueryId, SlotId>,
}

impl Restores {
    /// When one of them must be looked at again.
    pub fn deadlines(&self, now: Now) -> impl Iterator<Item = Now> {
        let plans = self.plans.values().map(move |plan| plan.looked_at(now));
        let openings = self.openings.values().map(|opening| opening.deadline);
        let rest = self
            .awaited_repairs_deadlines()
            .chain(self.verifies_deadline())
            .chain(self.manifest_waits.iter().map(|wait| wait.request.deadline));
        plans.chain(openings).chain(rest)
    }

    /// Jobs that a plan is made for.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.plans.values().map(|plan| &plan.namespace)
    }

    /// Requests that have not been answered.
    pub fn unanswered(&self) -> usize {
        let openings = self.openings.values().filter(|it| !it.is_open());
        let waits = self.awaited_repairs.len() + self.manifest_waits.len();
        waits + self.plans.len() + openings.count() + self.verifies.len()
    }

    /// Openings that wait for a repair.
    pub fn waiters(&self) -> usize {
        self.awaited_repairs.len()
    }
}
