//! What the daemons' transport is compared with: a stream of bytes between two plain processes, by TCP, by TLS over it, by quinn as
//! it comes, by quinn with chosen settings, and by the daemons' own transport.
//!
//! `tls` is rustls over TCP, `quic` quinn by itself, `own` the transport of `storaged::net`; this file has TCP, the two processes and how
//! the bench runs them.

pub mod own;
pub mod quic;
pub mod tls;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use storaged::cluster::CpuTime;
use storaged::net::cert::{create_ca, issue};
use storaged_sdk::wire::NodeName;

use super::network::Network;

/// Port of the receiving process.
const PORT: u16 = 9400;
/// Bytes of a write.
pub const WRITE_BYTES: usize = 1 << 20;
/// Names of the two ends in their certificates.
pub const NAMES: [&str; 2] = ["sender", "receiver"];

/// By what the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum How {
    /// TCP as the system has it.
    Tcp,
    /// TLS 1.3 over it, in the process as quinn's is.
    Tls,
    /// quinn; as it comes, or with settings.
    Quinn,
    /// The daemons' transport.
    Own,
}

/// One of the two processes.
#[derive(Args, Clone, Debug)]
pub struct RawArgs {
    /// By what
    #[arg(long, value_enum)]
    pub how: How,
    /// The receiver's address
    #[arg(long)]
    pub address: SocketAddr,
    /// The sender's address
    #[arg(long)]
    pub sender: SocketAddr,
    /// Where the certificates are
    #[arg(long)]
    pub certificates: PathBuf,
    /// Bytes of a round
    #[arg(long, default_value_t = 1 << 30)]
    pub bytes: u64,
    /// Rounds
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// Settings of quinn such as mtu=8952,cc=bbr, or of the daemons' transport: streams=4,sockets=2,threads=2
    #[arg(long, default_value = "")]
    pub settings: String,
}

/// What a sender tells.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Sent {
    /// Seconds of the fastest round.
    pub seconds: f64,
    /// CPU seconds of all rounds: user code and kernel.
    pub user: f64,
    pub system: f64,
}

/// What a transfer took.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Transfer {
    /// Bytes per second of the fastest round.
    pub rate: f64,
    /// CPU seconds of both ends for 1e9 bytes.
    pub cpu_per_gb: f64,
    /// The part of them that the kernel took.
    pub system_share: f64,
}

/// The receiving process: says `ready`, then receives until it is killed.
///
/// # Errors
/// If it cannot listen.
pub fn receive(args: &RawArgs) -> Result<()> {
    match args.how {
        How::Tcp => receive_tcp(args.address),
        How::Tls => tls::receive(args),
        How::Quinn => quic::receive(args),
        How::Own => own::receive(args),
    }
}

/// The sending process.
///
/// # Errors
/// If the bytes do not arrive.
pub fn send(args: &RawArgs) -> Result<()> {
    let before = CpuTime::of(std::process::id());
    let fastest = match args.how {
        How::Tcp => send_tcp(args)?,
        How::Tls => tls::send(args)?,
        How::Quinn => quic::send(args)?,
        How::Own => own::send(args)?,
    };
    let used = CpuTime::of(std::process::id()).since(before);
    let sent = Sent {
        seconds: fastest.as_secs_f64(),
        user: used.user,
        system: used.system,
    };
    println!("{}", serde_json::to_string(&sent)?);
    Ok(())
}

/// Tells the bench that bytes may come.
pub fn say_ready() {
    println!("ready");
    // The bench reads lines from a pipe.
    let _ = std::io::stdout().flush();
}

fn receive_tcp(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    say_ready();
    let mut buffer = vec![0; WRITE_BYTES];
    for stream in listener.incoming() {
        let mut stream = stream?;
        while stream.read(&mut buffer)? > 0 {}
        // Closing tells the sender that everything is here.
    }
    Ok(())
}

fn send_tcp(args: &RawArgs) -> Result<Duration> {
    let block = vec![0x5a; WRITE_BYTES];
    let mut fastest = Duration::MAX;
    for _ in 0..args.rounds {
        let mut stream = TcpStream::connect(args.address)?;
        let started = Instant::now();
        for size in writes(args.bytes) {
            stream.write_all(&block[..size])?;
        }
        stream.shutdown(Shutdown::Write)?;
        ensure!(
            stream.read(&mut [0])? == 0,
            "the receiver sent something back"
        );
        fastest = fastest.min(started.elapsed());
    }
    Ok(fastest)
}

/// Sizes of the writes of a round.
pub fn writes(bytes: u64) -> impl Iterator<Item = usize> {
    let whole = bytes / WRITE_BYTES as u64;
    let rest = (bytes % WRITE_BYTES as u64) as usize;
    (0..whole)
        .map(|_| WRITE_BYTES)
        .chain((rest > 0).then_some(rest))
}

/// Makes the certificates of both ends in a directory.
///
/// # Errors
/// If they cannot be written.
pub fn certificates(directory: &Path) -> Result<()> {
    let day = Duration::from_secs(86_400);
    fs::create_dir_all(directory)?;
    create_ca(directory, day)?;
    for name in NAMES {
        issue(directory, &NodeName::new(name)?, day)?;
    }
    Ok(())
}

/// The nodes that send and receive.
#[derive(Debug, Clone, Copy)]
pub struct Ends {
    pub from: usize,
    pub to: usize,
}

/// What is sent, how often, and how.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    pub how: How,
    pub settings: &'a str,
    pub bytes: u64,
    pub rounds: usize,
}

/// Runs both processes on two nodes of a network.
///
/// # Errors
/// If one of them fails.
pub fn transfer(
    network: &Network,
    certificates: &Path,
    ends: Ends,
    load: &Load<'_>,
) -> Result<Transfer> {
    let Ends { from, to } = ends;
    let Load {
        how,
        settings,
        bytes,
        rounds,
    } = *load;
    let program = std::env::current_exe()?;
    let command = |node: usize, end: &str| {
        let mut command = network.command(node, &program);
        let name = how
            .to_possible_value()
            .map(|value| value.get_name().to_owned());
        command
            .args([
                end,
                "--how",
                &name.unwrap_or_default(),
                "--settings",
                settings,
            ])
            .args([
                "--address",
                &SocketAddr::new(network.address(to), PORT).to_string(),
            ])
            .args([
                "--sender",
                &SocketAddr::new(network.address(from), PORT).to_string(),
            ])
            .args([
                "--bytes",
                &bytes.to_string(),
                "--rounds",
                &rounds.to_string(),
            ])
            .arg("--certificates")
            .arg(certificates)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    };
    let receiver = command(to, "raw-receive").spawn();
    let mut receiver = Ended(receiver.context("starting the receiver")?);
    let stdout = receiver.0.stdout.take().context("no standard output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line.trim() == "ready", "the receiver did not get ready");
    let before = CpuTime::of(receiver.0.id());
    let output = command(from, "raw-send")
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "the sender failed");
    let received = CpuTime::of(receiver.0.id()).since(before);
    let sent: Sent = serde_json::from_slice(&output.stdout).context("what the sender says")?;
    let system = sent.system + received.system;
    let total = sent.user + received.user + system;
    Ok(Transfer {
        rate: bytes as f64 / sent.seconds,
        cpu_per_gb: total * 1e9 / (bytes as f64 * rounds as f64),
        system_share: system / total,
    })
}

/// A process that ends with its owner.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::{WRITE_BYTES, writes};

    #[test]
    fn writes_add_up() {
        for bytes in [0, 1, WRITE_BYTES as u64, 3 * WRITE_BYTES as u64 + 7] {
            assert_eq!(writes(bytes).sum::<usize>() as u64, bytes);
        }
    }
}
