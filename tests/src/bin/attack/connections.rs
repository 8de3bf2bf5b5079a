//! Attacks that open connections: many of them, halves of frames, questions without end.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use storaged_sdk::wire::local::{Reply, Request};
use storaged_sdk::wire::{CheckpointState, RefusalCode, RunId, Step};
use storaged_tests::hostile::{as_nobody, begin_frame, call, hello, refusal};
use storaged_tests::system::executable;

use crate::enemy::{connect, flood, greeted, hold, say};
use crate::scene::Scene;
use crate::trial::ROUNDS;

/// Bytes that a frame announces, and that are sent of it.
const ANNOUNCED: u32 = 63 << 20;
const SENT: usize = 62 << 20;
const FRAMES: usize = 24;
/// More than a socket has places for.
const CONNECTIONS: usize = 1_200;
/// More than there are places for HTTP.
const REQUESTS: usize = 600;

/// A user who may not connect begins frames of the longest length and does not end them.
pub fn frames_of_a_stranger(scene: &Scene) -> Result<String> {
    let socket = scene.red();
    let held = as_nobody(|| {
        Ok(std::thread::scope(|scope| {
            let begin = |_| scope.spawn(|| begin_frame(socket, ANNOUNCED, SENT));
            let all: Vec<_> = (0..FRAMES).map(begin).collect();
            let begun = all.into_iter().filter_map(|it| it.join().ok());
            begun.flatten().collect::<Vec<UnixStream>>()
        }))
    })?;
    scene.endure(ROUNDS)?;
    Ok(format!("{} of {FRAMES} frames were begun", held.len()))
}

/// The same of a tenant that may connect, as a commit, which may be long.
pub fn frames_of_a_tenant(scene: &Scene) -> Result<String> {
    let socket = &scene.blue[0];
    let begin = || -> Result<UnixStream> {
        let mut stream = greeted(socket, "halves")?;
        let mut start = (60_u32 << 20).to_le_bytes().to_vec();
        start.extend([0x82, 0x05, 0x84, 0x01, 0x5a, 0x03, 0x00, 0x00, 0x00]);
        stream.write_all(&start)?;
        stream.set_write_timeout(Some(Duration::from_secs(1)))?;
        let piece = vec![0; 1 << 20];
        let _ = (0..55).try_for_each(|_| stream.write_all(&piece));
        Ok(stream)
    };
    let held = as_nobody(|| {
        Ok(std::thread::scope(|scope| {
            let all: Vec<_> = (0..FRAMES).map(|_| scope.spawn(begin)).collect();
            let begun = all.into_iter().filter_map(|it| it.join().ok());
            begun.flatten().collect::<Vec<UnixStream>>()
        }))
    })?;
    scene.endure(ROUNDS)?;
    Ok(format!("{} of {FRAMES} commits were begun", held.len()))
}

/// More connections than there are places, of a user who may have none.
pub fn connections_of_a_stranger(scene: &Scene) -> Result<String> {
    let held = as_nobody(|| Ok(hold(CONNECTIONS, |_| connect(scene.red()))))?;
    let asked = as_nobody(|| call(&mut connect(scene.red())?, &hello("job", b"")?));
    scene.endure(ROUNDS)?;
    let count = held.len();
    drop(held);
    match asked {
        Ok(reply) => ensure!(refusal(reply)? == RefusalCode::WrongUser, "it was let in"),
        Err(error) => return Ok(format!("{count} connections; then {error:#}")),
    }
    Ok(format!("{count} connections, and each was sent away"))
}

/// The same of a tenant, on its own socket: the other tenant and the operator have their own.
pub fn connections_of_a_tenant(scene: &Scene) -> Result<String> {
    let held = as_nobody(|| Ok(hold(CONNECTIONS, |_| connect(&scene.blue[0]))))?;
    // Those that were not sent away are served.
    std::thread::sleep(Duration::from_secs(1));
    scene.endure(ROUNDS)?;
    let descriptors = scene.descriptors()?;
    let count = held.len();
    drop(held);
    scene.until("places on its own socket", || {
        as_nobody(|| greeted(&scene.blue[0], "places").map(drop))
    })?;
    Ok(format!(
        "{count} connections, the daemon had {descriptors} descriptors"
    ))
}

fn probe(socket: &Path, what: &str) -> Result<()> {
    let asked = Command::new(executable())
        .args(["status", "--probe", what, "--socket"])
        .arg(socket)
        .output()?;
    ensure!(asked.status.success(), "probe {what}: {asked:?}");
    Ok(())
}

/// Requests over HTTP that do not end, while a probe asks what a daemon's life hangs on.
pub fn half_open_http(scene: &Scene) -> Result<String> {
    let at = scene.http();
    let held: Vec<TcpStream> = as_nobody(|| {
        let begin = |_| -> std::io::Result<TcpStream> {
            let mut stream = TcpStream::connect_timeout(&at, Duration::from_secs(5))?;
            stream.write_all(b"GET /healthz HTTP/1.1\r\n")?;
            Ok(stream)
        };
        let all = (0..REQUESTS).map_while(|which| begin(which).ok());
        Ok(all.collect())
    })?;
    for _ in 0..5 {
        probe(scene.red(), "live")?;
        probe(scene.red(), "ready")?;
    }
    scene.endure(ROUNDS)?;
    Ok(format!(
        "{} half-open requests, 10 of 10 probes",
        held.len()
    ))
}

/// Guesses of a token on many connections, as fast as they are answered.
pub fn wrong_tokens(scene: &Scene) -> Result<String> {
    let socket = &scene.blue[0];
    let claimed = as_nobody(|| {
        let mut owner = connect(socket)?;
        let said = call(&mut owner, &hello("guessed", b"the-token-of-its-owner")?)?;
        ensure!(matches!(said, Reply::Welcome { .. }), "{said:?}");
        let opened = call(&mut owner, &Request::OpenRun { timeout_ms: 20_000 })?;
        ensure!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
        Ok(owner)
    })?;
    let let_in = std::sync::atomic::AtomicU64::new(0);
    let guesses = flood(scene, 64, |which, stop| {
        let (mut stream, mut guesses) = (connect(socket)?, 0_u64);
        while !stop.load(Ordering::Relaxed) {
            let token = format!("a-guess-of-a-token-{which}-{guesses}");
            let said = call(&mut stream, &hello("guessed", token.as_bytes())?)?;
            if matches!(said, Reply::Welcome { .. }) {
                let_in.fetch_add(1, Ordering::Relaxed);
            }
            guesses += 1;
        }
        Ok(guesses)
    })?;
    drop(claimed);
    let let_in = let_in.into_inner();
    ensure!(let_in == 0, "{let_in} of {guesses} guesses were let in");
    Ok(format!("{guesses} guesses, none of them let in"))
}

/// Questions that many threads ask as fast as they are answered.
fn questions(scene: &Scene, request: &Request) -> Result<String> {
    let socket = &scene.blue[0];
    let answered = flood(scene, 256, |_, stop| {
        let (mut stream, mut answers) = (greeted(socket, "asks")?, 0);
        while !stop.load(Ordering::Relaxed) {
            call(&mut stream, request)?;
            answers += 1;
        }
        Ok(answers)
    })?;
    Ok(format!("{answered} answers on 256 connections"))
}

/// `status` on many connections.
pub fn status_flood(scene: &Scene) -> Result<String> {
    questions(scene, &Request::Status)
}

/// Listings on many connections.
pub fn list_flood(scene: &Scene) -> Result<String> {
    questions(scene, &Request::List { namespace: None })
}

/// Waits of ten minutes for a step that never comes, on as many connections as there are.
pub fn waits_by_the_thousand(scene: &Scene) -> Result<String> {
    let wait = Request::Wait {
        run: RunId::new(7),
        step: Step::new(1 << 40),
        state: CheckpointState::Protected,
        timeout_ms: 600_000,
    };
    let held = as_nobody(|| {
        Ok(hold(1_000, |_| {
            let mut stream = greeted(&scene.blue[0], "waits")?;
            say(&mut stream, &wait)?;
            Ok(stream)
        }))
    })?;
    scene.endure(ROUNDS)?;
    Ok(format!("{} waits", held.len()))
}

/// A frame with more descriptors than it may have.
fn send_descriptors(stream: &UnixStream, count: usize) -> Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = (0..count).map(|_| stream.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = [IoSlice::new(&[1, 0, 0, 0, 0])];
    rustix::net::sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Descriptors that nobody asked for do not stay in the daemon.
pub fn descriptors_with_a_frame(scene: &Scene) -> Result<String> {
    let before = scene.descriptors()?;
    let held = as_nobody(|| {
        let mut held = Vec::new();
        for count in [1, 2, 8, 64, 250].repeat(8) {
            let stream = connect(&scene.blue[0])?;
            send_descriptors(&stream, count)?;
            held.push(stream);
        }
        Ok(held)
    })?;
    scene.endure(ROUNDS)?;
    let most = scene.descriptors()?;
    // Each connection may have its own and that of its process.
    ensure!(
        most <= before + 3 * held.len() + 16,
        "{most} descriptors after {before}"
    );
    drop(held);
    scene.until("the descriptors to be closed", || {
        let now = scene.descriptors()?;
        ensure!(now <= before + 16, "{now} descriptors after {before}");
        Ok(())
    })?;
    Ok(format!("{before} descriptors before, {most} meanwhile"))
}
