//! Clusters of fewer nodes than k + m, with real processes: all nodes have shards and code for one another, and any m may be lost.
//! Where no majority is left, somebody has to say that nothing newer is waited for.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, Rank};
use storaged_tests::system::{System, losses, shards, wait};

fn any_may_be_lost(nodes: usize, k: usize, m: usize) -> Result<()> {
    let mut system = System::start(nodes, Some((k, m)), "")?;
    let world = u32::try_from(nodes)?;
    let (run, mut trainers) = system.trainers(world)?;
    let expected = shards(world, 3);
    system.save(&mut trainers, 3, &expected, DurableWish::Never)?;
    (0..nodes).try_for_each(|node| system.wait(node, run, 3, CheckpointState::Protected))?;
    drop(trainers);
    for lost in losses(nodes, m) {
        for node in 0..nodes {
            wait("protection", || system.bears(node, m))?;
        }
        for node in &lost {
            system.cluster.kill(*node)?;
        }
        let left: Vec<usize> = (0..nodes).filter(|node| !lost.contains(node)).collect();
        let restored = if 2 * left.len() > nodes {
            system.restore(&left, 3, &expected)
        } else {
            system.restore_with_few(&left, &expected)
        };
        restored.with_context(|| format!("({k}, {m}) without {lost:?} of {nodes}"))?;
        for node in &lost {
            system.cluster.start(*node)?;
        }
        system.cluster.wait_for_links()?;
    }
    Ok(())
}

#[test]
fn either_of_two_nodes_may_be_lost() -> Result<()> {
    any_may_be_lost(2, 4, 1)
}

#[test]
fn two_of_three_nodes_may_be_lost() -> Result<()> {
    any_may_be_lost(3, 4, 2)
}

#[test]
fn two_of_four_nodes_may_be_lost() -> Result<()> {
    any_may_be_lost(4, 4, 2)
}

/// Three nodes, where any two may be lost: of each group at most two are in it.
#[test]
fn a_whole_zone_may_be_lost() -> Result<()> {
    const ZONES: [[usize; 3]; 3] = [[0, 1, 2], [3, 4, 5], [6, 7, 8]];
    let mut system = System::prepared(9, Some((4, 2)), "")?;
    system.list_together("a/n[0-2],b/n[3-5],c/n[6-8]")?;
    system.cluster.start_all()?;
    let (run, mut trainers) = system.trainers(9)?;
    let expected = shards(9, 3);
    system.save(&mut trainers, 3, &expected, DurableWish::Never)?;
    (0..9).try_for_each(|node| system.wait(node, run, 3, CheckpointState::Protected))?;
    drop(trainers);
    for zone in ZONES {
        for node in 0..9 {
            wait("protection", || system.bears(node, 2))?;
        }
        for node in zone {
            system.cluster.kill(node)?;
        }
        let left: Vec<usize> = (0..9).filter(|node| !zone.contains(node)).collect();
        let restored = system.restore(&left, 3, &expected);
        restored.with_context(|| format!("without the zone of {zone:?}"))?;
        for node in zone {
            system.cluster.start(node)?;
        }
        system.cluster.wait_for_links()?;
    }
    Ok(())
}

/// Whoever gives a place up, or says what a step bears, mostly shares no group with the dead node.
#[test]
fn the_death_of_a_node_is_noticed_in_all_groups_alike() -> Result<()> {
    const NODES: usize = 9;
    let mut system = System::start(NODES, Some((2, 1)), "")?;
    let mut left: Vec<usize> = (0..NODES).collect();
    for dies in [8, 5, 3] {
        // Nobody is sent anything: whoever is must answer soon anyway.
        std::thread::sleep(Duration::from_secs(7));
        let died = Instant::now();
        system.cluster.kill(dies)?;
        left.retain(|node| *node != dies);
        for node in &left {
            system.cluster.wait_for_peers(*node, left.len() - 1)?;
        }
        let took = died.elapsed();
        // 2.5 s, and a second for a busy machine.
        ensure!(took < Duration::from_millis(3_500), "node {dies}: {took:?}");
    }
    Ok(())
}

/// Nobody is promised more than there is.
#[test]
fn as_few_nodes_as_may_be_lost_are_refused() -> Result<()> {
    let mut system = System::prepared(2, Some((4, 2)), "")?;
    system.cluster.start(0)?;
    let ended = system.cluster.wait(0)?.context("it has ended")?;
    let log = system.cluster.log_end(0, 5);
    ensure!(ended.code() == Some(78), "{ended}: {log}");
    ensure!(
        log.contains("needs 2 coding nodes") && log.contains("lower m"),
        "{log}"
    );
    Ok(())
}

/// As where a job is given its nodes in another order. Nothing is coded, and what is there is there.
#[test]
fn without_coding_a_rank_reads_its_shard_from_the_node_on_which_it_was_sealed() -> Result<()> {
    let system = System::start(3, None, "")?;
    let (run, mut trainers) = system.trainers(3)?;
    let expected = shards(3, 3);
    system.save(&mut trainers, 3, &expected, DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, 3, CheckpointState::Committed))?;
    drop(trainers);
    let rungs = system.restore(&[1, 2, 0], 3, &expected)?;
    ensure!(rungs == [Rung::PeerRam; 3], "{rungs:?}");
    Ok(())
}

/// Two threads of one process share a connection, and each has opened the shard: who is done first closes it for both, and the other
/// goes on with the memory that it has.
#[test]
fn a_shard_that_another_reader_of_the_connection_closes_is_read_to_its_end() -> Result<()> {
    let system = System::start(2, None, "")?;
    let (run, mut trainers) = system.trainers(2)?;
    let expected = shards(2, 3);
    system.save(&mut trainers, 3, &expected, DurableWish::Never)?;
    (0..2).try_for_each(|node| system.wait(node, run, 3, CheckpointState::Committed))?;
    let used = || {
        system
            .cluster
            .metric::<f64>(1, "storaged_memory_used_bytes")
    };
    let before = used()?;
    let mut reader = system.reader(1)?;
    let plan = reader.plan(None, 20_000)?;
    let manifest = reader.manifest(plan.manifest)?;
    let rank = Rank::new(0);
    let mut open = || reader.open_shard(&manifest, rank, Vec::new(), 20_000);
    let (first, second) = (open()?, open()?);
    ensure!(first.rung() != Rung::OwnRam, "it is the other node's");
    reader.close_shard(plan.manifest, rank)?;
    wait("both slots to be dropped", || {
        let now = used()?;
        ensure!(now <= before, "{now} bytes, {before} before");
        Ok(())
    })?;
    for shard in [first, second] {
        let mut got = vec![0; expected[0].len()];
        shard.read_at(0, &mut got)?;
        ensure!(got == expected[0]);
    }
    Ok(())
}
