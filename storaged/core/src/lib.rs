//! The decisions of storaged: pure functions of `(now, input)`. No clock, socket, thread or random source.

#![forbid(unsafe_code)]

pub mod encode;
