//! Configuration: what is accepted, what is refused and how, and the check at start.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::config::settled;
use super::super::place::EmptyPlace;
use super::super::unproven::{Check, Unproven};
use super::super::{
    FakeStore, FaultPlan, Faulty, FileIoConfig, KeyPrefix, MarkerConfig, PageCacheConfig,
    SeededRandomness, Store, StoreConfig, StoreError, open, open_lazily,
};
use super::randomness;

#[test]
fn both_kinds_parse_and_unknown_keys_are_refused() {
    let directory: StoreConfig =
        toml::from_str("kind = \"directory\"\npath = \"/ckpt\"\nio = \"plain\"").unwrap();
    let expected = StoreConfig::Directory {
        path: "/ckpt".into(),
        io: FileIoConfig::Plain,
        page_cache: PageCacheConfig::Bypass,
        marker: MarkerConfig::Write,
    };
    assert_eq!(directory, expected);
    let s3: StoreConfig =
        toml::from_str("kind = \"s3\"\nbucket = \"ckpt\"\nendpoint = \"http://127.0.0.1:1\"")
            .unwrap();
    let StoreConfig::S3(s3) = s3 else {
        panic!("expected S3, got {s3:?}")
    };
    assert_eq!(
        (s3.region, &*s3.access_key_env),
        (None, "AWS_ACCESS_KEY_ID")
    );
    for text in [
        "kind = \"directory\"\npath = \"/ckpt\"\npaht = \"/x\"",
        "kind = \"s3\"\nbucket = \"ckpt\"\nbukket = \"x\"",
        "kind = \"tape\"",
        "kind = \"directory\"",
    ] {
        assert!(toml::from_str::<StoreConfig>(text).is_err(), "{text}");
    }
}

#[tokio::test]
async fn an_existing_directory_opens_and_the_probe_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let config = StoreConfig::Directory {
        path: root.path().to_owned(),
        io: FileIoConfig::default(),
        page_cache: PageCacheConfig::default(),
        marker: MarkerConfig::default(),
    };
    open(&config, randomness()).await.unwrap();
    let left = std::fs::read_dir(root.path().join(".storaged")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["tier", "tmp", "uploads"]);
}

#[tokio::test]
async fn a_missing_directory_is_refused_and_not_made() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("not-mounted");
    let config = StoreConfig::Directory {
        path: path.clone(),
        io: FileIoConfig::default(),
        page_cache: PageCacheConfig::default(),
        marker: MarkerConfig::default(),
    };
    let error = open(&config, randomness()).await.unwrap_err();
    assert!(matches!(error, StoreError::NotMounted { .. }), "{error}");
    assert!(
        error.to_string().contains("is the file system mounted?"),
        "{error}"
    );
    assert!(!path.exists());
}

/// As one whose file system answers EIO: that it is not there is not what the system says.
#[tokio::test]
async fn a_directory_that_cannot_be_looked_at_is_not_called_missing() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("loop");
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let config = at(&path, MarkerConfig::default());
    let error = open(&config, randomness()).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    let text = crate::driver::chain(&error);
    assert!(text.contains("symbolic links"), "{text}");
    assert!(!text.contains("mounted"), "{text}");
}

fn at(path: &std::path::Path, marker: MarkerConfig) -> StoreConfig {
    StoreConfig::Directory {
        path: path.to_owned(),
        io: FileIoConfig::Plain,
        page_cache: PageCacheConfig::Bypass,
        marker,
    }
}

#[tokio::test]
async fn a_place_is_recognized_by_its_marker_and_missed_without_it() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("tier");
    std::fs::create_dir(&path).unwrap();
    let config = at(&path, MarkerConfig::Write);
    let store = open(&config, randomness()).await.unwrap();
    store.check_place().await.unwrap();
    let again = open(&config, randomness()).await.unwrap();
    again.check_place().await.unwrap();
    // As when it is unmounted: the directory below is empty.
    let mounted = root.path().join("mounted");
    std::fs::rename(&path, &mounted).unwrap();
    std::fs::create_dir(&path).unwrap();
    let error = store.check_place().await.unwrap_err();
    assert!(matches!(error, StoreError::NotMounted { .. }), "{error}");
    // As when another file system is mounted there.
    let other = Arc::new(SeededRandomness::new(99));
    open(&config, other).await.unwrap();
    let error = store.check_place().await.unwrap_err();
    assert!(error.to_string().contains("expected the tier"), "{error}");
    std::fs::remove_dir_all(&path).unwrap();
    std::fs::rename(&mounted, &path).unwrap();
    store.check_place().await.unwrap();
}

#[tokio::test]
async fn where_a_marker_is_expected_an_empty_place_is_not_touched() {
    let root = tempfile::tempdir().unwrap();
    let config = at(root.path(), MarkerConfig::Expect);
    let error = open(&config, randomness()).await.unwrap_err();
    assert!(matches!(error, StoreError::NotMounted { .. }), "{error}");
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    open(&at(root.path(), MarkerConfig::Write), randomness())
        .await
        .unwrap();
    open(&config, randomness()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_comes_later_is_opened_when_it_is_asked() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("later");
    let store = open_lazily(&at(&path, MarkerConfig::Write), randomness()).unwrap();
    let key = super::key("a");
    for _ in 0..3 {
        let error = store.get(&key, None).await.unwrap_err();
        assert!(matches!(error, StoreError::NotMounted { .. }), "{error}");
    }
    std::fs::create_dir(&path).unwrap();
    let error = store.get(&key, None).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
}

/// What an attempt makes of a store, with nothing to prepare.
async fn settle(store: Arc<dyn Store>) -> Result<Arc<dyn Store>, StoreError> {
    let nothing: Check = Box::new(|| Box::pin(std::future::ready(Ok(()))));
    settled(store, nothing, randomness(), &EmptyPlace::Bucket).await
}

#[tokio::test(start_paused = true)]
async fn a_full_tier_is_opened_read_and_emptied() {
    let disk = Arc::new(FakeStore::new());
    let full = FaultPlan {
        full_after_bytes: Some(0),
        ..FaultPlan::default()
    };
    let faulty = Arc::new(Faulty::new(disk.clone(), full, 1));
    let error = settle(faulty.clone()).await.unwrap_err();
    assert!(
        matches!(error, StoreError::Full { .. }),
        "without its marker it is no tier: {error}"
    );
    let (kept, new) = (super::key("job/kept"), super::key("job/new"));
    let before = settle(disk.clone()).await.unwrap();
    before.put_new(&kept, "bytes".into()).await.unwrap();
    let store = settle(faulty).await.unwrap();
    store.check_place().await.unwrap();
    assert_eq!(store.get(&kept, None).await.unwrap(), "bytes");
    assert_eq!(store.list(&KeyPrefix::root()).await.unwrap().len(), 2);
    let error = store.put_new(&new, "more".into()).await.unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    store.delete(&kept).await.unwrap();
    let error = store.get(&kept, None).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn writes_are_checked_again_where_a_full_tier_was_opened() {
    let (asked, disk) = (Arc::new(AtomicU64::new(0)), Arc::new(FakeStore::new()));
    let counted = asked.clone();
    let check: Check = Box::new(move || {
        let full = counted.fetch_add(1, Ordering::Relaxed) == 0;
        let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let what = "on purpose".to_owned();
        let refused = full.then(|| StoreError::Full {
            what,
            source: source.into(),
        });
        Box::pin(std::future::ready(refused.map_or(Ok(()), Err)))
    });
    let store = Unproven::new(disk, check);
    let (one, two) = (super::key("job/1"), super::key("job/2"));
    let error = store.put_new(&one, "1".into()).await.unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert!(store.length(&one).await.is_err(), "nothing was written");
    store.put_new(&one, "1".into()).await.unwrap();
    store.put_new(&two, "2".into()).await.unwrap();
    assert_eq!(
        asked.load(Ordering::Relaxed),
        2,
        "once it is known to be well"
    );
}
