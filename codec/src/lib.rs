//! The bytes of storaged: erasure code, deltas, digests. Bytes in, bytes out; no I/O, clock, thread or runtime.
//!
#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod cbor;
mod checked;
mod chunk;
pub mod delta;
mod digest;
mod engine;
mod field;
mod fingerprint;
mod geometry;
mod matrix;
mod progressive;

pub use checked::{Checked, Unchecked, WrongBytes};
pub use chunk::{ChunkSize, ChunkSizeError};
pub use digest::{Digest, DigestTextError, LeafHasher, digest, leaf_digest, root_digest};
pub use engine::{
    ENGINE_VARIABLE, Engine, EngineError, engine, engine_from_env, engine_named, engines,
};
pub use fingerprint::{Fingerprint, fingerprint, fingerprint_by};
pub use geometry::{Geometry, GeometryError};
pub use matrix::{CodingMatrix, RepairError};
pub use progressive::{DecodeError, Decoder};
