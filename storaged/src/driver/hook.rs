//! The operator's programs: each runs in a process group of its own, which is killed when it takes too long and when the daemon ends.
//! One of them runs once much of a node's memory has rotted, and never twice at once.

use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use storaged_wire::NodeName;
use thiserror::Error;
use tokio::task::JoinHandle;

use super::chain;
use crate::config::HookCommand;

/// The groups of the programs that run now, and what each is for. The process may be ended from elsewhere than the loop (SIGUSR2).
static RUNNING: Mutex<Vec<(Pid, ProgramPurpose)>> = Mutex::new(Vec::new());

/// What a program of the operator's is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramPurpose {
    ScrubHook,
    KeyCommand,
}

impl ProgramPurpose {
    /// By which key of the configuration it runs.
    fn key(self) -> &'static str {
        match self {
            Self::ScrubHook => "scrub.hook",
            Self::KeyCommand => "trickle.encryption.key_command",
        }
    }
}

/// The daemon has ended a program because it ends itself: what the program has not done is nobody's fault.
#[derive(Debug, Error)]
#[error("it was killed, because the daemon ends")]
pub struct DaemonEnds;

/// Why the operator's program did not do what it is for.
#[derive(Debug, Error)]
enum HookError {
    #[error("starting it failed")]
    Start(#[source] std::io::Error),
    #[error("expected it to end with 0, it ended with {0}")]
    Failed(ExitStatus),
    #[error("expected it to end within {} s (scrub.hook_within), it was killed with all that it had started", .0.as_secs())]
    TimedOut(Duration),
    #[error(transparent)]
    DaemonEnds(#[from] DaemonEnds),
}

/// What the program is told.
#[derive(Debug, Clone)]
pub(super) struct RotReport {
    pub node: NodeName,
    pub chunks: u64,
}

/// The program, if it has been started.
#[derive(Debug, Default)]
pub(super) struct Hook(Option<JoinHandle<()>>);

impl Hook {
    /// Whether it runs now.
    pub fn is_running(&self) -> bool {
        let is_running = |task: &JoinHandle<()>| !task.is_finished();
        self.0.as_ref().is_some_and(is_running)
    }

    /// Starts it; nothing if it runs yet.
    pub fn start(&mut self, command: HookCommand, report: RotReport) {
        if !self.is_running() {
            self.0 = Some(tokio::spawn(run_and_say(command, report)));
        }
    }
}

/// A program that runs: when this is dropped it is killed, and all that it has started.
pub(super) struct RunningProgram(Option<Pid>);

impl RunningProgram {
    pub fn new(child: &tokio::process::Child, purpose: ProgramPurpose) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let group = id.and_then(Pid::from_raw);
        running().extend(group.map(|group| (group, purpose)));
        Self(group)
    }

    /// It was waited for. Nobody else got its number before that; from now on it must not be killed by it.
    ///
    /// # Errors
    /// [`DaemonEnds`] if it did not end by itself.
    pub fn ended(self) -> Result<(), DaemonEnds> {
        match self.leave() {
            Some(_) => Ok(()),
            None => Err(DaemonEnds),
        }
    }

    /// It runs no more; what it was for, unless it was killed with all others.
    fn leave(&self) -> Option<ProgramPurpose> {
        let mut running = running();
        let at = running
            .iter()
            .position(|(group, _)| Some(*group) == self.0)?;
        Some(running.swap_remove(at).1)
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        if let Some(group) = self.0.filter(|_| self.leave().is_some()) {
            // It may have ended this very moment.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

fn running() -> MutexGuard<'static, Vec<(Pid, ProgramPurpose)>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills the programs that run, and all that they have started: they must not act on a node whose daemon has ended.
pub fn end_programs() {
    for (group, purpose) in running().drain(..) {
        let key = purpose.key();
        let told = "a program was killed with its process group, because the daemon ends";
        match purpose {
            // What it was to do on the node is not done.
            ProgramPurpose::ScrubHook => tracing::warn!(key, "{told}"),
            ProgramPurpose::KeyCommand => tracing::info!(key, "{told}"),
        }
        // It may have ended this very moment.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

async fn run_and_say(hook: HookCommand, report: RotReport) {
    let program = hook.program.display().to_string();
    match run(&hook, &report).await {
        Ok(()) => tracing::info!(program, "ran scrub.hook"),
        // That was said when it was killed.
        Err(HookError::DaemonEnds(_)) => {}
        Err(error) => tracing::error!(program, error = chain(&error), "scrub.hook failed"),
    }
}

/// A program of the operator's, with nothing of the daemon's environment: credentials are there.
pub(super) fn prepared(hook: &HookCommand, node: &NodeName) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(&hook.program);
    command
        .args(&hook.arguments)
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .env("STORAGED_NODE", node.as_str())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    command
}

async fn run(hook: &HookCommand, report: &RotReport) -> Result<(), HookError> {
    let mut command = prepared(hook, &report.node);
    command.env("STORAGED_ROTTEN_CHUNKS", report.chunks.to_string());
    let mut child = command.spawn().map_err(HookError::Start)?;
    let program = RunningProgram::new(&child, ProgramPurpose::ScrubHook);
    let Ok(ended) = tokio::time::timeout(hook.within, child.wait()).await else {
        return Err(HookError::TimedOut(hook.within));
    };
    program.ended()?;
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(HookError::Failed(status)),
        Err(error) => Err(HookError::Start(error)),
    }
}

/// In tests one program runs at a time: the end of a daemon kills all of the process.
#[cfg(test)]
pub(super) static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RotReport {
        RotReport {
            node: NodeName::new("n1").unwrap(),
            chunks: 4,
        }
    }

    fn hook(program: &str, arguments: &[&str]) -> HookCommand {
        HookCommand {
            program: program.into(),
            arguments: arguments.iter().map(|it| (*it).to_owned()).collect(),
            within: Duration::from_secs(60),
        }
    }

    fn is_there(id: &str) -> bool {
        std::path::Path::new("/proc").join(id.trim()).exists()
    }

    /// The process that the program has started and written down.
    async fn written(path: &std::path::Path) -> String {
        loop {
            match std::fs::read_to_string(path) {
                Ok(id) if id.ends_with('\n') => return id,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn gone(id: &str) {
        while is_there(id) && !is_zombie(id) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn is_zombie(id: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.trim()));
        stat.is_ok_and(|stat| stat.contains(") Z "))
    }

    #[tokio::test]
    async fn what_the_hook_did_not_do_is_said() {
        let _alone = ONE.lock().await;
        let sees =
            r#"[ "$STORAGED_NODE" = n1 ] && [ "$STORAGED_ROTTEN_CHUNKS" = 4 ] && [ -z "$HOME" ]"#;
        run(&hook("/bin/sh", &["-c", sees]), &report())
            .await
            .unwrap();
        let failed = run(&hook("/bin/sh", &["-c", "exit 3"]), &report()).await;
        assert!(matches!(failed, Err(HookError::Failed(_))), "{failed:?}");
        let absent = run(&hook("/nonexistent", &[]), &report()).await;
        assert!(matches!(absent, Err(HookError::Start(_))), "{absent:?}");
    }

    /// With what it has started: a shell that is killed alone leaves its children.
    #[tokio::test]
    async fn a_hook_that_hangs_is_killed_with_its_children() {
        let _alone = ONE.lock().await;
        let directory = tempfile::tempdir().unwrap();
        let child = directory.path().join("child");
        let script = format!("sleep 1000 & echo $! > {}; wait", child.display());
        let hook = HookCommand {
            within: Duration::from_secs(2),
            ..hook("/bin/sh", &["-c", &script])
        };
        let outcome = run(&hook, &report()).await;
        assert!(
            matches!(outcome, Err(HookError::TimedOut(_))),
            "{outcome:?}"
        );
        gone(&written(&child).await).await;
    }

    #[tokio::test]
    async fn a_hook_runs_once_at_a_time_and_not_beyond_the_daemon() {
        let _alone = ONE.lock().await;
        let directory = tempfile::tempdir().unwrap();
        let child = directory.path().join("child");
        let script = format!("sleep 1000 & echo $! >> {}; wait", child.display());
        let command = hook("/bin/sh", &["-c", &script]);
        let mut running = Hook::default();
        running.start(command.clone(), report());
        let id = written(&child).await;
        assert!(running.is_running());
        running.start(command, report());
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(written(&child).await, id, "one was started");
        end_programs();
        gone(&id).await;
        while running.is_running() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
