//! A run: one incarnation of the job's trainers. Its number orders it and fences off every lower one; its identity
//! tells it from another of the same number, so that two of them are never mixed.

use std::fmt;
use std::str::FromStr;

use minicbor::data::Type;
use minicbor::{Decode, Encode};
use thiserror::Error;

/// One incarnation of the job's trainers; a higher run fences every lower one. Shown and read as
/// `7-00f3a9c1d2e4b5a6`. Releases before 0.2 had numbers alone: such a run has identity 0, is shown as `7`, and is
/// never given out any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct RunId {
    #[n(0)]
    number: u64,
    #[n(1)]
    identity: u64,
}

/// Text that is not a run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected a run such as 7-00f3a9c1d2e4b5a6, as `open_run` gives it, got {got:?}")]
pub struct RunIdError {
    got: String,
}

impl RunId {
    /// Below every run that was ever given out.
    pub const ZERO: Self = Self::new(0);

    /// A run without an identity: of an older release, or of a test.
    pub const fn new(number: u64) -> Self {
        Self::with_identity(number, 0)
    }

    /// The run of this number and identity.
    pub const fn with_identity(number: u64, identity: u64) -> Self {
        Self { number, identity }
    }

    /// What orders it.
    pub const fn number(self) -> u64 {
        self.number
    }

    /// What tells it from others of its number.
    pub const fn identity(self) -> u64 {
        self.identity
    }

    /// The next number, or none after the last.
    pub const fn next_number(self) -> Option<u64> {
        self.number.checked_add(1)
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.identity {
            0 => write!(f, "{}", self.number),
            identity => write!(f, "{}-{identity:016x}", self.number),
        }
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for RunId {
    type Err = RunIdError;

    fn from_str(text: &str) -> Result<Self, RunIdError> {
        let (number, identity) = text.split_once('-').unwrap_or((text, "0"));
        let run = number.parse().ok().and_then(|number| {
            let identity = u64::from_str_radix(identity, 16).ok()?;
            Some(Self { number, identity })
        });
        // One text for each run: no leading zeros, signs or capitals.
        run.filter(|run| run.to_string() == text)
            .ok_or_else(|| RunIdError {
                got: text.chars().take(64).collect(),
            })
    }
}

/// Reads the run of a record that may have been stored before runs had identities: then it is a number alone.
pub(crate) fn decode_stored<Ctx>(
    d: &mut minicbor::Decoder<'_>,
    ctx: &mut Ctx,
) -> Result<RunId, minicbor::decode::Error> {
    match d.datatype()? {
        Type::U8 | Type::U16 | Type::U32 | Type::U64 => Ok(RunId::new(d.u64()?)),
        _ => RunId::decode(d, ctx),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::{decode, encode};

    #[test]
    fn a_run_is_shown_and_read_in_one_way() {
        let run = RunId::with_identity(7, 0x00f3_a9c1_d2e4_b5a6);
        assert_eq!(run.to_string(), "7-00f3a9c1d2e4b5a6");
        assert_eq!("7-00f3a9c1d2e4b5a6".parse(), Ok(run));
        assert_eq!("7".parse(), Ok(RunId::new(7)));
        let last = RunId::with_identity(u64::MAX, u64::MAX);
        assert_eq!(last.to_string().parse(), Ok(last));
        for bad in [
            "",
            "-",
            "7-",
            "07",
            "+7",
            "7-0",
            "7-0000000000000000",
            "7-f3a9c1d2e4b5a6",
            "7-00F3A9C1D2E4B5A6",
            "7-00f3a9c1d2e4b5a6-",
            "18446744073709551616",
        ] {
            assert!(bad.parse::<RunId>().is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn the_bytes_of_a_run_are_pinned() {
        let run = RunId::with_identity(7, 0x00f3_a9c1_d2e4_b5a6);
        let bytes = [
            0x82, 7, 0x1b, 0x00, 0xf3, 0xa9, 0xc1, 0xd2, 0xe4, 0xb5, 0xa6,
        ];
        assert_eq!(encode(&run), bytes);
        assert_eq!(decode::<RunId>("run", &bytes).unwrap(), run);
        assert!(decode::<RunId>("run", &[7]).is_err());
    }

    #[test]
    fn numbers_come_first_in_the_order_and_never_overflow() {
        let run = |number, identity| RunId::with_identity(number, identity);
        assert!(run(1, 9) < run(2, 1) && run(2, 1) < run(2, 2));
        assert_eq!(run(1, 9).next_number(), Some(2));
        assert_eq!(run(u64::MAX, 0).next_number(), None);
    }
}
