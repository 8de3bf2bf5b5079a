//! Coding plans whose roles rotate stripe by stripe, as data: chain, tree, gather, repair. Pure functions.
//!
//! Order of reading: `stripes` (which stripes), `striped` (a plan per class of stripes, and which class a stripe is
//! of), `reduce` (one stripe's plan from a rooted tree of members), `encode` (the shapes an encoding can take),
//! `repair` (lost shards and byte ranges), `load` (what every node sends, receives, keeps and holds), `prove`
//! (that a plan computes what it should, for any bytes), `trace` (what each of its sums is made of).
//!
//! Every class is an ordinary `CodingPlan`, so whatever executes one executes all of these.

mod encode;
mod error;
mod load;
mod prove;
mod reduce;
mod repair;
mod striped;
mod stripes;
#[cfg(test)]
mod tests;
mod trace;

pub use encode::{Keepers, Order, Shape, encode_plan};
pub use error::PlanError;
pub use load::NodeLoad;
pub use prove::prove;
pub use repair::{RepairShape, RepairTask, repair_plans};
pub use striped::{Link, Rotation, StripedPlan};
pub use stripes::{DirtyMap, StripeSet};
pub use trace::{Made, Trace, trace};
