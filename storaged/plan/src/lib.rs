//! Who codes what for whom, as data: groups, home nodes, lanes, and coding plans whose roles rotate stripe by stripe. Pure
//! functions of a member list, a manifest or measured rates: no clock, no node, no state.
//!
//! Order of reading: `domains` (what fails together), `groups`, `regroup` and `homes` (a member list), `lanes` (a manifest), `coding` (one stripe's plan), `stripes`
//! (which stripes), `striped` (a plan per class of stripes, and which class a stripe is of), `reduce` (one stripe's plan
//! from a rooted tree of members), `encode` (the shapes an encoding can take), `repair` (lost shards and byte ranges),
//! `load` (what every node sends, receives, keeps and holds), `prove` (that a plan computes what it should, for any
//! bytes), `trace` (what each of its sums is made of), `topology` (shapes on the wire), `resolve` (a session's plan from
//! its record), `chooser` (which shape ends first, and why).
//!
//! Every class is an ordinary `CodingPlan`, so whatever executes one executes all of these.

#![forbid(unsafe_code)]

pub mod chooser;
mod coding;
mod domains;
mod encode;
mod error;
mod groups;
mod homes;
mod lanes;
mod load;
mod prove;
mod reduce;
mod regroup;
mod repair;
mod resolve;
mod striped;
mod stripes;
#[cfg(test)]
mod tests;
pub mod topology;
mod trace;

pub use coding::{CodingPlan, Coefficients, Edge, Hop, HopOutput, RaggedRows, Target};
pub use domains::{
    DomainError, LostWithOne, check_domain, has_levels, levels_shared, lost_by_level,
};
pub use encode::{Order, ParityHolders, Shape, encode_plan};
pub use error::PlanError;
pub use groups::{
    Cordon, Group, GroupError, Member, Position, Seat, group_peers, groups, regrouped, seats,
};
pub use homes::homes;
pub use lanes::{LaneBlocks, blocks_on, lanes_coded_by, lanes_of, nodes_with_blocks, uncoded_node};
pub use load::NodeLoad;
pub use prove::prove;
pub use repair::{RepairShape, RepairTask, repair_plans};
pub use resolve::Derived;
pub use striped::{Link, Rotation, StripedPlan};
pub use stripes::{DirtyMap, StripeSet, stripe_bytes};
pub use trace::{CoefficientRows, Trace, trace};
