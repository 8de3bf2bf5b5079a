//! An ordinary restart is no alarm, and what lasts is said once.

use anyhow::Result;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, said, shards};

use crate::node::log;

#[test]
fn an_ordinary_restart_warns_of_nothing_and_counts_no_fault() -> Result<()> {
    // By default the budget is half of the memory, and a smaller one is warned of where that is not free.
    let mut system = System::start(3, Some((2, 1)), "[memory]\nbudget = \"1GiB\"\n")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, &shards(2, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Protected)?;
    drop(trainers);
    for node in [2, 0, 1, 2] {
        // Two nodes that are away before what the first one had is made again are a loss, and rightly warned of.
        let asked = system.storaged(node, &["restart-safe", "--wait", "--timeout", "60"])?;
        assert!(asked.status.success(), "n{node}: {}", said(&asked));
        system.cluster.stop(node)?;
        system.cluster.start(node)?;
        for peer in 0..3 {
            system.cluster.wait_for_peers(peer, 2)?;
        }
    }
    for node in 0..3 {
        let text = log(&system, node)?;
        let loud: Vec<&str> = (text.lines())
            .filter(|line| line.contains(" WARN ") || line.contains(" ERROR "))
            .collect();
        assert!(loud.is_empty(), "n{node}: {loud:?}");
        assert_eq!(
            system
                .cluster
                .metric::<f64>(node, "storaged_place_peer_faults_total")?,
            0.0
        );
    }
    Ok(())
}

#[test]
fn a_fresh_daemon_has_every_counter() -> Result<()> {
    let system = System::start(1, None, "")?;
    let body = system.cluster.page(0, "/metrics")?.body;
    for line in [
        "storaged_checkpoint_states_total{state=\"protected\"} 0",
        "storaged_checkpoint_states_total{state=\"durable\"} 0",
        "storaged_checkpoint_states_total{state=\"abandoned\"} 0",
        "storaged_encode_wrong_bytes_total{node=\"n0\"} 0",
        "storaged_trickle_increment_records_total{kind=\"raw\"} 0",
        "storaged_trickle_failures_total 0",
    ] {
        assert!(body.contains(line), "{line} in {body}");
    }
    Ok(())
}
