//! What a holder has outlives the keeper too, as at the end of a pod: both its processes are killed, and the next ones find all of it.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use storaged::cluster::child_of;
use storaged_tests::holder::Holder;
use storaged_tests::rolling::{SavingJob, replace_pod};
use storaged_tests::system::{executable, said, write_program};

use super::*;

/// Three nodes, (2,1), the first with a holder, and a step that is protected.
fn protected() -> Result<(System, Holder, RunId, Vec<Trainer>)> {
    let mut system = System::prepared(3, Some((2, 1)), "")?;
    let holder = Holder::start(&mut system, 0)?;
    system.cluster.start_all()?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 10)?;
    holder.wait_for_all(&system, 0)?;
    Ok((system, holder, run, trainers))
}

/// What the other two have sent and coded.
fn others_encoded(system: &System) -> Result<u64> {
    let others = (1..3).map(|node| system.cluster.metric::<u64>(node, ENCODED));
    Ok(others.sum::<Result<u64, _>>()?)
}

/// How often a daemon of the first node has said that it took memory over.
fn takeovers(system: &System) -> Result<usize> {
    let log = fs::read_to_string(system.cluster.log(0))?;
    Ok(log
        .matches("took over the memory of an earlier daemon")
        .count())
}

/// The next pod of the first node serves what the one before it had, and nobody sends anything.
fn next_pod_has_all(system: &mut System, step: u64) -> Result<()> {
    let before = others_encoded(system)?;
    let taken_before = takeovers(system)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_links()?;
    let rungs = system.restore(&[0, 1], step, &shards(2, step))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    bears_again(system)?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(others_encoded(system)? == before, "blocks were sent again");
    let log = fs::read_to_string(system.cluster.log(0))?;
    ensure!(takeovers(system)? > taken_before, "{log}");
    ensure!(!log.contains("is lost"), "{log}");
    Ok(())
}

#[test]
fn a_pod_that_is_killed_leaves_all_to_the_next_one() -> Result<()> {
    let (mut system, holder, run, mut trainers) = protected()?;
    system.cluster.kill(0)?;
    ensure!(holder.held()? > 0);
    next_pod_has_all(&mut system, 10)?;
    // That one's goes on to the holder as well.
    save_protected(&system, run, &mut trainers, 20)?;
    holder.wait_for_all(&system, 0)?;
    system.cluster.kill(0)?;
    next_pod_has_all(&mut system, 20)
}

/// A new image: one pod after the other is replaced while the job saves.
#[test]
fn a_rollout_beside_a_job_loses_no_step_and_repairs_nothing() -> Result<()> {
    let mut system = System::prepared(3, Some((2, 1)), "")?;
    let holders = (0..3).map(|node| Holder::start(&mut system, node));
    let _holders = holders.collect::<Result<Vec<_>>>()?;
    system.cluster.start_all()?;
    let mut job = SavingJob::start((*system).clone(), 2)?;
    for node in 0..3 {
        let replaced = replace_pod(&mut system, &job, node)?;
        ensure!(
            (replaced.lost, replaced.repaired) == (0, 0) && replaced.failed.len() <= 1,
            "n{node}: {replaced:?}"
        );
    }
    job.stop()?;
    Ok(())
}

#[test]
fn a_holder_that_was_started_again_has_all_once_more() -> Result<()> {
    let (mut system, mut holder, run, mut trainers) = protected()?;
    holder.wait_for_report(&system, 0, "has-all")?;
    holder.kill()?;
    // The keeper needs none.
    save_protected(&system, run, &mut trainers, 20)?;
    wait("a word about it", || {
        let log = fs::read_to_string(system.cluster.log(0))?;
        ensure!(log.contains("the holder does not have the memory"), "{log}");
        Ok(())
    })?;
    holder.wait_for_report(&system, 0, "lacks")?;
    // The next daemon of the keeper hears of it too.
    let before = system.tell_daemon(0, Signal::KILL)?;
    system.back_after(0, before)?;
    bears_again(&system)?;
    holder.wait_for_report(&system, 0, "lacks")?;
    holder.start_again()?;
    holder.wait_for_all(&system, 0)?;
    holder.wait_for_report(&system, 0, "has-all")?;
    system.cluster.kill(0)?;
    next_pod_has_all(&mut system, 20)?;
    let log = fs::read_to_string(system.cluster.log(0))?;
    ensure!(
        log.contains("the holder is back, and has everything"),
        "{log}"
    );
    Ok(())
}

/// The first node's next keeper waits, and says for whom.
fn is_kept_out(system: &mut System) -> Result<()> {
    system.cluster.start(0)?;
    std::thread::sleep(Duration::from_secs(2));
    let keeper = system.cluster.pid(0)?;
    ensure!(child_of(keeper).is_none(), "two daemons have one memory");
    let log = fs::read_to_string(system.cluster.log(0))?;
    ensure!(log.contains("it holds for process"), "{log}");
    Ok(())
}

#[test]
fn a_keeper_that_is_killed_alone_keeps_the_next_one_out_until_its_daemon_has_ended() -> Result<()> {
    let (mut system, _holder, ..) = protected()?;
    let daemon = system.cluster.daemon_below(0).context("a daemon")?;
    system.tell_daemon(0, Signal::STOP)?;
    // The daemon is told to end with its keeper, and cannot.
    system.cluster.signal(0, Signal::KILL)?;
    system.cluster.wait(0)?;
    let kept_out = is_kept_out(&mut system);
    let daemon = rustix::process::Pid::from_raw(daemon.try_into()?).context("a process")?;
    rustix::process::kill_process(daemon, Signal::KILL)?;
    kept_out?;
    system.cluster.wait_for_links()?;
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// It waits for half a minute, as for a pod that is about to end.
#[test]
fn a_second_daemon_beside_one_that_runs_is_refused() -> Result<()> {
    let mut system = System::prepared(2, None, "")?;
    let holder = Holder::start(&mut system, 0)?;
    system.cluster.set_holder(1, holder.path().to_owned());
    system.cluster.start(0)?;
    holder.wait_for_all(&system, 0)?;
    let first = system.cluster.pid(0)?;
    let began = Instant::now();
    system.cluster.start(1)?;
    let ended = system.cluster.wait(1)?.context("its end")?;
    let log = fs::read_to_string(system.cluster.log(1))?;
    ensure!(ended.code() == Some(1), "{ended}: {log}");
    ensure!(began.elapsed() >= Duration::from_secs(30), "it waits");
    let who = format!("got one that holds for process {first}");
    ensure!(log.contains(&who), "{log}");
    ensure!(system.cluster.status(0).is_ok());
    holder.wait_for_all(&system, 0)
}

#[test]
fn what_was_stopped_in_order_is_there_until_an_operator_lets_go_of_it() -> Result<()> {
    let (mut system, holder, ..) = protected()?;
    let refused = holder.release()?;
    let keeper = system.cluster.pid(0)?;
    let who = format!("holds for process {keeper}");
    ensure!(
        !refused.status.success() && said(&refused).contains(&who),
        "{}",
        said(&refused)
    );
    let ended = system.cluster.stop(0)?.context("its end")?;
    ensure!(matches!(ended.code(), Some(0 | 75)), "{ended}");
    ensure!(holder.held()? > 0);
    next_pod_has_all(&mut system, 10)?;
    system.cluster.stop(0)?;
    let held = holder.held()?;
    let released = holder.release()?;
    let expected = format!("let go of {held} descriptors");
    ensure!(
        held > 0 && said(&released).contains(&expected),
        "{}",
        said(&released)
    );
    ensure!(holder.held()? == 0, "it is not free");
    system.cluster.start(0)?;
    system.cluster.wait_for_links()?;
    ensure!(takeovers(&system)? == 1, "not one takeover");
    Ok(())
}

/// As a daemon that is told a second time waits for nothing any more.
#[test]
fn a_keeper_that_is_told_twice_to_end_waits_for_no_holder() -> Result<()> {
    let (mut system, holder, ..) = protected()?;
    holder.signal(Signal::STOP)?;
    system.cluster.signal(0, Signal::TERM)?;
    wait("the end of the daemon", || {
        ensure!(system.cluster.daemon_below(0).is_none());
        Ok(())
    })?;
    let told = Instant::now();
    system.cluster.signal(0, Signal::TERM)?;
    system.cluster.wait(0)?.context("its end")?;
    ensure!(
        told.elapsed() < Duration::from_secs(3),
        "{:?}",
        told.elapsed()
    );
    let log = fs::read_to_string(system.cluster.log(0))?;
    ensure!(
        log.contains("ending, and the holder has not said that it has the memory"),
        "{log}"
    );
    holder.signal(Signal::CONT)?;
    ensure!(holder.held()? > 0);
    next_pod_has_all(&mut system, 10)
}

/// An operator drains the first node, as a hook does whose machine goes.
fn drain(system: &System, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(executable());
    command.arg("drain").args(arguments).arg("--socket");
    command.arg(system.cluster.socket(0).with_file_name("admin.sock"));
    command.output().context("storaged drain")
}

/// Both processes of the first node have ended, and nothing is lost with its memory, which nobody has any more.
fn is_gone_without_a_trace(system: &mut System, holder: &Holder, drained: &Output) -> Result<()> {
    ensure!(drained.status.success(), "{}", said(drained));
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    wait("a holder that has let go", || {
        let held = holder.held()?;
        ensure!(held == 0, "{held} are held");
        Ok(())
    })?;
    let released = holder.release()?;
    ensure!(
        said(&released).contains("let go of 0 descriptors"),
        "{}",
        said(&released)
    );
    let log = fs::read_to_string(system.cluster.log(0))?;
    ensure!(!log.contains("the memory stays with the holder"), "{log}");
    Ok(())
}

/// A spare has its place, and what it held from peers: on this machine it would be memory for nobody.
#[test]
fn a_node_that_gives_up_its_place_leaves_nothing_with_its_holder() -> Result<()> {
    let mut system = System::with_registry(5, 4, Some((2, 2)), "replace_after = \"1h\"\n")?;
    let holder = Holder::start(&mut system, 0)?;
    for node in 0..4 {
        system.cluster.start(node)?;
    }
    (0..4).try_for_each(|node| system.cluster.wait_for_peers(node, 3))?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 10)?;
    drop(trainers);
    holder.wait_for_all(&system, 0)?;
    system.cluster.start(4)?;
    wait("a spare", || system.readyz_says(4, "spare"))?;
    wait("both losses", || system.bears(0, 2))?;
    let drained = drain(&system, &[])?;
    is_gone_without_a_trace(&mut system, &holder, &drained)?;
    system.cluster.wait_for_peers(4, 3)?;
    wait("what it held at the spare", || system.bears(1, 2))?;
    // Whoever starts daemons starts this one again.
    system.cluster.start(0)?;
    wait("a node that waits", || {
        system.readyz_says(0, "storaged node admit")
    })?;
    let admitted = Command::new(executable())
        .args(["node", "admit", "n0", "--config"])
        .arg(system.cluster.config_path(0))
        .output()?;
    ensure!(admitted.status.success(), "{}", said(&admitted));
    wait("another spare", || system.readyz_says(0, "spare"))?;
    system.restore(&[4, 1], 10, &shards(2, 10))?;
    ensure!(takeovers(&system)? == 0, "it took old memory over");
    Ok(())
}

/// Where files say which nodes there are, it may come back: as one that has been away without its memory.
#[test]
fn a_node_that_is_drained_for_good_comes_back_with_nothing_and_gets_all_from_peers() -> Result<()> {
    let mut system = System::prepared(4, Some((2, 2)), "")?;
    let holder = Holder::start(&mut system, 0)?;
    system.cluster.start_all()?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 10)?;
    drop(trainers);
    holder.wait_for_all(&system, 0)?;
    wait("both losses", || system.bears(0, 2))?;
    let drained = drain(&system, &[])?;
    is_gone_without_a_trace(&mut system, &holder, &drained)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_links()?;
    wait("both losses again", || system.bears(0, 2))?;
    wait("its shard from peers", || {
        let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
        ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
        Ok(())
    })?;
    ensure!(takeovers(&system)? == 0, "it took old memory over");
    holder.wait_for_all(&system, 0)
}

/// Also without `--keep-place`, where the step bears no loss any more: the next one would leave this memory alone to bring it back.
#[test]
fn a_drained_node_that_comes_back_finds_its_memory_with_its_holder() -> Result<()> {
    for arguments in [&["--keep-place"][..], &[]] {
        let (mut system, holder, ..) = protected()?;
        let drained = drain(&system, arguments)?;
        ensure!(drained.status.success(), "{}", said(&drained));
        system.cluster.wait(0)?.context("its end")?;
        ensure!(holder.held()? > 0);
        next_pod_has_all(&mut system, 10)?;
    }
    Ok(())
}

/// Its time was over before others had what it has: an operator may start it again for that.
#[test]
fn what_would_be_lost_with_a_drained_node_stays_with_its_holder() -> Result<()> {
    let (mut system, holder, ..) = protected()?;
    system.cluster.kill(2)?;
    wait("a loss", || system.bears(0, 0))?;
    let drained = drain(&system, &["--deadline", "1s"])?;
    ensure!(drained.status.code() == Some(75), "{}", said(&drained));
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    ensure!(holder.held()? > 0);
    system.cluster.start(2)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_links()?;
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    ensure!(takeovers(&system)? == 1, "not one takeover");
    bears_again(&system)
}

/// Neither the keeper nor a next pod mends a daemon that ends of what it finds.
#[test]
fn what_no_daemon_can_start_with_goes_at_an_operators_word() -> Result<()> {
    let (system, holder, ..) = protected()?;
    refused_twice(&system, &kept_journal(&system, 0)?)?;
    wait("a daemon without that memory", || {
        let released = holder.release()?;
        ensure!(system.cluster.status(0).is_ok(), "{}", said(&released));
        Ok(())
    })?;
    system.cluster.wait_for_links()?;
    let log = fs::read_to_string(system.cluster.log(0))?;
    ensure!(
        log.contains("let go of everything, as the holder was told"),
        "{log}"
    );
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    holder.wait_for_all(&system, 0)
}

fn open_to_all(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

#[test]
fn another_user_has_nothing_from_a_holder() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a process as another user");
        return Ok(());
    }
    let (system, holder, ..) = protected()?;
    let public = system.root.path();
    open_to_all(public, 0o755)?;
    let program = public.join("storaged");
    write_program(Command::new("cp").arg(executable()).arg(&program))?;
    open_to_all(&program, 0o755)?;
    let release = || {
        let mut command = Command::new(&program);
        command.args(["hold", "--release", "--socket"]);
        let command = command.arg(holder.path()).uid(65534).gid(65534);
        command.current_dir("/").output()
    };
    let refused = release()?;
    let text = said(&refused);
    ensure!(
        !refused.status.success() && text.contains("Permission denied"),
        "{text}"
    );
    // Nor by a socket that somebody has opened to all.
    open_to_all(holder.path(), 0o666)?;
    let refused = release()?;
    let text = said(&refused);
    ensure!(
        !refused.status.success() && text.contains("got user id 65534"),
        "{text}"
    );
    holder.wait_for_all(&system, 0)
}
