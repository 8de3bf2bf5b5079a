//! Where the daemons of a cluster run.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A page of a daemon comes within this time.
pub const PAGE_WAIT: Duration = Duration::from_secs(10);

/// Places for daemons, one for each node.
pub trait Hosts {
    /// The UDP address of a node's daemon.
    fn address(&self, node: usize) -> SocketAddr;

    /// Where it serves metrics and status to its operator.
    fn ops_address(&self, node: usize) -> SocketAddr;

    /// A command that runs where the node is.
    fn command(&self, node: usize, program: &Path) -> Command;

    /// Connects to the operator's address of a node.
    ///
    /// # Errors
    /// If nobody answers there.
    fn connect(&self, node: usize) -> io::Result<TcpStream> {
        TcpStream::connect_timeout(&self.ops_address(node), PAGE_WAIT)
    }
}

/// This machine: each node has its own address 127.0.0.N, all the same ports.
#[derive(Debug, Clone, Copy)]
pub struct Loopback {
    /// UDP port of the daemons; the operator's HTTP has the next one.
    pub port: u16,
}

impl Loopback {
    fn at(node: usize, port: u16) -> SocketAddr {
        let last = u8::try_from(node + 1).expect("fewer than 255 nodes");
        (Ipv4Addr::new(127, 0, 0, last), port).into()
    }
}

impl Hosts for Loopback {
    fn address(&self, node: usize) -> SocketAddr {
        Self::at(node, self.port)
    }

    fn ops_address(&self, node: usize) -> SocketAddr {
        Self::at(node, self.port + 1)
    }

    fn command(&self, _: usize, program: &Path) -> Command {
        Command::new(program)
    }
}
