//! A throw-away cluster of daemon processes, for `storaged bench`, the benches and the whole-system tests. Each node has
//! its own address, directory, certificate and process; a node can be killed and replaced.
//!
//! `hosts` is where they run: on loopback addresses unless said otherwise. `process` is what the kernel says of them, `page`
//! what they say themselves.

mod hosts;
mod page;
mod process;

use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::process::{Pid, Signal, kill_process};
use storaged_sdk::wire::NodeName;
use storaged_sdk::{Client, ClientError};
use thiserror::Error;

pub use self::hosts::{Hosts, Loopback, PAGE_WAIT};
pub use self::page::Page;
pub use self::process::{CpuTime, ResidentBytes, child_of};
use crate::keep::{HOLDER_VARIABLE, KEEP_VARIABLE};
use crate::net::cert::{CertError, create_ca, issue};

/// Why a cluster did not come up, or does not answer.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// Files or processes.
    #[error("{what} failed")]
    Io {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// Certificates.
    #[error(transparent)]
    Cert(#[from] CertError),
    /// A node did not get ready.
    #[error(
        "{node} {sees} after {seconds} s, expected {expected} peers; its log ends with:\n{log}"
    )]
    NotReady {
        node: NodeName,
        sees: String,
        seconds: u64,
        expected: usize,
        log: String,
    },
    /// There is no process.
    #[error("{node} does not run")]
    NotRunning { node: NodeName },
    /// A page has no such metric.
    #[error("expected a number {name} of {node}, got {page}")]
    NoMetric {
        node: NodeName,
        name: String,
        page: String,
    },
}

/// Certificates of a cluster that lives for minutes; long enough that no daemon warns of their end.
const VALID: Duration = Duration::from_secs(90 * 86_400);
/// Links to all peers are up within this time, also where a machine of two cores starts 34 daemons.
const LINKS_WAIT: Duration = Duration::from_secs(120);
/// Lines of a log that an error shows.
const LOG_LINES: usize = 5;

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> ClusterError {
    move |source| ClusterError::Io { what, source }
}

/// What a cluster is made of.
#[derive(Debug, Clone)]
pub struct ClusterSpec {
    /// The `storaged` executable.
    pub executable: PathBuf,
    /// Where everything goes.
    pub directory: PathBuf,
    /// Nodes.
    pub nodes: usize,
    /// What every node's configuration has beside names, addresses and certificates, such as `[coding]`.
    pub settings: String,
    /// How nodes know one another.
    pub listing: NodeListing,
}

/// How the nodes of a cluster know one another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeListing {
    /// Each has the others in its file.
    #[default]
    InFiles,
    /// The settings name a registry.
    InRegistry,
}

/// What a daemon that is killed leaves of its node's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeMemory {
    /// Nothing: whoever kills it means the node.
    #[default]
    EndsWithDaemon,
    /// All: a keeper holds it and starts the daemon again.
    OutlivesDaemon,
}

/// Running daemons. Those that still run are killed when it is dropped.
#[derive(Debug)]
pub struct Cluster<H = Loopback> {
    hosts: H,
    spec: ClusterSpec,
    children: Vec<Option<Child>>,
    memory: NodeMemory,
    holders: Vec<Option<PathBuf>>,
}

impl NodeMemory {
    fn keep(self) -> &'static str {
        match self {
            Self::EndsWithDaemon => "none",
            Self::OutlivesDaemon => "keeper",
        }
    }
}

fn process(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw)
}

impl<H: Hosts> Cluster<H> {
    /// Writes certificates and configurations. Nothing runs yet.
    ///
    /// # Errors
    /// [`ClusterError`] if files cannot be written.
    pub fn prepare(hosts: H, spec: ClusterSpec) -> Result<Self, ClusterError> {
        let certificates = spec.directory.join("certs");
        create_ca(&certificates, VALID)?;
        let cluster = Self {
            hosts,
            children: (0..spec.nodes).map(|_| None).collect(),
            holders: vec![None; spec.nodes],
            spec,
            memory: NodeMemory::default(),
        };
        for node in 0..cluster.spec.nodes {
            issue(&certificates, &cluster.name(node), VALID)?;
            fs::write(cluster.config_path(node), cluster.config(node))
                .map_err(io_error("writing a configuration"))?;
        }
        Ok(cluster)
    }

    /// A node's name: all are of one length, so that they sort as numbers do.
    pub fn name(&self, node: usize) -> NodeName {
        let width = self.spec.nodes.saturating_sub(1).to_string().len();
        NodeName::new(format!("n{node:0width$}")).expect("n and a number is a name")
    }

    /// A node's configuration file.
    pub fn config_path(&self, node: usize) -> PathBuf {
        self.file(node, "toml")
    }

    /// Writes more into a node's configuration, for its next start.
    ///
    /// # Errors
    /// If its file cannot be read or written.
    pub fn configure(&self, node: usize, more: &str) -> std::io::Result<()> {
        let path = self.config_path(node);
        let before = fs::read_to_string(&path)?;
        fs::write(path, before + "\n" + more)
    }

    /// A node's socket.
    pub fn socket(&self, node: usize) -> PathBuf {
        let name = self.name(node).to_string();
        self.spec.directory.join(name).join("storaged.sock")
    }

    /// A node's log.
    pub fn log(&self, node: usize) -> PathBuf {
        self.file(node, "log")
    }

    /// The last lines of a node's log.
    pub fn log_end(&self, node: usize, count: usize) -> String {
        let log = fs::read_to_string(self.log(node)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }

    fn file(&self, node: usize, extension: &str) -> PathBuf {
        let name = self.name(node);
        self.spec.directory.join(format!("{name}.{extension}"))
    }

    fn config(&self, node: usize) -> String {
        let (name, directory) = (self.name(node), self.spec.directory.display());
        let mut text = format!(
            "[node]\nname = \"{name}\"\nlisten = \"{}\"\nruntime_dir = \"{directory}/{name}\"\nops_listen = \"{}\"\n\n\
             [tls]\nca = \"{directory}/certs/ca.pem\"\ncertificate = \"{directory}/certs/{name}.pem\"\nkey = \"{directory}/certs/{name}.key\"\n\n",
            self.hosts.address(node),
            self.hosts.ops_address(node),
        );
        let listed = match self.spec.listing {
            NodeListing::InFiles => 0..self.spec.nodes,
            NodeListing::InRegistry => 0..0,
        };
        for peer in listed.filter(|peer| *peer != node) {
            text += &format!(
                "[[peers]]\nname = \"{}\"\naddress = \"{}\"\n\n",
                self.name(peer),
                self.hosts.address(peer)
            );
        }
        text + &self.spec.settings
    }

    /// Daemons that are started from now on leave this when they are killed.
    pub fn set_memory(&mut self, memory: NodeMemory) {
        self.memory = memory;
    }

    /// The keeper of a node that is started from now on hands on what it has to the holder at this path.
    pub fn set_holder(&mut self, node: usize, holder: PathBuf) {
        self.holders[node] = Some(holder);
    }

    /// Process number of the daemon below a node's keeper; none while it is down.
    pub fn daemon_below(&self, node: usize) -> Option<u32> {
        child_of(self.pid(node).ok()?)
    }

    /// Starts a node's daemon.
    ///
    /// # Errors
    /// [`ClusterError`] if the process cannot be started.
    pub fn start(&mut self, node: usize) -> Result<(), ClusterError> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log(node));
        let log = log.map_err(io_error("opening a log"))?;
        let mut command = self.hosts.command(node, &self.spec.executable);
        match &self.holders[node] {
            Some(holder) => command.env(HOLDER_VARIABLE, holder),
            None => command.env_remove(HOLDER_VARIABLE),
        };
        let child = command
            .args(["run", "--config"])
            .arg(self.config_path(node))
            .env(KEEP_VARIABLE, self.memory.keep())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.children[node] = Some(child.map_err(io_error("starting a daemon"))?);
        Ok(())
    }

    /// Starts every node and waits until each sees all others.
    ///
    /// # Errors
    /// [`ClusterError::NotReady`] if one does not.
    pub fn start_all(&mut self) -> Result<(), ClusterError> {
        (0..self.spec.nodes).try_for_each(|node| self.start(node))?;
        self.wait_for_links()
    }

    /// Waits until every node sees all others.
    ///
    /// # Errors
    /// [`ClusterError::NotReady`] if one does not.
    pub fn wait_for_links(&self) -> Result<(), ClusterError> {
        (0..self.spec.nodes).try_for_each(|node| self.wait_for_peers(node, self.spec.nodes - 1))
    }

    /// Waits until a node answers and sees so many peers, no more and no less.
    ///
    /// # Errors
    /// [`ClusterError::NotReady`] after 120 s.
    pub fn wait_for_peers(&self, node: usize, expected: usize) -> Result<(), ClusterError> {
        let started = Instant::now();
        let mut sees = "does not answer".to_owned();
        while started.elapsed() < LINKS_WAIT {
            if let Ok(status) = self.status(node) {
                let up = status.matches(r#""up":true"#).count();
                if up == expected {
                    return Ok(());
                }
                sees = format!("sees {up} peers");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(ClusterError::NotReady {
            node: self.name(node),
            sees,
            seconds: LINKS_WAIT.as_secs(),
            expected,
            log: self.log_end(node, LOG_LINES),
        })
    }

    /// Kills a node's daemon with SIGKILL, and waits for its end: its RAM is gone.
    ///
    /// # Errors
    /// [`ClusterError`] if the system refuses.
    pub fn kill(&mut self, node: usize) -> Result<(), ClusterError> {
        self.end(node, Signal::KILL).map(|_| ())
    }

    /// Tells a node's daemon to stop with SIGTERM, as a service manager does.
    ///
    /// # Errors
    /// [`ClusterError`] if the system refuses.
    pub fn stop(&mut self, node: usize) -> Result<Option<ExitStatus>, ClusterError> {
        self.end(node, Signal::TERM)
    }

    /// Waits for the end of a node's daemon; how it ended, if it was started.
    ///
    /// # Errors
    /// [`ClusterError`] if the system refuses.
    pub fn wait(&mut self, node: usize) -> Result<Option<ExitStatus>, ClusterError> {
        let ended = self.children[node].take().map(|mut child| child.wait());
        ended.transpose().map_err(io_error("waiting for a daemon"))
    }

    /// Nothing to do where no daemon was started.
    fn end(&mut self, node: usize, signal: Signal) -> Result<Option<ExitStatus>, ClusterError> {
        if self.children[node].is_none() {
            return Ok(None);
        }
        let below = self.daemon_below(node).filter(|_| signal == Signal::KILL);
        // A zombie takes signals, and nobody else gets its number before it is waited for.
        self.signal(node, signal)?;
        if let Some(daemon) = below.and_then(process) {
            // Without its keeper it would leave in order, which a node that is lost does not.
            let _ = kill_process(daemon, Signal::KILL);
        }
        self.wait(node)
    }

    /// Sends a signal to a node's daemon, and does not wait for what comes of it.
    ///
    /// # Errors
    /// [`ClusterError`] if there is no such process.
    pub fn signal(&self, node: usize, signal: Signal) -> Result<(), ClusterError> {
        let process = process(self.pid(node)?);
        let process = process.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        let sent = process.and_then(|process| Ok(kill_process(process, signal)?));
        sent.map_err(io_error("sending a signal to a daemon"))
    }

    /// Process number of a node's daemon, from its start until its end was waited for.
    ///
    /// # Errors
    /// [`ClusterError::NotRunning`] if it was not started.
    pub fn pid(&self, node: usize) -> Result<u32, ClusterError> {
        let child = self.children[node].as_ref();
        child
            .map(Child::id)
            .ok_or_else(|| ClusterError::NotRunning {
                node: self.name(node),
            })
    }

    /// What a node says of itself, as JSON.
    ///
    /// # Errors
    /// [`ClientError`] if it does not answer.
    pub fn status(&self, node: usize) -> Result<String, ClientError> {
        Client::connect_anonymous(&self.socket(node))?.status()
    }

    /// A page that a node serves to its operator.
    ///
    /// # Errors
    /// [`ClusterError`] if it does not answer.
    pub fn page(&self, node: usize, path: &str) -> Result<Page, ClusterError> {
        let stream = self.hosts.connect(node);
        let page = stream.and_then(|stream| Page::get(stream, path));
        page.map_err(io_error("reading a page of a daemon"))
    }

    /// A metric of a node, by all of its line up to the space.
    ///
    /// # Errors
    /// [`ClusterError`] if the node does not answer, or has no such metric.
    pub fn metric<T: std::str::FromStr>(&self, node: usize, name: &str) -> Result<T, ClusterError> {
        let page = self.page(node, "/metrics")?;
        page.number(name).ok_or_else(|| ClusterError::NoMetric {
            node: self.name(node),
            name: name.into(),
            page: page.body,
        })
    }

    /// Time on the processors of all daemons that run, each since its start.
    pub fn cpu_time(&self) -> CpuTime {
        let children = self.children.iter().flatten();
        children.map(|child| CpuTime::of(child.id())).sum()
    }

    /// Memory of a node's daemon.
    ///
    /// # Errors
    /// [`ClusterError`] if there is no such process.
    pub fn resident(&self, node: usize) -> Result<ResidentBytes, ClusterError> {
        let resident = ResidentBytes::of(self.pid(node)?);
        resident.map_err(io_error("reading what memory a daemon has"))
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.spec.nodes
    }

    /// Where the daemons run.
    pub fn hosts(&self) -> &H {
        &self.hosts
    }
}

impl<H> Drop for Cluster<H> {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let below = child_of(child.id()).filter(|_| self.memory == NodeMemory::OutlivesDaemon);
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
            if let Some(daemon) = below.and_then(process) {
                let _ = kill_process(daemon, Signal::KILL);
            }
        }
    }
}
