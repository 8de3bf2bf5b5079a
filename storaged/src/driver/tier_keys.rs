//! The keys of the durable tier: at a start and at a reload the operator's program is asked for them, in bounded time. A start goes on
//! without: RAM needs no key service, and the tier is used once the program has given keys.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use storaged_wire::NodeName;
use thiserror::Error;
use tokio::io::AsyncReadExt;

use super::hook::prepared;
use super::{Daemon, chain};
use crate::config::{Config, HookCommand, KeySource};
use crate::trickle::store::{KeyRing, KeysError, TierKeys};

/// The pause before the program is asked again.
const PAUSE: Duration = Duration::from_secs(10);
/// What it writes is no longer.
const OUTPUT_BYTES_MAX: u64 = 16 << 10;

/// Why the program has given no keys.
#[derive(Debug, Error)]
pub enum KeyCommandError {
    #[error("starting {program} failed")]
    Start {
        program: String,
        #[source]
        source: std::io::Error,
    },
    #[error("expected {program} to end with 0, it ended with {status}")]
    Failed { program: String, status: ExitStatus },
    #[error("expected {program} to end within {} s (trickle.encryption.key_command_within), it was killed with all that it had started", within.as_secs())]
    TimedOut { program: String, within: Duration },
    #[error("what {program} has written cannot be used")]
    Keys {
        program: String,
        #[source]
        source: KeysError,
    },
}

/// Asks the operator's program for keys, if that is where they come from.
///
/// # Errors
/// Why it has given none.
pub async fn ask_for_keys(config: &mut Config) -> Result<(), KeyCommandError> {
    let Some(encryption) = &mut config.encryption else {
        return Ok(());
    };
    if let KeySource::Command(command) = &encryption.source {
        encryption.keys = Some(ask(command, &config.node).await?);
    }
    Ok(())
}

async fn ask(command: &HookCommand, node: &NodeName) -> Result<TierKeys, KeyCommandError> {
    let program = command.program.display().to_string();
    let failed = |source| KeyCommandError::Start {
        program: program.clone(),
        source,
    };
    let mut prepared = prepared(command, node);
    prepared.stdout(std::process::Stdio::piped());
    let mut child = prepared.spawn().map_err(failed)?;
    let id = child.id().and_then(|id| i32::try_from(id).ok());
    let group = id.and_then(Pid::from_raw);
    let output = child.stdout.take();
    let asking = async {
        let mut text = Vec::new();
        if let Some(output) = output {
            output.take(OUTPUT_BYTES_MAX).read_to_end(&mut text).await?;
        }
        Ok::<_, std::io::Error>((child.wait().await?, text))
    };
    let within = command.within;
    let Ok(ended) = tokio::time::timeout(within, asking).await else {
        if let Some(group) = group {
            // It may have ended this very moment.
            let _ = kill_process_group(group, Signal::KILL);
        }
        return Err(KeyCommandError::TimedOut { program, within });
    };
    let (status, text) = ended.map_err(failed)?;
    if !status.success() {
        return Err(KeyCommandError::Failed { program, status });
    }
    TierKeys::parse(&text).map_err(|source| KeyCommandError::Keys { program, source })
}

/// The keys that a daemon starts with. If the program gives none it is asked again, again and again.
pub(super) async fn start_keys(config: &mut Config) -> Arc<KeyRing> {
    let ring = Arc::new(KeyRing::default());
    if let Err(error) = ask_for_keys(config).await {
        tracing::error!(
            error = chain(&error),
            "no keys for the durable tier: it is not used until there are, the program is asked again"
        );
        if let Some(KeySource::Command(command)) = config.encryption.as_ref().map(|it| &it.source) {
            tokio::spawn(ask_until(
                command.clone(),
                config.node.clone(),
                ring.clone(),
            ));
        }
    }
    if let Some(keys) = config.encryption.as_ref().and_then(|it| it.keys.clone()) {
        tracing::info!(%keys, "the durable tier is encrypted");
        ring.replace(keys);
    }
    ring
}

async fn ask_until(command: HookCommand, node: NodeName, ring: Arc<KeyRing>) {
    loop {
        tokio::time::sleep(PAUSE).await;
        match ask(&command, &node).await {
            Ok(keys) => {
                tracing::info!(%keys, "took the keys of the durable tier");
                return ring.replace(keys);
            }
            Err(error) => tracing::warn!(error = chain(&error), "no keys for the durable tier yet"),
        }
    }
}

impl Daemon {
    /// Takes the keys of a configuration that was read again.
    pub(super) fn reload_keys(&mut self, taken: &Config) {
        if self.config.encryption == taken.encryption {
            return;
        }
        if let Some(keys) = taken.encryption.as_ref().and_then(|it| it.keys.as_ref()) {
            tracing::info!(%keys, "took the keys of the durable tier");
            self.tier_keys.replace(keys.clone());
        }
        self.config.encryption.clone_from(&taken.encryption);
        if let Some(net) = &self.net {
            net.set_agreement(self.config.agreement());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(script: &str, within: Duration) -> HookCommand {
        HookCommand {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            within,
        }
    }

    async fn asked(script: &str) -> Result<TierKeys, KeyCommandError> {
        let command = command(script, Duration::from_secs(60));
        ask(&command, &NodeName::new("n1").unwrap()).await
    }

    #[tokio::test]
    async fn what_the_program_writes_is_taken_and_else_is_said_what_was_wrong() {
        let key = "ab".repeat(32);
        let says = format!("[ $STORAGED_NODE = n1 ] && [ -z \"$HOME\" ] && echo {key}");
        let keys = asked(&says).await.unwrap();
        assert_eq!(keys, TierKeys::parse(key.as_bytes()).unwrap());
        let failed = asked(&format!("echo {key}; exit 3")).await;
        assert!(
            matches!(failed, Err(KeyCommandError::Failed { .. })),
            "{failed:?}"
        );
        let wrong = asked("echo not-a-key").await.unwrap_err();
        assert!(matches!(wrong, KeyCommandError::Keys { .. }), "{wrong:?}");
        assert!(!chain(&wrong).contains("not-a-key"));
        let endless = asked("yes | head -c 1000000").await;
        assert!(endless.is_err());
    }

    #[tokio::test]
    async fn a_program_that_hangs_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let child = directory.path().join("child");
        let script = format!("sleep 1000 & echo $! > {}; wait", child.display());
        let node = NodeName::new("n1").unwrap();
        let hung = ask(&command(&script, Duration::from_secs(2)), &node).await;
        assert!(
            matches!(hung, Err(KeyCommandError::TimedOut { .. })),
            "{hung:?}"
        );
        let id = std::fs::read_to_string(&child).unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", id.trim()));
        while state().is_ok_and(|state| !state.contains(") Z ")) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
