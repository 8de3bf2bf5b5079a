//! RAM that rots under daemons that run, with real processes: a byte of a sealed slot or of parity is changed behind the daemon's
//! back, and it is found, counted, put back from peers where it was, and never handed to a reader.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::system::{System, memory_of, save_protected, shards};

const ROTTEN: &str = "storaged_scrub_rotten_chunks_total";
const ENCODED: &str = "storaged_encode_session_bytes_total";
const CHUNK: u64 = 4096;

/// Longer than any machine needs for what is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

fn settings(more: &str) -> String {
    format!("chunk = \"4KiB\"\n\n[scrub]\nperiod = \"5s\"\n{more}\n")
}

/// Three nodes, (2,1), a step that is protected.
fn protected(more: &str) -> Result<(System, RunId, Vec<Trainer>)> {
    let system = System::start(3, Some((2, 1)), &settings(more))?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 10)?;
    Ok((system, run, trainers))
}

fn until(system: &System, what: &str, holds: impl Fn() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !holds()? {
        if began.elapsed() > PATIENCE {
            let ends = (0..3).map(|node| system.cluster.log_end(node, 10));
            bail!("{what} did not come about: {:?}", ends.collect::<Vec<_>>());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn rotten(system: &System, node: usize) -> Result<u64> {
    Ok(system.cluster.metric(node, ROTTEN)?)
}

/// The newest step bears the loss of a node, as every node says, and nothing is on its way.
fn bears_again(system: &System) -> Result<()> {
    until(system, "bearing a loss again", || {
        for node in 0..3 {
            let status = system.cluster.status(node)?;
            let sound = status.contains(r#""bears":1"#) && status.contains(r#""sessions":0"#);
            if !sound {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

fn open(path: &PathBuf) -> Result<File> {
    Ok(File::options().read(true).write(true).open(path)?)
}

/// The slot of a process that begins with these bytes.
fn slot_with(process: u32, start: &[u8]) -> Result<File> {
    for path in memory_of(process, "storaged-slot")? {
        let file = open(&path)?;
        let mut bytes = vec![0; start.len()];
        if file.read_exact_at(&mut bytes, 0).is_ok() && bytes == start {
            return Ok(file);
        }
    }
    bail!("no slot of {process} has the shard")
}

fn flip(file: &File, at: u64) -> Result<()> {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] ^ 0x40], at)?;
    Ok(())
}

/// Daemons that stand still while their memory rots: a scrub in the middle would find a part of it, and heal it from what is to rot next.
struct Still(Vec<Pid>);

impl Still {
    fn of(processes: &[u32]) -> Result<Self> {
        let mut still = Self(Vec::new());
        for process in processes {
            let process = Pid::from_raw((*process).try_into()?).context("a process")?;
            kill_process(process, Signal::STOP)?;
            still.0.push(process);
        }
        Ok(still)
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        for process in &self.0 {
            let _ = kill_process(*process, Signal::CONT);
        }
    }
}

fn rot_slot(process: u32, shard: &[u8], chunks: &[u64]) -> Result<File> {
    let slot = slot_with(process, &shard[..100])?;
    for chunk in chunks {
        flip(&slot, chunk * CHUNK + 123)?;
    }
    Ok(slot)
}

/// Rots the chunk of parity whose cell begins there: the first cells were given to the first chunks.
fn rot_parity(process: u32, cell: u64) -> Result<()> {
    let mut all = memory_of(process, "storaged-cells")?;
    ensure!(!all.is_empty(), "n2 holds parity");
    all.retain(|path| {
        let mut bytes = [0; 64];
        let file = File::open(path);
        file.is_ok_and(|file| {
            file.read_exact_at(&mut bytes, cell * CHUNK).is_ok() && bytes != [0; 64]
        })
    });
    flip(
        &open(all.first().context("parity in that cell")?)?,
        cell * CHUNK + 77,
    )
}

fn content(slot: &File, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    slot.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Passes that a node's scrub has ended.
fn passes(system: &System, node: usize) -> Result<u64> {
    let status = system.cluster.status(node)?;
    let scrub = status.split_once(r#""scrub":{"#).context("it is shown")?.1;
    let passes = scrub.split_once(r#""passes":"#).context("a number")?.1;
    let digits: String = passes.chars().take_while(char::is_ascii_digit).collect();
    Ok(digits.parse()?)
}

fn encoded(system: &System) -> Result<u64> {
    let all = (0..3).map(|node| system.cluster.metric::<u64>(node, ENCODED));
    Ok(all.sum::<Result<u64, _>>()?)
}

/// The same once all sessions have ended and counted what they computed: a step may be protected a moment before that.
fn encoded_at_rest(system: &System) -> Result<u64> {
    bears_again(system)?;
    encoded(system)
}

#[test]
fn rotten_chunks_of_a_slot_are_put_back_where_they_were() -> Result<()> {
    let hook = r#"rotten_max = 2
hook = ["/bin/sh", "-c", "echo $STORAGED_NODE $STORAGED_ROTTEN_CHUNKS > ROOT/hook"]"#;
    let (system, _, _trainers) = protected(hook)?;
    let shard = &shards(2, 10)[0];
    let daemon = system.cluster.pid(0)?;
    let before = encoded_at_rest(&system)?;
    let still = Still::of(&[daemon])?;
    let slot = rot_slot(daemon, shard, &[20, 150])?;
    ensure!(content(&slot, shard.len())? != *shard);
    drop(still);
    until(&system, "finding the rot", || Ok(rotten(&system, 0)? == 2))?;
    until(&system, "putting it back", || {
        Ok(content(&slot, shard.len())? == *shard)
    })?;
    bears_again(&system)?;
    // Two chunks at each of three nodes, not the shard.
    let moved = encoded(&system)? - before;
    ensure!(
        moved <= 8 * CHUNK,
        "{moved} bytes were computed for two chunks"
    );
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    // It is right now: another pass finds nothing.
    let begun = passes(&system, 0)?;
    until(&system, "two more passes", || {
        Ok(passes(&system, 0)? >= begun + 2)
    })?;
    ensure!(
        (0..3)
            .map(|node| rotten(&system, node))
            .sum::<Result<u64>>()?
            == 2
    );
    let ready = system.cluster.page(0, "/readyz")?;
    ensure!(
        ready.code == 503 && ready.body.contains("scrub.rotten_max"),
        "{}",
        ready.body
    );
    ensure!(system.cluster.page(1, "/readyz")?.code == 200);
    until(&system, "the hook", || {
        Ok(system.root.path().join("hook").exists())
    })?;
    let said = fs::read_to_string(system.root.path().join("hook"))?;
    let expected = format!("{} 2", system.cluster.name(0));
    ensure!(said.trim() == expected, "{said}");
    Ok(())
}

/// The node that keeps parity has nothing else: what has rotted there is found though nobody reads it, and what was put back is
/// what the next daemon finds, and what a lost shard is decoded from.
#[test]
fn rotten_parity_is_put_back_and_outlives_its_daemon() -> Result<()> {
    let mut system = System::start_kept(3, Some((2, 1)), &settings(""))?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 10)?;
    let daemon = system.cluster.daemon_below(2).context("a daemon")?;
    let before = encoded_at_rest(&system)?;
    let still = Still::of(&[daemon])?;
    rot_parity(daemon, 1)?;
    rot_parity(daemon, 5)?;
    drop(still);
    until(&system, "finding the rot", || Ok(rotten(&system, 2)? == 2))?;
    until(&system, "putting it back", || {
        let healed: u64 = system
            .cluster
            .metric(2, "storaged_place_blocks_healed_total")?;
        Ok(healed > 0)
    })?;
    bears_again(&system)?;
    let moved = encoded(&system)? - before;
    ensure!(
        moved <= 16 * CHUNK,
        "{moved} bytes were computed for two chunks"
    );
    ensure!(
        (0..2)
            .map(|node| rotten(&system, node))
            .sum::<Result<u64>>()?
            == 0
    );
    kill_process(
        Pid::from_raw(daemon.try_into()?).context("a process")?,
        Signal::KILL,
    )?;
    until(&system, "another daemon", || {
        let now = system.cluster.daemon_below(2);
        Ok(now.is_some_and(|now| now != daemon) && system.cluster.status(2).is_ok())
    })?;
    system.cluster.wait_for_links()?;
    bears_again(&system)?;
    ensure!(!fs::read_to_string(system.cluster.log(2))?.contains("earlier daemon is lost"));
    system.cluster.kill(0)?;
    let rungs = system.restore(&[1, 1], 10, &shards(2, 10))?;
    ensure!(rungs == [Rung::Decoded, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// One stripe has lost its chunk of a shard and its parity: it cannot be decoded any more. The durable tier has it, and where there is
/// none, no reader is given other bytes.
#[test]
fn what_rots_beyond_the_code_comes_from_the_durable_tier() -> Result<()> {
    for durable in [DurableWish::Required, DurableWish::Never] {
        let tier = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"";
        let system = System::start(3, Some((2, 1)), &settings(tier))?;
        let (run, mut trainers) = system.trainers(2)?;
        let expected = shards(2, 10);
        system.save(&mut trainers, 10, &expected, durable)?;
        let state = match durable {
            DurableWish::Required => CheckpointState::Durable,
            _ => CheckpointState::Protected,
        };
        (0..3).try_for_each(|node| system.wait(node, run, 10, state))?;
        // Every chunk of the parity that the first cells hold: whichever stripe it is of, its shard's chunk has rotted too.
        let chunks: Vec<u64> = (0..expected[0].len() as u64 / CHUNK).collect();
        let (of_shard, of_parity) = (system.cluster.pid(0)?, system.cluster.pid(2)?);
        let still = Still::of(&[of_shard, of_parity])?;
        (0..60).try_for_each(|cell| rot_parity(of_parity, cell))?;
        rot_slot(of_shard, &expected[0], &chunks)?;
        drop(still);
        until(&system, "finding the rot", || Ok(rotten(&system, 0)? > 0))?;
        let restored = system.restore(&[0, 1], 10, &expected);
        match (durable, restored) {
            (DurableWish::Required, Ok(rungs)) => {
                ensure!(rungs == [Rung::Durable, Rung::OwnRam], "{rungs:?}");
            }
            (DurableWish::Required, Err(error)) => return Err(error),
            (_, Ok(rungs)) => bail!("a shard that nobody has came from {rungs:?}"),
            (_, Err(error)) => println!("refused: {error:#}"),
        }
    }
    Ok(())
}

/// A job that saves without a pause, beside a scrub with a very short period: every step is protected, and nothing is taken for rotten.
#[test]
fn a_job_that_saves_is_not_disturbed() -> Result<()> {
    let system = System::start(3, Some((2, 1)), &settings("").replace("5s", "1s"))?;
    let (run, mut trainers) = system.trainers(2)?;
    for step in 1..=40 {
        save_protected(&system, run, &mut trainers, step)?;
    }
    for node in 0..3 {
        // Steps may have come and gone faster than they were read; the newest one stays.
        let begun = passes(&system, node)?;
        until(&system, "a pass over the newest step", || {
            Ok(passes(&system, node)? >= begun + 2)
        })?;
        let found = rotten(&system, node)?;
        ensure!(found == 0, "n{node} took {found} chunks for rotten");
        let read: u64 = system.cluster.metric(node, "storaged_scrub_bytes_total")?;
        ensure!(read > 0, "n{node} has read nothing in two passes");
    }
    let rungs = system.restore(&[0, 1], 40, &shards(2, 40))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// A program that hangs, and has started another one.
const HANGS: &str = r#"rotten_max = 1
hook = ["/bin/sh", "-c", "sleep 100000 & echo $! >> ROOT/hook; wait"]"#;

/// Rots a chunk of the first node's slot, and waits for the program; what that has started.
fn rot_till_hook(system: &System, process: u32) -> Result<String> {
    let root = system.root.path().join("hook");
    rot_slot(process, &shards(2, 10)[0], &[20])?;
    until(system, "the hook", || {
        Ok(fs::read_to_string(&root).is_ok_and(|text| text.ends_with('\n')))
    })?;
    bears_again(system)?;
    Ok(fs::read_to_string(&root)?)
}

fn runs(process: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.trim()));
    stat.is_ok_and(|it| !it.contains(") Z "))
}

fn ends(process: &str) -> Result<()> {
    let began = Instant::now();
    while runs(process) {
        ensure!(began.elapsed() < PATIENCE, "{process} outlives the daemon");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Neither it nor what it has started goes on after the daemon has ended, and there is one of it at a time.
#[test]
fn a_hook_that_hangs_ends_with_the_daemon() -> Result<()> {
    let (mut system, _, trainers) = protected(HANGS)?;
    let daemon = system.cluster.pid(0)?;
    let said = rot_till_hook(&system, daemon)?;
    // More rots after a period, and the first one still runs.
    let passed = passes(&system, 0)?;
    until(&system, "passes more", || {
        Ok(passes(&system, 0)? > passed + 1)
    })?;
    rot_slot(daemon, &shards(2, 10)[0], &[30])?;
    until(&system, "more rot", || Ok(rotten(&system, 0)? == 2))?;
    bears_again(&system)?;
    let now = fs::read_to_string(system.root.path().join("hook"))?;
    ensure!(now == said, "expected one program at a time, got {now:?}");
    ensure!(runs(&said), "it hangs");
    drop(trainers);
    system.cluster.stop(0)?;
    ends(&said)
}

#[test]
fn a_hook_that_hangs_ends_with_a_daemon_that_is_started_again() -> Result<()> {
    let system = System::start_kept(3, Some((2, 1)), &settings(HANGS))?;
    let (run, mut trainers) = system.trainers(2)?;
    save_protected(&system, run, &mut trainers, 10)?;
    let daemon = system.cluster.daemon_below(0).context("a daemon")?;
    let said = rot_till_hook(&system, daemon)?;
    ensure!(runs(&said), "it hangs");
    system.tell_daemon(0, Signal::USR2)?;
    ends(&said)
}
