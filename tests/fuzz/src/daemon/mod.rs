//! Targets that the daemon itself is built for: its readers of data streams and of the durable tier, its HTTP, and the holder of its memory.

mod data;
mod holder;
mod http;
mod sessions;
mod tier;

pub use data::{data, data_seeds};
pub use holder::{holder, holder_seeds};
pub use http::{http, http_seeds};
pub use tier::{tier, tier_seeds};
