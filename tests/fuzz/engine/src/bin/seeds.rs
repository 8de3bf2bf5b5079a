//! Writes the inputs that fuzzing begins with, made by the encoders themselves: `seeds FOLDER`, into a folder per target.

use std::path::Path;
use std::process::ExitCode;

// The counters that the targets are built with are defined there.
#[cfg(feature = "engine")]
use libfuzzer_sys as _;
use storaged_fuzz::targets;

fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("expected the folder of the corpora, got none");
        return ExitCode::FAILURE;
    };
    for target in targets() {
        let within = Path::new(&folder).join(target.name);
        let written = std::fs::create_dir_all(&within).and_then(|()| {
            let mut all = (target.seeds)().into_iter();
            all.try_for_each(|(name, bytes)| std::fs::write(within.join(name), bytes))
        });
        if let Err(error) = written {
            eprintln!("{}: {error}", within.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
