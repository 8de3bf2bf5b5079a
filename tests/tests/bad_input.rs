//! Bad input, one test for each kind: a typed error that says what was expected, what was got and what to do;
//! what was good before is still good afterwards; nothing hangs.

use std::fmt::Debug;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged::config::ConfigFile;
use storaged::net::cert::{create_ca, issue};
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, Rank, RefusalCode, RunId, Step};
use storaged_sdk::{ClientError, StagedSlot, Trainer};
use storaged_tests::system::{System, WAIT_MS, executable, shards};

/// A refusal has its code, and a sentence with these words.
#[track_caller]
fn assert_refused<T: Debug>(outcome: Result<T, ClientError>, code: RefusalCode, words: &[&str]) {
    match outcome {
        Err(ClientError::Refused(refusal)) => {
            assert_eq!(refusal.code, code, "{refusal}");
            assert_words(&refusal.message, words);
        }
        other => panic!("expected a refusal with {code:?}, got {other:?}"),
    }
}

#[track_caller]
fn assert_words(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "expected {word:?} in: {text}");
    }
}

/// The client's own error, where the system's helpers add context.
fn client_error<T>(outcome: Result<T>) -> Result<T, ClientError> {
    outcome.map_err(|error| {
        error
            .downcast()
            .expect("the error of a call is the client's")
    })
}

/// A node without peers that holds step 10 of rank 0.
struct Alone {
    system: System,
    run: RunId,
    trainers: Vec<Trainer>,
}

impl Alone {
    fn start(extra: &str) -> Result<Self> {
        let system = System::start(1, None, extra)?;
        let (run, mut trainers) = system.trainers(1)?;
        system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Policy)?;
        system.wait(0, run, 10, CheckpointState::Committed)?;
        Ok(Self {
            system,
            run,
            trainers,
        })
    }

    /// Step 10 is still whole.
    fn nothing_was_lost(&self) -> Result<()> {
        self.system.restore(&[0], 10, &shards(1, 10)).map(|_| ())
    }
}

/// Three nodes (2,1) of which nodes 0 and 1 train.
fn three(extra: &str) -> Result<(System, RunId, Vec<Trainer>)> {
    let system = System::start(3, Some((2, 1)), extra)?;
    let (run, trainers) = system.trainers(2)?;
    Ok((system, run, trainers))
}

fn save_until(
    system: &System,
    run: RunId,
    trainers: &mut [Trainer],
    step: u64,
    state: CheckpointState,
) -> Result<()> {
    system.save(trainers, step, &shards(2, step), DurableWish::Policy)?;
    system.wait(0, run, step, state)
}

const DURABLE: &str =
    "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\n";

/// Waits until a file has all the words.
fn wait_for_words(path: &Path, words: &[&str]) -> Result<String> {
    let started = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if words.iter().all(|word| text.contains(word)) {
            return Ok(text);
        }
        ensure!(
            started.elapsed() < Duration::from_secs(20),
            "expected {words:?} in {}:\n{text}",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// One bit of the byte in the middle of a file.
fn flip(path: &Path) -> Result<()> {
    let mut bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    Ok(std::fs::write(path, bytes)?)
}

#[test]
fn an_unknown_namespace() -> Result<()> {
    let mut alone = Alone::start("")?;
    let mine = alone.system.namespace.clone();
    alone.system.namespace = storaged_sdk::wire::Namespace::new("nobody")?;
    let planned = alone.system.reader(0)?.plan(None, 1000);
    assert_refused(
        planned,
        RefusalCode::UnknownNamespace,
        &["no namespace nobody", "STORAGED_NAMESPACE"],
    );
    alone.system.namespace = mine;
    alone.nothing_was_lost()
}

#[test]
fn a_wrong_token() -> Result<()> {
    let mut alone = Alone::start("")?;
    let token = std::mem::replace(&mut alone.system.token, b"guess".to_vec());
    let words = ["namespace job", "another job token", "STORAGED_TOKEN"];
    let reader = client_error(alone.system.reader(0));
    assert_refused(reader, RefusalCode::WrongToken, &words);
    let trainer = client_error(alone.system.trainer(0, alone.run, 0, 1));
    assert_refused(trainer, RefusalCode::WrongToken, &words);
    alone.system.token = token;
    alone.nothing_was_lost()
}

#[test]
fn a_wrong_user() -> Result<()> {
    if !rustix::process::getuid().is_root() {
        eprintln!("skipped: only root can start a process as another user");
        return Ok(());
    }
    let alone = Alone::start("")?;
    let public = alone.system.root.path();
    open_to_all(public, 0o755)?;
    let program = public.join("storaged");
    std::fs::copy(executable(), &program)?;
    open_to_all(&program, 0o755)?;
    let output = Command::new(&program)
        .args(["ls", "--socket"])
        .arg(alone.system.cluster.socket(0))
        .uid(65534)
        .gid(65534)
        .current_dir("/")
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    assert_words(
        &text,
        &["expected a process of user id {0}", "got 65534", "tenant"],
    );
    alone.nothing_was_lost()
}

fn open_to_all(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let permissions = std::fs::Permissions::from_mode(mode);
    Ok(std::fs::set_permissions(path, permissions)?)
}

#[test]
fn a_shard_longer_than_its_slot() -> Result<()> {
    let mut alone = Alone::start("")?;
    let trainer = &mut alone.trainers[0];
    let slot = trainer.acquire(1000, WAIT_MS)?;
    let sealed = trainer.seal(&slot, Step::new(20), 1 << 40);
    let words = [
        "expected a shard of at most",
        "got 1099511627776",
        "acquire a larger slot",
    ];
    assert_refused(sealed, RefusalCode::ShardTooLong, &words);
    assert!(slot.copy_in(0, &vec![0; 64 << 20]).is_err());
    alone.nothing_was_lost()
}

#[test]
fn a_step_that_is_not_above_the_last() -> Result<()> {
    let mut alone = Alone::start("")?;
    let trainer = &mut alone.trainers[0];
    for step in [9, 10] {
        let slot = trainer.acquire(1000, WAIT_MS)?;
        let sealed = trainer.seal(&slot, Step::new(step), 1000);
        let got = format!("got {step}");
        let words = ["expected a step above 10", got.as_str()];
        assert_refused(sealed, RefusalCode::StepNotNewer, &words);
        trainer.release(&slot)?;
    }
    alone.nothing_was_lost()
}

#[test]
fn an_older_run() -> Result<()> {
    let mut alone = Alone::start("")?;
    let newer = alone.system.reader(0)?.open_run(WAIT_MS)?;
    let expected = format!("expected run {newer} or newer");
    let got = format!("got run {}", alone.run);
    let words = [expected.as_str(), got.as_str(), "must end"];
    let acquired = alone.trainers[0].acquire(1000, WAIT_MS);
    assert_refused(acquired, RefusalCode::OlderRun, &words);
    let trainer = client_error(alone.system.trainer(0, alone.run, 0, 1));
    assert_refused(trainer, RefusalCode::OlderRun, &words);
    alone.nothing_was_lost()
}

#[test]
fn a_world_size_that_disagrees() -> Result<()> {
    let alone = Alone::start("")?;
    let other = client_error(alone.system.trainer(0, alone.run, 1, 4));
    let words = ["has world size 1", "got 4", "every rank"];
    assert_refused(other, RefusalCode::WorldSize, &words);
    let outside = client_error(alone.system.trainer(0, alone.run, 1, 1));
    let words = ["expected a rank below the world size 1", "got 1"];
    assert_refused(outside, RefusalCode::WorldSize, &words);
    alone.nothing_was_lost()
}

#[test]
fn a_full_budget() -> Result<()> {
    let mut alone = Alone::start("[memory]\nbudget = \"4MiB\"\n")?;
    let trainer = &mut alone.trainers[0];
    let words = ["nothing older was dropped", "memory.budget", "4194304"];
    let acquired = trainer.acquire(5 << 20, WAIT_MS);
    assert_refused(acquired, RefusalCode::BudgetFull, &words);
    let acquired = trainer.acquire(3 << 20, WAIT_MS);
    assert_refused(acquired, RefusalCode::BudgetFull, &words);
    alone.nothing_was_lost()?;
    // And a shard that fits goes on being saved.
    let slot = alone.trainers[0].acquire(1000, WAIT_MS)?;
    slot.copy_in(0, &[1; 1000])?;
    Ok(alone.trainers[0].seal(&slot, Step::new(20), 1000)?)
}

#[test]
fn a_config_with_an_unknown_key() -> Result<()> {
    let root = tempfile::tempdir()?;
    let path = root.path().join("storaged.toml");
    std::fs::write(&path, "[memory]\nbugdet = \"1GiB\"\n")?;
    let error = ConfigFile::load(&path)
        .expect_err("bugdet is no key")
        .to_string();
    assert_words(
        &error,
        &["line 2", "bugdet", "expected", "budget", "storaged.toml"],
    );
    let output = Command::new(executable())
        .args(["run", "--config"])
        .arg(&path)
        .output()?;
    assert!(!output.status.success());
    assert_words(&String::from_utf8_lossy(&output.stderr), &["bugdet"]);
    Ok(())
}

#[test]
fn a_daemon_that_died() -> Result<()> {
    let mut alone = Alone::start("")?;
    alone.system.cluster.kill(0)?;
    let started = Instant::now();
    let broken = alone.trainers[0]
        .acquire(1000, WAIT_MS)
        .expect_err("the daemon is dead");
    assert!(
        matches!(broken, ClientError::Broken { .. }),
        "got {broken:?}"
    );
    assert_words(&broken.to_string(), &["acquire slot", "connect again"]);
    let gone = client_error(alone.system.reader(0)).expect_err("the daemon is dead");
    assert!(
        matches!(gone, ClientError::Unavailable { .. }),
        "got {gone:?}"
    );
    assert_words(
        &gone.to_string(),
        &["is it running", "STORAGED_SOCKET", "n0"],
    );
    assert!(started.elapsed() < Duration::from_secs(5));
    Ok(())
}
