//! What the tests do to one daemon of a cluster, and read of it.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use storaged_tests::system::{System, said};

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

/// A node's log.
pub fn log(system: &System, node: usize) -> Result<String> {
    Ok(fs::read_to_string(system.cluster.log(node))?)
}

/// The status as JSON.
pub fn status(system: &System, node: usize) -> Result<Value> {
    let output = system.storaged(node, &["status", "--json"])?;
    ensure!(output.status.success(), "{}", said(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}
