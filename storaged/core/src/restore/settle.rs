//! How long a survey waits. A plan is settled once every member has answered, or a majority has and what it found is
//! at or above everything known to have been protected; peers whose links are up are given a moment even so, because
//! they may hold something newer that was only committed. Till then the caller's time is used: a link that is down may
//! come up, and a daemon that was paused has links that only look as if they were up.

use storaged_wire::local::Rung;
use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::plan::Source;
use storaged_wire::{CheckpointState, Digest, NodeName};

use super::opening::OpenRequest;
use super::plan::{Asked, Older, SurveyInProgress, SurveyPurpose};
use crate::context::Context;
use crate::failed_steps::Quarantine;
use crate::limits;

impl Context {
    pub(super) fn is_settled(&self, plan: &SurveyInProgress) -> bool {
        if self.everybody_answered(plan) {
            return true;
        }
        match &plan.then {
            SurveyPurpose::Manifest(name) => self.manifest_settles(plan, *name),
            SurveyPurpose::Enclosures(request) => {
                plan.survey.sources(&request.manifest).is_described()
            }
            SurveyPurpose::Failed(_) => {
                self.linked_answered(plan) && !self.candidates(plan).is_empty()
            }
            SurveyPurpose::Open(wish) => {
                self.linked_answered(plan) && self.opening_settles(plan, wish)
            }
            SurveyPurpose::Drill => self.linked_answered(plan),
            SurveyPurpose::Verdict if self.is_hurried(plan) => true,
            SurveyPurpose::Offer(_) | SurveyPurpose::Verdict | SurveyPurpose::Verify => {
                self.majority_answered(plan)
                    && self.linked_answered(plan)
                    && self.offer_settles(plan)
            }
        }
    }

    /// Whether the caller's time is over and those that can answer have.
    fn is_hurried(&self, plan: &SurveyInProgress) -> bool {
        plan.wanted_by <= self.now && self.linked_answered(plan) && plan.tier.is_settled()
    }

    /// Whether what answered is below what was protected, and something was protected while answers came in: they tell of
    /// different moments then, and what is whole may be in none of them.
    pub(super) fn is_torn(&self, plan: &SurveyInProgress) -> bool {
        let bar = self.bar(plan);
        let is_enough =
            |key: Option<CheckpointKey>| key.is_some_and(|key| self.is_high_enough(plan, &key));
        let heeds_marks = matches!(
            plan.then,
            SurveyPurpose::Offer(Older::Refused) | SurveyPurpose::Verdict
        );
        heeds_marks
            && plan.step.is_none()
            && (bar != plan.mark_asked || self.has_newer_protected(plan))
            && !planted!("torn_plans_believed")
            && !is_enough(self.newest_offer(plan))
    }

    fn has_newer_protected(&self, plan: &SurveyInProgress) -> bool {
        self.newest_protected(&plan.namespace) > plan.protected_asked
            && !planted!("made_up_marks_hide_steps")
    }

    /// Whether all have answered that will: without those that are lost, too.
    pub(super) fn can_be_torn(&self, plan: &SurveyInProgress) -> bool {
        let all_there = || {
            self.majority_answered(plan)
                && self.linked_answered(plan)
                && !planted!("torn_plans_wait_for_the_lost")
        };
        self.everybody_answered(plan) || all_there()
    }

    pub(super) fn everybody_answered(&self, plan: &SurveyInProgress) -> bool {
        let enough = || match &plan.asked {
            Asked::Everybody => plan.answered.len() >= self.setup.members.len(),
            Asked::Only(_) => true,
        };
        enough()
            && plan.manifests_due.is_empty()
            && plan.tier.is_settled()
            && self.silent(plan).is_empty()
    }

    /// Of those who are asked, the members that have not said what they hold.
    pub(super) fn silent(&self, plan: &SurveyInProgress) -> Vec<NodeName> {
        let members = self.setup.members.iter().map(|member| &member.name);
        members
            .filter(|name| plan.asked.has(name) && !plan.answered.contains(*name))
            .cloned()
            .collect()
    }

    pub(super) fn majority_answered(&self, plan: &SurveyInProgress) -> bool {
        match &plan.asked {
            Asked::Everybody => plan.answered.len() >= self.majority(),
            Asked::Only(nodes) => 2 * nodes.intersection(&plan.answered).count() > nodes.len(),
        }
    }

    /// Whether those whose links are up have answered, or have had the time to.
    pub(super) fn linked_answered(&self, plan: &SurveyInProgress) -> bool {
        let answered = |node: &NodeName| plan.answered.contains(node);
        let all = || match &plan.asked {
            // This node has answered too. Counted first: looking for each peer at every answer is quadratic.
            Asked::Everybody => {
                plan.answered.len() > self.peers.len() && self.peers.keys().all(answered)
            }
            Asked::Only(nodes) => nodes.iter().all(|node| answered(node) || !self.is_up(node)),
        };
        self.had_time(plan) || plan.manifests_due.is_empty() && all()
    }

    fn had_time(&self, plan: &SurveyInProgress) -> bool {
        self.now.since(plan.began) >= limits::QUERY_MAX_MS
    }

    /// What is whole in RAM and high enough does not wait for the durable tier, unless that may have something higher.
    fn offer_settles(&self, plan: &SurveyInProgress) -> bool {
        match self.newest_offer(plan) {
            Some(key) => {
                self.is_high_enough(plan, &key)
                    && (plan.tier.is_settled() || !self.may_be_below_durable(plan, &key))
            }
            None => plan.tier.is_settled() && self.knows_nothing(plan),
        }
    }

    /// Whether a newer checkpoint was copied at least in part, and whoever has made it durable may be gone without a word of that.
    fn may_be_below_durable(&self, plan: &SurveyInProgress, key: &CheckpointKey) -> bool {
        let newer = plan.copied.filter(|copied| *copied > key.mark());
        let counts = |copied| self.quarantine_of(plan, copied) == Quarantine::None;
        plan.step.is_none() && newer.is_some_and(counts) && !planted!("copies_not_waited_for")
    }

    /// Whether nobody who answered has ever heard of what is asked for.
    fn knows_nothing(&self, plan: &SurveyInProgress) -> bool {
        let mut keys = plan.survey.keys.values();
        match plan.step {
            Some(step) => !keys.any(|key| key.step == step),
            None => keys.next().is_none() && self.bar(plan).is_none(),
        }
    }

    /// What a plan must not go below.
    pub(super) fn bar(&self, plan: &SurveyInProgress) -> Option<HighMark> {
        plan.mark.max(self.mark_of(&plan.namespace))
    }

    /// The same without what restarts have failed from: the newest protected of the others that is whole, or would be if silent nodes
    /// answered. An older one in its place would take the job back unasked.
    pub(super) fn floor(&self, plan: &SurveyInProgress) -> Option<HighMark> {
        let bar = self.bar(plan)?;
        if self.quarantine_of(plan, bar) == Quarantine::None {
            return Some(bar);
        }
        let survey = &plan.survey;
        let silent = self.silent(plan).into_iter().collect();
        let may_be_had = |key: &CheckpointKey, name: Digest| {
            let manifest = survey.manifests.get(&name);
            // What a reader alone has kept of a step that all others let go stays in part for good.
            manifest.is_none_or(|manifest| survey.sources(manifest).is_whole())
                || !self.gained(plan, key, name, &silent).is_empty()
        };
        let is_protected = |name: &Digest| {
            let state = survey.states.get(name);
            state.is_some_and(|state| *state >= CheckpointState::Protected)
        };
        let mut newest_first = self.candidates(plan).into_iter();
        let found = newest_first.find(|(key, name)| is_protected(name) && may_be_had(key, *name));
        found
            .map(|(key, _)| key.mark())
            .filter(|_| !planted!("floor_falls_with_a_quarantine"))
    }

    /// Whoever asks for a step by its number gets it, whatever came after it.
    pub(super) fn is_high_enough(&self, plan: &SurveyInProgress, key: &CheckpointKey) -> bool {
        plan.step.is_some() || self.floor(plan) <= Some(key.mark()) || planted!("plan_goes_below")
    }

    fn manifest_settles(&self, plan: &SurveyInProgress, name: Digest) -> bool {
        let all = || self.majority_answered(plan) && self.linked_answered(plan);
        plan.survey.manifests.contains_key(&name) || plan.tier.is_settled() && all()
    }

    fn opening_settles(&self, plan: &SurveyInProgress, wish: &OpenRequest) -> bool {
        let Some(manifest) = plan.survey.manifests.get(&wish.manifest) else {
            return plan.tier.is_settled() && self.majority_answered(plan);
        };
        if wish.is_drill() {
            let known = plan
                .survey
                .can_do_without(&wish.withheld, manifest, wish.rank);
            return known || self.linked_answered(plan) || self.had_time(plan);
        }
        let source = plan.survey.sources(manifest).of(wish.rank, self.me());
        match source {
            Some(Source::Ram(node)) if node == *self.me() => wish.without != Some(Rung::OwnRam),
            Some(Source::Ram(_) | Source::Decode(_)) => true,
            // RAM would be quicker, but is not worth the caller's time: the tier has what was asked for by its name.
            Some(Source::Durable) => self.majority_answered(plan) || self.had_time(plan),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::local::{DurableWish, Reply, Request};
    use storaged_wire::peer::{NamespaceMark, PeerMessage};
    use storaged_wire::{CheckpointState, Rank, RefusalCode};

    use super::super::scene::{
        FIVE, asked, asked_first, asks, codes, greets, holds, holds_nothing, known, makes_room,
        manifest, opens, refused,
    };
    use crate::api::{DurableListing, DurablePolicy, Input, Now, Output};
    use crate::node::Node;
    use crate::testkit::{hear, hear_from_all, job, last_of, last_with_tier, owner};

    /// Asks for the newest step; the number of the question to all.
    fn asks_for_a_plan(node: &mut Node) -> u64 {
        let plan = Request::Plan {
            step: None,
            timeout_ms: 60_000,
            allow_older: false,
        };
        asked_first(&asks(node, 1, plan))
    }

    fn marked(step: u64) -> PeerMessage {
        PeerMessage::Marks(vec![NamespaceMark {
            namespace: job(),
            owner: owner(),
            mark: crate::testkit::at(step),
        }])
    }

    fn lists_tier(outputs: &[Output]) -> bool {
        let mut outputs = outputs.iter();
        outputs.any(|output| matches!(output, Output::ListDurable { .. }))
    }

    #[test]
    fn a_shard_is_looked_for_where_its_lane_lies_and_nowhere_else() {
        let mut node = last_of(&FIVE, 2, 1);
        let outputs = opens(&mut node);
        let asked = outputs.iter().filter_map(|output| match output {
            Output::Send {
                to,
                message: PeerMessage::HoldingsQuery { .. },
            } => Some(to.as_str()),
            _ => None,
        });
        assert_eq!(asked.collect::<Vec<_>>(), ["a", "b", "c"]);
        // It goes on when these have answered: with what `a` holds.
        let query = asked_first(&outputs);
        for (from, rank) in [("b", 1), ("c", 1)] {
            hear(&mut node, 1_001, from, holds(query, 1, rank));
        }
        let outputs = hear(&mut node, 1_002, "a", holds(query, 1, 0));
        assert!(makes_room(&outputs), "{outputs:?}");
    }

    #[test]
    fn the_durable_tier_is_listed_for_a_shard_only_once_memory_lacks_it() {
        for holder_lives in [true, false] {
            let mut node = last_with_tier(&FIVE, 2, 1, DurablePolicy::OnRequest);
            let outputs = opens(&mut node);
            assert!(!lists_tier(&outputs), "{outputs:?}");
            let query = asked_first(&outputs);
            for from in ["b", "c"] {
                let none = holds_nothing(query);
                assert!(!lists_tier(&hear(&mut node, 1_001, from, none)));
            }
            let outputs = if holder_lives {
                hear(&mut node, 1_002, "a", holds(query, 1, 0))
            } else {
                let gone = crate::testkit::name("a");
                node.handle(Now(1_002), Input::PeerDown { node: gone })
            };
            assert_eq!(
                (makes_room(&outputs), lists_tier(&outputs)),
                (holder_lives, !holder_lives),
                "{outputs:?}"
            );
        }
    }

    #[test]
    fn a_manifest_that_a_tier_which_cannot_be_read_may_hold_is_not_said_to_be_nowhere() {
        let mut node = last_with_tier(&["a", "b", "c"], 2, 1, DurablePolicy::OnRequest);
        greets(&mut node);
        let manifest = manifest(1).name();
        let outputs = asks(&mut node, 1, Request::GetManifest { manifest });
        let query = asked_first(&outputs);
        let mut all = Vec::new();
        for from in ["a", "b"] {
            let none = holds_nothing(query);
            all.extend(hear(&mut node, 1_001, from, none));
            let none = PeerMessage::ManifestAnswer {
                query: Some(query),
                manifest: None,
            };
            all.extend(hear(&mut node, 1_002, from, none));
        }
        let query = all.iter().find_map(|output| match output {
            Output::ListDurable { query, .. } => Some(*query),
            _ => None,
        });
        let outcome = Err(crate::api::DurableFault::TimedOut("hangs".into()));
        let query = query.expect("the tier is asked");
        let outputs = node.handle(Now(1_003), Input::DurableListed { query, outcome });
        assert_eq!(refused(&outputs), Some(RefusalCode::DurableUnavailable));
    }

    #[test]
    fn the_durable_tier_is_listed_when_memory_had_it_and_does_not_give_it() {
        let mut node = last_with_tier(&FIVE, 2, 1, DurablePolicy::OnRequest);
        let outputs = opens(&mut node);
        let query = asked_first(&outputs);
        let mut all = Vec::new();
        for (from, rank) in [("b", 1), ("c", 1), ("a", 0)] {
            all.extend(hear(&mut node, 1_001, from, holds(query, 1, rank)));
        }
        let made = all.iter().find_map(|output| match output {
            Output::CreateSlot { slot, .. } => Some(*slot),
            _ => None,
        });
        let slot = made.expect("a slot");
        all.extend(node.handle(Now(1_003), Input::SlotCreated { slot }));
        assert!(!lists_tier(&all));
        let gone = crate::testkit::name("a");
        let mut all = node.handle(Now(1_004), Input::PeerDown { node: gone });
        for second in 2..30 {
            all.extend(node.handle(Now(second * 1_000), Input::Tick));
        }
        let listed = all.iter().find_map(|output| match output {
            Output::ListDurable { query, .. } => Some(*query),
            _ => None,
        });
        let listed = listed.expect("the tier is asked");
        assert_eq!(refused(&all), None);
        let listing = DurableListing {
            manifests: vec![manifest(1).into()],
            ..DurableListing::default()
        };
        let outcome = Ok(listing);
        let outputs = node.handle(
            Now(31_000),
            Input::DurableListed {
                query: listed,
                outcome,
            },
        );
        let is_fetch = |output: &Output| matches!(output, Output::Fetch { .. });
        assert!(outputs.iter().any(is_fetch), "{outputs:?}");
    }

    /// `e` makes a plan while `a` is down: `b` and `c` say of step 1 what is enough to decode it.
    fn plans_without_a(node: &mut Node) -> u64 {
        for (at, from) in [(1, "b"), (2, "c")] {
            hear(node, at, from, marked(1));
        }
        let gone = crate::testkit::name("a");
        node.handle(Now(900), Input::PeerDown { node: gone });
        greets(node);
        asks_for_a_plan(node)
    }

    fn planned(outputs: &[Output]) -> Option<u64> {
        outputs.iter().find_map(|output| match output {
            Output::Reply {
                reply: Reply::Plan(plan),
                ..
            } => Some(plan.step.get()),
            _ => None,
        })
    }

    /// Answers of the nodes that are up, about this step.
    fn all_answer(node: &mut Node, query: u64, step: u64, at: u64) -> Vec<Output> {
        let none = holds_nothing(query);
        let mut all = hear(node, at, "d", none);
        for (from, said) in [("b", holds(query, step, 1)), ("c", codes(query, step))] {
            all.extend(hear(node, at, from, said));
            all.extend(hear(node, at, from, known(query, step)));
        }
        all
    }

    /// The coding of a step ends while a plan is made, and a node is down that will never answer.
    #[test]
    fn what_is_protected_while_a_plan_waits_for_a_lost_node_is_asked_for_at_once() {
        let mut node = last_of(&FIVE, 2, 1);
        let query = plans_without_a(&mut node);
        let mut outputs = hear(&mut node, 1_001, "b", marked(2));
        outputs.extend(all_answer(&mut node, query, 1, 1_002));
        assert_eq!(planned(&outputs), None, "{outputs:?}");
        let again = asked(&outputs).expect("they are asked again");
        assert!(again != query);
        let outputs = all_answer(&mut node, again, 2, 1_004);
        assert_eq!(planned(&outputs), Some(2), "{outputs:?}");
    }

    /// What is put back by a repair while a plan waits is found too.
    #[test]
    fn a_plan_that_waits_asks_those_again_that_have_answered() {
        let mut node = last_of(&FIVE, 2, 1);
        hear(&mut node, 1, "b", marked(2));
        let query = plans_without_a(&mut node);
        let outputs = all_answer(&mut node, query, 1, 1_002);
        assert_eq!(planned(&outputs), None, "{outputs:?}");
        let mut later = Vec::new();
        for second in 2..5 {
            later.extend(node.handle(Now(second * 1_000), Input::Tick));
        }
        assert_eq!(asked(&later), Some(query), "{later:?}");
        let outputs = all_answer(&mut node, query, 2, 5_001);
        assert_eq!(planned(&outputs), Some(2), "{outputs:?}");
    }

    #[test]
    fn answers_of_different_moments_are_asked_for_again() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        hear(&mut node, 1, "a", marked(1));
        node.handle(Now(900), Input::Tick);
        greets(&mut node);
        let query = asks_for_a_plan(&mut node);
        // `a` answers before step 2 is protected, `b` when step 1 has gone for it: each step is whole in neither answer.
        hear(&mut node, 1_001, "a", holds(query, 1, 0));
        hear(&mut node, 1_002, "a", known(query, 1));
        hear(&mut node, 1_005, "b", holds(query, 2, 1));
        let outputs = hear(&mut node, 1_006, "b", known(query, 2));
        let again = asked(&outputs);
        assert_eq!(refused(&outputs), None, "{outputs:?}");
        assert!(again.is_some_and(|again| again != query), "{outputs:?}");
    }

    /// One node says a mark that nothing reaches; a step is protected after some have answered.
    #[test]
    fn a_made_up_mark_hides_nothing_that_is_protected_while_a_plan_is_made() {
        // Its home nodes are others.
        const STEP: u64 = 4;
        let mut node = last_of(&FIVE, 2, 1);
        hear(&mut node, 1, "d", marked(1_000));
        greets(&mut node);
        let query = asks_for_a_plan(&mut node);
        let none = holds_nothing(query);
        for from in ["a", "b"] {
            hear(&mut node, 1_001, from, none.clone());
        }
        let committed = PeerMessage::Committed {
            manifest: manifest(STEP).bytes().to_vec().into(),
            durable: DurableWish::Never,
        };
        hear_from_all(&mut node, 1_002, &committed);
        let manifest = manifest(STEP).name();
        let protected = PeerMessage::Protected { manifest, bears: 1 };
        hear_from_all(&mut node, 1_003, &protected);
        hear(&mut node, 1_004, "c", none.clone());
        let outputs = hear(&mut node, 1_004, "d", none);
        assert_eq!(refused(&outputs), None, "{outputs:?}");
        assert!(asked(&outputs).is_some_and(|again| again != query));
    }

    /// A reader on a node that knows nothing of the checkpoint opens a shard; so many of those that answer call it protected.
    fn taken_up(sayers: u32) -> CheckpointState {
        let mut node = last_of(&FIVE, 2, 1);
        greets(&mut node);
        let said = |query: u64, rank: u32| {
            let mut message = holds(query, 1, rank);
            if let PeerMessage::Holdings { holdings, .. } = &mut message
                && rank >= sayers
            {
                holdings[0].state = CheckpointState::Committed;
            }
            message
        };
        let query = asks_for_a_plan(&mut node);
        for (from, rank) in [("a", 0), ("b", 1), ("c", 2), ("d", 3)] {
            hear(&mut node, 1_001, from, said(query, rank));
            hear(&mut node, 1_002, from, known(query, 1));
        }
        let open = Request::OpenShard {
            manifest: manifest(1).name(),
            rank: Rank::new(0),
            ranges: vec![],
            timeout_ms: 60_000,
            without: None,
            withheld: None,
            early: None,
        };
        let query = asked_first(&asks(&mut node, 2, open));
        for (from, rank) in [("c", 2), ("b", 1), ("a", 0)] {
            hear(&mut node, 1_003, from, said(query, rank));
        }
        let checkpoints = &node.context().checkpoints;
        checkpoints.values().next().expect("it is taken up").state
    }

    #[test]
    fn one_holder_alone_makes_nothing_protected_where_a_shard_is_opened() {
        assert_eq!(taken_up(2), CheckpointState::Protected);
        assert_eq!(taken_up(1), CheckpointState::Committed);
    }
}
