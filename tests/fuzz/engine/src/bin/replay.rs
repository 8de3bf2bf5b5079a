//! Runs a target's inputs, once each, without an engine: `replay TARGET FILE...`. For what a crash left, and for the coverage.

use std::alloc::System;
use std::process::ExitCode;

use cap::Cap;
use storaged_fuzz::{MEMORY_BYTES_MAX, named};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, MEMORY_BYTES_MAX);

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let name = words.next().unwrap_or_default();
    let target = match named(&name) {
        Ok(target) => target,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut played = 0;
    for file in words {
        match std::fs::read(&file) {
            Ok(bytes) => (target.run)(&bytes),
            Err(error) => {
                eprintln!("{file}: {error}");
                return ExitCode::FAILURE;
            }
        }
        played += 1;
    }
    println!("{name}: {played} inputs");
    ExitCode::SUCCESS
}
