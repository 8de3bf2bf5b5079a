//! Leading an encode after parity came out wrong. The lane is coded again, in full and with every sum on its way checked
//! by the node that gets it, so that the first one that gets a wrong sum names its sender. Whoever was named is from then
//! on only asked for its own chunks, as they are, and passes nothing on that others have made.

use std::collections::BTreeSet;

use storaged_wire::peer::{Lane, SessionFault, SumChecks};
use storaged_wire::shape::EncodeShape;
use storaged_wire::{Digest, NodeName};

use super::session::{LanePlace, LaneProgress, LedSession, SessionGoal};
use crate::encode::Sessions;
use crate::restore::is_wrong;

impl LaneProgress {
    /// Takes in why a session of the lane failed. Says whether it may be tried again at once.
    pub(super) fn learn(&mut self, purpose: &SessionGoal, fault: &SessionFault) -> bool {
        let was_wary = self.wary;
        match purpose {
            SessionGoal::Heal(_) => {
                self.wary |= is_wrong(fault);
                self.suspects.extend(fault.blamed().cloned());
                false
            }
            SessionGoal::Encode => {
                self.wary |= is_wrong(fault);
                // A basis may be what is wrong, and differences cannot be checked by what whole chunks must be.
                self.in_full |= self.wary || *fault == SessionFault::NoBasis;
                if let SessionFault::WrongBytes { node, .. } = fault {
                    self.suspects.insert(node.clone());
                }
                *fault == SessionFault::NoBasis || self.wary != was_wary
            }
            SessionGoal::Open(_) => false,
        }
    }

    /// All is well again.
    pub(super) fn trust(&mut self) {
        self.suspects.clear();
        self.failures = 0;
        self.wary = false;
    }
}

impl Sessions {
    /// What the members of an encode of this lane compare.
    pub(super) fn checks_of(&self, manifest: Digest, lane: Lane) -> SumChecks {
        match self.lanes.get(&LanePlace { manifest, lane }) {
            Some(progress) if progress.wary => SumChecks::Every,
            _ => SumChecks::Parity,
        }
    }

    /// The shape of an encode in which no member that sent wrong bytes passes on what others have made.
    pub(super) fn around_suspects(&self, led: &LedSession) -> Option<EncodeShape> {
        let progress = self.lanes.get(&led.place())?;
        match led.purpose {
            SessionGoal::Encode => around(&progress.suspects, &led.members, led.sources),
            _ => None,
        }
    }
}

/// The sources that are not suspected take turns at gathering chunks as they are, and send each sum straight to its
/// keeper. None if no member is suspected, or all sources are.
fn around(
    suspects: &BTreeSet<NodeName>,
    members: &[NodeName],
    sources: usize,
) -> Option<EncodeShape> {
    if !members.iter().any(|member| suspects.contains(member)) {
        return None;
    }
    let roots: Vec<u32> = (0u32..)
        .zip(members.iter().take(sources))
        .filter(|(_, node)| !suspects.contains(*node))
        .map(|(source, _)| source)
        .collect();
    (!roots.is_empty()).then_some(EncodeShape::GatherAtSources { roots })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        NodeName::new(name).expect("a name")
    }

    fn wrong_bytes(by: &str) -> SessionFault {
        SessionFault::WrongBytes {
            node: node(by),
            reason: String::new(),
        }
    }

    #[test]
    fn after_wrong_parity_the_lane_is_coded_in_full_and_warily_at_once() {
        let mut progress = LaneProgress::default();
        let wrong = SessionFault::WrongResult("stripe 3".into());
        assert!(progress.learn(&SessionGoal::Encode, &wrong));
        assert!(progress.wary && progress.in_full && progress.suspects.is_empty());
        // Once it is, trying again at once would only be busy.
        assert!(!progress.learn(&SessionGoal::Encode, &wrong));
        assert!(!progress.learn(&SessionGoal::Encode, &wrong_bytes("b")));
        assert_eq!(progress.suspects, [node("b")].into());
        progress.trust();
        assert!(!progress.wary && progress.suspects.is_empty());
    }

    #[test]
    fn whoever_was_named_passes_nothing_on() {
        let members = ["a", "b", "c", "p", "q"].map(node);
        let shape = |suspects: &[&str]| {
            let suspects = suspects.iter().map(|name| node(name)).collect();
            around(&suspects, &members, 3)
        };
        let gathers = |roots: &[u32]| {
            let roots = roots.to_vec();
            Some(EncodeShape::GatherAtSources { roots })
        };
        assert_eq!(shape(&[]), None);
        assert_eq!(shape(&["z"]), None);
        assert_eq!(shape(&["b"]), gathers(&[0, 2]));
        // From a keeper nobody takes anything in a gather at the sources.
        assert_eq!(shape(&["q"]), gathers(&[0, 1, 2]));
        assert_eq!(shape(&["a", "b", "c"]), None);
    }

    #[test]
    fn silence_makes_nobody_suspect_of_lying() {
        let mut progress = LaneProgress::default();
        let silent = SessionFault::Neighbour {
            node: node("b"),
            reason: "sent nothing whole".into(),
        };
        assert!(!progress.learn(&SessionGoal::Encode, &silent));
        assert!(!progress.wary && !progress.in_full && progress.suspects.is_empty());
        assert!(progress.learn(&SessionGoal::Encode, &SessionFault::NoBasis));
        assert!(progress.in_full && !progress.wary);
    }

    #[test]
    fn a_repair_asks_others_than_whoever_it_was_blamed_on() {
        let mut progress = LaneProgress::default();
        let heal = SessionGoal::Heal(vec![node("a")]);
        assert!(!progress.learn(&heal, &wrong_bytes("b")));
        assert!(progress.wary && !progress.in_full);
        assert_eq!(progress.suspects, [node("b")].into());
    }
}
