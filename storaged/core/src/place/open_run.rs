//! Opening a run, in two phases. First every node is asked to *promise* the run to this proposer; that fences nobody, so
//! an attempt that fails ends no job. Only when it is certain, fences *rise*. Where the members come from a registry, that settles
//! whose a number is (`run_registry`). Where there is a durable tier, it gives
//! the number by create-if-absent. A tier that does not answer in time does not hold up a job that nodes remember: then
//! the number is a majority's, and the tier hears of it later.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::digest;
use storaged_wire::local::Reply;
use storaged_wire::peer::{PeerMessage, PromiseOutcome};
use storaged_wire::{Namespace, NodeName, Refusal, RefusalCode, RunId};

use super::fence::wrong_token;
use super::proposal::{Phase, RunProposal, TierClaim, above_all};
use super::run_registry::unregistered;
use crate::api::{
    ClaimFault, ConnId, DurableFault, DurablePolicy, FalseStatement, Now, Output, QueryId,
    RequestId, RunAuthority, RunsWithoutTier,
};
use crate::catalog::Unrecorded;
use crate::context::Context;
use crate::limits;
use crate::place::Runs;

impl Runs {
    pub(crate) fn open_run(
        &mut self,
        id: RequestId,
        timeout_ms: u32,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let attached = cx.attached(id)?.clone();
        if !attached.opens_runs() {
            return Err(wrong_token(&attached.namespace));
        }
        self.has_room_for_name(&attached.namespace, cx)?;
        let is_unknown = attached.early.is_some() || !cx.has_heard_of(&attached.namespace);
        let query = QueryId(cx.fresh());
        let above = cx.highest_number(&attached.namespace);
        let identity = cx.identity(query);
        let proposal = RunProposal {
            id,
            owner: attached.owner,
            run: above_all(&attached.namespace, above, identity)?,
            namespace: attached.namespace,
            above,
            attempts: 0,
            claims: 0,
            taken: BTreeMap::new(),
            foreign: BTreeSet::new(),
            tier: TierClaim::Absent,
            phase: Phase::Waiting { until: cx.now },
            deadline: cx.answer_by(timeout_ms),
        };
        self.proposals.insert(query, proposal);
        if is_unknown && !planted!("runs_of_unknown_jobs_are_not_asked_for") {
            self.ask_first(query, cx);
        } else {
            self.begin_proposal(query, cx);
        }
        self.advance_proposal(query, cx);
        Ok(())
    }

    /// Above what peers have told of meanwhile.
    pub(super) fn goes_above(&mut self, query: QueryId, cx: &Context) -> Result<(), Refusal> {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return Ok(());
        };
        proposal.set_above(cx.highest_number(&proposal.namespace))
    }

    /// Where there is a durable tier, it gives the number.
    pub(super) fn begin_proposal(&mut self, query: QueryId, cx: &mut Context) {
        if cx.setup.durable != DurablePolicy::Absent {
            return self.claim(query, cx);
        }
        if let Some(proposal) = self.proposals.get_mut(&query) {
            proposal.phase = Phase::Waiting { until: cx.now };
        }
    }

    /// A job that is new here is remembered, and told to all nodes, whether it ever saves or not: no tenant fills their tables with names.
    fn has_room_for_name(&self, namespace: &Namespace, cx: &Context) -> Result<(), Refusal> {
        if cx.owner_of(namespace).is_some() || planted!("names_without_end") {
            return Ok(());
        }
        // The job itself may have been asked for before its first run, as for a board.
        let of_tenant = |name: &Namespace| name.tenant() == namespace.tenant() && name != namespace;
        let proposed = self.proposals.values().map(|it| &it.namespace);
        let proposed = proposed.filter(|name| of_tenant(name) && cx.owner_of(name).is_none());
        let new = cx
            .new_jobs()
            .filter(|name| of_tenant(name) && !cx.is_only_told(name));
        let most = cx.budget.share_of(namespace).new_jobs;
        let most = most.unwrap_or(limits::NEW_JOBS_MAX);
        if new.chain(proposed).take(most).count() < most {
            return Ok(());
        }
        let text = format!(
            "expected fewer than {most} new jobs of a tenant within a minute that have saved nothing (tenants.new_jobs_max), got another one, {namespace}: try again in a minute"
        );
        Err(Refusal::new(RefusalCode::Busy, text))
    }

    /// Asks the durable tier for a number.
    fn claim(&mut self, query: QueryId, cx: &mut Context) {
        let until = cx.now.plus(limits::RUN_CLAIM_MAX_MS);
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        proposal.tier = TierClaim::Asked;
        proposal.claims = proposal.claims.saturating_add(1);
        proposal.phase = Phase::Waiting { until };
        let said = cx.token_of(proposal.id.conn);
        let output = Output::ClaimRun {
            query,
            namespace: proposal.namespace.clone(),
            owner: proposal.owner,
            consent: said.map(|said| said.consent),
            above: proposal.above,
            identity: proposal.run.identity(),
        };
        cx.out.push(output);
    }

    /// The durable tier has answered.
    pub(crate) fn run_claimed(
        &mut self,
        query: QueryId,
        outcome: Result<RunId, ClaimFault>,
        cx: &mut Context,
    ) {
        let now = cx.now;
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        // The run is open by promises already: another number now would open a second one for the same client.
        if matches!(proposal.phase, Phase::Raising { .. }) {
            return;
        }
        match outcome {
            Ok(run) if run.number() <= proposal.above => return self.claim(query, cx),
            Ok(run) if run == proposal.run => proposal.tier = TierClaim::Claimed,
            Ok(run) => {
                (proposal.run, proposal.tier) = (run, TierClaim::Claimed);
                proposal.phase = Phase::Waiting { until: Now(0) };
            }
            Err(ClaimFault::WrongOwner) => {
                let refusal = wrong_token(&proposal.namespace);
                return self.refuse_run(query, refusal, cx);
            }
            Err(ClaimFault::Durable(fault)) => proposal.tier = TierClaim::Failed { fault, at: now },
        }
        if let Some(proposal) = self.proposals.get_mut(&query)
            && matches!(proposal.phase, Phase::Waiting { .. })
        {
            proposal.phase = Phase::Waiting { until: Now(0) };
        }
        self.advance_proposal(query, cx);
    }

    pub(crate) fn advance_proposals(&mut self, cx: &mut Context) {
        for query in self.proposals.keys().copied().collect::<Vec<_>>() {
            self.advance_proposal(query, cx);
        }
    }

    pub(super) fn advance_proposal(&mut self, query: QueryId, cx: &mut Context) {
        self.judge_asking(query, cx);
        let now = cx.now;
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        let waited = matches!(proposal.phase, Phase::Waiting { until } if until <= now);
        if waited && !self.needs_the_tier(query, cx) {
            match self.identify_again(query, cx) {
                Ok(()) => self.begin_promising(query, cx),
                Err(refusal) => self.refuse_run(query, refusal, cx),
            }
        }
        self.ask_for_promises(query, cx);
        self.judge_promises(query, cx);
        self.register_again(query, cx);
        self.judge_raising(query, cx);
    }

    pub(super) fn begin_promising(&mut self, query: QueryId, cx: &mut Context) {
        let since = cx.now;
        if let Some(proposal) = self.proposals.get_mut(&query) {
            proposal.phase = Phase::Promising {
                since,
                asked: BTreeSet::new(),
                promised: BTreeSet::new(),
            };
        }
    }

    /// Whether only the durable tier can say which runs the namespace has had: no node that is up remembers one, or it
    /// would have told this one. Then it is waited for; if it has failed it is asked again, and then the run is refused.
    fn needs_the_tier(&mut self, query: QueryId, cx: &mut Context) -> bool {
        let again = cx.now.plus(limits::REPEAT_MS);
        let enough_up = cx.settled() && cx.peers.len() + 1 >= cx.majority();
        let allowed = cx.setup.runs_without_tier == RunsWithoutTier::Allowed;
        let Some(proposal) = self.proposals.get(&query) else {
            return false;
        };
        let remembered = cx.fence_of(&proposal.namespace) > RunId::ZERO;
        if allowed || remembered || planted!("tier_not_asked_for_runs") {
            return false;
        }
        match &proposal.tier {
            TierClaim::Absent | TierClaim::Claimed => return false,
            TierClaim::Failed { fault, at }
                if fault.may_pass() && proposal.claims < limits::RUN_CLAIMS_MAX =>
            {
                if at.plus(limits::REPEAT_MS) <= cx.now {
                    self.claim(query, cx);
                    return true;
                }
            }
            TierClaim::Failed { fault, .. } if enough_up => {
                let refusal = nobody_remembers(&proposal.namespace, &fault.to_string());
                self.refuse_run(query, refusal, cx);
                return true;
            }
            TierClaim::Asked | TierClaim::Failed { .. } => {}
        }
        if let Some(proposal) = self.proposals.get_mut(&query) {
            proposal.phase = Phase::Waiting { until: again };
        }
        true
    }

    fn ask_for_promises(&mut self, query: QueryId, cx: &mut Context) {
        for node in cx.everyone_up() {
            let Some(proposal) = self.proposals.get_mut(&query) else {
                return;
            };
            let run = proposal.named();
            let Phase::Promising { asked, .. } = &mut proposal.phase else {
                return;
            };
            if asked.insert(node.clone()) {
                let query = query.0;
                cx.send(&node, PeerMessage::PromiseRun { query, run });
            }
        }
    }

    /// A node has answered: it keeps the run for this proposal, or knows a higher one.
    pub(crate) fn run_promised(
        &mut self,
        from: &NodeName,
        query: QueryId,
        run: RunId,
        outcome: PromiseOutcome,
        cx: &mut Context,
    ) {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        let Phase::Promising { promised, .. } = &mut proposal.phase else {
            return;
        };
        // A promise for the number before counts for nothing: a majority of two halves would be none
        // (`two_at_once_get_different_numbers_without_a_tier`).
        if proposal.run != run {
            return;
        }
        match outcome {
            PromiseOutcome::Promised => {
                promised.insert(from.clone());
                proposal.foreign.remove(from);
                self.judge_promises(query, cx);
            }
            PromiseOutcome::Taken { highest } => self.number_taken(from, query, highest, cx),
            PromiseOutcome::WrongOwner => {
                proposal.foreign.insert(from.clone());
                let is_foreign = proposal.is_called_anothers(cx);
                let namespace = proposal.namespace.clone();
                let is_opened = cx.has_heard_of(&namespace) && !planted!("promises_keep_names");
                if from == cx.me() || is_foreign && !is_opened {
                    self.refuse_run(query, wrong_token(&namespace), cx);
                } else if is_opened {
                    // It may only have promised the job to somebody else: told whose it is it asks others, and promises when it is asked again.
                    cx.tell_owner(from, &namespace);
                }
            }
        }
    }

    /// A node says that the number is taken. One that says so again and again, or of numbers far above, is not waited for: a
    /// majority of the others has promised, or will.
    fn number_taken(&mut self, from: &NodeName, query: QueryId, highest: u64, cx: &mut Context) {
        let is_me = from == cx.me();
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        let asked = proposal.run.number();
        if highest < asked {
            return cx.is_false(from, FalseStatement::TakenByLower { asked, highest });
        }
        if !cx.checks_run(from, RunId::new(highest)) {
            return;
        }
        let times = proposal.taken.entry(from.clone()).or_default();
        *times += 1;
        let is_enough = *times > limits::RUN_TAKEN_MAX || highest - asked > limits::RUN_SKIP_MAX;
        if is_me || !is_enough {
            self.go_above(query, highest, cx);
        }
    }

    /// Somebody knows a run as high as ours. Two proposers that meet wait for different times, so that one gets ahead.
    pub(super) fn go_above(&mut self, query: QueryId, highest: u64, cx: &mut Context) {
        let now = cx.now;
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        proposal.attempts = proposal.attempts.saturating_add(1);
        let identity = proposal.run.identity();
        if let Err(refusal) = proposal.set_above(highest) {
            return self.refuse_run(query, refusal, cx);
        }
        if matches!(proposal.tier, TierClaim::Claimed) {
            return self.claim(query, cx);
        }
        let until = now.plus(back_off_ms(identity, proposal.attempts));
        proposal.phase = Phase::Waiting { until };
    }

    /// Whether what was promised is enough, once everybody who is up has answered or has had time to.
    fn judge_promises(&mut self, query: QueryId, cx: &mut Context) {
        let everyone = cx.everyone_up();
        let Some(proposal) = self.proposals.get(&query) else {
            return;
        };
        let Phase::Promising {
            since, promised, ..
        } = &proposal.phase
        else {
            return;
        };
        let all = everyone.iter().all(|node| promised.contains(node));
        let is_registered = cx.setup.run_authority == RunAuthority::Registry;
        let late = cx.now >= since.plus(limits::PROMISE_MAX_MS);
        let majority = promised.len() >= cx.majority() || planted!("no_majority_needed");
        // Who was stopped counts nothing that was promised before: who promised it may have been restarted without its memory.
        if cx.was_stopped() && !planted!("stale_promises_count") {
            return;
        }
        // At the end of its time a majority is enough; without one, the tier's number is not while others may know of a higher one.
        let has_no_time = proposal.deadline <= cx.now && majority && !is_registered;
        if !(all || late || has_no_time) || !cx.settled() || !promised.contains(cx.me()) {
            return;
        }
        if is_registered && !planted!("registry_not_asked") {
            return self.register(query, cx);
        }
        if majority || matches!(proposal.tier, TierClaim::Claimed) {
            self.raise(query, cx);
        }
    }

    /// The run is certain: lower ones are fenced off.
    pub(super) fn raise(&mut self, query: QueryId, cx: &mut Context) {
        let now = cx.now;
        let until = now.plus(limits::RAISE_MAX_MS);
        let told = BTreeSet::from([cx.me().clone()]);
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        // While it waited, this node may have heard that the token was changed, or that the job is somebody else's.
        let is_its = cx.check_token_current(proposal.id.conn);
        let is_its = is_its.and_then(|()| cx.check_owner(&proposal.namespace, proposal.owner));
        if let Err(refusal) = is_its {
            return self.refuse_run(query, refusal, cx);
        }
        proposal.phase = Phase::Raising { until, told };
        let by_majority = matches!(proposal.tier, TierClaim::Asked | TierClaim::Failed { .. });
        let opened = proposal.named();
        cx.raise_fence(&opened.namespace, opened.owner, opened.run);
        if by_majority {
            let table = cx.namespace_table(&opened.namespace, opened.owner);
            table.unrecorded = Some(Unrecorded::Due(now, opened.run));
        }
        cx.send_all(&PeerMessage::RaiseFence {
            query: query.0,
            run: opened,
        });
        self.advance_hellos(cx);
        self.judge_raising(query, cx);
    }

    pub(crate) fn fence_raised(&mut self, from: &NodeName, query: QueryId, cx: &mut Context) {
        if let Some(proposal) = self.proposals.get_mut(&query)
            && let Phase::Raising { told, .. } = &mut proposal.phase
        {
            told.insert(from.clone());
            self.judge_raising(query, cx);
        }
    }

    /// Whoever is given the run shall find it known at every node that is up; one that is silent hears of it later.
    fn judge_raising(&mut self, query: QueryId, cx: &mut Context) {
        let Some(proposal) = self.proposals.get(&query) else {
            return;
        };
        let Phase::Raising { until, told } = &proposal.phase else {
            return;
        };
        let all = cx.peers.keys().all(|peer| told.contains(peer));
        if all || *until <= cx.now || proposal.deadline <= cx.now {
            let (id, run) = (proposal.id, proposal.run);
            self.proposals.remove(&query);
            cx.reply(id, Reply::RunOpened { run });
        }
    }

    pub(super) fn refuse_run(&mut self, query: QueryId, refusal: Refusal, cx: &mut Context) {
        if let Some(proposal) = self.proposals.remove(&query) {
            self.withdraw(&proposal, cx);
            cx.reply(proposal.id, Reply::Refused(refusal));
        }
    }

    /// This node was stopped: all are asked anew what they promise.
    pub(crate) fn ask_anew_after_a_gap(&mut self, cx: &mut Context) {
        if !cx.was_stopped() || planted!("stale_promises_count") {
            return;
        }
        let promising: Vec<QueryId> = self.proposals.keys().copied().collect();
        for query in promising {
            match self.proposals.get_mut(&query).map(|it| &mut it.phase) {
                Some(Phase::Promising { .. }) => self.begin_promising(query, cx),
                Some(Phase::Registering(registering)) if !planted!("registered_after_a_stop") => {
                    registering.lapse();
                }
                _ => {}
            }
        }
    }

    /// Answers may be lost while links come up: whoever has not promised is asked again.
    pub(crate) fn repeat_proposals(&mut self, cx: &mut Context) {
        for proposal in self.proposals.values_mut() {
            proposal.asks_again();
        }
        self.ask_silent(cx);
        self.advance_proposals(cx);
        cx.record_runs();
    }

    pub(crate) fn expire_proposals(&mut self, cx: &mut Context) {
        self.advance_proposals(cx);
        let now = cx.now;
        let late = self.proposals.iter().filter(|(_, p)| p.deadline <= now);
        let late: Vec<QueryId> = late.map(|(query, _)| *query).collect();
        for query in late {
            let Some(proposal) = self.proposals.get(&query) else {
                continue;
            };
            let refusal = cx.late_run(proposal);
            self.refuse_run(query, refusal, cx);
        }
    }

    pub(crate) fn forget_proposals(&mut self, conn: ConnId, cx: &mut Context) {
        let of_conn = |_: &QueryId, it: &mut RunProposal| it.id.conn == conn;
        let given_up: Vec<RunProposal> = self
            .proposals
            .extract_if(.., of_conn)
            .map(|it| it.1)
            .collect();
        given_up.iter().for_each(|it| self.withdraw(it, cx));
    }
}

impl Context {
    /// Of one proposal: generations are random, and a query's number is used once in a generation.
    fn identity(&self, query: QueryId) -> u64 {
        let name = format!("run {} {} {}", self.me(), self.setup.generation, query.0);
        let digest = digest(name.as_bytes());
        let first = digest.as_bytes().first_chunk::<8>();
        u64::from_le_bytes(*first.expect("a digest has 32 bytes")).max(1)
    }

    fn everyone_up(&self) -> Vec<NodeName> {
        let peers = self.believed_peers();
        peers.chain([self.me()]).cloned().collect()
    }

    /// So many of the configured nodes that any two such sets share one.
    pub(crate) fn majority(&self) -> usize {
        self.setup.members.len() / 2 + 1
    }

    fn late_run(&self, proposal: &RunProposal) -> Refusal {
        // It may have heard meanwhile that the job is somebody else's.
        if self
            .check_owner(&proposal.namespace, proposal.owner)
            .is_err()
        {
            return wrong_token(&proposal.namespace);
        }
        if let Phase::Registering(registering) = &proposal.phase {
            return unregistered(proposal, registering);
        }
        let (namespace, got) = (&proposal.namespace, proposal.promises());
        if proposal.is_called_anothers(self) && !self.has_heard_of(namespace) {
            return wrong_token(namespace);
        }
        let tier = match &proposal.tier {
            TierClaim::Asked => Some("no answer in time".to_string()),
            TierClaim::Failed { fault, .. } => Some(fault.to_string()),
            TierClaim::Absent | TierClaim::Claimed => None,
        };
        let remembered = self.fence_of(namespace) > RunId::ZERO;
        if let Some(fault) = &tier
            && !remembered
        {
            return nobody_remembers(namespace, fault);
        }
        let tier = tier.map_or(String::new(), |fault| {
            format!("; the durable tier, which could give the run alone, said: {fault}")
        });
        let text = format!(
            "expected {} of {} nodes to promise run {} of {namespace}, got {got}: check `storaged status` for nodes that are down{tier}",
            self.majority(),
            self.setup.members.len(),
            proposal.run.number(),
        );
        Refusal::new(RefusalCode::TimedOut, text)
    }

    /// Tells the durable tier of runs that were opened without it.
    fn record_runs(&mut self) {
        let now = self.now;
        for (namespace, table) in &mut self.namespaces {
            if let Some(Unrecorded::Due(at, run)) = table.unrecorded
                && at <= now
            {
                table.unrecorded = Some(Unrecorded::Running(run));
                let (namespace, owner) = (namespace.clone(), table.owner);
                self.out.push(Output::RecordRun {
                    namespace,
                    owner,
                    run,
                });
            }
        }
    }

    pub(crate) fn run_recorded(
        &mut self,
        namespace: &Namespace,
        run: RunId,
        outcome: Result<(), DurableFault>,
    ) {
        let again = self.now.plus(limits::RUN_RECORD_RETRY_MS);
        let Some(table) = self.namespaces.get_mut(namespace) else {
            return;
        };
        if table.unrecorded == Some(Unrecorded::Running(run)) {
            table.unrecorded = outcome.is_err().then_some(Unrecorded::Due(again, run));
        }
    }
}

/// Other bits of the identity for every attempt, over a span that grows.
fn back_off_ms(identity: u64, attempt: u32) -> u64 {
    let span = limits::RUN_BACK_OFF_MS << attempt.min(6);
    1 + identity.rotate_right(attempt.wrapping_mul(7)) % span
}

fn nobody_remembers(namespace: &Namespace, fault: &str) -> Refusal {
    let text = format!(
        "expected the durable tier, or a node that remembers {namespace}, to say which runs it has had, got no node that does and from the tier: {fault}; \
         try again when it answers, or set trickle.runs_without_tier if nothing of this namespace can be there"
    );
    Refusal::new(RefusalCode::DurableUnavailable, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_offs_are_short_and_differ() {
        let waits = |identity| (1..9).map(move |attempt| back_off_ms(identity, attempt));
        assert!(waits(u64::MAX).all(|wait| (1..=64 * limits::RUN_BACK_OFF_MS).contains(&wait)));
        assert!(waits(0x00f3_a9c1_d2e4_b5a6).ne(waits(0x00f3_a9c1_d2e4_b5a7)));
    }
}
