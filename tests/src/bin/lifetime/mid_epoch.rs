//! Losses while a cluster is between two epochs and saves: every other node has heard of the new epoch, in which another node codes for
//! the ranks, and the others have not; a step is committed, by turns with the node of the first rank in the old epoch or in the new one, and up to m nodes are lost before it is
//! protected.
//!
//! Each node reaches the registry, a directory, by a link of its own. The link of a node that is not to hear of an epoch points to a copy that was made
//! before: it sees what it would have seen had it looked a moment ago. There is one node more than k + m, so that another one can code.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RefusalCode, RunId, Step};
use storaged_sdk::{ClientError, Trainer};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, executable, losses, said, shards_from};

use crate::Figures;
use crate::losses::{Count, GEOMETRIES, Nodes, SHARD, TRIES};
use crate::nodes::{ENDED, are_in_session, tell, until};

/// A session begins within this time, if it can: where nodes wait for an epoch that a step is of, it need not.
const BEGINS: Duration = Duration::from_millis(300);

/// A cluster that is led from epoch to epoch while it saves.
struct Changing {
    nodes: Nodes,
    system: System,
    run: RunId,
    trainers: Vec<Trainer>,
    /// The node that codes nothing new.
    cordoned: Option<String>,
    /// The newest epoch that was proposed here.
    epoch: u64,
    /// The newest step that was protected or offered, and the newest that was saved.
    safe: u64,
    step: u64,
    turn: usize,
    /// Steps that were protected before their nodes were stopped.
    missed: u32,
    /// Losses at which the nodes that are left were in a session.
    in_session: u32,
}

impl Changing {
    fn start(nodes: Nodes) -> Result<Self> {
        let count = nodes.all() + 1;
        let coding = Some((nodes.k, nodes.m));
        // Nobody loses its place while it is lost: the epochs are those that are made here.
        let mut system = System::with_registry(count, count, coding, "replace_after = \"0s\"\n")?;
        for node in 0..count {
            let path = system.cluster.config_path(node);
            let text = std::fs::read_to_string(&path)?;
            let own = format!("/{}\"", link_of(&system, node));
            ensure!(text.contains("/registry\""), "{text}");
            std::fs::write(path, text.replace("/registry\"", &own))?;
            point(&system, node, &system.root.path().join("registry"))?;
        }
        system.cluster.start_all()?;
        let (run, trainers) = system.trainers(nodes.world())?;
        let mut changing = Self {
            nodes,
            system,
            run,
            trainers,
            cordoned: None,
            epoch: 0,
            safe: 0,
            step: 0,
            turn: 0,
            missed: 0,
            in_session: 0,
        };
        changing.epoch = changing.epoch_of(0)?;
        changing.save()?;
        Ok(changing)
    }

    fn all(&self) -> std::ops::Range<usize> {
        0..self.nodes.all() + 1
    }

    fn shards(&self, step: u64) -> Vec<Vec<u8>> {
        shards_from(SHARD, self.nodes.world(), step)
    }

    fn status(&self, node: usize) -> Result<Value> {
        Ok(serde_json::from_str(&self.system.cluster.status(node)?)?)
    }

    fn epoch_of(&self, node: usize) -> Result<u64> {
        let status = self.status(node)?;
        status["epoch"].as_u64().context("an epoch")
    }

    /// Commits another step.
    fn begin_step(&mut self) -> Result<()> {
        self.step += 1;
        let shards = self.shards(self.step);
        let never = DurableWish::Never;
        self.system
            .save(&mut self.trainers, self.step, &shards, never)
    }

    /// All nodes with ranks know that the newest step is protected.
    fn is_protected(&mut self) -> Result<()> {
        let (run, step) = (self.run, self.step);
        for node in 0..self.nodes.k {
            let state = CheckpointState::Protected;
            self.system.wait(node, run, step, state)?;
        }
        self.safe = step;
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        self.begin_step()?;
        self.is_protected()
    }

    /// Changes the roster as an operator does, on a node; the epoch.
    fn change(&self, on: usize, verb: &str, node: &str) -> Result<u64> {
        let told = Command::new(executable())
            .args(["node", verb, node, "--config"])
            .arg(self.system.cluster.config_path(on))
            .output()?;
        ensure!(told.status.success(), "{told:?}");
        let said = said(&told);
        let number = said
            .strip_prefix("epoch ")
            .and_then(|it| it.split_once(':'));
        let (number, _) = number.with_context(|| said.clone())?;
        Ok(number.parse()?)
    }

    /// A node that codes what the first rank saves.
    fn coder(&self) -> Result<String> {
        let status = self.status(0)?;
        let first = Value::from(self.system.cluster.name(0).to_string());
        let groups = status["groups"].as_array().context("groups")?;
        let with_first = |group: &&Value| {
            let data = group["data"].as_array();
            data.is_some_and(|data| data.contains(&first))
        };
        let group = groups.iter().find(with_first);
        let coder = group.and_then(|group| group["coding"][0].as_str());
        Ok(coder.with_context(|| status.to_string())?.to_owned())
    }

    /// Every other node takes a new epoch, in which another node codes; the others do not hear of it.
    fn split(&mut self) -> Result<()> {
        self.turn += 1;
        let root = self.system.root.path();
        let before = root.join(format!("registry-before-{}", self.turn));
        let copied = Command::new("cp")
            .arg("-a")
            .args([&root.join("registry"), &before])
            .status()?;
        ensure!(copied.success(), "copying the registry: {copied}");
        let parity = self.turn % 2;
        let (held, hearing): (Vec<usize>, Vec<usize>) =
            self.all().partition(|node| node % 2 == parity);
        for node in &held {
            point(&self.system, *node, &before)?;
        }
        let coder = self.coder()?;
        if let Some(node) = self.cordoned.take() {
            self.change(hearing[0], "uncordon", &node)?;
        }
        self.epoch = self.change(hearing[0], "cordon", &coder)?;
        self.cordoned = Some(coder);
        self.are_in_epoch(&hearing)?;
        for node in held {
            let epoch = self.epoch_of(node)?;
            ensure!(epoch < self.epoch, "n{node} has heard of epoch {epoch}");
        }
        Ok(())
    }

    fn are_in_epoch(&self, nodes: &[usize]) -> Result<()> {
        until("the new epoch", || {
            for node in nodes {
                let epoch = self.epoch_of(*node)?;
                ensure!(epoch == self.epoch, "n{node} is in epoch {epoch}");
            }
            Ok(())
        })?;
        Ok(())
    }

    /// These differ of who codes for whom.
    fn are_split(&self, nodes: &[usize]) -> Result<()> {
        let groups = nodes
            .iter()
            .map(|node| Ok(self.status(*node)?["groups"].to_string()));
        let groups = groups.collect::<Result<BTreeSet<_>>>()?;
        ensure!(groups.len() == 2, "the groups are {groups:?}");
        Ok(())
    }

    /// Whether the newest step is protected as one of these nodes says.
    fn is_over(&self, nodes: &[usize]) -> Result<bool> {
        for node in nodes {
            let status = self.status(*node)?;
            let mut all = status["checkpoints"].as_array().into_iter().flatten();
            let newest = all.find(|it| it["step"] == self.step);
            let state = newest.and_then(|it| it["state"].as_str());
            if matches!(state, Some("protected" | "durable")) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Stops nodes in the middle of a save.
    fn stop_in_save(&mut self, lost: &[usize], left: &[usize]) -> Result<()> {
        for _ in 0..TRIES {
            self.begin_step()?;
            let began = Instant::now();
            while !are_in_session(&self.system, left) && began.elapsed() < BEGINS {
                std::thread::sleep(Duration::from_millis(1));
            }
            tell(&self.system, lost, Signal::STOP)?;
            std::thread::sleep(ENDED);
            let in_session = are_in_session(&self.system, left);
            if !self.is_over(left)? {
                self.in_session += u32::from(in_session);
                return Ok(());
            }
            self.missed += 1;
            tell(&self.system, lost, Signal::CONT)?;
            self.is_protected()?;
        }
        bail!("no save was met in {TRIES} tries")
    }

    /// What the nodes that are left offer is no older than what was safe, and it is right.
    fn restores_on(&mut self, left: &[usize]) -> Result<()> {
        let plan = self.system.reader(left[0])?.plan(None, WAIT_MS)?;
        let newest = plan.step.get();
        ensure!(
            (self.safe..=self.step).contains(&newest),
            "step {newest} is offered, {} was protected",
            self.safe
        );
        self.safe = newest;
        let expected = self.shards(newest);
        self.system.restore(left, newest, &expected).map(drop)
    }

    /// Whoever waits for a step on a node that has a rank of it hears that it is protected, or why it will not be.
    fn has_ended(&self, node: usize, step: u64) -> Result<()> {
        let (step, state) = (Step::new(step), CheckpointState::Protected);
        let mut reader = self.system.reader(node)?;
        match reader.wait(self.run, step, state, WAIT_MS) {
            Ok(_) => Ok(()),
            Err(ClientError::Refused(refusal)) if refusal.code != RefusalCode::TimedOut => Ok(()),
            Err(error) => Err(error).with_context(|| format!("waiting for the end of step {step}")),
        }
    }

    /// The first node that is left has a rank: no more than m are lost.
    fn lose(&mut self, lost: &[usize]) -> Result<()> {
        let left: Vec<usize> = self.all().filter(|node| !lost.contains(node)).collect();
        self.split()?;
        self.stop_in_save(lost, &left)?;
        self.are_split(&left)?;
        for node in lost {
            self.system.cluster.kill(*node)?;
        }
        let under_way = self.step;
        self.restores_on(&left).context("while it is split")?;
        let registry = self.system.root.path().join("registry");
        for node in self.all() {
            point(&self.system, node, &registry)?;
        }
        for node in lost {
            self.system.cluster.start(*node)?;
        }
        self.system.cluster.wait_for_links()?;
        let all: Vec<usize> = self.all().collect();
        self.are_in_epoch(&all)?;
        self.save().context("the next save")?;
        self.has_ended(left[0], under_way)
    }
}

/// The name of a node's own link to the registry.
fn link_of(system: &System, node: usize) -> String {
    format!("registry-of-{}", system.cluster.name(node))
}

/// Lets a node's link to the registry point there, in one moment.
fn point(system: &System, node: usize, there: &Path) -> Result<()> {
    let link: PathBuf = system.root.path().join(link_of(system, node));
    let made = link.with_extension("new");
    symlink(there, &made)?;
    Ok(std::fs::rename(made, link)?)
}

/// All losses of one to m nodes of the group and the one beside it.
pub fn measure(figures: &mut Figures) -> Result<()> {
    let (mut all, mut missed, mut in_session) = (Count::default(), 0, 0);
    for nodes in GEOMETRIES {
        let mut changing = Changing::start(nodes)?;
        for lost in losses(nodes.all() + 1, nodes.m) {
            let outcome = changing.lose(&lost);
            missed += std::mem::take(&mut changing.missed);
            in_session += std::mem::take(&mut changing.in_session);
            // What one loss has broken must not be counted for all that come after it.
            if outcome.is_err() {
                changing = Changing::start(nodes)?;
            }
            all.note(&format!("{nodes:?} mid-epoch without {lost:?}"), outcome);
        }
        println!(
            "{nodes:?} between two epochs: {all:?} so far, {missed} moments were missed, {in_session} in a session"
        );
        figures.insert("loss_subsets_mid_epoch", f64::from(all.tried));
        figures.insert("loss_subsets_mid_epoch_failed", f64::from(all.failed));
        figures.insert("loss_moments_missed_mid_epoch", f64::from(missed));
        figures.insert("loss_subsets_mid_epoch_in_session", f64::from(in_session));
    }
    Ok(())
}
