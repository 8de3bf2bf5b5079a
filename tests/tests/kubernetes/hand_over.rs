//! The end of a pod whose node has a holder: nothing is waited for, and the next pod has everything.

use rustix::process::Signal;
use storaged_tests::holder::Holder;

use super::*;

/// Three nodes, (2,1), whose first one has a holder and may not be restarted without it: its step bears no loss.
fn held_beside_a_loss() -> Result<(System, Holder)> {
    let mut system = System::prepared(3, Some((2, 1)), "")?;
    let holder = Holder::start(&mut system, 0)?;
    system.cluster.start_all()?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
    drop(trainers);
    system.cluster.kill(2)?;
    wait("a loss", || system.bears(0, 0))?;
    holder.wait_for_all(&system, 0)?;
    Ok((system, holder))
}

#[test]
fn a_pod_whose_memory_a_holder_has_ends_at_once_where_the_machine_stays() -> Result<()> {
    let (mut system, holder) = held_beside_a_loss()?;
    let api = ApiServer::start()?;
    api.put(NODE, json!({"metadata": {"name": "worker"}, "spec": {}}));
    api.put(POD, json!({"metadata": {}}));
    let begun = Instant::now();
    let done = pre_stop(&api, &system, 0)?
        .env("STORAGED_HOLDER", holder.path())
        .output()?;
    let (took, said) = (begun.elapsed(), String::from_utf8_lossy(&done.stderr));
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    ensure!(done.status.success(), "{}: {said}{log}", done.status);
    ensure!(took < Duration::from_secs(10), "{took:?}: {said}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(0), "{ended}");
    ensure!(log.contains("the memory stays with the holder"), "{log}");
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 1)?;
    let rungs = system.restore(&[0, 1], 1, &shards(2, 1))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// It has agreed before, and nobody knows what it has taken since.
#[test]
fn a_holder_that_hangs_is_left_nothing() -> Result<()> {
    let (system, holder) = held_beside_a_loss()?;
    let daemon = system.cluster.daemon_below(0);
    holder.signal(Signal::STOP)?;
    let over = Command::new(executable())
        .args(["hand-over", "--timeout", "9s"])
        .env(
            "STORAGED_SOCKET",
            system.cluster.socket(0).with_file_name("admin.sock"),
        )
        .output()?;
    let said = String::from_utf8_lossy(&over.stderr);
    ensure!(over.status.code() == Some(1), "{}: {said}", over.status);
    system.cluster.wait_for_peers(0, 1)?;
    ensure!(
        system.cluster.daemon_below(0) != daemon,
        "it was started again"
    );
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    ensure!(log.contains("not handed over"), "{log}");
    holder.signal(Signal::CONT)?;
    holder.wait_for_all(&system, 0)
}

#[test]
fn without_a_holder_that_takes_its_memory_a_pod_goes_on() -> Result<()> {
    let (system, mut holder) = held_beside_a_loss()?;
    let api = ApiServer::start()?;
    api.put(NODE, json!({"metadata": {"name": "worker"}, "spec": {}}));
    api.put(POD, json!({"metadata": {}}));
    holder.kill()?;
    let daemon = system.cluster.daemon_below(0);
    let over = pre_stop(&api, &system, 0)?
        .env("STORAGED_HOLDER", holder.path())
        .env("STORAGED_RESTART_WAIT_S", "0")
        .output()?;
    let said = String::from_utf8_lossy(&over.stderr);
    ensure!(over.status.code() == Some(1), "{}: {said}", over.status);
    ensure!(said.contains("a restart is not safe"), "{said}");
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    ensure!(log.contains("not handed over"), "{log}");
    ensure!(system.cluster.daemon_below(0) == daemon && system.cluster.status(0).is_ok());
    Ok(())
}

/// Nobody says whether the machine stays: then it may go, with what only this node has.
#[test]
fn a_pod_whose_machine_may_go_is_not_handed_over() -> Result<()> {
    let (system, holder) = held_beside_a_loss()?;
    let api = ApiServer::start()?;
    let over = pre_stop(&api, &system, 0)?
        .env("STORAGED_HOLDER", holder.path())
        .env("STORAGED_RESTART_WAIT_S", "0")
        .output()?;
    ensure!(over.status.code() == Some(1), "{over:?}");
    ensure!(system.cluster.status(0).is_ok());
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    ensure!(!log.contains("handed over"), "{log}");
    Ok(())
}
