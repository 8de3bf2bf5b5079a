//! Policy of the verb *place*: groups, home nodes, which run of a namespace is the newest, and healing.

mod fence;
mod groups;
mod heal;
mod home;
mod members;
mod restart;
mod standing;

pub(crate) use fence::RunProposal;
pub use groups::{Group, GroupError, Member, groups};
pub use home::homes;
pub use restart::Standings;
pub(crate) use standing::{Blocks, Standing};
