//! Jobs that come and go, and plans asked while daemons are stopped, with real processes.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged_sdk::wire::local::{DropReport, DurableWish};
use storaged_sdk::wire::{CheckpointState, Namespace, RefusalCode};
use storaged_sdk::{Client, ClientError, WithTrainers};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, shards};

/// What a process has open, and the bytes that are its own.
fn descriptors_and_memory(system: &System, node: usize) -> Result<(usize, u64)> {
    let descriptors = format!("/proc/{}/fd", system.cluster.pid(node)?);
    let descriptors = std::fs::read_dir(descriptors)?.count();
    Ok((descriptors, system.cluster.resident(node)?.now))
}

#[test]
fn two_hundred_jobs_in_a_row_fit_a_hundred_mebibytes() -> Result<()> {
    let memory = "[memory]\nbudget = \"100MiB\"\nidle_job = \"1s\"\n";
    let mut system = System::start(3, Some((2, 1)), memory)?;
    let mut before = (0, 0);
    for job in 0..200 {
        system.namespace = Namespace::new(format!("job-{job}"))?;
        let (run, mut trainers) = system.trainers(2)?;
        let shards = [vec![job as u8; 100_000], vec![1; 100_000]];
        system
            .save(&mut trainers, 1, &shards, DurableWish::Policy)
            .with_context(|| format!("job {job}"))?;
        system.wait(0, run, 1, CheckpointState::Protected)?;
        if job == 100 {
            before = descriptors_and_memory(&system, 0)?;
        }
    }
    let after = descriptors_and_memory(&system, 0)?;
    ensure!(
        after.0 <= before.0 + 10,
        "descriptors: {before:?}, {after:?}"
    );
    ensure!(
        after.1 <= before.1 + (16 << 20),
        "bytes: {before:?}, {after:?}"
    );
    system.restore(&[0, 1], 1, &[vec![199; 100_000], vec![1; 100_000]])?;

    let mut reader = system.reader(2)?;
    let report = dropped(&mut reader)?;
    ensure!(
        report.nodes.len() == 3 && report.silent.is_empty(),
        "{report:?}"
    );
    let gone = reader.plan(None, 5_000);
    ensure!(
        matches!(&gone, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::NoCheckpoint
            || refusal.code == RefusalCode::UnknownNamespace),
        "{gone:?}"
    );
    Ok(())
}

/// Drops the job once all nodes have heard that its trainers' connections have ended.
fn dropped(reader: &mut Client) -> Result<DropReport> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match reader.drop_job(WithTrainers::Refused, WAIT_MS) {
            Err(ClientError::Refused(refusal))
                if refusal.code == RefusalCode::InUse && Instant::now() < until =>
            {
                sleep(Duration::from_millis(50));
            }
            report => return Ok(report?),
        }
    }
}

/// Step 10 is durable, step 11 was protected after it.
fn two_steps() -> Result<System> {
    let durable = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\n";
    let system = System::start(6, Some((4, 2)), durable)?;
    let (run, mut trainers) = system.trainers(4)?;
    system.save(&mut trainers, 10, &shards(4, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Durable)?;
    system.save(&mut trainers, 11, &shards(4, 11), DurableWish::Policy)?;
    for node in 0..6 {
        system.wait(node, run, 11, CheckpointState::Protected)?;
    }
    Ok(system)
}

fn signal(system: &System, nodes: &[usize], signal: Signal) -> Result<()> {
    let mut nodes = nodes.iter();
    Ok(nodes.try_for_each(|node| system.cluster.signal(*node, signal))?)
}

/// The step that a plan offers that is asked while these nodes are stopped, and how long it takes.
fn planned_while_stopped(
    system: &System,
    mut reader: Client,
    nodes: &[usize],
    pause: Duration,
) -> Result<(u64, Duration)> {
    signal(system, nodes, Signal::STOP)?;
    let began = Instant::now();
    let asked = std::thread::spawn(move || reader.plan(None, WAIT_MS));
    sleep(pause);
    signal(system, nodes, Signal::CONT)?;
    let plan = asked.join().expect("the client does not panic")?;
    Ok((plan.step.get(), began.elapsed()))
}

#[test]
fn a_plan_asked_while_daemons_are_stopped_offers_what_was_protected() -> Result<()> {
    let mut system = two_steps()?;
    let others = [1, 2, 3, 4, 5];
    for (nodes, pause_ms) in [
        (&others[..], 3_500),
        (&others[..], 800),
        (&[0][..], 3_000),
        (&[0][..], 8_000),
    ] {
        let reader = system.reader(0)?;
        let pause = Duration::from_millis(pause_ms);
        let (step, took) = planned_while_stopped(&system, reader, nodes, pause)?;
        ensure!(step == 11, "{nodes:?} stopped {pause_ms} ms: step {step}");
        ensure!(took < pause + Duration::from_secs(10), "{took:?}");
        system.cluster.wait_for_peers(0, 5)?;
        sleep(Duration::from_secs(1));
    }
    // Restarted with empty RAM, while all others are stopped.
    system.cluster.kill(0)?;
    signal(&system, &others, Signal::STOP)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 0)?;
    let reader = system.reader(0)?;
    let (step, _) = planned_while_stopped(&system, reader, &others, Duration::from_secs(6))?;
    ensure!(step == 11, "after a restart with empty RAM: step {step}");
    system.restore(&[0, 1, 2, 3], 11, &shards(4, 11))?;

    // Three of six for good: refused unless an older one will do.
    for node in [3, 4, 5] {
        system.cluster.kill(node)?;
    }
    let mut reader = system.reader(0)?;
    let began = Instant::now();
    let refused = reader.plan(None, 6_000);
    ensure!(
        matches!(&refused, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::NewerUnreachable
            && refusal.message.contains("n3, n4, n5")),
        "{refused:?}"
    );
    ensure!(
        began.elapsed() < Duration::from_secs(7),
        "{:?}",
        began.elapsed()
    );
    let older = reader.plan_allowing_older(None, 6_000)?;
    ensure!(older.step.get() == 10, "{older:?}");
    Ok(())
}
