//! Policy of the verb *place*: groups, home nodes, and which run of a namespace is the newest.

mod fence;
mod groups;
mod home;

pub(crate) use fence::RunProposal;
pub use groups::{Group, GroupError, Member, groups};
pub use home::homes;
