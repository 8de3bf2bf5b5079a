//! Shards that are read while they come, from a daemon's stand-in that fills the memory as each test wants.

use std::num::NonZeroUsize;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use storaged_arena::Slot;
use storaged_sdk::wire::local::{Reply, Request, Rung};
use storaged_sdk::wire::{ChunkSize, Digest, ManifestBytes, Rank, Refusal, RefusalCode};
use storaged_sdk::{Client, ClientError, EarlyShard, Followed};

use super::fake::{CHUNK_BYTES, hear, say, welcome};
use super::{daemon, manifest_of, pattern};

const CHUNK: usize = CHUNK_BYTES as usize;

/// Where a shard comes, and what belongs there.
struct Coming {
    slot: Slot,
    bytes: Vec<u8>,
    leaves: Vec<Digest>,
}

impl Coming {
    fn of(bytes: &[u8], leaves: &[Digest]) -> Self {
        Self {
            slot: Slot::create(bytes.len() as u64).unwrap(),
            bytes: bytes.to_vec(),
            leaves: leaves.to_vec(),
        }
    }

    /// These chunks are there from now on.
    fn fills(&self, chunks: impl IntoIterator<Item = usize>) {
        for index in chunks {
            let start = index * CHUNK;
            let end = self.bytes.len().min(start + CHUNK);
            let chunk = &self.bytes[start..end];
            self.slot.write_at(start as u64, chunk).unwrap();
        }
    }

    fn comes(&self, rung: Rung) -> Reply {
        Reply::ShardComing {
            length: self.bytes.len() as u64,
            chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
            leaves: self.leaves.clone().into(),
            rung,
        }
    }

    fn is_there(&self, rung: Rung) -> Reply {
        Reply::ShardOpened {
            length: self.bytes.len() as u64,
            chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
            leaves: self.leaves.clone().into(),
            rung,
            fingerprints: None,
        }
    }
}

fn hears_follow(stream: &mut UnixStream) {
    let heard = hear(stream);
    let is_follow = matches!(heard, Request::FollowShard { rank, .. } if rank == Rank::new(0));
    assert!(is_follow, "{heard:?}");
}

/// What a reader gets of a shard of these bytes, from a daemon that behaves so once the shard is asked for.
fn read_from(
    bytes: Vec<u8>,
    threads: usize,
    serve: impl FnOnce(&mut UnixStream, Coming) + Send + 'static,
) -> Result<(Vec<u8>, EarlyShard), ClientError> {
    let (manifest, leaves) = manifest_of(&bytes);
    let length = bytes.len();
    let (_directory, options, thread) = daemon(move |stream| {
        welcome(stream);
        let heard = hear(stream);
        let is_early = matches!(
            heard,
            Request::OpenShard {
                early: Some(true),
                ..
            }
        );
        assert!(is_early, "{heard:?}");
        serve(stream, Coming::of(&bytes, &leaves));
    });
    let (mut client, _) = Client::connect(&options).unwrap();
    let outcome = opened(&mut client, &manifest).and_then(|mut shard| {
        let mut out = vec![0; length];
        // Of several sizes, and not in order.
        let mut parts = Vec::new();
        let mut rest = &mut out[..];
        let mut at = 0;
        for size in [10, CHUNK - 20, 3 * CHUNK, 1, usize::MAX] {
            let (part, others) = rest.split_at_mut(size.min(rest.len()));
            let offset = at as u64;
            at += part.len();
            parts.push((offset, part));
            rest = others;
        }
        parts.reverse();
        let threads = NonZeroUsize::new(threads).unwrap();
        shard.read_many(&mut client, parts, threads)?;
        Ok((out, shard))
    });
    // A daemon that waits for another word hears that nobody is there.
    drop(client);
    thread.join().unwrap();
    outcome
}

fn opened(client: &mut Client, manifest: &ManifestBytes) -> Result<EarlyShard, ClientError> {
    client.open_shard_early(manifest, Rank::new(0), Vec::new(), 1000, None)
}

/// Long enough for several looks: a hundred chunks, the last of which is short.
fn long() -> Vec<u8> {
    let bytes = (0..100 * CHUNK - 77).map(|at| (at % 251 + at / CHUNK) as u8);
    bytes.collect()
}

#[test]
fn what_comes_bit_by_bit_is_read_as_it_was_saved() {
    for threads in [1, 3] {
        let read = read_from(long(), threads, |stream, coming| {
            coming.fills(0..30);
            say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
            // Not in order, and one that is wrong until it is written again.
            for chunks in [vec![], vec![99, 31, 32], (33..98).collect()] {
                hears_follow(stream);
                coming.fills(chunks);
                coming
                    .slot
                    .write_at(98 * CHUNK as u64, &[7; CHUNK])
                    .unwrap();
                say(stream, &Reply::StillComing, None);
            }
            hears_follow(stream);
            coming.fills([30, 98]);
            say(stream, &Reply::ShardCame(Rung::Decoded), None);
        });
        let (out, shard) = read.unwrap();
        assert!(out == long(), "{threads} threads");
        assert!(shard.is_there());
        assert_eq!(shard.rung(), Rung::Decoded);
        assert!(shard.into_whole().is_ok());
    }
}

#[test]
fn what_is_all_there_asks_for_no_more() {
    let read = read_from(pattern(), 2, |stream, coming| {
        coming.fills(0..4);
        say(stream, &coming.comes(Rung::PeerRam), Some(&coming.slot));
    });
    let (out, shard) = read.unwrap();
    assert_eq!(out, pattern());
    assert_eq!(shard.rung(), Rung::PeerRam);
    assert!(!shard.is_there() && shard.into_whole().is_err());
}

#[test]
fn a_shard_of_zeros_is_there_when_the_daemon_says_so_and_when_a_second_look_finds_it() {
    let zeros = vec![0; 3 * CHUNK + 5];
    for is_told in [true, false] {
        let read = read_from(zeros.clone(), 1, move |stream, coming| {
            say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
            hears_follow(stream);
            let came = Reply::ShardCame(Rung::Durable);
            say(
                stream,
                if is_told { &came } else { &Reply::StillComing },
                None,
            );
        });
        let (out, shard) = read.unwrap();
        assert_eq!(out, zeros);
        assert_eq!(shard.is_there(), is_told);
    }
}

#[test]
fn a_chunk_that_is_wrong_when_all_has_come_is_never_returned() {
    let read = read_from(long(), 2, |stream, coming| {
        coming.fills(0..100);
        let wrong = [coming.bytes[55 * CHUNK] ^ 1];
        coming.slot.write_at(55 * CHUNK as u64, &wrong).unwrap();
        say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
        hears_follow(stream);
        say(stream, &Reply::ShardCame(Rung::Decoded), None);
    });
    assert!(matches!(read, Err(ClientError::Corrupt { chunk: 55, .. })));
}

#[test]
fn what_comes_to_other_memory_is_read_there() {
    for comes_there in [false, true] {
        let read = read_from(long(), 2, move |stream, coming| {
            coming.fills(0..20);
            say(stream, &coming.comes(Rung::PeerRam), Some(&coming.slot));
            hears_follow(stream);
            let other = Coming::of(&coming.bytes, &coming.leaves);
            other.fills(20..60);
            if comes_there {
                say(stream, &other.comes(Rung::Decoded), Some(&other.slot));
                hears_follow(stream);
                other.fills(60..100);
                say(stream, &Reply::ShardCame(Rung::Decoded), None);
            } else {
                other.fills(60..100);
                say(stream, &other.is_there(Rung::Durable), Some(&other.slot));
            }
        });
        let (out, shard) = read.unwrap();
        assert!(out == long());
        let rung = if comes_there {
            Rung::Decoded
        } else {
            Rung::Durable
        };
        assert_eq!((shard.rung(), shard.is_there()), (rung, true));
    }
}

#[test]
fn other_memory_of_another_shard_is_refused() {
    let read = read_from(long(), 1, |stream, coming| {
        say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
        hears_follow(stream);
        let mut bytes = coming.bytes.clone();
        bytes[5] ^= 1;
        let (_, leaves) = manifest_of(&bytes);
        let other = Coming::of(&bytes, &leaves);
        other.fills(0..100);
        say(stream, &other.is_there(Rung::Decoded), Some(&other.slot));
    });
    assert!(matches!(read, Err(ClientError::WrongLeaves { rank: 0 })));
}

#[test]
fn digests_without_the_manifests_root_are_refused_before_a_byte_is_read() {
    let read = read_from(pattern(), 1, |stream, coming| {
        coming.fills(0..4);
        let mut wrong = coming;
        wrong.leaves[1] = wrong.leaves[0];
        say(stream, &wrong.comes(Rung::Decoded), Some(&wrong.slot));
    });
    assert!(matches!(read, Err(ClientError::WrongLeaves { rank: 0 })));
}

#[test]
fn whoever_follows_hears_why_it_comes_no_more() {
    let read = read_from(long(), 1, |stream, coming| {
        coming.fills(0..50);
        say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
        hears_follow(stream);
        let refusal = Refusal::new(RefusalCode::TooManyLost, "three of six are gone");
        say(stream, &Reply::Refused(refusal), None);
    });
    match read {
        Err(ClientError::Refused(refusal)) => assert_eq!(refusal.code, RefusalCode::TooManyLost),
        other => panic!("{:?}", other.map(|(_, shard)| shard)),
    }
    let read = read_from(long(), 1, |stream, coming| {
        say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
        hears_follow(stream);
        say(stream, &Reply::Done, None);
    });
    assert!(matches!(read, Err(ClientError::Protocol { .. })));
}

/// Its loop was late, or decoding had all cores.
#[test]
fn a_daemon_that_says_late_how_it_stands_costs_no_read() {
    let read = read_from(long(), 1, |stream, coming| {
        say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
        hears_follow(stream);
        std::thread::sleep(Duration::from_millis(1_500));
        coming.fills(0..100);
        say(stream, &Reply::ShardCame(Rung::Decoded), None);
    });
    assert!(read.unwrap().0 == long());
}

#[test]
fn a_daemon_that_knows_nothing_of_it_gives_the_shard_when_it_is_there() {
    let read = read_from(long(), 2, |stream, coming| {
        coming.fills(0..100);
        say(stream, &coming.is_there(Rung::OwnRam), Some(&coming.slot));
    });
    let (out, shard) = read.unwrap();
    assert!(out == long() && shard.is_there());
}

#[test]
fn whoever_is_called_away_reads_no_further_and_a_part_outside_is_refused() {
    let bytes = long();
    let (manifest, leaves) = manifest_of(&bytes);
    let held = bytes.clone();
    let (_directory, options, thread) = daemon(move |stream| {
        welcome(stream);
        hear(stream);
        let coming = Coming::of(&held, &leaves);
        coming.fills(0..40);
        say(stream, &coming.comes(Rung::Decoded), Some(&coming.slot));
    });
    let (mut client, _) = Client::connect(&options).unwrap();
    let mut shard = opened(&mut client, &manifest).unwrap();
    thread.join().unwrap();
    let mut out = vec![0; bytes.len()];
    let mut asked = 0;
    let threads = NonZeroUsize::new(2).unwrap();
    let away = shard.read_many_following(
        vec![(0, &mut out[..])],
        threads,
        || Ok(Followed::StillComing),
        || {
            asked += 1;
            asked > 5
        },
    );
    assert!(matches!(away, Err(ClientError::CalledAway { .. })));
    assert!(out[..40 * CHUNK] == bytes[..40 * CHUNK]);
    let outside = shard.read_many_following(
        vec![(bytes.len() as u64 - 1, &mut out[..2])],
        threads,
        || Ok(Followed::StillComing),
        || false,
    );
    assert!(matches!(outside, Err(ClientError::Outside { .. })));
}
