//! The contract with the driver: inputs go in, outputs come out, and nothing else passes. One input, drain all outputs, come
//! back at the deadline. These types know nothing of whoever decides.

mod durable;
mod false_statement;
mod ids;
mod input;
mod note;
mod output;
mod prepare;
mod registry;
mod setup;
mod viewer;
mod work;

pub use durable::{
    Authorship, ClaimFault, ClaimedRun, Curation, CurationFault, DurableFault, DurableListing,
    FoundSuccessions, Removed, SetAside, SetAsideCause, SuccessionFault, Trust, UploadBase,
};
pub use false_statement::FalseStatement;
pub(crate) use false_statement::Severity;
pub use ids::{ConnId, HeldBlock, Now, ParityId, QueryId, RequestId};
pub use input::{EpochMembers, Input, TierNews};
pub use note::Note;
pub use output::{DigestCause, Output, SlotEnd};
pub use prepare::{
    GivenDescription, NamedDescription, ParcelContents, ParcelFault, Preparation, Prepared,
    SealedCommit,
};
pub use registry::{Registration, RegistryFault};
pub use setup::{
    DurableForm, DurablePolicy, LinkRates, MessageLimits, RateBasis, RunAuthority, RunsWithoutTier,
    Setup, TenantShare,
};
pub use viewer::Viewer;
pub use work::{
    CheckPart, DigestTally, ExpectedShard, Leftovers, ScrubPiece, ScrubTally, SessionPurpose,
    SessionTally, SessionWork, Sink, SlotShard, Source, StripeTurn, Unread, UploadTally, Urgency,
};
