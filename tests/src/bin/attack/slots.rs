//! Attacks on memory that a daemon gives out: what a trainer or a reader does with its descriptors, and how much of it one tenant has.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FallocateFlags;
use storaged_arena::recv_frame;
use storaged_sdk::wire::local::{BoardKind, Reply, Request};
use storaged_sdk::wire::{Digest, Namespace, Rank, decode};
use storaged_tests::clients::Clients;
use storaged_tests::hostile::{as_nobody, call};

use crate::enemy::{Granted, Saving, acquire, commit, greeted, say, seal, trainer};
use crate::scene::{BUDGET, Scene};
use crate::trial::ROUNDS;

const SLOT: u64 = 8 << 20;

/// A job of one rank with a slot that is filled and not sealed yet.
fn filled(scene: &Scene, job: &str) -> Result<(Saving, Granted)> {
    let mut saving = trainer(&scene.blue[0], job, 1)?;
    let granted = acquire(&mut saving.stream, SLOT)?;
    let piece = vec![7; 1 << 20];
    for at in (0..SLOT).step_by(piece.len()) {
        rustix::io::pwrite(&granted.memory, &piece, at)?;
    }
    Ok((saving, granted))
}

const AS_SEALED: &str = "read back as they were sealed";
const WRONG: &str = "WRONG BYTES";

/// Whether a reader is given right bytes, wrong ones, or an error.
fn reads_back(clients: &Clients, expected: u8) -> String {
    let read = || -> Result<Vec<u8>> {
        let mut reader = clients.reader(0)?;
        let plan = reader.plan(None, 5_000)?;
        let manifest = reader.manifest(plan.manifest)?;
        let shard = reader.open_shard(&manifest, Rank::new(0), Vec::new(), 5_000)?;
        let mut got = vec![0; 4096];
        shard.read_at(SLOT / 2, &mut got)?;
        Ok(got)
    };
    match read() {
        Ok(got) if got.iter().all(|byte| *byte == expected) => AS_SEALED.into(),
        Ok(_) => WRONG.into(),
        Err(error) => format!("an error: {}", error.root_cause()),
    }
}

/// Pages of a slot are given back to the system before it is sealed: what was allocated so that no write fails later.
pub fn holes_in_a_slot(scene: &Scene) -> Result<String> {
    let (punched, then) = as_nobody(|| {
        let (mut saving, granted) = filled(scene, "holes")?;
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(&granted.memory, how, SLOT / 4, SLOT / 2);
        let left = rustix::fs::fstat(&granted.memory)?.st_blocks;
        seal(&mut saving.stream, granted.slot, SLOT)?;
        commit(&mut saving.stream, saving.run)?;
        let expected = if punched.is_ok() { 0 } else { 7 };
        let back = reads_back(&scene.job("holes")?, expected);
        Ok((format!("{punched:?}, {left} blocks are left"), back))
    })?;
    scene.endure(ROUNDS)?;
    ensure!(then != WRONG, "punched {punched}: {then}");
    Ok(format!("holes: {punched}; after the seal {then}"))
}

/// A sealed shard is written to by its own trainer: a reader never takes it for what was sealed.
pub fn writes_after_the_seal(scene: &Scene) -> Result<String> {
    let (written, then) = as_nobody(|| {
        let (mut saving, granted) = filled(scene, "rewrites")?;
        seal(&mut saving.stream, granted.slot, SLOT)?;
        commit(&mut saving.stream, saving.run)?;
        let written = rustix::io::pwrite(&granted.memory, &[9; 8192], SLOT / 2);
        Ok((written, reads_back(&scene.job("rewrites")?, 7)))
    })?;
    scene.endure(ROUNDS)?;
    ensure!(then != WRONG, "written {written:?}: {then}");
    Ok(format!("written: {written:?}; then {then}"))
}

/// What a reader on this connection is given of rank 0 of the newest step.
fn opened(scene: &Scene, job: &str) -> Result<(UnixStream, OwnedFd)> {
    let manifest = scene.job(job)?.reader(0)?.plan(None, 20_000)?.manifest;
    let mut stream = greeted(&scene.blue[0], job)?;
    say(&mut stream, &open_shard(manifest))?;
    let (body, memory) = recv_frame(&mut stream, 1 << 20)?;
    let reply: Reply = decode("reply", &body)?;
    Ok((stream, memory.with_context(|| format!("{reply:?}"))?))
}

pub fn open_shard(manifest: Digest) -> Request {
    Request::OpenShard {
        manifest,
        rank: Rank::new(0),
        ranges: Vec::new(),
        timeout_ms: 5_000,
        without: None,
        withheld: None,
        early: None,
    }
}

/// A reader changes what it was given to read, by all the ways that there are.
pub fn writes_of_a_reader(scene: &Scene) -> Result<String> {
    let job = "reads";
    as_nobody(|| {
        let (mut saving, granted) = filled(scene, job)?;
        seal(&mut saving.stream, granted.slot, SLOT)?;
        commit(&mut saving.stream, saving.run)?;
        let (_stream, memory) = opened(scene, job)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let ways = [
            rustix::io::pwrite(memory.as_fd(), b"spoilt", 0).map(drop),
            rustix::fs::fallocate(&memory, hole, 0, SLOT),
            rustix::fs::ftruncate(&memory, 0),
            rustix::fs::fchmod(&memory, rustix::fs::Mode::from_raw_mode(0o666)),
        ];
        ensure!(ways.iter().all(Result::is_err), "{ways:?}");
        let back = reads_back(&scene.job(job)?, 7);
        ensure!(back == AS_SEALED, "{back}");
        Ok(())
    })?;
    scene.endure(ROUNDS)?;
    Ok("writing, punching, cutting and chmod all fail".into())
}

/// Descriptors are opened once more through /proc, for more than they were given for.
pub fn descriptors_reopened(scene: &Scene) -> Result<String> {
    let job = "reopens";
    let seen = as_nobody(|| {
        let (mut saving, granted) = filled(scene, job)?;
        seal(&mut saving.stream, granted.slot, SLOT)?;
        commit(&mut saving.stream, saving.run)?;
        let (_stream, memory) = opened(scene, job)?;
        let own = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let reopened = std::fs::File::options().write(true).open(own);
        ensure!(reopened.is_err(), "a reader opened it for writing");
        Ok(format!("{:?}", reopened.map(drop)))
    })?;
    scene.endure(ROUNDS)?;
    Ok(format!("a reader's descriptor for writing: {seen}"))
}

/// Slots of this size until there are none for a tenant.
const PIECE: u64 = 32 << 20;

/// One tenant takes all that it gets, and goes; the other saves meanwhile, and has most of it after.
pub fn all_memory_taken(scene: &Scene) -> Result<String> {
    let held = as_nobody(|| {
        let mut held = Vec::new();
        for which in 0..2 * BUDGET / PIECE {
            let mut saving = trainer(&scene.blue[0], &format!("hog{which}"), 1)?;
            let Ok(granted) = acquire(&mut saving.stream, PIECE) else {
                break;
            };
            held.push((saving, granted));
        }
        Ok(held)
    })?;
    let taken = held.len() as u64 * PIECE;
    scene.endure(ROUNDS)?;
    drop(held);
    let mut later = (*scene.system).clone();
    later.namespace = Namespace::new("later")?;
    let mut trainers = later.trainers(1)?.1;
    scene.until("the memory of those who are gone", || {
        let slot = trainers[0].acquire(BUDGET * 3 / 4, 2_000)?;
        Ok(trainers[0].release(&slot)?)
    })?;
    drop(trainers);
    later
        .reader(0)?
        .drop_job(storaged_sdk::WithTrainers::Too, 20_000)?;
    Ok(format!("{} of {} MiB taken", taken >> 20, BUDGET >> 20))
}

/// Bytes of memory behind descriptors.
fn behind(kept: &[OwnedFd]) -> Result<u64> {
    let blocks = |fd: &OwnedFd| Ok(u64::try_from(rustix::fs::fstat(fd)?.st_blocks)?);
    let all = kept.iter().map(blocks).sum::<Result<u64>>()?;
    Ok(all * 512)
}

/// A slot is taken, or a shard is opened, its descriptor is kept, and all else goes, again and again: the budget has the memory back each time, and so must the node.
pub fn descriptors_kept(scene: &Scene) -> Result<String> {
    let kept = as_nobody(|| {
        let mut kept = Vec::new();
        while kept.len() as u64 * PIECE < 2 * BUDGET {
            let mut saving = trainer(&scene.blue[0], "keeps", 1)?;
            kept.push(acquire(&mut saving.stream, PIECE)?.memory);
        }
        let (mut saving, granted) = filled(scene, "keeps")?;
        seal(&mut saving.stream, granted.slot, SLOT)?;
        commit(&mut saving.stream, saving.run)?;
        let (_, read) = opened(scene, "keeps")?;
        kept.extend([granted.memory, read]);
        let mut job = scene.job("keeps")?.reader(0)?;
        job.drop_job(storaged_sdk::WithTrainers::Too, 20_000)?;
        Ok(kept)
    })?;
    scene.endure(ROUNDS)?;
    scene.until("the memory behind descriptors that were kept", || {
        let left = behind(&kept)?;
        ensure!(left == 0, "{left} bytes are left");
        Ok(())
    })?;
    Ok(format!(
        "{} descriptors of slots were kept, with no memory behind them",
        kept.len()
    ))
}

/// Trainers that acquire and never seal.
pub fn acquired_never_sealed(scene: &Scene) -> Result<String> {
    let held = as_nobody(|| {
        let all = (0..24).map(|which| filled(scene, &format!("idle{which}")));
        all.collect::<Result<Vec<_>>>()
    })?;
    scene.endure(2 * ROUNDS)?;
    Ok(format!("{} slots of {} MiB", held.len(), SLOT >> 20))
}

/// Boards, which outlive whoever writes them, until there are none; the job that has them is dropped.
pub fn boards_without_end(scene: &Scene) -> Result<String> {
    let (job, request) = ("boards", |rank| Request::Board {
        rank: Rank::new(rank),
        kind: BoardKind::Batches,
        bytes: 1 << 20,
    });
    let (count, end) = as_nobody(|| {
        let mut stream = trainer(&scene.blue[0], job, 4096)?.stream;
        for rank in 0..4096 {
            match call(&mut stream, &request(rank))? {
                Reply::SlotGranted { .. } => {}
                Reply::Refused(refusal) => return Ok((rank, format!("{:?}", refusal.code))),
                other => bail!("expected a board, got {other:?}"),
            }
        }
        Ok((4096, "none was refused".into()))
    })?;
    scene.endure(ROUNDS)?;
    let mut own = scene.system.reader(0)?;
    own.board(Rank::new(0), BoardKind::Steps, 1 << 20)
        .context("a board of the other tenant")?;
    as_nobody(|| {
        let mut reader = scene.job(job)?.reader(0)?;
        reader.drop_job(storaged_sdk::WithTrainers::Too, 20_000)?;
        Ok(())
    })?;
    Ok(format!("{count} boards, then {end}"))
}
