//! RAM that outlives its daemon, with real processes: daemons below keepers are killed and upgraded, and what they held is there.

#[path = "kept_memory/pods.rs"]
mod pods;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, Rank, RunId, Step};
use storaged_sdk::{ClientError, Trainer};
use storaged_tests::system::{System, memory_of, save_protected, shards, wait};

const ENCODED: &str = "storaged_encode_session_bytes_total";

/// A reader has one rank's shard of an old step open, so that only the other rank's slot goes to the next save. That save is what a restart
/// finds in it.
#[test]
fn slots_that_readers_left_are_not_kept_for_their_step() -> Result<()> {
    let system = System::start_kept(1, None, "")?;
    let run = system.reader(0)?.open_run(20_000)?;
    let ranks = 0..2;
    let trainers = ranks.map(|rank| system.trainer(0, run, rank, 2));
    let mut trainers = trainers.collect::<Result<Vec<_>>>()?;
    let mut reader = system.reader(0)?;
    let mut open = None;
    for step in 1..=5 {
        let shards = shards(2, step);
        system.save(&mut trainers, step, &shards, DurableWish::Never)?;
        system.wait(0, run, step, CheckpointState::Committed)?;
        if step == 1 {
            let plan = reader.plan(None, 20_000)?;
            let manifest = reader.manifest(plan.manifest)?;
            open = Some(reader.open_shard(&manifest, Rank::new(0), Vec::new(), 20_000)?);
        }
    }
    let before = system.tell_daemon(0, Signal::KILL)?;
    system.back_after(0, before)?;
    drop(open);
    let rungs = system.restore(&[0], 5, &shards(2, 5))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// Three nodes, (2,1), whose memory outlives their daemons, and a trainer on both data nodes.
fn started(extra: &str) -> Result<(System, RunId, Vec<Trainer>)> {
    let system = System::start_kept(3, Some((2, 1)), extra)?;
    let (run, trainers) = system.trainers(2)?;
    Ok((system, run, trainers))
}

/// Two steps stay, and both are whole after every daemon has died, and after a whole node has.
#[test]
fn older_steps_that_are_kept_outlive_daemons_and_a_node() -> Result<()> {
    let kept = "[memory]\nbudget = \"64MiB\"\nslots_per_rank = 4\nkeep_steps = 2\n";
    let mut system = System::start_kept(3, Some((2, 1)), kept)?;
    let (run, mut trainers) = system.trainers(2)?;
    for step in 1..=3 {
        save_protected(&system, run, &mut trainers, step)?;
    }
    drop(trainers);
    let both = |system: &System| {
        let gone = system.reader(0)?.plan(Some(Step::new(1)), 5_000);
        ensure!(gone.is_err(), "step 1 has made way");
        let rungs = system.restore_step(&[0, 1], 2, &shards(2, 2))?;
        ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
        system.restore(&[0, 1], 3, &shards(2, 3))
    };
    both(&system)?;
    for node in 0..3 {
        let before = system.tell_daemon(node, Signal::KILL)?;
        system.back_after(node, before)?;
    }
    system.cluster.wait_for_links()?;
    bears_again(&system)?;
    both(&system)?;
    system.cluster.kill(1)?;
    system.cluster.start(1)?;
    system.cluster.wait_for_links()?;
    wait("both steps on the node that came back empty", || {
        both(&system)
    })?;
    Ok(())
}

fn encoded(system: &System) -> Result<u64> {
    let all = (0..3).map(|node| system.cluster.metric::<u64>(node, ENCODED));
    Ok(all.sum::<Result<u64, _>>()?)
}

/// The newest step bears the loss of a node, as every node says.
fn bears_again(system: &System) -> Result<()> {
    let began = Instant::now();
    let mut said = String::new();
    while began.elapsed() < Duration::from_secs(20) {
        let mut all = true;
        for node in 0..3 {
            let status = system.cluster.status(node)?;
            all &= status.contains(r#""bears":1"#);
            said = status;
        }
        if all {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    anyhow::bail!("no node loss is borne: {said}")
}

#[test]
fn a_killed_daemon_has_its_shard_and_its_parity_again_and_nothing_is_sent() -> Result<()> {
    for node in 0..3 {
        let (system, run, mut trainers) = started("")?;
        save_protected(&system, run, &mut trainers, 10)?;
        let before = system.tell_daemon(node, Signal::KILL)?;
        let took = system.back_after(node, before)?;
        println!(
            "n{node} answers {} ms after it was killed",
            took.as_millis()
        );
        let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
        ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
        system.cluster.wait_for_links()?;
        bears_again(&system)?;
        let counted = encoded(&system)?;
        std::thread::sleep(Duration::from_secs(2));
        ensure!(encoded(&system)? == counted, "blocks were computed again");
        let log = std::fs::read_to_string(system.cluster.log(node))?;
        ensure!(
            log.contains("took over the memory of an earlier daemon"),
            "{log}"
        );
        ensure!(!log.contains("cannot be used"), "{log}");
        ensure!(!log.contains("is lost"), "{log}");
    }
    Ok(())
}

/// Every daemon is killed, and then a node is lost with its memory: its shard comes out of parity that three daemons have kept.
#[test]
fn parity_that_outlived_its_daemon_decodes() -> Result<()> {
    let (mut system, run, mut trainers) = started("")?;
    for step in [10, 20] {
        save_protected(&system, run, &mut trainers, step)?;
    }
    for node in 0..3 {
        let before = system.tell_daemon(node, Signal::KILL)?;
        system.back_after(node, before)?;
    }
    system.cluster.wait_for_links()?;
    bears_again(&system)?;
    system.cluster.kill(1)?;
    let rungs = system.restore(&[0, 0], 20, &shards(2, 20))?;
    ensure!(rungs == [Rung::OwnRam, Rung::Decoded], "{rungs:?}");
    Ok(())
}

/// The job goes on under its run and over its connections, against the parity that was kept, and what it saves then is as safe as before.
#[test]
fn saves_go_on_after_a_restart() -> Result<()> {
    let (mut system, run, mut trainers) = started("")?;
    save_protected(&system, run, &mut trainers, 10)?;
    for step in [20, 30, 40] {
        let node = (step / 10) as usize % 3;
        let before = system.tell_daemon(node, Signal::KILL)?;
        system.back_after(node, before)?;
        system.cluster.wait_for_links()?;
        save_protected(&system, run, &mut trainers, step)?;
    }
    bears_again(&system)?;
    system.cluster.kill(0)?;
    let rungs = system.restore(&[1, 1], 40, &shards(2, 40))?;
    ensure!(rungs == [Rung::Decoded, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// A rolling upgrade: SIGUSR2 to each `storaged run`, one after the other, while the job saves.
#[test]
fn a_rolling_upgrade_loses_no_step() -> Result<()> {
    let (system, run, mut trainers) = started("")?;
    save_protected(&system, run, &mut trainers, 10)?;
    for (node, step) in (0..3).zip([20, 30, 40]) {
        let before = system.cluster.daemon_below(node).context("a daemon")?;
        system.cluster.signal(node, Signal::USR2)?;
        system.back_after(node, before)?;
        let newest = system.reader(node)?.plan(None, 20_000)?;
        ensure!(newest.step.get() == step - 10, "step {}", newest.step);
        save_protected(&system, run, &mut trainers, step)?;
    }
    bears_again(&system)
}

/// The daemon dies while a slot of its node is being filled: that save fails, and says so; the next one goes on over the same connections, though
/// nobody has waited until the daemon was back.
#[test]
fn a_slot_that_was_being_filled_is_lost_and_the_connection_is_not() -> Result<()> {
    let (system, run, mut trainers) = started("")?;
    save_protected(&system, run, &mut trainers, 10)?;
    let shard = &shards(2, 20)[0];
    let lost = trainers[0].acquire(shard.len() as u64, 20_000)?;
    lost.copy_in(0, &shard[..shard.len() / 2])?;
    let before = system.tell_daemon(0, Signal::KILL)?;
    save_protected(&system, run, &mut trainers, 20)?;
    ensure!(system.cluster.daemon_below(0) != Some(before));
    // What was mapped stays, and is nobody's.
    lost.copy_in(0, shard)?;
    let sealed = trainers[0].seal(&lost, Step::new(30), shard.len() as u64);
    ensure!(
        matches!(sealed, Err(ClientError::SlotLost { .. })),
        "{sealed:?}"
    );
    trainers[0].release(&lost)?;
    save_protected(&system, run, &mut trainers, 30)?;
    let rungs = system.restore(&[0, 1], 30, &shards(2, 30))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// SIGKILL at any moment of a save: the newest step that was protected, or a newer one, is there with the right bytes.
#[test]
fn killed_at_any_moment_of_a_save_it_loses_nothing_that_was_protected() -> Result<()> {
    let (system, run, mut trainers) = started("")?;
    save_protected(&system, run, &mut trainers, 1)?;
    let mut safe = 1;
    for step in 2..14 {
        let node = step as usize % 3;
        let began = system.save(&mut trainers, step, &shards(2, step), DurableWish::Never);
        std::thread::sleep(Duration::from_millis(step * 7 % 40));
        let before = system.tell_daemon(node, Signal::KILL)?;
        system.back_after(node, before)?;
        system.cluster.wait_for_links()?;
        let wait = began.and_then(|()| {
            (0..3).try_for_each(|node| system.wait(node, run, step, CheckpointState::Protected))
        });
        let newest = system.reader(0)?.plan(None, 20_000)?.step.get();
        ensure!(newest >= safe, "step {newest} after {safe} was protected");
        system.restore(&[0, 1], newest, &shards(2, newest))?;
        if wait.is_ok() {
            safe = step;
        }
    }
    ensure!(safe > 8, "most saves come through, the last one was {safe}");
    bears_again(&system)
}

/// Where a journal of kept memory says of which layout it is (`storaged/src/keep/journal.rs`).
const LAYOUT_AT: u64 = 8;
/// A layout that no release has.
const UNKNOWN: [u8; 4] = 7_000_u32.to_le_bytes();

/// The journal that a node's keeper holds.
fn kept_journal(system: &System, node: usize) -> Result<File> {
    let keeper = system.cluster.pid(node)?;
    // For a moment after a start it may hold that of the daemon before too.
    let path = wait("one journal", || {
        let mut all = memory_of(keeper, "storaged-journal")?;
        ensure!(all.len() == 1, "{all:?}");
        all.pop().context("a journal")
    })?;
    Ok(File::options().read(true).write(true).open(path)?)
}

/// Makes what a node's keeper holds another release's, and kills the daemon: waits until the next ones have refused it twice. The process
/// that was killed.
fn refused_twice(system: &System, journal: &File) -> Result<u32> {
    let refusals = || -> Result<usize> {
        let log = fs::read_to_string(system.cluster.log(0))?;
        Ok(log.matches("is of layout 7000, and this release").count())
    };
    let before = refusals()?;
    journal.write_all_at(&UNKNOWN, LAYOUT_AT)?;
    let killed = system.tell_daemon(0, Signal::KILL)?;
    wait("two refusals", || {
        let more = refusals()? - before;
        ensure!(more >= 2, "{more}: {}", system.cluster.log_end(0, 20));
        Ok(())
    })?;
    ensure!(
        system.cluster.status(0).is_err(),
        "a daemon answers without the memory that it has"
    );
    let slots = memory_of(system.cluster.pid(0)?, "storaged-slot")?;
    ensure!(!slots.is_empty(), "the keeper has let go of the memory");
    Ok(killed)
}

/// A daemon was put back to an older release, which does not know how the memory is laid out: it touches nothing. The release that wrote it finds
/// all of it; who has no use for that stops the keeper, and the next daemon begins with nothing.
#[test]
fn memory_of_an_unknown_layout_stays_until_its_keeper_is_stopped() -> Result<()> {
    let mut system = System::start_kept(1, None, "")?;
    let run = system.reader(0)?.open_run(20_000)?;
    let mut trainers = vec![system.trainer(0, run, 0, 1)?];
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Never)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    drop(trainers);
    let journal = kept_journal(&system, 0)?;
    let mut own = [0; 4];
    journal.read_exact_at(&mut own, LAYOUT_AT)?;
    let killed = refused_twice(&system, &journal)?;
    journal.write_all_at(&own, LAYOUT_AT)?;
    system.back_after(0, killed)?;
    let rungs = system.restore(&[0], 10, &shards(1, 10))?;
    ensure!(rungs == [Rung::OwnRam], "{rungs:?}");
    refused_twice(&system, &kept_journal(&system, 0)?)?;
    system.cluster.stop(0)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 0)?;
    let used: u64 = system.cluster.metric(0, "storaged_memory_used_bytes")?;
    ensure!(used == 0, "{used} bytes of memory that was dropped");
    let plan = system.reader(0)?.plan(None, 5_000);
    ensure!(matches!(plan, Err(ClientError::Refused(_))), "{plan:?}");
    Ok(())
}
