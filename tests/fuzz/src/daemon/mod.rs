//! Targets that the daemon itself is built for: its readers of data streams and of the durable tier, and its HTTP.

mod data;
mod http;
mod sessions;
mod tier;

pub use data::{data, data_seeds};
pub use http::{http, http_seeds};
pub use tier::{tier, tier_seeds};
