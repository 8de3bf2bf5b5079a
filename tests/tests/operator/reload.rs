//! kill -HUP: certificates, peers and the log filter are read again; links and RAM stay, and nothing ends the daemon.

use std::fs;
use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;
use storaged::net::cert::{issue, renew};
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::NodeName;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_tests::system::{System, shards};

use crate::node::{log, rewrite, until};

const LONG: Duration = Duration::from_secs(20);
const DAY: Duration = Duration::from_secs(86_400);

fn reloads(system: &System, node: usize) -> Result<usize> {
    Ok(log(system, node)?
        .matches("reloaded the configuration")
        .count())
}

fn reload(system: &System, node: usize) -> Result<()> {
    let before = reloads(system, node)?;
    system.cluster.signal(node, Signal::HUP)?;
    until("the log says so", LONG, || {
        Ok(reloads(system, node)? > before)
    })
}

#[test]
fn a_hup_reloads_and_keeps_links_and_ram() -> Result<()> {
    let system = System::start(3, Some((2, 1)), "")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, &shards(2, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Protected)?;

    let certificates = system.root.path().join("certs");
    let expires = "storaged_place_certificate_expires_seconds";
    let before = system.cluster.metric::<f64>(0, expires)?;
    renew(&certificates, &NodeName::new("n0")?, 200 * DAY)?;
    rewrite(
        &system,
        0,
        "m = 1\n",
        "m = 1\nchunk = \"64KiB\"\n\n[log]\nfilter = \"debug\"\n",
    )?;
    for _ in 0..20 {
        system.cluster.signal(0, Signal::HUP)?;
    }
    system.cluster.signal(0, Signal::USR1)?;
    reload(&system, 0)?;
    assert!(
        system.cluster.metric::<f64>(0, expires)? > before,
        "the new certificate is in use"
    );
    let text = log(&system, 0)?;
    assert!(
        text.contains("coding.chunk") && text.contains("the old value stays"),
        "{text}"
    );
    assert!(text.contains(" DEBUG "), "the log filter is the new one");

    // The same links, the same RAM.
    assert_eq!(text.matches("peer up").count(), 2, "{text}");
    assert!(!text.contains("peer down"), "{text}");
    drop(trainers);
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    assert_eq!(rungs, [Rung::OwnRam, Rung::OwnRam]);

    // A file that cannot be used changes nothing.
    let path = system.cluster.config_path(0);
    let sound = fs::read_to_string(&path)?;
    fs::write(&path, "[node]\nnaem = 'x'\n")?;
    system.cluster.signal(0, Signal::HUP)?;
    until("it is refused", LONG, || {
        Ok(log(&system, 0)?.contains("naem"))
    })?;
    fs::write(&path, sound)?;
    reload(&system, 0)?;
    assert_eq!(system.cluster.page(0, "/readyz")?.code, 200);
    Ok(())
}

#[test]
fn a_hup_adds_and_removes_peers() -> Result<()> {
    let mut system = System::start(3, None, "")?;
    let directory = system.root.path().to_owned();
    issue(&directory.join("certs"), &NodeName::new("n9")?, DAY)?;
    // A fourth node takes the place of the third: the lists first, then the node.
    let old = fs::read_to_string(system.cluster.config_path(2))?;
    let new = old
        .replace("name = \"n2\"", "name = \"n9\"")
        .replace("/n2", "/n9");
    for node in [0, 1] {
        rewrite(&system, node, "name = \"n2\"", "name = \"n9\"")?;
        reload(&system, node)?;
    }
    system.cluster.kill(2)?;
    fs::write(system.cluster.config_path(2), new)?;
    system.cluster.start(2)?;
    for node in [0, 1] {
        let peer = "peer up peer=n9";
        until("the new peer is up", LONG, || {
            Ok(log(&system, node)?.contains(peer))
        })?;
        assert!(log(&system, node)?.contains("a peer was removed peer=n2"));
        let ready = || Ok(system.cluster.page(node, "/readyz")?.code == 200);
        until("it is ready", LONG, ready)?;
    }
    // And it saves with the new one.
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, &shards(2, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    Ok(())
}

/// Whoever tells all nodes to reload does not know which have just been started. Its file is a pipe here, so that it is certain how far it is.
#[test]
fn a_hup_to_a_daemon_that_reads_its_configuration_does_not_end_it() -> Result<()> {
    let mut system = System::prepared(1, None, "")?;
    let path = system.cluster.config_path(0);
    let text = fs::read_to_string(&path)?;
    fs::remove_file(&path)?;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )?;
    system.cluster.start(0)?;
    // Opened when both are there.
    let mut pipe = fs::OpenOptions::new().write(true).open(&path)?;
    fs::remove_file(&path)?;
    fs::write(&path, &text)?;
    system.cluster.signal(0, Signal::HUP)?;
    std::thread::sleep(Duration::from_millis(300));
    pipe.write_all(text.as_bytes())?;
    drop(pipe);
    until("it answers", LONG, || Ok(system.cluster.status(0).is_ok()))
}
