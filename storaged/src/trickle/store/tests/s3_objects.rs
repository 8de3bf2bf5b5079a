//! What the bucket's owner wants of objects, and parts whose entity tags say nothing.

use super::super::s3::S3;
use super::super::{KeyPrefix, PartNumber, Store, StoreError};
use super::s3::{BUCKET, Served, Tags, Wishes, serve_with};
use super::{key, part_bytes, part_of, pattern};

use std::sync::Mutex;

use aws_credential_types::Credentials;
use bytes::Bytes;

fn client(endpoint: &str, more: &str) -> S3 {
    let text = format!("bucket = {BUCKET:?}\nendpoint = {endpoint:?}\n{more}");
    let credentials = Credentials::new("key", "secret", None, None, "test");
    S3::with_credentials(&toml::from_str(&text).unwrap(), credentials).unwrap()
}

const KMS: &str = "server_side_encryption = 'aws:kms'";

#[tokio::test]
async fn every_object_is_as_the_buckets_owner_wants_it() {
    let root = tempfile::tempdir().unwrap();
    let Served {
        endpoint, wishes, ..
    } = serve_with(root.path(), Tags::Others).await;
    let more = "storage_class = 'STANDARD_IA'\nserver_side_encryption = 'aws:kms'\nkms_key = 'alias/ckpt'\n\
                tags = { job = 'llm 70b' }\nrequester_pays = true";
    let store = client(&endpoint, more);
    let (size, name) = (part_bytes(&store), key("shard"));
    store
        .put_new(&key("manifest"), pattern(10, 1))
        .await
        .unwrap();
    let given_up = store.begin(&name, size).await.unwrap();
    store.abort(&given_up).await.unwrap();
    let mut upload = store.begin(&name, size).await.unwrap();
    let state = store
        .put_part(&upload, PartNumber(0), pattern(10, 2))
        .await
        .unwrap();
    assert!(store.resume(&name, size).await.unwrap().is_some());
    upload.note(PartNumber(0), state);
    store.complete(&upload, 10).await.unwrap();
    store.get(&name, None).await.unwrap();
    store.length(&name).await.unwrap();
    store.list(&KeyPrefix::root()).await.unwrap();
    store.list_page(&KeyPrefix::root(), None, 5).await.unwrap();
    store.list_folders(&KeyPrefix::root()).await.unwrap();
    store.delete(&name).await.unwrap();
    let wishes = wishes.lock().unwrap();
    let shared = ["aws:kms", "alias/ckpt", "job=llm+70b"].map(|it| Some(it.to_owned()));
    // What is small is read at every look, and would be paid for each time.
    assert_eq!(
        (&wishes.object[0], &wishes.object[1..]),
        (&None, &shared[..])
    );
    let class = Some("STANDARD_IA".to_owned());
    assert_eq!(
        (&wishes.upload[0], &wishes.upload[1..]),
        (&class, &shared[..])
    );
    let requester = Some("requester".to_owned());
    assert!(wishes.payers.len() >= 13, "{:?}", wishes.payers);
    assert!(
        wishes.payers.iter().all(|it| *it == requester),
        "{:?}",
        wishes.payers
    );
}

#[tokio::test]
async fn nothing_is_asked_for_that_was_not_configured() {
    let root = tempfile::tempdir().unwrap();
    let Served {
        endpoint, wishes, ..
    } = serve_with(root.path(), Tags::OfParts).await;
    let store = client(&endpoint, "");
    store
        .put_new(&key("manifest"), pattern(10, 1))
        .await
        .unwrap();
    store
        .begin(&key("shard"), part_bytes(&store))
        .await
        .unwrap();
    let wishes = wishes.lock().unwrap();
    let nothing = [None, None, None, None];
    assert_eq!((&wishes.object, &wishes.upload), (&nothing, &nothing));
    assert!(wishes.payers.iter().all(Option::is_none));
}

/// Two parts, of which the first is there when the daemon starts again.
async fn begun(endpoint: &str, more: &str) -> (S3, Bytes) {
    let store = client(endpoint, more);
    let size = part_bytes(&store);
    let bytes = pattern(size.get() as usize + 10, 1);
    let upload = store.begin(&key("shard"), size).await.unwrap();
    let first = part_of(&bytes, size, PartNumber(0));
    store.put_part(&upload, PartNumber(0), first).await.unwrap();
    (client(endpoint, more), bytes)
}

#[tokio::test]
async fn an_upload_goes_on_though_entity_tags_say_nothing() {
    for (more, known) in [(KMS, true), ("", false)] {
        let root = tempfile::tempdir().unwrap();
        let served = serve_with(root.path(), Tags::Checksums).await;
        let (store, bytes) = begun(&served.endpoint, more).await;
        let size = part_bytes(&store);
        let mut found = store.resume(&key("shard"), size).await.unwrap().unwrap();
        let [first, last] = [0, 1].map(|part| part_of(&bytes, size, PartNumber(part)));
        let has = store.has_part(&found, PartNumber(0), &first).await.unwrap();
        assert_eq!(has, known, "{more}");
        let other = pattern(first.len(), 7);
        assert!(!store.has_part(&found, PartNumber(0), &other).await.unwrap());
        let state = store.put_part(&found, PartNumber(1), last).await.unwrap();
        found.note(PartNumber(1), state);
        store.complete(&found, bytes.len() as u64).await.unwrap();
        assert_eq!(store.get(&key("shard"), None).await.unwrap(), bytes);
    }
}

/// Puts an object of one part, and says what the part's signature said of its bytes.
async fn part_hash_of(store: &S3, wishes: &Mutex<Wishes>, name: &str) -> String {
    let (name, bytes) = (key(name), pattern(10, 1));
    let mut upload = store.begin(&name, part_bytes(store)).await.unwrap();
    let put = store.put_part(&upload, PartNumber(0), bytes.clone());
    let state = put.await.unwrap();
    upload.note(PartNumber(0), state);
    store.complete(&upload, 10).await.unwrap();
    assert_eq!(store.get(&name, None).await.unwrap(), bytes);
    wishes.lock().unwrap().part_hash.clone().unwrap()
}

const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

#[tokio::test]
async fn over_tls_a_signature_leaves_out_the_bytes_of_parts_that_the_server_compares() {
    let root = tempfile::tempdir().unwrap();
    let Served {
        endpoint, wishes, ..
    } = serve_with(root.path(), Tags::Checksums).await;
    let plain = client(&endpoint, KMS);
    assert_ne!(part_hash_of(&plain, &wishes, "plain").await, UNSIGNED);
    let store = client(&endpoint, KMS).protected_by_tls();
    // Nothing is known of the server yet.
    assert_ne!(part_hash_of(&store, &wishes, "first").await, UNSIGNED);
    assert_eq!(part_hash_of(&store, &wishes, "second").await, UNSIGNED);
    // No checksum: the signature is all that the server compares.
    let by_tag = client(&endpoint, "").protected_by_tls();
    for name in ["tag", "another-tag"] {
        assert_ne!(part_hash_of(&by_tag, &wishes, name).await, UNSIGNED);
    }
}

#[tokio::test]
async fn a_bucket_that_wants_signed_bytes_gets_them() {
    let root = tempfile::tempdir().unwrap();
    let Served {
        endpoint, wishes, ..
    } = serve_with(root.path(), Tags::Checksums).await;
    let store = client(&endpoint, KMS).protected_by_tls();
    assert_ne!(part_hash_of(&store, &wishes, "first").await, UNSIGNED);
    assert_eq!(part_hash_of(&store, &wishes, "second").await, UNSIGNED);
    wishes.lock().unwrap().wants_signed_parts = true;
    for name in ["third", "fourth"] {
        assert_ne!(part_hash_of(&store, &wishes, name).await, UNSIGNED);
    }
    // It is not asked again.
    wishes.lock().unwrap().wants_signed_parts = false;
    assert_ne!(part_hash_of(&store, &wishes, "fifth").await, UNSIGNED);
}

#[tokio::test]
async fn a_part_that_is_kept_otherwise_is_found_at_once() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_with(root.path(), Tags::WrongChecksums).await;
    let store = client(&served.endpoint, KMS);
    let upload = store
        .begin(&key("shard"), part_bytes(&store))
        .await
        .unwrap();
    let written = store.put_part(&upload, PartNumber(0), pattern(10, 1)).await;
    let error = written.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
}

/// An object that took the place of the parts between two calls: what was put together is not what was sent.
#[tokio::test]
async fn an_object_of_other_parts_is_found_when_it_is_put_together() {
    let root = tempfile::tempdir().unwrap();
    let served = serve_with(root.path(), Tags::Checksums).await;
    let store = client(&served.endpoint, KMS);
    let size = part_bytes(&store);
    let mut upload = store.begin(&key("shard"), size).await.unwrap();
    let ours = store
        .put_part(&upload, PartNumber(0), pattern(10, 1))
        .await
        .unwrap();
    store
        .put_part(&upload, PartNumber(0), pattern(10, 2))
        .await
        .unwrap();
    upload.note(PartNumber(0), ours);
    let error = store.complete(&upload, 10).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    // The call is repeated, and nothing is there that could be taken for it.
    let error = store.complete(&upload, 10).await.unwrap_err();
    assert!(matches!(error, StoreError::NoUpload { .. }), "{error}");
}
