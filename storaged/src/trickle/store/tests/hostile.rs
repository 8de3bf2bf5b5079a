//! What somebody with write access to the directory puts in place of files and folders: nothing is followed, nothing is waited for,
//! and the error names it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::super::{FileIoConfig, KeyPrefix, PartNumber, Store, StoreError};
use super::{Directory, directory, key, part_bytes, pattern, randomness, upload};

/// The store by `openat2` with both kinds of file I/O, and by a walk over the folders.
async fn stores(root: &Path) -> Vec<Directory> {
    let walking = Directory::walking(root, randomness()).unwrap();
    walking.prepare().await.unwrap();
    let plain = directory(root, FileIoConfig::Plain).await;
    vec![walking, plain, directory(root, FileIoConfig::Auto).await]
}

#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, StoreError>, at: &Path, what: &str) {
    match outcome {
        Err(StoreError::NotPlain { path, got }) => {
            assert_eq!((Path::new(&path), got), (at, what));
        }
        other => panic!(
            "expected {what} at {} to be refused, got {other:?}",
            at.display()
        ),
    }
}

fn fifo(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
}

#[tokio::test]
async fn a_fifo_in_place_of_an_object_is_refused_by_name_and_not_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path().join("job/step/leaves");
    fifo(&at);
    for store in stores(root.path()).await {
        let leaves = key("job/step/leaves");
        // More than there are permits: one that waited for the other end would take the store down.
        for _ in 0..20 {
            refused(store.get(&leaves, None).await, &at, "a FIFO");
        }
        refused(store.length(&leaves).await, &at, "a FIFO");
        let bytes = pattern(10, 1);
        refused(store.put_new(&leaves, bytes).await, &at, "a FIFO");
        let inside = key("job/step/leaves/x");
        refused(store.get(&inside, None).await, &at, "a FIFO");
        let listed = store.list(&KeyPrefix::root()).await.unwrap();
        assert_eq!(listed, [], "a FIFO is no object");
        let page = store.list_page(&KeyPrefix::root(), None, 10).await.unwrap();
        assert_eq!(page.entries, []);
    }
}

#[tokio::test]
async fn a_folder_that_is_a_link_is_refused_by_name_and_nothing_is_written_behind_it() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::create_dir(elsewhere.path().join("step")).unwrap();
    fs::write(elsewhere.path().join("step/secret"), b"secret").unwrap();
    fs::create_dir(root.path().join("job")).unwrap();
    let at = root.path().join("job/run-5");
    symlink(elsewhere.path(), &at).unwrap();
    let link = "a symbolic link";
    for store in stores(root.path()).await {
        let object = key("job/run-5/step/shard");
        refused(store.put_new(&object, pattern(10, 1)).await, &at, link);
        refused(upload(&store, &object, &pattern(10, 1)).await, &at, link);
        refused(
            store.get(&key("job/run-5/step/secret"), None).await,
            &at,
            link,
        );
        refused(store.length(&key("job/run-5/step/secret")).await, &at, link);
        refused(store.delete(&key("job/run-5/step/secret")).await, &at, link);
        let under = KeyPrefix::folder(key("job/run-5"));
        refused(store.list(&under).await, &at, link);
        refused(store.list_page(&under, None, 10).await, &at, link);
        refused(store.list_folders(&under).await, &at, link);
        // Seen from above it is nothing of the store's.
        assert_eq!(store.list(&KeyPrefix::root()).await.unwrap(), []);
        let folders = store.list_folders(&KeyPrefix::folder(key("job"))).await;
        assert_eq!(folders.unwrap(), Vec::<String>::new());
    }
    let there = fs::read_dir(elsewhere.path().join("step")).unwrap().count();
    assert_eq!(there, 1, "nothing was written or removed elsewhere");
}

#[tokio::test]
async fn an_object_that_is_a_link_is_not_read_and_what_it_names_is_not_replaced() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let secret = elsewhere.path().join("secret");
    fs::write(&secret, b"secret").unwrap();
    for (turn, store) in stores(root.path()).await.into_iter().enumerate() {
        let name = format!("job/shard-{turn}");
        let at = root.path().join(&name);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(&secret, &at).unwrap();
        let object = key(&name);
        let link = "a symbolic link";
        refused(store.get(&object, None).await, &at, link);
        refused(store.length(&object).await, &at, link);
        refused(store.put_new(&object, pattern(6, 1)).await, &at, link);
        // An upload takes the link's place.
        upload(&store, &object, &pattern(9, 2)).await.unwrap();
        assert_eq!(store.get(&object, None).await.unwrap(), pattern(9, 2));
        symlink(&secret, root.path().join("job/other")).unwrap();
        store.delete(&key("job/other")).await.unwrap();
        assert_eq!(fs::read(&secret).unwrap(), b"secret");
    }
}

#[tokio::test]
async fn links_among_the_unfinished_lead_nowhere() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let secret = elsewhere.path().join("data");
    fs::write(&secret, b"secret").unwrap();
    for store in stores(root.path()).await {
        let size = part_bytes(&store);
        let begun = store.begin(&key("job/shard"), size).await.unwrap();
        let uploads = root.path().join(".storaged/uploads");
        let folder = fs::read_dir(&uploads).unwrap().next().unwrap().unwrap();
        let data = folder.path().join("data");
        fs::remove_file(&data).unwrap();
        symlink(&secret, &data).unwrap();
        let put = store.put_part(&begun, PartNumber(0), pattern(6, 1)).await;
        refused(put, &data, "a symbolic link");
        assert_eq!(store.resume(&key("job/shard"), size).await.unwrap(), None);
        // A tree in it that links elsewhere goes without what it names.
        symlink(elsewhere.path(), folder.path().join("tree")).unwrap();
        store.abort(&begun).await.unwrap();
        assert!(!folder.path().exists());
        assert_eq!(fs::read(&secret).unwrap(), b"secret");
    }
    let uploads = root.path().join(".storaged/uploads");
    fs::remove_dir(&uploads).unwrap();
    symlink(elsewhere.path(), &uploads).unwrap();
    let store = Directory::new(root.path(), FileIoConfig::Plain.into(), randomness()).unwrap();
    refused(store.prepare().await, &uploads, "a symbolic link");
    let begun = store.begin(&key("job/shard"), part_bytes(&store)).await;
    refused(begun, &uploads, "a symbolic link");
}

#[tokio::test]
async fn a_root_may_be_reached_by_a_link() {
    let root = tempfile::tempdir().unwrap();
    let aside = tempfile::tempdir().unwrap();
    let link = aside.path().join("tier");
    symlink(root.path(), &link).unwrap();
    let bytes = pattern(10, 1);
    for (turn, store) in stores(&link).await.into_iter().enumerate() {
        let store: Arc<dyn Store> = Arc::new(store);
        let (one, two) = (key(&format!("a/{turn}")), key(&format!("b/{turn}")));
        store.put_new(&one, bytes.clone()).await.unwrap();
        upload(&*store, &two, &bytes).await.unwrap();
        assert_eq!(store.get(&one, None).await.unwrap(), bytes);
    }
    assert!(root.path().join("a/0").is_file() && root.path().join("b/2").is_file());
}
