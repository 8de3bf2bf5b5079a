//! Looks whether the files of certificates have changed, so that whatever renews them need not tell the daemon.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};

use crate::net::TlsFiles;

/// Files that are replaced one after the other are read once nothing has changed for so long.
const SETTLED: Duration = Duration::from_secs(1);

/// The files that are watched, and where a change of one is said.
#[derive(Debug)]
pub(super) struct WatchedFiles {
    pub in_use: watch::Sender<Option<TlsFiles>>,
    pub changes: mpsc::Receiver<()>,
}

/// By what another content is recognized: a file that is put in place has another number, one that is rewritten another time.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileStamp {
    changed: Option<SystemTime>,
    bytes: u64,
    number: u64,
}

fn stamp(path: &Path) -> Option<FileStamp> {
    let found = std::fs::metadata(path).ok()?;
    Some(FileStamp {
        changed: found.modified().ok(),
        bytes: found.len(),
        number: found.ino(),
    })
}

fn stamps(files: &TlsFiles) -> Vec<Option<FileStamp>> {
    files.all().map(stamp).collect()
}

/// Says each time that one of the files has changed, until nobody listens. `files` are those that are in use.
pub(super) async fn watch_files(
    mut files: watch::Receiver<Option<TlsFiles>>,
    every: Duration,
    changed: mpsc::Sender<()>,
) {
    let look = |files: &mut watch::Receiver<Option<TlsFiles>>| {
        files.borrow_and_update().as_ref().map(stamps)
    };
    let mut known = look(&mut files);
    while !changed.is_closed() {
        tokio::time::sleep(every).await;
        let mut found = look(&mut files);
        if found == known {
            continue;
        }
        loop {
            tokio::time::sleep(SETTLED.min(every)).await;
            let now = look(&mut files);
            if now == found {
                break;
            }
            found = now;
        }
        known = found;
        // One that waits to be heeded is enough.
        let _ = changed.try_send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::NodeNaming;

    #[tokio::test]
    async fn a_file_that_changes_is_said_once_and_one_that_does_not_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["ca", "certificate", "key"] {
            std::fs::write(path(name), name).unwrap();
        }
        let files = TlsFiles {
            ca: path("ca"),
            certificate: path("certificate"),
            key: path("key"),
            crl: Some(path("crl")),
            naming: NodeNaming::Dns,
        };
        let (_files, of_files) = watch::channel(Some(files));
        let (changed, mut changes) = mpsc::channel(1);
        let every = Duration::from_millis(5);
        let watching = tokio::spawn(watch_files(of_files, every, changed));
        tokio::time::sleep(every * 20).await;
        assert!(changes.try_recv().is_err(), "nothing has changed");
        // A list that was not there, a key in place of another of the same length and time, a list that is gone.
        for change in 0..3 {
            match change {
                0 => std::fs::write(path("crl"), "list").unwrap(),
                1 => {
                    let before = std::fs::metadata(path("key")).unwrap().modified();
                    std::fs::write(path("new"), "kez").unwrap();
                    let new = std::fs::File::options().write(true).open(path("new"));
                    new.unwrap().set_modified(before.unwrap()).unwrap();
                    std::fs::rename(path("new"), path("key")).unwrap();
                }
                _ => std::fs::remove_file(path("crl")).unwrap(),
            }
            let said = tokio::time::timeout(Duration::from_secs(60), changes.recv());
            said.await.unwrap().unwrap();
            tokio::time::sleep(every * 20).await;
            assert!(changes.try_recv().is_err(), "said once");
        }
        drop(changes);
        watching.await.unwrap();
    }
}
