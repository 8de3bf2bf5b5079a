//! The operator's own socket: with tenants configured every command works through it, without a job's token.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, said, shards};

#[test]
fn with_tenants_the_operators_socket_serves_every_command() -> Result<()> {
    let uid = rustix::process::getuid().as_raw();
    // The tenant's directory is where the clients of this test look.
    let mut system = System::start(1, None, "")?;
    system.cluster.kill(0)?;
    let path = system.cluster.config_path(0);
    let directory = system.cluster.socket(0);
    let directory = directory.parent().context("a directory")?;
    let tenants = format!(
        "[[tenants]]\ndirectory = \"{}\"\nuids = [{uid}]\n",
        directory.display()
    );
    std::fs::write(&path, std::fs::read_to_string(&path)? + &tenants)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 0)?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;

    let admin = directory.join("admin.sock");
    let mode = std::fs::metadata(&admin)?.permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let command = |arguments: &[&str], token: &str| {
        let mut command = std::process::Command::new(storaged_tests::system::executable());
        command.args(arguments).env("STORAGED_SOCKET", &admin);
        command.env("STORAGED_TOKEN", token).output()
    };
    for arguments in [
        &["status"][..],
        &["ls"],
        &["plan", "job"],
        &["verify", "job"],
    ] {
        let done = command(arguments, "")?;
        assert!(done.status.success(), "{arguments:?}: {}", said(&done));
    }
    // On the tenant's socket the token is still needed.
    let mut tenant = std::process::Command::new(storaged_tests::system::executable());
    tenant.args(["plan", "job"]).env("STORAGED_TOKEN", "");
    let refused = tenant
        .env("STORAGED_SOCKET", system.cluster.socket(0))
        .output()?;
    assert!(!refused.status.success(), "{}", said(&refused));
    Ok(())
}

/// A script that mistypes a job's name must not believe that it was dropped.
#[test]
fn what_nobody_holds_is_not_dropped_and_exits_with_1() -> Result<()> {
    let system = System::start(1, None, "")?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    let dropped = system.storaged(0, &["drop", "jbo"])?;
    assert_eq!(dropped.status.code(), Some(1), "{}", said(&dropped));
    let told = said(&dropped);
    assert!(
        told.contains("got jbo, of which no node holds anything") && told.contains("storaged ls"),
        "{told}"
    );
    let dropped = system.storaged(0, &["drop", "job", "--force"])?;
    assert!(dropped.status.success(), "{}", said(&dropped));
    Ok(())
}

/// At three in the morning the daemon hangs: every command says so in the time it was given.
#[test]
fn commands_end_in_their_time_beside_a_daemon_that_hangs() -> Result<()> {
    let system = System::start(1, None, "")?;
    system.cluster.signal(0, Signal::STOP)?;
    let commands = [
        &["plan", "job"][..],
        &["verify", "job"],
        &["drop", "job"],
        &["pin", "job", "1"],
        &["rm", "job", "--all"],
        &["restart-safe"],
        &["restart-safe", "--wait"],
    ];
    for command in commands {
        let began = Instant::now();
        let done = system.storaged(0, &[command, &["--timeout", "2"]].concat())?;
        let took = began.elapsed();
        assert_eq!(done.status.code(), Some(1), "{command:?}: {}", said(&done));
        assert!(
            said(&done).contains("stopped"),
            "{command:?}: {}",
            said(&done)
        );
        assert!(took < Duration::from_secs(5), "{command:?} took {took:?}");
    }
    system.cluster.signal(0, Signal::CONT)?;
    Ok(())
}

/// Scripts tell a slip of theirs from a fault by the exit code.
#[test]
fn arguments_that_do_not_fit_together_exit_with_2() -> Result<()> {
    let system = System::start(1, None, "")?;
    for arguments in [
        &["rm", "job"][..],
        &["rm", "job", "--all", "--run", "1"],
        &["rm", "job", "--step", "x"],
        &["plan", "--encode", "--k", "0", "--m", "1"],
    ] {
        let done = system.storaged(0, arguments)?;
        assert_eq!(
            done.status.code(),
            Some(2),
            "{arguments:?}: {}",
            said(&done)
        );
    }
    Ok(())
}
