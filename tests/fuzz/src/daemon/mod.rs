//! Targets that the daemon itself is built for: its readers of the durable tier, and its HTTP.

mod http;
mod tier;

pub use http::{http, http_seeds};
pub use tier::{tier, tier_seeds};
