//! A solver that goes on where it was killed.
//!
//!     storaged run --runtime-dir /tmp/storaged &
//!     export STORAGED_SOCKET=/tmp/storaged/storaged.sock
//!     cargo run --release -p storaged-sdk --example save_and_restore -- 1000     # end it with kill -9
//!     cargo run --release -p storaged-sdk --example save_and_restore -- 1000     # goes on after the last step
//!
//! It has one rank, whose state is an array of `f64`. A job of many has a client for each rank: one of them opens the run
//! and tells the others its number, every one seals its shard, and one commits.

use std::env;
use std::error::Error;

use storaged_sdk::wire::local::{DurableWish, Role};
use storaged_sdk::wire::{CheckpointState, Namespace, Rank, Step, WorldSize};
use storaged_sdk::{Client, ConnectOptions, DEFAULT_SOCKET, Trainer};

const CELLS: usize = 1 << 16;
const RANK: Rank = Rank::new(0);
/// A step, and the cells after it.
type Saved = (u64, Vec<f64>);
/// How long each call may take.
const TIMEOUT_MS: u32 = 10_000;

fn main() -> Result<(), Box<dyn Error>> {
    let steps: u64 = env::args().nth(1).as_deref().unwrap_or("20").parse()?;
    let variable =
        |name: &str, otherwise: &str| env::var(name).unwrap_or_else(|_| otherwise.into());
    let options = ConnectOptions {
        socket: variable("STORAGED_SOCKET", DEFAULT_SOCKET).into(),
        namespace: Namespace::new(variable("STORAGED_NAMESPACE", "heat"))?,
        token: variable("STORAGED_TOKEN", "").into_bytes(),
        role: Role::Reader,
    };
    let (mut client, _) = Client::connect(&options)?;
    let (done, mut cells) = match newest(&mut client)? {
        Some(restored) => restored,
        None => (0, (0..CELLS).map(|cell| cell as f64).collect()),
    };
    println!("goes on after step {done}");

    // From here on nothing of an earlier incarnation of this job, should one still live, is taken any more.
    let run = client.open_run(TIMEOUT_MS)?;
    let world_size = WorldSize::new(1)?;
    let mut trainer = Trainer::connect(options, run, RANK, world_size)?;
    for step in done + 1..=steps {
        smooth(&mut cells);
        let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
        let length = bytes.len() as u64;
        let slot = trainer.acquire(length, TIMEOUT_MS)?;
        slot.copy_in(0, &bytes)?;
        // The daemon has the bytes now: `cells` may change.
        trainer.seal(&slot, Step::new(step), length)?;
        trainer.commit(Step::new(step), Vec::new(), Vec::new(), DurableWish::Policy)?;
        println!("step {step} sum {:.6}", cells.iter().sum::<f64>());
    }
    client.wait(
        run,
        Step::new(steps),
        CheckpointState::Committed,
        TIMEOUT_MS,
    )?;
    Ok(())
}

/// The newest step that can be restored, every byte verified; none if nothing was saved yet.
fn newest(client: &mut Client) -> Result<Option<Saved>, Box<dyn Error>> {
    let plan = match client.plan(None, TIMEOUT_MS) {
        Ok(plan) => plan,
        Err(fault) if fault.is_nothing_saved() => return Ok(None),
        Err(fault) => return Err(fault.into()),
    };
    let manifest = client.manifest(plan.manifest)?;
    let shard = client.open_shard(&manifest, RANK, Vec::new(), TIMEOUT_MS)?;
    let mut bytes = vec![0; usize::try_from(shard.length())?];
    shard.read_at(0, &mut bytes)?;
    let (cells, rest) = bytes.as_chunks();
    assert!(rest.is_empty(), "only whole cells were saved");
    let cells = cells.iter().map(|cell| f64::from_le_bytes(*cell)).collect();
    Ok(Some((plan.step.get(), cells)))
}

/// One step of heat that spreads over a ring of cells.
fn smooth(cells: &mut [f64]) {
    let (first, mut before) = (cells[0], cells[CELLS - 1]);
    for cell in 0..CELLS {
        let after = *cells.get(cell + 1).unwrap_or(&first);
        let here = cells[cell];
        cells[cell] = 0.5 * here + 0.25 * (before + after);
        before = here;
    }
}
