//! A rank in a process of its own: it is told what to do line by line, says when it has done so, and is killed in the middle of it. It connects
//! once: where its daemon dies, its connection comes back by itself.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use storaged_sdk::wire::local::{DurableWish, Role};
use storaged_sdk::wire::{Namespace, Rank, RunId, Step, WorldSize};
use storaged_sdk::{ConnectOptions, StagedSlot, TOKEN_VARIABLE, Trainer, token_of_environment};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::system::shards;

/// The argument of this program that makes it a rank: it is followed by a socket, the job, a run, the rank and the number of ranks.
pub const ARGUMENT: &str = "trainer";

/// Done, as it is said in a line.
const DONE: &str = "done";

/// What a rank is told to do with a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Fill a slot.
    Fill,
    /// Copy into a slot, again and again: whoever kills it kills it in the middle of a copy.
    Copy,
    /// Seal what was filled.
    Seal,
    /// Describe the step.
    Commit,
}

const ORDERS: [(Order, &str); 4] = [
    (Order::Fill, "fill"),
    (Order::Copy, "copy"),
    (Order::Seal, "seal"),
    (Order::Commit, "commit"),
];

impl Order {
    fn word(self) -> &'static str {
        let found = ORDERS.iter().find(|(order, _)| *order == self);
        found.map_or("", |(_, word)| word)
    }

    fn of(word: &str) -> Option<Self> {
        let found = ORDERS.iter().find(|(_, known)| *known == word);
        found.map(|(order, _)| *order)
    }
}

/// The process, as the one that kills it sees it.
pub struct RankProcess {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl RankProcess {
    /// Starts it; it is connected when this returns.
    ///
    /// # Errors
    /// If it is not let in.
    pub fn start(clients: &Clients, node: usize, run: RunId, ranks: u32) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(format!("--{ARGUMENT}"))
            .arg(&clients.sockets[node])
            .arg(clients.namespace.as_str())
            .args([run.to_string(), node.to_string(), ranks.to_string()])
            .env(TOKEN_VARIABLE, std::str::from_utf8(&clients.token)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().context("its input")?;
        let answers = BufReader::new(child.stdout.take().context("its output")?);
        let mut rank = Self {
            child,
            orders,
            answers,
        };
        rank.answer().context("connecting")?;
        Ok(rank)
    }

    /// Tells it what to do; [`RankProcess::answer`] is called next.
    ///
    /// # Errors
    /// If it is not there.
    pub fn tell(&mut self, order: Order, step: u64) -> Result<()> {
        Ok(writeln!(self.orders, "{} {step}", order.word())?)
    }

    /// Waits until it has done it.
    ///
    /// # Errors
    /// What it says that went wrong.
    pub fn answer(&mut self) -> Result<()> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        ensure!(line.trim_end() == DONE, "{}", line.trim_end());
        Ok(())
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The rank itself, until nobody tells it anything any more.
struct Ranked {
    trainer: Trainer,
    rank: usize,
    ranks: u32,
    filled: Option<(StagedSlot, u64)>,
}

/// Is a rank.
///
/// # Errors
/// If it cannot connect, or is told something else than there is to do.
pub fn serve(arguments: &[String]) -> Result<()> {
    let [socket, namespace, run, rank, ranks] = arguments else {
        bail!("expected a socket, a job, a run, a rank and the number of ranks");
    };
    let options = ConnectOptions {
        socket: socket.into(),
        namespace: Namespace::new(namespace)?,
        token: token_of_environment()?,
        role: Role::Reader,
    };
    let (rank, ranks): (u32, u32) = (rank.parse()?, ranks.parse()?);
    let trainer = Trainer::connect(
        options,
        run.parse()?,
        Rank::new(rank),
        WorldSize::new(ranks)?,
    )?;
    let mut ranked = Ranked {
        trainer,
        rank: rank as usize,
        ranks,
        filled: None,
    };
    println!("{DONE}");
    for line in std::io::stdin().lines() {
        let line = line?;
        let (word, step) = line.split_once(' ').context("an order and a step")?;
        let order = Order::of(word).context("an order that there is")?;
        match ranked.obey(order, step.parse()?) {
            Ok(()) => println!("{DONE}"),
            Err(error) => println!("{}", format!("{error:#}").replace('\n', " ")),
        }
    }
    Ok(())
}

impl Ranked {
    fn obey(&mut self, order: Order, step: u64) -> Result<()> {
        match order {
            Order::Fill => self.fill(step),
            Order::Copy => self.copy_on(step),
            Order::Seal => {
                let (slot, length) = self.filled.take().context("nothing was filled")?;
                Ok(self.trainer.seal(&slot, Step::new(step), length)?)
            }
            Order::Commit => {
                let never = DurableWish::Never;
                Ok(self
                    .trainer
                    .commit(Step::new(step), vec![1, 2, 3], Vec::new(), never)?)
            }
        }
    }

    fn shard(&self, step: u64) -> Vec<u8> {
        shards(self.ranks, step).swap_remove(self.rank)
    }

    fn fill(&mut self, step: u64) -> Result<()> {
        let shard = self.shard(step);
        let length = shard.len() as u64;
        let slot = self.trainer.acquire(length, WAIT_MS)?;
        slot.copy_in(0, &shard)?;
        self.filled = Some((slot, length));
        Ok(())
    }

    fn copy_on(&mut self, step: u64) -> Result<()> {
        let shard = self.shard(step);
        let slot = self.trainer.acquire(shard.len() as u64, WAIT_MS)?;
        println!("{DONE}");
        loop {
            for (number, piece) in shard.chunks(4 << 10).enumerate() {
                slot.copy_in(number * (4 << 10), piece)?;
            }
        }
    }
}
