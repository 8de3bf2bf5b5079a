//! One list of nodes for all of them, and failure domains that the launcher says.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, executable, said, shards};

use crate::node::{log, until};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn nodes_that_share_a_host_list_link_up() -> Result<()> {
    let mut system = System::prepared(3, Some((1, 1)), "")?;
    system.list_together("zone[0-2]/rack")?;
    system.cluster.start_all()?;
    let path = system.cluster.config_path(0).display().to_string();
    let told = said(&system.storaged(0, &["config", &path])?);
    assert!(told.contains("node n0 of 3"), "{told}");
    assert!(
        told.contains("in one failure domain: at most 1 at level 1 (its loss is borne), 1 at level 2 (its loss is borne)"),
        "{told}"
    );
    // A launcher that says something else of one node would part it from the others.
    let wrong = |domain: &str| -> Result<String> {
        let mut command = Command::new(executable());
        command
            .args(["config", &path])
            .env("STORAGED_FAILURE_DOMAIN", domain);
        let checked = command.output()?;
        anyhow::ensure!(!checked.status.success(), "{}", said(&checked));
        Ok(said(&checked))
    };
    let told = wrong("zone1/other")?;
    assert!(
        told.contains("says of this node, zone0/rack") && told.contains("got zone1/other"),
        "{told}"
    );
    let told = wrong("zone1/")?;
    assert!(
        told.contains("node.failure_domain") && told.contains("\"zone1/\""),
        "{told}"
    );
    Ok(())
}

/// All nodes read one list: after a reload they make the same groups of it, and a step is protected as before.
#[test]
fn a_reload_that_changes_failure_domains_leaves_all_nodes_with_the_same_groups() -> Result<()> {
    let mut system = System::prepared(4, Some((2, 1)), "")?;
    system.list_together("r[0-3]")?;
    system.cluster.start_all()?;
    let (run, mut trainers) = system.trainers(4)?;
    system.save(&mut trainers, 1, &shards(4, 1), DurableWish::Never)?;
    (0..4).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
    system.list_together("z1/r1,z1/r2,z2/r1,z2/r2")?;
    for node in 0..4 {
        system.cluster.signal(node, Signal::HUP)?;
    }
    for node in 0..4 {
        until("it is reloaded", LONG, || {
            Ok(log(&system, node)?.contains("reloaded the configuration"))
        })?;
        assert!(
            !log(&system, node)?.contains("the old value stays"),
            "n{node}"
        );
    }
    for step in 2..5 {
        system.save(&mut trainers, step, &shards(4, step), DurableWish::Never)?;
        (0..4).try_for_each(|node| system.wait(node, run, step, CheckpointState::Protected))?;
    }
    // Nor is a node that is started again another one to the others.
    system.cluster.kill(2)?;
    system.cluster.start(2)?;
    system.cluster.wait_for_links()?;
    Ok(())
}
