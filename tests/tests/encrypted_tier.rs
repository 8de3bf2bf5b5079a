//! A durable tier that is encrypted, with real daemons: what lies there says nothing, comes back after all have died, and is
//! neither lost nor taken for damaged where a node lacks its key.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RefusalCode, RunId};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, shards, wait};

const TIER: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\nincrements = 2\n";
const OF_FILE: &str = "[trickle.encryption]\nkey_file = \"ROOT/tier.key\"\n";
const OF_COMMAND: &str =
    "[trickle.encryption]\nkey_command = [\"/bin/sh\", \"-c\", \"cat ROOT/tier.key\"]\n";

/// Two keys, by a digit.
fn key(digit: char) -> String {
    String::from(digit).repeat(64)
}

fn write_keys(root: &Path, keys: &[String]) -> Result<()> {
    let path = root.join("tier.key");
    fs::write(&path, keys.join("\n"))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// Daemons that begin with this key.
fn started(nodes: usize, code: Option<(usize, usize)>, extra: &str) -> Result<System> {
    let mut system = System::prepared(nodes, code, &format!("{TIER}{extra}"))?;
    write_keys(system.root.path(), &[key('1')])?;
    system.cluster.start_all()?;
    Ok(system)
}

fn save(system: &System, world: u32, steps: &[u64]) -> Result<RunId> {
    let (run, mut trainers) = system.trainers(world)?;
    for step in steps {
        let bytes = shards(world, *step);
        system.save(&mut trainers, *step, &bytes, DurableWish::Required)?;
        system.wait(0, run, *step, CheckpointState::Durable)?;
    }
    Ok(run)
}

fn kill_all(system: &mut System) -> Result<()> {
    for node in 0..system.cluster.nodes() {
        system.cluster.kill(node)?;
    }
    Ok(())
}

/// All files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// Names of files that have any eight bytes of these in them.
fn say_something(folder: &Path, plain: &[Vec<u8>]) -> Result<Vec<String>> {
    let parts = plain.iter().flat_map(|bytes| bytes.windows(8));
    let parts: HashSet<&[u8]> = parts.collect();
    let mut found = Vec::new();
    for path in files(folder)? {
        let bytes = fs::read(&path)?;
        if bytes.windows(8).any(|window| parts.contains(window)) {
            found.push(path.display().to_string());
        }
    }
    Ok(found)
}

fn refused<T: std::fmt::Debug>(outcome: Result<T, ClientError>, words: &[&str]) -> Result<()> {
    match outcome {
        Err(ClientError::Refused(refusal)) => {
            ensure!(
                refusal.code == RefusalCode::DurableUnavailable,
                "{refusal:?}"
            );
            for word in words {
                ensure!(refusal.message.contains(word), "{word} in {refusal}");
            }
            Ok(())
        }
        other => anyhow::bail!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn what_was_saved_is_restored_after_all_have_died_and_lies_there_unreadable() -> Result<()> {
    let mut system = started(3, Some((2, 1)), OF_FILE)?;
    let run = save(&system, 2, &[10, 20, 30])?;
    let tier = system.root.path().join("tier");
    let plain: Vec<Vec<u8>> = [10, 20, 30].iter().flat_map(|it| shards(2, *it)).collect();
    assert_eq!(say_something(&tier, &plain)?, Vec::<String>::new());
    let step = tier.join(format!("job/run-{run}/step-10"));
    ensure!(step.join("__0_0.distcp").exists(), "a copy of rank 0");
    ensure!(
        !step.join(".metadata").exists(),
        "nothing for stock readers"
    );
    // Records of ours say nothing either; only the tier's own marker is not encrypted.
    let ours = say_something(&tier, &[b"storaged".to_vec()])?;
    let marker = tier.join(".storaged/tier").display().to_string();
    assert_eq!(ours, [marker]);
    kill_all(&mut system)?;
    system.cluster.start_all()?;
    system.restore(&[2, 1], 30, &shards(2, 30))?;
    for step in [10, 20] {
        system.restore_step(&[0, 1], step, &shards(2, step))?;
    }
    save(&system, 2, &[40])?;
    Ok(())
}

#[test]
fn a_node_without_the_key_says_so_and_goes_back_to_nothing() -> Result<()> {
    let mut system = started(1, None, OF_FILE)?;
    save(&system, 1, &[10])?;
    system.cluster.kill(0)?;
    let path = system.cluster.config_path(0);
    let with = fs::read_to_string(&path)?;
    let without = with
        .split("[trickle.encryption]")
        .next()
        .context("a file")?;
    fs::write(&path, without)?;
    system.cluster.start_all()?;
    let words = ["encrypted with key", "trickle.encryption"];
    refused(system.reader(0)?.plan(None, WAIT_MS), &words)?;
    refused(system.reader(0)?.open_run(WAIT_MS), &words)?;
    system.cluster.kill(0)?;
    // Nor with another key.
    fs::write(&path, &with)?;
    write_keys(system.root.path(), &[key('2')])?;
    system.cluster.start_all()?;
    refused(
        system.reader(0)?.plan(None, WAIT_MS),
        &["encrypted with key", "other keys"],
    )?;
    // A reload brings the key, and nothing was taken for damaged meanwhile.
    write_keys(system.root.path(), &[key('2'), key('1')])?;
    system.cluster.signal(0, Signal::HUP)?;
    wait("the key to be taken", || {
        system.restore(&[0], 10, &shards(1, 10)).map(drop)
    })
}

#[test]
fn keys_of_a_program_are_changed_by_a_reload_and_older_copies_are_read() -> Result<()> {
    let mut system = started(2, None, OF_COMMAND)?;
    save(&system, 1, &[10])?;
    // First every node can read by the new key, then every node writes by it.
    for keys in [[key('1'), key('2')], [key('2'), key('1')]] {
        write_keys(system.root.path(), &keys)?;
        for node in 0..2 {
            let taken = |system: &System| -> Result<usize> {
                let log = fs::read_to_string(system.cluster.log(node))?;
                Ok(log.matches("took the keys").count())
            };
            let before = taken(&system)?;
            system.cluster.signal(node, Signal::HUP)?;
            wait("the keys to be taken", || {
                ensure!(taken(&system)? > before, "not yet");
                Ok(())
            })?;
        }
    }
    save(&system, 1, &[20])?;
    kill_all(&mut system)?;
    system.cluster.start_all()?;
    system.restore(&[1], 20, &shards(1, 20))?;
    system.restore_step(&[1], 10, &shards(1, 10))?;
    // Step 20 builds on step 10: without the key of that one it is named, and not damaged.
    kill_all(&mut system)?;
    write_keys(system.root.path(), &[key('2')])?;
    system.cluster.start_all()?;
    let locked = system.restore_step(&[0], 20, &shards(1, 20));
    let said = format!("{:#}", locked.err().context("the older key is missing")?);
    ensure!(said.contains("encrypted with key"), "{said}");
    write_keys(system.root.path(), &[key('2'), key('1')])?;
    system.cluster.signal(0, Signal::HUP)?;
    wait("the older key to be taken", || {
        let restored = system.restore_step(&[0], 20, &shards(1, 20));
        restored.map(drop)
    })
}

#[test]
fn a_daemon_starts_without_its_key_service_and_uses_the_tier_once_it_is_there() -> Result<()> {
    let mut system = started(1, None, OF_COMMAND)?;
    save(&system, 1, &[10])?;
    system.cluster.kill(0)?;
    fs::remove_file(system.root.path().join("tier.key"))?;
    system.cluster.start_all()?;
    refused(
        system.reader(0)?.plan(None, WAIT_MS),
        &["key_command has given no keys yet"],
    )?;
    write_keys(system.root.path(), &[key('1')])?;
    wait("the program to be asked again", || {
        std::thread::sleep(Duration::from_millis(500));
        system.restore(&[0], 10, &shards(1, 10)).map(drop)
    })
}

/// Steps from before encryption are read where that is said, and a step that somebody put there in plain is refused elsewhere.
#[test]
fn a_tier_from_before_is_gone_on_with_only_where_that_is_said() -> Result<()> {
    let mut system = System::start(1, None, TIER)?;
    save(&system, 1, &[10])?;
    system.cluster.kill(0)?;
    write_keys(system.root.path(), &[key('1')])?;
    let root = system.root.path().display().to_string();
    let path = system.cluster.config_path(0);
    let before = fs::read_to_string(&path)?;
    let strict = before + "\n" + &OF_FILE.replace("ROOT", &root);
    fs::write(&path, &strict)?;
    system.cluster.start_all()?;
    refused(
        system.reader(0)?.plan(None, WAIT_MS),
        &[
            "to be encrypted, got plain bytes",
            "trickle.encryption.plain",
        ],
    )?;
    system.cluster.kill(0)?;
    fs::write(&path, strict + "plain = \"read\"\n")?;
    system.cluster.start_all()?;
    system.restore(&[0], 10, &shards(1, 10))?;
    save(&system, 1, &[20])?;
    system.cluster.kill(0)?;
    system.cluster.start_all()?;
    system.restore(&[0], 20, &shards(1, 20))?;
    let tier = system.root.path().join("tier");
    let found = say_something(&tier, &shards(1, 20))?;
    assert_eq!(found, Vec::<String>::new());
    Ok(())
}

/// As other objects that were changed: what is cut to nothing is passed over, and the step before it is offered.
#[test]
fn a_manifest_that_was_cut_to_nothing_leaves_the_step_before_it() -> Result<()> {
    let mut system = started(1, None, OF_FILE)?;
    let run = save(&system, 1, &[10, 20])?;
    kill_all(&mut system)?;
    let step = (system.root.path()).join(format!("tier/job/run-{run}/step-20"));
    for length in [20, 0] {
        let manifest = fs::OpenOptions::new()
            .write(true)
            .open(step.join("storaged.manifest"))?;
        manifest.set_len(length)?;
        system.cluster.start_all()?;
        system.restore(&[0], 10, &shards(1, 10))?;
        kill_all(&mut system)?;
    }
    Ok(())
}

/// Peers of a node that it says should be configured as it is.
fn differing(system: &System, node: usize) -> Result<usize> {
    let status: serde_json::Value = serde_json::from_str(&system.cluster.status(node)?)?;
    let listed = status["differing"].as_array();
    Ok(listed.context("what differs")?.len())
}

fn wait_for_differing(system: &System, expected: usize) -> Result<()> {
    wait("both nodes to say whether they differ", || {
        for node in 0..2 {
            let differing = differing(system, node)?;
            ensure!(differing == expected, "n{node} names {differing}");
        }
        Ok(())
    })
}

/// Links stay at a reload: what it changes is told on them.
#[test]
fn nodes_whose_keys_differ_say_so_after_reloads_and_until_they_are_the_same() -> Result<()> {
    let system = started(2, Some((1, 1)), OF_FILE)?;
    wait_for_differing(&system, 0)?;
    write_keys(system.root.path(), &[key('2'), key('1')])?;
    system.cluster.signal(0, Signal::HUP)?;
    wait_for_differing(&system, 1)?;
    system.cluster.signal(1, Signal::HUP)?;
    wait_for_differing(&system, 0)
}

#[test]
fn keys_that_come_late_end_what_was_said_of_them() -> Result<()> {
    let mut system = System::prepared(2, Some((1, 1)), &format!("{TIER}{OF_COMMAND}"))?;
    let path = system.cluster.config_path(1);
    let theirs = fs::read_to_string(&path)?.replace("tier.key", "late.key");
    fs::write(&path, theirs)?;
    write_keys(system.root.path(), &[key('1')])?;
    system.cluster.start_all()?;
    wait_for_differing(&system, 1)?;
    let root = system.root.path();
    fs::copy(root.join("tier.key"), root.join("late.key"))?;
    wait_for_differing(&system, 0)
}

/// A program of the operator's that hangs with what it has started, and the process that it waits for.
const OF_HANGING: &str = "[trickle.encryption]\nkey_command_within = \"5m\"\nkey_command = [\"/bin/sh\", \"-c\", \"cat ROOT/tier.key && exit; sleep 1000 & echo $! > ROOT/hanging; wait\"]\n";

fn hanging(system: &System) -> Result<PathBuf> {
    let written = system.root.path().join("hanging");
    wait("the program to hang", || {
        let id = fs::read_to_string(&written)?;
        ensure!(id.ends_with('\n'), "not yet");
        Ok(Path::new("/proc").join(id.trim()))
    })
}

/// A process that nobody has waited for yet has ended too.
fn wait_for_end(process: &Path) -> Result<()> {
    wait("what the program has started to end", || {
        let stat = fs::read_to_string(process.join("stat"));
        let is_over = stat.is_ok_and(|stat| !stat.contains(") Z "));
        ensure!(!is_over, "{} is there", process.display());
        Ok(())
    })
}

/// The daemon stops within this time, and what its program has started ends with it.
fn stop_with(system: &mut System, process: &Path, within: Duration) -> Result<()> {
    let began = std::time::Instant::now();
    let ended = system.cluster.stop(0)?.context("it ran")?;
    ensure!(ended.success() && began.elapsed() < within, "{ended}");
    wait_for_end(process)
}

#[test]
fn a_daemon_whose_key_service_hangs_is_stopped_at_once_and_takes_its_program_with_it() -> Result<()>
{
    let mut system = System::prepared(1, None, &format!("{TIER}{OF_HANGING}"))?;
    system.cluster.start(0)?;
    let process = hanging(&system)?;
    stop_with(&mut system, &process, Duration::from_secs(5))
}

/// At a reload: all else is taken meanwhile, the next reload asks anew, and the daemon stops as ever.
#[test]
fn a_key_service_that_hangs_at_a_reload_holds_nothing_up() -> Result<()> {
    let mut system = started(1, None, OF_HANGING)?;
    save(&system, 1, &[10])?;
    let keys = system.root.path().join("tier.key");
    let away = system.root.path().join("away.key");
    fs::rename(&keys, &away)?;
    let reloaded = |times: usize| {
        let log = system.cluster.log(0);
        wait("a reload", || {
            let seen = fs::read_to_string(&log)?
                .matches("reloaded the configuration")
                .count();
            ensure!(seen == times, "{seen} reloads");
            Ok(())
        })
    };
    system.cluster.signal(0, Signal::HUP)?;
    let first = hanging(&system)?;
    reloaded(1)?;
    save(&system, 1, &[20])?;
    fs::remove_file(system.root.path().join("hanging"))?;
    system.cluster.signal(0, Signal::HUP)?;
    reloaded(2)?;
    let second = hanging(&system)?;
    wait_for_end(&first)?;
    stop_with(&mut system, &second, Duration::from_secs(20))?;
    let log = fs::read_to_string(system.cluster.log(0))?;
    let is_fault = |line: &&str| line.contains(" ERROR ") || line.contains(" WARN ");
    let is_of_keys = |line: &&str| line.contains("key_command") || line.contains("old keys");
    let fault = log.lines().filter(is_fault).find(is_of_keys);
    ensure!(fault.is_none(), "nothing is wrong: {fault:?}");
    Ok(())
}
