//! What the benches of decisions share: a job of eight ranks per node on nodes with names as long as real ones, CPU time,
//! and the file of figures.

use std::collections::BTreeMap;
use std::process::exit;

use rustix::time::{ClockId, clock_gettime};
use storaged_codec::ChunkSize;
use storaged_core::Setup;
use storaged_plan::Member;
use storaged_wire::NodeName;

use crate::testkit::{self, geometry};

pub const RANKS_PER_NODE: usize = 8;
pub const SCHEMA_BYTES_PER_RANK: usize = 200;
pub const K: usize = 8;
pub const M: usize = 2;

/// CPU time of this thread so far, in seconds.
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub fn name(node: usize) -> NodeName {
    NodeName::new(format!("trainer-pool-a-node-{node:05}")).expect("a name")
}

pub fn members(nodes: usize) -> Vec<Member> {
    let member = |node| Member {
        name: name(node),
        failure_domain: format!("node-{node}"),
        cordon: Default::default(),
        seat: None,
    };
    (0..nodes).map(member).collect()
}

pub fn chunk() -> ChunkSize {
    ChunkSize::new(256 << 10).expect("a size")
}

/// One of these members, with parity and with a budget that nothing exceeds.
pub fn setup(name: NodeName, members: Vec<Member>) -> Setup {
    Setup {
        geometry: Some(geometry(K, M)),
        chunk: chunk(),
        budget: 1 << 40,
        shares: BTreeMap::new(),
        ..testkit::setup(name, members)
    }
}

/// The words of the command line, if this is a build whose times say something.
pub fn words() -> Vec<String> {
    if cfg!(debug_assertions) {
        eprintln!("expected a release build, got one with debug assertions: its times say nothing");
        exit(1);
    }
    std::env::args().collect()
}

/// Keeps the figures in the file behind `--write`, if there is one, behind those of other benches that it has already.
pub fn write(words: &[String], figures: &[(String, f64)]) {
    let mut after = words.iter().skip_while(|word| *word != "--write");
    if let Some(path) = after.nth(1) {
        let before = std::fs::read_to_string(path).unwrap_or_default();
        std::fs::write(path, json(&before, figures)).expect("the file can be written");
    }
}

fn json(before: &str, figures: &[(String, f64)]) -> String {
    let is_new = |line: &str| {
        let starts = |name: &str| line.starts_with(&format!("  \"{name}\":"));
        figures.iter().any(|(name, _)| starts(name))
    };
    let kept = before
        .lines()
        .filter(|line| line.starts_with("  \"") && !is_new(line));
    let kept = kept.map(|line| line.trim_end_matches(',').to_owned());
    let new = (figures.iter()).map(|(name, figure)| format!("  \"{name}\": {figure:.3}"));
    let lines: Vec<String> = kept.chain(new).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}
