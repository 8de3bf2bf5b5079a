//! Fuzz targets for everything here that takes bytes or numbers from outside: no panic, no memory beyond a bound, wrong
//! bytes never taken for right ones. As tests they make a bounded number of inputs; `cargo bolero test` runs each of
//! them guided by coverage for as long as it is let.

mod code;
mod damage;
mod delta;
mod digests;
#[path = "../support/noise.rs"]
mod noise;

use std::alloc::System;

use cap::Cap;
use noise::noise;

/// What all targets together may hold, several running at once: a record of a few bytes may ask for a chunk of 4 MiB,
/// the same again for its planes, and no more. Beyond it the process ends.
const MEMORY_BYTES_MAX: usize = 128 << 20;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, MEMORY_BYTES_MAX);

/// Inputs of each target when it runs as a test.
const ITERATIONS: usize = 2000;
