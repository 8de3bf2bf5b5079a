//! Opening runs on real daemons: at once, on fewer than half of the nodes, while the durable tier is away, and by those
//! who may not.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RefusalCode, RunId, Step};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, shards};

const TIER: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n";

fn code<T>(outcome: Result<T>) -> Result<RefusalCode> {
    let Err(error) = outcome else {
        anyhow::bail!("expected a refusal");
    };
    match error.downcast::<ClientError>()? {
        ClientError::Refused(refusal) => Ok(refusal.code),
        other => Err(other.into()),
    }
}

/// Two clients at once, at all pairs of nodes, round after round.
fn pairs_differ(extra: &str) -> Result<()> {
    let system = System::start(3, Some((2, 1)), extra)?;
    let mut numbers = BTreeSet::new();
    for round in 0..4 {
        for (first, second) in [(0, 1), (1, 2), (2, 0), (1, 1)] {
            let mut clients = [system.reader(first)?, system.reader(second)?];
            let opened = std::thread::scope(|scope| {
                let opened = clients
                    .iter_mut()
                    .map(|client| scope.spawn(|| client.open_run(WAIT_MS)));
                let opened: Vec<_> = opened.collect();
                let join =
                    |one: std::thread::ScopedJoinHandle<'_, _>| one.join().expect("no panic");
                opened
                    .into_iter()
                    .map(join)
                    .collect::<Result<Vec<RunId>, _>>()
            })?;
            for run in opened {
                let text = format!("round {round}: nodes {first} and {second} got {run}");
                ensure!(
                    numbers.insert(run.number()),
                    "{text}, whose number was given"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn two_at_once_get_different_numbers() -> Result<()> {
    pairs_differ("")
}

#[test]
fn two_at_once_get_different_numbers_with_a_tier() -> Result<()> {
    pairs_differ(TIER)
}

/// Five of six nodes stay away: the tier gives the number, and the job saves again.
#[test]
fn a_restart_on_fewer_than_half_of_the_nodes_saves_again() -> Result<()> {
    let mut system = System::start(6, Some((4, 2)), TIER)?;
    let (before, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Required)?;
    system.wait(0, before, 10, CheckpointState::Durable)?;
    drop(trainers);
    for node in 0..6 {
        system.cluster.kill(node)?;
    }
    system.cluster.start(1)?;
    system.cluster.wait_for_peers(1, 0)?;
    // Five silent nodes may know of something newer: the trainer has to say that it does without.
    let plan = system.reader(1)?.plan_allowing_older(None, 3_000)?;
    ensure!(plan.step == Step::new(10), "{plan:?}");
    let after = system.reader(1)?.open_run(WAIT_MS)?;
    ensure!(after.number() > before.number(), "{before}, then {after}");
    let mut trainers = [system.trainer(1, after, 0, 1)?];
    system.save(&mut trainers, 11, &shards(1, 11), DurableWish::Never)
}

/// The tier's directory is gone: a job that nodes remember restarts within seconds, a new one is refused.
#[test]
fn a_tier_that_is_away_holds_up_no_restart_from_ram() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), TIER)?;
    let (before, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, &shards(2, 10), DurableWish::Never)?;
    system.wait(0, before, 10, CheckpointState::Protected)?;
    drop(trainers);
    let tier = system.root.path().join("tier");
    let away = system.root.path().join("away");
    std::fs::rename(&tier, &away)?;
    // A file in its place: what is written there goes nowhere.
    std::fs::write(&tier, b"not mounted")?;

    let began = Instant::now();
    let after = system.reader(1)?.open_run(WAIT_MS)?;
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    ensure!(after.number() > before.number(), "{before}, then {after}");

    let namespace = std::mem::replace(&mut system.namespace, "new-job".parse()?);
    let refused = system.reader(0)?.open_run(30_000);
    ensure!(code(refused.map_err(Into::into))? == RefusalCode::DurableUnavailable);
    system.namespace = namespace;

    std::fs::remove_file(&tier)?;
    std::fs::rename(&away, &tier)?;
    let claim = tier.join(format!("job/.storaged/runs/{:020}", after.number()));
    let began = Instant::now();
    while !claim.exists() {
        ensure!(
            began.elapsed() < Duration::from_secs(20),
            "the tier hears of it"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    let next = system.reader(2)?.open_run(WAIT_MS)?;
    ensure!(next.number() > after.number(), "{after}, then {next}");
    Ok(())
}

/// A stray launcher in the minority ends nobody's job.
#[test]
fn an_attempt_without_a_majority_ends_no_job() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), "")?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 1, &shards(1, 1), DurableWish::Never)?;
    system.wait(0, run, 1, CheckpointState::Committed)?;
    system.cluster.kill(1)?;
    system.cluster.kill(2)?;
    std::thread::sleep(Duration::from_secs(3));
    let stray = system.reader(0)?.open_run(6_000);
    ensure!(code(stray.map_err(Into::into))? == RefusalCode::TimedOut);
    let shard = &shards(1, 2)[0];
    let slot = trainers[0].acquire(shard.len() as u64, WAIT_MS);
    slot.context("the job goes on")?;
    Ok(())
}

#[test]
fn a_run_that_nobody_opened_is_refused() -> Result<()> {
    for extra in ["", TIER] {
        let system = System::start(3, Some((2, 1)), extra)?;
        let run = system.reader(0)?.open_run(WAIT_MS)?;
        for made_up in [RunId::new(run.number() + 1), RunId::new(u64::MAX)] {
            let refused = code(system.trainer(1, made_up, 0, 1))?;
            ensure!(refused == RefusalCode::UnknownRun, "{made_up}: {refused:?}");
        }
        let mut numbers = vec![run.number()];
        for node in [0, 1, 2, 1, 0] {
            numbers.push(system.reader(node)?.open_run(WAIT_MS)?.number());
        }
        ensure!(numbers.windows(2).all(|two| two[0] < two[1]), "{numbers:?}");
    }
    Ok(())
}

/// Daemons are restarted under a job that goes on: the peers, or the tier, know its run.
#[test]
fn a_trainer_outlives_its_daemon() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), "")?;
    let run = system.reader(0)?.open_run(WAIT_MS)?;
    system.cluster.kill(0)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 2)?;
    system.trainer(0, run, 0, 1)?;

    let mut alone = System::start(1, None, TIER)?;
    let run = alone.reader(0)?.open_run(WAIT_MS)?;
    alone.cluster.kill(0)?;
    alone.cluster.start(0)?;
    alone.cluster.wait_for_peers(0, 0)?;
    alone.trainer(0, run, 0, 1)?;
    Ok(())
}
