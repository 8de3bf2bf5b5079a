//! Encryption: what leaves the node says nothing, and what comes back is what was written or a typed error.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use storaged_core::{DurableFault, Leftovers};

use super::super::{
    Directory, Encrypted, FakeStore, FileIoConfig, KeyPrefix, KeyRing, PartBytes, PartNumber,
    PlainObjects, Store, StoreError, TierKeys,
};
use super::conformance::conforms;
use super::{directory, key, part_of, pattern, randomness, upload};
use crate::pool::Pool;

/// Bytes of a frame, and what encryption adds to one.
const FRAME: usize = 256 << 10;
const EXTRA: usize = 64;

fn keys(digits: &[&str]) -> TierKeys {
    let lines: Vec<String> = digits.iter().map(|digit| digit.repeat(64)).collect();
    TierKeys::parse(lines.join("\n").as_bytes()).unwrap()
}

fn ring(digits: &[&str]) -> Arc<KeyRing> {
    let ring = Arc::new(KeyRing::default());
    ring.replace(keys(digits));
    ring
}

pub(super) fn encrypted(inner: Arc<dyn Store>, digits: &[&str]) -> Encrypted {
    Encrypted::new(inner, ring(digits), PlainObjects::Refuse, None)
}

/// A store, and what lies below its encryption.
fn pair() -> (Encrypted, Arc<FakeStore>) {
    let below = Arc::new(FakeStore::new());
    (encrypted(below.clone(), &["1"]), below)
}

/// Puts other bytes in the place of an object.
async fn replace(below: &FakeStore, name: &str, bytes: impl Into<Bytes>) {
    below.delete(&key(name)).await.unwrap();
    below.put_new(&key(name), bytes.into()).await.unwrap();
}

async fn raw(below: &dyn Store, name: &str) -> Bytes {
    below.get(&key(name), None).await.unwrap()
}

fn is_tampered<T>(outcome: &Result<T, StoreError>) -> bool {
    matches!(outcome, Err(StoreError::Tampered { .. }))
}

#[tokio::test]
async fn what_is_encrypted_conforms_over_every_kind_of_store() {
    conforms(Arc::new(pair().0), "job").await;
    let pool = Some(Pool::start(2).unwrap());
    let over = |inner: Arc<dyn Store>, plain| {
        Arc::new(Encrypted::new(
            inner,
            ring(&["1", "2"]),
            plain,
            pool.clone(),
        ))
    };
    for io in [FileIoConfig::Plain, FileIoConfig::Auto] {
        let root = tempfile::tempdir().unwrap();
        let inner = Arc::new(directory(root.path(), io).await);
        conforms(over(inner, PlainObjects::Read), "job").await;
    }
    let root = tempfile::tempdir().unwrap();
    let inner = Arc::new(Directory::walking(root.path(), randomness()).unwrap());
    inner.prepare().await.unwrap();
    conforms(over(inner, PlainObjects::Refuse), "job").await;
    let without_keys = Encrypted::without_keys(Arc::new(FakeStore::new()));
    conforms(Arc::new(without_keys), "job").await;
}

/// Every eight bytes of it, wherever they begin.
fn has_part_of(stored: &[u8], plain: &[u8]) -> bool {
    let parts: std::collections::HashSet<&[u8]> = plain.windows(8).collect();
    stored.windows(8).any(|window| parts.contains(window))
}

#[tokio::test]
async fn no_plain_bytes_reach_the_store() {
    let (store, below) = pair();
    let plain = pattern(FRAME + 5_000, 1);
    store.put_new(&key("small"), plain.clone()).await.unwrap();
    upload(&store, &key("parts"), &plain).await.unwrap();
    for name in ["small", "parts"] {
        let stored = raw(&*below, name).await;
        assert_eq!(stored.len(), plain.len() + 2 * EXTRA);
        assert!(!has_part_of(&stored, &plain), "{name}");
    }
    assert!(
        has_part_of(&plain[3..100], &plain),
        "the look finds what is there"
    );
    // One object says nothing of another with the same bytes.
    let (one, other) = (raw(&*below, "small").await, raw(&*below, "parts").await);
    assert!(!has_part_of(&one[24..FRAME], &other[36 + 12..FRAME]));
}

/// Two texts under one nonce give their difference away.
#[tokio::test]
async fn no_nonce_meets_two_texts() {
    let (store, below) = pair();
    let (first, second) = (pattern(1000, 1), pattern(1000, 2));
    let mut stored = Vec::new();
    for plain in [&first, &second] {
        store.put_new(&key("again"), plain.clone()).await.unwrap();
        stored.push(raw(&*below, "again").await);
        store.delete(&key("again")).await.unwrap();
    }
    let text = |stored: &Bytes| stored.slice(48..48 + 1000);
    let differ = |a: &Bytes, b: &Bytes| a.iter().zip(b).map(|(a, b)| a ^ b).collect::<Vec<u8>>();
    let of_texts = differ(&text(&stored[0]), &text(&stored[1]));
    assert_ne!(of_texts, differ(&first, &second));
    assert_ne!(stored[0][24..36], stored[1][24..36]);
    // The same bytes at the same place are the same object: what is resumed and what is repeated is recognized.
    store.put_new(&key("again"), first.clone()).await.unwrap();
    assert_eq!(raw(&*below, "again").await, stored[0]);
    store.put_new(&key("again"), first).await.unwrap();
}

#[tokio::test]
async fn a_flipped_bit_anywhere_is_a_typed_error() {
    for plain_objects in [PlainObjects::Refuse, PlainObjects::Read] {
        let below = Arc::new(FakeStore::new());
        let store = Encrypted::new(below.clone(), ring(&["1"]), plain_objects, None);
        let plain = pattern(2 * FRAME + 333, 3);
        store.put_new(&key("a"), plain.clone()).await.unwrap();
        let sealed = raw(&*below, "a").await;
        let heads = (0..3).flat_map(|frame| {
            let at = frame * (FRAME + EXTRA);
            at..at + 49
        });
        let more = (0..sealed.len()).step_by(7_919);
        let ends = [sealed.len() - 17, sealed.len() - 16, sealed.len() - 1];
        for at in heads.chain(more).chain(ends) {
            let mut flipped = BytesMut::from(&sealed[..]);
            flipped[at] ^= 1 << (at % 8);
            replace(&below, "a", flipped).await;
            let frame = at / (FRAME + EXTRA);
            let from = (frame * FRAME) as u64;
            let within = from..(from + 100);
            for outcome in [
                store.get(&key("a"), None).await,
                store.get(&key("a"), Some(within)).await,
            ] {
                assert!(
                    matches!(
                        outcome,
                        Err(StoreError::Tampered { .. }
                            | StoreError::Locked { .. }
                            | StoreError::NewerForm { .. })
                    ),
                    "byte {at}: {outcome:?}"
                );
            }
            // What was not changed is read all the same.
            let other = (frame + 1) % 3;
            let from = other * FRAME;
            let got = store
                .get(&key("a"), Some(from as u64..from as u64 + 200))
                .await;
            assert_eq!(got.unwrap(), plain.slice(from..from + 200), "byte {at}");
        }
    }
}

#[tokio::test]
async fn frames_count_at_their_own_place_alone() {
    let (store, below) = pair();
    let plain = pattern(3 * FRAME, 4);
    for name in ["a", "b"] {
        store.put_new(&key(name), plain.clone()).await.unwrap();
    }
    let (sealed, of_b) = (raw(&*below, "a").await, raw(&*below, "b").await);
    let frame = |object: &Bytes, number: usize| {
        let at = number * (FRAME + EXTRA);
        object.slice(at..(at + FRAME + EXTRA).min(object.len()))
    };
    let order = |numbers: &[usize]| {
        let frames: Vec<Bytes> = numbers.iter().map(|it| frame(&sealed, *it)).collect();
        frames.concat()
    };
    assert_eq!(order(&[0, 1, 2, 3]), sealed);
    let mut longer = sealed.to_vec();
    longer.extend_from_slice(&frame(&sealed, 3));
    for (what, forged) in [
        ("swapped", order(&[1, 0, 2, 3])),
        ("one left out", order(&[0, 2, 3])),
        ("one twice", order(&[0, 1, 1, 2, 3])),
        ("the last frame alone", order(&[3])),
        ("cut between frames", order(&[0, 1, 2])),
        ("cut in a frame", sealed[..FRAME * 2].to_vec()),
        ("cut in the last head", sealed[..sealed.len() - 1].to_vec()),
        ("longer", longer),
        ("longer by a byte", [&sealed[..], &[0]].concat()),
        ("another object's", of_b.to_vec()),
    ] {
        replace(&below, "a", forged).await;
        let got = store.get(&key("a"), None).await;
        assert!(is_tampered(&got), "{what}: {got:?}");
    }
    replace(&below, "a", order(&[1, 0, 2, 3])).await;
    for range in [0..10, 5..FRAME as u64 + 5, 0..3 * FRAME as u64] {
        let got = store.get(&key("a"), Some(range)).await;
        assert!(is_tampered(&got), "{got:?}");
    }
    // Nor are bytes behind a cut made up.
    replace(&below, "a", order(&[0, 1])).await;
    let end = 2 * FRAME as u64;
    let got = store.get(&key("a"), Some(end..end + 5)).await;
    assert!(
        is_tampered(&got) || matches!(got, Err(StoreError::Truncated { .. })),
        "{got:?}"
    );
}

/// What is shorter than any object that was encrypted says neither that it was nor that it was not.
#[tokio::test]
async fn an_object_that_was_cut_to_nothing_is_damaged_and_not_older_than_encryption() {
    let (store, below) = pair();
    store.put_new(&key("a"), pattern(900, 4)).await.unwrap();
    let sealed = raw(&*below, "a").await;
    for length in [0, 1, 31, 32, EXTRA - 1, EXTRA, EXTRA + 1, sealed.len() - 1] {
        replace(&below, "a", sealed.slice(..length)).await;
        for range in [None, Some(0..1), Some(500..900)] {
            let got = store.get(&key("a"), range.clone()).await;
            let is_damaged = is_tampered(&got)
                || range.is_some() && matches!(got, Err(StoreError::Truncated { .. }));
            assert!(is_damaged, "{range:?} of {length}: {got:?}");
        }
    }
}

#[tokio::test]
async fn of_frames_of_a_newer_release_it_is_said_that_they_are() {
    let (store, below) = pair();
    store.put_new(&key("a"), pattern(900, 4)).await.unwrap();
    let mut newer = BytesMut::from(&raw(&*below, "a").await[..]);
    newer[8] = 2;
    replace(&below, "a", newer).await;
    for range in [None, Some(0..1)] {
        let error = store.get(&key("a"), range).await.unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains("version 2") && said.contains("upgrade"),
            "{said}"
        );
        assert!(!said.contains("the key"), "{said}");
        // An older step must not pass for the newest.
        let fault = DurableFault::from(&error);
        assert!(matches!(fault, DurableFault::Misconfigured(_)), "{fault:?}");
    }
}

#[tokio::test]
async fn ranges_across_frames_are_exact() {
    let (store, _) = pair();
    let frame = FRAME as u64;
    for length in [
        0,
        1,
        100,
        frame - 1,
        frame,
        frame + 1,
        3 * frame,
        3 * frame + 77,
    ] {
        let plain = pattern(length as usize, length);
        let name = key(&format!("of-{length}"));
        store.put_new(&name, plain.clone()).await.unwrap();
        assert_eq!(store.get(&name, None).await.unwrap(), plain);
        let marks = [0, 1, frame - 1, frame, frame + 1, 2 * frame, 3 * frame];
        let marks: Vec<u64> = marks.into_iter().chain([length / 2, length]).collect();
        for start in &marks {
            for end in marks.iter().filter(|end| *end >= start) {
                let got = store.get(&name, Some(*start..*end)).await;
                if *end <= length {
                    let expected = plain.slice(*start as usize..*end as usize);
                    assert_eq!(got.unwrap(), expected, "{start}..{end} of {length}");
                } else {
                    assert!(
                        matches!(&got, Err(StoreError::Truncated { expected, got, .. }) if (expected, *got) == (end, length)),
                        "{start}..{end} of {length}: {got:?}"
                    );
                }
            }
        }
    }
}

/// After a kill the parts that are there are not sent again, also those that this process never sealed.
#[tokio::test]
async fn an_upload_goes_on_where_another_life_left_it() {
    let below = Arc::new(FakeStore::new());
    let plain = pattern(5 * FRAME, 5);
    let size = |store: &Encrypted| PartBytes::new(2 * FRAME as u64, &store.limits()).unwrap();
    let name = key("run/shard");
    let first = encrypted(below.clone(), &["1"]);
    let begun = first.begin(&name, size(&first)).await.unwrap();
    for number in [0, 1] {
        let part = PartNumber(number);
        let bytes = part_of(&plain, size(&first), part);
        first.put_part(&begun, part, bytes).await.unwrap();
    }
    let again = encrypted(below.clone(), &["1"]);
    let mut found = again.resume(&name, size(&again)).await.unwrap().unwrap();
    assert_eq!(found.part_bytes(), size(&again));
    for number in [0, 1] {
        let part = PartNumber(number);
        let bytes = part_of(&plain, size(&again), part);
        assert!(again.has_part(&found, part, &bytes).await.unwrap());
    }
    let last = PartNumber(2);
    let bytes = part_of(&plain, size(&again), last);
    assert!(!again.has_part(&found, last, &bytes).await.unwrap());
    let state = again.put_part(&found, last, bytes.clone()).await.unwrap();
    found.note(last, state);
    // With another key the parts that are there are others.
    let rotated = encrypted(below, &["2", "1"]);
    assert!(!rotated.has_part(&found, last, &bytes).await.unwrap());
    again.complete(&found, plain.len() as u64).await.unwrap();
    assert_eq!(rotated.get(&name, None).await.unwrap(), plain);
}

/// An object of whole parts ends with a frame of its own. The daemon died when that was there and the upload not completed.
#[tokio::test]
async fn an_upload_of_whole_parts_goes_on_once_its_end_is_there() {
    let below = Arc::new(FakeStore::new());
    let plain = pattern(4 * FRAME, 5);
    let size = |store: &Encrypted| PartBytes::new(2 * FRAME as u64, &store.limits()).unwrap();
    let name = key("run/shard");
    let first = encrypted(below.clone(), &["1"]);
    let begun = first.begin(&name, size(&first)).await.unwrap();
    for number in [0, 1] {
        let bytes = part_of(&plain, size(&first), PartNumber(number));
        first
            .put_part(&begun, PartNumber(number), bytes)
            .await
            .unwrap();
    }
    let empty = key("empty");
    first.put_new(&empty, Bytes::new()).await.unwrap();
    let end = below.get(&empty, None).await.unwrap();
    below
        .put_part(&begun.without_parts(), PartNumber(2), end)
        .await
        .unwrap();
    let again = encrypted(below, &["1"]);
    let found = again.resume(&name, size(&again)).await.unwrap().unwrap();
    assert!(found.lies_within(plain.len() as u64));
    again.complete(&found, plain.len() as u64).await.unwrap();
    assert_eq!(again.get(&name, None).await.unwrap(), plain);
}

#[tokio::test]
async fn the_newest_key_writes_and_older_ones_read() {
    let below = Arc::new(FakeStore::new());
    let keys = ring(&["1"]);
    let store = Encrypted::new(below.clone(), keys.clone(), PlainObjects::Refuse, None);
    let plain = pattern(FRAME + 9, 6);
    store.put_new(&key("old"), plain.clone()).await.unwrap();
    keys.replace(self::keys(&["2", "1"]));
    store.put_new(&key("new"), plain.clone()).await.unwrap();
    // What is there already with the same bytes is there, whichever key it has.
    store.put_new(&key("old"), plain.clone()).await.unwrap();
    let other = store.put_new(&key("old"), pattern(9, 9)).await;
    assert!(matches!(other, Err(StoreError::AlreadyExists { .. })));
    for name in ["old", "new"] {
        assert_eq!(store.get(&key(name), None).await.unwrap(), plain);
        let part = store.get(&key(name), Some(7..FRAME as u64 + 2)).await;
        assert_eq!(part.unwrap(), plain.slice(7..FRAME + 2));
    }
    keys.replace(self::keys(&["2"]));
    assert_eq!(store.get(&key("new"), None).await.unwrap(), plain);
    for range in [None, Some(7..9)] {
        let locked = store.get(&key("old"), range).await;
        let named = self::keys(&["1"]).to_string();
        assert!(
            matches!(&locked, Err(StoreError::Locked { what, .. }) if what.contains(&named)),
            "{locked:?}"
        );
    }
}

#[tokio::test]
async fn without_its_key_an_object_is_locked_and_not_damaged() {
    let (store, below) = pair();
    store.put_new(&key("a"), pattern(50, 7)).await.unwrap();
    let id = keys(&["1"]).to_string();
    let without = Encrypted::without_keys(below.clone());
    let wrong = encrypted(below.clone(), &["3"]);
    for store in [&without, &wrong] {
        let locked = store.get(&key("a"), None).await;
        assert!(
            matches!(&locked, Err(StoreError::Locked { what, .. }) if what.contains(&id)),
            "{locked:?}"
        );
    }
    let none_yet = Encrypted::new(below, Arc::default(), PlainObjects::Refuse, None);
    let folder = KeyPrefix::folder(key("a"));
    // Nor is asked what would be answered without: the tier would be there and not there by turns.
    let outcomes = [
        none_yet.get(&key("a"), None).await.map(drop),
        none_yet.get(&key("a"), Some(0..0)).await.map(drop),
        none_yet.put_new(&key("b"), Bytes::new()).await,
        none_yet.length(&key("a")).await.map(drop),
        none_yet.list(&folder).await.map(drop),
        none_yet.list_page(&folder, None, 5).await.map(drop),
        none_yet.list_folders(&folder).await.map(drop),
        none_yet.unfinished(&folder).await.map(drop),
        none_yet.check_place().await,
    ];
    for outcome in outcomes {
        assert!(
            matches!(outcome, Err(StoreError::Unavailable { .. })),
            "{outcome:?}"
        );
    }
}

#[tokio::test]
async fn plain_objects_are_read_only_where_that_is_said() {
    let below = Arc::new(FakeStore::new());
    let plain = pattern(2 * FRAME + 5, 8);
    let short = Bytes::from_static(b"short");
    below.put_new(&key("long"), plain.clone()).await.unwrap();
    below.put_new(&key("short"), short.clone()).await.unwrap();
    let strict = encrypted(below.clone(), &["1"]);
    for range in [None, Some(5..10)] {
        let refused = strict.get(&key("long"), range).await;
        assert!(
            matches!(refused, Err(StoreError::Unsealed { .. })),
            "{refused:?}"
        );
    }
    let refused = strict.get(&key("short"), Some(0..5)).await;
    assert!(is_tampered(&refused), "{refused:?}");
    let store = Encrypted::new(below.clone(), ring(&["1"]), PlainObjects::Read, None);
    assert_eq!(store.get(&key("long"), None).await.unwrap(), plain);
    assert_eq!(store.get(&key("short"), Some(1..5)).await.unwrap(), "hort");
    for range in [
        0..10,
        FRAME as u64 - 1..FRAME as u64 + 1,
        0..plain.len() as u64,
    ] {
        let got = store.get(&key("long"), Some(range.clone())).await.unwrap();
        let expected = plain.slice(range.start as usize..range.end as usize);
        assert_eq!(got, expected, "{range:?}");
    }
    // Known by now: one request, not three.
    let before = below.requests();
    store.get(&key("long"), Some(3..9)).await.unwrap();
    assert_eq!(below.requests() - before, 1);
    // Written anew it is encrypted, and not taken for the one before.
    store.delete(&key("long")).await.unwrap();
    upload(&store, &key("long"), &plain).await.unwrap();
    assert_eq!(
        store.get(&key("long"), Some(3..9)).await.unwrap(),
        plain.slice(3..9)
    );
    assert!(!has_part_of(&raw(&*below, "long").await, &plain));
}

#[tokio::test]
async fn an_upload_that_is_found_again_has_parts_of_its_own_size_or_none() {
    let below = Arc::new(FakeStore::new());
    let store = encrypted(below.clone(), &["1"]);
    let size = |frames: u64| PartBytes::new(frames * FRAME as u64, &store.limits()).unwrap();
    let name = key("run/shard");
    store.begin(&name, size(2)).await.unwrap();
    let found = store.resume(&name, size(3)).await.unwrap().unwrap();
    assert_eq!(found.part_bytes(), size(2));
    let found = store.resume_or_begin(&name, size(3), Leftovers::Perhaps);
    assert_eq!(found.await.unwrap().part_bytes(), size(2));
    // Left from before encryption.
    let plain = PartBytes::new(FRAME as u64, &below.limits()).unwrap();
    below.begin(&name, plain).await.unwrap();
    assert_eq!(store.resume(&name, size(3)).await.unwrap(), None);
    let begun = store.resume_or_begin(&name, size(3), Leftovers::Perhaps);
    assert_eq!(begun.await.unwrap().part_bytes(), size(3));
    assert_eq!(below.uploads_begun(), 3);
}

/// Parts of 16 MiB begin at whole blocks, in memory that direct I/O takes.
#[tokio::test]
async fn a_part_of_ordinary_size_is_whole_blocks() {
    let (store, below) = pair();
    let size = PartBytes::new(16 << 20, &store.limits()).unwrap();
    let name = key("big");
    let begun = store.begin(&name, size).await.unwrap();
    let part = pattern(16 << 20, 9);
    let state = store.put_part(&begun, PartNumber(0), part).await.unwrap();
    assert_eq!(state.length % 4096, 0);
    let sealed = below.resume(
        &name,
        PartBytes::new(state.length, &below.limits()).unwrap(),
    );
    assert_eq!(sealed.await.unwrap().unwrap().done().len(), 1);
    let odd = PartBytes::new((16 << 20) + 1, &store.limits());
    assert!(matches!(odd, Err(StoreError::Invalid { .. })));
}
