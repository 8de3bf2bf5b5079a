//! Fuzz targets: what hostile users, peers and tiers can feed the daemon. Each target is a function of bytes that panics where
//! something does not hold. libFuzzer calls them (`make fuzz`), and so does a test with every input of the corpora.

#[path = "../../../codec/wire/tests/fuzz/index.rs"]
mod index;
#[path = "../../../codec/wire/tests/fuzz/places.rs"]
mod places;
#[allow(dead_code, reason = "the records' own tests use all of it")]
#[path = "../../../codec/wire/tests/fuzz/restart.rs"]
mod restart;
#[path = "../../../codec/wire/tests/fuzz/running.rs"]
mod running;
#[allow(dead_code, reason = "of some records only the messages are wanted")]
#[path = "../../../codec/wire/tests/fuzz/samples.rs"]
mod samples;
#[path = "../../../codec/wire/tests/fuzz/succession.rs"]
mod succession;
#[path = "../../../storaged/core/tests/testkit/mod.rs"]
mod testkit;

#[cfg(feature = "daemon")]
mod daemon;
mod node;
mod records;
mod twist;

/// What a target and its engine's own tables may hold: a length that is believed before its bytes are there exceeds it at once, and the
/// process ends.
pub const MEMORY_BYTES_MAX: usize = 512 << 20;

/// Inputs, each with a name.
pub type Inputs = Vec<(String, Vec<u8>)>;

/// Something that bytes are fed to.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    /// Panics where something does not hold.
    pub run: fn(&[u8]),
    /// What fuzzing begins with.
    pub seeds: fn() -> Inputs,
}

/// There is no target of this name in this build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownTarget(String);

impl std::fmt::Display for UnknownTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known: Vec<&str> = targets().iter().map(|target| target.name).collect();
        write!(f, "expected one of {known:?}, got {:?}", self.0)
    }
}

impl std::error::Error for UnknownTarget {}

/// All targets of this build.
pub fn targets() -> Vec<Target> {
    let target = |name, run, seeds| Target { name, run, seeds };
    let decisions = [
        target("node", node::node, node::seeds::seeds),
        target("local", node::local, node::local_seeds),
        target("control", node::control, node::control_seeds),
        target("records", records::records, records::record_seeds),
        target("streams", records::streams, records::stream_seeds),
    ];
    #[cfg(feature = "daemon")]
    let effects = [
        target("data", daemon::data, daemon::data_seeds),
        target("tier", daemon::tier, daemon::tier_seeds),
        target("http", daemon::http, daemon::http_seeds),
        target("holder", daemon::holder, daemon::holder_seeds),
    ];
    #[cfg(not(feature = "daemon"))]
    let effects = [];
    decisions.into_iter().chain(effects).collect()
}

/// The target of a name.
///
/// # Errors
/// [`UnknownTarget`] if there is none.
pub fn named(name: &str) -> Result<Target, UnknownTarget> {
    let found = targets().into_iter().find(|target| target.name == name);
    found.ok_or_else(|| UnknownTarget(name.into()))
}

/// The target that `STORAGED_FUZZ_TARGET` names.
///
/// # Errors
/// [`UnknownTarget`] if there is none.
pub fn chosen() -> Result<Target, UnknownTarget> {
    named(&std::env::var("STORAGED_FUZZ_TARGET").unwrap_or_default())
}
