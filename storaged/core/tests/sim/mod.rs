//! A simulated cluster around the decisions: nodes, a network that delays and loses messages, RAM with real bytes,
//! sessions computed by the definition of a plan, a durable tier, and a training job that saves and restarts.
//! Everything follows from one seed.

mod executor;
mod job;
pub mod month;
mod slow;
mod world;

pub use world::{Limits, World};
