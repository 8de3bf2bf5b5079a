//! The nouns: one validated newtype per name, number and identity. See docs/GLOSSARY.md for the words.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use minicbor::{Decode, Encode};
use storaged_codec::Digest;
use thiserror::Error;

/// Longest namespace or node name, in bytes: fits a DNS label and a directory name everywhere.
pub const NAME_BYTES_MAX: usize = 63;

/// Stands between a tenant's name and its job's: no name has it, and neither URLs nor file systems mind it.
const TENANT_MARK: char = '~';

/// Largest world size: thousands of GPUs with room to spare; bounds every table indexed by rank.
pub const WORLD_SIZE_MAX: u32 = 1 << 17;

/// A name or number that cannot be an id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IdError {
    /// The text has a length or a character that names may not have.
    #[error(
        "{what} must be 1 to {NAME_BYTES_MAX} of a-z, 0-9, '.', '_', '-' and start with a letter or digit, got {got:?}"
    )]
    Name { what: &'static str, got: String },
    /// The number is outside its range.
    #[error("{what} must be {expected}, got {got}")]
    Range {
        what: &'static str,
        expected: &'static str,
        got: u64,
    },
}

fn is_name(text: &str) -> bool {
    let first = text.bytes().next();
    let good_first = first.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let good_rest = text
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-'));
    good_first && good_rest && text.len() <= NAME_BYTES_MAX
}

/// A name, or one of a tenant's: `TENANT~NAME`.
fn is_name_of_tenant(text: &str) -> bool {
    match text.split_once(TENANT_MARK) {
        Some((tenant, name)) => is_name(tenant) && is_name(name),
        None => is_name(text),
    }
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $is_valid:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Validates `text` as a name.
            ///
            /// # Errors
            /// [`IdError::Name`] if the length or a character is not allowed.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                Self::of(&text.into())
            }

            /// Tables name the same nodes ten thousand times: every copy is the same memory.
            fn of(text: &str) -> Result<Self, IdError> {
                let is_valid: fn(&str) -> bool = $is_valid;
                if is_valid(text) {
                    return Ok(Self(text.into()));
                }
                let (what, got) = ($what, text.chars().take(NAME_BYTES_MAX + 1).collect());
                Err(IdError::Name { what, got })
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::of(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl<C> Encode<C> for $name {
            fn encode<W: minicbor::encode::Write>(
                &self,
                e: &mut minicbor::Encoder<W>,
                _: &mut C,
            ) -> Result<(), minicbor::encode::Error<W::Error>> {
                e.str(&self.0)?.ok()
            }
        }

        impl<'b, C> Decode<'b, C> for $name {
            fn decode(
                d: &mut minicbor::Decoder<'b>,
                _: &mut C,
            ) -> Result<Self, minicbor::decode::Error> {
                Self::of(d.str()?).map_err(minicbor::decode::Error::custom)
            }
        }
    };
}

name_id!(
    /// One training job's checkpoints, isolated from every other's. Those of a tenant with a name have it in front, `TENANT~NAME`: two
    /// tenants may each have a job of the same name.
    Namespace,
    "namespace",
    is_name_of_tenant
);
name_id!(
    /// The configured name of one node; a replacement machine may take it over with a new generation.
    NodeName,
    "node name",
    is_name
);
name_id!(
    /// The configured name of one tenant, the same on all nodes.
    TenantName,
    "tenant",
    is_name
);

impl Namespace {
    /// Whose it is, where the tenant has a name.
    pub fn tenant(&self) -> Option<&str> {
        self.0.split_once(TENANT_MARK).map(|(tenant, _)| tenant)
    }

    /// This one as a tenant's own; one that has a tenant's name in front already stays as it is.
    #[must_use]
    pub fn within(&self, tenant: &TenantName) -> Self {
        match self.tenant() {
            Some(_) => self.clone(),
            None => Self(format!("{tenant}{TENANT_MARK}{self}").into()),
        }
    }
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident, $int:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] $int);

        impl $name {
            /// Wraps the number.
            pub const fn new(value: $int) -> Self {
                Self(value)
            }

            /// The number.
            pub const fn get(self) -> $int {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number_id!(
    /// The training step a checkpoint was taken at.
    Step,
    u64
);
number_id!(
    /// A trainer process of the job, from 0.
    Rank,
    u32
);
number_id!(
    /// An incarnation of one daemon: random, compared for equality only.
    Generation,
    u64
);
number_id!(
    /// One execution of a coding plan.
    SessionId,
    u64
);
number_id!(
    /// One slot of a daemon's arena, never reused within a generation.
    SlotId,
    u64
);

/// How many ranks a checkpoint has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorldSize(u32);

impl WorldSize {
    /// Validates a number of ranks.
    ///
    /// # Errors
    /// [`IdError::Range`] if it is 0 or above [`WORLD_SIZE_MAX`].
    pub fn new(ranks: u32) -> Result<Self, IdError> {
        if (1..=WORLD_SIZE_MAX).contains(&ranks) {
            return Ok(Self(ranks));
        }
        Err(IdError::Range {
            what: "world size",
            expected: "1 to 131072",
            got: u64::from(ranks),
        })
    }

    /// The number of ranks.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Whether `rank` is one of the ranks `0..self`.
    pub fn holds(self, rank: Rank) -> bool {
        rank.get() < self.0
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<C> Encode<C> for WorldSize {
    fn encode<W: minicbor::encode::Write>(
        &self,
        e: &mut minicbor::Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        e.u32(self.0)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for WorldSize {
    fn decode(d: &mut minicbor::Decoder<'b>, _: &mut C) -> Result<Self, minicbor::decode::Error> {
        Self::new(d.u32()?).map_err(minicbor::decode::Error::custom)
    }
}

/// Whom a namespace belongs to: a digest of the job token, so that the token itself is never stored or sent on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Encode, Decode)]
#[cbor(transparent)]
pub struct Owner(#[n(0)] Digest);

impl Owner {
    /// The owner that holds `token`. An empty token is an owner too: whoever names none.
    pub fn of_token(token: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("storaged 2026-11 job token owner");
        hasher.update(token);
        Self(Digest::from_bytes(hasher.finalize().as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(Namespace::new("llama-70b.v2").is_ok());
        for bad in ["", "-x", "A", "a/b", "..", "a b", &"x".repeat(64)] {
            assert!(Namespace::new(bad).is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn a_tenant_stands_in_front_of_its_job() {
        let (tenant, job) = (
            TenantName::new("blue").unwrap(),
            Namespace::new("llama").unwrap(),
        );
        let of_tenant = job.within(&tenant);
        assert_eq!((job.tenant(), of_tenant.tenant()), (None, Some("blue")));
        assert_eq!(Namespace::new("blue~llama").unwrap(), of_tenant);
        assert_eq!(
            of_tenant.within(&TenantName::new("red").unwrap()),
            of_tenant
        );
        for bad in [
            "~x",
            "x~",
            "a~b~c",
            "-a~b",
            &format!("{}~b", "x".repeat(64)),
        ] {
            assert!(Namespace::new(bad).is_err(), "{bad:?} must be refused");
        }
        assert!(NodeName::new("a~b").is_err() && TenantName::new("a~b").is_err());
    }

    #[test]
    fn world_size_is_bounded() {
        assert!(WorldSize::new(0).is_err());
        assert!(WorldSize::new(WORLD_SIZE_MAX + 1).is_err());
        assert!(WorldSize::new(4).unwrap().holds(Rank::new(3)));
        assert!(!WorldSize::new(4).unwrap().holds(Rank::new(4)));
    }

    #[test]
    fn owners_differ_by_token_and_hide_it() {
        assert_eq!(Owner::of_token(b"a"), Owner::of_token(b"a"));
        assert_ne!(Owner::of_token(b"a"), Owner::of_token(b"b"));
    }
}
