//! A holder (`storaged hold`) as a process, which has a node's memory when the node's pod is gone.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use storaged::cluster::NodeMemory;

use crate::system::{System, executable, memory_of, wait};

/// What files in memory of any daemon are called.
const MEMORY: &str = "memfd:storaged-";

/// A holder that runs. It is killed when it is dropped.
pub struct Holder {
    path: PathBuf,
    child: Child,
}

impl Holder {
    /// For the keeper of a node that is started from now on.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(system: &mut System, node: usize) -> Result<Self> {
        let path = system.root.path().join(format!("hold-{node}.sock"));
        system.cluster.set_memory(NodeMemory::OutlivesDaemon);
        system.cluster.set_holder(node, path.clone());
        let child = started(&path)?;
        Ok(Self { path, child })
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Kills it: what it had is gone with it.
    ///
    /// # Errors
    /// What the system says.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Sends it a signal. One that is stopped is killed all the same when this is dropped.
    ///
    /// # Errors
    /// What the system says.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let process = Pid::from_raw(self.child.id().try_into()?).context("a process")?;
        Ok(kill_process(process, signal)?)
    }

    /// Another one at the same path.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_again(&mut self) -> Result<()> {
        self.child = started(&self.path)?;
        Ok(())
    }

    /// How many descriptors of memory it has.
    ///
    /// # Errors
    /// If it does not run.
    pub fn held(&self) -> Result<usize> {
        Ok(memory_of(self.child.id(), MEMORY)?.len())
    }

    /// Waits until it has as much as a node's keeper.
    ///
    /// # Errors
    /// If it never has.
    pub fn wait_for_all(&self, system: &System, node: usize) -> Result<()> {
        let keeper = system.cluster.pid(node)?;
        wait("all of a keeper's memory at its holder", || {
            let (kept, held) = (memory_of(keeper, MEMORY)?.len(), self.held()?);
            ensure!(kept == held && kept > 0, "{held} of {kept}");
            Ok(())
        })
    }

    /// Waits until a node's daemon says this of it, in its status and by its metrics.
    ///
    /// # Errors
    /// If it never does.
    pub fn wait_for_report(&self, system: &System, node: usize, report: &str) -> Result<()> {
        let said = format!(r#""kept_by":"keeper","holder":"{report}","#);
        let metric = |name: &str| -> Result<u64> { Ok(system.cluster.metric(node, name)?) };
        wait("what is known of a holder", || {
            let status = system.cluster.status(node)?;
            ensure!(status.contains(&said), "{status}");
            let (has_all, lacks) = (
                metric("storaged_memory_at_holder")?,
                metric("storaged_memory_holder_lacks")?,
            );
            let is_shown =
                (has_all == 1) == (report == "has-all") && (lacks == 1) == (report == "lacks");
            ensure!(is_shown, "{report}: {has_all}, {lacks}");
            Ok(())
        })
    }

    /// What an operator says to let go of everything.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn release(&self) -> Result<Output> {
        let mut command = Command::new(executable());
        command.args(["hold", "--release", "--socket"]);
        command.arg(&self.path);
        command.output().context("storaged hold --release")
    }
}

fn started(path: &Path) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(path.with_extension("log"))?;
    Command::new(executable())
        .args(["hold", "--socket"])
        .arg(path)
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .context("starting a holder")
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
