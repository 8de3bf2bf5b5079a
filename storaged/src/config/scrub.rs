//! `[scrub]`: how often RAM is read again, and what happens once much of it has rotted.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::span::Span;
use super::{ConfigError, value};

/// Longer than this, and most of what has rotted is found by whoever restarts from it.
const PERIOD_MAX_DAYS: u64 = 30;
/// What runs longer is a service and no hook.
const HOOK_MAX_S: u64 = 3_600;

/// `[scrub]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScrubSection {
    /// Every byte of shards and parity in RAM is read again within so long; 0s: never.
    pub period: Span,
    /// With so many rotten chunks since its start a node is not ready any more; 0: it always is.
    pub rotten_max: u64,
    /// A program and its arguments, run then, at most once per period.
    pub hook: Vec<String>,
    /// It is killed, with all that it has started, when it takes longer.
    pub hook_within: Span,
}

impl Default for ScrubSection {
    fn default() -> Self {
        Self {
            period: Span::from_secs(3_600),
            rotten_max: 3,
            hook: Vec::new(),
            hook_within: Span::from_secs(60),
        }
    }
}

/// What of it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScrubConfig {
    /// 0: never.
    pub period_ms: u64,
    /// 0: a node stays ready.
    pub rotten_max: u64,
    pub hook: Option<HookCommand>,
}

/// An operator's program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookCommand {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// When it is killed.
    pub within: Duration,
}

impl ScrubSection {
    pub(super) fn validate(&self) -> Result<ScrubConfig, ConfigError> {
        let period_ms = self.period_ms()?;
        let within = self.hook_within()?;
        let hook = self.hook.split_first().map(|(program, arguments)| {
            let (program, arguments) = (PathBuf::from(program), arguments.to_vec());
            HookCommand {
                program,
                arguments,
                within,
            }
        });
        if let Some(hook) = &hook {
            check_program("scrub.hook", &hook.program)?;
            if self.rotten_max == 0 || period_ms == 0 {
                let text = "expected scrub.period and scrub.rotten_max above 0 beside it, got 0: it would never be run";
                return Err(value("scrub.hook", text));
            }
        }
        Ok(ScrubConfig {
            period_ms,
            rotten_max: self.rotten_max,
            hook,
        })
    }

    fn period_ms(&self) -> Result<u64, ConfigError> {
        match self.period.as_ms() {
            ms if ms <= PERIOD_MAX_DAYS * 86_400_000 => Ok(ms),
            ms => Err(value(
                "scrub.period",
                format!(
                    "expected 0s, which is never, or 1s to {PERIOD_MAX_DAYS}d, got {} s",
                    ms / 1_000
                ),
            )),
        }
    }

    fn hook_within(&self) -> Result<Duration, ConfigError> {
        match self.hook_within.as_ms() {
            ms @ 1_000.. if ms <= HOOK_MAX_S * 1_000 => Ok(Duration::from_millis(ms)),
            ms => Err(value(
                "scrub.hook_within",
                format!("expected 1s to 1h, got {} s", ms / 1_000),
            )),
        }
    }
}

/// A program that could not be run is found out now, not on the day on which memory rots.
pub(super) fn check_program(key: &'static str, program: &Path) -> Result<(), ConfigError> {
    let wrong = |got: String| {
        let text = format!(
            "expected the absolute path of a program that can be executed first, got {}{got}",
            program.display()
        );
        Err(value(key, text))
    };
    if program.is_relative() {
        return wrong(", which is relative".into());
    }
    match std::fs::metadata(program) {
        Err(error) => wrong(format!(": {error}")),
        Ok(found) if !found.is_file() => wrong(", which is no file".into()),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => {
            wrong(", which nobody may execute: chmod +x".into())
        }
        Ok(_) => Ok(()),
    }
}
