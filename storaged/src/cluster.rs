//! A throw-away cluster of daemon processes on loopback addresses: for `storaged bench` and the whole-system tests.
//! Each node has its own address 127.0.0.N, directory, certificate and process; a node can be killed and replaced.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use storaged_sdk::Client;
use storaged_wire::NodeName;
use thiserror::Error;

use crate::net::cert::{CertError, create_ca, issue};

/// Why a cluster did not come up.
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
    #[error("node {node} was not ready within {seconds} s; its log is {log}")]
    NotReady {
        node: String,
        seconds: u64,
        log: PathBuf,
    },
}

/// Certificates of a cluster that lives for minutes; long enough that no daemon warns of their end.
const VALID: Duration = Duration::from_secs(90 * 86_400);

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
    /// k and m; none for no code.
    pub geometry: Option<(usize, usize)>,
    /// First UDP port; each node has its own address, all the same port.
    pub port: u16,
    /// More lines of every node's configuration, such as `[durable]`.
    pub extra: String,
}

/// Running daemons. Those that still run are killed when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    spec: ClusterSpec,
    children: Vec<Option<Child>>,
}

impl Cluster {
    /// Writes certificates and configurations. Nothing runs yet.
    ///
    /// # Errors
    /// [`ClusterError`] if files cannot be written.
    pub fn prepare(spec: ClusterSpec) -> Result<Self, ClusterError> {
        let certificates = spec.directory.join("certs");
        create_ca(&certificates, VALID)?;
        let cluster = Self {
            children: (0..spec.nodes).map(|_| None).collect(),
            spec,
        };
        for node in 0..cluster.spec.nodes {
            issue(&certificates, &cluster.name(node), VALID)?;
            let path = cluster.config_path(node);
            std::fs::write(path, cluster.config(node))
                .map_err(io_error("writing a configuration"))?;
        }
        Ok(cluster)
    }

    /// A node's name.
    pub fn name(&self, node: usize) -> NodeName {
        NodeName::new(format!("n{node}")).expect("n and a number is a name")
    }

    /// A node's configuration file.
    pub fn config_path(&self, node: usize) -> PathBuf {
        self.spec.directory.join(format!("n{node}.toml"))
    }

    /// A node's socket.
    pub fn socket(&self, node: usize) -> PathBuf {
        self.spec
            .directory
            .join(format!("n{node}"))
            .join("storaged.sock")
    }

    /// A node's log.
    pub fn log(&self, node: usize) -> PathBuf {
        self.spec.directory.join(format!("n{node}.log"))
    }

    fn address(&self, node: usize) -> String {
        format!("127.0.0.{}:{}", node + 1, self.spec.port)
    }

    fn config(&self, node: usize) -> String {
        let directory = self.spec.directory.display();
        let mut text = format!(
            "[node]\nname = \"n{node}\"\nlisten = \"{}\"\nruntime_dir = \"{directory}/n{node}\"\nops_listen = \"127.0.0.{}:{}\"\n\n\
             [tls]\nca = \"{directory}/certs/ca.pem\"\ncertificate = \"{directory}/certs/n{node}.pem\"\nkey = \"{directory}/certs/n{node}.key\"\n\n",
            self.address(node),
            node + 1,
            self.spec.port + 1,
        );
        for peer in (0..self.spec.nodes).filter(|peer| *peer != node) {
            text += &format!(
                "[[peers]]\nname = \"n{peer}\"\naddress = \"{}\"\n\n",
                self.address(peer)
            );
        }
        if let Some((k, m)) = self.spec.geometry {
            text += &format!("[coding]\nk = {k}\nm = {m}\n\n");
        }
        text + &self.spec.extra
    }

    /// Starts a node's daemon.
    ///
    /// # Errors
    /// [`ClusterError`] if the process cannot be started.
    pub fn start(&mut self, node: usize) -> Result<(), ClusterError> {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.log(node));
        let log = log.map_err(io_error("opening a log"))?;
        let child = Command::new(&self.spec.executable)
            .args(["run", "--config"])
            .arg(self.config_path(node))
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
        for node in 0..self.spec.nodes {
            self.start(node)?;
        }
        (0..self.spec.nodes).try_for_each(|node| self.wait_for_peers(node, self.spec.nodes - 1))
    }

    /// Waits until a node sees so many peers.
    ///
    /// # Errors
    /// [`ClusterError::NotReady`] after 30 s.
    pub fn wait_for_peers(&self, node: usize, peers: usize) -> Result<(), ClusterError> {
        let limit = Duration::from_secs(30);
        let started = Instant::now();
        while started.elapsed() < limit {
            let status = Client::connect_anonymous(&self.socket(node))
                .and_then(|mut client| client.status());
            if status.is_ok_and(|text| text.matches(r#""up":true"#).count() >= peers) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let seconds = limit.as_secs();
        Err(ClusterError::NotReady {
            node: format!("n{node}"),
            seconds,
            log: self.log(node),
        })
    }

    /// Kills a node's daemon with SIGKILL: its RAM is gone.
    ///
    /// # Errors
    /// [`ClusterError`] if there is no such process.
    pub fn kill(&mut self, node: usize) -> Result<(), ClusterError> {
        if let Some(mut child) = self.children[node].take() {
            child.kill().map_err(io_error("killing a daemon"))?;
            child.wait().map_err(io_error("waiting for a daemon"))?;
        }
        Ok(())
    }

    /// Stops a node's daemon with SIGTERM, as a service manager does, and waits for its end.
    ///
    /// # Errors
    /// [`ClusterError`] if there is no such process.
    pub fn stop(&mut self, node: usize) -> Result<(), ClusterError> {
        if let Some(mut child) = self.children[node].take() {
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
            let sent = pid.and_then(|pid| Ok(kill_process(pid, Signal::TERM)?));
            sent.map_err(io_error("stopping a daemon"))?;
            child.wait().map_err(io_error("waiting for a daemon"))?;
        }
        Ok(())
    }

    /// Process number of a node's daemon, if it was started.
    pub fn pid(&self, node: usize) -> Option<u32> {
        self.children[node].as_ref().map(Child::id)
    }

    /// Where everything is.
    pub fn directory(&self) -> &Path {
        &self.spec.directory
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
