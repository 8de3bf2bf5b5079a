//! Whether slots could be written to disk: what of this daemon's memory may be swapped out, and whether that is wanted.
//!
//! Slots are shared memory, which is swapped as other memory is, in clear. A control group above the daemon can forbid it
//! (`MemorySwapMax=0` of the unit), so the groups are asked as well as the machine.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::memory_limit::group_folders;
use super::{ConfigError, value};

/// What is done where memory may be swapped out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwapName {
    /// A WARN at the start.
    #[default]
    Warn,
    /// The daemon does not start.
    Refuse,
    /// Nothing: swap is encrypted, or in RAM.
    Allow,
}

/// What the system says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwapState {
    /// The machine has no swap.
    Off,
    /// It has, and a control group of the daemon forbids it.
    Forbidden,
    /// Slots may be written to these.
    Possible { places: Vec<String> },
    /// The system's list cannot be read.
    Unknown,
}

impl fmt::Display for SwapState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Forbidden => f.write_str("on, but not for this control group"),
            Self::Possible { places } => write!(
                f,
                "on ({}): slots could be written there in clear",
                places.join(", ")
            ),
            Self::Unknown => f.write_str("unknown: /proc/swaps cannot be read"),
        }
    }
}

impl SwapState {
    /// Reads it from the system.
    pub fn read() -> Self {
        Self::read_below(Path::new("/"))
    }

    fn read_below(root: &Path) -> Self {
        let Ok(table) = fs::read_to_string(root.join("proc/swaps")) else {
            return Self::Unknown;
        };
        let places = listed(&table);
        let forbids = |folder: &Path| {
            let limit = fs::read_to_string(folder.join("memory.swap.max"));
            limit.is_ok_and(|limit| limit.trim() == "0")
        };
        if places.is_empty() {
            Self::Off
        } else if group_folders(root).iter().any(|folder| forbids(folder)) {
            Self::Forbidden
        } else {
            Self::Possible { places }
        }
    }

    /// Whether the memory of this daemon stays off every disk.
    fn is_safe(&self) -> bool {
        matches!(self, Self::Off | Self::Forbidden)
    }

    /// What the operator should hear at the start; nothing where all is well or allowed.
    pub fn warning(&self, wanted: SwapName) -> Option<String> {
        (wanted == SwapName::Warn && !self.is_safe()).then(|| format!("swap is {self}; {ADVICE}"))
    }

    /// Refuses what may be swapped out, where that is to be refused.
    pub(super) fn check(&self, wanted: SwapName) -> Result<(), ConfigError> {
        match wanted {
            SwapName::Refuse if !self.is_safe() => Err(value(
                "memory.swap",
                format!("expected no swap for this daemon, got swap {self}; {ADVICE}"),
            )),
            _ => Ok(()),
        }
    }
}

/// What really helps.
const ADVICE: &str = "turn it off (swapoff -a), forbid it to the service (MemorySwapMax=0), or set memory.swap = \"allow\" if it is encrypted";

/// The devices and files of `/proc/swaps`, below its heading.
fn listed(table: &str) -> Vec<String> {
    let names = table.lines().skip(1).map(|line| line.split_whitespace());
    names
        .filter_map(|mut line| line.next().map(Into::into))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADING: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
    const DISK: &str = "/dev/sda2                               partition\t8388604\t\t0\t\t-2\n";

    /// What a file tree with these files says.
    fn read(files: &[(&str, &str)]) -> SwapState {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        SwapState::read_below(root.path())
    }

    #[test]
    fn a_machine_without_swap_is_safe() {
        assert_eq!(read(&[("proc/swaps", HEADING)]), SwapState::Off);
        assert_eq!(SwapState::Off.warning(SwapName::Warn), None);
        SwapState::Off.check(SwapName::Refuse).unwrap();
    }

    #[test]
    fn swap_is_warned_of_by_name_or_refused_or_allowed() {
        let table = format!("{HEADING}{DISK}/swap\\040file file 1024 0 -3\n");
        let state = read(&[("proc/swaps", &table)]);
        let places = vec!["/dev/sda2".into(), "/swap\\040file".into()];
        assert_eq!(state, SwapState::Possible { places });
        let warning = state.warning(SwapName::Warn).unwrap();
        assert!(warning.contains("/dev/sda2") && warning.contains("in clear"));
        let refusal = state.check(SwapName::Refuse).unwrap_err().to_string();
        assert!(refusal.contains("memory.swap") && refusal.contains("swapoff"));
        for quiet in [SwapName::Refuse, SwapName::Allow] {
            assert_eq!(state.warning(quiet), None);
        }
        state.check(SwapName::Warn).unwrap();
        state.check(SwapName::Allow).unwrap();
    }

    #[test]
    fn a_group_anywhere_above_that_may_not_swap_is_safe() {
        let table = format!("{HEADING}{DISK}");
        let group = ("proc/self/cgroup", "0::/system.slice/storaged.service\n");
        let slice = "sys/fs/cgroup/system.slice";
        let with = |own: &str, above: &str| {
            read(&[
                ("proc/swaps", &table),
                group,
                (&format!("{slice}/storaged.service/memory.swap.max"), own),
                (&format!("{slice}/memory.swap.max"), above),
            ])
        };
        assert_eq!(with("0\n", "max\n"), SwapState::Forbidden);
        assert_eq!(with("max\n", "0\n"), SwapState::Forbidden);
        assert!(!with("max\n", "1048576\n").is_safe());
        SwapState::Forbidden.check(SwapName::Refuse).unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_safe() {
        let unknown = read(&[]);
        assert_eq!(unknown, SwapState::Unknown);
        assert!(unknown.warning(SwapName::Warn).is_some());
        unknown.check(SwapName::Refuse).unwrap_err();
    }
}
