//! `[trickle.encryption]`: whether what is in the durable tier is encrypted, and where the keys are.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use storaged_sdk::read_secret;

use super::scrub::{HookCommand, check_program};
use super::span::Span;
use super::{ConfigError, ConfigFile, value};
use crate::driver::chain;
use crate::trickle::store::{PlainObjects, TierKeys};

/// A file of keys is no longer.
const KEY_FILE_BYTES_MAX: u64 = 16 << 10;
/// A start waits for the program.
const COMMAND_MAX_S: u64 = 300;

/// `[trickle.encryption]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncryptionSection {
    /// A file with a key in each line, the newest first.
    pub key_file: Option<PathBuf>,
    /// A program and its arguments, which writes the same to its standard output.
    pub key_command: Vec<String>,
    /// It is killed when it takes longer.
    pub key_command_within: Span,
    /// What is done about objects that are not encrypted: "refuse" or "read".
    pub plain: PlainObjects,
}

impl Default for EncryptionSection {
    fn default() -> Self {
        Self {
            key_file: None,
            key_command: Vec::new(),
            key_command_within: Span::from_secs(10),
            plain: PlainObjects::default(),
        }
    }
}

/// What of it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptionConfig {
    pub source: KeySource,
    pub plain: PlainObjects,
    /// The keys, once they are known.
    pub keys: Option<TierKeys>,
}

/// Where keys come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    File(PathBuf),
    Command(HookCommand),
}

impl ConfigFile {
    pub(super) fn encryption(&self) -> Result<Option<EncryptionConfig>, ConfigError> {
        let section = self.trickle.encryption.as_ref();
        section.map(EncryptionSection::validate).transpose()
    }
}

impl EncryptionSection {
    fn validate(&self) -> Result<EncryptionConfig, ConfigError> {
        let (source, keys) = match (&self.key_file, self.key_command.split_first()) {
            (Some(path), None) => (KeySource::File(path.clone()), Some(read_keys(path)?)),
            (None, Some((program, arguments))) => {
                let program = PathBuf::from(program);
                check_program("trickle.encryption.key_command", &program)?;
                let command = HookCommand {
                    program,
                    arguments: arguments.to_vec(),
                    within: self.within()?,
                };
                (KeySource::Command(command), None)
            }
            (None, None) => {
                let text = "expected a file with keys, or trickle.encryption.key_command, got neither: `storaged token FILE` makes a key";
                return Err(value("trickle.encryption.key_file", text));
            }
            (Some(_), Some(_)) => {
                let text = "expected this or trickle.encryption.key_command, got both";
                return Err(value("trickle.encryption.key_file", text));
            }
        };
        let plain = self.plain;
        Ok(EncryptionConfig {
            source,
            plain,
            keys,
        })
    }

    fn within(&self) -> Result<Duration, ConfigError> {
        match self.key_command_within.as_ms() {
            ms @ 1_000.. if ms <= COMMAND_MAX_S * 1_000 => Ok(Duration::from_millis(ms)),
            ms => {
                let text = format!("expected 1s to 5m, got {} s", ms / 1_000);
                Err(value("trickle.encryption.key_command_within", text))
            }
        }
    }
}

fn read_keys(path: &Path) -> Result<TierKeys, ConfigError> {
    let wrong = |text| value("trickle.encryption.key_file", text);
    let text = read_secret(path, KEY_FILE_BYTES_MAX);
    let text = text.map_err(|error| wrong(chain(&error)))?;
    let keys = TierKeys::parse(&text);
    keys.map_err(|error| wrong(format!("{}: {error}", path.display())))
}

impl fmt::Display for EncryptionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.source, &self.keys) {
            (_, Some(keys)) => write!(f, "with the first of the keys {keys}")?,
            (KeySource::Command(command), None) => {
                write!(f, "with the first key of {}", command.program.display())?;
            }
            (KeySource::File(path), None) => write!(f, "with the first key in {}", path.display())?,
        }
        match self.plain {
            PlainObjects::Refuse => f.write_str(", plain objects are refused"),
            PlainObjects::Read => f.write_str(", plain objects are read"),
        }
    }
}
