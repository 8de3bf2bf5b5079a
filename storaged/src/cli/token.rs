//! `storaged token`, and how commands learn a job's token: from a file or the environment, never from an argument, which every user of the machine can
//! read.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rand::TryRngCore;
use rand::rngs::OsRng;
use storaged_sdk::{read_token, token_of_environment};

use super::CliError;

/// Random bytes of a token that we make; guessing half as many is out of reach.
const RANDOM_BYTES: usize = 32;

/// Where the job's token is.
#[derive(Debug, Clone, Default, Args)]
pub struct TokenArgs {
    /// File with the token that opens the job; else STORAGED_TOKEN has it
    #[arg(long, env = "STORAGED_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  storaged token ~/.storaged/llama-70b\n  STORAGED_TOKEN_FILE=~/.storaged/llama-70b python train.py\nWhoever can read the file is the job: it has mode 0600, and one that other users can read is refused. A file that is there is kept."
)]
pub struct NewTokenArgs {
    /// File to write
    file: PathBuf,
}

impl TokenArgs {
    /// The token in a file.
    pub fn in_file(path: PathBuf) -> Self {
        let token_file = Some(path);
        Self { token_file }
    }

    /// Where it is, for another process.
    pub fn file(&self) -> Option<&Path> {
        self.token_file.as_deref()
    }

    /// The token; empty if none is named.
    pub fn read(&self) -> Result<Vec<u8>, CliError> {
        let token = self.file().map_or_else(token_of_environment, read_token);
        Ok(token?)
    }
}

/// Writes a new token that nobody knows.
pub fn token(args: &NewTokenArgs) -> Result<(), CliError> {
    let io = |what| move |source| CliError::Io { what, source };
    let mut random = [0; RANDOM_BYTES];
    let drawn = OsRng.try_fill_bytes(&mut random);
    drawn.map_err(|error| CliError::Io {
        what: "drawing a random token",
        source: std::io::Error::other(error),
    })?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    write_new(&args.file, &text).map_err(io("writing the token's file"))
}

/// The file is there at once with all of the token, or not at all: others may be waiting for it.
fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(beside);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&beside)?;
    let written = writeln!(file, "{text}").and_then(|()| file.sync_all());
    // A link takes the place of nothing that is there.
    let linked = written.and_then(|()| std::fs::hard_link(&beside, path));
    std::fs::remove_file(&beside)?;
    linked
}
