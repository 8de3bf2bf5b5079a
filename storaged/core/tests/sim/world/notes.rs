//! What nodes tell, judged as it is told.

use storaged_core::Note;
use storaged_wire::CheckpointState;
use storaged_wire::peer::SessionFault;

use super::World;
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
            Note::SessionFailed { fault, .. } => self.only_liars_are_accused(fault),
            Note::ShapeChosen { .. } => self.scene.shapes += 1,
            Note::Replanned { node, .. } => {
                *self.scene.replans.entry(index(node)).or_default() += 1
            }
            Note::PeerFault { node, reason } => {
                assert_eq!(Some(index(node)), self.scene.limits.fibber, "{reason}");
                self.scene.refused_reports += 1;
            }
            _ => {}
        }
        let Note::State { key, state } = note else {
            return;
        };
        if *state == CheckpointState::Retired {
            return;
        }
        let newest = self
            .scene
            .newest
            .entry(*state)
            .or_insert_with(|| key.clone());
        if *key > *newest {
            *newest = key.clone();
        }
        if *state >= CheckpointState::Committed {
            self.scene.job.was_sealed_whole(key);
        }
    }
}
