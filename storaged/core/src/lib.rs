//! The decisions of storaged: pure functions of `(now, input)`. No clock, socket, thread or random source.
//!
//! Order of reading: `api` (what goes in and comes out), `node` (who hears what), `context` and `catalog` (what all share), then the verbs: `stage` (slots,
//! sealing, commit, retiring), `delta` (the basis), `encode` (sessions), `place` (runs, healing),
//! `trickle` (the durable tier), `restore` (plan and ladder). `keep` says what outlives the daemon, `recover` takes it over; `scrub` reads RAM again. `limits` has every number, `budget` every byte.
//! Payload bytes never come here: only ids, lengths and digests.

#![forbid(unsafe_code)]

#[macro_use]
mod planted;

mod api;
mod audit;
mod budget;
mod catalog;
mod context;
mod delta;
mod enclosures;
mod encode;
mod event;
mod failed_steps;
mod keep;
pub mod limits;
mod manifest_keys;
mod messages;
mod node;
mod parcels;
mod pins;
mod place;
mod records;
mod recover;
mod restore;
mod scrub;
mod sources;
mod stage;
mod status;
mod successions;
mod testimony;
#[cfg(test)]
mod testkit;
mod trickle;
mod vouched;

pub use api::{
    Authorship, CheckPart, ClaimFault, ClaimedRun, ConnId, Curation, CurationFault, DigestCause,
    DigestTally, DurableFault, DurableForm, DurableListing, DurablePolicy, EpochMembers,
    ExpectedShard, FalseStatement, FoundSuccessions, HeldBlock, Input, Leftovers, LinkRates,
    MessageLimits, Note, Now, Output, ParityId, Preparation, Prepared, QueryId, RateBasis,
    Registration, RegistryFault, Removed, RequestId, RunAuthority, RunsWithoutTier, ScrubPiece,
    ScrubTally, SessionPurpose, SessionTally, SessionWork, SetAside, SetAsideCause, Setup, Sink,
    SlotEnd, SlotShard, Source, StripeTurn, SuccessionFault, TenantShare, TierNews, Trust, Unread,
    UploadBase, UploadTally, Urgency, Viewer,
};
pub use audit::{Audit, Shown};
pub use budget::{Ledger, NoRoom};
pub use encode::{NodeRate, SideRate};
pub use node::Node;
pub use place::Standings;
pub use scrub::ScrubState;
pub use stage::SLOT_GRAIN_BYTES;
pub use trickle::{LastWork, Unfinished, not_an_operator};
