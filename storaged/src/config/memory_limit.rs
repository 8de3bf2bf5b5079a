//! How much RAM this daemon may use: the machine's memory and the limits of every control group above it.
//!
//! A slot that goes beyond a control group's limit is not an error but a SIGKILL, so the limit is read from the group
//! that the daemon is in (a service's `MemoryMax`, a pod's limit) and from each group above, v1 and v2.

use std::fs;
use std::path::{Path, PathBuf};

/// Share of the free memory that a default budget leaves to everybody else: one part in so many.
const HEADROOM_PARTS: u64 = 8;

/// What there is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The smaller of the machine's memory and the control groups' limits.
    pub limit: u64,
    /// What of it nobody uses now.
    pub free: u64,
}

/// A budget that nobody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultBudget {
    /// Half of the limit.
    Half(u64),
    /// Less, because so much is not free.
    Shrunk { wanted: u64, budget: u64 },
}

impl DefaultBudget {
    /// Its bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Half(budget) | Self::Shrunk { budget, .. } => budget,
        }
    }
}

impl MemoryLimit {
    /// Reads it from the system.
    pub fn read() -> Self {
        Self::read_below(Path::new("/"))
    }

    fn read_below(root: &Path) -> Self {
        let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let field = |name| kibibytes(&meminfo, name).unwrap_or(u64::MAX);
        let mut found = Self {
            limit: field("MemTotal:"),
            free: field("MemAvailable:"),
        };
        for group in group_folders(root) {
            if let Some((limit, used)) = group_limit(&group) {
                found.limit = found.limit.min(limit);
                found.free = found.free.min(limit.saturating_sub(used));
            }
        }
        found
    }

    /// Half of the limit, or less where that much is not free.
    pub fn default_budget(self) -> DefaultBudget {
        let wanted = self.limit / 2;
        let budget = self.free - self.free / HEADROOM_PARTS;
        if wanted <= budget {
            DefaultBudget::Half(wanted)
        } else {
            DefaultBudget::Shrunk { wanted, budget }
        }
    }
}

fn kibibytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.split_whitespace().next()?.parse().ok()?;
    number.checked_mul(1024)
}

/// The folders of this process's memory groups and of all groups above, where `/proc/self/cgroup` says; in a container
/// that sees only its own part of the tree some do not exist, and its root carries the limit.
pub(super) fn group_folders(root: &Path) -> Vec<PathBuf> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let mount = match controllers {
            "" => root.join("sys/fs/cgroup"),
            list if list.split(',').any(|one| one == "memory") => root.join("sys/fs/cgroup/memory"),
            _ => continue,
        };
        let below = Path::new(path.trim_start_matches('/'));
        folders.extend(below.ancestors().map(|folder| mount.join(folder)));
    }
    folders
}

/// Limit and use of one group. File cache is not counted as used: the kernel drops it for us.
fn group_limit(folder: &Path) -> Option<(u64, u64)> {
    let number = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"));
    let cache = fs::read_to_string(folder.join("memory.stat")).map_or(0, |stat| {
        ["total_inactive_file ", "inactive_file "]
            .iter()
            .find_map(|name| stat.lines().find_map(|line| line.strip_prefix(name)))
            .and_then(|number| number.trim().parse().ok())
            .unwrap_or(0)
    });
    Some((limit, used.unwrap_or(0).saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file tree with these files, and the limit read from it.
    fn read(files: &[(&str, &str)]) -> MemoryLimit {
        let root = tempfile::tempdir().unwrap();
        let meminfo = "MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    768 kB\n";
        for (name, text) in [("proc/meminfo", meminfo)].iter().chain(files) {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        MemoryLimit::read_below(root.path())
    }

    #[test]
    fn without_groups_the_machine_is_the_limit() {
        let limit = read(&[]);
        assert_eq!((limit.limit, limit.free), (MIB, 768 * 1024));
    }

    #[test]
    fn a_service_of_a_v2_group_has_its_own_limit_and_use() {
        let folder = "sys/fs/cgroup/system.slice/storaged.service";
        let limit = read(&[
            ("proc/self/cgroup", "0::/system.slice/storaged.service\n"),
            (&format!("{folder}/memory.max"), "500000\n"),
            (&format!("{folder}/memory.current"), "300000\n"),
            (
                &format!("{folder}/memory.stat"),
                "anon 7\ninactive_file 100000\n",
            ),
        ]);
        assert_eq!((limit.limit, limit.free), (500_000, 300_000));
    }

    #[test]
    fn the_tightest_group_above_counts() {
        let limit = read(&[
            ("proc/self/cgroup", "0::/pods/one\n"),
            ("sys/fs/cgroup/pods/one/memory.max", "max\n"),
            ("sys/fs/cgroup/pods/memory.max", "400000\n"),
            ("sys/fs/cgroup/pods/memory.current", "1000\n"),
        ]);
        assert_eq!((limit.limit, limit.free), (400_000, 399_000));
    }

    #[test]
    fn a_v1_group_and_the_root_of_a_container_count_too() {
        let folder = "sys/fs/cgroup/memory";
        let limit = read(&[
            (
                "proc/self/cgroup",
                "9:cpu:/x\n4:cpuset,memory:/outside/one\n",
            ),
            (&format!("{folder}/memory.limit_in_bytes"), "600000\n"),
            (&format!("{folder}/memory.usage_in_bytes"), "200000\n"),
        ]);
        assert_eq!((limit.limit, limit.free), (600_000, 400_000));
    }

    #[test]
    fn a_default_that_does_not_fit_shrinks() {
        let limit = |limit, free| MemoryLimit { limit, free }.default_budget();
        assert_eq!(limit(1000, 800), DefaultBudget::Half(500));
        let shrunk = DefaultBudget::Shrunk {
            wanted: 500,
            budget: 350,
        };
        assert_eq!(limit(1000, 400), shrunk);
        assert_eq!(shrunk.bytes(), 350);
    }

    #[test]
    fn this_machine_has_memory() {
        let limit = MemoryLimit::read();
        assert!(limit.limit > MIB && limit.limit < u64::MAX && limit.free <= limit.limit);
    }
}
