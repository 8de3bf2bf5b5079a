//! The `storaged` command: see `storaged --help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    match storaged::cli::main() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("storaged: {}", storaged::driver::chain(&error));
            error.exit_code()
        }
    }
}
