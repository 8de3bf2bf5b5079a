//! The durable tier of real daemons when it is not there, not mounted, damaged or too full: said, never taken for empty.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use storaged_sdk::wire::local::{DurableWish, Keep, PinnedOnes, Removal, Rung};
use storaged_sdk::wire::{CheckpointState, Rank, RefusalCode, Step};
use storaged_sdk::{ClientError, WithTrainers};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, executable, shards, shards_from, wait};

const TIER: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\n";

/// The tier's place, away or back: as when a file system is unmounted, but the mount point is there.
struct Mount {
    at: PathBuf,
    away: PathBuf,
}

impl Mount {
    fn of(system: &System) -> Self {
        let root = system.root.path();
        Self {
            at: root.join("tier"),
            away: root.join("away"),
        }
    }

    fn unmount(&self) -> Result<()> {
        std::fs::rename(&self.at, &self.away)?;
        Ok(std::fs::create_dir(&self.at)?)
    }

    fn mount(&self) -> Result<()> {
        std::fs::remove_dir_all(&self.at)?;
        Ok(std::fs::rename(&self.away, &self.at)?)
    }
}

#[track_caller]
fn unavailable<T: std::fmt::Debug>(outcome: Result<T, ClientError>, word: &str) {
    match outcome {
        Err(ClientError::Refused(refusal)) => {
            assert_eq!(refusal.code, RefusalCode::DurableUnavailable, "{refusal}");
            assert!(refusal.message.contains(word), "{refusal}");
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// One node whose steps are durable, and its RAM is lost.
fn restarted(steps: &[u64]) -> Result<System> {
    let mut system = System::start(1, None, TIER)?;
    let (run, mut trainers) = system.trainers(1)?;
    for step in steps {
        system.save(
            &mut trainers,
            *step,
            &shards(1, *step),
            DurableWish::Required,
        )?;
        system.wait(0, run, *step, CheckpointState::Durable)?;
    }
    drop(trainers);
    system.cluster.kill(0)?;
    Ok(system)
}

#[test]
fn a_daemon_starts_without_its_tier() -> Result<()> {
    let mut system = restarted(&[10])?;
    let mount = Mount::of(&system);
    std::fs::rename(&mount.at, &mount.away)?;
    system.cluster.start_all()?;
    unavailable(
        system.reader(0)?.plan(None, WAIT_MS),
        "is the file system mounted?",
    );
    unavailable(
        system.reader(0)?.open_run(WAIT_MS),
        "is the file system mounted?",
    );
    let status = system.reader(0)?.status()?;
    assert!(
        status.contains(r#""durable":{"state":"not_mounted""#),
        "{status}"
    );
    std::fs::rename(&mount.away, &mount.at)?;
    system.restore(&[0], 10, &shards(1, 10))?;
    let status = system.reader(0)?.status()?;
    assert!(
        status.contains(r#""durable":{"state":"ready"}"#),
        "{status}"
    );
    let (run, _) = system.trainers(1)?;
    ensure!(
        run.number() > 1,
        "expected a run above the tier's, got {run}"
    );
    Ok(())
}

/// A directory that is not mounted looks like a new tier: nobody can tell, so it is said, once, with what to do.
#[test]
fn a_new_tier_in_a_directory_is_warned_of_once() -> Result<()> {
    let mut system = restarted(&[10])?;
    let warned = |system: &System| -> Result<Vec<String>> {
        let log = std::fs::read_to_string(system.cluster.log(0))?;
        let is_of_it = |line: &&str| line.contains(" WARN ") && line.contains("a new durable tier");
        Ok(log.lines().filter(is_of_it).map(str::to_owned).collect())
    };
    let first = warned(&system)?;
    assert_eq!(first.len(), 1, "{first:?}");
    for word in [
        "its file system is not mounted",
        r#"durable.marker = "expect""#,
    ] {
        assert!(first[0].contains(word), "{word} in {first:?}");
    }
    assert!(first[0].contains(&Mount::of(&system).at.display().to_string()));
    system.cluster.start_all()?;
    system.reader(0)?.plan(None, WAIT_MS)?;
    assert_eq!(warned(&system)?, first, "not again");
    Ok(())
}

#[test]
fn an_unmounted_directory_is_not_empty() -> Result<()> {
    let mut system = restarted(&[10])?;
    system.cluster.start_all()?;
    let mount = Mount::of(&system);
    // The daemon has seen the tier before it goes.
    system.reader(0)?.plan(None, WAIT_MS)?;
    mount.unmount()?;
    unavailable(
        system.reader(0)?.plan(None, WAIT_MS),
        "this is not the durable tier",
    );
    assert_eq!(
        std::fs::read_dir(&mount.at)?.count(),
        0,
        "nothing is written there"
    );
    mount.mount()?;
    system.restore(&[0], 10, &shards(1, 10))?;
    Ok(())
}

#[test]
fn a_damaged_step_is_passed_over_by_the_next_plan() -> Result<()> {
    let mut system = restarted(&[10, 20])?;
    system.cluster.start_all()?;
    let mut reader = system.reader(0)?;
    let plan = reader.plan(None, WAIT_MS)?;
    assert_eq!(plan.step, Step::new(20));
    let folder = format!("tier/job/run-{}/step-20/__0_0.distcp", plan.run);
    let path = system.root.path().join(folder);
    let mut bytes = std::fs::read(&path)?;
    bytes[400_000] ^= 1;
    std::fs::write(&path, bytes)?;
    let manifest = reader.manifest(plan.manifest)?;
    let opened = reader.open_shard(&manifest, Rank::new(0), Vec::new(), WAIT_MS);
    match opened {
        Err(ClientError::Refused(refusal)) => {
            assert_eq!(refusal.code, RefusalCode::Corrupt, "{refusal}")
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
    drop(reader);
    // Also after a restart: the marker is in the tier.
    for _ in 0..2 {
        let plan = system.reader(0)?.plan(None, WAIT_MS)?;
        assert_eq!(plan.step, Step::new(10));
        let passed = &plan.passed_over[0];
        assert_eq!(passed.step, Step::new(20));
        assert!(passed.reason.contains("quarantined"), "{}", passed.reason);
        assert!(
            passed.reason.contains("digest mismatch in chunk 1"),
            "{}",
            passed.reason
        );
        let listed = Command::new(executable())
            .args(["ls", "job", "--socket"])
            .arg(system.cluster.socket(0))
            .output()?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let line = listed.lines().find(|line| line.contains("quarantined"));
        let line = line.unwrap_or_default();
        assert!(
            line.contains("step 20: ") && line.contains("digest mismatch in chunk 1"),
            "{listed}"
        );
        system.cluster.kill(0)?;
        system.cluster.start_all()?;
    }
    let asked = system.reader(0)?.plan(Some(Step::new(20)), WAIT_MS)?;
    assert_eq!(asked.step, Step::new(20));
    system.restore(&[0], 10, &shards(1, 10))?;
    Ok(())
}

#[test]
fn retention_pins_and_removal_by_hand() -> Result<()> {
    let system = System::start(1, None, &format!("{TIER}keep_last = 2\n"))?;
    let (run, mut trainers) = system.trainers(1)?;
    let mut reader = system.reader(0)?;
    for step in [10, 20, 30, 40, 50] {
        system.save(&mut trainers, step, &shards(1, step), DurableWish::Required)?;
        system.wait(0, run, step, CheckpointState::Durable)?;
        if step == 20 {
            reader.keep(None, Step::new(20), Keep::Pin, WAIT_MS)?;
        }
    }
    let folder = system.root.path().join(format!("tier/job/run-{run}"));
    let steps = || -> Vec<bool> {
        let has = |step: &u64| folder.join(format!("step-{step}")).exists();
        [10, 20, 30, 40, 50].iter().map(has).collect()
    };
    // Removal goes on behind the last publication.
    let began = std::time::Instant::now();
    while steps() != [false, true, false, true, true] {
        ensure!(began.elapsed().as_secs() < 20, "kept {:?}", steps());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let rm = |arguments: &[&str]| {
        let output = Command::new(executable())
            .env("STORAGED_TOKEN", "a-secret-of-tests")
            .args(["rm", "job", "--socket"])
            .arg(system.cluster.socket(0))
            .args(arguments)
            .output();
        output.map(|output| {
            let text = [output.stdout, output.stderr].concat();
            (
                output.status.code(),
                String::from_utf8_lossy(&text).into_owned(),
            )
        })
    };
    let (code, text) = rm(&["--step", "20"])?;
    assert_eq!(code, Some(1), "the job trains: {text}");
    assert!(text.contains("--live"), "{text}");
    assert_eq!(steps(), [false, true, false, true, true]);
    let (code, text) = rm(&["--step", "20", "--live"])?;
    assert_eq!(code, Some(1), "it is pinned: {text}");
    assert!(text.contains("--pinned"), "{text}");
    for nothing in [["--step", "77"], ["--run", "77"]] {
        let (code, text) = rm(&nothing)?;
        assert_eq!(code, Some(1), "{nothing:?}: {text}");
        assert!(text.contains("got none"), "{text}");
    }
    assert_eq!(steps(), [false, true, false, true, true]);
    let (code, text) = rm(&["--step", "20", "--live", "--pinned"])?;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("removed 1 checkpoints"), "{text}");
    assert_eq!(steps(), [false, false, false, true, true]);
    let (code, text) = rm(&[])?;
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("--all"), "{text}");
    // A job that has ended needs no flag; that its trainers are gone is heard in a moment.
    drop(trainers);
    let began = std::time::Instant::now();
    while let Err(error) = reader.remove(
        Removal::All,
        WithTrainers::Refused,
        PinnedOnes::Spared,
        WAIT_MS,
    ) {
        ensure!(began.elapsed().as_secs() < 20, "{error}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    ensure!(!folder.exists(), "the run's folder is gone");
    Ok(())
}

/// A job that is dropped while its step is copied leaves no half of it behind, where nobody would look for it.
#[test]
fn a_dropped_job_leaves_no_upload_in_the_tier() -> Result<()> {
    let system = System::start(1, None, &format!("{TIER}rate = \"20KiB\"\n"))?;
    let (_, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Policy)?;
    let uploads = system.root.path().join("tier/.storaged/uploads");
    let count = || std::fs::read_dir(&uploads).map_or(0, Iterator::count);
    let until = |wanted: usize| -> Result<()> {
        let began = std::time::Instant::now();
        while count() != wanted {
            let waited = began.elapsed().as_secs();
            ensure!(waited < 20, "expected {wanted} uploads, got {}", count());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(())
    };
    until(1)?;
    let dropped = Command::new(executable())
        .env("STORAGED_TOKEN", "a-secret-of-tests")
        .args(["drop", "job", "--force", "--socket"])
        .arg(system.cluster.socket(0))
        .output()?;
    ensure!(dropped.status.success(), "{dropped:?}");
    until(0)
}

/// Replicas of what one rank has saved: all nodes want it at once, and the tier gives it about once.
#[test]
fn nodes_that_want_the_same_shard_read_it_together() -> Result<()> {
    let shared = format!("{TIER}shared_reads = \"always\"\n");
    let mut system = System::start(3, Some((2, 1)), &shared)?;
    let (run, mut trainers) = system.trainers(1)?;
    let saved = shards_from(90_000_000, 1, 10);
    system.save(&mut trainers, 10, &saved, DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Durable)?;
    drop(trainers);
    for node in 0..3 {
        system.cluster.kill(node)?;
    }
    system.cluster.start_all()?;
    wait("links", || {
        for node in 0..3 {
            let up: u64 = system.cluster.metric(node, "storaged_place_peers_up")?;
            ensure!(up == 2, "n{node} has {up} links");
        }
        Ok(())
    })?;
    // Two readers on each of the nodes whose shard it is not.
    let system = &system;
    let rungs: Result<Vec<_>> = std::thread::scope(|scope| {
        let readers = [1, 2, 1, 2].map(|node| {
            let saved = &saved;
            scope.spawn(move || system.restore(&[node], 10, saved))
        });
        let ended = readers.into_iter().map(|reader| reader.join());
        ended.map(|ended| ended.expect("no panic")).collect()
    });
    assert_eq!(rungs?, vec![vec![Rung::Durable]; 4]);
    let sum = |name: &str| -> Result<u64> {
        let of_all = (0..3).map(|node| system.cluster.metric::<u64>(node, name));
        Ok(of_all.sum::<Result<u64, _>>()?)
    };
    wait("what was passed on", || {
        let got = sum("storaged_trickle_bytes_from_peers_total")?;
        let given = sum("storaged_trickle_bytes_for_peers_total")?;
        let most = 2 * saved[0].len() as u64;
        ensure!(got == given && got > 0 && got <= most, "{got} of {given}");
        Ok(())
    })
}
