//! A hostile program's side of the local protocol. None of its calls lasts for ever.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use storaged_arena::{recv_frame, send_frame};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_sdk::wire::{
    CheckpointState, Namespace, Rank, RunId, SlotId, Step, WorldSize, decode, encode,
};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::hostile::{as_nobody, call, hello};
use storaged_tests::system::shards;

use crate::scene::Scene;
use crate::trial::ROUNDS;

const CALL_WAIT: Duration = Duration::from_secs(60);

/// A connection on which nothing was said.
pub fn connect(socket: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(CALL_WAIT))?;
    stream.set_write_timeout(Some(CALL_WAIT))?;
    Ok(stream)
}

/// A reader's connection to a job.
pub fn greeted(socket: &Path, job: &str) -> Result<UnixStream> {
    let mut stream = connect(socket)?;
    let welcome = call(&mut stream, &hello(job, b"")?)?;
    ensure!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
    Ok(stream)
}

/// What a daemon answers whoever says that it saves as rank 0 of a run.
pub fn say_hello_as_trainer(
    stream: &mut UnixStream,
    job: &str,
    run: RunId,
    world: u32,
) -> Result<Reply> {
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: Namespace::new(job)?,
        token: Vec::new().into(),
        role: Role::Trainer {
            run,
            rank: Rank::new(0),
            world_size: WorldSize::new(world)?,
        },
    };
    call(stream, &hello)
}

/// The connection of rank 0 of a new run of a job with so many ranks.
pub fn trainer(socket: &Path, job: &str, world: u32) -> Result<Saving> {
    let mut stream = greeted(socket, job)?;
    let run = match call(&mut stream, &Request::OpenRun { timeout_ms: 20_000 })? {
        Reply::RunOpened { run } => run,
        other => bail!("expected a run, got {other:?}"),
    };
    let welcome = say_hello_as_trainer(&mut stream, job, run, world)?;
    ensure!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
    Ok(Saving { stream, run })
}

/// A trainer's connection, and its run.
pub struct Saving {
    pub stream: UnixStream,
    pub run: RunId,
}

/// A slot, and the descriptor that came with it.
pub struct Granted {
    pub slot: SlotId,
    pub memory: OwnedFd,
}

/// # Errors
/// If there is none.
pub fn acquire(stream: &mut UnixStream, bytes: u64) -> Result<Granted> {
    let timeout_ms = 2_000;
    say(stream, &Request::AcquireSlot { bytes, timeout_ms })?;
    let (body, memory) = recv_frame(stream, 1 << 20)?;
    match (decode("reply", &body)?, memory) {
        (Reply::SlotGranted { slot, .. }, Some(memory)) => Ok(Granted { slot, memory }),
        (other, _) => bail!("expected a slot, got {other:?}"),
    }
}

/// Seals a slot as the shard of step 1.
pub fn seal(stream: &mut UnixStream, slot: SlotId, length: u64) -> Result<()> {
    let step = Step::new(1);
    let done = call(stream, &Request::SealSlot { slot, step, length })?;
    ensure!(done == Reply::Done, "{done:?}");
    Ok(())
}

/// Commits step 1 with little to say of it, and waits until it is.
pub fn commit(stream: &mut UnixStream, run: RunId) -> Result<()> {
    let request = Request::Commit {
        step: Step::new(1),
        schema: vec![1].into(),
        torch_metadata: Vec::new().into(),
        durable: DurableWish::Never,
    };
    let done = call(stream, &request)?;
    ensure!(done == Reply::Done, "{done:?}");
    let wait = Request::Wait {
        run,
        step: Step::new(1),
        state: CheckpointState::Committed,
        timeout_ms: WAIT_MS,
    };
    let reached = call(stream, &wait)?;
    ensure!(matches!(reached, Reply::Reached { .. }), "{reached:?}");
    Ok(())
}

/// Asks and does not wait for the answer.
pub fn say(stream: &mut UnixStream, request: &Request) -> Result<()> {
    Ok(send_frame(stream, &encode(request), None)?)
}

/// So many connections, or as many as there are; how many.
pub fn hold(count: usize, mut open: impl FnMut(usize) -> Result<UnixStream>) -> Vec<UnixStream> {
    (0..count).map_while(|which| open(which).ok()).collect()
}

/// So many threads of nobody do this again and again, while the honest job goes on; how often all of them did it.
pub fn flood(
    scene: &Scene,
    threads: usize,
    work: impl Fn(usize, &AtomicBool) -> Result<u64> + Sync,
) -> Result<u64> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flooding = as_nobody(|| {
            let spawn = |which| {
                let (work, stop) = (&work, &stop);
                scope.spawn(move || work(which, stop).unwrap_or_default())
            };
            Ok((0..threads).map(spawn).collect::<Vec<_>>())
        })?;
        let endured = scene.endure(ROUNDS);
        stop.store(true, Ordering::Relaxed);
        let done = flooding.into_iter().map(|it| it.join().unwrap_or_default());
        let done = done.sum();
        endured.map(|()| done)
    })
}

/// A hostile job of one rank that has saved a step.
pub struct Saved {
    pub clients: Clients,
    pub trainers: Vec<Trainer>,
}

/// A job of blue's saves a step like any other; it is called as nobody.
pub fn saved(scene: &Scene, name: &str, step: u64, durable: DurableWish) -> Result<Saved> {
    let clients = scene.job(name)?;
    let (run, mut trainers) = clients.trainers(1)?;
    clients.save(&mut trainers, step, &shards(1, step), durable)?;
    let state = match durable {
        DurableWish::Required => CheckpointState::Durable,
        _ => CheckpointState::Committed,
    };
    clients.wait(0, run, step, state)?;
    Ok(Saved { clients, trainers })
}

/// What a hostile job leaves in RAM goes.
pub fn leave(saved: Saved) -> Result<()> {
    let Saved {
        clients, trainers, ..
    } = saved;
    drop(trainers);
    let with = storaged_sdk::WithTrainers::Too;
    clients.reader(0)?.drop_job(with, WAIT_MS)?;
    Ok(())
}
