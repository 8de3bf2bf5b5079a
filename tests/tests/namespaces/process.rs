//! What the kernel and the operator's page say of a daemon: bytes on its link, memory, metrics.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where a daemon serves its metrics, in its own namespace.
const OPS: ([u8; 4], u16) = ([127, 0, 0, 1], 9301);
/// A page comes within this time.
const PAGE_WAIT: Duration = Duration::from_secs(5);

/// Bytes that a process's namespace has sent on its link.
pub fn bytes_sent(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/net/dev");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let link = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("eth0:"));
    // Eight counts of what was received come before.
    let count = link.and_then(|link| link.split_whitespace().nth(8)?.parse().ok());
    count.with_context(|| format!("expected counts of eth0 in {path}, got {text}"))
}

/// The most memory that a process had, in bytes.
pub fn memory_most(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes: Option<u64> = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    let kibibytes = kibibytes.with_context(|| format!("expected VmHWM in {path}, got {text}"))?;
    Ok(kibibytes << 10)
}

/// A page of metrics.
#[derive(Debug)]
pub struct Metrics(String);

impl Metrics {
    /// Asks a daemon, from within its namespace.
    pub fn of(process: u32) -> Result<Self> {
        let asked = thread::spawn(move || page(process)).join();
        asked.ok().context("asking for metrics broke")?.map(Self)
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

/// Only this thread moves.
fn page(process: u32) -> Result<String> {
    let path = format!("/proc/{process}/ns/net");
    let space = fs::File::open(&path).with_context(|| format!("opening {path}"))?;
    move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from(OPS), PAGE_WAIT)?;
    stream.set_read_timeout(Some(PAGE_WAIT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: daemon\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}
