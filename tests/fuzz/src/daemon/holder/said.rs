//! What is said to a holder in a step, and what comes with it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use storaged::keep::message::{DATAGRAM_MAX, HoldOrder, HolderName, KeeperIdentity, ToHolder};

/// Names that are stored by their number.
const NAMES: u8 = 10;
/// Keepers that differ in more than the number of their process.
const KEEPERS: u8 = 3;

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Attach,
    Store,
    StoreLongName,
    Remove,
    List,
    Anew,
    Count,
    Release,
    Who,
    /// A daemon is named, which runs.
    Daemon,
    /// The daemon that was named last ends.
    DaemonEnds,
    /// A datagram is too long, or has two descriptors.
    Odd,
    /// The connection ends, and another one begins in its place.
    HangUp,
    /// A part of the input's own bytes.
    Say,
    SayWithFile,
}

pub const STEPS: [Step; 15] = [
    Step::Attach,
    Step::Store,
    Step::StoreLongName,
    Step::Remove,
    Step::List,
    Step::Anew,
    Step::Count,
    Step::Release,
    Step::Who,
    Step::Daemon,
    Step::DaemonEnds,
    Step::Odd,
    Step::HangUp,
    Step::Say,
    Step::SayWithFile,
];

/// Three files, each another one. A poll says of all of them what it says of a process that has ended.
pub fn files() -> &'static [File; 3] {
    static FILES: OnceLock<[File; 3]> = OnceLock::new();
    let open = |path: &str| File::open(path).expect("a device of every system");
    FILES.get_or_init(|| ["/dev/null", "/dev/zero", "/dev/full"].map(open))
}

/// What tells files apart.
pub fn identity(file: &File) -> [u64; 2] {
    let found = file.metadata().expect("it is open");
    [found.dev(), found.ino()]
}

/// What comes with a datagram, as the model knows it.
pub enum Comes {
    Nothing,
    /// The file of this index.
    File(usize),
    /// A process, which runs until this is dropped.
    Daemon(UnixStream),
}

/// What is said over a connection.
pub struct Datagram {
    pub body: Vec<u8>,
    pub descriptor: Option<OwnedFd>,
    pub comes: Comes,
}

impl Datagram {
    fn alone(body: impl Into<Vec<u8>>) -> Self {
        Self {
            body: body.into(),
            descriptor: None,
            comes: Comes::Nothing,
        }
    }

    fn with_file(body: impl Into<Vec<u8>>, which: u8) -> Self {
        let index = usize::from(which) % files().len();
        let file = files()[index].try_clone().expect("a descriptor");
        Self {
            body: body.into(),
            descriptor: Some(file.into()),
            comes: Comes::File(index),
        }
    }

    fn with_daemon(body: impl Into<Vec<u8>>) -> Self {
        let (process, life) = UnixStream::pair().expect("a pair of sockets");
        Self {
            body: body.into(),
            descriptor: Some(process.into()),
            comes: Comes::Daemon(life),
        }
    }

    /// What is said in a step, if that is anything.
    pub fn of(step: Step, [which, how]: [u8; 2], own: &[u8]) -> Option<Self> {
        let name = || HolderName::new(&format!("slot-{}", which % NAMES)).expect("a name");
        let keeper = KeeperIdentity {
            process: how.into(),
            mark: (which % KEEPERS).into(),
        };
        Some(match step {
            Step::Attach => Self::alone(HoldOrder::Attach(keeper).encode()),
            Step::Store => Self::with_file(ToHolder::Store(name()).encode(), how),
            Step::StoreLongName => {
                let name = "x".repeat(which.into());
                Self::with_file(format!("FDSTORE=1\nFDNAME={name}"), how)
            }
            Step::Remove => Self::alone(ToHolder::Remove(name()).encode()),
            Step::List => Self::alone(ToHolder::List.encode()),
            Step::Anew => Self::alone(HoldOrder::Anew.encode()),
            Step::Count => Self::alone(HoldOrder::Count.encode()),
            Step::Release => Self::alone(HoldOrder::Release.encode()),
            Step::Who => Self::alone(HoldOrder::Who.encode()),
            Step::Daemon => Self::with_daemon(HoldOrder::Daemon(which.into()).encode()),
            Step::Say => Self::alone(part(own, which, how)),
            Step::SayWithFile => Self::with_file(part(own, which, how), how),
            Step::DaemonEnds | Step::Odd | Step::HangUp => return None,
        })
    }
}

/// Bytes from some place on, as many as fit a datagram at most.
fn part(own: &[u8], from: u8, length: u8) -> &[u8] {
    const { assert!(2 * (1 + u8::MAX as usize) == DATAGRAM_MAX) };
    let from = usize::from(from).min(own.len());
    let length = 2 * (1 + usize::from(length));
    &own[from..own.len().min(from + length)]
}
