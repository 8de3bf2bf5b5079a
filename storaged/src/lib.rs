//! The storaged daemon: effects around the decisions of `storaged-core`.
//!
//! Order of reading: `driver` (the loop), then the six verbs `stage`, `delta`, `encode`, `place`,
//! `trickle`, `restore`, then what they stand on: `net`, `memory`, `seam`, `config`.

pub mod cli;
pub mod config;
pub mod delta;
pub mod driver;
pub mod encode;
pub mod http;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod net;
pub mod place;
pub mod restore;
pub mod seam;
pub mod stage;
pub mod trickle;
