//! `[scrub]`: how often RAM is read again, and what happens once much of it has rotted.

use std::path::PathBuf;

use serde::Deserialize;

use super::span::Span;
use super::{ConfigError, value};

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
}

impl Default for ScrubSection {
    fn default() -> Self {
        Self {
            period: Span::from_secs(3_600),
            rotten_max: 3,
            hook: Vec::new(),
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
}

impl ScrubSection {
    pub(super) fn validate(&self) -> Result<ScrubConfig, ConfigError> {
        let hook = self.hook.split_first().map(|(program, arguments)| {
            let (program, arguments) = (PathBuf::from(program), arguments.to_vec());
            HookCommand { program, arguments }
        });
        if let Some(hook) = &hook {
            if hook.program.is_relative() {
                let got = hook.program.display();
                let text = format!("expected the absolute path of a program first, got {got:?}");
                return Err(value("scrub.hook", text));
            }
            if self.rotten_max == 0 || self.period.as_ms() == 0 {
                let text = "expected scrub.period and scrub.rotten_max above 0 beside it, got 0: it would never be run";
                return Err(value("scrub.hook", text));
            }
        }
        Ok(ScrubConfig {
            period_ms: self.period.as_ms(),
            rotten_max: self.rotten_max,
            hook,
        })
    }
}
