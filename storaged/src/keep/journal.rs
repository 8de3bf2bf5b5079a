//! The records of a node's memory, in memory that outlives the daemon as well: a log in which the last entry of a name counts. It
//! is written before what it says is promised to anybody. A write that the daemon's end has torn is the last one, and whatever it
//! would have allowed has not been done.
//!
//! When more of it is out of date than not it is written anew, beside the old one, which goes once the new one is held.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};
use rustix::fs::MemfdFlags;
use storaged_codec::{Fingerprint, fingerprint};
use storaged_wire::{RecordName, WireError, decode, encode};
use thiserror::Error;

use super::{DescriptorStore, KeptName};

/// The first bytes of a journal, and the version of all that lies in it.
const MAGIC: [u8; 8] = *b"storaged";
/// Another one for every change of the entries, of the records in them or of what these name, which a release that does not know of it would read
/// wrongly. A field that may be left out of a record is none: such a release goes on without it.
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 12;
/// Length and fingerprint before each entry.
const PREFIX_BYTES: u64 = 4 + Fingerprint::BYTES as u64;
/// So much may be out of date in a journal in which hardly anything is not.
const WASTE_MIN: u64 = 16 << 20;

/// Why records cannot be kept, or not be read.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The system.
    #[error("{what} failed")]
    Os {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// It is no journal.
    #[error("expected a journal of kept memory, got other bytes")]
    Foreign,
    /// Another release wrote it.
    #[error(
        "the memory that was kept for this daemon is of layout {got}, and this release reads layout {VERSION}: start the release that \
         wrote it, or have whoever keeps it let go of it (a holder: `storaged hold --release`; else stop the process of `storaged run`, or the systemd \
         unit)"
    )]
    Version { got: u32 },
}

impl JournalError {
    /// Whether whoever should keep the journal is gone.
    pub fn is_of_nobody(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotConnected};
        let Self::Os { source, .. } = self else {
            return false;
        };
        matches!(
            source.kind(),
            BrokenPipe | ConnectionRefused | ConnectionReset | NotConnected
        )
    }
}

fn os(what: &'static str) -> impl FnOnce(io::Error) -> JournalError {
    move |source| JournalError::Os { what, source }
}

/// An entry: a record, or that there is none of this name any more.
#[derive(Debug, Encode, Decode)]
struct Entry {
    #[n(0)]
    name: RecordName,
    #[n(1)]
    record: Option<ByteVec>,
}

/// Records by their names.
pub type Records = BTreeMap<RecordName, Vec<u8>>;

/// What a journal held, as far as it can be read.
#[derive(Debug, Default)]
pub struct JournalContents {
    pub records: Records,
    /// Bytes after the last sound entry.
    pub torn_bytes: u64,
}

/// Where an entry lies.
#[derive(Debug, Clone, Copy)]
struct Extent {
    offset: u64,
    bytes: u64,
}

/// The journal of a daemon that runs.
#[derive(Debug)]
pub struct MemoryJournal {
    store: Arc<dyn DescriptorStore>,
    number: u64,
    file: File,
    end: u64,
    live: BTreeMap<RecordName, Extent>,
    live_bytes: u64,
    /// Held by whoever keeps descriptors.
    held: bool,
}

impl MemoryJournal {
    /// An empty one that nobody holds yet; its number is above those of all that are held.
    ///
    /// # Errors
    /// [`JournalError::Os`] if there is no memory.
    pub fn new(store: Arc<dyn DescriptorStore>, number: u64) -> Result<Self, JournalError> {
        Ok(Self {
            store,
            number,
            file: empty_file()?,
            end: HEADER_BYTES,
            live: BTreeMap::new(),
            live_bytes: 0,
            held: false,
        })
    }

    /// Has it held from now on: until then a daemon that ends leaves the journal of the one before it.
    ///
    /// # Errors
    /// [`JournalError::Os`] if nobody takes it.
    pub fn publish(&mut self) -> Result<(), JournalError> {
        let name = KeptName::Journal(self.number);
        let held = self.store.store(name, self.file.as_fd());
        held.map_err(os("handing the journal over"))?;
        self.held = true;
        Ok(())
    }

    /// Writes a record.
    ///
    /// # Errors
    /// [`JournalError::Os`] if there is no memory: what it is about must not be promised.
    pub fn put(&mut self, name: &RecordName, record: Vec<u8>) -> Result<(), JournalError> {
        let entry = Entry {
            name: name.clone(),
            record: Some(record.into()),
        };
        let extent = self.append(&encode(&entry))?;
        self.live_bytes += extent.bytes;
        let before = self.live.insert(name.clone(), extent);
        self.live_bytes -= before.map_or(0, |before| before.bytes);
        self.compact_if_worth_it();
        Ok(())
    }

    /// There is no record of this name any more.
    ///
    /// # Errors
    /// As `put`: the memory that it was about must stay.
    pub fn remove(&mut self, name: &RecordName) -> Result<(), JournalError> {
        let Some(before) = self.live.remove(name) else {
            return Ok(());
        };
        self.live_bytes -= before.bytes;
        let entry = Entry {
            name: name.clone(),
            record: None,
        };
        self.append(&encode(&entry))?;
        self.compact_if_worth_it();
        Ok(())
    }

    /// Whether there is a record of this name.
    pub fn has(&self, name: &RecordName) -> bool {
        self.live.contains_key(name)
    }

    /// Nobody holds it any more: what it says is out of date from now on.
    pub fn give_up(self) {
        empty_journal(&self.file);
        self.store.remove(KeptName::Journal(self.number));
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> u64 {
        self.end
    }

    fn append(&mut self, payload: &[u8]) -> Result<Extent, JournalError> {
        let extent = append_to(&self.file, self.end, payload)?;
        self.end += extent.bytes;
        Ok(extent)
    }

    /// What is out of date goes, if that is most of it. Where there is no room for a second one the first goes on: it is sound.
    fn compact_if_worth_it(&mut self) {
        let stale = self.end - HEADER_BYTES - self.live_bytes;
        if stale > self.live_bytes.max(WASTE_MIN)
            && let Err(error) = self.compact()
        {
            tracing::debug!(%error, "the journal of kept memory is not written anew");
        }
    }

    fn compact(&mut self) -> Result<(), JournalError> {
        let old = self.number;
        let mut fresh = Self::new(self.store.clone(), old + 1)?;
        for (name, extent) in &self.live {
            let payload = extent.bytes - PREFIX_BYTES;
            let mut bytes = vec![0; usize::try_from(payload).unwrap_or(usize::MAX)];
            let read = self
                .file
                .read_exact_at(&mut bytes, extent.offset + PREFIX_BYTES);
            read.map_err(os("reading the journal"))?;
            let moved = fresh.append(&bytes)?;
            fresh.live_bytes += moved.bytes;
            fresh.live.insert(name.clone(), moved);
        }
        if self.held {
            fresh.publish()?;
            // Nothing was promised since the two said the same.
            empty_journal(&self.file);
            self.store.remove(KeptName::Journal(old));
        }
        *self = fresh;
        Ok(())
    }
}

fn empty_file() -> Result<File, JournalError> {
    let created = rustix::fs::memfd_create("storaged-journal", MemfdFlags::CLOEXEC);
    let file = File::from(created.map_err(|errno| os("memfd_create")(errno.into()))?);
    let header = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    file.write_all_at(&header, 0)
        .map_err(os("writing the journal"))?;
    Ok(file)
}

/// Takes all records from a journal that another one has taken the place of, whoever has it open. To remove it is not enough: its keeper may be
/// killed before the one that comes after it has reached a holder, and the next daemon would believe it. Without records it frees what is
/// held. Nobody maps a journal, and who reads it at that moment finds an end.
pub fn empty_journal(file: &File) {
    if let Err(error) = file.set_len(HEADER_BYTES) {
        tracing::warn!(%error, "a journal that is out of date cannot be emptied");
    }
}

fn append_to(file: &File, offset: u64, payload: &[u8]) -> Result<Extent, JournalError> {
    let length = u32::try_from(payload.len())
        .map_err(|_| os("writing the journal")(io::ErrorKind::FileTooLarge.into()))?;
    let print = fingerprint(payload);
    let prefix = [&length.to_le_bytes()[..], print.as_bytes()].concat();
    // The prefix last: an entry that is torn has none.
    let write = |bytes: &[u8], at| file.write_all_at(bytes, at);
    let written = write(payload, offset + PREFIX_BYTES).and_then(|()| write(&prefix, offset));
    written.map_err(os("writing the journal"))?;
    let bytes = PREFIX_BYTES + u64::from(length);
    Ok(Extent { offset, bytes })
}

/// What a daemon that has ended left in its journal.
///
/// # Errors
/// Why it cannot be read at all. An entry that is not whole ends it, and is no error.
pub fn read_journal(file: &File) -> Result<JournalContents, JournalError> {
    let length = file.metadata().map_err(os("reading the journal"))?.len();
    let mut header = [0; HEADER_BYTES as usize];
    if length < HEADER_BYTES || file.read_exact_at(&mut header, 0).is_err() {
        return Err(JournalError::Foreign);
    }
    let (magic, version) = header.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(JournalError::Foreign);
    }
    let got = version.try_into().map_or(0, u32::from_le_bytes);
    if got != VERSION {
        return Err(JournalError::Version { got });
    }
    let mut contents = JournalContents::default();
    let mut offset = HEADER_BYTES;
    while let Some((payload, bytes)) = entry_at(file, offset, length) {
        let Ok(Entry { name, record }) = parse(&payload) else {
            break;
        };
        match record {
            Some(record) => drop(contents.records.insert(name, record.into())),
            None => drop(contents.records.remove(&name)),
        }
        offset += bytes;
    }
    contents.torn_bytes = length - offset;
    Ok(contents)
}

fn parse(payload: &[u8]) -> Result<Entry, WireError> {
    decode("an entry of the journal", payload)
}

fn entry_at(file: &File, offset: u64, length: u64) -> Option<(Vec<u8>, u64)> {
    let mut prefix = [0; PREFIX_BYTES as usize];
    file.read_exact_at(&mut prefix, offset).ok()?;
    let (payload_bytes, print) = prefix.split_at(4);
    let payload_bytes = u32::from_le_bytes(payload_bytes.try_into().ok()?);
    let bytes = PREFIX_BYTES + u64::from(payload_bytes);
    // Before the memory for it is taken: a damaged length may be anything.
    if payload_bytes == 0 || offset.checked_add(bytes)? > length {
        return None;
    }
    let mut payload = vec![0; payload_bytes as usize];
    file.read_exact_at(&mut payload, offset + PREFIX_BYTES)
        .ok()?;
    (fingerprint(&payload).as_bytes() == print).then_some((payload, bytes))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::sync::Mutex;

    use super::*;

    /// Holds what it is given, as another process would.
    #[derive(Debug, Default)]
    struct Holder(Mutex<BTreeMap<KeptName, OwnedFd>>);

    impl Holder {
        fn names(&self) -> Vec<KeptName> {
            self.0.lock().unwrap().keys().copied().collect()
        }

        fn contents(&self) -> JournalContents {
            let held = self.0.lock().unwrap();
            let (_, last) = held.last_key_value().unwrap();
            read_journal(&File::from(last.try_clone().unwrap())).unwrap()
        }

        fn file(&self) -> File {
            let held = self.0.lock().unwrap();
            let (_, last) = held.last_key_value().unwrap();
            File::from(last.try_clone().unwrap())
        }
    }

    impl DescriptorStore for Holder {
        fn store(&self, name: KeptName, descriptor: BorrowedFd<'_>) -> io::Result<()> {
            let held = descriptor.try_clone_to_owned()?;
            self.0.lock().unwrap().insert(name, held);
            Ok(())
        }

        fn remove(&self, name: KeptName) {
            self.0.lock().unwrap().remove(&name);
        }

        fn remove_all(&self) -> usize {
            std::mem::take(&mut *self.0.lock().unwrap()).len()
        }
    }

    fn name(number: u64) -> RecordName {
        RecordName::Parity(number)
    }

    fn started() -> (Arc<Holder>, MemoryJournal) {
        let holder = Arc::new(Holder::default());
        let mut journal = MemoryJournal::new(holder.clone(), 1).unwrap();
        journal.publish().unwrap();
        (holder, journal)
    }

    #[test]
    fn the_last_record_of_a_name_counts() {
        let (holder, mut journal) = started();
        journal.put(&name(1), b"one".to_vec()).unwrap();
        journal.put(&name(2), b"two".to_vec()).unwrap();
        journal.put(&name(1), b"other".to_vec()).unwrap();
        journal.remove(&name(2)).unwrap();
        journal.remove(&name(3)).unwrap();
        let contents = holder.contents();
        assert_eq!(contents.torn_bytes, 0);
        let expected = Records::from([(name(1), b"other".to_vec())]);
        assert_eq!(contents.records, expected);
        assert!(journal.has(&name(1)) && !journal.has(&name(2)));
    }

    /// Whatever byte is wrong, what comes before its entry is read and nothing that is wrong is.
    #[test]
    fn damage_and_torn_ends_hide_only_what_comes_after() {
        let (holder, mut journal) = started();
        for number in 0..4 {
            journal.put(&name(number), vec![7; 40]).unwrap();
        }
        let whole = holder.contents().records;
        let file = holder.file();
        let length = file.metadata().unwrap().len();
        for at in HEADER_BYTES..length {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x80], at).unwrap();
            let damaged = holder.contents();
            assert!(damaged.torn_bytes > 0, "byte {at}");
            assert!(damaged.records.iter().all(|(name, it)| whole[name] == *it));
            file.write_all_at(&byte, at).unwrap();
        }
        for end in (HEADER_BYTES..length).rev() {
            file.set_len(end).unwrap();
            assert!(holder.contents().records.len() < 4);
        }
        file.set_len(4).unwrap();
        assert!(matches!(read_journal(&file), Err(JournalError::Foreign)));
    }

    /// What the first release has written is read by every later one that calls itself of the same version.
    #[test]
    fn the_bytes_of_version_one_are_pinned() {
        const WRITTEN: &[u8] = include_bytes!("golden/journal-1");
        let (holder, mut journal) = started();
        journal.put(&name(1), b"one".to_vec()).unwrap();
        journal.put(&name(300), vec![0; 300]).unwrap();
        journal.put(&name(1), b"other".to_vec()).unwrap();
        journal.remove(&name(300)).unwrap();
        let mut bytes = vec![0; journal.bytes() as usize];
        holder.file().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, WRITTEN, "another layout needs another version");
        let kept = rustix::fs::memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(rustix::io::pwrite(&kept, WRITTEN, 0), Ok(WRITTEN.len()));
        let contents = read_journal(&File::from(kept)).unwrap();
        assert_eq!(
            contents.records,
            Records::from([(name(1), b"other".to_vec())])
        );
        assert_eq!(contents.torn_bytes, 0);
    }

    #[test]
    fn another_version_is_refused_by_number() {
        let (holder, _journal) = started();
        let file = holder.file();
        file.write_all_at(&7u32.to_le_bytes(), 8).unwrap();
        let refused = read_journal(&file);
        assert!(matches!(refused, Err(JournalError::Version { got: 7 })));
    }

    #[test]
    fn what_is_out_of_date_does_not_pile_up_and_one_journal_is_held() {
        let (holder, mut journal) = started();
        journal.put(&name(0), vec![1; 100]).unwrap();
        for round in 0..100u64 {
            journal.put(&name(1), vec![round as u8; 1 << 20]).unwrap();
            assert!(journal.bytes() < 40 << 20, "{}", journal.bytes());
        }
        assert_eq!(holder.names().len(), 1);
        let contents = holder.contents();
        assert_eq!(contents.records[&name(0)], vec![1; 100]);
        assert_eq!(contents.records[&name(1)], vec![99; 1 << 20]);
    }

    /// A holder may have it still, and not the one after it.
    #[test]
    fn a_journal_that_another_one_has_replaced_says_nothing_any_more() {
        let (holder, mut journal) = started();
        journal.put(&name(1), vec![1; 100]).unwrap();
        let old = holder.file();
        assert_eq!(read_journal(&old).unwrap().records.len(), 1);
        journal.compact().unwrap();
        let emptied = read_journal(&old).unwrap();
        assert_eq!((emptied.records.len(), emptied.torn_bytes), (0, 0));
        assert_eq!(holder.names(), [KeptName::Journal(2)]);
        assert_eq!(holder.contents().records[&name(1)], vec![1; 100]);
        let next = holder.file();
        journal.give_up();
        assert!(holder.names().is_empty());
        assert_eq!(read_journal(&next).unwrap().records.len(), 0);
    }

    #[test]
    fn before_it_is_published_the_one_before_it_stays() {
        let (holder, mut journal) = started();
        journal.put(&name(1), vec![1]).unwrap();
        let mut next = MemoryJournal::new(holder.clone(), 2).unwrap();
        next.put(&name(2), vec![2]).unwrap();
        assert_eq!(holder.names(), [KeptName::Journal(1)]);
        assert_eq!(holder.contents().records.len(), 1);
        next.publish().unwrap();
        assert!(holder.contents().records.contains_key(&name(2)));
    }
}
