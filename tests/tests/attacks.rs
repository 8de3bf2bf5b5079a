//! What hostile programs of the same machine do to a daemon, with real processes: they speak the local protocol themselves, where the SDK is too
//! polite.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged::cluster::Hosts;
use storaged_arena::{recv_frame, send_frame};
use storaged_sdk::wire::local::{ByteRange, DurableWish, Reply, Request};
use storaged_sdk::wire::{CheckpointState, Rank, RefusalCode, RunId, Step, decode, encode};
use storaged_tests::hostile::{as_nobody, begin_frame, call, hello, open_to_all, refusal};
use storaged_tests::system::{System, executable, shards, wait};

fn resident(system: &System) -> Result<u64> {
    Ok(system.cluster.resident(0)?.now)
}

fn one_node() -> Result<System> {
    let mut system = System::prepared(1, None, "")?;
    // A socket that all users reach, because two of them may use it.
    let directory = system.cluster.socket(0);
    let directory = directory.parent().context("a directory")?.display();
    let tenant = format!("[[tenants]]\ndirectory = \"{directory}\"\nuids = [0, 4242]\n");
    system.cluster.configure(0, &tenant)?;
    system.cluster.start_all()?;
    open_to_all(&system)?;
    Ok(system)
}

/// A job saves a step, and reads it back.
fn saves(system: &System, step: u64) -> Result<()> {
    let (run, mut trainers) = system.trainers(1)?;
    let expected = shards(1, step);
    system.save(&mut trainers, step, &expected, DurableWish::Never)?;
    system.wait(0, run, step, CheckpointState::Committed)?;
    system.restore(&[0], step, &expected).map(drop)
}

#[test]
fn who_may_not_use_the_socket_takes_no_memory_and_no_places() -> Result<()> {
    let system = one_node()?;
    saves(&system, 1)?;
    let socket = system.sockets[0].clone();
    let before = resident(&system)?;
    let held = as_nobody(|| {
        let frames = (0..24).map(|_| begin_frame(&socket, 63 << 20, 62 << 20));
        let mut held: Vec<UnixStream> = frames.flatten().collect();
        // More than there are places for; the kernel's queue has an end too.
        for _ in 0..1200 {
            let Ok(stream) = UnixStream::connect(&socket) else {
                break;
            };
            held.push(stream);
        }
        Ok(held)
    })?;
    let most = resident(&system)?;
    ensure!(
        most < before + (16 << 20),
        "{before} bytes were resident, and {most} in the attack"
    );
    for step in 2..5 {
        saves(&system, step)?;
    }
    drop(held);
    Ok(())
}

#[test]
fn who_may_not_use_the_socket_is_told_so() -> Result<()> {
    let system = one_node()?;
    let socket = system.sockets[0].clone();
    let said = as_nobody(|| {
        let mut stream = UnixStream::connect(&socket)?;
        call(&mut stream, &hello("job", b"")?)
    })?;
    ensure!(refusal(said)? == RefusalCode::WrongUser);
    Ok(())
}

#[test]
fn nothing_large_is_read_before_a_hello() -> Result<()> {
    let system = one_node()?;
    let mut stream = begin_frame(&system.sockets[0], 63 << 20, 1 << 20)?;
    let (body, _) = recv_frame(&mut stream, 1 << 20)?;
    ensure!(refusal(decode("reply", &body)?)? == RefusalCode::Malformed);
    // And the connection ends.
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    ensure!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
    Ok(())
}

/// Frames that never end, of a user who may send them: they go after a while, and what they took.
#[test]
fn frames_that_do_not_end_are_cut() -> Result<()> {
    let system = one_node()?;
    saves(&system, 1)?;
    let before = resident(&system)?;
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut stream = UnixStream::connect(&system.sockets[0])?;
        let welcome = call(&mut stream, &hello("hostile", b"of somebody hostile")?)?;
        ensure!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
        // The start of a commit: the only request that may be long.
        let mut start = (60_u32 << 20).to_le_bytes().to_vec();
        start.extend([0x82, 0x05, 0x84, 0x01, 0x5a, 0x03, 0x00, 0x00, 0x00]);
        stream.write_all(&start)?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        let piece = vec![0; 1 << 20];
        for _ in 0..30 {
            if stream.write_all(&piece).is_err() {
                break;
            }
        }
        held.push(stream);
    }
    let most = resident(&system)?;
    ensure!(
        most < before + (80 << 20),
        "{before} bytes were resident, {most} in the attack"
    );
    saves(&system, 2)?;
    for mut stream in held {
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut rest = Vec::new();
        // Cut: with an answer or without, but not left open.
        let ended = stream.read_to_end(&mut rest);
        let open = ended.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        ensure!(!open, "a frame that does not end holds its connection");
    }
    wait("what they took", || {
        let now = resident(&system)?;
        ensure!(now < before + (24 << 20), "{now} bytes after {before}");
        Ok(())
    })
}

/// Every other request is short: a list of millions of ranges is not read, let alone gone through by the only loop.
#[test]
fn a_long_list_of_ranges_is_refused_before_it_is_read() -> Result<()> {
    let system = one_node()?;
    saves(&system, 1)?;
    let plan = system.reader(0)?.plan(None, 60_000)?;
    let mut stream = UnixStream::connect(&system.sockets[0])?;
    call(&mut stream, &hello("job", b"a-secret-of-tests")?)?;
    let ranges = (0..2_000_000).map(|at| ByteRange {
        offset: at % 1000,
        length: 1,
    });
    let request = Request::OpenShard {
        manifest: plan.manifest,
        rank: Rank::new(0),
        ranges: ranges.collect(),
        timeout_ms: 1000,
        without: None,
        withheld: None,
        early: None,
    };
    let before = resident(&system)?;
    // The daemon need not read it to its end.
    let _ = send_frame(&mut stream, &encode(&request), None);
    let (body, _) = recv_frame(&mut stream, 1 << 20)?;
    ensure!(refusal(decode("reply", &body)?)? == RefusalCode::Malformed);
    let now = resident(&system)?;
    ensure!(now < before + (16 << 20), "{now} bytes after {before}");
    saves(&system, 2)
}

/// Who guesses tokens gets few answers on a connection.
#[test]
fn wrong_tokens_are_answered_slowly() -> Result<()> {
    let system = one_node()?;
    saves(&system, 1)?;
    let mut stream = UnixStream::connect(&system.sockets[0])?;
    let began = std::time::Instant::now();
    for guess in 0..8_u8 {
        let reply = call(&mut stream, &hello("job", &[guess; 16])?)?;
        ensure!(refusal(reply)? == RefusalCode::WrongToken);
    }
    let took = began.elapsed();
    ensure!(took > Duration::from_secs(1), "8 guesses took {took:?}");
    saves(&system, 2)
}

/// A wait may last ten minutes; whoever has closed its connection meanwhile waits for nothing.
#[test]
fn connections_that_are_closed_while_they_wait_give_their_places_back() -> Result<()> {
    let system = one_node()?;
    saves(&system, 1)?;
    let wait_for_ever = Request::Wait {
        run: RunId::new(7),
        step: Step::new(1 << 40),
        state: CheckpointState::Protected,
        timeout_ms: 600_000,
    };
    let begin = || -> Result<UnixStream> {
        let mut stream = UnixStream::connect(&system.sockets[0])?;
        let welcome = call(&mut stream, &hello("waits", b"of somebody who waits")?)?;
        ensure!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
        send_frame(&mut stream, &encode(&wait_for_ever), None)?;
        Ok(stream)
    };
    // One less than one of several users has places for.
    let all = wait("places at first", || {
        (0..511).map(|_| begin()).collect::<Result<Vec<_>>>()
    })?;
    drop(all);
    let all = wait("places", || {
        (0..511).map(|_| begin()).collect::<Result<Vec<_>>>()
    })?;
    drop(all);
    wait("a save", || saves(&system, 2))
}

/// Requests over HTTP that never end take places from each other: who asks there is answered, and the probe that a daemon's life hangs on asks
/// by another way.
#[test]
fn half_open_requests_over_http_do_not_fail_a_probe() -> Result<()> {
    let system = one_node()?;
    let ops = system.cluster.hosts().ops_address(0);
    let held: Vec<TcpStream> = as_nobody(|| {
        let begin = |_| {
            let mut stream = TcpStream::connect_timeout(&ops, Duration::from_secs(5))?;
            stream.write_all(b"GET /healthz HTTP/1.1\r\n")?;
            std::io::Result::Ok(stream)
        };
        Ok((0..300).map_while(|which| begin(which).ok()).collect())
    })?;
    ensure!(held.len() > 100, "{} half-open requests", held.len());
    for probe in ["live", "ready"] {
        for _ in 0..5 {
            let asked = std::process::Command::new(executable())
                .args(["status", "--probe", probe, "--socket"])
                .arg(&system.sockets[0])
                .output()?;
            ensure!(asked.status.success(), "{asked:?}");
        }
        let mut stream = TcpStream::connect_timeout(&ops, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(4)))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: n0\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    drop(held);
    Ok(())
}

/// A reader that got a shard in place of a copy cannot change it for all others.
#[test]
fn a_reader_cannot_write_to_what_it_reads() -> Result<()> {
    let system = one_node()?;
    saves(&system, 1)?;
    let plan = system.reader(0)?.plan(None, 60_000)?;
    let mut stream = UnixStream::connect(&system.sockets[0])?;
    call(&mut stream, &hello("job", b"a-secret-of-tests")?)?;
    let request = Request::OpenShard {
        manifest: plan.manifest,
        rank: Rank::new(0),
        ranges: Vec::new(),
        timeout_ms: 60_000,
        without: None,
        withheld: None,
        early: None,
    };
    send_frame(&mut stream, &encode(&request), None)?;
    let (_, descriptor) = recv_frame(&mut stream, 1 << 20)?;
    let slot = descriptor.context("the shard")?;
    let written = rustix::io::pwrite(slot.as_fd(), b"spoilt", 0);
    ensure!(written == Err(rustix::io::Errno::BADF), "{written:?}");
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&slot));
    let reopened = as_nobody(|| Ok(std::fs::File::options().write(true).open(&own).is_ok()))?;
    ensure!(!reopened, "another user opened it for writing");
    system.restore(&[0], 1, &shards(1, 1)).map(drop)
}
