//! `[memory]`: how much of it there is, and what stays in it.

use serde::Deserialize;

use super::{BudgetSize, ConfigError, ConfigFile, Span, SwapName, value};

/// `[memory]`
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySection {
    /// Bytes that slots and parity may take, or a share such as "60%"; by default half of what this machine or
    /// container has.
    pub budget: Option<BudgetSize>,
    /// Slots per rank: 2, and one more so that an upload does not hold up the next save.
    pub slots_per_rank: usize,
    /// Protected steps of a job that stay in RAM: 1 is the newest alone.
    pub keep_steps: usize,
    /// A job without trainers keeps its RAM until another one needs the room; if its newest checkpoint is not in the
    /// durable tier, for at least so long.
    pub idle_job: Span,
    /// What is done where slots could be swapped out: "warn", "refuse" or "allow".
    pub swap: SwapName,
}

impl Default for MemorySection {
    fn default() -> Self {
        Self {
            budget: None,
            slots_per_rank: 3,
            keep_steps: 1,
            idle_job: Span::from_secs(3_600),
            swap: SwapName::Warn,
        }
    }
}

impl ConfigFile {
    pub(super) fn slots(&self) -> Result<usize, ConfigError> {
        match self.memory.slots_per_rank {
            slots @ 2..=16 => Ok(slots),
            got => Err(value(
                "memory.slots_per_rank",
                format!("expected 2 to 16, got {got}"),
            )),
        }
    }

    pub(super) fn keep_steps(&self) -> Result<usize, ConfigError> {
        let slots = self.memory.slots_per_rank;
        match self.memory.keep_steps {
            kept if kept >= 1 && kept < slots => Ok(kept),
            got => Err(value(
                "memory.keep_steps",
                format!(
                    "expected 1 or more and less than memory.slots_per_rank, which is {slots}, got {got}: each kept step has a slot of each rank, and the next save needs one"
                ),
            )),
        }
    }
}
