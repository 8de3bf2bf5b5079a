//! What can be wrong with a record, a basis or a request.

use thiserror::Error;

/// A record that cannot be made or taken apart.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum DeltaError {
    /// No number in a tensor has this size.
    #[error("expected an element size of 1, 2, 4 or 8 bytes, got {0}")]
    ElementSize(u8),
    /// A version of the future or the past.
    #[error(
        "expected a delta record of version {expected}, got {got}: use a storaged release that knows it"
    )]
    Version { expected: u8, got: u8 },
    /// A kind or an arithmetic that this version does not have.
    #[error("expected a known {what} in a delta record, got {got}")]
    Unknown { what: &'static str, got: u8 },
    /// Fewer or more bytes than the record says.
    #[error("expected a delta record with {expected} bytes of {what}, got {got}")]
    Size {
        what: &'static str,
        expected: u64,
        got: u64,
    },
    /// More bytes than any chunk has: refused before memory is taken for them.
    #[error("expected at most {most} bytes of {what}, got {got}")]
    TooLong {
        what: &'static str,
        most: u64,
        got: u64,
    },
    /// The record refers to other bytes of the basis.
    #[error(
        "expected {expected_length} bytes of the basis from {expected_start}, got {got_length} from {got_start}"
    )]
    Basis {
        expected_start: u64,
        expected_length: u64,
        got_start: u64,
        got_length: u64,
    },
    /// An encoding against a basis, and none was given.
    #[error("expected a basis for a record of kind {0}, got none")]
    NoBasis(&'static str),
    /// A record that claims to be clean of a chunk that differs from the basis.
    #[error("expected a chunk that equals its basis, got another one")]
    NotClean,
    /// The packed bytes are damaged.
    #[error("expected sound packed bytes of {what}, got: {reason}")]
    Packed { what: &'static str, reason: String },
    /// VCDIFF could not express the chunk within its bounds.
    #[error("expected content that VCDIFF can express, got a chunk that it cannot")]
    NotMoved,
    /// This build has no VCDIFF.
    #[error(
        "expected a build that has VCDIFF for a record of content that moved, got one without the cargo feature `moved`: \
         use a storaged that was built with its default features"
    )]
    MovedNotBuilt,
    /// The record's own bytes are not what their digest says.
    #[error("record digest mismatch: expected {expected}, got {got}")]
    Digest {
        expected: crate::Digest,
        got: crate::Digest,
    },
}
