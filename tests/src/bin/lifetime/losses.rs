//! Every loss of up to m nodes of one group, each with real processes: all shards come back right, on the nodes that are left. The nodes are lost
//! while nothing happens, in the middle of a coding, in the middle of the repair of one of them, and while another machine takes the place
//! of one of them. That a session was under way when they were lost is seen: they are stopped first, so that it cannot end, and the others still
//! take part in it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, losses, shards, shards_from};

use crate::Figures;
use crate::nodes::{ENDED, are_in_session, save, tell, until};

/// Bytes of a shard: coding it takes so long that it can be met.
pub const SHARD: usize = 6 << 20;
/// A session is begun within this time, or it was over before anybody looked.
const BEGUN: Duration = Duration::from_secs(10);
/// A moment that is missed is tried again so often.
pub const TRIES: u32 = 40;

/// Data and coding nodes of a cluster of one group.
#[derive(Debug, Clone, Copy)]
pub struct Nodes {
    pub k: usize,
    pub m: usize,
}

pub const GEOMETRIES: [Nodes; 3] = [
    Nodes { k: 4, m: 2 },
    Nodes { k: 6, m: 2 },
    Nodes { k: 8, m: 3 },
];

impl Nodes {
    pub fn all(self) -> usize {
        self.k + self.m
    }

    /// Each data node has a rank.
    pub fn world(self) -> u32 {
        u32::try_from(self.k).expect("few nodes")
    }

    /// All sets of one to m of them.
    fn losses(self) -> Vec<Vec<usize>> {
        losses(self.all(), self.m)
    }

    fn but(self, lost: &[usize]) -> Vec<usize> {
        let left = (0..self.all()).filter(|node| !lost.contains(node));
        left.collect()
    }
}

/// What goes on when nodes are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Idle,
    Encoding,
    Repairing,
}

/// A cluster whose newest step bears m losses.
struct Group {
    nodes: Nodes,
    system: System,
    trainers: Vec<Trainer>,
    /// The newest step that was protected, and the newest that was saved.
    safe: u64,
    step: u64,
    /// Sessions that were over before their nodes were stopped.
    missed: u32,
}

impl Group {
    fn start(nodes: Nodes) -> Result<Self> {
        let system = System::start(nodes.all(), Some((nodes.k, nodes.m)), "")?;
        let (run, mut trainers) = system.trainers(nodes.world())?;
        save(&system, run, &mut trainers, 7, 0..nodes.all())?;
        until("protection", || system.bears(0, nodes.m))?;
        Ok(Self {
            nodes,
            system,
            trainers,
            safe: 7,
            step: 7,
            missed: 0,
        })
    }

    fn shards(&self, step: u64) -> Vec<Vec<u8>> {
        let bytes = if step == 7 { 700_000 } else { SHARD };
        shards_from(bytes, self.nodes.world(), step)
    }

    fn kill(&mut self, nodes: &[usize]) -> Result<()> {
        nodes
            .iter()
            .try_for_each(|node| Ok(self.system.cluster.kill(*node)?))
    }

    /// Nodes without memory come where the lost ones were.
    fn start_again(&mut self, nodes: &[usize]) -> Result<()> {
        let mut nodes = nodes.iter();
        nodes.try_for_each(|node| self.system.cluster.start(*node))?;
        Ok(self.system.cluster.wait_for_links()?)
    }

    /// Stops nodes once the others take part in a session, which cannot end then. Whether one was met.
    fn stop_in_session(&mut self, lost: &[usize]) -> Result<bool> {
        let left = self.nodes.but(lost);
        let began = Instant::now();
        while !are_in_session(&self.system, &left) && began.elapsed() < BEGUN {
            std::thread::sleep(Duration::from_millis(1));
        }
        tell(&self.system, lost, Signal::STOP)?;
        std::thread::sleep(ENDED);
        let is_met = are_in_session(&self.system, &left);
        if !is_met {
            self.missed += 1;
            tell(&self.system, lost, Signal::CONT)?;
        }
        Ok(is_met)
    }

    fn is_protected(&mut self) -> Result<()> {
        self.system.cluster.wait_for_links()?;
        for node in 0..self.nodes.all() {
            until("protection", || self.system.bears(node, self.nodes.m))?;
        }
        Ok(())
    }

    /// Commits another step; its coding begins.
    fn begin_step(&mut self) -> Result<()> {
        self.step += 1;
        let shards = self.shards(self.step);
        let never = DurableWish::Never;
        self.system
            .save(&mut self.trainers, self.step, &shards, never)
    }

    /// Kills nodes in the middle of what the moment says.
    fn kill_at(&mut self, moment: Moment, lost: &[usize]) -> Result<()> {
        for _ in 0..TRIES {
            match moment {
                Moment::Idle => return self.kill(lost),
                Moment::Encoding => self.begin_step()?,
                Moment::Repairing => {
                    // The first of them comes back empty, and goes again with the others before it has everything.
                    self.kill(&lost[..1])?;
                    self.system.cluster.start(lost[0])?;
                }
            }
            if self.stop_in_session(lost)? {
                return self.kill(lost);
            }
            self.is_protected()?;
        }
        bail!("no session was met in {TRIES} tries")
    }

    /// What the nodes that are left offer is no older than what was safe, and it is right.
    fn restores_on(&mut self, left: &[usize]) -> Result<()> {
        let plan = self.system.reader(left[0])?.plan(None, 60_000)?;
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

    fn lose(&mut self, lost: &[usize], moment: Moment) -> Result<()> {
        self.kill_at(moment, lost)?;
        let restored = self.restores_on(&self.nodes.but(lost));
        self.start_again(lost)?;
        self.is_protected()?;
        restored
    }
}

#[derive(Debug, Default, Clone, Copy)]
pub struct Count {
    pub tried: u32,
    pub failed: u32,
}

impl Count {
    pub fn note(&mut self, what: &str, outcome: Result<()>) {
        self.tried += 1;
        if let Err(error) = outcome {
            println!("{what}: {error:#}");
            self.failed += 1;
        }
    }
}

/// The machines that fill the places, which take turns at being the spare.
struct Places {
    nodes: Nodes,
    system: System,
}

impl Places {
    fn start(nodes: Nodes) -> Result<Self> {
        let all = nodes.all();
        let coding = Some((nodes.k, nodes.m));
        let more = "replace_after = \"1s\"\n";
        let mut system = System::with_registry(all + 1, all, coding, more)?;
        (0..all).try_for_each(|node| system.cluster.start(node))?;
        (0..all).try_for_each(|node| system.cluster.wait_for_peers(node, all - 1))?;
        system.cluster.start(all)?;
        let (run, mut trainers) = system.trainers(nodes.world())?;
        save(&system, run, &mut trainers, 7, 0..all)?;
        drop(trainers);
        until("protection", || system.bears(0, nodes.m))?;
        Ok(Self { nodes, system })
    }

    /// The machines that fill the places, by their place, as this one says; None: a place is vacant.
    fn filled(&self, asked: usize) -> Result<Vec<Option<usize>>> {
        let page = self.system.cluster.page(asked, "/status")?;
        let status: serde_json::Value = serde_json::from_str(&page.body)?;
        let places = &status["membership"]["places"];
        let mut all = places.as_array().context("places")?.clone();
        all.sort_by_key(|it| it["place"].to_string());
        let node = |name: &str| name.trim_start_matches('n').parse().ok();
        Ok(all
            .iter()
            .map(|it| it["node"].as_str().and_then(node))
            .collect())
    }

    fn all_filled(&self) -> Result<Vec<usize>> {
        // Any machine but the spare can say.
        let said = (0..=self.nodes.all()).find_map(|node| {
            let filled = self.filled(node).ok()?;
            let all: Vec<usize> = filled.into_iter().collect::<Option<_>>()?;
            all.contains(&node).then_some(all)
        });
        said.context("a place is vacant")
    }

    /// The first of them is gone for good. When the spare has its place, the others are lost too.
    fn lose(&mut self, lost: &[usize]) -> Result<()> {
        let mut members = Vec::new();
        until("all places", || {
            members = self.all_filled()?;
            Ok(())
        })?;
        let lost: Vec<usize> = lost.iter().map(|place| members[*place]).collect();
        let left = members.iter().copied().filter(|node| !lost.contains(node));
        let left: Vec<usize> = left.collect();
        self.system.cluster.kill(lost[0])?;
        until("the spare", || {
            let filled = self.filled(left[0])?;
            ensure!(!filled.contains(&Some(lost[0])) && !filled.contains(&None));
            Ok(())
        })?;
        for node in &lost[1..] {
            self.system.cluster.kill(*node)?;
        }
        let restored = self
            .system
            .restore(&left, 7, &shards(self.nodes.world(), 7));
        for node in &lost[1..] {
            self.system.cluster.start(*node)?;
        }
        let peers = self.nodes.all() - 1;
        self.system.cluster.wait_for_peers(left[0], peers)?;
        // The machine that was replaced is the next spare.
        self.system.cluster.start(lost[0])?;
        for node in left {
            until("protection", || self.system.bears(node, self.nodes.m))?;
        }
        restored.map(drop)
    }
}

/// Losses while the nodes of a cluster stay the same.
pub fn measure(figures: &mut Figures) -> Result<()> {
    let (mut all, mut missed) = (Count::default(), 0);
    for nodes in GEOMETRIES {
        for moment in [Moment::Idle, Moment::Encoding, Moment::Repairing] {
            let mut group = Group::start(nodes)?;
            for lost in nodes.losses() {
                let outcome = group.lose(&lost, moment);
                all.note(&format!("{nodes:?} {moment:?} without {lost:?}"), outcome);
            }
            missed += group.missed;
            println!("{nodes:?} {moment:?}: {all:?} so far, {missed} moments were missed");
            figures.insert("loss_subsets", f64::from(all.tried));
            figures.insert("loss_subsets_failed", f64::from(all.failed));
            figures.insert("loss_moments_missed", f64::from(missed));
        }
    }
    Ok(())
}

/// Losses while a spare takes the place of a node. Each takes as long as a loss has to last before a place is given up.
pub fn while_replaced(figures: &mut Figures) -> Result<()> {
    let mut all = Count::default();
    for nodes in GEOMETRIES {
        let mut places = Places::start(nodes)?;
        for lost in nodes.losses() {
            let outcome = places.lose(&lost);
            // What one loss has broken must not be counted for all that come after it.
            if outcome.is_err() {
                places = Places::start(nodes)?;
            }
            all.note(&format!("{nodes:?} replaced without {lost:?}"), outcome);
        }
        println!("{nodes:?} in a change of epochs: {all:?} so far");
        figures.insert("loss_subsets_replaced", f64::from(all.tried));
        figures.insert("loss_subsets_replaced_failed", f64::from(all.failed));
    }
    Ok(())
}
