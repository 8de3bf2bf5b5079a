//! Clusters whose nodes are agreed on in a registry, with real processes: nodes come, are lost, are replaced by others and return.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use storaged::cluster::NodeMemory;
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, RefusalCode};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, executable, save_protected, shards, wait};

const SPARE: &str = "storaged_membership_spare";

/// What a node's page says of the roster.
fn membership(system: &System, node: usize) -> Result<Value> {
    let page = system.cluster.page(node, "/status")?;
    let status: Value = serde_json::from_str(&page.body)?;
    let membership = status.get("membership").filter(|it| it.is_object());
    membership.cloned().context("no membership yet")
}

/// The node that fills a place, as another node says; none while it is vacant.
fn filled_by(system: &System, asked: usize, place: &str) -> Result<Option<String>> {
    let membership = membership(system, asked)?;
    let places = membership["places"].as_array().context("places")?;
    let found = places.iter().find(|it| it["place"] == place);
    let found = found.context("no such place")?;
    Ok(found["node"].as_str().map(ToOwned::to_owned))
}

fn is_filled_by(system: &System, asked: usize, place: &str, node: &str) -> Result<()> {
    let filled = filled_by(system, asked, place)?;
    ensure!(
        filled.as_deref() == Some(node),
        "{place} is filled by {filled:?}"
    );
    Ok(())
}

/// A spare says why it is not ready.
fn is_spare(system: &System, node: usize) -> Result<()> {
    let page = system.cluster.page(node, "/readyz")?;
    let is_one = page.code == 503 && page.body.contains("spare");
    ensure!(is_one, "{page:?}");
    ensure!(system.cluster.metric::<u64>(node, SPARE)? == 1);
    Ok(())
}

fn start(system: &mut System, nodes: impl IntoIterator<Item = usize>) -> Result<()> {
    for node in nodes {
        system.cluster.start(node)?;
    }
    Ok(())
}

fn linked(system: &System, nodes: impl IntoIterator<Item = usize>, peers: usize) -> Result<()> {
    for node in nodes {
        system.cluster.wait_for_peers(node, peers)?;
    }
    Ok(())
}

/// Three places, (2,1), and a fourth node that is a spare.
fn three_and_a_spare(extra: &str) -> Result<System> {
    let mut system = System::with_registry(4, 3, Some((2, 1)), extra)?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    start(&mut system, [3])?;
    wait("a spare", || is_spare(&system, 3))?;
    Ok(system)
}

#[test]
fn nodes_that_start_together_agree_on_places_and_save() -> Result<()> {
    let mut system = System::with_registry(3, 3, Some((2, 1)), "")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    let epochs: Vec<Value> = (0..3)
        .map(|node| Ok(membership(&system, node)?["epoch"].clone()))
        .collect::<Result<_>>()?;
    ensure!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{epochs:?}");
    Ok(())
}

#[test]
fn a_spare_takes_the_place_of_a_node_that_is_lost_and_gets_its_blocks() -> Result<()> {
    for lost in 0..3 {
        let mut system = three_and_a_spare("replace_after = \"3s\"\n")?;
        let (run, mut trainers) = system.trainers(2)?;
        save_protected(&system, run, &mut trainers, 1)?;
        drop(trainers);
        let witness = (lost + 1) % 3;
        system.cluster.kill(lost)?;
        let place = format!("n{lost}");
        wait("the spare", || is_filled_by(&system, witness, &place, "n3"))?;
        linked(&system, [witness, 3], 2)?;
        ensure!(system.cluster.metric::<u64>(3, SPARE)? == 0);
        wait("its blocks", || system.bears(witness, 1))?;
        // All of it is where it was again: what the lost node had is in the RAM of the new one.
        let nodes: Vec<usize> = (0..2)
            .map(|rank| if rank == lost { 3 } else { rank })
            .collect();
        let rungs = system.restore(&nodes, 1, &shards(2, 1))?;
        ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
        // The one that was lost comes back, and is the spare now.
        start(&mut system, [lost])?;
        wait("another spare", || is_spare(&system, lost))?;
    }
    Ok(())
}

#[test]
fn a_node_that_stood_still_for_a_second_keeps_its_place() -> Result<()> {
    let system = three_and_a_spare("replace_after = \"3s\"\n")?;
    let epoch = membership(&system, 0)?["epoch"].clone();
    system.cluster.signal(1, Signal::STOP)?;
    std::thread::sleep(Duration::from_secs(1));
    system.cluster.signal(1, Signal::CONT)?;
    linked(&system, 0..3, 2)?;
    std::thread::sleep(Duration::from_secs(5));
    ensure!(
        membership(&system, 0)?["epoch"] == epoch,
        "{:?}",
        membership(&system, 0)?
    );
    is_spare(&system, 3)
}

#[test]
fn a_node_that_comes_back_before_a_spare_is_there_has_its_place_again() -> Result<()> {
    let mut system = System::with_registry(3, 3, Some((2, 1)), "replace_after = \"3s\"\n")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    system.cluster.signal(2, Signal::STOP)?;
    wait("a vacant place", || {
        let filled = filled_by(&system, 0, "n2")?;
        ensure!(filled.is_none(), "{filled:?}");
        Ok(())
    })?;
    system.cluster.signal(2, Signal::CONT)?;
    wait("its place", || is_filled_by(&system, 0, "n2", "n2"))?;
    linked(&system, 0..3, 2)
}

/// It was thought lost and was not: another node has its place when it goes on. It must not be that place any more.
#[test]
fn a_node_whose_place_was_taken_ends() -> Result<()> {
    let mut system = three_and_a_spare("replace_after = \"3s\"\n")?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    system.cluster.signal(1, Signal::STOP)?;
    wait("the spare", || is_filled_by(&system, 0, "n1", "n3"))?;
    linked(&system, [0, 2, 3], 2)?;
    system.cluster.signal(1, Signal::CONT)?;
    let ended = system.cluster.wait(1)?.context("it ended")?;
    ensure!(
        ended.code() == Some(74),
        "{ended:?}: {}",
        system.cluster.log_end(1, 5)
    );
    linked(&system, [0, 2, 3], 2)
}

/// A minority must not give up the majority, which goes on without it.
#[test]
fn two_of_four_nodes_that_see_only_each_other_give_up_nobody() -> Result<()> {
    let mut system = System::with_registry(4, 4, Some((2, 1)), "replace_after = \"3s\"\n")?;
    start(&mut system, 0..4)?;
    linked(&system, 0..4, 3)?;
    let epoch = membership(&system, 0)?["epoch"].clone();
    system.cluster.kill(2)?;
    system.cluster.kill(3)?;
    std::thread::sleep(Duration::from_secs(10));
    ensure!(
        membership(&system, 0)?["epoch"] == epoch,
        "{:?}",
        membership(&system, 0)?
    );
    ensure!(
        membership(&system, 1)?["epoch"] == epoch,
        "{:?}",
        membership(&system, 1)?
    );
    start(&mut system, 2..4)?;
    linked(&system, 0..4, 3)
}

fn node_command(system: &System, words: &[&str]) -> Result<(i32, String)> {
    let output = std::process::Command::new(executable())
        .arg("node")
        .args(words)
        .arg("--config")
        .arg(system.cluster.config_path(0))
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code().unwrap_or(-1), text.into_owned()))
}

#[test]
fn an_operator_replaces_adds_and_removes_nodes_and_hears_what_cannot_be() -> Result<()> {
    let mut system = three_and_a_spare("replace_after = \"0s\"\n")?;
    let (code, text) = node_command(&system, &["replace", "n1"])?;
    ensure!(code == 0, "{text}");
    // The node that is replaced runs: it ends, and whoever starts it again has a spare.
    let ended = system.cluster.wait(1)?.context("it ended")?;
    ensure!(ended.code() == Some(74), "{ended:?}");
    wait("the spare", || is_filled_by(&system, 0, "n1", "n3"))?;
    linked(&system, [0, 2, 3], 2)?;
    let (_, text) = node_command(&system, &["ls"])?;
    ensure!(text.contains("n1") && text.contains("n3"), "{text}");
    let (code, text) = node_command(&system, &["replace", "n7"])?;
    ensure!(code == 1 && text.contains("n0, n1, n2"), "{code} {text}");
    let (code, text) = node_command(&system, &["resize", "4"])?;
    ensure!(code == 0, "{text}");
    start(&mut system, [1])?;
    wait("a word on it", || {
        let page = system.cluster.page(1, "/readyz")?;
        ensure!(
            page.code == 503 && page.body.contains("storaged node admit n1"),
            "{}",
            page.body
        );
        Ok(())
    })?;
    let (code, text) = node_command(&system, &["admit", "n1"])?;
    ensure!(code == 0, "{text}");
    linked(&system, 0..4, 3)?;
    let (code, text) = node_command(&system, &["remove", "n2"])?;
    ensure!(code == 0, "{text}");
    let ended = system.cluster.wait(2)?.context("it ended")?;
    ensure!(ended.code() == Some(74), "{ended:?}");
    linked(&system, [0, 1, 3], 2)?;
    // Two that are left mirror one another; one alone could lose nothing. The place n1 is filled by n3.
    let (code, text) = node_command(&system, &["remove", "n1"])?;
    ensure!(code == 0, "{text}");
    let ended = system.cluster.wait(3)?.context("it ended")?;
    ensure!(ended.code() == Some(74), "{ended:?}");
    linked(&system, [0, 1], 1)?;
    let (code, text) = node_command(&system, &["remove", "n0"])?;
    ensure!(
        code == 2 && text.contains("no new checkpoint could be coded"),
        "{code} {text}"
    );
    Ok(())
}

/// Whether a node has parity of a step.
fn codes(system: &System, node: usize, step: u64) -> Result<bool> {
    let status: Value = serde_json::from_str(&system.cluster.status(node)?)?;
    let all = status["checkpoints"].as_array().context("checkpoints")?;
    let mut of_step = all.iter().filter(|it| it["step"] == step);
    Ok(of_step.any(|it| it["parity_here"].as_u64() > Some(0)))
}

fn says(system: &System, node: usize, path: &str, what: &str) -> Result<()> {
    let page = system.cluster.page(node, path)?;
    ensure!(
        page.code == 200 && page.body.contains(what),
        "{}",
        page.body
    );
    Ok(())
}

/// The two data nodes of a group of three train; the fourth codes for nobody yet.
#[test]
fn a_cordoned_node_keeps_what_it_has_and_codes_nothing_new() -> Result<()> {
    let mut system = System::with_registry(4, 4, Some((2, 1)), "")?;
    start(&mut system, 0..4)?;
    linked(&system, 0..4, 3)?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    let coding = (0..4).find(|node| codes(&system, *node, 1).unwrap_or(false));
    let coding = coding.context("somebody codes")?;
    let name = format!("n{coding}");
    let (code, text) = node_command(&system, &["cordon", &name])?;
    ensure!(code == 0 && text.contains("was cordoned"), "{code} {text}");
    let (code, text) = node_command(&system, &["cordon", &name])?;
    ensure!(
        code == 0 && text.contains("cordoned already"),
        "{code} {text}"
    );
    let (code, text) = node_command(&system, &["cordon", "n9"])?;
    ensure!(
        code == 1 && text.contains("n0, n1, n2, n3"),
        "{code} {text}"
    );
    wait("its own word on it", || {
        says(&system, coding, "/readyz", "ready, cordoned")
    })?;
    let (_, text) = node_command(&system, &["ls"])?;
    ensure!(text.matches("(cordoned)").count() == 1, "{text}");
    let told = |node: usize| -> Result<bool> {
        let cordoned = &membership(&system, node)?["cordoned"];
        Ok(*cordoned == serde_json::json!([name]))
    };
    wait("all nodes", || {
        let all = (0..4).map(&told).collect::<Result<Vec<_>>>()?;
        ensure!(all.iter().all(|it| *it), "{all:?}");
        Ok(())
    })?;
    ensure!(codes(&system, coding, 1)?, "old parity stays");
    system.save(&mut trainers, 2, &shards(2, 2), DurableWish::Never)?;
    system.wait(0, run, 2, CheckpointState::Protected)?;
    let coding_now: Vec<bool> = (0..4)
        .map(|node| codes(&system, node, 2))
        .collect::<Result<_>>()?;
    ensure!(
        coding_now.contains(&true) && !coding_now[coding],
        "{coding_now:?}"
    );
    // It is so after a restart too, and it has its place.
    system.cluster.kill(coding)?;
    start(&mut system, [coding])?;
    linked(&system, 0..4, 3)?;
    wait("its own word on it", || {
        says(&system, coding, "/readyz", "ready, cordoned")
    })?;
    let (code, text) = node_command(&system, &["uncordon", &name])?;
    ensure!(code == 0, "{text}");
    wait("its own word on it", || {
        let page = system.cluster.page(coding, "/readyz")?;
        ensure!(page.body.trim() == "ready", "{}", page.body);
        Ok(())
    })
}

/// A spare that is cordoned while it waits takes no place that gets vacant.
#[test]
fn a_cordoned_spare_takes_no_place() -> Result<()> {
    let mut system = three_and_a_spare("replace_after = \"3s\"\n")?;
    let file = system.cluster.config_path(3);
    let order = |word: &str| -> Result<()> {
        let output = std::process::Command::new(executable())
            .args(["node", word, "n3", "--config"])
            .arg(&file)
            .output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    };
    order("cordon")?;
    wait("its own word on it", || {
        let page = system.cluster.page(3, "/readyz")?;
        ensure!(
            page.body.contains("storaged node uncordon n3"),
            "{}",
            page.body
        );
        Ok(())
    })?;
    system.cluster.kill(2)?;
    wait("a vacant place", || {
        let filled = filled_by(&system, 0, "n2")?;
        ensure!(filled.is_none(), "{filled:?}");
        Ok(())
    })?;
    std::thread::sleep(Duration::from_secs(4));
    ensure!(filled_by(&system, 0, "n2")?.is_none());
    order("uncordon")?;
    wait("the spare", || is_filled_by(&system, 0, "n2", "n3"))
}

/// What a majority of members could not.
#[test]
fn a_run_is_opened_where_a_majority_of_the_nodes_is_lost() -> Result<()> {
    let mut system = System::with_registry(5, 5, Some((2, 1)), "replace_after = \"0s\"\n")?;
    start(&mut system, 0..5)?;
    linked(&system, 0..5, 4)?;
    let (run, trainers) = system.trainers(2)?;
    drop(trainers);
    (2..5).try_for_each(|node| system.cluster.kill(node))?;
    linked(&system, 0..2, 1)?;
    let next = system.reader(1)?.open_run(WAIT_MS)?;
    ensure!(next.number() == run.number() + 1, "{next} after {run}");
    // All that knew of it is gone, but the registry.
    (0..2).try_for_each(|node| system.cluster.kill(node))?;
    start(&mut system, 0..5)?;
    linked(&system, 0..5, 4)?;
    let last = system.reader(3)?.open_run(WAIT_MS)?;
    ensure!(last.number() == next.number() + 1, "{last} after {next}");
    Ok(())
}

/// Machines of two clusters are given one registry: those that come second say so and take nothing.
#[test]
fn nodes_of_another_cluster_take_no_place() -> Result<()> {
    let mut system = System::with_registry(4, 3, Some((2, 1)), "cluster = \"prod\"\n")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let path = system.cluster.config_path(3);
    let other = std::fs::read_to_string(&path)?.replace("\"prod\"", "\"test\"");
    std::fs::write(&path, other)?;
    start(&mut system, [3])?;
    wait("a word on it", || {
        let page = system.cluster.page(3, "/readyz")?;
        let is_said = page.body.contains("expected test") && page.body.contains("got prod.");
        ensure!(page.code == 503 && is_said, "{}", page.body);
        Ok(())
    })?;
    let output = std::process::Command::new(executable())
        .args(["node", "cordon", "n0", "--config"])
        .arg(&path)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && said.contains("another cluster's"),
        "{said}"
    );
    Ok(())
}

/// The registry is away: jobs go on, and what could not be agreed on is once it is back.
#[test]
fn without_its_registry_a_cluster_goes_on_and_replaces_nobody() -> Result<()> {
    let mut system = three_and_a_spare("replace_after = \"3s\"\n")?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    let (registry, away) = (
        system.root.path().join("registry"),
        system.root.path().join("away"),
    );
    std::fs::rename(&registry, &away)?;
    save_protected(&system, run, &mut trainers, 2)?;
    system.cluster.kill(2)?;
    wait("a fault", || {
        let page = system.cluster.page(0, "/status")?;
        let status: Value = serde_json::from_str(&page.body)?;
        ensure!(status["membership_fault"].is_string(), "{}", page.body);
        let (_, said) = storaged(&system, 0, &["status"])?;
        ensure!(said.contains("\nregistry not followed for "), "{said}");
        Ok(())
    })?;
    let fault = || system.cluster.metric::<u64>(0, "storaged_membership_fault");
    ensure!(fault()? == 1);
    is_spare(&system, 3).or_else(|_| {
        let page = system.cluster.page(3, "/readyz")?;
        ensure!(page.code == 503, "{}", page.body);
        Ok::<_, anyhow::Error>(())
    })?;
    std::fs::rename(&away, &registry)?;
    wait("the spare", || is_filled_by(&system, 0, "n2", "n3"))?;
    linked(&system, [0, 1, 3], 2)?;
    wait("its blocks", || system.bears(0, 1))?;
    ensure!(fault()? == 0);
    Ok(())
}

/// Steps are in flight while the cluster grows and shrinks again, and each is protected.
#[test]
fn a_cluster_grows_and_shrinks_under_a_job_that_saves() -> Result<()> {
    let mut system = System::with_registry(4, 3, Some((2, 1)), "")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let (run, mut trainers) = system.trainers(2)?;
    for step in 1..=60 {
        system.save(&mut trainers, step, &shards(2, step), DurableWish::Never)?;
        let change = match step {
            5 => {
                start(&mut system, [3])?;
                Some(["resize", "4"])
            }
            30 => {
                linked(&system, 0..4, 3)?;
                Some(["remove", "n3"])
            }
            _ => None,
        };
        if let Some(change) = change {
            let (code, text) = node_command(&system, &change)?;
            ensure!(code == 0, "{text}");
        }
        system.wait(0, run, step, CheckpointState::Protected)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    let ended = system.cluster.wait(3)?.context("it ended")?;
    ensure!(ended.code() == Some(74), "{ended:?}");
    linked(&system, 0..3, 2)?;
    let rungs = system.restore(&[0, 1], 60, &shards(2, 60))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    ensure!(membership(&system, 0)?["epoch"].as_u64() > Some(4));
    Ok(())
}

/// The registry is away, and so are the nodes for a moment: they go on in their places, and peers link.
#[test]
fn nodes_that_start_while_the_registry_is_away_have_the_places_that_they_remember() -> Result<()> {
    let mut system = System::with_registry(3, 3, Some((2, 1)), "")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let (registry, away) = (
        system.root.path().join("registry"),
        system.root.path().join("away"),
    );
    std::fs::rename(&registry, &away)?;
    (0..3).try_for_each(|node| system.cluster.kill(node))?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    // Nobody can say whether a partition that has the registry opens one.
    let refused = system.reader(0)?.open_run(5_000);
    let Err(ClientError::Refused(refusal)) = refused else {
        anyhow::bail!("{refused:?}");
    };
    ensure!(refusal.code == RefusalCode::TimedOut, "{refusal}");
    ensure!(refusal.message.contains("membership.registry"), "{refusal}");
    std::fs::rename(&away, &registry)?;
    wait("the registry", || {
        let page = system.cluster.page(0, "/status")?;
        let status: Value = serde_json::from_str(&page.body)?;
        ensure!(status["membership_fault"].is_null(), "{}", page.body);
        Ok(())
    })?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)
}

/// As an operator decides who would rather go on than know.
#[test]
fn a_majority_opens_runs_without_the_registry_where_the_operator_says_so() -> Result<()> {
    let mut system = System::with_registry(3, 3, Some((2, 1)), "runs = \"members\"\n")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let registry = system.root.path().join("registry");
    std::fs::rename(&registry, system.root.path().join("away"))?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)
}

/// Its keeper starts it again: it has its place and its memory, and no epoch begins.
#[test]
fn a_daemon_that_dies_has_its_place_and_its_memory_again() -> Result<()> {
    let mut system = System::with_registry(3, 3, Some((2, 1)), "")?;
    system.cluster.set_memory(NodeMemory::OutlivesDaemon);
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    let epoch = membership(&system, 0)?["epoch"].clone();
    let before = system.tell_daemon(1, Signal::KILL)?;
    system.back_after(1, before)?;
    linked(&system, 0..3, 2)?;
    let rungs = system.restore(&[0, 1], 1, &shards(2, 1))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    ensure!(
        membership(&system, 0)?["epoch"] == epoch,
        "{:?}",
        membership(&system, 0)?
    );
    Ok(())
}

/// Below a keeper it is started again at once: it is a spare then, and what it held belongs to nobody.
#[test]
fn below_its_keeper_a_node_that_has_lost_its_place_is_a_spare_without_memory() -> Result<()> {
    let mut system = System::with_registry(4, 3, Some((2, 1)), "replace_after = \"3s\"\n")?;
    system.cluster.set_memory(NodeMemory::OutlivesDaemon);
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    start(&mut system, [3])?;
    wait("a spare", || is_spare(&system, 3))?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    drop(trainers);
    system.tell_daemon(1, Signal::STOP)?;
    wait("the spare", || is_filled_by(&system, 0, "n1", "n3"))?;
    system.tell_daemon(1, Signal::CONT)?;
    wait("another spare", || is_spare(&system, 1))?;
    let log = std::fs::read_to_string(system.cluster.log(1))?;
    ensure!(log.contains("dropped the memory of the place"), "{log}");
    linked(&system, [0, 2, 3], 2)?;
    let rungs = system.restore(&[0, 3], 1, &shards(2, 1))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// What a command prints, and its exit code.
fn storaged(system: &System, node: usize, words: &[&str]) -> Result<(i32, String)> {
    let mut command = std::process::Command::new(executable());
    command
        .args(words)
        .arg("--socket")
        .arg(system.cluster.socket(node));
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code().unwrap_or(-1), text.into_owned()))
}

/// The commands of every other node work at a spare, and say what it is; so do its pages.
#[test]
fn an_operator_sees_at_a_spare_that_it_is_one() -> Result<()> {
    let mut system = three_and_a_spare("replace_after = \"3s\"\n")?;
    let epoch = membership(&system, 0)?["epoch"].clone();
    let (code, text) = storaged(&system, 3, &["status"])?;
    let expected = format!("spare of epoch {epoch}, waiting for a place");
    ensure!(code == 0 && text.contains(&expected), "{code} {text}");
    let (_, text) = storaged(&system, 3, &["status", "--json"])?;
    let status: Value = serde_json::from_str(&text)?;
    ensure!(
        status["waiting"]["as"] == "spare" && status["ready"] == false,
        "{text}"
    );
    let (code, text) = storaged(&system, 3, &["ls"])?;
    ensure!(
        code == 1 && text.contains("spare") && text.contains("n3"),
        "{code} {text}"
    );
    let (code, text) = storaged(&system, 3, &["restart-safe"])?;
    ensure!(code == 0, "{code} {text}");
    for (path, code) in [
        ("/healthz", 200),
        ("/readyz", 503),
        ("/readyz?restart=safe", 200),
    ] {
        let page = system.cluster.page(3, path)?;
        ensure!(page.code == code, "{path}: {} {}", page.code, page.body);
    }
    let of_spare = std::process::Command::new(executable())
        .args(["node", "ls", "--config"])
        .arg(system.cluster.config_path(3))
        .output()?;
    let text = String::from_utf8_lossy(&of_spare.stdout).into_owned();
    ensure!(
        text.contains("n3: no place") && text.contains("spare of epoch"),
        "{text}"
    );
    // A connection that it had before it got its place goes on after.
    let mut early = storaged_sdk::Client::connect_anonymous(&system.cluster.socket(3))?;
    ensure!(early.status()?.contains("\"waiting\""));
    system.cluster.kill(2)?;
    wait("the spare", || is_filled_by(&system, 0, "n2", "n3"))?;
    linked(&system, [0, 1, 3], 2)?;
    ensure!(!early.status()?.contains("\"waiting\""));
    let (code, text) = storaged(&system, 3, &["ls"])?;
    ensure!(code == 0, "{text}");
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Never)?;
    [0, 1, 3]
        .into_iter()
        .try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))
}

/// Machines that never come keep nobody out that has.
#[test]
fn a_cluster_that_is_resized_far_grows_by_the_machine_that_comes() -> Result<()> {
    let system = three_and_a_spare("")?;
    let (code, text) = node_command(&system, &["resize", "100"])?;
    ensure!(code == 0, "{text}");
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 1)?;
    linked(&system, 0..4, 3)?;
    let (_, text) = node_command(&system, &["ls"])?;
    ensure!(text.contains("4 of 100 places"), "{text}");
    save_protected(&system, run, &mut trainers, 2)
}

/// Two machines that were given one certificate would take the place from one another for ever.
#[test]
fn the_second_machine_with_one_certificate_ends_and_names_the_first() -> Result<()> {
    let mut system = System::with_registry(4, 3, Some((2, 1)), "")?;
    start(&mut system, 0..3)?;
    linked(&system, 0..3, 2)?;
    let epoch = membership(&system, 0)?["epoch"].clone();
    // The fourth machine has the files of the second.
    let file = std::fs::read_to_string(system.cluster.config_path(3))?;
    let address = |file: &str| {
        let line = file.lines().find(|line| line.starts_with("listen"));
        line.and_then(|line| line.split('"').nth(1))
            .map(str::to_owned)
    };
    let first = std::fs::read_to_string(system.cluster.config_path(1))?;
    let first = address(&first).context("where n1 listens")?;
    let twin = file
        .replace("name = \"n3\"", "name = \"n1\"")
        .replace("n3.pem", "n1.pem")
        .replace("n3.key", "n1.key");
    let path = system.root.path().join("twin.toml");
    std::fs::write(&path, twin)?;
    let output = std::process::Command::new(executable())
        .args(["run", "--keep", "none", "--config"])
        .arg(&path)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(78), "{said}");
    ensure!(
        said.contains(&first) && said.contains("name and the certificate"),
        "{said}"
    );
    linked(&system, 0..3, 2)?;
    ensure!(membership(&system, 0)?["epoch"] == epoch, "nothing changed");
    // Once the first is gone its machine may be another one.
    system.cluster.kill(1)?;
    std::fs::copy(&path, system.cluster.config_path(3))?;
    start(&mut system, [3])?;
    linked(&system, [0, 2, 3], 2)?;
    is_filled_by(&system, 0, "n1", "n1")
}
