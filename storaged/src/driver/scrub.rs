//! Reading RAM again: pieces on the codec's threads, and what the operator is told of chunks that have rotted.

use std::process::Stdio;
use std::time::{Duration, Instant};

use storaged_core::{HeldBlock, Input, Now, QueryId, ScrubPiece};
use storaged_wire::NodeName;
use storaged_wire::peer::CheckpointKey;
use thiserror::Error;

use super::{Daemon, chain};
use crate::config::{HookCommand, ScrubConfig};
use crate::digest;

/// An operator's program that takes longer is killed.
const HOOK_MAX: Duration = Duration::from_secs(60);

/// Why the operator's program did not do what it is for.
#[derive(Debug, Error)]
enum HookError {
    #[error("starting it failed")]
    Start(#[source] std::io::Error),
    #[error("expected it to end with 0, it ended with {0}")]
    Failed(std::process::ExitStatus),
    #[error("expected it to end within {} s, it was killed", HOOK_MAX.as_secs())]
    TimedOut,
}

/// How many chunks have rotted since the start, and when the operator's program ran last.
#[derive(Debug, Default)]
pub(super) struct RotCount {
    chunks: u64,
    hook_ran_at: Option<Now>,
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
        if !self.is_too_much(config) || self.hook_ran_at.is_some_and(rests) {
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
        let hook = self.rot.add(chunks, now, &self.config.scrub);
        if let Some(hook) = hook {
            tokio::spawn(run_and_say(hook.clone(), node.clone(), self.rot.chunks));
        }
        self.links.rot_fault = self.rot.reason(&self.config.scrub);
    }

    /// What the scrub has come to.
    pub(super) fn show_scrub(&self) {
        let age = Duration::from_millis(self.node.scrub_state().age_ms);
        self.ops.metrics.observe_scrub_age(age);
    }
}

async fn run_and_say(hook: HookCommand, node: NodeName, chunks: u64) {
    let program = hook.program.display().to_string();
    match run(&hook, &node, chunks).await {
        Ok(()) => tracing::info!(program, "ran scrub.hook"),
        Err(error) => tracing::error!(program, error = chain(&error), "scrub.hook failed"),
    }
}

/// Runs the operator's program in a process group of its own, with nothing of the daemon's environment: credentials are there.
async fn run(hook: &HookCommand, node: &NodeName, chunks: u64) -> Result<(), HookError> {
    let mut command = tokio::process::Command::new(&hook.program);
    command
        .args(&hook.arguments)
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .env("STORAGED_NODE", node.as_str())
        .env("STORAGED_ROTTEN_CHUNKS", chunks.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(HookError::Start)?;
    let group = child.id().and_then(|id| i32::try_from(id).ok());
    match tokio::time::timeout(HOOK_MAX, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(HookError::Failed(status)),
        Ok(Err(error)) => Err(HookError::Start(error)),
        Err(_) => {
            let group = group.and_then(rustix::process::Pid::from_raw);
            if let Some(group) = group {
                // It may have ended this very moment.
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            Err(HookError::TimedOut)
        }
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

    #[tokio::test]
    async fn what_the_hook_did_not_do_is_said() {
        let node = NodeName::new("n1").unwrap();
        let hook = |program: &str, arguments: &[&str]| HookCommand {
            program: program.into(),
            arguments: arguments.iter().map(|it| (*it).to_owned()).collect(),
        };
        let sees =
            r#"[ "$STORAGED_NODE" = n1 ] && [ "$STORAGED_ROTTEN_CHUNKS" = 4 ] && [ -z "$HOME" ]"#;
        run(&hook("/bin/sh", &["-c", sees]), &node, 4)
            .await
            .unwrap();
        let failed = run(&hook("/bin/sh", &["-c", "exit 3"]), &node, 4).await;
        assert!(matches!(failed, Err(HookError::Failed(_))), "{failed:?}");
        let absent = run(&hook("/nonexistent", &[]), &node, 4).await;
        assert!(matches!(absent, Err(HookError::Start(_))), "{absent:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_hook_that_hangs_is_killed() {
        let node = NodeName::new("n1").unwrap();
        let hook = HookCommand {
            program: "/bin/sleep".into(),
            arguments: vec!["1000".into()],
        };
        let outcome = run(&hook, &node, 1).await;
        assert!(matches!(outcome, Err(HookError::TimedOut)), "{outcome:?}");
    }
}
