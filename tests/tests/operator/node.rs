//! What the tests do to one daemon of a cluster, and read of it.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use storaged_tests::system::{System, executable};

/// Changes a node's configuration file.
pub fn rewrite(system: &System, node: usize, from: &str, to: &str) -> Result<()> {
    let path = system.cluster.config_path(node);
    let text = fs::read_to_string(&path)?;
    ensure!(text.contains(from), "no {from:?} in {text}");
    Ok(fs::write(path, text.replace(from, to))?)
}

/// Looks again and again until something holds.
pub fn until(what: &str, limit: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !holds()? {
        ensure!(started.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Runs the command line against a node's socket.
pub fn storaged(system: &System, node: usize, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(executable());
    command.args(arguments);
    command.env("STORAGED_SOCKET", system.cluster.socket(node));
    command.env("STORAGED_TOKEN", "secret");
    command.output().context("running storaged")
}

/// What a command said, on both streams.
pub fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// A node's log.
pub fn log(system: &System, node: usize) -> Result<String> {
    Ok(fs::read_to_string(system.cluster.log(node))?)
}

/// A page of a node's HTTP: status code and body.
pub fn page(system: &System, node: usize, path: &str) -> Result<(u16, String)> {
    let text = fs::read_to_string(system.cluster.config_path(node))?;
    let line = text.lines().find(|line| line.starts_with("ops_listen"));
    let address = line.and_then(|line| line.split('"').nth(1));
    let mut stream = TcpStream::connect(address.context("no ops_listen")?)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let code = answer
        .split(' ')
        .nth(1)
        .context("no status line")?
        .parse()?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok((code, body.to_owned()))
}

/// The status as JSON.
pub fn status(system: &System, node: usize) -> Result<Value> {
    let output = storaged(system, node, &["status", "--json"])?;
    ensure!(output.status.success(), "{}", said(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// A metric's value, by its line up to the space.
pub fn metric(system: &System, node: usize, name: &str) -> Result<f64> {
    let (_, body) = page(system, node, "/metrics")?;
    let line = body
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = line.with_context(|| format!("no {name} in {body}"))?;
    Ok(value.parse()?)
}

/// Sends a signal to a node's daemon.
pub fn signal(system: &System, node: usize, signal: rustix::process::Signal) -> Result<()> {
    let pid = system.cluster.pid(node).context("the daemon runs")?;
    let pid = rustix::process::Pid::from_raw(pid as i32).context("a process number")?;
    rustix::process::kill_process(pid, signal)?;
    Ok(())
}
