//! Nodes that an operator drains, with real processes: what only they have or can finish comes first, a spare takes their place, and who
//! drains them hears what is left.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use storaged::cluster::NodeMemory;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, executable, shards, wait, write_secret};

/// A tier to which a shard of a test takes seconds.
const SLOW: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\nrate = \"300KB\"\n";
/// One to which it takes longer than any daemon is given.
const ENDLESS: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\nrate = \"1KB\"\n";

fn admin(system: &System, node: usize) -> PathBuf {
    system.cluster.socket(node).with_file_name("admin.sock")
}

fn command(system: &System, node: usize, arguments: &[&str]) -> Command {
    let mut command = Command::new(executable());
    command.args(["drain", "--json"]).args(arguments);
    command.arg("--socket").arg(admin(system, node));
    command
}

/// What `storaged drain` printed.
fn report(done: &Output) -> Result<Value> {
    let said = String::from_utf8_lossy(&done.stderr);
    serde_json::from_slice(&done.stdout).with_context(|| format!("{}: {said}", done.status))
}

fn drain(system: &System, node: usize, arguments: &[&str]) -> Result<(Option<i32>, Value)> {
    let done = command(system, node, arguments).output()?;
    Ok((done.status.code(), report(&done)?))
}

/// Three nodes, (2,1), and a protected step of two ranks whose trainers are gone.
fn protected(mut system: System) -> Result<(System, RunId)> {
    for node in 0..3 {
        system.cluster.start(node)?;
    }
    (0..3).try_for_each(|node| system.cluster.wait_for_peers(node, 2))?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
    Ok((system, run))
}

#[test]
fn a_spare_has_the_place_of_a_drained_node_at_once_and_the_node_stays_away() -> Result<()> {
    // A node that is lost would be given up after an hour.
    let system = System::with_registry(4, 3, Some((2, 1)), "replace_after = \"1h\"\n")?;
    let (mut system, _) = protected(system)?;
    system.cluster.start(3)?;
    wait("a spare", || system.readyz_says(3, "spare"))?;
    let (code, report) = drain(&system, 0, &[])?;
    ensure!(code == Some(0), "{code:?}: {report}");
    ensure!(report["left"] == serde_json::json!([]), "{report}");
    let place = report["place"].as_str().context("a place")?;
    ensure!(place.contains("given up since epoch"), "{report}");
    // Until the spare has its blocks.
    let after = &report["after"][0];
    ensure!(
        after["namespace"] == "job" && after["step"] == 1,
        "{report}"
    );
    ensure!(after["bears"] == 0 && after["of"] == 1, "{report}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    system.cluster.wait_for_peers(3, 2)?;
    wait("its blocks", || system.bears(1, 1))?;
    ensure!(system.restore(&[3, 1], 1, &shards(2, 1))?.len() == 2);
    // Whoever starts daemons starts this one again: that must not undo the drain.
    system.cluster.start(0)?;
    wait("a node that waits", || {
        system.readyz_says(0, "storaged node admit")
    })
}

/// As a registry that many nodes ask is: whoever waits for a place asks more often, and the others when it is there.
#[test]
fn a_spare_is_soon_in_its_place_also_where_the_registry_is_asked_seldom() -> Result<()> {
    let system = System::with_registry(4, 3, Some((2, 1)), "replace_after = \"1h\"\n")?;
    for node in 0..4 {
        let path = system.cluster.config_path(node);
        let seldom = std::fs::read_to_string(&path)?.replace("poll = \"1s\"", "poll = \"20s\"");
        std::fs::write(&path, seldom)?;
    }
    let (mut system, _) = protected(system)?;
    system.cluster.start(3)?;
    wait("a spare", || system.readyz_says(3, "spare"))?;
    let (code, report) = drain(&system, 0, &[])?;
    ensure!(code == Some(0), "{code:?}: {report}");
    let vacant = Instant::now();
    for node in [3, 1, 2] {
        system.cluster.wait_for_peers(node, 2)?;
    }
    // A quarter of the poll, a sixteenth, and what a busy machine takes.
    let took = vacant.elapsed();
    ensure!(took < Duration::from_secs(11), "{took:?}");
    Ok(())
}

#[test]
fn a_node_without_which_a_step_is_lost_stays_until_others_have_what_it_has() -> Result<()> {
    let system = System::prepared(3, Some((2, 1)), "")?;
    let (mut system, _) = protected(system)?;
    system.cluster.kill(2)?;
    wait("a loss", || system.bears(0, 0))?;
    let (mut drained, socket) = (
        command(&system, 0, &["--deadline", "2m"]),
        admin(&system, 0),
    );
    let draining = std::thread::spawn(move || drained.output());
    wait("a daemon that says why it stays", || {
        let log = std::fs::read_to_string(system.cluster.log(0))?;
        ensure!(log.contains("bears 0 of 1 losses"), "{log}");
        Ok(())
    })?;
    ensure!(socket.exists());
    system.cluster.start(2)?;
    let done = draining.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    ensure!(done.status.success(), "{:?}", report(&done)?);
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    ensure!(system.restore(&[1, 2], 1, &shards(2, 1))?.len() == 2);
    Ok(())
}

#[test]
fn what_is_lost_with_a_node_is_said_and_is_in_the_exit_code() -> Result<()> {
    let system = System::prepared(3, Some((2, 1)), "")?;
    let (mut system, _) = protected(system)?;
    system.cluster.kill(2)?;
    wait("a loss", || system.bears(0, 0))?;
    let (code, report) = drain(&system, 0, &["--deadline", "1s"])?;
    ensure!(code == Some(75), "{code:?}: {report}");
    let left = report["left"][0].as_str().context("what is left")?;
    ensure!(left.contains("job: step 1 of run"), "{report}");
    ensure!(left.contains("bears 0 of 1 losses"), "{report}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    Ok(())
}

/// For maintenance: a node goes only while one more loss is borne afterwards.
#[test]
fn a_node_goes_only_from_what_bears_as_much_as_its_operator_wants() -> Result<()> {
    let system = System::prepared(3, Some((2, 2)), "")?;
    let (mut system, _) = protected(system)?;
    let (code, report) = drain(&system, 0, &["--bears", "2"])?;
    ensure!(code == Some(0), "{code:?}: {report}");
    let after = &report["after"][0];
    ensure!(after["bears"] == 1 && after["of"] == 2, "{report}");
    system.cluster.wait(0)?.context("its end")?;
    let (code, report) = drain(&system, 1, &["--bears", "2", "--deadline", "1s"])?;
    ensure!(code == Some(75), "{code:?}: {report}");
    let left = report["left"][0].as_str().context("what is left")?;
    ensure!(left.contains("bears 1 of 2 losses, expected"), "{report}");
    Ok(())
}

/// A node with a committed step on its way to a tier.
fn owing(tier: &str) -> Result<System> {
    let system = System::start(1, None, tier)?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    Ok(system)
}

#[test]
fn uploads_are_finished_first_without_trainers_and_below_a_keeper() -> Result<()> {
    let mut system = System::start_kept(1, None, SLOW)?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    drop(trainers);
    let (code, report) = drain(&system, 0, &["--deadline", "2m"])?;
    ensure!(code == Some(0), "{code:?}: {report}");
    // The keeper too: it would start the daemon again.
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    system.cluster.start_all()?;
    ensure!(system.reader(0)?.plan(None, WAIT_MS)?.step.get() == 10);
    Ok(())
}

#[test]
fn a_signal_shortens_a_drain_and_a_second_one_ends_it() -> Result<()> {
    let mut system = owing(ENDLESS)?;
    let mut drained = command(&system, 0, &["--deadline", "1h"]);
    let draining = std::thread::spawn(move || drained.output());
    wait("a drain", || system.readyz_says(0, "told to stop"))?;
    system.cluster.signal(0, Signal::TERM)?;
    std::thread::sleep(std::time::Duration::from_millis(600));
    ensure!(
        system.cluster.status(0).is_ok(),
        "it goes on for node.leave_within"
    );
    let ended = system.cluster.stop(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    let done = draining.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    ensure!(!done.status.success(), "{}", done.status);
    Ok(())
}

#[test]
fn a_registry_that_is_away_delays_nobody_for_long_and_is_said() -> Result<()> {
    let system = System::with_registry(3, 3, Some((2, 1)), "replace_after = \"0s\"\n")?;
    let (mut system, _) = protected(system)?;
    let registry = system.root.path().join("registry");
    std::fs::rename(&registry, system.root.path().join("away"))?;
    let (code, report) = drain(&system, 0, &[])?;
    ensure!(code == Some(75), "{code:?}: {report}");
    let left = report["left"][0].as_str().context("what is left")?;
    ensure!(left.contains("place could not be given up"), "{report}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    Ok(())
}

#[test]
fn a_node_that_comes_back_soon_keeps_its_place() -> Result<()> {
    let system = System::with_registry(3, 3, Some((2, 1)), "replace_after = \"1h\"\n")?;
    let (mut system, _) = protected(system)?;
    let (code, report) = drain(&system, 0, &["--keep-place"])?;
    ensure!(code == Some(0) && report["place"] == "kept", "{report}");
    system.cluster.wait(0)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 2)?;
    wait("its blocks", || system.bears(0, 1))
}

#[test]
fn nobody_but_an_operator_drains_a_node() -> Result<()> {
    let system = System::start(1, None, "")?;
    let socket = system.cluster.socket(0);
    let done = Command::new(executable())
        .args(["drain", "--socket"])
        .arg(&socket)
        .output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.code() == Some(1), "{said}");
    ensure!(said.contains("admin.socket"), "{said}");
    ensure!(system.cluster.status(0).is_ok());
    system.readyz_says(0, "ready")
}

#[test]
fn a_notice_of_preemption_drains_the_node() -> Result<()> {
    let mut system = System::start(1, None, "")?;
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/preemption/drain-on-notice.sh"
    );
    let notice = system.root.path().join("going");
    let bin = executable();
    let path = format!("{}:/usr/bin:/bin", bin.parent().context("bin")?.display());
    let mut waiting = Command::new(script)
        .args(["100s", "test", "-e"])
        .arg(&notice)
        .env("NOTICE_EVERY", "0.1")
        .env("PATH", path)
        .env("STORAGED_SOCKET", admin(&system, 0))
        .spawn()?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    ensure!(waiting.try_wait()?.is_none() && system.cluster.status(0).is_ok());
    std::fs::write(&notice, "")?;
    ensure!(waiting.wait()?.success());
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}

/// With both of them a step would be lost that bears the loss of one.
#[test]
fn of_two_nodes_that_are_drained_at_once_one_stays_until_the_other_is_replaced() -> Result<()> {
    let system = System::with_registry(4, 3, Some((2, 1)), "replace_after = \"1h\"\n")?;
    let (mut system, _) = protected(system)?;
    system.cluster.start(3)?;
    wait("a spare", || system.readyz_says(3, "spare"))?;
    let drained = [0, 1].map(|node| {
        let mut command = command(&system, node, &["--deadline", "2m"]);
        std::thread::spawn(move || command.output())
    });
    for draining in drained {
        let done = draining.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        ensure!(done.status.success(), "{:?}", report(&done)?);
    }
    ensure!(system.restore(&[3, 2], 1, &shards(2, 1))?.len() == 2);
    Ok(())
}

#[test]
fn two_nodes_that_go_at_once_and_cannot_both_are_not_both_said_to_lose_nothing() -> Result<()> {
    let system = System::prepared(3, Some((2, 1)), "")?;
    let (system, _) = protected(system)?;
    let drained = [0, 1].map(|node| {
        let mut command = command(&system, node, &["--deadline", "4s"]);
        std::thread::spawn(move || command.output())
    });
    let mut codes = Vec::new();
    for draining in drained {
        let done = draining.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        codes.push((done.status.code(), report(&done)?));
    }
    let lost: Vec<_> = codes.iter().filter(|(code, _)| *code == Some(75)).collect();
    ensure!(lost.len() == 1, "one of them may go: {codes:?}");
    ensure!(
        lost[0].1["left"].to_string().contains("job: step 1"),
        "{codes:?}"
    );
    Ok(())
}

/// Whoever has little time does not wait for an order that gave much.
#[test]
fn a_later_order_with_less_time_counts() -> Result<()> {
    let mut system = owing(ENDLESS)?;
    let mut first = command(&system, 0, &["--deadline", "1h"]);
    let draining = std::thread::spawn(move || first.output());
    wait("a drain", || system.readyz_says(0, "told to stop"))?;
    let (code, report) = drain(&system, 0, &["--deadline", "1s"])?;
    ensure!(code == Some(75), "{code:?}: {report}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    draining.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    Ok(())
}

/// A notice of preemption comes to spares too.
#[test]
fn a_spare_that_is_drained_ends_and_takes_no_place() -> Result<()> {
    let system = System::with_registry(4, 3, Some((2, 1)), "replace_after = \"0s\"\n")?;
    let (mut system, _) = protected(system)?;
    system.cluster.start(3)?;
    wait("a spare", || system.readyz_says(3, "spare"))?;
    let (code, report) = drain(&system, 3, &[])?;
    ensure!(code == Some(0), "{code:?}: {report}");
    ensure!(report["left"] == serde_json::json!([]), "{report}");
    let ended = system.cluster.wait(3)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}

/// The registry has given the place away while this node's uploads are under way.
#[test]
fn a_node_that_has_lost_its_place_is_drained_and_is_not_started_again() -> Result<()> {
    let membership = format!("replace_after = \"0s\"\n{ENDLESS}");
    let mut system = System::with_registry(1, 1, None, &membership)?;
    system.cluster.set_memory(NodeMemory::OutlivesDaemon);
    let path = system.cluster.config_path(0);
    let patient =
        std::fs::read_to_string(&path)?.replace("[node]\n", "[node]\nleave_within = \"10m\"\n");
    std::fs::write(&path, patient)?;
    system.cluster.start(0)?;
    let (run, mut trainers) = wait("a place", || system.trainers(1))?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    let replaced = Command::new(executable())
        .args(["node", "replace", "n0", "--config"])
        .arg(system.cluster.config_path(0))
        .output()?;
    ensure!(replaced.status.success(), "{replaced:?}");
    wait("a node that has lost its place", || {
        system.readyz_says(0, "told to stop")
    })?;
    let (code, report) = drain(&system, 0, &["--deadline", "1s"])?;
    ensure!(code == Some(75), "{code:?}: {report}");
    let left = report["left"].to_string();
    ensure!(!left.contains("registry does not answer"), "{report}");
    let place = report["place"].as_str().context("a place")?;
    ensure!(place.contains("given up since epoch"), "{report}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    Ok(())
}

fn kept_only_here(system: System) -> Result<(System, Vec<storaged_sdk::Trainer>)> {
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Never)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    Ok((system, trainers))
}

#[test]
fn a_step_that_is_nowhere_else_is_said_to_be_lost() -> Result<()> {
    let (mut system, _trainers) = kept_only_here(System::start(1, None, "")?)?;
    for deadline in ["0s", "1s"] {
        let (code, report) = drain(&system, 0, &["--deadline", deadline])?;
        ensure!(code == Some(75), "{code:?}: {report}");
        system.cluster.wait(0)?;
        system.cluster.start_all()?;
        system = kept_only_here(system)?.0;
    }
    Ok(())
}

/// Its keeper starts another one, which knows nothing of the drain.
#[test]
fn a_daemon_that_dies_meanwhile_is_drained_once_it_is_back() -> Result<()> {
    let mut system = System::start_kept(1, None, ENDLESS)?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    let mut drained = command(&system, 0, &["--deadline", "10s"]);
    let draining = std::thread::spawn(move || drained.output());
    wait("a drain", || system.readyz_says(0, "told to stop"))?;
    system.tell_daemon(0, Signal::KILL)?;
    let done = draining.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    ensure!(done.status.code() == Some(75), "{:?}", report(&done)?);
    let left = report(&done)?["left"].to_string();
    ensure!(left.contains("not in the durable tier"), "{left}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    Ok(())
}

/// How a durable tier behaves.
#[derive(Debug, Clone, Copy)]
enum Tier {
    /// It takes connections and requests, and answers none.
    Hangs,
    /// Whoever asks may not.
    Refuses,
    /// It has no room.
    IsFull,
}

impl Tier {
    const fn answer(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Hangs => None,
            Self::Refuses => Some(("403 Forbidden", "AccessDenied")),
            Self::IsFull => Some(("507 Insufficient Storage", "InsufficientStorage")),
        }
    }

    /// Where it listens, to the end of this process.
    fn start(self) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || self.serve(stream));
            }
        });
        Ok(endpoint)
    }

    fn serve(self, mut stream: TcpStream) -> Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut length = 0;
            let mut line = String::new();
            while reader.read_line(&mut line)? > 2 {
                let field = line.to_ascii_lowercase();
                if let Some(said) = field.strip_prefix("content-length:") {
                    length = said.trim().parse()?;
                }
                line.clear();
            }
            let Some((status, code)) = self.answer() else {
                std::io::copy(&mut reader, &mut std::io::sink())?;
                return Ok(());
            };
            ensure!(!line.is_empty(), "nobody asks any more");
            std::io::copy(&mut reader.by_ref().take(length), &mut std::io::sink())?;
            let body = format!("<Error><Code>{code}</Code><Message>no</Message></Error>");
            let head = format!(
                "content-type: application/xml\r\ncontent-length: {}",
                body.len()
            );
            write!(stream, "HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}")?;
        }
    }
}

/// The tier owes the node what it was promised; peers hold the step, so nothing is lost and whoever drains the node hears what is owed.
#[test]
fn a_tier_that_takes_nothing_holds_up_no_drain_beyond_its_time() -> Result<()> {
    for tier in [Tier::Hangs, Tier::Refuses, Tier::IsFull] {
        let keys = "credentials_file = \"ROOT/keys\"";
        let settings = format!(
            "[durable]\nkind = \"s3\"\nbucket = \"tier\"\nendpoint = \"{}\"\n{keys}\n[trickle]\nevery = 1\nruns_without_tier = true\n",
            tier.start()?
        );
        let mut system = System::prepared(3, Some((2, 1)), &settings)?;
        let keys = "AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=b\n";
        write_secret(&system.root.path().join("keys"), keys)?;
        system.cluster.start_all()?;
        let (run, mut trainers) = system.trainers(2)?;
        system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Required)?;
        (0..3).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
        drop(trainers);
        let (code, report) = drain(&system, 0, &["--deadline", "3s"])?;
        ensure!(code == Some(75), "{tier:?}: {code:?}: {report}");
        let left = report["left"].to_string();
        ensure!(left.contains("step 1"), "{tier:?}: {report}");
        let ended = system.cluster.wait(0)?.context("its end")?;
        ensure!(ended.code() == Some(75), "{tier:?}: {ended}");
        ensure!(
            system.restore(&[1, 2], 1, &shards(2, 1))?.len() == 2,
            "{tier:?}"
        );
    }
    Ok(())
}

/// Slurm's health check: jobs need the daemon until they have ended, also on a node that is draining.
#[test]
fn a_node_that_slurm_takes_out_of_service_is_drained_once_no_job_runs_there() -> Result<()> {
    let mut system = System::start(1, None, "")?;
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/slurm/health_check.sh"
    );
    let (bin, root) = (executable(), system.root.path().to_owned());
    let path = format!("{}:/usr/bin:/bin", bin.parent().context("bin")?.display());
    let scontrol = root.join("scontrol");
    let check = |state: &str| -> Result<()> {
        let answer = format!("NodeName=n0 Arch=x86_64 State={state} ThreadsPerCore=1");
        std::fs::write(
            &scontrol,
            format!("#!/bin/sh\n[ \"$*\" = '--oneliner show node n0' ] && echo '{answer}'\n"),
        )?;
        std::fs::set_permissions(&scontrol, PermissionsExt::from_mode(0o755))?;
        let checked = Command::new(script)
            .env("PATH", &path)
            .env("SCONTROL_BIN", &scontrol)
            .env("SLURMD_NODENAME", "n0")
            .env("STORAGED_SOCKET", admin(&system, 0))
            .env("STORAGED_DRAIN_LOCK", root.join("lock"))
            .output()?;
        ensure!(checked.status.success(), "{state}: {checked:?}");
        Ok(())
    };
    for state in [
        "IDLE",
        "MIXED+DRAIN",
        "ALLOCATED+DRAIN",
        "IDLE+COMPLETING+DRAIN",
        "IDLE+CLOUD",
    ] {
        check(state)?;
    }
    std::thread::sleep(std::time::Duration::from_secs(1));
    system.readyz_says(0, "ready")?;
    ensure!(!root.join("lock").exists(), "nobody drains it");
    check("IDLE+DRAIN*")?;
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}
