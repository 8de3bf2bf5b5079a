//! What the kernel and the operator's page say of a daemon: its memory and its metrics.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use storaged_bench::net::network::Network;

/// Where a daemon serves its metrics, in its own namespace.
const OPS: ([u8; 4], u16) = ([127, 0, 0, 1], 9301);
/// A page comes within this time.
const PAGE_WAIT: Duration = Duration::from_secs(5);

/// The most memory that a process had, in bytes.
pub fn memory_most(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes: Option<u64> =
        line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    let kibibytes = kibibytes.with_context(|| format!("expected VmHWM in {path}, got {text}"))?;
    Ok(kibibytes << 10)
}

/// A page of metrics.
#[derive(Debug)]
pub struct Metrics(String);

impl Metrics {
    /// Asks a node's daemon.
    pub fn of(network: &Network, node: usize) -> Result<Self> {
        network.inside(node, page).map(Self)
    }

    /// A gauge or a counter without labels.
    pub fn number(&self, name: &str) -> Result<u64> {
        let line = self
            .0
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let number = line.and_then(|number| number.trim().parse().ok());
        number.with_context(|| format!("expected a number {name}, got {}", self.0))
    }
}

fn page() -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from(OPS), PAGE_WAIT)?;
    stream.set_read_timeout(Some(PAGE_WAIT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: daemon\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}
