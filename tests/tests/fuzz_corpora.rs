//! What fuzzing began with and what it has found, played again without an engine: every seed and every file of `tests/fuzz/corpus`,
//! through the same functions that `make fuzz` feeds.

use std::alloc::System;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cap::Cap;
use storaged_fuzz::{MEMORY_BYTES_MAX, Target, named, targets};

/// Several targets at once.
const AT_ONCE: usize = 8;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, AT_ONCE * MEMORY_BYTES_MAX);

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

fn found(target: &Target) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(corpus().join(target.name)) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<PathBuf> = paths.collect();
    paths.sort();
    paths
}

fn plays(name: &str) {
    let target = named(name).expect("a target");
    let seeds = (target.seeds)();
    assert!(!seeds.is_empty(), "{name} has something to begin with");
    for (seed, bytes) in seeds {
        eprintln!("{name}: seed {seed}");
        (target.run)(&bytes);
    }
    for path in found(&target) {
        eprintln!("{name}: {}", path.display());
        (target.run)(&fs::read(&path).expect("it can be read"));
    }
}

#[test]
fn node() {
    plays("node");
}

#[test]
fn local() {
    plays("local");
}

#[test]
fn control() {
    plays("control");
}

#[test]
fn records() {
    plays("records");
}

#[test]
fn streams() {
    plays("streams");
}

#[test]
fn data() {
    plays("data");
}

#[test]
fn tier() {
    plays("tier");
}

#[test]
fn http() {
    plays("http");
}

#[test]
fn holder() {
    plays("holder");
}

/// Those above are all, and no folder is of a target that there is none of.
#[test]
fn every_target_is_played() {
    let named: BTreeSet<&str> = targets().iter().map(|target| target.name).collect();
    let played = [
        "control", "data", "holder", "http", "local", "node", "records", "streams", "tier",
    ];
    assert_eq!(named, BTreeSet::from(played));
    let folders = fs::read_dir(corpus()).expect("the corpora are there");
    for folder in folders {
        let name = folder.expect("an entry").file_name();
        let name = name.to_str().expect("a name");
        assert!(named.contains(name), "{name} is of no target");
    }
}
