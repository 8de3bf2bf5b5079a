//! What a daemon that starts finds: the descriptors of the one before it.

use std::collections::BTreeMap;
use std::env;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use storaged_arena::take_inherited;

use super::store::SocketStore;
use super::{
    DESCRIPTORS_MAX, DescriptorStore, KEPT_BY_VARIABLE, KeepError, KeptName, NoStore,
    TELLS_OF_HOLDER, TELLS_VARIABLE, UnknownName,
};

/// systemd's first descriptor (`sd_listen_fds(3)`).
const LISTEN_FIRST: RawFd = 3;

/// What the daemon before this one left.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Each name once.
    pub descriptors: Vec<(KeptName, OwnedFd)>,
}

/// Who holds this daemon's descriptors, and what the one before it left.
#[derive(Debug)]
pub struct Holding {
    /// Where descriptors go.
    pub store: Arc<dyn DescriptorStore>,
    /// What was there.
    pub inherited: Inherited,
}

impl Holding {
    /// Nobody, and nothing.
    pub fn nobody() -> Self {
        let store = Arc::new(NoStore);
        let inherited = Inherited::default();
        Self { store, inherited }
    }

    /// systemd, from `NOTIFY_SOCKET` and `LISTEN_*`. The variables stay as they are: this process starts no other, and the number in
    /// `LISTEN_PID` keeps whoever inherits them from believing them.
    ///
    /// # Errors
    /// [`KeepError`] without a usable `NOTIFY_SOCKET`.
    pub fn by_systemd() -> Result<Self, KeepError> {
        let address = env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty());
        let store = SocketStore::to_systemd(&address.ok_or(KeepError::NoAddress)?)?;
        let handed = Handed::of(|name| env::var(name).ok(), std::process::id());
        let found = handed.descriptors.into_iter().filter_map(|(number, name)| {
            match take_inherited(number) {
                Ok(descriptor) => Some((name, descriptor)),
                Err(error) => {
                    tracing::warn!(number, name, %error, "a descriptor that systemd names is not there");
                    None
                }
            }
        });
        let inherited = Inherited::known(found, |name| store.note_unknown(name));
        store.count(inherited.descriptors.iter().map(|(name, _)| *name));
        let store = Arc::new(store);
        Ok(Self { store, inherited })
    }

    /// The keeper, whose process the environment names, and whose socket is the standard input.
    ///
    /// # Errors
    /// [`KeepError`] if it is not this process's parent, or does not answer.
    pub fn by_keeper() -> Result<Self, KeepError> {
        let keeper = env::var(KEPT_BY_VARIABLE).ok();
        let keeper: Option<i32> = keeper.and_then(|text| text.parse().ok());
        // A keeper that ends must not leave a daemon behind that nobody stops and that a second one would meet.
        let bound = set_parent_process_death_signal(Some(Signal::TERM)).map_err(io::Error::from);
        bound.map_err(KeepError::io("asking to be stopped with the keeper"))?;
        // It may have ended before.
        if keeper.is_none() || getppid().map(|it| it.as_raw_nonzero().get()) != keeper {
            return Err(KeepError::KeeperGone);
        }
        let socket = io::stdin().as_fd().try_clone_to_owned();
        let socket: UnixDatagram = socket.map_err(KeepError::io("taking the socket"))?.into();
        let store = SocketStore::to_keeper(socket);
        let found = store.held()?.into_iter();
        if env::var_os(TELLS_VARIABLE).is_some_and(|it| it == TELLS_OF_HOLDER) {
            let asked = store.watch_holder();
            asked.map_err(KeepError::io("asking the keeper about its holder"))?;
        }
        let found = found.map(|(name, descriptor)| (name.to_string(), descriptor));
        let inherited = Inherited::known(found, |name| store.note_unknown(name));
        store.count(inherited.descriptors.iter().map(|(name, _)| *name));
        let store = Arc::new(store);
        Ok(Self { store, inherited })
    }
}

impl Inherited {
    /// Those with names of ours. Others are closed and noted: no daemon of this version would ever free that memory. Of two with one name
    /// the first is kept: systemd lists what it was given last first.
    fn known(found: impl Iterator<Item = (String, OwnedFd)>, note: impl Fn(String)) -> Self {
        let mut known: BTreeMap<KeptName, OwnedFd> = BTreeMap::new();
        for (text, descriptor) in found {
            let name: Result<KeptName, UnknownName> = text.parse();
            match name {
                Ok(name) => {
                    known.entry(name).or_insert(descriptor);
                }
                Err(error) => {
                    tracing::warn!(%error, "a kept descriptor is closed");
                    note(text);
                }
            }
        }
        let descriptors = known.into_iter().collect();
        Self { descriptors }
    }
}

/// What `LISTEN_*` say.
#[derive(Debug, PartialEq, Eq)]
struct Handed {
    descriptors: Vec<(RawFd, String)>,
}

impl Handed {
    /// Nothing if the variables are for another process, or are not there.
    fn of(variable: impl Fn(&str) -> Option<String>, own_pid: u32) -> Self {
        let number = |name| variable(name).and_then(|text| text.parse::<u32>().ok());
        let is_for_us = number("LISTEN_PID") == Some(own_pid);
        let count = number("LISTEN_FDS").filter(|_| is_for_us).unwrap_or(0);
        let count = (count as usize).min(DESCRIPTORS_MAX);
        let names = variable("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let numbers = (LISTEN_FIRST..=RawFd::MAX).zip(0..count);
        // Those without a name are taken too, to be closed.
        let named = numbers.map(|(number, _)| (number, names.next().unwrap_or("").to_owned()));
        Self {
            descriptors: named.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use storaged_wire::SlotId;

    const VARIABLES: [(&str, &str); 3] = [
        ("LISTEN_PID", "7"),
        ("LISTEN_FDS", "3"),
        ("LISTEN_FDNAMES", "slot-1:journal-0"),
    ];

    fn variable(name: &str) -> Option<String> {
        let found = VARIABLES.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn descriptors_of_systemd_have_numbers_and_names() {
        let handed = Handed::of(variable, 7).descriptors;
        let handed: Vec<(RawFd, &str)> = handed.iter().map(|(at, name)| (*at, &**name)).collect();
        assert_eq!(handed, [(3, "slot-1"), (4, "journal-0"), (5, "")]);
    }

    #[test]
    fn those_of_another_process_are_not_touched() {
        assert_eq!(Handed::of(variable, 8).descriptors, []);
        assert_eq!(Handed::of(|_| None, 7).descriptors, []);
        let odd = |name: &str| (name == "LISTEN_PID").then(|| "-7".to_owned());
        assert_eq!(Handed::of(odd, 7).descriptors, []);
    }

    #[test]
    fn unknown_ones_are_closed_and_of_two_the_newer_is_kept() {
        let open = || OwnedFd::from(File::open("/dev/null").unwrap());
        let (newer, older) = (open(), open());
        let number = newer.as_raw_fd();
        let found = [
            ("slot-1".to_owned(), newer),
            ("slot-1".to_owned(), older),
            ("strange".to_owned(), open()),
            ("journal-0".to_owned(), open()),
        ];
        let told = RefCell::new(Vec::new());
        let inherited = Inherited::known(found.into_iter(), |name| {
            told.borrow_mut().push(name);
        });
        let names = inherited.descriptors.iter().map(|(name, _)| *name);
        let slot = KeptName::Slot(SlotId::new(1));
        assert_eq!(names.collect::<Vec<_>>(), [slot, KeptName::Journal(0)]);
        assert_eq!(inherited.descriptors[0].1.as_raw_fd(), number);
        assert_eq!(told.into_inner(), ["strange"]);
    }
}
