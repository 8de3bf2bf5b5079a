//! libFuzzer on one target, which `STORAGED_FUZZ_TARGET` names; its arguments are libFuzzer's. Built by `make fuzz`.

#![no_main]

use std::alloc::System;
use std::sync::OnceLock;

use cap::Cap;
use libfuzzer_sys::fuzz_target;
use storaged_fuzz::{MEMORY_BYTES_MAX, Target, chosen};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, MEMORY_BYTES_MAX);

static TARGET: OnceLock<Target> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let target = TARGET.get_or_init(|| chosen().unwrap_or_else(|error| panic!("{error}")));
    (target.run)(bytes);
});
