//! Sums that are checked on their way. In a session that follows a wrong result every node compares each partial sum that
//! it gets with the combination of the fingerprints of the chunks in it. Nobody passes a wrong sum on, so the one who
//! sent it is the one who made it wrong, or whose own chunk does not have the fingerprint that it said.

use storaged_codec::{Fingerprint, fingerprint};
use storaged_core::SessionWork;
use storaged_wire::peer::SessionFault;

use super::check::ClassPart;
use super::frame::Sums;
use super::stripe::MemberTask;

/// Compares the sums of an input of a stripe, if this session does that and all that is in them is known here.
pub(super) fn check_sums(
    task: &MemberTask,
    class: &ClassPart,
    input: usize,
    stripe: u64,
    sums: &Sums,
) -> Result<(), SessionFault> {
    let (Some(made), Some(edge)) = (class.made.get(input), class.inputs.get(input)) else {
        return Ok(());
    };
    for (at, row) in made.iter().enumerate() {
        let Some(expected) = expected(&task.work, row, stripe) else {
            continue;
        };
        let sum = sums.as_ref().and_then(|sums| sums.get(at));
        let got = sum.map_or(Fingerprint::ZERO, |sum| fingerprint(sum));
        if got != expected {
            let from = task.plan.links[edge.link].from;
            return Err(SessionFault::WrongBytes {
                node: task.work.members[from].clone(),
                reason: format!(
                    "expected sum {at} of stripe {stripe} to have the fingerprint {expected:?}, got {got:?}"
                ),
            });
        }
    }
    Ok(())
}

/// What a sum's fingerprint must be; none if that of a chunk in it is not known here.
fn expected(work: &SessionWork, row: &[u8], stripe: u64) -> Option<Fingerprint> {
    let at = usize::try_from(stripe).ok()?;
    let mut sum = Fingerprint::ZERO;
    for (source, coefficient) in row.iter().enumerate().filter(|(_, c)| **c != 0) {
        let proof = work.proofs.get(&source)?;
        if proof.prints.len() != proof.leaves.len() {
            return None;
        }
        // Beyond the shard's end all is zeros.
        if let Some(print) = proof.prints.get(at) {
            sum.fold(*coefficient, print);
        }
    }
    Some(sum)
}
