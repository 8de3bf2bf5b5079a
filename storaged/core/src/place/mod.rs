//! Policy of the verb *place*: which run of a namespace is the newest, and healing.

mod fence;
mod heal;
mod lost;
mod members;
mod missing;
mod open_run;
mod restart;
mod standing;
mod unknown_run;

pub(crate) use fence::{RunStanding, wrong_token};
pub(crate) use open_run::RunProposal;
pub use restart::Standings;
pub(crate) use standing::{Blocks, Standing};
pub(crate) use unknown_run::WaitingHello;
