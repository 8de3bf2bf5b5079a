//! Coding plans, repair and transport on a network of shaped links, between real daemons (`make bench-net`).
//!
//! `network` makes namespaces and links, `daemons` runs storaged on them, `job` saves and restores through the SDK,
//! `raw` is what the transport is compared with, `scenario` what is measured; `figures`, `table` and `plot` write it
//! down. `command` runs other programs.

pub mod command;
pub mod daemons;
pub mod figures;
pub mod job;
pub mod network;
pub mod plot;
pub mod raw;
pub mod scenario;
pub mod table;
