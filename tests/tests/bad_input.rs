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
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, executable, shards, write_program};

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
    let token = std::mem::replace(&mut alone.system.token, b"guess of a stranger".to_vec());
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
    write_program(Command::new("cp").arg(executable()).arg(&program))?;
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
        &["this user may not open", "tenant", "Permission denied"],
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
        .args(["run", "--keep", "none", "--config"])
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
    // It is waited for as long as a restart may take, and no longer.
    let away = alone.trainers[0]
        .acquire(1000, WAIT_MS)
        .expect_err("the daemon is dead");
    assert!(
        matches!(away, ClientError::Unavailable { .. }),
        "got {away:?}"
    );
    assert_words(
        &away.to_string(),
        &["is it running", "STORAGED_SOCKET", "n0"],
    );
    let gone = client_error(alone.system.reader(0)).expect_err("the daemon is dead");
    assert!(
        matches!(gone, ClientError::Unavailable { .. }),
        "got {gone:?}"
    );
    assert_words(
        &gone.to_string(),
        &["is it running", "STORAGED_SOCKET", "n0"],
    );
    assert!(started.elapsed() < Duration::from_secs(30));
    Ok(())
}

/// Seals every rank's shard and keeps the slots, so that they can be written to afterwards.
fn seal_and_keep_mapping(
    trainers: &mut [Trainer],
    step: u64,
    shards: &[Vec<u8>],
) -> Result<Vec<StagedSlot>> {
    let mut slots = Vec::new();
    for (trainer, shard) in trainers.iter_mut().zip(shards) {
        let slot = trainer.acquire(shard.len() as u64, WAIT_MS)?;
        slot.copy_in(0, shard)?;
        trainer.seal(&slot, Step::new(step), shard.len() as u64)?;
        slots.push(slot);
    }
    Ok(slots)
}

#[test]
fn a_chunk_flipped_in_ram_is_never_read_and_is_decoded_elsewhere() -> Result<()> {
    let (system, run, mut trainers) = three("")?;
    let saved = shards(2, 10);
    let slots = seal_and_keep_mapping(&mut trainers, 10, &saved)?;
    trainers[0].commit(Step::new(10), vec![1], Vec::new(), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Protected)?;
    let wrong = saved[0][300_000] ^ 1;
    slots[0].copy_in(300_000, &[wrong])?;

    let mut reader = system.reader(0)?;
    let plan = reader.plan(None, WAIT_MS)?;
    let manifest = reader.manifest(plan.manifest)?;
    let shard = reader.open_shard(&manifest, Rank::new(0), Vec::new(), WAIT_MS)?;
    assert_eq!(shard.rung(), Rung::OwnRam);
    let mut got = vec![0; saved[0].len()];
    let error = shard
        .read_at(0, &mut got)
        .expect_err("a byte of chunk 1 was changed");
    assert!(
        matches!(
            error,
            ClientError::Corrupt {
                rank: 0,
                chunk: 1,
                ..
            }
        ),
        "{error:?}"
    );
    assert_words(
        &error.to_string(),
        &["expected", "got", "nothing of it was used"],
    );
    assert!(
        !got.contains(&wrong) || got[300_000] != wrong || got[262_144..524_288] == [0; 262_144]
    );

    let mut elsewhere = system.reader(1)?;
    let shard = elsewhere.open_shard(&manifest, Rank::new(0), Vec::new(), WAIT_MS)?;
    assert_eq!(shard.rung(), Rung::Decoded);
    shard.read_at(0, &mut got)?;
    assert!(got == saved[0], "the decoded shard has other bytes");
    Ok(())
}

#[test]
fn a_shard_damaged_in_ram_comes_from_the_next_rung() -> Result<()> {
    let (system, run, mut trainers) = three("")?;
    let saved = shards(2, 10);
    let slots = seal_and_keep_mapping(&mut trainers, 10, &saved)?;
    trainers[0].commit(Step::new(10), vec![1], Vec::new(), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Protected)?;
    slots[0].copy_in(1000, &[saved[0][1000] ^ 1])?;
    drop(trainers);

    let mut reader = system.reader(0)?;
    let plan = reader.plan(None, WAIT_MS)?;
    let manifest = reader.manifest(plan.manifest)?;
    let rank = Rank::new(0);
    let own = reader.open_shard(&manifest, rank, Vec::new(), WAIT_MS)?;
    assert_eq!(own.rung(), Rung::OwnRam);
    let mut got = vec![0; saved[0].len()];
    let wrong = own.read_at(0, &mut got).unwrap_err();
    assert!(wrong.to_string().contains("digest"), "{wrong}");
    let without = Some(Rung::OwnRam);
    let other = reader.open_shard_without(&manifest, rank, Vec::new(), WAIT_MS, without)?;
    assert_eq!(other.rung(), Rung::Decoded);
    other.read_at(0, &mut got)?;
    assert_eq!(got, saved[0]);

    // A whole shard of the node itself takes the damaged one's place.
    let healed = system
        .reader(0)?
        .open_shard(&manifest, rank, Vec::new(), WAIT_MS)?;
    assert_eq!(healed.rung(), Rung::OwnRam);
    healed.read_at(0, &mut got)?;
    assert_eq!(got, saved[0]);
    Ok(())
}

#[test]
fn a_step_changed_after_its_seal_is_given_up_and_the_older_one_stays() -> Result<()> {
    let (system, run, mut trainers) = three("")?;
    save_until(&system, run, &mut trainers, 10, CheckpointState::Protected)?;
    let saved = shards(2, 20);
    let slots = seal_and_keep_mapping(&mut trainers, 20, &saved)?;
    // Time for the digests, which are taken before the parity is.
    std::thread::sleep(Duration::from_secs(1));
    slots[0].copy_in(300_000, &[saved[0][300_000] ^ 1])?;
    trainers[0].commit(Step::new(20), vec![1], Vec::new(), DurableWish::Policy)?;
    let waited = system
        .reader(0)?
        .wait(run, Step::new(20), CheckpointState::Protected, WAIT_MS);
    let words = [
        "step 20",
        "given up before it was protected",
        "only before its seal",
        "expected",
        "got",
    ];
    assert_refused(waited, RefusalCode::Abandoned, &words);
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    Ok(())
}

#[test]
fn a_step_that_one_rank_never_sealed_is_not_waited_for_without_end() -> Result<()> {
    let (system, run, mut trainers) = three("")?;
    save_until(&system, run, &mut trainers, 10, CheckpointState::Protected)?;
    seal_and_keep_mapping(&mut trainers[..1], 20, &shards(1, 20))?;
    let waited = system
        .reader(0)?
        .wait(run, Step::new(20), CheckpointState::Protected, 500);
    let words = ["expected step 20", "to be protected", "it is staged"];
    assert_refused(waited, RefusalCode::TimedOut, &words);
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    Ok(())
}

/// Steps 10 and 20 in the directory, nothing in RAM.
fn only_durable() -> Result<(System, PathBuf)> {
    let (mut system, run, mut trainers) = three(DURABLE)?;
    for step in [10, 20] {
        save_until(&system, run, &mut trainers, step, CheckpointState::Durable)?;
    }
    drop(trainers);
    (0..3).try_for_each(|node| system.cluster.kill(node))?;
    let folder = system.root.path().join(format!("tier/job/run-{run}"));
    Ok((system, folder))
}

/// The newest step is offered but rank 0's shard is refused with these words; step 10 is whole.
fn newest_is_refused(system: &mut System, words: &[&str]) -> Result<()> {
    system.cluster.start_all()?;
    let mut reader = system.reader(0)?;
    let plan = reader.plan(None, WAIT_MS)?;
    assert_eq!(plan.step, Step::new(20));
    let manifest = reader.manifest(plan.manifest)?;
    let opened = reader.open_shard(&manifest, Rank::new(0), Vec::new(), WAIT_MS);
    let words = [words, &["step 20", "another plan"]].concat();
    match opened {
        Err(ClientError::Refused(refusal)) => {
            assert!(
                matches!(
                    refusal.code,
                    RefusalCode::Corrupt | RefusalCode::TooManyLost
                ),
                "{refusal:?}"
            );
            assert_words(&refusal.message, &words);
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
    older_is_whole(system)
}

fn older_is_whole(system: &System) -> Result<()> {
    let expected = shards(2, 10);
    let mut reader = system.reader(0)?;
    let plan = reader.plan(Some(Step::new(10)), WAIT_MS)?;
    let manifest = reader.manifest(plan.manifest)?;
    for (rank, saved) in expected.iter().enumerate() {
        let mut got = vec![0; saved.len()];
        let rank = Rank::new(rank as u32);
        let shard = reader.open_shard(&manifest, rank, Vec::new(), WAIT_MS)?;
        shard.read_at(0, &mut got)?;
        assert!(got == *saved, "rank {rank} came back with other bytes");
    }
    Ok(())
}

#[test]
fn a_flipped_object() -> Result<()> {
    let (mut system, folder) = only_durable()?;
    flip(&folder.join("step-20/__0_0.distcp"))?;
    newest_is_refused(&mut system, &["durable tier", "digest mismatch in chunk 1"])
}

#[test]
fn a_truncated_object() -> Result<()> {
    let (mut system, folder) = only_durable()?;
    let file = std::fs::File::options()
        .write(true)
        .open(folder.join("step-20/__0_0.distcp"))?;
    file.set_len(400_000)?;
    newest_is_refused(&mut system, &["durable tier", "expected", "got"])
}

#[test]
fn a_flipped_table_of_digests() -> Result<()> {
    let (mut system, folder) = only_durable()?;
    flip(&folder.join("step-20/storaged.leaves.0"))?;
    let words = ["storaged.leaves.0", "expected the root", "got"];
    newest_is_refused(&mut system, &words)
}

#[test]
fn a_truncated_manifest_hides_only_its_own_step() -> Result<()> {
    let (mut system, folder) = only_durable()?;
    let path = folder.join("step-20/storaged.manifest");
    let bytes = std::fs::read(&path)?;
    std::fs::write(&path, &bytes[..bytes.len() / 2])?;
    system.cluster.start_all()?;
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    let words = ["storaged.manifest", "cannot be used"];
    wait_for_words(&system.cluster.log(0), &words)?;
    Ok(())
}

#[test]
fn a_flipped_manifest_hides_only_its_own_step() -> Result<()> {
    let (mut system, folder) = only_durable()?;
    flip(&folder.join("step-20/storaged.manifest"))?;
    system.cluster.start_all()?;
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    let words = ["storaged.manifest", "cannot be used"];
    wait_for_words(&system.cluster.log(0), &words)?;
    Ok(())
}

#[test]
fn a_flipped_schema_is_read_from_another_step_that_names_the_same() -> Result<()> {
    let (mut system, folder) = only_durable()?;
    flip(&folder.join("step-20/storaged.schema"))?;
    system.cluster.start_all()?;
    system.restore(&[0, 1], 20, &shards(2, 20))?;
    let words = ["storaged.schema", "of digest", "read from another step"];
    wait_for_words(&system.cluster.log(0), &words)?;
    Ok(())
}

/// Replaces node 2's certificate while it is down, and starts it again.
fn comes_back_with(
    certificates: impl FnOnce(&System, &Path) -> Result<()>,
    words: [&str; 3],
) -> Result<()> {
    let (mut system, run, mut trainers) = three("")?;
    save_until(&system, run, &mut trainers, 10, CheckpointState::Protected)?;
    system.cluster.kill(2)?;
    let directory = system.root.path().join("certs");
    for name in ["n2.pem", "n2.key"] {
        std::fs::remove_file(directory.join(name))?;
    }
    certificates(&system, &directory)?;
    system.cluster.start(2)?;
    let log = wait_for_words(&system.cluster.log(0), &words)?;
    let reason = log.lines().rfind(|line| line.contains(words[0]));
    assert_words(reason.unwrap_or_default(), &words);
    // The link that node 0 had to the killed daemon is down by now, and stays down.
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        let status = system.reader(0)?.status()?;
        assert_eq!(status.matches(r#""up":true"#).count(), 1, "{status}");
        std::thread::sleep(Duration::from_millis(200));
    }
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    Ok(())
}

#[test]
fn a_peer_with_an_expired_certificate() -> Result<()> {
    comes_back_with(
        |system, directory| {
            issue(directory, &system.cluster.name(2), Duration::ZERO)?;
            Ok(())
        },
        [
            "the certificate of n2 was refused",
            "storaged cert renew DIR",
            "xpired",
        ],
    )
}

#[test]
fn a_peer_with_a_certificate_of_another_authority() -> Result<()> {
    comes_back_with(
        |system, directory| {
            let other = system.root.path().join("other");
            create_ca(&other, Duration::from_secs(3600))?;
            issue(&other, &system.cluster.name(2), Duration::from_secs(3600))?;
            for name in ["n2.pem", "n2.key"] {
                std::fs::copy(other.join(name), directory.join(name))?;
            }
            Ok(())
        },
        [
            "the certificate of n2 is of another authority",
            "storaged cert issue DIR NODE",
            "expected one of the authority CN=storaged cluster authority with key ",
        ],
    )
}

#[test]
fn a_node_with_the_certificate_of_another_does_not_start() -> Result<()> {
    let (mut system, _, _) = three("")?;
    system.cluster.kill(2)?;
    let directory = system.root.path().join("certs");
    for kind in ["pem", "key"] {
        std::fs::copy(
            directory.join(format!("n1.{kind}")),
            directory.join(format!("n2.{kind}")),
        )?;
    }
    let output = Command::new(executable())
        .args(["run", "--keep", "none", "--config"])
        .arg(system.cluster.config_path(2))
        .output()?;
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert_words(&text, &["expected a certificate for node n2", "got"]);
    Ok(())
}

/// A file system of 4 MiB, gone when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// None without the right to mount.
    fn mount(path: PathBuf) -> Result<Option<Self>> {
        std::fs::create_dir(&path)?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=4m", "none"])
            .arg(&path)
            .status();
        let mounted = mounted.is_ok_and(|status| status.success());
        Ok(mounted.then_some(Self(path)))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a daemon may still have a file open there.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk() -> Result<()> {
    let place = tempfile::tempdir()?;
    let Some(disk) = SmallDisk::mount(place.path().join("disk"))? else {
        eprintln!("skipped: mounting a small file system needs root");
        return Ok(());
    };
    let extra = DURABLE.replace("ROOT/tier", &disk.0.display().to_string());
    let (system, run, mut trainers) = three(&extra)?;
    save_until(&system, run, &mut trainers, 10, CheckpointState::Durable)?;
    let filler = disk.0.join("filler");
    // It fills what is left, and fails when nothing is.
    let filled = std::fs::write(&filler, vec![1; 8 << 20]);
    assert!(filled.is_err());
    save_until(&system, run, &mut trainers, 20, CheckpointState::Protected)?;
    let words = ["the durable tier is full", "nothing older was dropped"];
    wait_for_words(&system.cluster.log(0), &words)?;
    let waited = system
        .reader(0)?
        .wait(run, Step::new(20), CheckpointState::Durable, 500);
    assert_refused(
        waited,
        RefusalCode::TimedOut,
        &["expected step 20", "durable"],
    );
    older_is_whole(&system)?;
    // Room again: the upload is tried again by itself.
    std::fs::remove_file(filler)?;
    system.wait(0, run, 20, CheckpointState::Durable)
}
