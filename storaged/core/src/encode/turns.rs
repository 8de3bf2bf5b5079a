//! Whose lane is coded next where a node leads sessions for several jobs. All its sessions share its links, so a tenant with many jobs,
//! or a job that saves without a pause, would hold up everybody else's protection: tenants come in turn, the one with the fewest sessions
//! first, and the jobs of each in turn.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use storaged_wire::peer::{CheckpointKey, Lane};
use storaged_wire::{CheckpointState, ManifestBytes, Namespace};

use super::Sessions;
use crate::context::Context;
use crate::limits;

/// When a session was last begun for each job: in the order of numbers.
#[derive(Debug, Default)]
pub(super) struct JobTurns {
    last: BTreeMap<Namespace, u64>,
    begun: u64,
}

impl JobTurns {
    /// A session was begun for this job.
    pub fn note(&mut self, job: &Namespace) {
        self.begun += 1;
        self.last.insert(job.clone(), self.begun);
    }

    fn of(&self, job: &Namespace) -> u64 {
        self.last.get(job).copied().unwrap_or(0)
    }
}

/// A lane of a step that this node may have to lead.
pub(super) struct LaneTurn {
    pub key: CheckpointKey,
    pub manifest: Arc<ManifestBytes>,
    pub lane: Lane,
    pub state: CheckpointState,
}

/// The lanes of each of a tenant's jobs.
type TenantLanes = VecDeque<VecDeque<LaneTurn>>;

impl Sessions {
    /// Starts sessions for these lanes, as far as this node should lead them and has not; those of one job in their order.
    pub(super) fn lead_in_turn(&mut self, lanes: Vec<LaneTurn>, cx: &mut Context) {
        let mut jobs: BTreeMap<Namespace, VecDeque<LaneTurn>> = BTreeMap::new();
        for lane in lanes {
            let job = jobs.entry(lane.key.namespace.clone()).or_default();
            job.push_back(lane);
        }
        self.turns.last.retain(|job, _| jobs.contains_key(job));
        let mut waiting = self.in_turn(jobs);
        while let Some(mut tenant) = waiting.pop_front() {
            if self.lead_one(&mut tenant, cx) {
                waiting.push_back(tenant);
            }
        }
    }

    /// The tenants in their turn, and the jobs of each in theirs.
    fn in_turn(&self, jobs: BTreeMap<Namespace, VecDeque<LaneTurn>>) -> VecDeque<TenantLanes> {
        let mut jobs: Vec<(Namespace, VecDeque<LaneTurn>)> = jobs.into_iter().collect();
        jobs.sort_by_cached_key(|(job, _)| self.turns.of(job));
        if planted!("jobs_are_coded_by_name") {
            jobs.sort_by(|(one, _), (other, _)| other.cmp(one));
        }
        let mut tenants: Vec<(Option<String>, TenantLanes)> = Vec::new();
        for (job, lanes) in jobs {
            let is_whose =
                |(tenant, _): &&mut (Option<String>, _)| tenant.as_deref() == job.tenant();
            match tenants.iter_mut().find(is_whose) {
                Some((_, of_tenant)) => of_tenant.push_back(lanes),
                None => {
                    let tenant = job.tenant().map(str::to_owned);
                    tenants.push((tenant, VecDeque::from([lanes])));
                }
            }
        }
        tenants.sort_by_cached_key(|(tenant, _)| self.led_for(tenant.as_deref()));
        tenants.into_iter().map(|(_, lanes)| lanes).collect()
    }

    /// Looks at a tenant's lanes until one session more has begun; false if there is nothing left to lead.
    fn lead_one(&mut self, tenant: &mut TenantLanes, cx: &mut Context) -> bool {
        while let Some(mut job) = tenant.pop_front() {
            while let Some(turn) = job.pop_front() {
                let before = self.turns.begun;
                self.lead_lane(&turn, cx);
                if self.turns.begun > before {
                    tenant.push_back(job);
                    return true;
                }
            }
        }
        false
    }

    /// Sessions that this node leads for a tenant's jobs.
    fn led_for(&self, tenant: Option<&str>) -> usize {
        let led = self.led.values();
        led.filter(|it| it.key.namespace.tenant() == tenant).count()
    }

    /// Whether one session more may begin: each takes memory and streams at all its members. A tenant that has none does not wait for
    /// others' to end.
    pub(super) fn may_lead_for(&self, job: &Namespace) -> bool {
        let all = self.led.len();
        let first = self.led_for(job.tenant()) == 0 && !planted!("tenants_wait_for_sessions");
        all < limits::SESSIONS_LED_MAX || first
    }
}
