//! What a parity chunk must be before it is kept: its fingerprint is the combination of those of the chunks that it
//! protects. This is what makes a parity set *verified* when it is made, whoever computed it and on what basis.

use std::sync::Arc;

use storaged_codec::{Fingerprint, fingerprint};
use storaged_wire::peer::SessionFault;

/// The fingerprints of a parity set.
#[derive(Debug)]
pub(crate) struct ParityCheck {
    expected: Arc<[Fingerprint]>,
}

impl ParityCheck {
    /// Of a set of this many stripes.
    pub fn new(expected: Arc<[Fingerprint]>, stripes: usize) -> Result<Self, SessionFault> {
        match expected.len() == stripes {
            true => Ok(Self { expected }),
            // Without them nothing can be verified, and what is not is not kept.
            false => Err(SessionFault::NoBlocks),
        }
    }

    /// Whether these are the bytes of a stripe's chunk, and their fingerprint if they are.
    pub fn bytes(&self, stripe: u64, bytes: &[u8]) -> Result<Fingerprint, SessionFault> {
        let print = fingerprint(bytes);
        self.print(stripe, Some(print)).map(|()| print)
    }

    /// Whether a chunk that had this fingerprint when it was kept, or none of zeros, is that of a stripe.
    pub fn print(&self, stripe: u64, kept: Option<Fingerprint>) -> Result<(), SessionFault> {
        let expected = usize::try_from(stripe)
            .ok()
            .and_then(|at| self.expected.get(at));
        let expected = *expected.ok_or(SessionFault::NoBlocks)?;
        let got = kept.unwrap_or(Fingerprint::ZERO);
        match got == expected {
            true => Ok(()),
            false => Err(SessionFault::WrongResult(format!(
                "expected the parity of stripe {stripe} to have the fingerprint {expected:?}, got {got:?}"
            ))),
        }
    }
}
