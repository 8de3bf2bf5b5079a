//! Three nodes with two tenants: red, whose job is honest, and blue, whose programs are not. Against some attacks there is a fourth node, which
//! is not either.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged::cluster::Hosts;
use storaged_sdk::wire::Namespace;
use storaged_sdk::{Client, WithTrainers};
use storaged_tests::clients::Clients;
use storaged_tests::hostile::{NOBODY, as_nobody, open_to_all};
use storaged_tests::peer::HostilePeer;
use storaged_tests::system::System;

use crate::honest::{DURABLE_EVERY, Honest};
use crate::watch::{Watch, Watched, own_memory};

/// (2, 1): the honest job's two ranks and their parity.
const NODES: usize = 3;
/// The node that is not honest, where there is one: with a certificate like all others, and no daemon.
const LIAR: usize = NODES;
/// RAM for checkpoints on each node, and what red is sure of.
pub const BUDGET: u64 = 512 << 20;
const GUARANTEED: u64 = 64 << 20;
/// Longer than anything takes that comes about at all.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Who attacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enemy {
    /// Users of the nodes.
    User,
    /// A node of the cluster.
    Node,
}

/// A cluster whose first node is attacked.
pub struct Scene {
    pub enemy: Enemy,
    // Dropped first: they ask daemons that the system ends.
    pub honest: Honest,
    pub watch: Watch,
    /// Blue's sockets, by node.
    pub blue: Vec<PathBuf>,
    pub system: System,
    /// The node that is not honest.
    pub peer: Option<HostilePeer>,
    processes: Vec<u32>,
}

fn settings() -> String {
    format!(
        "[memory]\nbudget = \"{BUDGET}B\"\n[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = {DURABLE_EVERY}\nkeep_last = 3\n"
    )
}

/// Both as they are shipped, without tokens. Red's socket may be used by another user too, so that its file's mode does not keep strangers out
/// before the daemon does.
fn tenants(red: &Path, blue: &Path) -> String {
    format!(
        "[[tenants]]\nname = \"red\"\ndirectory = \"{}\"\nuids = [0, 4242]\nmemory_guaranteed = \"{GUARANTEED}B\"\n\n[[tenants]]\nname = \"blue\"\ndirectory = \"{}\"\nuids = [{NOBODY}]\n",
        red.display(),
        blue.display()
    )
}

impl Scene {
    pub fn start(enemy: Enemy) -> Result<Self> {
        let nodes = match enemy {
            Enemy::User => NODES,
            Enemy::Node => LIAR + 1,
        };
        let mut system = System::prepared(nodes, Some((2, 1)), &settings())?;
        let mut blue = Vec::new();
        for node in 0..NODES {
            let red = system.cluster.socket(node);
            let red = red.parent().context("a directory")?;
            let own = system.root.path().join(format!("blue{node}"));
            system.cluster.configure(node, &tenants(red, &own))?;
            blue.push(own.join("storaged.sock"));
        }
        (0..NODES).try_for_each(|node| system.cluster.start(node))?;
        let peer = match enemy {
            Enemy::User => None,
            Enemy::Node => {
                let honest: Vec<usize> = (0..NODES).collect();
                Some(HostilePeer::start(&system, LIAR, &honest)?)
            }
        };
        (0..NODES).try_for_each(|node| system.cluster.wait_for_peers(node, nodes - 1))?;
        system.token = Vec::new();
        open_to_all(&system)?;
        let processes = (0..NODES).map(|node| system.cluster.pid(node));
        let processes = processes.collect::<Result<Vec<u32>, _>>()?;
        let watched = processes.iter().enumerate().map(|(node, process)| {
            let admin = system.cluster.socket(node).with_file_name("admin.sock");
            let process = *process;
            Watched { process, admin }
        });
        let watched = watched.collect();
        let scene = Self {
            enemy,
            honest: Honest::start((*system).clone()),
            watch: Watch::start(watched),
            blue,
            system,
            peer,
            processes,
        };
        // A first save and a first restore take what the daemons then keep.
        scene.endure(DURABLE_EVERY)?;
        Ok(scene)
    }

    /// The nodes that have a daemon.
    pub fn running(&self) -> std::ops::Range<usize> {
        0..NODES
    }

    /// Red's socket on the node that is attacked.
    pub fn red(&self) -> &Path {
        &self.system.sockets[0]
    }

    /// Where the operator's HTTP is.
    pub fn http(&self) -> std::net::SocketAddr {
        self.system.cluster.hosts().ops_address(0)
    }

    /// The durable directory.
    pub fn tier(&self) -> PathBuf {
        self.system.root.path().join("tier")
    }

    /// A job of blue's, without a token.
    pub fn job(&self, name: &str) -> Result<Clients> {
        Ok(Clients {
            sockets: self.blue.clone(),
            namespace: Namespace::new(name)?,
            token: Vec::new(),
        })
    }

    /// What blue's jobs have left in RAM goes: the next attack has room for its own.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn clean(&self) -> Result<()> {
        as_nobody(|| {
            let left = Client::connect_anonymous(&self.blue[0])?.list(None)?;
            let names: BTreeSet<Namespace> = left.into_iter().map(|it| it.namespace).collect();
            for name in names {
                let own = name.as_str().trim_start_matches("blue~").to_owned();
                let mut reader = self.job(&own)?.reader(0)?;
                reader.drop_job(WithTrainers::Too, 20_000)?;
            }
            Ok(())
        })
    }

    /// Daemons that have ended since the start.
    pub fn aborted(&self) -> usize {
        let gone = |process: &&u32| own_memory(**process).is_err();
        self.processes.iter().filter(gone).count()
    }

    /// Each daemon's own memory.
    pub fn memory(&self) -> Vec<u64> {
        let all = self.processes.iter();
        all.map(|it| own_memory(*it).unwrap_or_default()).collect()
    }

    /// Descriptors of the daemon that is attacked.
    ///
    /// # Errors
    /// If it is gone.
    pub fn descriptors(&self) -> Result<usize> {
        let folder = format!("/proc/{}/fd", self.processes[0]);
        Ok(std::fs::read_dir(folder)?.count())
    }

    /// Goes on until the honest job has saved and restored so often; its faults are counted elsewhere.
    ///
    /// # Errors
    /// If it stands still for very long, or a daemon has ended.
    pub fn endure(&self, rounds: u64) -> Result<()> {
        self.endure_beside(rounds, || Ok(()))
    }

    /// The same while something is done again and again.
    ///
    /// # Errors
    /// If that fails, too.
    pub fn endure_beside(&self, rounds: u64, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        let (began, before) = (Instant::now(), self.honest.count());
        while self.honest.count().restored < before.restored + rounds {
            ensure!(self.aborted() == 0, "a daemon has ended");
            let count = self.honest.count().since(&before);
            ensure!(
                began.elapsed() < PATIENCE,
                "the honest job stood still: {} saves, {} restores, {:?}",
                count.tried,
                count.restored,
                count.faults
            );
            work()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Looks until it is so.
    ///
    /// # Errors
    /// What the last look said, if it is not so for very long.
    pub fn until<T>(&self, what: &str, mut look: impl FnMut() -> Result<T>) -> Result<T> {
        let began = Instant::now();
        loop {
            match look() {
                Ok(found) => return Ok(found),
                Err(error) if began.elapsed() > PATIENCE || self.aborted() > 0 => {
                    return Err(error.context(format!("waited for {what}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}
