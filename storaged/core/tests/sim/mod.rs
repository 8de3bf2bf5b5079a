//! A simulated cluster around the decisions (`testkit`, with real bytes): nodes that die, a network that delays and loses
//! messages, hops that are slow, silent or lie, and a training job that saves and restarts. Everything follows from one seed.

pub mod byzantine;
mod job;
pub mod month;
mod slow;
mod world;

pub use world::{Limits, SCRUB_MS, World};
