//! A network of its own: one namespace per node and one for the switch, a bridge that joins them by veth pairs, each
//! link shaped in both directions. Everything goes when the network is dropped; what a killed bench left behind goes
//! when the next one starts.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::command::run;

/// How the names of our namespaces begin; the number of the process that made them follows, then that of the network.
const PREFIX: &str = "stbn";

/// Number of the next network of this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Nodes of one network, at most: addresses of one 10.77.0.0/24, and room on a small machine.
const NODES_MAX: usize = 64;

/// Queue of a shaped link, in time at its rate: what a switch with a buffer of a few hundred kilobytes holds.
const QUEUE_MS: u64 = 20;

/// What a shaped link lets through at once: one segmentation-offload packet.
const BURST_BYTES: u64 = 65_536;

/// The same where packets are to be dropped one by one: the largest frame, so that offloaded packets are cut up.
const BURST_SINGLE_BYTES: u64 = 10_240;

/// Where the kernel's table of devices has bytes.
const RECEIVED_COLUMN: usize = 0;
const SENT_COLUMN: usize = 8;

/// Bits per second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkRate(u64);

impl LinkRate {
    /// From megabits (1e6 bits) per second.
    pub const fn megabits(megabits: u64) -> Self {
        Self(megabits * 1_000_000)
    }

    /// A tenth of it.
    pub const fn tenth(self) -> Self {
        Self(self.0 / 10)
    }

    /// Bytes per second.
    pub fn bytes_per_second(self) -> f64 {
        self.0 as f64 / 8.0
    }

    /// Seconds that so many bytes take.
    pub fn seconds(self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_second()
    }
}

/// How packets leave a shaped link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Packets {
    /// Offloaded ones whole.
    Whole,
    /// One frame each.
    Single,
}

/// What a network is like.
#[derive(Clone, Copy, Debug)]
pub struct NetworkSpec {
    /// Nodes.
    pub nodes: usize,
    /// Rate of every link, each way; none for no limit.
    pub rate: Option<LinkRate>,
    /// Largest IP packet.
    pub mtu: u16,
    /// How packets leave.
    pub packets: Packets,
}

/// A network that exists.
#[derive(Debug)]
pub struct Network {
    spec: NetworkSpec,
    /// How the names of its namespaces begin: no other network's do.
    prefix: String,
}

impl Network {
    /// Makes it.
    ///
    /// # Errors
    /// If a step fails; what was made goes again.
    pub fn make(spec: NetworkSpec) -> Result<Self> {
        ensure!(
            (1..=NODES_MAX).contains(&spec.nodes),
            "expected 1 to {NODES_MAX} nodes, got {}",
            spec.nodes
        );
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let network = Self {
            spec,
            prefix: format!("{PREFIX}{}-{number}-", std::process::id()),
        };
        network.join().context("making a network")?;
        if let Some(rate) = spec.rate {
            for node in 0..spec.nodes {
                network.shape(node, rate)?;
            }
        }
        Ok(network)
    }

    fn join(&self) -> Result<()> {
        let (mtu, switch) = (self.spec.mtu, self.switch());
        let mut spaces = format!("netns add {switch}\n");
        let mut links =
            format!("link set lo up\nlink add br0 mtu {mtu} type bridge\nlink set br0 up\n");
        for node in 0..self.spec.nodes {
            let space = self.space(node);
            let _ = writeln!(spaces, "netns add {space}");
            let _ = writeln!(
                links,
                "link add p{node} mtu {mtu} type veth peer name eth0 address {} mtu {mtu} netns {space}\n\
                 link set p{node} master br0 up",
                hardware_address(node)
            );
        }
        run("ip", &["-batch", "-"], &spaces)?;
        run("ip", &["-n", &switch, "-batch", "-"], &links)?;
        for node in 0..self.spec.nodes {
            let mut steps = format!(
                "link set lo up\naddr add {}/24 dev eth0\nlink set eth0 up\n",
                self.address(node)
            );
            // The kernel's table of neighbours is one for all namespaces and holds 1024 that were learnt; 34 nodes
            // have 1122. Those that are told to it do not count.
            for peer in (0..self.spec.nodes).filter(|peer| *peer != node) {
                let (address, hardware) = (self.address(peer), hardware_address(peer));
                let _ = writeln!(
                    steps,
                    "neigh add {address} lladdr {hardware} nud permanent dev eth0"
                );
            }
            run("ip", &["-n", &self.space(node), "-batch", "-"], &steps)?;
        }
        Ok(())
    }

    /// Shapes a node's link, both ways.
    ///
    /// # Errors
    /// If `tc` refuses.
    pub fn shape(&self, node: usize, rate: LinkRate) -> Result<()> {
        let burst = match self.spec.packets {
            Packets::Whole => BURST_BYTES,
            Packets::Single => BURST_SINGLE_BYTES,
        };
        let limit = burst + rate.0 / 8 * QUEUE_MS / 1000;
        let step = |device: String| {
            format!(
                "qdisc replace dev {device} root tbf rate {}bit burst {burst} limit {limit}\n",
                rate.0
            )
        };
        let up = step("eth0".into());
        run("tc", &["-n", &self.space(node), "-batch", "-"], &up)?;
        let down = step(format!("p{node}"));
        run("tc", &["-n", &self.switch(), "-batch", "-"], &down)?;
        Ok(())
    }

    /// Drops so many of a hundred packets that arrive at every node, by chance.
    ///
    /// # Errors
    /// If `nft` refuses.
    pub fn lose(&self, percent: u8) -> Result<()> {
        let rules = format!(
            "table inet lossy {{ chain arriving {{ type filter hook input priority 0; \
             iifname \"eth0\" numgen random mod 100 < {percent} drop\n }}\n }}\n"
        );
        for node in 0..self.spec.nodes {
            run("nsenter", &[&self.enter(node), "nft", "-f", "-"], &rules)?;
        }
        Ok(())
    }

    /// Parts the network: nodes of `side` get nothing from the others any more, nor the others from them.
    ///
    /// # Errors
    /// If a side has no node, or `nft` refuses.
    pub fn part(&self, side: &[usize]) -> Result<()> {
        let inside = (0..self.spec.nodes).filter(|node| side.contains(node));
        ensure!(
            (1..self.spec.nodes).contains(&inside.count()),
            "expected nodes on both sides, got {side:?} of {}",
            self.spec.nodes
        );
        for node in 0..self.spec.nodes {
            let is_across = |other: &usize| side.contains(other) != side.contains(&node);
            let across: Vec<String> = (0..self.spec.nodes)
                .filter(is_across)
                .map(|other| self.address(other).to_string())
                .collect();
            // What arrives is dropped, and not what leaves: a sender is not told.
            let rules = format!(
                "table inet parted {{ chain arriving {{ type filter hook input priority 0; \
                 ip saddr {{ {} }} drop\n }}\n }}\n",
                across.join(", ")
            );
            run("nsenter", &[&self.enter(node), "nft", "-f", "-"], &rules)?;
        }
        Ok(())
    }

    /// Joins a parted network again.
    ///
    /// # Errors
    /// If `nft` refuses, also where the network is not parted.
    pub fn rejoin(&self) -> Result<()> {
        let rules = "delete table inet parted\n";
        for node in 0..self.spec.nodes {
            run("nsenter", &[&self.enter(node), "nft", "-f", "-"], rules)?;
        }
        Ok(())
    }

    /// A node's address.
    pub fn address(&self, node: usize) -> IpAddr {
        // At most 64 nodes.
        Ipv4Addr::new(10, 77, 0, node as u8 + 1).into()
    }

    /// A command that runs in a node's namespace and dies with this thread, whatever happens to it.
    pub fn command(&self, node: usize, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "nsenter"])
            .arg(self.enter(node))
            .arg(program);
        command
    }

    /// Bytes that a node has sent on its link since it was made.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn bytes_sent(&self, node: usize) -> Result<u64> {
        self.bytes(node, SENT_COLUMN)
    }

    /// Bytes that a node has received on its link since it was made.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn bytes_received(&self, node: usize) -> Result<u64> {
        self.bytes(node, RECEIVED_COLUMN)
    }

    fn bytes(&self, node: usize, column: usize) -> Result<u64> {
        let read = || Ok(fs::read_to_string("/proc/thread-self/net/dev")?);
        let text = self.inside(node, read)?;
        let mut lines = text.lines();
        let link = lines.find_map(|line| line.trim().strip_prefix("eth0:"));
        let count = link.and_then(|link| link.split_whitespace().nth(column)?.parse().ok());
        count.with_context(|| format!("expected counts of eth0, got {text}"))
    }

    /// Does some work on a thread that is in a node's namespace.
    ///
    /// # Errors
    /// If the namespace cannot be entered, or the work's own.
    pub fn inside<T: Send>(
        &self,
        node: usize,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        let space = fs::File::open(format!("/run/netns/{}", self.space(node)))?;
        let enter_and_work = move || {
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        };
        let done = thread::scope(|threads| threads.spawn(enter_and_work).join());
        done.ok().context("work inside a namespace broke")?
    }

    /// What it is like.
    pub fn spec(&self) -> &NetworkSpec {
        &self.spec
    }

    fn enter(&self, node: usize) -> String {
        format!("--net=/run/netns/{}", self.space(node))
    }

    fn space(&self, node: usize) -> String {
        format!("{}{node:02}", self.prefix)
    }

    fn switch(&self) -> String {
        format!("{}sw", self.prefix)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Err(error) = remove(&|name| name.starts_with(&self.prefix)) {
            eprintln!("removing the network failed: {error:#}");
        }
    }
}

/// Removes the namespaces of processes that are gone.
///
/// # Errors
/// If `ip` refuses.
pub fn remove_leftovers() -> Result<()> {
    let own = std::process::id();
    let is_gone = |owner: u32| owner != own && !Path::new(&format!("/proc/{owner}")).exists();
    remove(&|name| owner_of(name).is_some_and(is_gone))
}

/// Removes the namespaces that this process made.
///
/// # Errors
/// If `ip` refuses.
pub fn remove_own() -> Result<()> {
    remove(&|name| owner_of(name) == Some(std::process::id()))
}

/// Removes the namespaces whose names fit.
fn remove(which: &dyn Fn(&str) -> bool) -> Result<()> {
    let listed = run("ip", &["netns", "list"], "")?;
    let ours = listed
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| which(name));
    let mut steps = String::new();
    for name in ours {
        // Processes keep a namespace alive that has no name any more: they go first.
        for process in run("ip", &["netns", "pids", name], "")?.lines() {
            if let Some(process) = process
                .trim()
                .parse()
                .ok()
                .and_then(rustix::process::Pid::from_raw)
            {
                // It may have ended by itself.
                let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            }
        }
        let _ = writeln!(steps, "netns del {name}");
    }
    if !steps.is_empty() {
        run("ip", &["-batch", "-"], &steps)?;
    }
    Ok(())
}

/// A node's address on Ethernet: a locally administered one.
fn hardware_address(node: usize) -> String {
    format!("02:77:00:00:00:{node:02x}")
}

/// The process that made a namespace of this name, if it is one of ours.
fn owner_of(name: &str) -> Option<u32> {
    let (owner, _) = name.strip_prefix(PREFIX)?.split_once('-')?;
    owner.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{LinkRate, owner_of};

    #[test]
    fn only_our_namespaces_have_an_owner() {
        assert_eq!(owner_of("stbn123-07"), Some(123));
        assert_eq!(owner_of("stbn123-4-sw"), Some(123));
        for strange in ["stbn", "stbn12", "stbnx-1", "docker-1", "stb1-2"] {
            assert_eq!(owner_of(strange), None, "{strange}");
        }
    }

    #[test]
    fn rates_are_in_bits() {
        let rate = LinkRate::megabits(100);
        assert!((rate.seconds(25_000_000) - 2.0).abs() < 1e-9);
        assert!((rate.tenth().bytes_per_second() - 1.25e6).abs() < 1e-3);
    }
}
