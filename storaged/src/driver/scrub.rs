//! Reading RAM again: pieces on the codec's threads, and what the operator is told of chunks that have rotted.

use std::time::{Duration, Instant};

use storaged_core::{HeldBlock, Input, Now, QueryId, ScrubPiece};
use storaged_wire::peer::CheckpointKey;

use super::Daemon;
use super::hook::{Hook, RotReport};
use crate::config::{HookCommand, ScrubConfig};
use crate::digest;

/// How many chunks have rotted since the start, and when the operator's program ran last.
#[derive(Debug, Default)]
pub(super) struct RotCount {
    chunks: u64,
    hook_ran_at: Option<Now>,
    hook: Hook,
}

impl RotCount {
    /// Whether there are so many that the node's memory is not to be trusted.
    fn is_too_much(&self, config: &ScrubConfig) -> bool {
        config.rotten_max > 0 && self.chunks >= config.rotten_max
    }

    /// Why the node is not ready, if it is not.
    fn reason(&self, config: &ScrubConfig) -> Option<String> {
        self.is_too_much(config).then(|| {
            format!(
                "expected fewer than {} rotten chunks in this node's memory since its start (scrub.rotten_max), got {}: \
                 replace its memory, or restart the daemon to count anew",
                config.rotten_max, self.chunks
            )
        })
    }

    /// More have been found. The operator's program, if it is to run now.
    fn add<'c>(
        &mut self,
        chunks: u64,
        now: Now,
        config: &'c ScrubConfig,
    ) -> Option<&'c HookCommand> {
        self.chunks += chunks;
        let rests = |ran: Now| now.since(ran) < config.period_ms;
        if !self.is_too_much(config)
            || self.hook_ran_at.is_some_and(rests)
            || self.hook.is_running()
        {
            return None;
        }
        let hook = config.hook.as_ref()?;
        self.hook_ran_at = Some(now);
        Some(hook)
    }
}

impl Daemon {
    pub(super) fn scrub(&self, query: QueryId, piece: ScrubPiece) {
        let (memory, pool) = (self.memory.clone(), self.pool.clone());
        let ops = self.ops.clone();
        self.when_done(async move {
            let (outcome, busy) = digest::scrub(&pool, &memory, piece).await;
            let bytes = outcome.as_ref().map_or(0, |tally| tally.bytes);
            ops.metrics.observe_scrubbed(bytes, busy);
            Input::Scrubbed { query, outcome }
        });
    }

    /// Chunks of a block in this node's memory are not what they were.
    pub(super) fn rotten(&mut self, key: &CheckpointKey, block: HeldBlock, chunks: u64) {
        self.ops.metrics.observe_rotten(chunks);
        let node = &self.config.name;
        tracing::error!(namespace = %key.namespace, run = %key.run, step = key.step.get(), %node, %block, chunks,
            "memory of this node has rotted; the block is lost, and what can be decoded is put back");
        let now = self.clock.now();
        if let Some(hook) = self.rot.add(chunks, now, &self.config.scrub) {
            // As an operator names it, who may cordon it.
            let (node, chunks) = (self.config.node.clone(), self.rot.chunks);
            self.rot
                .hook
                .start(hook.clone(), RotReport { node, chunks });
        }
        self.links.rot_fault = self.rot.reason(&self.config.scrub);
    }

    /// What the scrub has come to.
    pub(super) fn show_scrub(&self) {
        let age = Duration::from_millis(self.node.scrub_state().age_ms);
        self.ops.metrics.observe_scrub_age(age);
    }
}

/// How long something took on the thread that did it.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    let done = work();
    (done, began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(rotten_max: u64, program: &str) -> ScrubConfig {
        ScrubConfig {
            period_ms: 1_000,
            rotten_max,
            hook: Some(HookCommand {
                program: program.into(),
                arguments: Vec::new(),
                within: Duration::from_secs(60),
            }),
        }
    }

    #[test]
    fn the_hook_runs_from_the_bound_on_and_once_per_period() {
        let (config, mut rot) = (config(3, "/bin/true"), RotCount::default());
        assert!(rot.add(2, Now(0), &config).is_none() && rot.reason(&config).is_none());
        assert!(rot.add(1, Now(10), &config).is_some());
        assert!(rot.reason(&config).is_some_and(|why| why.contains("got 3")));
        assert!(rot.add(5, Now(1_009), &config).is_none());
        assert!(rot.add(1, Now(1_010), &config).is_some());
        assert!(rot.reason(&config).is_some_and(|why| why.contains("got 9")));
    }

    #[test]
    fn without_a_bound_a_node_stays_ready() {
        let (config, mut rot) = (config(0, "/bin/true"), RotCount::default());
        assert!(rot.add(1_000, Now(0), &config).is_none());
        assert_eq!(rot.reason(&config), None);
    }
}
