//! The keys of the durable tier: at a start and at a reload the operator's program is asked for them, in bounded time. A start goes on
//! without: RAM needs no key service, and the tier is used once the program has given keys. Once the daemon runs it waits for no program:
//! what one has given comes to it as everything else does.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use storaged_wire::NodeName;
use thiserror::Error;
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::hook::{DaemonEnds, ProgramPurpose, RunningProgram, prepared};
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
    #[error(transparent)]
    DaemonEnds(#[from] DaemonEnds),
    #[error("what {program} has written cannot be used")]
    Keys {
        program: String,
        #[source]
        source: KeysError,
    },
}

/// The keys that a daemon starts with: asks the operator's program for them, if that is where they come from.
pub async fn first_keys(config: &mut Config) {
    let node = &config.node;
    let Some(encryption) = &mut config.encryption else {
        return;
    };
    let KeySource::Command(command) = &encryption.source else {
        return;
    };
    match ask(command, node).await {
        Ok(keys) => encryption.keys = Some(keys),
        Err(error) => tracing::error!(
            error = chain(&error),
            "no keys for the durable tier: it is not used until there are, the program is asked again"
        ),
    }
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
    let running = RunningProgram::new(&child, ProgramPurpose::KeyCommand);
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
        return Err(KeyCommandError::TimedOut { program, within });
    };
    if ended.is_ok() {
        running.ended()?;
    }
    let (status, text) = ended.map_err(failed)?;
    if !status.success() {
        return Err(KeyCommandError::Failed { program, status });
    }
    TierKeys::parse(&text).map_err(|source| KeyCommandError::Keys { program, source })
}

/// The keys that the daemon has, and the program that is being asked for others.
pub(super) struct KeyService {
    pub ring: Arc<KeyRing>,
    asking: Option<AbortHandle>,
    /// What the program that was asked last has given.
    pub given: mpsc::Receiver<TierKeys>,
}

impl KeyService {
    /// With the keys of the configuration. If the program has given none it is asked again, again and again.
    pub fn start(config: &Config) -> Self {
        let ring = Arc::new(KeyRing::default());
        let (_, given) = mpsc::channel(1);
        let asking = None;
        let mut service = Self {
            ring,
            asking,
            given,
        };
        let Some(encryption) = &config.encryption else {
            return service;
        };
        match (&encryption.keys, &encryption.source) {
            (Some(keys), _) => {
                tracing::info!(%keys, "the durable tier is encrypted");
                service.ring.replace(keys.clone());
            }
            (None, KeySource::Command(command)) => service.ask(command, &config.node, PAUSE),
            (None, KeySource::File(_)) => {}
        }
        service
    }

    /// Asks the program after a pause, in place of one that is being asked: that one is killed.
    fn ask(&mut self, command: &HookCommand, node: &NodeName, after: Duration) {
        let (answers, given) = mpsc::channel(1);
        self.given = given;
        let asking = ask_until(
            command.clone(),
            node.clone(),
            after,
            self.ring.clone(),
            answers,
        );
        let asking = tokio::spawn(asking).abort_handle();
        if let Some(before) = self.asking.replace(asking) {
            before.abort();
        }
    }
}

/// Asks until there are keys; once, where there are older ones.
async fn ask_until(
    command: HookCommand,
    node: NodeName,
    after: Duration,
    ring: Arc<KeyRing>,
    answers: mpsc::Sender<TierKeys>,
) {
    let mut pause = after;
    loop {
        tokio::time::sleep(pause).await;
        match ask(&command, &node).await {
            // Nobody takes them if the daemon ends.
            Ok(keys) => return drop(answers.send(keys).await),
            // Nothing is wrong with it, and nobody wants keys any more.
            Err(KeyCommandError::DaemonEnds(_)) => return,
            Err(error) if ring.has_keys() => {
                let error = chain(&error);
                return tracing::error!(error, "the old keys of the durable tier stay");
            }
            Err(error) => tracing::warn!(error = chain(&error), "no keys for the durable tier yet"),
        }
        pause = PAUSE;
    }
}

impl Daemon {
    /// Takes the keys of a configuration that was read again, or asks for them.
    pub(super) fn reload_keys(&mut self, taken: &Config) {
        let Some(encryption) = &taken.encryption else {
            return;
        };
        match (&encryption.source, &encryption.keys) {
            (KeySource::Command(command), _) => {
                self.tier_keys
                    .ask(command, &self.config.node, Duration::ZERO);
            }
            (KeySource::File(_), Some(keys)) => self.take_keys(keys.clone()),
            (KeySource::File(_), None) => {}
        }
    }

    /// Uses these keys from now on.
    pub(super) fn take_keys(&mut self, keys: TierKeys) {
        let Some(encryption) = &mut self.config.encryption else {
            return;
        };
        if encryption.keys.as_ref() == Some(&keys) {
            return;
        }
        tracing::info!(%keys, "took the keys of the durable tier");
        self.tier_keys.ring.replace(keys.clone());
        encryption.keys = Some(keys);
        let Some(net) = &self.net else { return };
        net.set_agreement(self.config.agreement());
        let linked: Vec<NodeName> = self.links.up.keys().cloned().collect();
        for peer in linked {
            self.compare(&peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Mutex;

    use super::super::hook::{ONE, end_programs};
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
        let _alone = ONE.lock().await;
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
        let _alone = ONE.lock().await;
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

    /// What was logged.
    #[derive(Clone, Default)]
    struct Told(Arc<Mutex<Vec<u8>>>);

    impl Told {
        fn text(&self) -> String {
            String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
        }
    }

    impl Write for Told {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// At a reload, where older keys stay, and where there are none yet.
    #[tokio::test]
    async fn a_daemon_that_ends_while_its_program_runs_finds_no_fault_with_that() {
        let _alone = ONE.lock().await;
        let older = TierKeys::parse("ab".repeat(32).as_bytes()).unwrap();
        for keys in [Some(older), None] {
            let told = Told::default();
            let writer = told.clone();
            let log = tracing_subscriber::fmt().with_writer(move || writer.clone());
            let _logged = tracing::subscriber::set_default(log.finish());
            let ring = Arc::new(KeyRing::default());
            keys.into_iter().for_each(|keys| ring.replace(keys));
            let directory = tempfile::tempdir().unwrap();
            let begun = directory.path().join("begun");
            let script = format!("touch {}; sleep 1000", begun.display());
            let (answers, _given) = mpsc::channel(1);
            let asking = tokio::spawn(ask_until(
                command(&script, Duration::from_secs(60)),
                NodeName::new("n1").unwrap(),
                Duration::ZERO,
                ring,
                answers,
            ));
            while !begun.exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            end_programs();
            let ended = tokio::time::timeout(Duration::from_secs(5), asking).await;
            let text = told.text();
            let is_quiet = !text.contains("ERROR") && !text.contains("WARN");
            assert!(is_quiet, "{text}");
            ended.expect("nobody is asked again").unwrap();
        }
    }
}
