//! The bench of the erasure code: every contender once a round, round after round, so that whatever slows the machine
//! down meets all of them; ratios are taken within a round and their median reported.
//!
//! `case` says what is measured, `contender` who takes part, `arena` and `measure` do it on pinned cores, `figures`
//! makes numbers under the names of `docs/bench/README.md`, `table` and `plot` show them, `machine` describes where.
//! A rate is 1e9 bytes of data, not of parity, per second.

pub mod arena;
pub mod case;
pub mod contender;
pub mod figures;
pub mod machine;
pub mod measure;
pub mod plot;
pub mod table;
