//! The machine as the kernel describes it, and the cores to measure on.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::case::Caches;

/// What the caches of a core have where the kernel does not say.
const CACHES_DEFAULT: Caches = Caches {
    first: 32 << 10,
    second: 512 << 10,
};

/// What the last-level cache has where the kernel does not say.
const LAST_LEVEL_DEFAULT: usize = 64 << 20;

/// What figures depend on.
#[derive(Clone, Debug)]
pub struct Machine {
    /// In words, on one line.
    pub description: String,
    /// Caches of the first core.
    pub caches: Caches,
    /// Bytes of last-level cache of the first core.
    pub last_level_bytes: usize,
}

impl Machine {
    /// This machine.
    pub fn read() -> Self {
        let caches = caches();
        let size = |level: u8, default: usize| {
            let found = caches.iter().find(|cache| cache.level == level);
            found.map_or(default, |cache| cache.bytes)
        };
        let last = caches.iter().max_by_key(|cache| cache.level);
        Self {
            description: describe(&caches),
            caches: Caches {
                first: size(1, CACHES_DEFAULT.first),
                second: size(2, CACHES_DEFAULT.second),
            },
            last_level_bytes: last.map_or(LAST_LEVEL_DEFAULT, |cache| cache.bytes),
        }
    }
}

/// Cores that this process may use.
pub fn cores_usable() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The calling thread, and whatever it starts from now on, on some of its processors; on all of them again when this is dropped.
#[derive(Debug)]
pub struct Confined(CpuSet);

impl Confined {
    /// To the first `count`: one thread of each core before a second one.
    ///
    /// # Errors
    /// If the kernel refuses, or there are not so many.
    pub fn to(count: usize) -> Result<Self> {
        let all = sched_getaffinity(None).context("asking for the allowed processors")?;
        let mut seen = BTreeSet::new();
        let allowed = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
        let (firsts, seconds): (Vec<_>, Vec<_>) =
            allowed.partition(|cpu| seen.insert(core_of(*cpu)));
        let found = firsts.len() + seconds.len();
        ensure!(found >= count, "expected {count} processors, got {found}");
        let mut some = CpuSet::new();
        let chosen = firsts.into_iter().chain(seconds).take(count);
        chosen.for_each(|cpu| some.set(cpu));
        sched_setaffinity(None, &some).with_context(|| format!("keeping to {count} processors"))?;
        Ok(Self(all))
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        // It was allowed before; if it is no longer, the kernel knows better.
        let _ = sched_setaffinity(None, &self.0);
    }
}

struct Cache {
    level: u8,
    bytes: usize,
}

/// The data caches of the first core.
fn caches() -> Vec<Cache> {
    let read = |index: usize| {
        let of = |name: &str| {
            line(&format!(
                "/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"
            ))
        };
        let kibibytes: usize = of("size")?.strip_suffix('K')?.parse().ok()?;
        let level = of("level")?.parse().ok()?;
        let bytes = kibibytes << 10;
        (of("type")? != "Instruction").then_some(Cache { level, bytes })
    };
    (0..8).filter_map(read).collect()
}

fn describe(caches: &[Cache]) -> String {
    let cpu = text("/proc/cpuinfo")
        .and_then(|text| field(&text, "model name"))
        .unwrap_or_else(|| std::env::consts::ARCH.into());
    let count = cores_usable();
    let caches = caches
        .iter()
        .map(|cache| format!("L{} {} KiB", cache.level, cache.bytes >> 10));
    let memory = text("/proc/meminfo")
        .and_then(|text| field(&text, "MemTotal"))
        .and_then(|total| total.strip_suffix(" kB")?.parse::<f64>().ok())
        .map(|kibibytes| format!("{:.1} GiB memory", kibibytes / f64::from(1 << 20)));
    let uname = rustix::system::uname();
    let kernel = format!("Linux {}", uname.release().to_string_lossy());
    let governor = line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        .unwrap_or_else(|| "not readable".into());
    let huge = line("/sys/kernel/mm/transparent_hugepage/enabled")
        .and_then(|all| Some(all.split_once('[')?.1.split_once(']')?.0.to_owned()))
        .unwrap_or_else(|| "not readable".into());
    let features = text("/proc/cpuinfo").map(|text| features(&text));
    let parts = [cpu, format!("{count} cores")]
        .into_iter()
        .chain(features.filter(|features| !features.is_empty()))
        .chain(caches)
        .chain(memory)
        .chain([
            kernel,
            format!("governor {governor}"),
            format!("transparent huge pages {huge}"),
        ]);
    parts.collect::<Vec<_>>().join(", ")
}

/// The processor's features that the engines, the digests and the transport's cipher choose by.
fn features(cpuinfo: &str) -> String {
    let flags = field(cpuinfo, "flags").unwrap_or_default();
    let has = |wanted: &&str| flags.split_whitespace().any(|flag| flag == *wanted);
    let known = ["avx2", "avx512f", "gfni", "vaes"];
    known.into_iter().filter(has).collect::<Vec<_>>().join(" ")
}

fn text(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn line(path: &str) -> Option<String> {
    text(path).map(|text| text.trim().to_owned())
}

/// What stands after the colon of the first line with this name.
fn field(text: &str, name: &str) -> Option<String> {
    let mut named = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = named.find(|(key, _)| key.trim() == name)?;
    Some(value.trim().to_owned())
}

/// Up to `count` processors that this process may run on, no two of them threads of one core.
///
/// # Errors
/// If there are not so many.
pub fn cores(count: usize) -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("asking for the allowed processors")?;
    let mut seen = BTreeSet::new();
    let found: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allowed.is_set(*cpu))
        .filter(|cpu| seen.insert(core_of(*cpu)))
        .take(count)
        .collect();
    ensure!(
        found.len() == count,
        "expected {count} cores to measure on, got {}: allow more processors",
        found.len()
    );
    Ok(found)
}

/// The threads of a processor's core, as the kernel lists them; the processor itself where it does not.
fn core_of(cpu: usize) -> String {
    line(&format!(
        "/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    ))
    .unwrap_or_else(|| cpu.to_string())
}

/// Keeps the calling thread on one processor.
///
/// # Errors
/// If the kernel refuses.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("pinning to processor {cpu}"))
}

#[cfg(test)]
mod tests {
    use super::{Confined, Machine, cores, cores_usable, features, field, pin};

    #[test]
    fn the_machine_is_described() {
        let machine = Machine::read();
        assert!(machine.description.contains("Linux "));
        assert!(machine.caches.second > 0 && machine.last_level_bytes > 0);
        assert_eq!(field("a : 1\nb\t: x y\n", "b").as_deref(), Some("x y"));
        assert_eq!(field("a : 1\n", "b"), None);
        assert_eq!(features("flags\t: fpu avx2 gfni x\n"), "avx2 gfni");
    }

    #[test]
    fn a_thread_can_be_pinned_to_a_core_there_is() {
        let one = cores(1).expect("a core");
        pin(one[0]).expect("allowed");
        assert_eq!(cores(1).expect("a core"), one);
        assert!(cores(100_000).is_err());
    }

    #[test]
    fn a_thread_is_confined_until_it_is_not() {
        let before = cores_usable();
        let confined = Confined::to(1).expect("a processor");
        assert_eq!(cores_usable(), 1);
        drop(confined);
        assert_eq!(cores_usable(), before);
        assert!(Confined::to(100_000).is_err());
        assert_eq!(cores_usable(), before);
    }
}
