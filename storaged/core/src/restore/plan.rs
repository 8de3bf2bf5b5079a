//! The plan: ask every node and the durable tier what they hold, then offer the newest checkpoint that is whole, and
//! say of newer ones why they are not. How long answers are waited for is in `settle`, what is offered in `offer`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_plan::LaneBlocks;
use storaged_wire::local::Reply;
use storaged_wire::peer::{HighMark, Holding, PeerMessage};
use storaged_wire::verdict::VERDICT_MIN_MS;
use storaged_wire::{Digest, ManifestBytes, Namespace, NodeName, Owner, Refusal, RunId, Step};

use super::cluster_view::ClusterView;
use super::holdings::{MANIFEST_WAIT_MS, unknown_manifest};
use super::opening::OpenRequest;
use super::reading::ManifestRequest;
use crate::api::{
    ConnId, DurableFault, DurableListing, DurablePolicy, Now, Output, QueryId, RequestId,
};
use crate::context::Context;
use crate::encode::Sessions;
use crate::limits;
use crate::restore::Restores;
use crate::trickle::durable_unavailable;

/// A survey of who holds what, under way. It has the caller's time.
#[derive(Debug, Clone)]
pub(crate) struct SurveyInProgress {
    pub id: RequestId,
    pub namespace: Namespace,
    pub owner: Owner,
    pub step: Option<Step>,
    pub began: Now,
    /// The end of the caller's time.
    pub wanted_by: Now,
    /// When it is answered at the latest.
    pub deadline: Now,
    pub survey: ClusterView,
    pub asked: Asked,
    /// Members that have said what they hold since their links came up, this node included.
    pub answered: BTreeSet<NodeName>,
    /// Manifests that members were asked for and have not answered, by member.
    pub manifests_due: BTreeMap<NodeName, u32>,
    pub tier: TierListing,
    /// The highest checkpoint that somebody knows to have been protected.
    pub mark: Option<HighMark>,
    /// That mark when the members were asked. Answers tell of different moments: what was protected after some of them
    /// answered, and let the others drop what came before, is in none of them.
    pub mark_asked: Option<HighMark>,
    /// What was protected then, as far as is known here. Marks alone do not tell: one that is made up hides all that come after it.
    pub protected_asked: Option<HighMark>,
    /// The highest checkpoint of which somebody has copied a shard to the durable tier.
    pub copied: Option<HighMark>,
    pub foreign_owner: bool,
    pub then: SurveyPurpose,
    /// When those that have answered are asked again, and how long after the last time.
    pub(super) refresh_at: Now,
    pub(super) refresh_after_ms: u64,
    /// Who gave a manifest last.
    pub(super) manifest_from: Option<NodeName>,
    pub(super) manifests_asked: BTreeSet<Digest>,
}

impl SurveyInProgress {
    /// When it must be looked at again, if nothing comes before.
    pub fn looked_at(&self, now: Now) -> Now {
        if self.wanted_by > now {
            self.wanted_by
        } else {
            self.deadline
        }
    }
}

/// Who is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    Everybody,
    /// Those who may hold a block that is of use.
    Only(BTreeSet<NodeName>),
}

impl Asked {
    pub fn has(&self, node: &NodeName) -> bool {
        match self {
            Self::Everybody => true,
            Self::Only(nodes) => nodes.contains(node),
        }
    }
}

/// How the durable tier stands in a survey.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TierListing {
    Absent,
    /// It is asked once those who hold blocks in RAM have answered and something is lacking: ten thousand ranks that open a
    /// shard each would list it ten thousand times.
    Unasked,
    Asked,
    Read,
    Unreadable(DurableFault),
}

impl TierListing {
    /// Whether nothing more is to be expected of it.
    pub fn is_settled(&self) -> bool {
        matches!(self, Self::Absent | Self::Read | Self::Unreadable(_))
    }
}

/// What the answer is for.
#[derive(Debug, Clone)]
pub(crate) enum SurveyPurpose {
    Offer(Older),
    Verdict,
    /// A restart from the step has failed, of this run if one was named.
    Failed(Option<RunId>),
    Verify,
    Drill,
    Manifest(Digest),
    Enclosures(ManifestRequest),
    Open(OpenRequest),
}

/// Whether a plan may go below what is known to have been protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Older {
    Refused,
    Allowed,
}

/// What a peer says of a job.
#[derive(Debug)]
pub(crate) struct PeerHoldings<'a> {
    pub owner: Option<Owner>,
    pub holdings: &'a [Holding],
    pub mark: Option<HighMark>,
    pub copied: Option<HighMark>,
}

/// Whom a survey is made for.
#[derive(Debug, Clone)]
pub(crate) struct Surveyor {
    pub id: RequestId,
    pub namespace: Namespace,
    pub owner: Owner,
}

impl Restores {
    /// A connection is gone: its plans and openings are over.
    pub(crate) fn forget_requests(
        &mut self,
        conn: ConnId,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        self.plans.retain(|_, plan| plan.id.conn != conn);
        self.manifest_waits
            .retain(|wait| wait.request.id.conn != conn);
        self.verifies
            .retain(|_, work| work.id().is_none_or(|id| id.conn != conn));
        self.forget_awaited_repairs(conn);
        self.drop_guests_of(conn, sessions, cx);
        let left = &self.openings;
        let goes_on = |id| left.values().any(|opening| opening.id == id);
        cx.early.forget_conn(conn, goes_on);
    }

    pub(crate) fn plan(
        &mut self,
        id: RequestId,
        step: Option<Step>,
        timeout_ms: u32,
        older: Older,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        self.survey_for(id, step, timeout_ms, SurveyPurpose::Offer(older), cx)
    }

    pub(crate) fn judge(
        &mut self,
        id: RequestId,
        timeout_ms: u32,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        self.survey_for(id, None, timeout_ms, SurveyPurpose::Verdict, cx)
    }

    /// A survey for whoever asks, if it has said who it is.
    pub(super) fn survey_for(
        &mut self,
        id: RequestId,
        step: Option<Step>,
        timeout_ms: u32,
        then: SurveyPurpose,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let surveyor = cx.surveyor(id)?;
        self.survey(surveyor, step, timeout_ms, then, cx);
        Ok(())
    }

    pub(crate) fn survey(
        &mut self,
        surveyor: Surveyor,
        step: Option<Step>,
        timeout_ms: u32,
        then: SurveyPurpose,
        cx: &mut Context,
    ) {
        cx.touch(&surveyor.namespace);
        let mut plan = cx.new_survey(surveyor, step, timeout_ms, then);
        self.ask_few(&mut plan, cx);
        self.ask_around(plan, cx);
    }

    /// A reader that opens a shard of a known checkpoint has use for its lane's blocks alone. Ten thousand ranks that each asked
    /// everybody would send twelve million questions.
    fn ask_few(&self, plan: &mut SurveyInProgress, cx: &Context) {
        let SurveyPurpose::Open(wish) = &plan.then else {
            return;
        };
        let Some(manifest) = self.known_manifest(wish.manifest, cx) else {
            return;
        };
        let lane = LaneBlocks::find(&manifest, wish.rank);
        let blocks = lane.and_then(|(lane, _)| LaneBlocks::of(&manifest, lane));
        let nodes: BTreeSet<NodeName> = match blocks {
            Some(blocks) => {
                let all = 0..blocks.blocks();
                all.filter_map(|block| blocks.node(block).cloned())
                    .collect()
            }
            None => {
                let shard = manifest.manifest().shard(wish.rank);
                shard.map(|shard| shard.node.clone()).into_iter().collect()
            }
        };
        plan.asked = Asked::Only(nodes);
        plan.survey.manifests.insert(wish.manifest, manifest);
    }

    pub(super) fn ask_around(&mut self, plan: SurveyInProgress, cx: &mut Context) {
        let query = QueryId(cx.fresh());
        if plan.tier == TierListing::Asked {
            list_tier(query, &plan, cx);
        }
        let asked = plan.asked.clone();
        self.plans.insert(query, plan);
        let peers: Vec<NodeName> = cx
            .peers
            .keys()
            .filter(|it| asked.has(it))
            .cloned()
            .collect();
        for peer in peers {
            self.ask_for_plan(query, &peer, cx);
        }
        self.advance_plan(query, cx);
    }

    pub(super) fn ask_for_plan(&mut self, query: QueryId, peer: &NodeName, cx: &mut Context) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        if !plan.asked.has(peer) {
            return;
        }
        plan.answered.remove(peer);
        let namespace = plan.namespace.clone();
        cx.send(
            peer,
            PeerMessage::HoldingsQuery {
                query: query.0,
                namespace,
            },
        );
        self.ask_by_name(query, peer, cx);
    }

    /// Rank 0's node may have planned with what the durable tier holds alone: no holding names it, and only who planned
    /// with it knows it.
    fn ask_by_name(&mut self, query: QueryId, peer: &NodeName, cx: &mut Context) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        let SurveyPurpose::Manifest(name) = plan.then else {
            return;
        };
        plan.manifests_asked.insert(name);
        *plan.manifests_due.entry(peer.clone()).or_default() += 1;
        let query = query.0;
        let manifest = name;
        cx.send(peer, PeerMessage::ManifestQuery { query, manifest });
    }

    pub(crate) fn plan_learns(
        &mut self,
        from: &NodeName,
        query: QueryId,
        told: PeerHoldings<'_>,
        cx: &mut Context,
    ) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        let PeerHoldings {
            owner,
            holdings,
            mark,
            copied,
        } = told;
        plan.answered.insert(from.clone());
        plan.mark = plan.mark.max(mark);
        plan.copied = plan.copied.max(copied);
        plan.foreign_owner |= owner.is_some_and(|owner| owner != plan.owner);
        plan.survey.add(from, holdings);
        let unknown: Vec<Digest> = holdings
            .iter()
            .map(|holding| holding.manifest)
            .filter(|name| !plan.survey.manifests.contains_key(name))
            .collect();
        for name in unknown {
            self.learn_manifest(query, name, from, cx);
        }
        self.advance_plan(query, cx);
    }

    fn learn_manifest(&mut self, query: QueryId, name: Digest, from: &NodeName, cx: &mut Context) {
        let known = cx.manifest_named(name);
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        if let Some(manifest) = known {
            plan.survey.manifests.insert(name, manifest);
        } else if plan.manifests_asked.insert(name) {
            *plan.manifests_due.entry(from.clone()).or_default() += 1;
            cx.send(
                from,
                PeerMessage::ManifestQuery {
                    query: query.0,
                    manifest: name,
                },
            );
        }
    }

    pub(crate) fn manifest_answered(
        &mut self,
        from: &NodeName,
        query: Option<QueryId>,
        manifest: Option<Arc<ManifestBytes>>,
        cx: &mut Context,
    ) {
        let name = manifest.as_ref().map(|manifest| manifest.name());
        let asked = |plan: &SurveyInProgress| {
            plan.manifests_due.contains_key(from)
                && name.is_some_and(|name| plan.manifests_asked.contains(&name))
        };
        let queries: Vec<QueryId> = match query {
            Some(query) => vec![query],
            None => {
                let plans = self.plans.iter().filter(|(_, plan)| asked(plan));
                plans.map(|(query, _)| *query).collect()
            }
        };
        for query in queries {
            self.plan_has_manifest(from, query, manifest.clone(), cx);
        }
    }

    fn plan_has_manifest(
        &mut self,
        from: &NodeName,
        query: QueryId,
        manifest: Option<Arc<ManifestBytes>>,
        cx: &mut Context,
    ) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        let due = plan.manifests_due.remove(from).unwrap_or(0);
        if due > 1 {
            plan.manifests_due.insert(from.clone(), due - 1);
        }
        // A manifest that does not have the digest it was asked by finds no use.
        if let Some(manifest) = manifest
            && plan.manifests_asked.contains(&manifest.name())
        {
            plan.manifest_from = Some(from.clone());
            plan.survey.manifests.insert(manifest.name(), manifest);
        }
        self.advance_plan(query, cx);
    }

    pub(crate) fn durable_listed(
        &mut self,
        query: QueryId,
        outcome: Result<DurableListing, DurableFault>,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        cx.tier_answered(outcome.as_ref().err());
        if let Some(slot) = self.listed_for.remove(&query) {
            return self.opening_listed(slot, outcome, sessions, cx);
        }
        let Some((namespace, step)) = self
            .plans
            .get(&query)
            .map(|plan| (plan.namespace.clone(), plan.step))
        else {
            return;
        };
        let outcome = outcome.map(|listing| match step {
            // Who asks for a step by its number gets it, damaged or not.
            Some(_) => listing,
            None => cx.with_missing(&namespace, cx.without_quarantined(listing)),
        });
        if let (Ok(listing), None) = (&outcome, step) {
            cx.damaged_listed(&namespace, listing);
        }
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        plan.tier = match outcome {
            Ok(listing) => {
                cx.keep_listed(listing.enclosures);
                for manifest in listing.manifests {
                    plan.foreign_owner |= manifest.manifest().owner != plan.owner;
                    plan.survey.add_durable(manifest);
                }
                plan.survey.set_aside = listing.set_aside;
                plan.survey.durable_run = listing.newest_run;
                TierListing::Read
            }
            Err(_) if planted!("failed_listing_is_empty") => TierListing::Read,
            Err(fault) => TierListing::Unreadable(fault),
        };
        self.advance_plan(query, cx);
    }

    pub(crate) fn expire_plans(&mut self, cx: &mut Context) {
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            self.advance_plan(query, cx);
        }
    }

    /// A peer that comes up while plans are being made is asked at once.
    pub(crate) fn plans_ask(&mut self, peer: &NodeName, cx: &mut Context) {
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            self.ask_for_plan(query, peer, cx);
        }
    }

    pub(crate) fn plans_forget(&mut self, node: &NodeName, cx: &mut Context) {
        for plan in self.plans.values_mut() {
            plan.answered.remove(node);
            plan.manifests_due.remove(node);
            plan.survey.forget(node);
        }
        self.expire_plans(cx);
    }

    pub(super) fn advance_plan(&mut self, query: QueryId, cx: &mut Context) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        let lacking: Vec<Digest> = plan.survey.without_manifest().collect();
        for name in lacking {
            let known = cx.manifest_named(name);
            if let (Some(plan), Some(manifest)) = (self.plans.get_mut(&query), known) {
                plan.survey.manifests.insert(name, manifest);
            }
        }
        self.ask_tier_if_needed(query, cx);
        let is_late =
            |plan: &SurveyInProgress| plan.deadline <= cx.now && !planted!("plans_never_expire");
        let Some(plan) = self.plans.get(&query) else {
            return;
        };
        if is_late(plan) {
            self.finish_plan(query, cx);
        } else if cx.can_be_torn(plan) && cx.is_torn(plan) {
            self.ask_again(query, cx);
        } else if cx.is_settled(plan) {
            self.finish_plan(query, cx);
        }
    }

    fn ask_tier_if_needed(&mut self, query: QueryId, cx: &mut Context) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        if plan.tier == TierListing::Unasked && cx.linked_answered(plan) && !cx.is_settled(plan) {
            plan.tier = TierListing::Asked;
            list_tier(query, plan, cx);
        }
    }

    fn finish_plan(&mut self, query: QueryId, cx: &mut Context) {
        let Some(plan) = self.plans.remove(&query) else {
            return;
        };
        let id = plan.id;
        match plan.then.clone() {
            SurveyPurpose::Open(wish) => {
                let all_answered = cx.everybody_answered(&plan);
                let mut survey = plan.survey;
                survey.note_durable(wish.manifest);
                survey.is_tier_unasked = plan.tier == TierListing::Unasked;
                survey.durable_fault = match plan.tier {
                    TierListing::Unreadable(fault) => Some(fault),
                    TierListing::Asked => Some(DurableFault::TimedOut("no listing in time".into())),
                    TierListing::Absent | TierListing::Unasked | TierListing::Read => None,
                };
                // What is here may have been let go since this node asked the others.
                survey.add(cx.me(), &cx.holdings_of(&plan.namespace));
                if all_answered && let Some(refusal) = cx.refused_as_let_go(id, &wish, &survey) {
                    return cx.reply(id, Reply::Refused(refusal));
                }
                self.open_surveyed(id, wish, survey, cx);
            }
            SurveyPurpose::Manifest(name) => self.manifest_surveyed(&plan, name, cx),
            SurveyPurpose::Enclosures(request) => {
                self.enclosures_surveyed(request, &plan, cx);
            }
            SurveyPurpose::Failed(run) => {
                if let Err(refusal) = cx.count_failed(&plan, run) {
                    cx.reply(id, Reply::Refused(refusal));
                }
            }
            SurveyPurpose::Verdict => {
                let reply = cx
                    .verdict(&plan)
                    .map_or_else(Reply::Refused, Reply::Verdict);
                cx.reply(id, reply);
            }
            SurveyPurpose::Drill => self.drill_surveyed(&plan, cx),
            SurveyPurpose::Offer(_) | SurveyPurpose::Verify => self.answer_plan(&plan, cx),
        }
    }

    fn answer_plan(&mut self, plan: &SurveyInProgress, cx: &mut Context) {
        match cx.choose(plan) {
            Ok(offer) => {
                let manifest = plan.survey.manifests[&offer.manifest].clone();
                self.remember_planned(manifest.clone());
                match plan.then {
                    SurveyPurpose::Verify => {
                        self.start_verify(plan.id, manifest, plan.deadline, cx)
                    }
                    _ => cx.reply(plan.id, Reply::Plan(offer)),
                }
            }
            Err(refusal) => cx.reply(plan.id, Reply::Refused(refusal)),
        }
    }

    fn manifest_surveyed(&mut self, plan: &SurveyInProgress, name: Digest, cx: &mut Context) {
        let id = plan.id;
        let outcome = match plan.survey.manifests.get(&name).cloned() {
            Some(manifest) => {
                self.remember_planned(manifest.clone());
                let request = ManifestRequest {
                    id,
                    manifest,
                    deadline: plan.deadline.max(cx.answer_by(MANIFEST_WAIT_MS)),
                };
                // Whoever gave the manifest has read it itself, most likely.
                let mut told_by = plan.survey.enclosing(name).to_vec();
                told_by.extend(plan.manifest_from.clone());
                self.read_manifest(request, told_by, cx)
            }
            None => Err(not_found(plan, name)),
        };
        if let Err(refusal) = outcome {
            cx.reply(id, Reply::Refused(refusal));
        }
    }
}

impl Context {
    pub(crate) fn surveyor(&self, id: RequestId) -> Result<Surveyor, Refusal> {
        let attached = self.attached(id)?;
        Ok(Surveyor {
            id,
            namespace: attached.namespace.clone(),
            owner: attached.owner,
        })
    }

    pub(super) fn new_survey(
        &self,
        of: Surveyor,
        step: Option<Step>,
        timeout_ms: u32,
        then: SurveyPurpose,
    ) -> SurveyInProgress {
        let mut survey = ClusterView::default();
        survey.add(self.me(), &self.holdings_of(&of.namespace));
        let mark = self.mark_of(&of.namespace);
        let wanted_by = self.answer_by(timeout_ms);
        SurveyInProgress {
            id: of.id,
            owner: of.owner,
            step,
            began: self.now,
            wanted_by,
            deadline: match &then {
                SurveyPurpose::Verdict if !planted!("hurried_verdicts") => {
                    wanted_by.max(self.answer_by(VERDICT_MIN_MS))
                }
                _ => wanted_by,
            },
            survey,
            answered: BTreeSet::from([self.me().clone()]),
            manifests_due: BTreeMap::new(),
            tier: match (&self.setup.durable, &then) {
                (DurablePolicy::Absent, _) | (_, SurveyPurpose::Drill) => TierListing::Absent,
                (_, SurveyPurpose::Open(_) | SurveyPurpose::Manifest(_)) => TierListing::Unasked,
                (_, SurveyPurpose::Enclosures(_)) => TierListing::Unasked,
                (_, SurveyPurpose::Failed(_)) => TierListing::Asked,
                // One listing per restart, at once: it is often what a plan waits for.
                (_, SurveyPurpose::Offer(_) | SurveyPurpose::Verdict | SurveyPurpose::Verify) => {
                    TierListing::Asked
                }
            },
            mark,
            mark_asked: mark,
            protected_asked: self.newest_protected(&of.namespace),
            refresh_at: self.now.plus(limits::SURVEY_REFRESH_MS),
            refresh_after_ms: limits::SURVEY_REFRESH_MS,
            copied: self.copied_of(&of.namespace),
            namespace: of.namespace,
            foreign_owner: false,
            asked: Asked::Everybody,
            then,
            manifest_from: None,
            manifests_asked: BTreeSet::new(),
        }
    }
}

fn list_tier(query: QueryId, plan: &SurveyInProgress, cx: &mut Context) {
    let trust = cx.trust_of(plan.id.conn, plan.owner);
    cx.out.push(Output::ListDurable {
        query,
        trust,
        namespace: plan.namespace.clone(),
        step: plan.step,
    });
}

/// What the tier may hold is not said to be nowhere.
fn not_found(plan: &SurveyInProgress, name: Digest) -> Refusal {
    let fault = match &plan.tier {
        TierListing::Absent | TierListing::Read => return unknown_manifest(name),
        TierListing::Unreadable(fault) => fault.clone(),
        TierListing::Unasked | TierListing::Asked => {
            DurableFault::TimedOut("no listing in time".into())
        }
    };
    durable_unavailable(&plan.namespace, &fault)
}
