//! The HTTP interface for clients of HyperPod's managed tiered checkpointing: off unless its section is there.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;
use storaged_sdk::read_token;

use super::{ConfigError, ConfigFile, Span, value};
use crate::driver::chain;

/// `[hyperpod]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HyperpodSection {
    /// TCP address; plain HTTP.
    pub listen: SocketAddr,
    /// A file with the token that requests must bear; the job token of all its namespaces too.
    pub token_file: Option<PathBuf>,
    /// Whether whoever reaches the address may use it.
    pub without_token: bool,
    /// How long the answer to a step's last shard waits for the step to be protected.
    pub save_wait: Span,
    /// From which state on a step is offered as one of the latest.
    pub latest: LatestName,
}

/// What is offered as the latest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LatestName {
    /// What bears the loss of nodes.
    #[default]
    Protected,
    /// What is whole.
    Committed,
}

impl Default for HyperpodSection {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9200)),
            token_file: None,
            without_token: false,
            save_wait: Span::from_secs(20),
            latest: LatestName::Protected,
        }
    }
}

/// The client's own limit for an answer is 60 s.
const SAVE_WAIT_MAX_MS: u64 = 50_000;

impl ConfigFile {
    pub(super) fn hyperpod(&self) -> Result<Option<HyperpodSection>, ConfigError> {
        let Some(section) = &self.hyperpod else {
            return Ok(None);
        };
        section.check_token()?;
        if section.save_wait.as_ms() > SAVE_WAIT_MAX_MS {
            let text = format!(
                "expected at most {} s, after which clients give up, got {} s",
                SAVE_WAIT_MAX_MS / 1000,
                section.save_wait.as_ms() / 1000
            );
            return Err(value("hyperpod.save_wait", text));
        }
        Ok(Some(section.clone()))
    }
}

impl HyperpodSection {
    fn check_token(&self) -> Result<(), ConfigError> {
        if self.token_file.is_some() && self.without_token {
            Err(value(
                "hyperpod.without_token",
                "expected this or hyperpod.token_file, got both",
            ))
        } else if self.token_file.is_some() {
            self.token().map(|_| ())
        } else if !self.without_token {
            Err(value(
                "hyperpod.token_file",
                "expected a file with a token, got none: make one, or set hyperpod.without_token = true to let every process \
                 that reaches the address read and write all of its checkpoints",
            ))
        } else if self.listen.ip().is_loopback() {
            Ok(())
        } else {
            Err(value(
                "hyperpod.listen",
                format!(
                    "expected a loopback address without a token, got {}: set hyperpod.token_file",
                    self.listen
                ),
            ))
        }
    }

    /// The token, read from its file: of one line, without its end. Empty without a file.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it cannot be read, is too short, or has more than a line, and if other users could read it.
    pub fn token(&self) -> Result<String, ConfigError> {
        let key = "hyperpod.token_file";
        let Some(path) = &self.token_file else {
            return Ok(String::new());
        };
        let token = read_token(path).map_err(|error| value(key, chain(&error)))?;
        let line = String::from_utf8(token).ok();
        let line = line.filter(|line| !line.contains(char::is_whitespace));
        line.ok_or_else(|| {
            let text = format!("expected one line with a token in {}", path.display());
            value(key, text)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_token_is_the_one_line_of_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let section = HyperpodSection {
            token_file: Some(path.clone()),
            ..HyperpodSection::default()
        };
        assert!(section.token().is_err());
        let token = "0123456789abcdef";
        for (text, token) in [
            (format!("{token}\n"), Some(token)),
            ("too short\n".into(), None),
            (format!("{token}\n{token}\n"), None),
        ] {
            std::fs::write(&path, &text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            assert_eq!(section.token().ok().as_deref(), token, "{text:?}");
        }
    }
}
