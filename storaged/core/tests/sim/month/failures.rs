//! Restarts of a month's jobs that fail after all was read: whoever launches them says so, and the step is passed over from then on, as
//! long as there is another one to restart from.

use std::collections::BTreeMap;

use storaged_wire::Namespace;
use storaged_wire::failed::{FailedRestart, FailureReport};
use storaged_wire::local::Request;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::plan::RestorePlan;

use super::super::world::World;
use super::FAULTS_END_MS;
use super::asks::{Asked, What};
use super::jobs::IncarnationId;
use crate::testkit::LISTED;

/// Of the restarts that have read everything, one in so many fails.
const FAIL_ONE_IN: u64 = 2;
const REPORT_MS: u32 = 5_000;
/// All nodes that are up have heard of a failure by then.
const TOLD_MS: u64 = 2_500;
/// After so many failures a step is not offered any more.
const TIMES_MAX: u32 = 3;

/// What was said of the steps that restarts failed from.
#[derive(Debug, Default)]
pub struct Failures(BTreeMap<CheckpointKey, Failed>);

/// One step's failures: how often they were counted, and since when that is known. Of what was said to a node that died nobody knows
/// whether it was counted.
#[derive(Debug, Default)]
struct Failed {
    times: u32,
    since: Option<u64>,
}

impl Failures {
    /// Whether any restart from this step may count as failed.
    pub fn has(&self, key: &CheckpointKey) -> bool {
        self.0.contains_key(key)
    }

    /// Whether all nodes knew by then that a restart from it had failed.
    fn was_told(&self, key: &CheckpointKey, at: u64) -> bool {
        let since = self.0.get(key).and_then(|failed| failed.since);
        since.is_some_and(|since| since + TOLD_MS < at)
    }

    fn is_for_good(&self, key: &CheckpointKey) -> bool {
        let failed = self.0.get(key);
        failed.is_some_and(|failed| failed.times >= TIMES_MAX)
    }
}

impl World {
    /// All was read, and the job dies of it: its launcher says so. Whether this restart is such a one.
    pub(super) fn restart_fails(&mut self, whose: IncarnationId) -> bool {
        let fails = self.month().scenario.failures && self.now < FAULTS_END_MS;
        if !fails || self.random(FAIL_ONE_IN) != 0 {
            return false;
        }
        let Some(it) = self.month().jobs.incarnation(whose.job, whose.id) else {
            return false;
        };
        let (Some(plan), place) = (it.plan.clone(), it.coordinator) else {
            return false;
        };
        self.struck("restarts that fail");
        let failed = CheckpointKey {
            namespace: plan.namespace.clone(),
            run: plan.run,
            step: plan.step,
        };
        let failures = &mut self.month().promises.failures;
        failures.0.entry(failed).or_default();
        let report = Request::RestartFailed(FailureReport {
            run: Some(plan.run),
            step: plan.step,
            timeout_ms: REPORT_MS,
        });
        let limit = u64::from(REPORT_MS);
        self.ask_in_month(whose, place, report, limit, What::Failed);
        true
    }

    /// It was counted, and the job starts again.
    pub(super) fn failure_is_known(&mut self, whose: IncarnationId, all: &[FailedRestart]) {
        let (now, namespace) = (self.now, self.namespace_of(whose));
        let known = &mut self.month().promises.failures.0;
        for failed in all {
            let key = CheckpointKey {
                namespace: namespace.clone(),
                run: failed.run,
                step: failed.step,
            };
            let known = known.entry(key).or_default();
            known.times = failed.times;
            known.since.get_or_insert(now);
        }
        self.end_incarnation(whose);
    }

    fn namespace_of(&mut self, whose: IncarnationId) -> Namespace {
        self.month().jobs.all[whose.job].namespace.clone()
    }

    /// While another step can be restored, one that a restart has failed from is not offered; one that fails each time never is.
    pub(super) fn failed_steps_are_passed_over(&mut self, asked: &Asked, plan: &RestorePlan) {
        let offered = CheckpointKey {
            namespace: plan.namespace.clone(),
            run: plan.run,
            step: plan.step,
        };
        let failures = &self.month().promises.failures;
        if !failures.was_told(&offered, asked.at) {
            return;
        }
        assert!(
            !failures.is_for_good(&offered),
            "a step that restarts failed from each time is not offered: {offered:?} at {} ms",
            self.now
        );
        let month = self.scene.month.as_deref().expect("it is a month");
        let published = self.tier.published.iter().rev();
        let of_job = published.filter(|(key, _)| key.namespace == offered.namespace);
        // A listing of the tier names so many: should restarts fail from all of these, the newest in RAM is tried again.
        let listed = of_job.take(LISTED);
        let mut others = listed
            .filter(|(key, it)| it.at + TOLD_MS < asked.at && !month.promises.failures.has(key));
        let other = others.next().map(|(key, _)| key);
        assert!(
            other.is_none(),
            "a step that a restart failed from is passed over: asked at {} ms, {offered:?} is offered, and {other:?} is durable",
            asked.at
        );
    }
}
