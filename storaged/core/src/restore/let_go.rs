//! A step that was let go of for a newer one between its plan and the opening of its shards. Nothing of it was lost: whoever planned
//! it asks for another plan. What is lost is said to be lost, also where something newer is safe: it may have been there to stay.

use storaged_wire::peer::{CheckpointKey, SessionFault};
use storaged_wire::{ManifestBytes, Rank, Refusal, RefusalCode, SlotId};

use super::cluster_view::ClusterView;
use super::opening::{OpenRequest, ShardOpen};
use super::plan::SurveyPurpose;
use super::source_fault::SourceFault;
use crate::api::RequestId;
use crate::context::Context;
use crate::limits;
use crate::restore::Restores;

impl Restores {
    /// Whoever was to give a shard does not have it any more, and this node has not heard of anything newer: all are asked once more,
    /// because what they said is of before. Whether they are.
    pub(super) fn asks_once_more(&mut self, slot: SlotId, cx: &mut Context) -> bool {
        let Some(opening) = self.openings.get(&slot) else {
            return false;
        };
        let Ok(surveyor) = cx.surveyor(opening.id) else {
            return false;
        };
        if opening.is_released {
            return false;
        }
        if !opening.may_be_let_go() || cx.was_let_go_while_opened(opening) {
            return false;
        }
        let step = opening.manifest.manifest().step;
        let left_ms = opening.deadline.since(cx.now).min(limits::QUERY_MAX_MS);
        let wish = OpenRequest {
            manifest: opening.manifest.name(),
            rank: opening.rank,
            ranges: opening.ranges.clone(),
            all_by_ranges: opening.all_by_ranges,
            deadline: opening.deadline,
            without: None,
            withheld: Default::default(),
            healed_in_vain: false,
            looked_anew: true,
        };
        self.openings.remove(&slot);
        cx.drop_slot(slot);
        let timeout_ms = u32::try_from(left_ms).unwrap_or(u32::MAX);
        let then = SurveyPurpose::Open(wish);
        self.survey(surveyor, Some(step), timeout_ms, then, cx);
        true
    }
}

impl ShardOpen {
    /// Whether nothing else was found than that it is not there any more, by those who said before that it is.
    fn may_be_let_go(&self) -> bool {
        let is_absent = |fault: &SourceFault| {
            use SessionFault::{Aborted, NoBlocks, NoManifest};
            matches!(
                fault,
                SourceFault::Session(_, NoManifest | NoBlocks | Aborted)
            )
        };
        let is_sound = self.survey.durable_fault.is_none() && self.faults.iter().all(is_absent);
        is_sound && !self.faults.is_empty() && !self.is_drill && !self.looked_anew
    }
}

impl Context {
    /// Whether a shard that cannot be had any more was let go for a newer step. Nodes that are down, silent or were restarted without
    /// their RAM have lost theirs: what the others have let go must have been enough without them.
    pub(super) fn is_let_go(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
        survey: &ClusterView,
    ) -> bool {
        let name = manifest.name();
        let key = CheckpointKey::of(manifest.manifest());
        let by_this_node =
            || self.ends.named(name).is_some() && self.manifest_named(name).is_none();
        let has_moved_on =
            |node: &_| self.is_believed(node) && survey.has_moved_on(node, &key, self.safe_state());
        self.has_given_way(&key, survey)
            && (by_this_node() || survey.was_enough(manifest, rank, has_moved_on))
    }

    /// The refusal of a shard that nobody who was asked knows any more, if it was let go: no room need be made for it.
    pub(super) fn refused_as_let_go(
        &self,
        id: RequestId,
        wish: &OpenRequest,
        survey: &ClusterView,
    ) -> Option<Refusal> {
        let manifest = survey.manifests.get(&wish.manifest)?;
        // Whoever may not read it is told that.
        self.check_readable(id, manifest).ok()?;
        let is_gone =
            survey.is_unknown(wish.manifest) && self.is_let_go(manifest, wish.rank, survey);
        is_gone.then(|| let_go(&CheckpointKey::of(manifest.manifest()), wish.rank, ""))
    }

    /// The same of what an opening looks for, as it stands now: whoever was to give some of it and did not has none.
    pub(super) fn was_let_go_while_opened(&self, opening: &ShardOpen) -> bool {
        if opening.is_drill {
            return false;
        }
        let manifest = opening.manifest.as_ref();
        let mut survey = opening.survey.clone();
        survey.add(self.me(), &self.holdings_of(&manifest.manifest().namespace));
        for node in &opening.excluded {
            survey.has_none_of(manifest.name(), node);
        }
        self.is_let_go(manifest, opening.rank, &survey)
    }

    /// Whether a newer step has taken the place of one that is not to stay beside it. One peer may have made it up: this node knows of
    /// it, or two say so.
    pub(super) fn has_given_way(&self, key: &CheckpointKey, survey: &ClusterView) -> bool {
        if self.is_to_stay(key) || planted!("retired_steps_are_lost") {
            return false;
        }
        let sayers = survey.told_of_newer(key, self.safe_state());
        let words = sayers.filter(|node| *node != self.me() && self.is_believed(node));
        let newest = self.newest_safe(&key.namespace);
        newest.is_some_and(|newest| newest > *key) || words.count() >= limits::WORDS_NEEDED
    }

    /// Whether it is not let go for a newer one: it is pinned, kept, or on its way to the durable tier. The newest that this node has
    /// heard of stays here as such, whatever the others have.
    fn is_to_stay(&self, key: &CheckpointKey) -> bool {
        let newest = self.newest_safe(&key.namespace);
        let is_kept_as_newest = self.setup.keep_steps == 1 && newest.as_ref() == Some(key);
        let is_kept = self.kept_steps(&key.namespace).contains(key) && !is_kept_as_newest;
        let here = self.checkpoints.get(key);
        is_kept || self.is_pinned(key) || here.is_some_and(|it| self.is_due(it))
    }
}

/// What a reader is told of a shard that was let go; what came of the tries to have it.
pub(super) fn let_go(key: &CheckpointKey, rank: Rank, tried: &str) -> Refusal {
    Refusal::new(
        RefusalCode::NoCheckpoint,
        format!(
            "step {} was let go for a newer one since it was planned, the shard of rank {rank} with it; tried: [{tried}]; ask for another plan",
            key.step
        ),
    )
}

#[cfg(test)]
mod tests {
    use storaged_wire::peer::{PeerMessage, SessionFault};
    use storaged_wire::{NodeName, RefusalCode, SessionId, SlotId};

    use super::super::scene::{
        FIVE, asked, asked_first, codes, holds, holds_nothing, known, makes_room, manifest, opens,
        refused,
    };
    use crate::api::{Input, Now, Output};
    use crate::node::Node;
    use crate::testkit::{committed, hear, hear_from_all, last_of};

    fn made(outputs: &[Output]) -> Option<SlotId> {
        outputs.iter().find_map(|output| match output {
            Output::CreateSlot { slot, .. } => Some(*slot),
            _ => None,
        })
    }

    fn proposed(outputs: &[Output]) -> Option<(NodeName, SessionId)> {
        outputs.iter().find_map(|output| match output {
            Output::Send {
                to,
                message: PeerMessage::Propose(record),
            } => Some((to.clone(), record.session)),
            _ => None,
        })
    }

    /// Those who are asked answer; what comes of it, with the slot made.
    fn all_say(node: &mut Node, at: u64, said: [PeerMessage; 3]) -> Vec<Output> {
        let mut all = Vec::new();
        for (from, said) in ["a", "b", "c"].into_iter().zip(said) {
            all.extend(hear(node, at, from, said));
        }
        if let Some(slot) = made(&all) {
            all.extend(node.handle(Now(at), Input::SlotCreated { slot }));
        }
        all
    }

    fn all_hold(query: u64, step: u64) -> [PeerMessage; 3] {
        [
            holds(query, step, 0),
            holds(query, step, 1),
            codes(query, step),
        ]
    }

    /// All hold step 1 when `e` asks them for rank 0's shard, and none of them any more when it wants to have it.
    fn let_go_when_proposed(node: &mut Node) -> Vec<Output> {
        let query = asked_first(&opens(node));
        let mut outputs = all_say(node, 1_001, all_hold(query, 1));
        assert!(proposed(&outputs).is_some(), "{outputs:?}");
        while let Some((to, session)) = proposed(&outputs) {
            let fault = SessionFault::NoManifest;
            let failed = PeerMessage::Failed { session, fault };
            outputs = hear(node, 1_002, to.as_str(), failed);
        }
        outputs
    }

    /// `e` has not heard that step 2 took its place. When it asks once more they say this.
    fn ends_with(said: impl Fn(u64) -> [PeerMessage; 3]) -> Option<RefusalCode> {
        let mut node = last_of(&FIVE, 2, 1);
        let outputs = let_go_when_proposed(&mut node);
        assert_eq!(refused(&outputs), None, "{outputs:?}");
        let again = asked(&outputs).expect("they are asked once more");
        hear(&mut node, 1_003, "a", known(again, 2));
        let mut outputs = all_say(&mut node, 1_003, said(again));
        if refused(&outputs).is_none() {
            let outputs_of = hear(&mut node, 1_004, "a", known(again, 2));
            let slot = made(&outputs_of);
            outputs.extend(outputs_of);
            let created = slot.map(|slot| Input::SlotCreated { slot });
            outputs.extend(created.map_or_else(Vec::new, |it| node.handle(Now(1_004), it)));
        }
        assert_eq!(asked(&outputs), None, "once is enough: {outputs:?}");
        refused(&outputs)
    }

    #[test]
    fn what_was_let_go_before_a_session_began_is_no_lost_step() {
        assert_eq!(
            ends_with(|query| all_hold(query, 2)),
            Some(RefusalCode::NoCheckpoint)
        );
    }

    /// `c` was restarted: what `a` and `b` have let go would have been enough without it.
    #[test]
    fn who_has_lost_its_ram_makes_no_lost_step_of_what_others_have_let_go() {
        let without_c = |query| [holds(query, 2, 0), holds(query, 2, 1), holds_nothing(query)];
        assert_eq!(ends_with(without_c), Some(RefusalCode::NoCheckpoint));
    }

    #[test]
    fn one_nodes_word_of_a_newer_step_does_not_say_of_a_lost_one_that_it_was_let_go() {
        let by_one = |query| {
            [
                holds(query, 2, 0),
                holds_nothing(query),
                holds_nothing(query),
            ]
        };
        assert_eq!(ends_with(by_one), Some(RefusalCode::TooManyLost));
    }

    /// They were restarted, and have been told of the newer step.
    #[test]
    fn who_has_nothing_of_the_newer_step_has_not_let_go_of_the_older_one() {
        let told = |query| {
            let mut told = holds(query, 2, 0);
            if let PeerMessage::Holdings { holdings, .. } = &mut told {
                holdings[0].shards.clear();
            }
            told
        };
        let all = |query| [told(query), told(query), holds_nothing(query)];
        assert_eq!(ends_with(all), Some(RefusalCode::TooManyLost));
    }

    /// A step whose home nodes are others than `e`.
    const NEWER: u64 = 4;

    /// `e` hears that it is protected.
    fn hears_of_the_newer_step(node: &mut Node, at: u64) -> Vec<Output> {
        let newer = manifest(NEWER);
        let mut all = hear_from_all(node, at, &committed(&newer));
        let protected = PeerMessage::Protected {
            manifest: newer.name(),
            bears: 1,
        };
        all.extend(hear_from_all(node, at, &protected));
        all
    }

    /// The reader's own node lets it go while a session fills the slot.
    #[test]
    fn what_this_node_lets_go_while_it_is_opened_is_no_lost_step() {
        let mut node = last_of(&FIVE, 2, 1);
        let query = asked_first(&opens(&mut node));
        let outputs = all_say(&mut node, 1_001, all_hold(query, 1));
        assert!(proposed(&outputs).is_some(), "{outputs:?}");
        let outputs = hears_of_the_newer_step(&mut node, 1_002);
        assert_eq!(
            refused(&outputs),
            Some(RefusalCode::NoCheckpoint),
            "{outputs:?}"
        );
    }

    /// `a` says first that it holds step 1, and then that it holds the newer one; so does this node.
    #[test]
    fn what_was_said_before_it_was_let_go_does_not_count() {
        let mut node = last_of(&FIVE, 2, 1);
        let query = asked_first(&opens(&mut node));
        hear(&mut node, 1_001, "a", holds(query, 1, 0));
        hears_of_the_newer_step(&mut node, 1_002);
        let outputs = all_say(&mut node, 1_003, all_hold(query, NEWER));
        assert_eq!(
            (refused(&outputs), makes_room(&outputs)),
            (Some(RefusalCode::NoCheckpoint), false),
            "{outputs:?}"
        );
    }
}
