//! The `storaged` command: see `storaged --help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use tikv_jemallocator::Jemalloc;

/// A daemon lives for weeks beside a job that needs the memory: what a large request has freed must go back to the system, which
/// glibc's allocator does not do (docs/decisions/2026-11-23-allocator.md).
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    match storaged::cli::main() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("storaged: {}", storaged::driver::chain(&error));
            error.exit_code()
        }
    }
}
