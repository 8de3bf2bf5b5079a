//! What every store does, whatever its back end: run on all of them.

use std::sync::Arc;

use bytes::Bytes;

use super::super::{
    FakeStore, FileIoConfig, KeyPrefix, ListPage, PartBytes, PartNumber, Rest, RetryPolicy,
    Retrying, Store, StoreError, probe,
};
use super::{directory, key, part_bytes, part_of, pattern, randomness, upload};

/// The whole suite; `store` must be empty below `folder`.
pub(super) async fn conforms(store: Arc<dyn Store>, folder: &str) {
    an_upload_is_found_again(&*store, folder).await;
    conforms_but_for_resuming(store, folder).await;
}

/// All of it but that an upload goes on which an earlier process has left.
pub(super) async fn conforms_but_for_resuming(store: Arc<dyn Store>, folder: &str) {
    probe(&*store, &*randomness()).await.unwrap();
    an_object_is_visible_only_when_complete(&*store, folder).await;
    an_object_may_be_a_whole_number_of_parts(&*store, folder).await;
    an_incomplete_upload_is_refused(&*store, folder).await;
    an_aborted_upload_leaves_nothing(&*store, folder).await;
    put_new_never_replaces(&*store, folder).await;
    concurrent_put_new_has_one_winner(Arc::clone(&store), folder).await;
    reads_are_exact(&*store, folder).await;
    listing_is_sorted_and_by_folder(&*store, folder).await;
    pages_and_folders_come_in_order(&*store, folder).await;
    bad_calls_are_typed_errors(&*store, folder).await;
    assert_eq!(
        store
            .unfinished(&KeyPrefix::folder(key(folder)))
            .await
            .unwrap(),
        []
    );
}

async fn pages_and_folders_come_in_order(store: &dyn Store, folder: &str) {
    let root = format!("{folder}/paged");
    // A slash sorts behind a dot: order is that of keys, not that of names in a folder.
    let names = ["a.b", "a/1", "a/2/x", "a/2/y", "a=", "b/z", "c"];
    for name in names {
        let key = key(&format!("{root}/{name}"));
        store.put_new(&key, pattern(3, 9)).await.unwrap();
    }
    let under = KeyPrefix::folder(key(&root));
    for limit in [1, 2, 3, 7, 100] {
        let (mut got, mut after) = (Vec::new(), None);
        loop {
            let page = store
                .list_page(&under, after.as_ref(), limit)
                .await
                .unwrap();
            assert!(page.entries.len() <= limit);
            let kept = store.limits().form.stored_bytes(3);
            assert!(page.entries.iter().all(|entry| entry.length == kept));
            after = page.entries.last().map(|entry| entry.key.clone()).or(after);
            got.extend(page.entries.into_iter().map(|entry| entry.key));
            if page.rest == Rest::None {
                break;
            }
        }
        let got: Vec<&str> = got
            .iter()
            .map(|key| &key.as_str()[root.len() + 1..])
            .collect();
        assert_eq!(got, names, "pages of {limit}");
    }
    assert_eq!(store.list_folders(&under).await.unwrap(), ["a", "b"]);
    let within = KeyPrefix::folder(key(&format!("{root}/a")));
    assert_eq!(store.list_folders(&within).await.unwrap(), ["2"]);
    let empty = KeyPrefix::folder(key(&format!("{root}/none")));
    assert_eq!(
        store.list_folders(&empty).await.unwrap(),
        Vec::<String>::new()
    );
    let nothing = store.list_page(&empty, None, 5).await.unwrap();
    assert_eq!(nothing, ListPage::default());
    for name in names {
        let key = key(&format!("{root}/{name}"));
        store.delete(&key).await.unwrap();
    }
}

async fn an_object_is_visible_only_when_complete(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/visible/0.distcp"));
    let size = part_bytes(store);
    let bytes = pattern(2 * size.get() as usize + 777, 1);
    let mut upload = store.begin(&key, size).await.unwrap();
    // Out of order, and one of them twice.
    for number in [2, 0, 1, 0] {
        let part = PartNumber(number);
        let sent = part_of(&bytes, size, part);
        let state = store.put_part(&upload, part, sent.clone()).await.unwrap();
        upload.note(part, state);
        assert!(store.has_part(&upload, part, &sent).await.unwrap());
        assert!(matches!(
            store.length(&key).await,
            Err(StoreError::NotFound { .. })
        ));
        assert!(matches!(
            store.get(&key, None).await,
            Err(StoreError::NotFound { .. })
        ));
        let listed = store
            .list(&KeyPrefix::folder(self::key(folder)))
            .await
            .unwrap();
        assert_eq!(listed, []);
    }
    store.complete(&upload, bytes.len() as u64).await.unwrap();
    assert_eq!(store.get(&key, None).await.unwrap(), bytes);
    // As after a lost answer.
    store.complete(&upload, bytes.len() as u64).await.unwrap();
    store.delete(&key).await.unwrap();
    store.delete(&key).await.unwrap();
    assert!(matches!(
        store.length(&key).await,
        Err(StoreError::NotFound { .. })
    ));
}

async fn an_object_may_be_a_whole_number_of_parts(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/whole/0.distcp"));
    let size = part_bytes(store);
    for parts in [1, 2] {
        let bytes = pattern(parts * size.get() as usize, 6);
        upload(store, &key, &bytes).await.unwrap();
        assert_eq!(store.get(&key, None).await.unwrap(), bytes);
        let (end, kept) = (bytes.len() as u64, store.length(&key).await.unwrap());
        assert_eq!(kept, store.limits().form.stored_bytes(end));
        assert_eq!(store.get(&key, Some(0..end)).await.unwrap(), bytes);
        assert_eq!(store.get(&key, Some(end..end)).await.unwrap(), "");
        let beyond = store.get(&key, Some(end - 1..end + 1)).await;
        assert!(
            matches!(beyond, Err(StoreError::Truncated { expected, got, .. }) if (expected, got) == (end + 1, end)),
            "{beyond:?}"
        );
    }
    store.delete(&key).await.unwrap();
}

async fn an_upload_is_found_again(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/resumed/0.distcp"));
    let size = part_bytes(store);
    let bytes = pattern(2 * size.get() as usize + 5, 2);
    assert_eq!(store.resume(&key, size).await.unwrap(), None);
    let begun = store.begin(&key, size).await.unwrap();
    for part in [PartNumber(0), PartNumber(1)] {
        store
            .put_part(&begun, part, part_of(&bytes, size, part))
            .await
            .unwrap();
    }
    let mut found = store
        .resume(&key, size)
        .await
        .unwrap()
        .expect("the upload is unfinished");
    assert_eq!(
        found.done().keys().copied().collect::<Vec<_>>(),
        [PartNumber(0), PartNumber(1)]
    );
    let first = part_of(&bytes, size, PartNumber(0));
    let other = pattern(first.len(), 99);
    for (number, bytes, is_there) in [(0, &first, true), (0, &other, false), (2, &first, false)] {
        let has = store.has_part(&found, PartNumber(number), bytes).await;
        assert_eq!(has.unwrap(), is_there, "part {number}");
    }
    assert_eq!(
        store
            .unfinished(&KeyPrefix::folder(self::key(folder)))
            .await
            .unwrap(),
        std::slice::from_ref(&key)
    );
    let last = PartNumber(2);
    let state = store
        .put_part(&found, last, part_of(&bytes, size, last))
        .await
        .unwrap();
    found.note(last, state);
    store.complete(&found, bytes.len() as u64).await.unwrap();
    assert_eq!(store.get(&key, None).await.unwrap(), bytes);
    assert_eq!(store.resume(&key, size).await.unwrap(), None);
    store.delete(&key).await.unwrap();
}

async fn an_incomplete_upload_is_refused(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/incomplete"));
    let size = part_bytes(store);
    let bytes = pattern(3 * size.get() as usize, 3);
    let mut upload = store.begin(&key, size).await.unwrap();
    for part in [PartNumber(0), PartNumber(2)] {
        let state = store
            .put_part(&upload, part, part_of(&bytes, size, part))
            .await
            .unwrap();
        upload.note(part, state);
    }
    let refused = store
        .complete(&upload, bytes.len() as u64)
        .await
        .unwrap_err();
    assert!(matches!(refused, StoreError::Invalid { .. }), "{refused}");
    let too_long = pattern(size.get() as usize + 1, 3);
    let refused = store
        .put_part(&upload, PartNumber(1), too_long)
        .await
        .unwrap_err();
    assert!(matches!(refused, StoreError::Invalid { .. }), "{refused}");
    store.abort(&upload).await.unwrap();
}

async fn an_aborted_upload_leaves_nothing(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/aborted"));
    let size = part_bytes(store);
    let bytes = pattern(size.get() as usize, 4);
    let older = store.begin(&key, size).await.unwrap();
    // A new upload of the same key gives up the older one.
    let upload = store.begin(&key, size).await.unwrap();
    let stale = store.put_part(&older, PartNumber(0), bytes.clone()).await;
    assert!(
        matches!(stale, Err(StoreError::NoUpload { .. })),
        "{stale:?}"
    );
    store
        .put_part(&upload, PartNumber(0), bytes.clone())
        .await
        .unwrap();
    store.abort(&upload).await.unwrap();
    store.abort(&upload).await.unwrap();
    assert_eq!(store.resume(&key, size).await.unwrap(), None);
    let stale = store.put_part(&upload, PartNumber(0), bytes).await;
    assert!(
        matches!(stale, Err(StoreError::NoUpload { .. })),
        "{stale:?}"
    );
}

async fn put_new_never_replaces(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/manifest"));
    let first = Bytes::from_static(b"first");
    store.put_new(&key, first.clone()).await.unwrap();
    store.put_new(&key, first.clone()).await.unwrap();
    for other in ["other", "longer than the first", ""] {
        let refused = store
            .put_new(&key, Bytes::from_static(other.as_bytes()))
            .await;
        assert!(
            matches!(refused, Err(StoreError::AlreadyExists { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(store.get(&key, None).await.unwrap(), first);
    store.delete(&key).await.unwrap();
}

async fn concurrent_put_new_has_one_winner(store: Arc<dyn Store>, folder: &str) {
    let key = key(&format!("{folder}/deep/er/contended"));
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..8u64 {
        let (store, key) = (Arc::clone(&store), key.clone());
        writers.spawn(async move { (writer, store.put_new(&key, pattern(3000, writer)).await) });
    }
    let mut winners = Vec::new();
    while let Some(joined) = writers.join_next().await {
        match joined.unwrap() {
            (writer, Ok(())) => winners.push(writer),
            (_, Err(StoreError::AlreadyExists { .. })) => {}
            (writer, Err(error)) => panic!("writer {writer}: {error}"),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    assert_eq!(
        store.get(&key, None).await.unwrap(),
        pattern(3000, winners[0])
    );
    store.delete(&key).await.unwrap();
}

async fn reads_are_exact(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/read"));
    let bytes = pattern(10_000, 5);
    store.put_new(&key, bytes.clone()).await.unwrap();
    let kept = store.limits().form.stored_bytes(10_000);
    assert_eq!(store.length(&key).await.unwrap(), kept);
    for range in [0..1, 0..10_000, 17..4242, 9_999..10_000, 500..500] {
        let got = store.get(&key, Some(range.clone())).await.unwrap();
        assert_eq!(got, bytes.slice(range.start as usize..range.end as usize));
    }
    for range in [0..10_001, 9_999..10_002, 10_001..10_002, 20_000..30_000] {
        let end = range.end;
        match store.get(&key, Some(range)).await {
            Err(StoreError::Truncated { expected, got, .. }) => {
                assert_eq!((expected, got), (end, 10_000));
            }
            other => panic!("expected truncated, got {other:?}"),
        }
    }
    store.delete(&key).await.unwrap();
    let empty = self::key(&format!("{folder}/empty"));
    upload(store, &empty, &Bytes::new()).await.unwrap();
    assert_eq!(store.get(&empty, None).await.unwrap(), Bytes::new());
    store.delete(&empty).await.unwrap();
}

async fn listing_is_sorted_and_by_folder(store: &dyn Store, folder: &str) {
    let names = ["a/.metadata", "a/b/1", "a/b-2", "ab/3"];
    for name in names {
        let bytes = Bytes::from_static(name.as_bytes());
        store
            .put_new(&key(&format!("{folder}/{name}")), bytes)
            .await
            .unwrap();
    }
    let under = |text: &str| KeyPrefix::folder(key(&format!("{folder}/{text}")));
    let listed = store.list(&under("a")).await.unwrap();
    let listed: Vec<_> = listed
        .iter()
        .map(|entry| (entry.key.as_str(), entry.length))
        .collect();
    let full: Vec<_> = names
        .iter()
        .map(|name| format!("{folder}/{name}"))
        .collect();
    let [long, short] = [11, 5].map(|length| store.limits().form.stored_bytes(length));
    assert_eq!(
        listed,
        [(&*full[0], long), (&*full[2], short), (&*full[1], short)]
    );
    assert_eq!(store.list(&under("nothing")).await.unwrap(), []);
    let all = store.list(&KeyPrefix::root()).await.unwrap();
    assert!(
        full.iter()
            .all(|name| all.iter().any(|entry| entry.key.as_str() == name))
    );
    for name in &full {
        store.delete(&key(name)).await.unwrap();
    }
}

async fn bad_calls_are_typed_errors(store: &dyn Store, folder: &str) {
    let key = key(&format!("{folder}/bad"));
    #[expect(clippy::reversed_empty_ranges, reason = "the bad input under test")]
    let reversed = store.get(&key, Some(2..1)).await;
    assert!(
        matches!(reversed, Err(StoreError::Invalid { .. })),
        "{reversed:?}"
    );
    let huge = store.get(&key, Some(0..u64::MAX)).await;
    assert!(matches!(huge, Err(StoreError::Invalid { .. })), "{huge:?}");
    for bytes in [0, store.limits().part_bytes_max + 1] {
        let refused = PartBytes::new(bytes, &store.limits());
        assert!(
            matches!(refused, Err(StoreError::Invalid { .. })),
            "{refused:?}"
        );
    }
    for text in [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        "a/.",
        "a b",
        "a\0b",
        ".storaged/x",
    ] {
        let refused = text.parse::<super::ObjectKey>();
        assert!(
            matches!(refused, Err(StoreError::Invalid { .. })),
            "{text:?}: {refused:?}"
        );
    }
}

#[tokio::test]
async fn the_fake_conforms() {
    conforms(Arc::new(FakeStore::new()), "job").await;
}

#[tokio::test]
async fn a_directory_with_plain_calls_conforms() {
    let root = tempfile::tempdir().unwrap();
    conforms(
        Arc::new(directory(root.path(), FileIoConfig::Plain).await),
        "job",
    )
    .await;
}

#[tokio::test]
async fn a_directory_with_io_uring_conforms() {
    let root = tempfile::tempdir().unwrap();
    let opened =
        super::super::Directory::open(root.path(), FileIoConfig::Uring.into(), randomness()).await;
    match opened {
        Ok(store) => conforms(Arc::new(store), "job").await,
        Err(error) => eprintln!("skipped: {error}"),
    }
}

#[tokio::test]
async fn a_retrying_store_conforms() {
    let store = Retrying::new(
        Arc::new(FakeStore::new()),
        RetryPolicy::default(),
        randomness(),
    );
    conforms(Arc::new(store), "job").await;
}

#[tokio::test]
async fn a_directory_without_openat2_conforms() {
    let root = tempfile::tempdir().unwrap();
    let store = super::super::Directory::walking(root.path(), randomness()).unwrap();
    store.prepare().await.unwrap();
    conforms(Arc::new(store), "job").await;
}
