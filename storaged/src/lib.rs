//! The storaged daemon: effects around the decisions of `storaged-core`.
//!
//! Order of reading: `driver` (the loop), then the verbs as effects: `stage` (sockets of trainers), `encode` (the
//! executor, also for repair and so for *restore*), `trickle` (the durable tier, both ways). *delta* and digests are
//! in `digest` and `memory` (with `parity_memory`), where chunks are read, and `verify`, without which no parity is kept; *place* is in `net`,
//! whose links say who lives. `membership` says which machines there are, `waiting_room` what one answers that has no place yet. `keep` is what outlives the daemon. `hyperpod` speaks to all of it over HTTP as a client in the same process. Then `config`, `cli`, `http`,
//! `metrics`, `log`, `repeats`, `pool` (threads for arithmetic), `env`, `heap`.

#![deny(unsafe_code)]

pub mod cli;
pub mod cluster;
pub mod config;
pub mod cores;
mod digest;
pub mod driver;
pub mod encode;
pub mod env;
mod heap;
pub mod http;
pub mod hyperpod;
pub mod keep;
pub mod log;
pub mod membership;
pub mod memory;
pub mod metrics;
pub mod net;
mod parity_memory;
pub mod pool;
mod repeats;
pub mod stage;
pub mod trickle;
mod verify;
mod waiting_room;
