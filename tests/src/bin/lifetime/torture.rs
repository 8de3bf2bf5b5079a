//! Kills at any moment of trainers' processes, daemons, keepers and nodes, while steps are saved. No protected step may be lost, no byte be
//! wrong, and in the end every gauge is what it was.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged::cluster::NodeMemory;
use storaged::env::{Entropy, SeededEntropy};
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::system::{System, shards};

use crate::Figures;
use crate::nodes::until;
use crate::trainer::{Order, RankProcess};

/// Gauges that are no account of what a node holds for somebody: the most that there ever was, rates and what follows from them, ages, and
/// memory that is kept for ten minutes for the next who needs it.
const NO_ACCOUNT: [&str; 5] = [
    "storaged_encode_blocks_in_flight_most",
    "storaged_encode_link_bytes_per_second",
    "storaged_encode_slow_nodes",
    "storaged_scrub_age_seconds",
    "storaged_memory_spare_bytes",
];
/// Nodes that start at once may have two connections to one another; a restart leaves one.
const CONNECTIONS: &str = "storaged_place_connections";
/// Said, because a daemon takes a share of what is free at its start else, and the budget is a gauge too.
const SETTINGS: &str = "[memory]\nbudget = \"256MiB\"\n";
/// Records are counted with what is remembered of steps that have ended, some hundred bytes each.
const RECORDS: &str = "storaged_memory_records_bytes";
const RECORDS_MORE: f64 = 65_536.0;
/// A rank keeps as many slots as it has ever needed, three at most (`memory.slots_per_rank`): two are enough for it in peace.
const USED: &str = "storaged_memory_used_bytes";
const USED_MORE: f64 = 3.0 / 2.0;

/// A number below this one: a seed says what is killed and when.
fn below(dice: &dyn Entropy, most: u64) -> usize {
    (dice.next() % most) as usize
}

/// Where nobody waits for orphans, one that has ended stays a zombie.
fn has_ended(process: u32) -> Result<()> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    ensure!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    Ok(())
}

/// Data and coding nodes of a cluster of one group; each data node has a rank.
#[derive(Debug, Clone, Copy)]
struct Shape {
    k: usize,
    m: usize,
}

const SHAPES: [Shape; 2] = [Shape { k: 2, m: 1 }, Shape { k: 4, m: 2 }];

impl Shape {
    fn nodes(self) -> usize {
        self.k + self.m
    }

    fn ranks(self) -> u32 {
        u32::try_from(self.k).expect("few nodes")
    }
}

/// Where a trainer's process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Within {
    /// In the middle of a copy: a slot of the step that is half written stays behind.
    Copy,
    /// All have sealed, and nobody has described the step.
    Sealed,
    /// The step was described.
    Committed,
}

/// What is killed.
#[derive(Debug, Clone)]
enum Victim {
    /// The process of a rank.
    Trainer(usize, Within),
    /// All processes of the job, after the commit.
    Trainers,
    /// Daemons at once, whose memory stays.
    Daemons(Vec<usize>),
    /// At most m nodes with their memory.
    Nodes(Vec<usize>),
    /// A keeper alone: its daemon leaves in order, and the node's memory goes with it.
    Keeper(usize),
}

impl Victim {
    fn drawn(dice: &dyn Entropy, shape: Shape) -> Self {
        let all = shape.nodes() as u64;
        let some = |most: usize| {
            let first = below(dice, all);
            let count = 1 + below(dice, most as u64);
            (0..count)
                .map(|at| (first + at) % shape.nodes())
                .collect::<Vec<_>>()
        };
        let rank = below(dice, shape.k as u64);
        match below(dice, 12) {
            0 => Self::Trainers,
            1 | 2 => Self::Trainer(rank, Within::Copy),
            3 | 4 => Self::Trainer(rank, Within::Sealed),
            5 => Self::Trainer(rank, Within::Committed),
            6 => Self::Nodes(some(shape.m)),
            7 => Self::Keeper(below(dice, all)),
            8 => Self::Daemons(some(shape.nodes())),
            _ => Self::Daemons(some(1)),
        }
    }

    /// A step that had not been protected may be given up when memory goes with it; one that is said to be is not.
    fn spares_memory(&self) -> bool {
        !matches!(self, Self::Nodes(_) | Self::Keeper(_))
    }
}

struct Job {
    shape: Shape,
    system: System,
    run: RunId,
    ranks: Vec<RankProcess>,
    step: u64,
    /// The newest step that was protected.
    safe: u64,
}

impl Job {
    fn start(shape: Shape) -> Result<Self> {
        let mut system = System::prepared(shape.nodes(), Some((shape.k, shape.m)), SETTINGS)?;
        system.cluster.set_memory(NodeMemory::OutlivesDaemon);
        system.cluster.start_all()?;
        let run = system.reader(0)?.open_run(60_000)?;
        let start = |node| RankProcess::start(&system, node, run, shape.ranks());
        let ranks = (0..shape.k).map(start).collect::<Result<_>>()?;
        Ok(Self {
            shape,
            system,
            run,
            ranks,
            step: 0,
            safe: 0,
        })
    }

    /// Tells some ranks to do something, and waits for all of them, whatever one says.
    fn told(&mut self, order: Order, but: Option<usize>) -> Result<()> {
        let step = self.step;
        let others = |(at, _): &(usize, &mut RankProcess)| Some(*at) != but;
        let ranks = self.ranks.iter_mut().enumerate().filter(others);
        let mut told = Vec::new();
        for (at, rank) in ranks {
            rank.tell(order, step)?;
            told.push((at, rank));
        }
        let answers = told.into_iter().map(|(at, rank)| {
            let answer = rank.answer();
            answer.with_context(|| format!("rank {at}, {order:?} of step {step}"))
        });
        answers.collect::<Vec<_>>().into_iter().collect()
    }

    fn commit(&mut self) -> Result<()> {
        self.ranks[0].tell(Order::Commit, self.step)?;
        self.ranks[0].answer().context("the commit")
    }

    fn save(&mut self) -> Result<()> {
        self.told(Order::Fill, None)?;
        self.told(Order::Seal, None)?;
        self.commit()
    }

    /// Saves, and kills a rank's process in between. Whether the step was described.
    fn save_and_kill(&mut self, rank: usize, within: Within, after: Duration) -> Result<bool> {
        match within {
            Within::Copy => {
                self.ranks[rank].tell(Order::Copy, self.step)?;
                self.ranks[rank].answer().context("the copy")?;
                self.told(Order::Fill, Some(rank))?;
                self.told(Order::Seal, Some(rank))?;
            }
            Within::Sealed => {
                self.told(Order::Fill, None)?;
                self.told(Order::Seal, None)?;
            }
            Within::Committed => self.save()?,
        }
        std::thread::sleep(after);
        self.ranks[rank].kill();
        if within == Within::Sealed && rank != 0 {
            self.commit()?;
        }
        let is_described = match within {
            Within::Copy => false,
            Within::Sealed => rank != 0,
            Within::Committed => true,
        };
        self.ranks[rank] = RankProcess::start(&self.system, rank, self.run, self.shape.ranks())?;
        Ok(is_described)
    }

    fn kill(&mut self, victim: &Victim) -> Result<()> {
        match victim {
            Victim::Trainer(..) => {}
            Victim::Trainers => {
                for rank in &mut self.ranks {
                    rank.kill();
                }
                let (system, run, shape) = (&self.system, self.run, self.shape);
                let again = |node| RankProcess::start(system, node, run, shape.ranks());
                self.ranks = (0..shape.k).map(again).collect::<Result<_>>()?;
            }
            Victim::Daemons(nodes) => {
                let tell = |node: &usize| self.system.tell_daemon(*node, Signal::KILL);
                let before = nodes.iter().map(tell).collect::<Result<Vec<u32>>>()?;
                for (node, before) in nodes.iter().zip(before) {
                    self.system.back_after(*node, before)?;
                }
            }
            Victim::Nodes(nodes) => {
                for node in nodes {
                    self.system.cluster.kill(*node)?;
                }
                for node in nodes {
                    self.system.cluster.start(*node)?;
                }
            }
            Victim::Keeper(node) => {
                let daemon = self
                    .system
                    .cluster
                    .daemon_below(*node)
                    .context("a daemon")?;
                self.system.cluster.signal(*node, Signal::KILL)?;
                self.system.cluster.wait(*node)?;
                until("the end of the daemon", || has_ended(daemon))?;
                self.system.cluster.start(*node)?;
            }
        }
        Ok(self.system.cluster.wait_for_links()?)
    }

    fn wait_for_protection(&self) -> Result<()> {
        let state = CheckpointState::Protected;
        let mut nodes = 0..self.shape.nodes();
        nodes.try_for_each(|node| self.system.wait(node, self.run, self.step, state))
    }

    /// Begins a step, kills in the middle of it, and looks at what is there.
    fn round(&mut self, victim: &Victim, after: Duration) -> Result<()> {
        self.step += 1;
        let is_described = match *victim {
            Victim::Trainer(rank, within) => self.save_and_kill(rank, within, after)?,
            _ => {
                // The kill before this one cost nobody a connection.
                self.save()?;
                std::thread::sleep(after);
                true
            }
        };
        self.kill(victim)?;
        if is_described && victim.spares_memory() && self.wait_for_protection().is_ok() {
            self.safe = self.step;
        }
        self.is_whole()?;
        // The next kill may take m nodes: what is there bears that again first.
        let m = self.shape.m;
        until("protection", || self.system.bears(0, m)).map(drop)
    }

    /// What is offered is no older than what was protected, and right.
    fn is_whole(&mut self) -> Result<()> {
        let plan = self.system.reader(0)?.plan(None, 60_000);
        let newest = plan.with_context(|| format!("step {} was safe", self.safe))?;
        let newest = newest.step.get();
        ensure!(
            newest >= self.safe,
            "step {newest} after {} was protected",
            self.safe
        );
        let nodes: Vec<usize> = (0..self.shape.k).collect();
        let expected = shards(self.shape.ranks(), newest);
        self.system.restore(&nodes, newest, &expected)?;
        self.safe = newest;
        Ok(())
    }

    /// Saves some steps in peace.
    fn settle(&mut self) -> Result<()> {
        for _ in 0..4 {
            self.step += 1;
            self.save()?;
            self.wait_for_protection()?;
            self.safe = self.step;
        }
        Ok(())
    }

    fn gauges(&self) -> Result<Vec<Gauges>> {
        let nodes = 0..self.shape.nodes();
        nodes.map(|node| gauges_of(&self.system, node)).collect()
    }
}

/// Values by the name and labels of a gauge.
type Gauges = BTreeMap<String, f64>;

fn gauges_of(system: &System, node: usize) -> Result<Gauges> {
    let page = system.cluster.page(node, "/metrics")?;
    let kinds = page.body.lines().filter_map(|line| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        (kind == "gauge").then_some(name)
    });
    let names: Vec<&str> = kinds.filter(|name| !NO_ACCOUNT.contains(name)).collect();
    ensure!(names.len() > 10, "{} gauges: {}", names.len(), page.body);
    let values = page.body.lines().filter_map(|line| {
        let (name, value) = line.rsplit_once(' ')?;
        let bare = name.split('{').next()?;
        names.contains(&bare).then_some((name, value))
    });
    let parsed = values.map(|(name, value)| Ok((name.to_owned(), value.parse()?)));
    parsed.collect()
}

/// Gauges that are not what they were.
fn differing(before: &Gauges, after: &Gauges) -> Vec<String> {
    let is_same = |name: &str, was: f64, is: f64| {
        let most = if name == RECORDS { RECORDS_MORE } else { 0.5 };
        let is_slots = name == USED && (was..=was * USED_MORE).contains(&is);
        (was - is).abs() <= most || (name == CONNECTIONS && is < was) || is_slots
    };
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let values = names.into_iter().map(|name| {
        let [was, is] = [before, after].map(|of| of.get(name).copied().unwrap_or_default());
        (name, was, is)
    });
    let differ = values.filter(|(name, was, is)| !is_same(name, *was, *is));
    let said = differ.map(|(name, was, is)| format!("{name}: {was} before, {is} now"));
    said.collect()
}

/// Nodes of which a gauge does not return to what it was.
fn leaking(job: &mut Job, before: &[Gauges]) -> Result<usize> {
    job.settle()?;
    let mut leaking: Vec<usize> = Vec::new();
    let settled = until("gauges as before", || {
        let differ: Vec<Vec<String>> = before
            .iter()
            .zip(job.gauges()?)
            .map(|(before, after)| differing(before, &after))
            .collect();
        leaking = (0..differ.len())
            .filter(|node| !differ[*node].is_empty())
            .collect();
        ensure!(leaking.is_empty(), "{differ:?}");
        Ok(())
    });
    if let Err(error) = settled {
        println!("{:?}: {error:#}", job.shape);
        for node in &leaking {
            println!("n{node}: {}", job.system.cluster.status(*node)?);
        }
    }
    Ok(leaking.len())
}

/// The kills of one cluster: how many lost something, and how many nodes have kept something.
fn torture(shape: Shape, kills: u32, dice: &dyn Entropy) -> Result<(u32, usize)> {
    let mut job = Job::start(shape)?;
    job.settle()?;
    until("quiet", || job.system.bears(0, shape.m))?;
    std::thread::sleep(Duration::from_secs(2));
    let before = job.gauges()?;
    let mut lost = 0;
    for kill in 0..kills {
        let victim = Victim::drawn(dice, shape);
        let after = Duration::from_millis(below(dice, 60) as u64);
        if let Err(error) = job.round(&victim, after) {
            println!("{shape:?}, kill {kill}, {victim:?} after {after:?}: {error:#}");
            lost += 1;
            job = Job::start(shape)?;
        }
    }
    let leaks = leaking(&mut job, &before)?;
    Ok((lost, leaks))
}

pub fn measure(figures: &mut Figures, kills: u32, seed: u64) -> Result<()> {
    let dice = SeededEntropy::new(seed);
    let (mut lost, mut leaks) = (0, 0);
    for (number, shape) in (0..).zip(SHAPES) {
        // What is left over goes to the first.
        let share = (kills + 1 - number) / 2;
        println!("{shape:?}: {share} kills of seed {seed}");
        let (of_these, kept) = torture(shape, share, &*dice)?;
        lost += of_these;
        leaks += kept;
    }
    figures.insert("kills", f64::from(kills));
    figures.insert("kills_lost", f64::from(lost));
    figures.insert("kills_leaking_nodes", leaks as f64);
    Ok(())
}
