//! The daemon's side of a descriptor store: systemd's, or our keeper's, both over datagrams.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use rustix::process::{Resource, getrlimit};
use storaged_arena::{Received, Recipient, recv_datagram, send_datagram};

use super::message::{DATAGRAM_MAX, FromKeeper, HolderName, HolderReport, ToHolder};
use super::{DESCRIPTORS_MAX, DescriptorStore, KeepError, KeptBy, KeptName};

/// A keeper does nothing but answer: one that says nothing for so long is stopped.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// `FileDescriptorStoreMax=` of our unit.
const UNIT_MOST: usize = 4_096;
/// The journal and the one that takes its place, and the same of a daemon that was ended in between.
const JOURNAL_PLACES: usize = 4;
/// What a keeper has open for itself, at most.
const KEEPERS_OWN: usize = 64;

/// Descriptors go to whoever reads a socket.
///
/// systemd holds all descriptors that it was given under one name, and says when to let go of them only by name: a daemon gives a name
/// once.
#[derive(Debug)]
pub struct SocketStore {
    socket: UnixDatagram,
    to: Recipient,
    room: Mutex<Room>,
    /// Names that are not ours, and are held.
    unknown: Mutex<Vec<String>>,
    /// What the keeper has said last of its holder.
    holder: Mutex<Option<HolderReport>>,
}

/// What the holder has, as far as it was told, and how much it takes. Neither systemd nor the keeper answers: what is beyond is closed, and
/// would be taken for held.
#[derive(Debug)]
struct Room {
    names: BTreeSet<KeptName>,
    most: usize,
    /// Nothing is held for this daemon any more.
    is_closed: bool,
}

impl Room {
    fn of(most: usize) -> Mutex<Self> {
        Mutex::new(Self {
            names: BTreeSet::new(),
            most,
            is_closed: false,
        })
    }

    /// The last places are for journals: without a whole one nothing that is held is of use.
    fn has_place_for(&self, name: KeptName) -> bool {
        let spared = match name {
            KeptName::Journal(_) => 0,
            KeptName::Slot(_) | KeptName::Parity(_) => JOURNAL_PLACES,
        };
        self.names.contains(&name) || self.names.len() + spared < self.most
    }
}

impl SocketStore {
    /// systemd's, at the address that `NOTIFY_SOCKET` has. It is looked up for each datagram: a systemd that starts anew may bind it
    /// again.
    ///
    /// # Errors
    /// [`KeepError::Address`] for what is no address of a socket.
    pub fn to_systemd(address: &OsStr) -> Result<Self, KeepError> {
        let to = Recipient::named(address.as_bytes());
        let to = to.map_err(|source| KeepError::Address {
            address: address.to_string_lossy().into_owned(),
            source,
        })?;
        let socket = UnixDatagram::unbound().map_err(KeepError::io("making a socket"))?;
        // Newer versions of systemd say how many, older ones have what our unit asks for.
        let said = std::env::var("FDSTORE").ok();
        let most = said.and_then(|text| text.parse().ok());
        let room = Room::of(most.unwrap_or(UNIT_MOST));
        Ok(Self {
            socket,
            to,
            room,
            unknown: Mutex::default(),
            holder: Mutex::default(),
        })
    }

    /// The keeper's, over the socket that it gave to this process.
    pub fn to_keeper(socket: UnixDatagram) -> Self {
        let to = Recipient::Peer;
        // It has this process's limit, and some descriptors of its own.
        let open = getrlimit(Resource::Nofile).current;
        let open = open.and_then(|open| usize::try_from(open).ok());
        let open = open.unwrap_or(DESCRIPTORS_MAX).saturating_sub(KEEPERS_OWN);
        let room = Room::of(open.min(DESCRIPTORS_MAX));
        Self {
            socket,
            to,
            room,
            unknown: Mutex::default(),
            holder: Mutex::default(),
        }
    }

    /// These are held already.
    pub(super) fn count(&self, names: impl Iterator<Item = KeptName>) {
        self.room().names.extend(names);
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, message: &ToHolder, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        send_datagram(
            &self.socket,
            &self.to,
            message.encode().as_bytes(),
            descriptor,
        )
    }

    /// Something is held by a name that is not one of ours.
    pub(super) fn note_unknown(&self, name: String) {
        self.unknown().push(name);
    }

    fn unknown(&self) -> MutexGuard<'_, Vec<String>> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of something by the name that it has there.
    fn let_go(&self, name: &str) {
        let Some(name) = HolderName::new(name) else {
            return;
        };
        if let Err(error) = self.say(&ToHolder::Remove(name), None) {
            tracing::debug!(%error, "nobody holds descriptors any more");
        }
    }

    /// What the keeper holds. Before anything is stored: answers are not told apart.
    ///
    /// # Errors
    /// [`KeepError`] if it does not answer, or says something else.
    pub fn held(&self) -> Result<Vec<(HolderName, OwnedFd)>, KeepError> {
        let asking = KeepError::io("asking the keeper for descriptors");
        let limit = self.socket.set_read_timeout(Some(ANSWER_WAIT));
        let asked = limit.and_then(|()| self.say(&ToHolder::List, None));
        asked.map_err(asking)?;
        let mut held = Vec::new();
        let mut body = [0; DATAGRAM_MAX];
        loop {
            let answer = recv_datagram(&self.socket, &mut body);
            let answer = answer.map_err(KeepError::io("waiting for the keeper's descriptors"))?;
            let Received::Whole { length, descriptor } = answer else {
                // A descriptor that this process has no room for; the count at the end shows it.
                continue;
            };
            match (FromKeeper::decode(&body[..length]), descriptor) {
                (Some(FromKeeper::Held(name)), Some(descriptor)) => held.push((name, descriptor)),
                (Some(FromKeeper::End(count)), None) => {
                    if count != held.len() {
                        let got = held.len();
                        tracing::warn!(count, got, "the keeper's descriptors did not all arrive");
                    }
                    return Ok(held);
                }
                _ => return Err(KeepError::Answer),
            }
        }
    }
}

impl SocketStore {
    /// Has the keeper say how it is with its holder, now and at each change. After [`Self::held`]: answers are not told apart.
    ///
    /// # Errors
    /// What the system says.
    pub fn watch_holder(&self) -> io::Result<()> {
        self.say(&ToHolder::Watch, None)
    }

    /// What the keeper has said of its holder, which is not waited for: what has come is read, and the last of it counts.
    fn heard_of_holder(&self) -> Option<HolderReport> {
        let heard = self.holder.lock();
        let mut heard = heard.unwrap_or_else(PoisonError::into_inner);
        let mut body = [0_u8; DATAGRAM_MAX];
        while let Ok((length @ 1.., _)) = recv(&self.socket, &mut body, RecvFlags::DONTWAIT) {
            if let Some(FromKeeper::Holder(report)) = FromKeeper::decode(&body[..length]) {
                *heard = Some(report);
            }
        }
        *heard
    }
}

impl DescriptorStore for SocketStore {
    fn store(&self, name: KeptName, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let mut room = self.room();
        if room.is_closed {
            return Err(io::Error::other(
                "this daemon has had all of its memory let go of",
            ));
        }
        if !room.has_place_for(name) {
            let most = room.most;
            return Err(io::Error::other(format!(
                "its holder takes {most} descriptors: raise FileDescriptorStoreMax= or the limit of open files"
            )));
        }
        // What is in the queue is safe: the kernel holds the descriptor for it, and whoever reads the queue goes on doing so after
        // the end of this process.
        self.say(&ToHolder::Store(name.into()), Some(descriptor))?;
        room.names.insert(name);
        Ok(())
    }

    fn remove(&self, name: KeptName) {
        self.room().names.remove(&name);
        self.let_go(&name.to_string());
    }

    fn kept_by(&self) -> KeptBy {
        match self.to {
            Recipient::At(_) => KeptBy::Systemd,
            Recipient::Peer => KeptBy::Keeper(self.heard_of_holder()),
        }
    }

    fn remove_unknown(&self) {
        let names = std::mem::take(&mut *self.unknown());
        names.iter().for_each(|name| self.let_go(name));
    }

    fn remove_all(&self) -> usize {
        let names = {
            let mut room = self.room();
            room.is_closed = true;
            std::mem::take(&mut room.names)
        };
        for name in &names {
            self.let_go(&name.to_string());
        }
        self.remove_unknown();
        names.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::DescriptorStore;
    use std::os::fd::AsFd;
    use std::thread;
    use storaged_arena::Slot;
    use storaged_wire::SlotId;

    /// What is beyond its room a holder closes without a word.
    #[test]
    fn what_has_no_place_is_refused_and_journals_have_the_last_ones() {
        let (here, _there) = UnixDatagram::pair().unwrap();
        let store = SocketStore::to_keeper(here);
        store.room().most = 1 + JOURNAL_PLACES;
        let memory = slot(b"x");
        let give = |name| store.store(name, memory.as_fd());
        give(SLOT).unwrap();
        let other = KeptName::Slot(SlotId::new(4));
        assert!(give(other).is_err());
        for number in 0..4 {
            give(KeptName::Journal(number)).unwrap();
        }
        assert!(give(KeptName::Journal(4)).is_err());
        store.remove(KeptName::Journal(0));
        give(KeptName::Journal(4)).unwrap();
        give(SLOT).unwrap();
    }

    #[test]
    fn whoever_has_let_go_of_all_hands_nothing_over_any_more() {
        let (here, there) = UnixDatagram::pair().unwrap();
        let store = SocketStore::to_keeper(here);
        store.count([KeptName::Parity(0)].into_iter());
        store.store(SLOT, slot(b"x").as_fd()).unwrap();
        assert_eq!(store.remove_all(), 2);
        let said: Vec<String> = (0..3).map(|_| next(&there).0).collect();
        assert_eq!(
            said,
            [
                "FDSTORE=1\nFDNAME=slot-3",
                "FDSTOREREMOVE=1\nFDNAME=slot-3",
                "FDSTOREREMOVE=1\nFDNAME=parity-0",
            ]
        );
        assert!(store.store(SLOT, slot(b"x").as_fd()).is_err());
        assert_eq!(store.remove_all(), 0);
    }

    const SLOT: KeptName = KeptName::Slot(SlotId::new(3));

    fn slot(content: &[u8]) -> Slot {
        let slot = Slot::create(4096).unwrap();
        slot.write_at(0, content).unwrap();
        slot
    }

    fn content(descriptor: OwnedFd) -> [u8; 4] {
        let mut content = [0; 4];
        let slot = Slot::adopt(descriptor).unwrap();
        slot.read_at(0, &mut content).unwrap();
        content
    }

    fn next(socket: &UnixDatagram) -> (String, Option<OwnedFd>) {
        let mut body = [0; DATAGRAM_MAX];
        match recv_datagram(socket, &mut body).unwrap() {
            Received::Whole { length, descriptor } => {
                let text = str::from_utf8(&body[..length]).unwrap();
                (text.into(), descriptor)
            }
            Received::Odd => panic!("an odd datagram"),
        }
    }

    #[test]
    fn systemd_is_told_at_its_path_and_without_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let here = UnixDatagram::bind(&path).unwrap();
        let store = SocketStore::to_systemd(path.as_os_str()).unwrap();
        store.store(SLOT, slot(b"seen").as_fd()).unwrap();
        store.remove(SLOT);
        assert_eq!(store.kept_by(), KeptBy::Systemd);
        let (said, descriptor) = next(&here);
        assert_eq!(said, "FDSTORE=1\nFDNAME=slot-3");
        assert_eq!(&content(descriptor.unwrap()), b"seen");
        let (said, descriptor) = next(&here);
        assert_eq!(said, "FDSTOREREMOVE=1\nFDNAME=slot-3");
        assert!(descriptor.is_none());
        // Bound again, as by a systemd that was started anew.
        drop(here);
        std::fs::remove_file(&path).unwrap();
        assert!(store.store(SLOT, slot(b"").as_fd()).is_err());
        let here = UnixDatagram::bind(&path).unwrap();
        store.store(SLOT, slot(b"").as_fd()).unwrap();
        assert!(next(&here).1.is_some());

        let name = format!("storaged-test-{}", std::process::id());
        let address = {
            use std::os::linux::net::SocketAddrExt;
            std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap()
        };
        let here = UnixDatagram::bind_addr(&address).unwrap();
        let store = SocketStore::to_systemd(OsStr::new(&format!("@{name}"))).unwrap();
        store.store(SLOT, slot(b"").as_fd()).unwrap();
        assert!(next(&here).1.is_some());
        assert!(SocketStore::to_systemd(OsStr::new("nowhere")).is_err());
    }

    #[test]
    fn a_keeper_that_is_gone_is_an_error() {
        let (here, there) = UnixDatagram::pair().unwrap();
        let store = SocketStore::to_keeper(here);
        drop(there);
        let gone = store.store(SLOT, slot(b"").as_fd()).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
        store.remove(SLOT);
        assert!(store.held().is_err());
    }

    #[test]
    fn a_full_queue_is_waited_for() {
        const COUNT: usize = 2000;
        let (here, there) = UnixDatagram::pair().unwrap();
        let store = SocketStore::to_keeper(here);
        let sending = thread::spawn(move || {
            let slot = slot(b"");
            (0..COUNT).all(|_| store.store(SLOT, slot.as_fd()).is_ok())
        });
        thread::sleep(Duration::from_millis(100));
        assert!(!sending.is_finished(), "so many fit the queue at once");
        assert!((0..COUNT).all(|_| next(&there).1.is_some()));
        assert!(sending.join().unwrap());
    }

    fn answer(keeper: &UnixDatagram, text: &str, descriptor: Option<BorrowedFd<'_>>) {
        send_datagram(keeper, &Recipient::Peer, text.as_bytes(), descriptor).unwrap();
    }

    #[test]
    fn what_the_keeper_holds_is_taken_up_to_its_end() {
        let (here, keeper) = UnixDatagram::pair().unwrap();
        let held = slot(b"held");
        answer(&keeper, "FDNAME=slot-3", Some(held.as_fd()));
        answer(&keeper, "FDNAME=other", Some(held.as_fd()));
        // One that was lost on the way.
        answer(&keeper, "END=3", None);
        let held = SocketStore::to_keeper(here).held().unwrap();
        let names: Vec<&str> = held.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["slot-3", "other"]);
        assert_eq!(next(&keeper).0, "FDLIST=1");
    }

    #[test]
    fn what_the_keeper_says_of_its_holder_is_heard_without_waiting_and_the_last_of_it_counts() {
        let (here, keeper) = UnixDatagram::pair().unwrap();
        let store = SocketStore::to_keeper(here);
        assert_eq!(store.kept_by(), KeptBy::Keeper(None));
        store.watch_holder().unwrap();
        assert_eq!(next(&keeper).0, "FDHOLDER=1");
        answer(&keeper, "HOLDER=all", None);
        assert_eq!(store.kept_by().holder(), Some(HolderReport::HasAll));
        for text in ["HOLDER=none", "HOLDERLACKS=7", "what", "END=1"] {
            answer(&keeper, text, None);
        }
        let lacks = HolderReport::Lacks { since: 7 };
        for _ in 0..2 {
            assert_eq!(store.kept_by(), KeptBy::Keeper(Some(lacks)));
        }
        // What it said last is all that is known once it is gone.
        drop(keeper);
        assert_eq!(store.kept_by().holder(), Some(lacks));
    }

    #[test]
    fn another_answer_of_the_keeper_is_an_error() {
        for text in ["FDNAME=slot-1", "what", "END=x"] {
            let (here, keeper) = UnixDatagram::pair().unwrap();
            answer(&keeper, text, None);
            let refused = SocketStore::to_keeper(here).held();
            assert!(matches!(refused, Err(KeepError::Answer)), "{text}");
        }
    }
}
