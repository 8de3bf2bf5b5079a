//! Every loss of up to m nodes of one group, each with real processes: all shards come back right, on the nodes that are left. The nodes are lost
//! while nothing happens, in the middle of a coding, in the middle of the repair of one of them, and while another machine takes the place
//! of one of them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged_sdk::Trainer;
use storaged_sdk::wire::RunId;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, losses, shards};

use crate::Figures;
use crate::nodes::{save, until};

/// Data and coding nodes of a cluster of one group.
#[derive(Debug, Clone, Copy)]
struct Nodes {
    k: usize,
    m: usize,
}

const GEOMETRIES: [Nodes; 3] = [
    Nodes { k: 4, m: 2 },
    Nodes { k: 6, m: 2 },
    Nodes { k: 8, m: 3 },
];

impl Nodes {
    fn all(self) -> usize {
        self.k + self.m
    }

    fn world(self) -> u32 {
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
    run: RunId,
    trainers: Vec<Trainer>,
    /// The newest step that was protected, and the newest that was saved.
    safe: u64,
    step: u64,
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
            run,
            trainers,
            safe: 7,
            step: 7,
        })
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

    /// Commits another step; its coding has just begun when this returns.
    fn begin_step(&mut self) -> Result<()> {
        self.step += 1;
        let shards = shards(self.nodes.world(), self.step);
        let never = DurableWish::Never;
        self.system
            .save(&mut self.trainers, self.step, &shards, never)
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
        let expected = shards(self.nodes.world(), newest);
        self.system.restore(left, newest, &expected).map(drop)
    }

    fn lose(&mut self, lost: &[usize], moment: Moment) -> Result<()> {
        match moment {
            Moment::Idle => self.kill(lost)?,
            Moment::Encoding => {
                self.begin_step()?;
                // At different moments of it: coding these shards takes some 20 ms.
                std::thread::sleep(Duration::from_millis(self.step * 3 % 25));
                self.kill(lost)?;
            }
            Moment::Repairing => {
                // The first of them came back empty, and goes again with the others before it has everything.
                self.kill(&lost[..1])?;
                self.start_again(&lost[..1])?;
                self.kill(lost)?;
            }
        }
        let restored = self.restores_on(&self.nodes.but(lost));
        self.start_again(lost)?;
        if moment == Moment::Encoding {
            let again = (0..self.nodes.world())
                .map(|rank| {
                    let world = self.nodes.world();
                    self.system.trainer(rank as usize, self.run, rank, world)
                })
                .collect::<Result<_>>();
            self.trainers = again?;
        }
        for node in 0..self.nodes.all() {
            until("protection", || self.system.bears(node, self.nodes.m))?;
        }
        restored
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    tried: u32,
    failed: u32,
}

impl Count {
    fn note(&mut self, what: &str, outcome: Result<()>) {
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
    let mut all = Count::default();
    for nodes in GEOMETRIES {
        for moment in [Moment::Idle, Moment::Encoding, Moment::Repairing] {
            let mut group = Group::start(nodes)?;
            for lost in nodes.losses() {
                let outcome = group.lose(&lost, moment);
                all.note(&format!("{nodes:?} {moment:?} without {lost:?}"), outcome);
            }
            println!("{nodes:?} {moment:?}: {all:?} so far");
            figures.insert("loss_subsets", f64::from(all.tried));
            figures.insert("loss_subsets_failed", f64::from(all.failed));
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
            all.note(&format!("{nodes:?} replaced without {lost:?}"), outcome);
        }
        println!("{nodes:?} in a change of epochs: {all:?} so far");
        figures.insert("loss_subsets_replaced", f64::from(all.tried));
        figures.insert("loss_subsets_replaced_failed", f64::from(all.failed));
    }
    Ok(())
}
