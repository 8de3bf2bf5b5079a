//! A cluster of real daemons in a directory of its own, and the steps that tests are made of.

use std::fs::{File, Permissions};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use storaged::cluster::{Cluster, ClusterSpec, Hosts, Loopback, NodeListing, NodeMemory};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, Namespace, RunId};
use tempfile::TempDir;

use crate::clients::Clients;

/// Ports that this test process has given away.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);

/// Blocks of ports. The kernel gives none of them to whoever connects (those are 32768 and up): a server that is started again could not
/// listen there then.
const BLOCKS: u16 = 170;
const PORTS_IN_BLOCK: u16 = 128;

/// The block of this test process, which it has for as long as it holds the lock. By their numbers alone two processes would come to the same
/// ports now and then.
static BLOCK: LazyLock<(u16, Option<File>)> = LazyLock::new(|| {
    let first = (std::process::id() % u32::from(BLOCKS)) as u16;
    let mut blocks = (0..BLOCKS).map(|it| (first + it) % BLOCKS);
    let locked = blocks.find_map(|block| Some((block, Some(lock_of(block)?))));
    locked.unwrap_or((first, None))
});

fn lock_of(block: u16) -> Option<File> {
    let path = std::env::temp_dir().join(format!("storaged-test-ports-{block}"));
    let file = File::create(path).ok()?;
    file.try_lock().is_ok().then_some(file)
}

/// The first of two ports on which nobody listens.
pub fn free_ports() -> u16 {
    // The first of a process may still be in use when all tests after it have had theirs.
    let next = NEXT_PORT.fetch_add(2, Ordering::Relaxed) % PORTS_IN_BLOCK;
    10_000 + BLOCK.0 * PORTS_IN_BLOCK + next
}

/// The `storaged` executable that was built with these tests.
pub fn executable() -> PathBuf {
    let mut path = std::env::current_exe().expect("a test has an executable");
    path.pop();
    if path.ends_with("deps") {
        path.pop();
    }
    path.join("storaged")
}

/// Longer than any wait of a test, also on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks again and again until what is looked for is there.
///
/// # Errors
/// What the last look said, if it is not there for very long.
pub fn wait<T>(what: &str, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(error) if began.elapsed() > PATIENCE => {
                return Err(error.context(format!("waited for {what}")));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Memory that a process holds and that was made under this name, as files of the kernel's.
///
/// # Errors
/// If there is no such process.
pub fn memory_of(process: u32, name: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        let path = entry?.path();
        let target = std::fs::read_link(&path).unwrap_or_default();
        if target.to_string_lossy().contains(name) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Lets another process write a file that is to be executed. Were it written here, a child that another test starts at that moment would
/// have it open for writing too until it has become another program, and until then it cannot be executed: "Text file busy".
///
/// # Errors
/// If the other process fails.
pub fn write_program(command: &mut Command) -> Result<()> {
    let ended = command.status()?;
    ensure!(ended.success(), "{command:?}: {ended}");
    Ok(())
}

/// Writes a file that its owner alone can read, as the daemon wants those with keys and passwords.
///
/// # Errors
/// If it cannot be written.
pub fn write_secret(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text)?;
    Ok(std::fs::set_permissions(
        path,
        Permissions::from_mode(0o600),
    )?)
}

/// A running cluster, and its clients.
pub struct System {
    pub cluster: Cluster,
    pub root: TempDir,
    clients: Clients,
}

impl Deref for System {
    type Target = Clients;

    fn deref(&self) -> &Clients {
        &self.clients
    }
}

impl DerefMut for System {
    fn deref_mut(&mut self) -> &mut Clients {
        &mut self.clients
    }
}

impl System {
    /// Starts `nodes` daemons.
    pub fn start(nodes: usize, geometry: Option<(usize, usize)>, extra: &str) -> Result<Self> {
        let mut system = Self::prepared(nodes, geometry, extra)?;
        system.cluster.start_all()?;
        Ok(system)
    }

    /// The same with memory that outlives their daemons.
    pub fn start_kept(nodes: usize, geometry: Option<(usize, usize)>, extra: &str) -> Result<Self> {
        let mut system = Self::prepared(nodes, geometry, extra)?;
        system.cluster.set_memory(NodeMemory::OutlivesDaemon);
        system.cluster.start_all()?;
        Ok(system)
    }

    /// Writes the files of `nodes` daemons for a cluster of so many places, which are agreed on in a directory. None of them runs yet.
    pub fn with_registry(
        nodes: usize,
        places: usize,
        geometry: Option<(usize, usize)>,
        extra: &str,
    ) -> Result<Self> {
        let registry = "{ kind = \"directory\", path = \"ROOT/registry\" }";
        let system = Self::with_registry_in(registry, nodes, places, geometry, extra)?;
        std::fs::create_dir(system.root.path().join("registry"))?;
        Ok(system)
    }

    /// The same with another registry, as `membership.registry` names it.
    pub fn with_registry_in(
        registry: &str,
        nodes: usize,
        places: usize,
        geometry: Option<(usize, usize)>,
        extra: &str,
    ) -> Result<Self> {
        let membership =
            format!("[membership]\nregistry = {registry}\nsize = {places}\npoll = \"1s\"\n{extra}");
        Self::prepare(nodes, geometry, &membership, NodeListing::InRegistry)
    }

    /// Runs the command line against a node's socket.
    pub fn storaged(&self, node: usize, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(executable());
        command.args(arguments);
        command.env("STORAGED_SOCKET", self.cluster.socket(node));
        command.env("STORAGED_TOKEN", "a-secret-of-tests");
        command.output().context("running storaged")
    }

    /// A node's page of whether it is ready has these words.
    ///
    /// # Errors
    /// If it has not, or there is no page.
    pub fn readyz_says(&self, node: usize, what: &str) -> Result<()> {
        let page = self.cluster.page(node, "/readyz")?;
        ensure!(page.body.contains(what), "{}", page.body);
        Ok(())
    }

    /// The newest step bears so many losses, as a node says.
    ///
    /// # Errors
    /// If it does not, or the node does not answer.
    pub fn bears(&self, node: usize, losses: usize) -> Result<()> {
        let status = self.cluster.status(node)?;
        ensure!(status.contains(&format!(r#""bears":{losses}"#)), "{status}");
        Ok(())
    }

    /// Sends a signal to the daemon below a node's keeper; its process.
    pub fn tell_daemon(&self, node: usize, signal: Signal) -> Result<u32> {
        let daemon = self.cluster.daemon_below(node).context("a daemon")?;
        let process = Pid::from_raw(daemon.try_into()?).context("a process")?;
        kill_process(process, signal)?;
        Ok(daemon)
    }

    /// Waits until another daemon than this one answers; how long that took.
    pub fn back_after(&self, node: usize, before: u32) -> Result<Duration> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let daemon = self.cluster.daemon_below(node);
            if daemon.is_some_and(|it| it != before) && self.cluster.status(node).is_ok() {
                return Ok(began.elapsed());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        anyhow::bail!("n{node} is not back: {}", self.cluster.log_end(node, 20))
    }

    /// Writes the files of `nodes` daemons. None of them runs yet.
    pub fn prepared(nodes: usize, geometry: Option<(usize, usize)>, extra: &str) -> Result<Self> {
        Self::prepare(nodes, geometry, extra, NodeListing::InFiles)
    }

    /// Lists all nodes in one section of every file, in these failure domains (a host list), where each had the others.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn list_together(&self, domains: &str) -> Result<()> {
        let nodes = self.cluster.nodes();
        let address = |node| self.cluster.hosts().address(node).to_string();
        let addresses = (0..nodes).map(address).collect::<Vec<_>>().join(",");
        let section = format!(
            "[[peers]]\nname = \"n[0-{}]\"\naddress = \"{addresses}\"\nfailure_domain = \"{domains}\"\n\n",
            nodes - 1
        );
        for node in 0..nodes {
            let path = self.cluster.config_path(node);
            let text = std::fs::read_to_string(&path)?;
            let (before, _) = text.split_once("[[peers]]").context("it lists its peers")?;
            let (_, after) = text.split_once("[coding]").context("it codes")?;
            std::fs::write(path, format!("{before}{section}[coding]{after}"))?;
        }
        Ok(())
    }

    fn prepare(
        nodes: usize,
        geometry: Option<(usize, usize)>,
        extra: &str,
        listing: NodeListing,
    ) -> Result<Self> {
        let root = tempfile::tempdir()?;
        std::fs::create_dir(root.path().join("tier"))?;
        let coding = geometry.map_or_else(String::new, |(k, m)| {
            format!("[coding]\nk = {k}\nm = {m}\n\n")
        });
        let extra = extra.replace("ROOT", &root.path().display().to_string());
        let port = free_ports();
        let spec = ClusterSpec {
            executable: executable(),
            directory: root.path().into(),
            nodes,
            settings: coding + &extra,
            listing,
        };
        let cluster = Cluster::prepare(Loopback { port }, spec)?;
        let clients = Clients {
            sockets: (0..nodes).map(|node| cluster.socket(node)).collect(),
            namespace: Namespace::new("job")?,
            token: b"a-secret-of-tests".to_vec(),
        };
        Ok(Self {
            cluster,
            root,
            clients,
        })
    }
}

/// All sets of one to `most` of so many nodes.
pub fn losses(nodes: usize, most: usize) -> Vec<Vec<usize>> {
    let few = (1_u32..1 << nodes).filter(|set| set.count_ones() as usize <= most);
    let members = |set: u32| (0..nodes).filter(move |node| set >> node & 1 == 1);
    few.map(|set| members(set).collect()).collect()
}

/// What a command said, on both streams.
pub fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// Two ranks save a step, and three nodes know that it is protected.
pub fn save_protected(
    system: &System,
    run: RunId,
    trainers: &mut [Trainer],
    step: u64,
) -> Result<()> {
    system.save(trainers, step, &shards(2, step), DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, step, CheckpointState::Protected))
}

/// Shards of different, odd lengths with content that depends on the step.
pub fn shards(world: u32, step: u64) -> Vec<Vec<u8>> {
    shards_from(700_000, world, step)
}

/// The same, the shortest with so many bytes.
pub fn shards_from(bytes: usize, world: u32, step: u64) -> Vec<Vec<u8>> {
    (0..world)
        .map(|rank| {
            let length = bytes + rank as usize * 100_003;
            let mut state = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(rank) + 1);
            (0..length)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state as u8
                })
                .collect()
        })
        .collect()
}
