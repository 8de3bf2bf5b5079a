//! `storaged verify`, above all with `--drill`, and with real processes: every m nodes of a group are taken for lost in turn, and nothing
//! changes by it.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_tests::system::{System, executable, shards};

const RANKS: u32 = 4;

/// Six nodes, (4,2), a protected step.
fn protected() -> Result<System> {
    let system = System::start(6, Some((4, 2)), "chunk = \"4KiB\"")?;
    let (run, mut trainers) = system.trainers(RANKS)?;
    system.save(&mut trainers, 10, &shards(RANKS, 10), DurableWish::Never)?;
    (0..6).try_for_each(|node| system.wait(node, run, 10, CheckpointState::Protected))?;
    Ok(system)
}

/// The exit code and the report.
fn drill(system: &System, node: usize, more: &[&str]) -> Result<(i32, Value)> {
    verify(system, node, &[&["--drill"], more].concat())
}

/// The same of what is read where it lies.
fn verify(system: &System, node: usize, more: &[&str]) -> Result<(i32, Value)> {
    let mut command = Command::new(executable());
    command.args(["verify", "job", "--json", "--socket"]);
    command.arg(system.cluster.socket(node)).args(more);
    let output = command
        .env("STORAGED_TOKEN", "a-secret-of-tests")
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = serde_json::from_str(&text).with_context(|| format!("{text} {said}"))?;
    Ok((output.status.code().context("it ended")?, report))
}

fn memory_used(system: &System) -> Result<Vec<u64>> {
    let nodes = 0..6;
    let used = nodes.map(|node| system.cluster.metric(node, "storaged_memory_used_bytes"));
    Ok(used.collect::<Result<_, _>>()?)
}

/// Once what the save itself took has been given back. It is shown once a second.
fn memory_at_rest(system: &System) -> Result<Vec<u64>> {
    let (began, mut last) = (Instant::now(), memory_used(system)?);
    let mut same = 0;
    while same < 2 {
        std::thread::sleep(Duration::from_millis(1_500));
        let now = memory_used(system)?;
        same = if now == last { same + 1 } else { 0 };
        ensure!(
            began.elapsed() < Duration::from_secs(60),
            "{last:?}, {now:?}"
        );
        last = now;
    }
    Ok(last)
}

fn number(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap_or(u64::MAX)
}

#[test]
fn every_two_nodes_of_six_may_be_lost_and_nothing_changes() -> Result<()> {
    let system = protected()?;
    let before = memory_at_rest(&system)?;
    // Asked of a node that holds a shard, and of one that holds parity.
    for node in [0, 5] {
        let (code, report) = drill(&system, node, &["--sample", "3"])?;
        ensure!(code == 0, "{report}");
        ensure!(report["failures"] == Value::Array(vec![]), "{report}");
        // 15 pairs, of which each shard is in 5.
        ensure!(number(&report, "subsets_tried") == 15, "{report}");
        ensure!(report["lanes"][0]["subsets_drawn"] == false, "{report}");
        ensure!(
            number(&report, "decodes") == 5 * u64::from(RANKS),
            "{report}"
        );
        let bytes = number(&report, "bytes_decoded");
        // Two whole chunks, and a last one that is shorter.
        ensure!(bytes > 20 * 2 * 4096 && bytes <= 20 * 3 * 4096, "{report}");
    }
    let (code, report) = drill(&system, 0, &["--subsets", "4", "--sample", "1"])?;
    ensure!(
        code == 0 && number(&report, "subsets_tried") == 4,
        "{report}"
    );
    ensure!(report["lanes"][0]["subsets_drawn"] == true, "{report}");
    // It is shown once a second.
    let began = Instant::now();
    while memory_used(&system)? != before {
        ensure!(began.elapsed() < Duration::from_secs(60), "{before:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let rungs = system.restore(&[0, 1, 2, 3], 10, &shards(RANKS, 10))?;
    ensure!(rungs.iter().all(|rung| *rung == Rung::OwnRam), "{rungs:?}");
    Ok(())
}

#[test]
fn with_a_node_down_it_names_the_losses_that_are_not_borne() -> Result<()> {
    let mut system = protected()?;
    system.cluster.kill(2)?;
    let (code, report) = drill(&system, 0, &["--sample", "1"])?;
    ensure!(code == 1, "{report}");
    let failures = report["failures"].as_array().context("failures")?;
    // Any two others beside it are one too many.
    ensure!(!failures.is_empty());
    for failure in failures {
        let without = failure["without"].as_array().context("nodes")?;
        ensure!(without.len() == 2, "{failure}");
        let down = Value::from(system.cluster.name(2).as_str());
        ensure!(
            !without.contains(&down),
            "n2 and one more are borne: {failure}"
        );
        ensure!(failure["reason"].as_str().is_some_and(|it| !it.is_empty()));
    }
    ensure!(
        number(&report, "decodes") > failures.len() as u64,
        "{report}"
    );
    Ok(())
}

#[test]
fn what_is_not_coded_is_no_matter_for_a_drill() -> Result<()> {
    let system = System::start(1, None, "")?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Never)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    let mut command = Command::new(executable());
    command.args(["verify", "job", "--drill", "--socket"]);
    let command = command
        .arg(system.cluster.socket(0))
        .env("STORAGED_TOKEN", "a-secret-of-tests");
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !output.status.success() && said.contains("without [coding]"),
        "{said}"
    );
    Ok(())
}

/// The newest step is always one that is not coded yet while a job saves, and the one before goes as soon as it is.
#[test]
fn a_drill_during_saves_takes_what_is_protected() -> Result<()> {
    let system = System::start(6, Some((4, 2)), "chunk = \"4KiB\"")?;
    let (run, mut trainers) = system.trainers(RANKS)?;
    system.save(&mut trainers, 1, &shards(RANKS, 1), DurableWish::Never)?;
    (0..6).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
    let (saved, drilled) = (AtomicU64::new(1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let drills = scope.spawn(|| {
            // On every node, and until some steps have come meanwhile.
            let nodes = (0..6).cycle().enumerate();
            let mut nodes =
                nodes.take_while(|(turn, _)| *turn < 6 || saved.load(Ordering::Relaxed) < 8);
            let all = nodes.try_for_each(|(_, node)| {
                let (code, report) = drill(&system, node, &["--sample", "1", "--subsets", "3"])?;
                ensure!(
                    code == 0 && report["protected"] == true,
                    "n{node}: {report}"
                );
                ensure!(number(&report, "decodes") > 0, "{report}");
                Ok(())
            });
            drilled.store(true, Ordering::Relaxed);
            all
        });
        while !drilled.load(Ordering::Relaxed) {
            let step = saved.load(Ordering::Relaxed) + 1;
            let shards = shards(RANKS, step);
            system.save(&mut trainers, step, &shards, DurableWish::Never)?;
            saved.store(step, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
        }
        drills
            .join()
            .map_err(|_| anyhow::anyhow!("drills panicked"))?
    })
}

/// Of one that is not coded yet parity is missing, and no node has lost it.
#[test]
fn the_newest_protected_step_is_read_where_none_is_named() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), "chunk = \"4KiB\"")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
    let (code, report) = verify(&system, 0, &[])?;
    ensure!((code, number(&report, "step")) == (0, 1), "{report}");
    // Without its coding node the next one stays as it is.
    system.cluster.kill(2)?;
    system.save(&mut trainers, 2, &shards(2, 2), DurableWish::Never)?;
    system.wait(0, run, 2, CheckpointState::Committed)?;
    let (code, report) = verify(&system, 0, &[])?;
    ensure!((code, number(&report, "step")) == (1, 1), "{report}");
    let (_, report) = verify(&system, 0, &["--step", "2"])?;
    ensure!(number(&report, "step") == 2, "{report}");
    Ok(())
}

/// It waits for nobody: whoever drills wants to know what memory bears now.
#[test]
fn with_more_than_m_nodes_down_it_says_at_once_what_is_missing() -> Result<()> {
    let mut system = protected()?;
    (2..5).try_for_each(|node| system.cluster.kill(node))?;
    let began = Instant::now();
    let mut command = Command::new(executable());
    command.args(["verify", "job", "--drill", "--timeout", "600", "--socket"]);
    command.arg(system.cluster.socket(0));
    let output = command
        .env("STORAGED_TOKEN", "a-secret-of-tests")
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{said}");
    ensure!(
        began.elapsed() < Duration::from_secs(60),
        "it waited: {said}"
    );
    for part in [
        "step 10",
        "4 of 4 shards",
        "n2, n3, n4",
        "no other protected step",
    ] {
        ensure!(said.contains(part), "{said}");
    }
    Ok(())
}
