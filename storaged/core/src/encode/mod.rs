//! Policy of the verb *encode*: sessions, each of which executes a coding plan, and who does what in them.
//!
//! A session is one execution of a plan. Its leader proposes it to all members (`lead`), each member finds its
//! part or says why not (`member`), and once all are ready the leader begins it. What a session keeps counts only
//! when its leader closes it so; until then the last protected step stays whole beside it (copy on write).

mod again;
mod begin;
mod broken;
mod in_full;
mod lacking;
mod lead;
mod member;
mod no_room;
mod prints;
mod rates;
mod shapes;
mod survivors;
mod tables;
#[cfg(test)]
mod tests;
mod wary;

pub(crate) use begin::Beginning;
pub(crate) use broken::{Ending, ParityPlace, PartFilled, PartMade};
pub(crate) use lead::{LaneTable, Led, SessionGoal};
pub(crate) use member::Joined;
pub(crate) use rates::MeasuredRates;
pub use rates::{NodeRate, SideRate};
