//! Real `storaged` daemons, one per node of a network, with certificates of a throw-away authority. Their sockets are
//! files, so the bench reaches them from outside their namespaces.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use storaged::net::cert::{create_ca, issue};
use storaged_sdk::Client;
use storaged_sdk::wire::NodeName;

use super::network::Network;

/// UDP port of every daemon.
const PORT: u16 = 9300;
/// Certificates hold as long as any run of the bench.
const DAY: Duration = Duration::from_secs(86_400);
/// Links to all peers are up within this time, also where a machine of two cores starts 34 daemons.
const START_WAIT: Duration = Duration::from_secs(120);

/// What the daemons are like.
#[derive(Clone, Debug)]
pub struct DaemonsSpec {
    /// The `storaged` executable.
    pub executable: PathBuf,
    /// Where everything goes; must not exist.
    pub directory: PathBuf,
    /// Data nodes of a group.
    pub k: usize,
    /// Coding nodes of a group.
    pub m: usize,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Bytes of RAM for each.
    pub budget: u64,
    /// What the daemons are told of their links, bytes per second; none, and they encode by the plain chain.
    pub link_rate: Option<u64>,
}

/// Running daemons; they are killed when dropped.
#[derive(Debug)]
pub struct Daemons<'a> {
    network: &'a Network,
    spec: DaemonsSpec,
    children: Vec<Option<Child>>,
}

impl<'a> Daemons<'a> {
    /// Starts one on every node of the network and waits until each sees all others.
    ///
    /// # Errors
    /// If one does not get ready; the error has the end of its log.
    pub fn start(network: &'a Network, spec: DaemonsSpec) -> Result<Self> {
        let nodes = network.spec().nodes;
        let certificates = spec.directory.join("certs");
        fs::create_dir_all(&certificates)?;
        create_ca(&certificates, DAY)?;
        let mut daemons = Self {
            network,
            spec,
            children: (0..nodes).map(|_| None).collect(),
        };
        for node in 0..nodes {
            issue(&certificates, &name(node)?, DAY)?;
            fs::write(
                daemons.file(node, "toml"),
                daemons.configuration(node, nodes),
            )?;
            daemons.start_node(node)?;
        }
        for node in 0..nodes {
            daemons.wait_for_peers(node, nodes - 1)?;
        }
        Ok(daemons)
    }

    fn configuration(&self, node: usize, nodes: usize) -> String {
        let directory = self.spec.directory.display();
        let address = |node: usize| format!("{}:{PORT}", self.network.address(node));
        let mut text = format!(
            "[node]\nname = \"n{node:02}\"\nlisten = \"{}\"\nruntime_dir = \"{directory}/n{node:02}\"\n\n\
             [tls]\nca = \"{directory}/certs/ca.pem\"\ncertificate = \"{directory}/certs/n{node:02}.pem\"\n\
             key = \"{directory}/certs/n{node:02}.key\"\n\n\
             [coding]\nk = {}\nm = {}\nchunk = \"{}B\"\n\n[memory]\nbudget = \"{}B\"\n\n",
            address(node),
            self.spec.k,
            self.spec.m,
            self.spec.chunk,
            self.spec.budget
        );
        // Measured rates would turn the chains that are to be timed into gathers from the second step on.
        text += "[encode]\nrates = \"configured\"\n";
        if let Some(rate) = self.spec.link_rate {
            text += &format!("link_rate = \"{rate}B\"\n");
        }
        text += "\n";
        for peer in (0..nodes).filter(|peer| *peer != node) {
            text += &format!(
                "[[peers]]\nname = \"n{peer:02}\"\naddress = \"{}\"\n\n",
                address(peer)
            );
        }
        text
    }

    /// Starts a node's daemon.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start_node(&mut self, node: usize) -> Result<()> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.file(node, "log"))?;
        let child = self
            .network
            .command(node, &self.spec.executable)
            .args(["run", "--config"])
            .arg(self.file(node, "toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting a daemon")?;
        self.children[node] = Some(child);
        Ok(())
    }

    /// Waits until a node sees so many peers.
    ///
    /// # Errors
    /// If it does not in time.
    pub fn wait_for_peers(&self, node: usize, peers: usize) -> Result<()> {
        let started = Instant::now();
        let mut seen = 0;
        while started.elapsed() < START_WAIT {
            let status = Client::connect_anonymous(&self.socket(node))
                .and_then(|mut client| client.status());
            seen = status.map_or(0, |text| text.matches(r#""up":true"#).count());
            if seen == peers {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let log = self.log(node);
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(5)..].join("\n");
        bail!("n{node:02} sees {seen} peers, expected {peers}; its log ends with:\n{last}")
    }

    /// Kills a node's daemon: its RAM is gone.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        if let Some(mut child) = self.children[node].take() {
            child.kill().context("killing a daemon")?;
            child.wait().context("waiting for a daemon")?;
        }
        Ok(())
    }

    /// Kills a node's daemon while others use the daemons, and does not wait for its end.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn kill_beside(&self, node: usize) -> Result<()> {
        let process = self.process(node).and_then(|id| i32::try_from(id).ok());
        let process = process.and_then(rustix::process::Pid::from_raw);
        let process = process.with_context(|| format!("n{node:02} does not run"))?;
        rustix::process::kill_process(process, rustix::process::Signal::KILL)?;
        Ok(())
    }

    /// The process of a node's daemon, from its start until it is killed by [`Daemons::kill`].
    pub fn process(&self, node: usize) -> Option<u32> {
        self.children[node].as_ref().map(Child::id)
    }

    /// What a node's daemons have logged.
    pub fn log(&self, node: usize) -> String {
        fs::read_to_string(self.file(node, "log")).unwrap_or_default()
    }

    /// Whether a node has a sealed shard of the newest step in its RAM.
    pub fn has_shard(&self, node: usize) -> bool {
        let status =
            Client::connect_anonymous(&self.socket(node)).and_then(|mut client| client.status());
        status.is_ok_and(|text| text.contains(r#""shards_here":1"#))
    }

    /// CPU seconds that the living daemons have used, in user code and in the kernel.
    pub fn cpu_seconds(&self) -> (f64, f64) {
        let times = self.children.iter().flatten().map(|child| cpu(child.id()));
        times.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// A node's socket.
    pub fn socket(&self, node: usize) -> PathBuf {
        self.spec
            .directory
            .join(format!("n{node:02}"))
            .join("storaged.sock")
    }

    /// What they are like.
    pub fn spec(&self) -> &DaemonsSpec {
        &self.spec
    }

    /// The network that they run on.
    pub fn network(&self) -> &'a Network {
        self.network
    }

    fn file(&self, node: usize, extension: &str) -> PathBuf {
        self.spec.directory.join(format!("n{node:02}.{extension}"))
    }
}

impl Drop for Daemons<'_> {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.spec.directory);
    }
}

/// A node's name: of equal lengths, so that names sort as numbers do.
fn name(node: usize) -> Result<NodeName> {
    Ok(NodeName::new(format!("n{node:02}"))?)
}

/// CPU seconds of a process, in user code and in the kernel; zeros if it is gone.
pub fn cpu(process: u32) -> (f64, f64) {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(Path::new(&path)).unwrap_or_default();
    parse_cpu(&text).unwrap_or_default()
}

fn parse_cpu(stat: &str) -> Option<(f64, f64)> {
    // The name in brackets may have anything in it; fields 14 and 15 are counted from after it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    let mut seconds = || Some(fields.next()?.parse::<f64>().ok()? / ticks_per_second);
    Some((seconds()?, seconds()?))
}

#[cfg(test)]
mod tests {
    use super::{cpu, parse_cpu};

    #[test]
    fn times_of_a_process_are_found_behind_any_name() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0";
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(parse_cpu(stat), Some((250.0 / ticks, 50.0 / ticks)));
        assert_eq!(cpu(u32::MAX), (0.0, 0.0));
    }
}
