//! Daemons in the namespaces of a network, as the scenarios want them. Their sockets are files, so the bench reaches them
//! from outside.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use storaged::cluster::{Cluster, ClusterSpec, Hosts, NodeListing, PAGE_WAIT};

use super::network::Network;

/// UDP port of every daemon.
const PORT: u16 = 9300;
/// TCP port of its operator's pages, within its namespace.
const OPS_PORT: u16 = 9301;

impl Hosts for &Network {
    fn address(&self, node: usize) -> SocketAddr {
        (Network::address(self, node), PORT).into()
    }

    fn ops_address(&self, _: usize) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, OPS_PORT).into()
    }

    fn command(&self, node: usize, program: &Path) -> Command {
        Network::command(self, node, program)
    }

    /// A socket stays in the namespace in which it was made.
    fn connect(&self, node: usize) -> io::Result<TcpStream> {
        let address = self.ops_address(node);
        let connect = || Ok(TcpStream::connect_timeout(&address, PAGE_WAIT)?);
        self.inside(node, connect).map_err(io::Error::other)
    }
}

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
    /// More settings: first of `[encode]`, then sections of their own.
    pub more: String,
}

impl DaemonsSpec {
    /// Starts one on every node of the network and waits until each sees all others.
    ///
    /// # Errors
    /// If one does not get ready; the error has the end of its log.
    pub fn start(self, network: &Network) -> Result<Cluster<&Network>> {
        self.start_at(network, network.spec().nodes)
    }

    /// The same on hosts of another kind.
    ///
    /// # Errors
    /// As `start`.
    pub fn start_at<H: Hosts>(self, hosts: H, nodes: usize) -> Result<Cluster<H>> {
        let spec = ClusterSpec {
            listing: NodeListing::InFiles,
            settings: self.settings(),
            executable: self.executable,
            directory: self.directory,
            nodes,
        };
        let mut cluster = Cluster::prepare(hosts, spec)?;
        cluster.start_all()?;
        Ok(cluster)
    }

    fn settings(&self) -> String {
        let Self {
            k,
            m,
            chunk,
            budget,
            more,
            ..
        } = self;
        let coding = format!("[coding]\nk = {k}\nm = {m}\nchunk = \"{chunk}B\"\n\n");
        // A node alone codes nothing.
        let coding = if *m == 0 { String::new() } else { coding };
        let memory = format!("[memory]\nbudget = \"{budget}B\"\n\n");
        // Measured rates would turn the chains that are to be timed into gathers from the second step on.
        let encode = "[encode]\nrates = \"configured\"\n";
        let told = |rate| format!("link_rate = \"{rate}B\"\n");
        coding + &memory + encode + &self.link_rate.map(told).unwrap_or_default() + more
    }
}
