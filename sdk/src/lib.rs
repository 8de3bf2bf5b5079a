//! Blocking client of the storaged daemon on this node.
//!
//! Order of reading: `connection` (which comes back), `client` (what can be asked), `patience` (how every wait ends), `trainer` (saving), `restored` (reading back, verified), `early` (while it still comes), `token` (what a job is known by), `rotate` (another token for it), `drill` (trying that out),
//! `operator` (what only operators ask for), `layout` (the one byte layout of a shard).
//! Every wait has a limit; a dead or slow daemon costs a bounded wait and a clear error.

#![forbid(unsafe_code)]

mod client;
mod connection;
mod drill;
mod early;
mod error;
pub mod layout;
mod operator;
mod patience;
mod restored;
mod rotate;
mod token;
mod trainer;

pub use client::{Client, DEFAULT_SOCKET, Reached, WithTrainers};
pub use connection::{AWAY_AFTER, ConnectOptions, Welcome};
pub use early::{EarlyShard, Followed, LOOK_EVERY, left_ms};
pub use error::ClientError;
pub use patience::Patience;
pub use restored::{OpenedShard, RestoredShard};
pub use rotate::RotateError;
pub use storaged_arena::{Mapping, SlotMemory};
pub use storaged_wire as wire;
pub use token::{
    TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, TokenError, check_token, read_secret, read_token,
    token_of_environment,
};
pub use trainer::{StagedSlot, Trainer};
