//! What nodes tell, judged as it is told.

use storaged_core::Note;
use storaged_wire::CheckpointState;
use storaged_wire::peer::SessionFault;

use super::{Limits, World};
use crate::testkit::index;

impl World {
    /// An honest node is never accused of wrong bytes.
    pub(super) fn only_liars_are_accused(&mut self, fault: &SessionFault) {
        if let SessionFault::WrongBytes { node, .. } = fault {
            assert_eq!(Some(index(node)), self.scene.limits.liar, "{fault:?}");
            self.scene.liar_named += 1;
        }
    }

    pub(super) fn judge_note(&mut self, note: &Note) {
        if self.scene.month.is_some() {
            return self.note_in_month(note);
        }
        match note {
            // Whoever says anything accuses anybody.
            Note::SessionFailed { node, .. }
                if self.scene.limits.byzantine == Some(index(node)) => {}
            Note::SessionFailed { fault, .. } => self.only_liars_are_accused(fault),
            Note::ShapeChosen { .. } => self.scene.shapes += 1,
            Note::Replanned { node, .. } => {
                *self.scene.replans.entry(index(node)).or_default() += 1
            }
            Note::PeerFault { node, reason } => {
                let Limits {
                    fibber, byzantine, ..
                } = self.scene.limits;
                let known = Some(index(node));
                assert!(known == fibber || known == byzantine, "{node} {reason}");
                self.scene.refused_reports += 1;
            }
            Note::FalseStatement { node, statement } => {
                let liar = self.scene.limits.byzantine;
                assert_eq!(Some(index(node)), liar, "{statement}");
                self.scene.byzantine.named += 1;
            }
            _ => {}
        }
        let Note::State { key, state } = note else {
            return;
        };
        if *state == CheckpointState::Retired {
            return;
        }
        let newest = self.scene.newest.get(state);
        if newest < Some(key) {
            if *state == CheckpointState::Protected {
                let before = newest.cloned();
                self.scene.found_protected.push((before, self.now));
            }
            self.scene.newest.insert(*state, key.clone());
        }
        // One home node's word may be false: it costs nobody anything (`honest_states_are_true` has what would).
        if *state >= CheckpointState::Committed && self.scene.limits.byzantine.is_none() {
            self.scene.job.was_sealed_whole(key);
        }
    }
}
