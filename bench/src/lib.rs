//! Benches of storaged's parts against other people's libraries. `storaged bench` measures the whole path; what needs
//! those libraries beside ours belongs here.
//!
//! `codec` measures the erasure code; `net` plans and transport on a network; `node` what a node costs; `s3_server` the S3 server that they and tests start; `isal` is Intel's library, behind the feature of that name.

// Calls into C are the only unsafe code of this crate, and they are all in `isal`.
#![deny(unsafe_code)]

pub mod codec;
#[cfg(feature = "isal")]
#[allow(unsafe_code)]
pub mod isal;
pub mod net;
pub mod node;
pub mod s3_server;
