//! Attacks by requests that are legal and large, or have numbers at the end of their range.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use storaged_arena::recv_frame;
use storaged_sdk::wire::framing::{LOCAL_FRAME_BYTES_MAX, REQUEST_BYTES_MAX};
use storaged_sdk::wire::local::{ByteRange, DurableWish, Reply, Request};
use storaged_sdk::wire::{Digest, Rank, RunId, Step, decode, encode};
use storaged_tests::hostile::{as_nobody, call, hello, refusal};

use crate::enemy::{
    acquire, connect, flood, greeted, leave, saved, say, say_hello_as_trainer, seal, trainer,
};
use crate::scene::Scene;
use crate::trial::ROUNDS;

/// Of a commit's frame beside what describes the checkpoint.
const FRAME_REST: usize = 64;
const MIB: usize = 1 << 20;

fn commit(step: u64, schema: Vec<u8>, torch_metadata: Vec<u8>, durable: DurableWish) -> Request {
    Request::Commit {
        step: Step::new(step),
        schema: schema.into(),
        torch_metadata: torch_metadata.into(),
        durable,
    }
}

/// A trainer's connection to a job of so many ranks, which has sealed a step; the other ranks never do.
fn sealed(scene: &Scene, job: &str, world: u32) -> Result<UnixStream> {
    let mut stream = trainer(&scene.blue[0], job, world)?.stream;
    let granted = acquire(&mut stream, 4096)?;
    seal(&mut stream, granted.slot, 4096)?;
    Ok(stream)
}

/// A step that does not commit is given up after 130 s, and what describes it goes then; or when its job is dropped.
fn give_up(scene: &Scene, job: &str) -> Result<()> {
    as_nobody(|| {
        let mut reader = scene.job(job)?.reader(0)?;
        reader.drop_job(storaged_sdk::WithTrainers::Too, 20_000)?;
        Ok(())
    })
}

/// What a commit of so many bytes in its frame is answered; the checkpoint never commits, because a rank is missing.
fn commit_of(scene: &Scene, job: &str, bytes: usize) -> Result<String> {
    let (stream, answer) = as_nobody(|| {
        let mut stream = sealed(scene, job, 2)?;
        let request = commit(1, vec![7; bytes - FRAME_REST], vec![], DurableWish::Never);
        let answer = call(&mut stream, &request)?;
        Ok((stream, answer))
    })?;
    scene.endure(ROUNDS)?;
    drop(stream);
    give_up(scene, job)?;
    Ok(match answer {
        Reply::Refused(refusal) => format!("refused: {:?}", refusal.code),
        other => format!("{other:?}"),
    })
}

pub fn commit_of_64_mib(scene: &Scene) -> Result<String> {
    commit_of(scene, "longest", LOCAL_FRAME_BYTES_MAX - 1)
}

pub fn commit_of_16_mib(scene: &Scene) -> Result<String> {
    commit_of(scene, "long", 16 * MIB)
}

/// Five jobs of two ranks whose second ranks never come, each with as long a description as it may have.
pub fn five_waiting_commits(scene: &Scene) -> Result<String> {
    let (mut held, mut seen) = (Vec::new(), Vec::new());
    for job in 0..5 {
        let (stream, answer) = as_nobody(|| {
            let mut stream = sealed(scene, &format!("waiting{job}"), 2)?;
            let mut length = 60 * MIB;
            loop {
                // Equal ones would be kept once.
                let request = commit(1, vec![job; length], vec![], DurableWish::Never);
                match call(&mut stream, &request)? {
                    Reply::Refused(_) if length > MIB => length /= 2,
                    Reply::Refused(refusal) => return Ok((stream, format!("{:?}", refusal.code))),
                    _ => return Ok((stream, format!("{} MiB", length / MIB))),
                }
            }
        })?;
        held.push(stream);
        seen.push(answer);
    }
    scene.endure(2 * ROUNDS)?;
    drop(held);
    for job in 0..5 {
        give_up(scene, &format!("waiting{job}"))?;
    }
    Ok(format!("descriptions of {seen:?}"))
}

/// What a trainer says again and again of the one step that it has sealed, each time otherwise.
const AGAIN: u8 = 16;

pub fn commits_again_and_again(scene: &Scene) -> Result<String> {
    let (stream, taken) = as_nobody(|| {
        let mut stream = sealed(scene, "again", 2)?;
        let mut taken = 0;
        for number in 0..AGAIN {
            let request = commit(1, vec![number; 60 * MIB], vec![], DurableWish::Never);
            taken += u32::from(call(&mut stream, &request)? == Reply::Done);
        }
        Ok((stream, taken))
    })?;
    ensure!(taken == 1, "{taken} descriptions of one step were taken");
    scene.endure(ROUNDS)?;
    drop(stream);
    give_up(scene, "again")?;
    Ok(format!("{taken} of {AGAIN} descriptions taken"))
}

fn open_shard(manifest: Digest, count: u64) -> Request {
    let ranges = (0..count).map(|at| ByteRange {
        offset: at % 1000,
        length: 1,
    });
    Request::OpenShard {
        manifest,
        rank: Rank::new(0),
        ranges: ranges.collect(),
        timeout_ms: 5_000,
        without: None,
        withheld: None,
        early: None,
    }
}

/// More ranges than a request has room for.
pub fn millions_of_ranges(scene: &Scene) -> Result<String> {
    let code = as_nobody(|| {
        let saved = saved(scene, "ranges", 1, DurableWish::Never)?;
        let manifest = saved.clients.reader(0)?.plan(None, 20_000)?.manifest;
        let mut stream = greeted(&scene.blue[0], "ranges")?;
        // The daemon need not read it to its end.
        let _ = say(&mut stream, &open_shard(manifest, 4_000_000));
        let (body, _) = recv_frame(&mut stream, MIB)?;
        let code = refusal(decode("reply", &body)?)?;
        leave(saved)?;
        Ok(code)
    })?;
    scene.endure(ROUNDS)?;
    Ok(format!("refused: {code:?}"))
}

/// As many as it has room for, on some connections at once.
pub fn longest_list_of_ranges(scene: &Scene) -> Result<String> {
    let (saved, manifest) = as_nobody(|| {
        let saved = saved(scene, "list", 1, DurableWish::Never)?;
        let manifest = saved.clients.reader(0)?.plan(None, 20_000)?.manifest;
        Ok((saved, manifest))
    })?;
    let each = encode(&open_shard(manifest, 1_000)).len() / 1_000 + 1;
    let request = open_shard(manifest, (REQUEST_BYTES_MAX / each) as u64);
    let asked = AtomicU64::new(0);
    let answered = flood(scene, 8, |_, stop| {
        let mut stream = greeted(&scene.blue[0], "list")?;
        while !stop.load(Ordering::Relaxed) {
            call(&mut stream, &request)?;
            asked.fetch_add(1, Ordering::Relaxed);
        }
        Ok(0)
    });
    answered?;
    as_nobody(|| leave(saved))?;
    Ok(format!("{} lists of 4 MiB", asked.into_inner()))
}

/// The same of a checkpoint that only the durable tier has: each range was once a read from there.
pub fn ranges_of_the_tier(scene: &Scene) -> Result<String> {
    let manifest = as_nobody(|| {
        let saved = saved(scene, "tiered", 1, DurableWish::Required)?;
        let manifest = saved.clients.reader(0)?.plan(None, 20_000)?.manifest;
        leave(saved)?;
        Ok(manifest)
    })?;
    let request = open_shard(manifest, 160_000);
    let asked = AtomicU64::new(0);
    flood(scene, 8, |_, stop| {
        while !stop.load(Ordering::Relaxed) {
            let mut stream = greeted(&scene.blue[0], "tiered")?;
            let opened = call(&mut stream, &request)?;
            asked.fetch_add(
                u64::from(!matches!(opened, Reply::Refused(_))),
                Ordering::Relaxed,
            );
        }
        Ok(0)
    })?;
    let opened = asked.into_inner();
    ensure!(opened > 0, "no shard of the tier was opened");
    Ok(format!("{opened} shards opened by 160,000 ranges each"))
}

/// Namespaces that one tenant opens.
const NAMES: u64 = 20_000;
/// For so long at most.
const OPENING: Duration = Duration::from_secs(30);

pub fn twenty_thousand_runs(scene: &Scene) -> Result<String> {
    let (began, next) = (Instant::now(), AtomicU64::new(0));
    let refused = AtomicU64::new(0);
    let open = |stream: &mut UnixStream, which: u64| -> Result<()> {
        let welcome = call(stream, &hello(&format!("name{which}"), b"")?)?;
        let opened = call(stream, &Request::OpenRun { timeout_ms: 10_000 })?;
        let is_refused =
            matches!(welcome, Reply::Refused(_)) || matches!(opened, Reply::Refused(_));
        refused.fetch_add(u64::from(is_refused), Ordering::Relaxed);
        Ok(())
    };
    let work = || -> Result<()> {
        let mut stream = connect(&scene.blue[0])?;
        while began.elapsed() < OPENING {
            let which = next.fetch_add(1, Ordering::Relaxed);
            if which >= NAMES {
                break;
            }
            open(&mut stream, which)?;
        }
        Ok(())
    };
    as_nobody(|| {
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..16).map(|_| scope.spawn(work)).collect();
            all.into_iter()
                .try_for_each(|it| it.join().expect("it does not panic"))
        })
    })?;
    let took = began.elapsed().as_secs_f64();
    scene.endure(ROUNDS)?;
    let asked = next.into_inner().min(NAMES);
    Ok(format!(
        "{asked} names in {took:.0} s, {} of them refused",
        refused.into_inner()
    ))
}

/// Runs at the end of the range of their numbers: what is opened later still rises.
pub fn huge_run_numbers(scene: &Scene) -> Result<String> {
    let seen = as_nobody(|| {
        let mut stream = connect(&scene.blue[0])?;
        let mut seen = Vec::new();
        for number in [u64::MAX, u64::MAX - 1, 1 << 63] {
            let said = say_hello_as_trainer(&mut stream, "huge", RunId::new(number), 1)?;
            seen.push(match said {
                Reply::Refused(refusal) => format!("{:?}", refusal.code),
                other => bail!("run {number} was let in: {other:?}"),
            });
        }
        let mut stream = greeted(&scene.blue[0], "huge")?;
        let mut last = None;
        for _ in 0..3 {
            let opened = match call(&mut stream, &Request::OpenRun { timeout_ms: 20_000 })? {
                Reply::RunOpened { run } => run,
                other => bail!("expected a run, got {other:?}"),
            };
            ensure!(Some(opened) > last, "run {opened} after {last:?}");
            last = Some(opened);
        }
        Ok(seen)
    })?;
    scene.endure(ROUNDS)?;
    Ok(format!("{seen:?}, and runs that are opened rise"))
}

/// A zstd frame that says it unpacks to 1 GiB of zeros, and does: 8,192 blocks of 128 KiB, of 4 bytes each.
fn bomb() -> Vec<u8> {
    const BLOCK: u32 = 128 << 10;
    const BLOCKS: u32 = 8_192;
    const RUN_OF_ONE_BYTE: u32 = 1;
    let mut bytes = vec![0x28, 0xb5, 0x2f, 0xfd];
    // One segment is no choice (its window is all of it): 8 bytes of length, and a window of 8 MiB.
    bytes.extend([0b1100_0000, 13 << 3]);
    bytes.extend((u64::from(BLOCK) * u64::from(BLOCKS)).to_le_bytes());
    for block in 0..BLOCKS {
        let last = u32::from(block + 1 == BLOCKS);
        let header = BLOCK << 3 | RUN_OF_ONE_BYTE << 1 | last;
        bytes.extend(&header.to_le_bytes()[..3]);
        bytes.push(0);
    }
    // It may be unpacked to a thousand times its length: a frame that is skipped makes it long enough.
    bytes.extend([0x50, 0x2a, 0x4d, 0x18]);
    bytes.extend((1_u32 << 20).to_le_bytes());
    bytes.resize(bytes.len() + (1 << 20), 0);
    bytes
}

fn commit_packed(scene: &Scene, job: &str, request: &Request) -> Result<String> {
    let (stream, said) = as_nobody(|| {
        let mut stream = sealed(scene, job, 1)?;
        let said = call(&mut stream, request)?;
        Ok((stream, said))
    })?;
    // It is uploaded, tried again and given up meanwhile.
    scene.endure(4 * ROUNDS)?;
    drop(stream);
    give_up(scene, job)?;
    Ok(format!("answered {said:?}"))
}

pub fn metadata_that_unpacks_to_a_gib(scene: &Scene) -> Result<String> {
    let request = commit(1, vec![1], bomb(), DurableWish::Required);
    commit_packed(scene, "metadata", &request)
}

pub fn schema_that_unpacks_to_a_gib(scene: &Scene) -> Result<String> {
    let request = commit(1, bomb(), vec![], DurableWish::Required);
    commit_packed(scene, "schema", &request)
}
