//! The client against a daemon's stand-in that says what each test wants, also what no daemon should say.

mod early;
mod fake;

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fake::{CHUNK_BYTES, accept, hear, listen, options, say, welcome};
use storaged_arena::Slot;
use storaged_codec::{Fingerprint, digest, fingerprint, leaf_digest, root_digest};
use storaged_sdk::wire::local::{Reply, Request, Rung};
use storaged_sdk::wire::manifest::Manifest;
use storaged_sdk::wire::{
    ChunkSize, Enclosed, Geometry, ManifestBytes, Namespace, NodeName, Owner, Rank, Refusal,
    RefusalCode, RunId, ShardEntry, SlotId, Step, WorldSize,
};
use storaged_sdk::{Client, ClientError, ConnectOptions, Patience, RestoredShard, Trainer};

/// Listens in a fresh directory and serves one connection with `serve`.
fn daemon(
    serve: impl FnOnce(&mut UnixStream) + Send + 'static,
) -> (tempfile::TempDir, ConnectOptions, JoinHandle<()>) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let listener = listen(&socket);
    let thread = std::thread::spawn(move || serve(&mut accept(&listener)));
    (directory, options(socket), thread)
}

#[test]
fn nobody_listening_is_said_with_what_to_do() {
    let error = Client::connect(&options("/nowhere/s".into())).unwrap_err();
    assert!(matches!(error, ClientError::Unavailable { .. }));
    assert!(error.to_string().contains("STORAGED_SOCKET"));
}

#[test]
fn a_daemon_that_says_nothing_costs_the_limit_and_not_the_daemons_time() {
    let (_directory, options, thread) = daemon(|stream| {
        welcome(stream);
        hear(stream);
        std::thread::sleep(Duration::from_secs(3));
    });
    let (mut client, _) = Client::connect(&options).unwrap();
    let started = Instant::now();
    let error = client.open_run(300).unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }));
    assert!(started.elapsed() < Duration::from_millis(2900));
    thread.join().unwrap();
}

#[test]
fn a_hello_that_takes_long_may_wait_for_the_durable_tier() {
    let of = |request| ClientError::TimedOut {
        request,
        limit_ms: 700,
    };
    assert!(of("hello").to_string().contains("durable tier"));
    assert!(!of("plan").to_string().contains("durable tier"));
}

#[test]
fn hello_and_a_full_queue_count_against_one_limit() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    // Nobody accepts: hellos stay unanswered, and after some hundreds of them nobody can connect at all.
    let _listener = UnixListener::bind(&socket).unwrap();
    let mut kept = Vec::new();
    for attempt in 0..2 {
        let started = Instant::now();
        let patience = Patience::of(Duration::from_millis(300));
        let error = Client::connect_with(&options(socket.clone()), patience).unwrap_err();
        assert!(matches!(error, ClientError::TimedOut { .. }), "{attempt}");
        assert!(started.elapsed() < Duration::from_secs(5), "{attempt}");
        kept.extend(fill_the_queue(&socket));
    }
    assert!(!kept.is_empty());
}

/// Connects until the listener's queue has no room.
fn fill_the_queue(socket: &std::path::Path) -> Vec<UnixStream> {
    let full = || Err(std::io::ErrorKind::WouldBlock.into());
    std::iter::from_fn(|| storaged_arena::connect_waiting(socket, &mut || full()).ok()).collect()
}

#[test]
fn a_caller_that_is_called_away_goes_at_once() {
    let (_directory, options, thread) = daemon(|stream| {
        welcome(stream);
        hear(stream);
        std::thread::sleep(Duration::from_secs(2));
    });
    let called = Arc::new(AtomicBool::new(false));
    let heard = called.clone();
    let patience = Patience::default().unless(move || heard.load(Ordering::Relaxed));
    let (mut client, _) = Client::connect_with(&options, patience).unwrap();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        called.store(true, Ordering::Relaxed);
    });
    let started = Instant::now();
    let error = client.open_run(60_000).unwrap_err();
    assert!(matches!(error, ClientError::CalledAway { .. }));
    assert!(started.elapsed() < Duration::from_millis(1900));
    thread.join().unwrap();
}

#[test]
fn garbage_and_half_a_frame_are_errors() {
    let (_directory, options, thread) = daemon(|stream| {
        hear(stream);
        stream.write_all(&[3, 0, 0, 0, 0xff, 0xff, 0xff]).unwrap();
    });
    assert!(matches!(
        Client::connect(&options),
        Err(ClientError::Wire(_))
    ));
    thread.join().unwrap();
    let (_directory, options, thread) = daemon(|stream| {
        hear(stream);
        stream.write_all(&[200, 0, 0, 0, 1]).unwrap();
    });
    assert!(matches!(
        Client::connect(&options),
        Err(ClientError::Broken { .. })
    ));
    thread.join().unwrap();
}

#[test]
fn a_refusal_and_a_wrong_answer_are_told_apart() {
    let (_directory, options, thread) = daemon(|stream| {
        hear(stream);
        let refusal = Refusal::new(
            RefusalCode::Version,
            "expected version 2, got 1: update the client",
        );
        say(stream, &Reply::Refused(refusal), None);
    });
    let error = Client::connect(&options).unwrap_err();
    assert!(matches!(error, ClientError::Refused(refusal) if refusal.code == RefusalCode::Version));
    thread.join().unwrap();
    let (_directory, options, thread) = daemon(|stream| {
        hear(stream);
        say(stream, &Reply::Done, None);
    });
    assert!(matches!(
        Client::connect(&options),
        Err(ClientError::Protocol { .. })
    ));
    thread.join().unwrap();
}

#[test]
fn a_slot_is_mapped_once_and_found_again_without_a_descriptor() {
    let (_directory, options, thread) = daemon(|stream| {
        welcome(stream);
        let slot = Slot::create(8192).unwrap();
        for (number, descriptor) in [(1, true), (1, false), (2, false)] {
            assert!(matches!(
                hear(stream),
                Request::AcquireSlot { bytes: 5000, .. }
            ));
            let slot_id = SlotId::new(number);
            let reply = Reply::SlotGranted {
                slot: slot_id,
                capacity: 8192,
                descriptor,
            };
            say(stream, &reply, descriptor.then_some(&slot));
        }
        let mut seen = [0; 4];
        slot.read_at(100, &mut seen).unwrap();
        assert_eq!(&seen, b"here");
    });
    let world_size = WorldSize::new(1).unwrap();
    let mut trainer = Trainer::connect(options, RunId::new(1), Rank::new(0), world_size).unwrap();
    let first = trainer.acquire(5000, 1000).unwrap();
    first.copy_in(100, b"here").unwrap();
    assert!(first.copy_in(8190, b"over").is_err());
    let again = trainer.acquire(5000, 1000).unwrap();
    assert_eq!(again.mapping().start(), first.mapping().start());
    assert!(matches!(
        trainer.acquire(5000, 1000),
        Err(ClientError::Protocol { .. })
    ));
    thread.join().unwrap();
}

#[test]
fn a_slot_that_comes_back_after_many_others_is_mapped_again() {
    let numbers = || [1].into_iter().chain(2..20).chain([1, 1]);
    let (copied, is_copied) = std::sync::mpsc::channel();
    let (_directory, options, thread) = daemon(move |stream| {
        welcome(stream);
        let slots: Vec<Slot> = (0..20).map(|_| Slot::create(8192).unwrap()).collect();
        for number in numbers() {
            assert!(matches!(hear(stream), Request::AcquireSlot { .. }));
            let reply = Reply::SlotGranted {
                slot: SlotId::new(number),
                capacity: 8192,
                descriptor: true,
            };
            say(stream, &reply, Some(&slots[number as usize]));
        }
        is_copied.recv().unwrap();
        let mut seen = [0; 4];
        slots[1].read_at(100, &mut seen).unwrap();
        assert_eq!(&seen, b"here");
    });
    let world_size = WorldSize::new(1).unwrap();
    let mut trainer = Trainer::connect(options, RunId::new(1), Rank::new(0), world_size).unwrap();
    let acquired: Vec<_> = numbers()
        .map(|_| trainer.acquire(5000, 1000).unwrap())
        .collect();
    let [.., back, same] = &acquired[..] else {
        panic!("more were acquired");
    };
    assert_eq!(back.mapping().start(), same.mapping().start());
    same.copy_in(100, b"here").unwrap();
    copied.send(()).unwrap();
    thread.join().unwrap();
}

/// A manifest of one rank with these bytes.
fn manifest_of(bytes: &[u8]) -> (ManifestBytes, Vec<storaged_codec::Digest>) {
    let chunk = ChunkSize::new(CHUNK_BYTES).unwrap();
    let chunks = (0u64..).zip(bytes.chunks(chunk.bytes()));
    let leaves: Vec<_> = chunks
        .map(|(index, block)| leaf_digest(block, index))
        .collect();
    let length = bytes.len() as u64;
    let manifest = Manifest {
        version: Manifest::VERSION,
        namespace: Namespace::new("job").unwrap(),
        owner: Owner::of_token(b""),
        run: RunId::new(1),
        step: Step::new(1),
        world_size: WorldSize::new(1).unwrap(),
        epoch: 0,
        geometry: Geometry::new(1, 1).unwrap(),
        chunk,
        shards: vec![ShardEntry {
            rank: Rank::new(0),
            node: NodeName::new("n").unwrap(),
            length,
            root: root_digest(&leaves, length, chunk),
        }],
        groups: Vec::new(),
        schema: Enclosed::nothing(),
        torch_metadata: Enclosed::nothing(),
    };
    (manifest.seal().unwrap(), leaves)
}

#[test]
fn a_flipped_byte_and_wrong_leaves_are_never_returned() {
    let bytes: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
    let (manifest, leaves) = manifest_of(&bytes);
    let held = bytes.clone();
    let (_directory, options, thread) = daemon(move |stream| {
        welcome(stream);
        let chunk = ChunkSize::new(CHUNK_BYTES).unwrap();
        let length = held.len() as u64;
        let slot = Slot::create(length).unwrap();
        slot.write_at(0, &held).unwrap();
        slot.write_at(70_000, &[held[70_000] ^ 1]).unwrap();
        let mut wrong = leaves.clone();
        wrong[0] = digest(b"something else");
        for leaves in [leaves, wrong] {
            hear(stream);
            let reply = Reply::ShardOpened {
                length,
                chunk,
                leaves: leaves.into(),
                rung: Rung::OwnRam,
                fingerprints: None,
            };
            say(stream, &reply, Some(&slot));
        }
    });
    let (mut client, _) = Client::connect(&options).unwrap();
    let shard = client
        .open_shard(&manifest, Rank::new(0), Vec::new(), 1000)
        .unwrap();
    let mut out = vec![0; 65_536];
    shard.read_at(0, &mut out).unwrap();
    assert_eq!(out, bytes[..65_536]);
    let mut untouched = vec![7; 10];
    let error = shard.read_at(65_540, &mut untouched).unwrap_err();
    assert!(matches!(error, ClientError::Corrupt { chunk: 1, .. }));
    assert_eq!(untouched, [7; 10]);
    // A chunk that is wanted whole is verified where it is wanted: nothing of a wrong one stays, and those before it do.
    let mut across = vec![7; 131_072];
    let error = shard.read_at(10, &mut across).unwrap_err();
    assert!(matches!(error, ClientError::Corrupt { chunk: 1, .. }));
    assert_eq!(across[..65_526], bytes[10..65_536]);
    assert!(across[65_526..131_062].iter().all(|byte| *byte == 0));
    let mut rest = vec![0; 200_000 - 131_070];
    assert!(shard.read_at(131_070, &mut rest).is_err());
    shard.read_at(131_072, &mut rest[2..]).unwrap();
    assert_eq!(rest[2..], bytes[131_072..]);
    let (mut left, mut right) = (vec![0; 1000], vec![0; 60_000]);
    let mut parts = [(10, &mut left[..]), (131_072, &mut right[..])];
    shard.read_many(&mut parts, 2.try_into().unwrap()).unwrap();
    assert_eq!(
        (&left[..], &right[..]),
        (&bytes[10..1010], &bytes[131_072..191_072])
    );
    assert!(matches!(
        shard.read_at(199_999, &mut [0; 2]),
        Err(ClientError::Outside { .. })
    ));
    let again = client.open_shard(&manifest, Rank::new(0), Vec::new(), 1000);
    assert!(matches!(again, Err(ClientError::WrongLeaves { .. })));
    thread.join().unwrap();
}

/// What a daemon may say of a shard that it gives from `rung`, with these fingerprints.
fn opened(
    bytes: Vec<u8>,
    rung: Rung,
    fingerprints: Option<Vec<Fingerprint>>,
) -> (tempfile::TempDir, RestoredShard) {
    let right: Vec<u8> = pattern();
    let (manifest, leaves) = manifest_of(&right);
    let (directory, options, thread) = daemon(move |stream| {
        welcome(stream);
        hear(stream);
        let slot = Slot::create(bytes.len() as u64).unwrap();
        slot.write_at(0, &bytes).unwrap();
        let reply = Reply::ShardOpened {
            length: bytes.len() as u64,
            chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
            leaves: leaves.into(),
            rung,
            fingerprints: fingerprints.map(Into::into),
        };
        say(stream, &reply, Some(&slot));
    });
    let (mut client, _) = Client::connect(&options).unwrap();
    let shard = client.open_shard(&manifest, Rank::new(0), Vec::new(), 1000);
    thread.join().unwrap();
    (directory, shard.unwrap())
}

fn pattern() -> Vec<u8> {
    (0..200_000u32).map(|at| (at % 251) as u8).collect()
}

fn prints_of(bytes: &[u8]) -> Vec<Fingerprint> {
    bytes
        .chunks(CHUNK_BYTES as usize)
        .map(fingerprint)
        .collect()
}

fn is_corrupt(shard: &RestoredShard, wrong: u64) -> bool {
    let read = shard.read_at(0, &mut vec![0; 200_000]);
    matches!(read, Err(ClientError::Corrupt { chunk, .. }) if chunk == wrong)
}

#[test]
fn what_never_left_the_node_is_compared_with_fingerprints() {
    let right = pattern();
    let mut out = vec![0; 200_000];
    let (_directory, shard) = opened(right.clone(), Rung::OwnRam, Some(prints_of(&right)));
    shard.read_at(0, &mut out).unwrap();
    assert_eq!(out, right);
    // Every bit of a byte, in the first chunk and in the short last one.
    for bit in 0..8 {
        for at in [70_000, 199_999] {
            let mut wrong = right.clone();
            wrong[at] ^= 1 << bit;
            let (_directory, shard) = opened(wrong, Rung::OwnRam, Some(prints_of(&right)));
            let chunk = at as u64 / u64::from(CHUNK_BYTES);
            assert!(is_corrupt(&shard, chunk), "bit {bit} of byte {at}");
        }
    }
}

#[test]
fn a_fingerprint_that_has_rotted_costs_a_digest_and_no_bytes() {
    let right = pattern();
    let mut prints = prints_of(&right);
    prints[1] = Fingerprint::from_bytes([1; 16]);
    let (_directory, shard) = opened(right.clone(), Rung::OwnRam, Some(prints));
    let mut out = vec![0; 200_000];
    shard.read_at(0, &mut out).unwrap();
    assert_eq!(out, right);
}

/// Bytes from elsewhere, and those of a reader who asks for it, have the manifest's digests, whatever fingerprints come with them.
#[test]
fn fingerprints_of_other_bytes_pass_only_for_own_ram() {
    let mut wrong = pattern();
    wrong[70_000] ^= 1;
    let theirs = prints_of(&wrong);
    for rung in [Rung::PeerRam, Rung::Decoded, Rung::Durable] {
        let (_directory, shard) = opened(wrong.clone(), rung, Some(theirs.clone()));
        assert!(is_corrupt(&shard, 1), "{rung:?}");
    }
    let (_directory, shard) = opened(wrong.clone(), Rung::OwnRam, Some(theirs.clone()));
    assert!(is_corrupt(&shard.by_digests(), 1));
    // A table that does not fit the shard is none.
    for count in [0, 3, 5] {
        let mut prints = theirs.clone();
        prints.resize(count, Fingerprint::ZERO);
        let (_directory, shard) = opened(wrong.clone(), Rung::OwnRam, Some(prints));
        assert!(is_corrupt(&shard, 1), "{count} fingerprints");
    }
}

#[test]
fn threads_share_the_parts_and_a_wrong_chunk_or_the_caller_ends_all_of_them() {
    const LENGTH: usize = 24 << 20;
    const PART: usize = 1 << 20;
    let bytes: Vec<u8> = (0..LENGTH).map(|at| (at % 251) as u8).collect();
    let (manifest, leaves) = manifest_of(&bytes);
    let held = bytes.clone();
    let (_directory, options, thread) = daemon(move |stream| {
        welcome(stream);
        for wrong in [None, Some(LENGTH - 1)] {
            hear(stream);
            let slot = Slot::create(LENGTH as u64).unwrap();
            slot.write_at(0, &held).unwrap();
            if let Some(at) = wrong {
                slot.write_at(at as u64, &[held[at] ^ 1]).unwrap();
            }
            let reply = Reply::ShardOpened {
                length: LENGTH as u64,
                chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
                leaves: leaves.clone().into(),
                rung: Rung::OwnRam,
                fingerprints: None,
            };
            say(stream, &reply, Some(&slot));
        }
    });
    let (mut client, _) = Client::connect(&options).unwrap();
    let mut open = || {
        client
            .open_shard(&manifest, Rank::new(0), Vec::new(), 1000)
            .unwrap()
    };
    let (good, wrong) = (open(), open());
    thread.join().unwrap();
    let mut out = vec![0; LENGTH];
    for threads in [1, 2, 3, 64] {
        out.fill(0);
        let starts = (0..LENGTH as u64).step_by(PART);
        let mut parts: Vec<_> = starts.zip(out.chunks_mut(PART)).collect();
        good.read_many(&mut parts, threads.try_into().unwrap())
            .unwrap();
        let failed = wrong.read_many(&mut parts, threads.try_into().unwrap());
        assert!(matches!(failed, Err(ClientError::Corrupt { .. })));
        let mut asked = 0;
        let ended = good.read_many_unless(&mut parts, threads.try_into().unwrap(), || {
            asked += 1;
            true
        });
        assert!(matches!(ended, Err(ClientError::CalledAway { .. })) || asked == 0);
        good.read_many(&mut parts, threads.try_into().unwrap())
            .unwrap();
        assert!(out == bytes, "read by {threads} threads");
    }
}
