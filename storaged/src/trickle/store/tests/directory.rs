//! What is special to a directory: modes, crashes, a full disk, damaged files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use bytes::Bytes;
use storaged_arena::AlignedBytes;

use super::super::{
    Directory, DirectoryIo, FileIoConfig, PageCacheConfig, PartBytes, PartNumber, Store, StoreError,
};
use super::{directory, key, part_bytes, part_of, pattern, randomness, upload};

#[tokio::test]
async fn files_are_closed_to_others_and_nothing_is_left_over() {
    let root = tempfile::tempdir().unwrap();
    let store = directory(root.path(), FileIoConfig::Auto).await;
    upload(&store, &key("job/7/shard"), &pattern(9000, 1))
        .await
        .unwrap();
    store
        .put_new(&key("job/7/manifest"), pattern(100, 2))
        .await
        .unwrap();
    for name in ["job/7/shard", "job/7/manifest"] {
        let mode = fs::metadata(root.path().join(name))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o137, 0, "{name}: {mode:o}");
    }
    for folder in ["uploads", "tmp"] {
        let left = fs::read_dir(root.path().join(".storaged").join(folder))
            .unwrap()
            .count();
        assert_eq!(left, 0, "{folder}");
    }
    store.delete(&key("job/7/shard")).await.unwrap();
    store.delete(&key("job/7/manifest")).await.unwrap();
    assert!(!root.path().join("job").exists());
}

/// A daemon that is killed between the two leaves its check of the tier behind, and what it was about to give a name.
#[tokio::test]
async fn what_killed_daemons_have_left_goes_when_the_store_is_opened_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    drop(directory(root.path(), FileIoConfig::Plain).await);
    let own = root.path().join(".storaged");
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 24 * 3_600);
    let write = |name: &&str| {
        let file = fs::File::create(own.join(name)).unwrap();
        file.set_modified(old).unwrap();
        file
    };
    let litter = ["probe-00000000000000aa", "tmp/5b"];
    let kept = [
        "tier",
        "uploads/probe-1",
        "probe-00000000000000bb",
        "tmp/6c",
    ];
    for name in litter.iter().chain(&kept) {
        drop(write(name));
    }
    // Another daemon is at these now.
    for name in &kept[2..] {
        let now = std::time::SystemTime::now();
        write(name).set_modified(now).unwrap();
    }
    fs::create_dir(own.join("probe-folder")).unwrap();
    let began = std::time::Instant::now();
    // Where another test's litter is being removed, this one's waits for the next time that a store is opened.
    while litter.iter().any(|name| own.join(name).exists()) {
        drop(directory(root.path(), FileIoConfig::Plain).await);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        assert!(began.elapsed().as_secs() < 20, "litter is still there");
    }
    for name in kept.iter().chain(&["probe-folder"]) {
        assert!(own.join(name).exists(), "{name} is gone");
    }
}

#[tokio::test]
async fn another_process_resumes_and_damage_costs_only_its_part() {
    let root = tempfile::tempdir().unwrap();
    let store = directory(root.path(), FileIoConfig::Plain).await;
    let size = part_bytes(&store);
    let bytes = pattern(3 * size.get() as usize, 1);
    let begun = store.begin(&key("job/shard"), size).await.unwrap();
    for part in [PartNumber(0), PartNumber(1)] {
        store
            .put_part(&begun, part, part_of(&bytes, size, part))
            .await
            .unwrap();
    }
    drop(store);
    let journal = upload_folder(root.path()).join("journal");
    let text = fs::read_to_string(&journal).unwrap();
    // A crash in the middle of part 1's line.
    fs::write(&journal, &text[..text.len() - 20]).unwrap();

    let store = directory(root.path(), FileIoConfig::Auto).await;
    let other_size = super::PartBytes::new(size.get() * 2, &store.limits()).unwrap();
    // What is there is in parts of the size in which it was begun.
    let mut found = store
        .resume(&key("job/shard"), other_size)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(found.part_bytes(), size);
    assert_eq!(
        found.done().keys().copied().collect::<Vec<_>>(),
        [PartNumber(0)]
    );
    for part in [PartNumber(1), PartNumber(2)] {
        let state = store
            .put_part(&found, part, part_of(&bytes, size, part))
            .await
            .unwrap();
        found.note(part, state);
    }
    assert_eq!(
        store
            .resume(&key("job/shard"), size)
            .await
            .unwrap()
            .unwrap(),
        found
    );
    store.complete(&found, bytes.len() as u64).await.unwrap();
    assert_eq!(store.get(&key("job/shard"), None).await.unwrap(), bytes);
}

#[tokio::test]
async fn data_cut_behind_the_journal_is_noticed() {
    let root = tempfile::tempdir().unwrap();
    let store = directory(root.path(), FileIoConfig::Auto).await;
    let size = part_bytes(&store);
    let bytes = pattern(2 * size.get() as usize, 1);
    let mut begun = store.begin(&key("shard"), size).await.unwrap();
    for part in [PartNumber(0), PartNumber(1)] {
        let state = store
            .put_part(&begun, part, part_of(&bytes, size, part))
            .await
            .unwrap();
        begun.note(part, state);
    }
    let data = upload_folder(root.path()).join("data");
    fs::File::options()
        .write(true)
        .open(&data)
        .unwrap()
        .set_len(size.get() + 1)
        .unwrap();
    let found = store.resume(&key("shard"), size).await.unwrap().unwrap();
    assert_eq!(
        found.done().keys().copied().collect::<Vec<_>>(),
        [PartNumber(0)]
    );
    let error = store
        .complete(&begun, bytes.len() as u64)
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Truncated { .. }), "{error}");
}

#[tokio::test]
async fn a_name_for_an_object_and_a_folder_is_a_clear_error() {
    let root = tempfile::tempdir().unwrap();
    let store = directory(root.path(), FileIoConfig::Auto).await;
    store.put_new(&key("a"), pattern(10, 1)).await.unwrap();
    let error = store
        .put_new(&key("a/b"), pattern(10, 1))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
    store.put_new(&key("c/d"), pattern(10, 1)).await.unwrap();
    let error = upload(&store, &key("c"), &pattern(10, 1))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
}

#[tokio::test]
async fn a_full_disk_is_a_typed_error_and_keeps_what_is_older() {
    let root = tempfile::tempdir().unwrap();
    let Some(mount) = SmallDisk::mount(root.path()) else {
        eprintln!("skipped: mounting a small tmpfs needs root");
        return;
    };
    for io in [FileIoConfig::Plain, FileIoConfig::Auto] {
        let store = directory(&mount.0, io).await;
        store
            .put_new(&key("older"), pattern(100_000, 1))
            .await
            .unwrap();
        let error = upload(&store, &key("newer"), &pattern(4 << 20, 2))
            .await
            .unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
        let error = store
            .put_new(&key("manifest"), pattern(2 << 20, 3))
            .await
            .unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
        assert_eq!(
            store.get(&key("older"), None).await.unwrap(),
            pattern(100_000, 1)
        );
        assert!(matches!(
            store.length(&key("newer")).await,
            Err(StoreError::NotFound { .. })
        ));
        for unfinished in store
            .unfinished(&super::super::KeyPrefix::root())
            .await
            .unwrap()
        {
            let upload = store
                .resume(&unfinished, part_bytes(&store))
                .await
                .unwrap()
                .unwrap();
            store.abort(&upload).await.unwrap();
        }
    }
}

/// An upload of a release whose journal said other things of a part: nothing of it counts, and it does not lie there for ever.
#[tokio::test]
async fn an_upload_of_an_earlier_release_is_begun_anew_or_given_up() {
    let root = tempfile::tempdir().unwrap();
    let store = directory(root.path(), FileIoConfig::Plain).await;
    let (key, content) = (key("job/shard"), pattern(100_000, 4));
    let size = part_bytes(&store);
    let begun = store.begin(&key, size).await.unwrap();
    let journal = upload_folder(root.path()).join("journal");
    let earlier = format!(
        "\n{{\"storaged_upload\":1,\"key\":\"{key}\",\"part_bytes\":{}}}\n\n{{\"part\":0,\"length\":3,\"blake3\":\"{}\"}}\n",
        size.get(),
        "0a".repeat(32)
    );
    fs::write(&journal, earlier).unwrap();
    let everywhere = super::super::KeyPrefix::root();
    let listed = store.unfinished(&everywhere).await.unwrap();
    assert_eq!(
        listed,
        std::slice::from_ref(&key),
        "else nobody gives it up"
    );
    let resumed = store.resume(&key, size).await.unwrap();
    assert!(resumed.is_none_or(|upload| upload.done().is_empty()));
    upload(&store, &key, &content).await.unwrap();
    assert_eq!(store.get(&key, None).await.unwrap(), content);
    assert!(!journal.exists(), "{} of {}", journal.display(), begun.id());
    // One of a later release is not understood, and its own.
    store.begin(&key, size).await.unwrap();
    let journal = upload_folder(root.path()).join("journal");
    let text = fs::read_to_string(&journal).unwrap();
    fs::write(&journal, text.replace("_upload\":2", "_upload\":3")).unwrap();
    assert!(store.unfinished(&everywhere).await.unwrap().is_empty());
}

/// Pages of a file that the kernel keeps in memory.
fn pages_cached(path: &Path) -> u64 {
    let mut ask = Command::new("fincore");
    let said = ask.args(["--noheadings", "--output", "PAGES"]).arg(path);
    let said = said.output().unwrap();
    assert!(said.status.success(), "{said:?}");
    String::from_utf8_lossy(&said.stdout)
        .trim()
        .parse()
        .unwrap()
}

/// Whether files there are nothing but pages in memory.
fn is_memory(path: &Path) -> bool {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    rustix::fs::statfs(path).unwrap().f_type as i64 == TMPFS_MAGIC
}

/// Parts of whole blocks pass the cache by; what is left of the last one does not, and neither do bytes from any address.
#[tokio::test]
async fn parts_pass_the_page_cache_by_and_are_all_there() {
    const PART: usize = 64 << 10;
    const LENGTH: usize = 3 * PART + 5_000;
    for calls in [FileIoConfig::Plain, FileIoConfig::Auto] {
        for (page_cache, before, pages) in [
            (PageCacheConfig::Bypass, 0, 0..2),
            (PageCacheConfig::Use, 0, 48..60),
            (PageCacheConfig::Bypass, 1, 48..60),
        ] {
            let root = tempfile::tempdir().unwrap();
            let io = DirectoryIo { calls, page_cache };
            let store = Directory::open(root.path(), io, randomness())
                .await
                .unwrap();
            let content = pattern(LENGTH, 9);
            let mut memory = AlignedBytes::with_room(before + LENGTH);
            memory.append(&vec![0; before]);
            memory.append(&content);
            let bytes = Bytes::from_owner(memory).slice(before..);
            let size = PartBytes::new(PART as u64, &store.limits()).unwrap();
            let mut upload = store.begin(&key("data"), size).await.unwrap();
            for number in 0..4 {
                let part = PartNumber(number);
                let bytes = part_of(&bytes, size, part);
                let state = store.put_part(&upload, part, bytes).await.unwrap();
                upload.note(part, state);
            }
            store.complete(&upload, LENGTH as u64).await.unwrap();
            let cached = pages_cached(&root.path().join("data"));
            let case = format!("{calls:?} {page_cache:?} from {before}: {cached} pages");
            assert!(is_memory(root.path()) || pages.contains(&cached), "{case}");
            assert_eq!(
                store.get(&key("data"), None).await.unwrap(),
                content,
                "{case}"
            );
        }
    }
}

/// Long reads at whole blocks pass the cache by, up to the object's last byte; what they bring is the same as through it.
#[tokio::test]
async fn long_reads_pass_the_page_cache_by_and_are_all_there() {
    const LENGTH: u64 = (3 << 20) + 5_000;
    let block = 4096;
    let all = 0..LENGTH;
    let (middle, tail) = (block..block + (1 << 20) + 7, (1 << 20)..LENGTH);
    let (short, odd) = (0..(1 << 20) - 1, 1..LENGTH);
    for (page_cache, range, is_cached) in [
        (PageCacheConfig::Bypass, all.clone(), false),
        (PageCacheConfig::Bypass, middle, false),
        (PageCacheConfig::Bypass, tail, false),
        (PageCacheConfig::Bypass, short, true),
        (PageCacheConfig::Bypass, odd, true),
        (PageCacheConfig::Use, all, true),
    ] {
        let root = tempfile::tempdir().unwrap();
        let calls = FileIoConfig::Plain;
        let io = DirectoryIo { calls, page_cache };
        let store = Directory::open(root.path(), io, randomness()).await;
        let (store, content) = (store.unwrap(), pattern(LENGTH as usize, 5));
        let path = root.path().join("data");
        fs::write(&path, &content).unwrap();
        forget_pages(&path);
        let read = store.get(&key("data"), Some(range.clone())).await.unwrap();
        let case = format!("{page_cache:?} {range:?}");
        let wanted = range.start as usize..range.end as usize;
        assert!(read == content.slice(wanted), "{case}");
        let cached = pages_cached(&path);
        assert!(
            is_memory(root.path()) || (cached > 4) == is_cached,
            "{case}: {cached} pages"
        );
    }
}

/// Has the page cache forget a file.
fn forget_pages(path: &Path) {
    let file = fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// The folder of the only unfinished upload.
fn upload_folder(root: &Path) -> PathBuf {
    let mut folders = fs::read_dir(root.join(".storaged/uploads")).unwrap();
    folders.next().unwrap().unwrap().path()
}

/// A file system of 1 MiB, unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(under: &Path) -> Option<Self> {
        let path = under.join("disk");
        fs::create_dir(&path).unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", "size=1m", "storaged-test"])
            .arg(&path);
        mount.output().ok()?.status.success().then_some(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, since the io_uring thread may still be closing its files.
        let unmounted = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(
            unmounted.is_ok_and(|status| status.success()),
            "{} stays mounted",
            self.0.display()
        );
    }
}
