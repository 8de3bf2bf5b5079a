//! Fuzz targets for every record that a daemon reads from a trainer, a peer or a disk: no panic, no memory beyond a
//! small multiple of the input, and what is read is written and read again as the same.

#[path = "../../../tests/fuzz/damage.rs"]
mod damage;
mod increment;
mod index;
mod manifest;
mod messages;
mod restart;
mod running;
mod samples;
mod succession;

use std::alloc::System;
use std::fmt::Debug;

use cap::Cap;
use minicbor::{Decode, Encode};
use storaged_wire::{WireError, decode, encode};

/// What all targets together may hold, several running at once, with inputs of a few KiB: a length that is believed
/// before its bytes are there exceeds it at once, and the process ends.
const MEMORY_BYTES_MAX: usize = 128 << 20;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, MEMORY_BYTES_MAX);

/// Inputs of each target when it runs as a test.
const ITERATIONS: usize = 20_000;

/// Reads bytes as a record; one that can be read is written and read again as the same, in bytes that no longer change.
fn round_trip<T>(bytes: &[u8]) -> Result<T, WireError>
where
    T: for<'b> Decode<'b, ()> + Encode<()> + PartialEq + Debug,
{
    let record: T = decode("record", bytes)?;
    let written = encode(&record);
    let again: T = decode("record", &written).expect("what was just written");
    assert_eq!(again, record);
    assert_eq!(encode(&again), written);
    Ok(record)
}
