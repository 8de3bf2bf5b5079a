//! Policy of the verb *place*: groups, home nodes, which run of a namespace is the newest, and healing.

mod fence;
mod groups;
mod heal;
mod home;
mod lost;
mod members;
mod missing;
mod open_run;
mod restart;
mod standing;
mod unknown_run;

pub(crate) use fence::{RunStanding, wrong_token};
pub use groups::{Group, GroupError, Member, groups};
pub use home::homes;
pub(crate) use open_run::RunProposal;
pub use restart::Standings;
pub(crate) use standing::{Blocks, Standing};
pub(crate) use unknown_run::WaitingHello;
