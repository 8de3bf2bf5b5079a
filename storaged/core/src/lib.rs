//! The decisions of storaged: pure functions of `(now, input)`. No clock, socket, thread or random source.
//!
//! Order of reading: `io` (what goes in and comes out), `node` (the machine), then the verbs: `stage` (slots,
//! sealing, commit, retiring), `delta` (the basis), `encode` (sessions), `place` (runs, healing),
//! `trickle` (the durable tier), `restore` (plan and ladder). `limits` has every number, `budget` every byte.
//! Payload bytes never come here: only ids, lengths and digests.

#![forbid(unsafe_code)]

#[macro_use]
mod planted;

mod audit;
mod budget;
mod delta;
pub mod encode;
mod io;
pub mod limits;
mod node;
pub mod place;
mod restore;
mod stage;
mod status;
mod table;
#[cfg(test)]
mod testkit;
mod trickle;

pub use audit::{Audit, Shown};
pub use budget::{Ledger, NoRoom};
pub use io::{
    CheckPart, ClaimFault, ClaimedRun, ConnId, Input, Note, Now, Output, QueryId, RequestId,
    SessionTally,
};
pub use node::{DurableForm, DurablePolicy, Node, RunsWithoutTier, Setup};
pub use stage::SLOT_GRAIN_BYTES;
pub use trickle::Removed;
pub use trickle::{
    Curation, CurationFault, DurableFault, DurableListing, SetAside, SetAsideCause, UploadBase,
};
