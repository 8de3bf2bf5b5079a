//! What the kernel says of a process: its time on the processors and its memory.

use std::iter::Sum;
use std::{fs, io};

/// Seconds on the processors since a process began.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuTime {
    /// In its own code.
    pub user: f64,
    /// In the kernel.
    pub system: f64,
}

impl CpuTime {
    /// Of a process; zeros if it is gone.
    pub fn of(process: u32) -> Self {
        let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        Self::parse(&text).unwrap_or_default()
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name in brackets may have anything in it; fields 14 and 15 are counted from after it.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace().skip(11);
        let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
        let mut seconds = || Some(fields.next()?.parse::<f64>().ok()? / ticks_per_second);
        Some(Self {
            user: seconds()?,
            system: seconds()?,
        })
    }

    /// Both.
    pub fn total(self) -> f64 {
        self.user + self.system
    }

    /// What has come to it since.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            user: self.user - before.user,
            system: self.system - before.system,
        }
    }
}

impl Sum for CpuTime {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::default(), |sum, one| Self {
            user: sum.user + one.user,
            system: sum.system + one.system,
        })
    }
}

/// Bytes of a process in RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentBytes {
    /// Now.
    pub now: u64,
    /// The most at any time.
    pub most: u64,
    /// Now, of its own: in no file and no memfd, so neither slots nor parity.
    pub own: u64,
}

impl ResidentBytes {
    /// Of a process.
    ///
    /// # Errors
    /// If it is gone.
    pub fn of(process: u32) -> io::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{process}/status"))?;
        Self::parse(&text).ok_or_else(|| {
            let what = format!("expected VmRSS, VmHWM and RssAnon, got {text}");
            io::Error::new(io::ErrorKind::InvalidData, what)
        })
    }

    fn parse(status: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
            Some(kibibytes << 10)
        };
        Some(Self {
            now: bytes("VmRSS:")?,
            most: bytes("VmHWM:")?,
            own: bytes("RssAnon:")?,
        })
    }
}

/// The process that another one started and that runs.
pub fn child_of(parent: u32) -> Option<u32> {
    let parent = parent.to_string();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = processes.filter_map(|it| it.file_name().to_str()?.parse().ok());
    numbers.find(|number: &u32| {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let mut fields = fields.split_whitespace();
        let state = fields.next();
        state.is_some_and(|state| state != "Z") && fields.next() == Some(&parent)
    })
}

#[cfg(test)]
mod tests {
    use super::{CpuTime, ResidentBytes};

    #[test]
    fn times_of_a_process_are_found_behind_any_name() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0";
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let (user, system) = (250.0 / ticks, 50.0 / ticks);
        assert_eq!(CpuTime::parse(stat), Some(CpuTime { user, system }));
        assert_eq!(CpuTime::of(u32::MAX), CpuTime::default());
    }

    #[test]
    fn memory_is_in_bytes() {
        let status = "Name:\ta\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t     512 kB\n";
        let (now, most) = (1 << 20, 2 << 20);
        assert_eq!(
            ResidentBytes::parse(status),
            Some(ResidentBytes {
                now,
                most,
                own: 512 << 10
            })
        );
        assert!(ResidentBytes::of(u32::MAX).is_err());
    }
}
