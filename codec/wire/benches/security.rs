//! What it costs to authenticate a checkpoint in the durable tier: `make bench-security`, or `cargo bench -p storaged-wire --bench
//! security`; `--write FILE` keeps the figure (docs/bench/security.json). The checkpoint is one of 10,000 ranks, each copied as an
//! increment, whose index the record names. Milliseconds; the median of the rounds.

use std::hint::black_box;
use std::process::exit;
use std::time::Instant;

use storaged_codec::digest;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::provenance::IndexDigest;
use storaged_wire::{DurableStep, ManifestKey, Namespace, Provenance, Rank, RunId, Step};
use tikv_jemallocator::Jemalloc;

/// The daemon's, which makes and reads these records: glibc's gives a third of a megabyte back to the system each time, and faults it in again.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

const RANKS: u32 = 10_000;
const ROUNDS: usize = 201;

fn provenance() -> Provenance {
    let run = RunId::with_identity(7, 0xa6);
    let of = |rank: u32| IndexDigest {
        rank: Rank::new(rank),
        digest: digest(&rank.to_le_bytes()),
    };
    Provenance {
        version: Provenance::VERSION,
        manifest: digest(b"manifest"),
        key: CheckpointKey {
            namespace: Namespace::new("job").expect("a name"),
            run,
            step: Step::new(20),
        },
        predecessor: Some(DurableStep {
            run,
            step: Step::new(10),
            manifest: digest(b"before"),
        }),
        increments: (0..RANKS).map(of).collect(),
    }
}

/// One round as a reader or a publisher has it: the key of a token, the record with its MAC, and the comparison.
fn round(record: &Provenance) -> f64 {
    let began = Instant::now();
    let key = ManifestKey::of_token(&record.key.namespace, black_box(b"0123456789abcdef"));
    let object = record.to_object(&key);
    let read = Provenance::from_object(black_box(&object), &key)
        .and_then(|read| read.for_checkpoint(record.manifest, &record.key));
    let took = began.elapsed().as_secs_f64() * 1000.0;
    assert_eq!(read.as_ref().ok(), Some(record), "its own MAC is right");
    took
}

fn main() {
    if cfg!(debug_assertions) {
        eprintln!("expected a release build, got one with debug assertions: its times say nothing");
        exit(1);
    }
    let record = provenance();
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round(&record)).collect();
    rounds.sort_by(f64::total_cmp);
    let figure = rounds[ROUNDS / 2];
    println!("manifest_mac_ms {figure:.3}");
    let words: Vec<String> = std::env::args().collect();
    let mut after = words.iter().skip_while(|word| *word != "--write");
    if let Some(path) = after.nth(1) {
        write(path, figure);
    }
}

/// Keeps the figure behind those that others have put into the file.
fn write(path: &str, figure: f64) {
    let before = std::fs::read_to_string(path).unwrap_or_default();
    let others = before.lines().filter(|line| line.starts_with("  \""));
    let others = others.filter(|line| !line.contains("manifest_mac_ms"));
    let mut lines: Vec<String> = others
        .map(|line| line.trim_end_matches(',').to_owned())
        .collect();
    lines.push(format!("  \"manifest_mac_ms\": {figure:.3}"));
    lines.sort();
    let text = format!("{{\n{}\n}}\n", lines.join(",\n"));
    std::fs::write(path, text).expect("the file can be written");
}
