//! The claim of a run in the durable tier: who took a number, so that nobody else is given it.

use minicbor::{Decode, Encode};

use crate::ids::{Namespace, Owner};
use crate::run::RunId;

/// One claim. Its object is created only if its number is free, and never changed.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct RunClaim {
    /// Format version, [`RunClaim::VERSION`].
    #[n(0)]
    pub version: u16,
    /// The job.
    #[n(1)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(2)]
    pub owner: Owner,
    /// The run that has the number.
    #[n(3)]
    pub run: RunId,
}

impl RunClaim {
    /// The version that this code writes and reads.
    pub const VERSION: u16 = 1;

    /// The claim of a run.
    pub fn new(namespace: Namespace, owner: Owner, run: RunId) -> Self {
        Self {
            version: Self::VERSION,
            namespace,
            owner,
            run,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::{decode, encode};

    #[test]
    fn the_bytes_of_a_claim_are_pinned() {
        let namespace = Namespace::new("job").unwrap();
        let owner = Owner::of_token(b"t");
        let claim = RunClaim::new(namespace, owner, RunId::with_identity(7, 0xa6));
        let bytes = encode(&claim);
        let digest = encode(&owner);
        let expected = [
            &[0x84, 1, 0x63, b'j', b'o', b'b'][..],
            &digest,
            &[0x82, 7, 0x18, 0xa6],
        ];
        assert_eq!(bytes, expected.concat());
        assert_eq!(decode::<RunClaim>("claim", &bytes).unwrap(), claim);
    }
}
