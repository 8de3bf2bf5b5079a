//! Members that are asked again while a survey waits: those that are silent, those whose answers are old, and all once their answers tell of
//! different moments.

use storaged_wire::NodeName;
use storaged_wire::peer::PeerMessage;

use super::plan::{SurveyInProgress, SurveyPurpose, Surveyor};
use crate::api::QueryId;
use crate::context::Context;
use crate::restore::Restores;

impl Restores {
    /// Everybody has answered, and all that is above the offer may have been replaced while they did: everybody is asked
    /// once more, under another number, so that late answers to the old question do not count.
    pub(super) fn ask_again(&mut self, query: QueryId, cx: &mut Context) {
        let Some(plan) = self.plans.remove(&query) else {
            return;
        };
        let mark = cx.bar(&plan);
        let of = Surveyor {
            id: plan.id,
            namespace: plan.namespace,
            owner: plan.owner,
        };
        let mut fresh = cx.new_survey(of, plan.step, 0, plan.then);
        fresh.survey.manifests = plan.survey.manifests;
        self.ask_around(
            SurveyInProgress {
                began: plan.began,
                wanted_by: plan.wanted_by,
                deadline: plan.deadline,
                foreign_owner: plan.foreign_owner,
                mark,
                mark_asked: mark,
                ..fresh
            },
            cx,
        );
    }

    /// Answers may be lost while links come up: whoever has not answered is asked again.
    pub(crate) fn repeat_plans(&mut self, cx: &mut Context) {
        let peers: Vec<NodeName> = cx.peers.keys().cloned().collect();
        for query in self.plans.keys().copied().collect::<Vec<_>>() {
            let Some(plan) = self.plans.get_mut(&query) else {
                continue;
            };
            plan.manifests_asked.clear();
            let due = std::mem::take(&mut plan.manifests_due);
            let answered = plan.answered.clone();
            let asked = plan.asked.clone();
            let silent = |peer: &&NodeName| due.contains_key(*peer) || !answered.contains(*peer);
            for peer in peers.iter().filter(|it| asked.has(it)).filter(silent) {
                self.ask_for_plan(query, peer, cx);
            }
            self.refresh_plan(query, cx);
        }
    }

    /// A plan that waits for a lost node waits on what the others said in the meantime: blocks that a coding or a repair has put there since
    /// would be found by nobody. They are asked again, less and less often, because ten thousand may be. What they said counts until
    /// they answer.
    fn refresh_plan(&mut self, query: QueryId, cx: &mut Context) {
        let Some(plan) = self.plans.get_mut(&query) else {
            return;
        };
        let is_offer = matches!(plan.then, SurveyPurpose::Offer(_) | SurveyPurpose::Verdict);
        if !is_offer || cx.now < plan.refresh_at || planted!("early_answers_stay") {
            return;
        }
        plan.refresh_after_ms *= 2;
        plan.refresh_at = cx.now.plus(plan.refresh_after_ms);
        let namespace = plan.namespace.clone();
        let own = cx.holdings_of(&namespace);
        plan.survey.add(cx.me(), &own);
        // Those whose links have gone since are not among them.
        let answered: Vec<NodeName> = plan.answered.iter().cloned().collect();
        let me = cx.me().clone();
        for peer in answered.iter().filter(|peer| **peer != me) {
            let namespace = namespace.clone();
            let query = query.0;
            cx.send(peer, PeerMessage::HoldingsQuery { query, namespace });
        }
        self.advance_plan(query, cx);
    }
}
