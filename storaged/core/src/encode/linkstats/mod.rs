//! Measured link rates, and what follows from them.
//!
//! Order of reading: `progress` (what the members of a session said, and its links as their receivers saw them), `bottleneck`
//! (what each member's link carries, and whose link holds the session up), `measured` (what a node has learned of the
//! others, how it ages, who counts as slow), `links` (measured and configured rates together, as the chooser asks
//! for them), `replan` (sessions that are ended because another plan goes around a slow hop).
//!
//! A member speaks only of the links over which it receives. So a member that lies spoils the rate of its own link and of
//! the neighbours on the other ends; plans made from that are slower, never wrong, and a lane is planned again a bounded
//! number of times.

mod bottleneck;
mod links;
mod measured;
mod progress;
mod replan;

pub(super) use links::Links;
pub(crate) use measured::MeasuredRates;
pub use measured::{NodeRate, SideRate};
pub(crate) use progress::SessionProgress;
