//! What the keeper holds, and its holder: descriptors by name.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::DESCRIPTORS_MAX;
use super::message::{HolderName, ToHolder};

/// Descriptors by name, a bounded number of them.
#[derive(Debug)]
pub struct Table {
    held: BTreeMap<HolderName, OwnedFd>,
    /// So many names at most.
    most: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self::of_at_most(DESCRIPTORS_MAX)
    }
}

/// What became of a datagram.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    /// The table has the descriptor by this name now.
    Stored(HolderName),
    /// It has none by this name now.
    Removed(HolderName),
    /// The names of all descriptors are asked for.
    Asked,
    /// What becomes of the keeper's holder is asked for.
    Watched,
    /// It is not of the fixed form, or has a descriptor where there should be none, or none where there should be one. The descriptor
    /// is closed.
    Odd,
    /// The table is full. The descriptor is closed.
    Full,
}

impl Table {
    /// An empty one, for so many names.
    pub fn of_at_most(most: usize) -> Self {
        let held = BTreeMap::new();
        Self { held, most }
    }

    /// An empty one, for as many names as this one.
    pub fn emptied(&self) -> Self {
        Self::of_at_most(self.most)
    }

    /// Does what a datagram says.
    pub fn take(&mut self, body: &[u8], descriptor: Option<OwnedFd>) -> Taken {
        match (ToHolder::decode(body), descriptor) {
            (Some(ToHolder::Store(name)), Some(descriptor)) => {
                if self.held.len() >= self.most && !self.held.contains_key(&name) {
                    return Taken::Full;
                }
                self.put(name.clone(), descriptor);
                Taken::Stored(name)
            }
            (Some(ToHolder::Remove(name)), None) => {
                self.held.remove(&name);
                Taken::Removed(name)
            }
            (Some(ToHolder::List), None) => Taken::Asked,
            (Some(ToHolder::Watch), None) => Taken::Watched,
            _ => Taken::Odd,
        }
    }

    /// Holds a descriptor by a name, in place of the one that the name had.
    pub fn put(&mut self, name: HolderName, descriptor: OwnedFd) {
        self.held.insert(name, descriptor);
    }

    /// How many files another table does not have by the same name.
    pub fn beyond(&self, other: &Self) -> usize {
        let is_there = |name: &HolderName, descriptor: &OwnedFd| {
            let file = other.held.get(name).map(file_of);
            file.is_some_and(|file| file == file_of(descriptor))
        };
        let lacking = self.held.iter().filter(|&(name, it)| !is_there(name, it));
        lacking.count()
    }

    /// All names, in order.
    pub fn names(&self) -> impl Iterator<Item = HolderName> {
        self.held.keys().cloned()
    }

    /// The descriptor of a name.
    pub fn get(&self, name: &HolderName) -> Option<BorrowedFd<'_>> {
        self.held.get(name).map(AsFd::as_fd)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.held.len()
    }
}

/// What tells files apart, whoever has them open.
fn file_of(descriptor: &OwnedFd) -> Option<[u64; 2]> {
    let stat = rustix::fs::fstat(descriptor).ok()?;
    Some([stat.st_dev, stat.st_ino])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    fn file(content: &[u8]) -> Option<OwnedFd> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        Some(file.into())
    }

    fn content(table: &Table, name: &str) -> Option<Vec<u8>> {
        let held = table.get(&HolderName::new(name).unwrap())?;
        let file = File::from(held.try_clone_to_owned().unwrap());
        let mut content = vec![0; 1];
        file.read_exact_at(&mut content, 0).unwrap();
        Some(content)
    }

    fn slot_1() -> HolderName {
        HolderName::new("slot-1").unwrap()
    }

    #[test]
    fn files_that_another_table_lacks_are_counted_by_what_they_are() {
        let (mut one, mut other) = (Table::default(), Table::default());
        let same = file(b"1").unwrap();
        other.put(slot_1(), same.try_clone().unwrap());
        one.put(slot_1(), same);
        assert_eq!(one.beyond(&other), 0);
        one.put(slot_1(), file(b"1").unwrap());
        assert_eq!(one.beyond(&other), 1);
        assert_eq!(one.beyond(&Table::default()), 1);
        assert_eq!(Table::default().beyond(&one), 0);
    }

    #[test]
    fn a_later_descriptor_of_a_name_replaces_the_earlier() {
        let mut table = Table::default();
        for content in [b"1", b"2"] {
            let taken = table.take(b"FDSTORE=1\nFDNAME=slot-1", file(content));
            assert_eq!(taken, Taken::Stored(slot_1()));
        }
        // Of a kind that only later versions know.
        table.take(b"FDSTORE=1\nFDNAME=later-1", file(b"3"));
        assert_eq!(content(&table, "slot-1"), Some(b"2".into()));
        assert_eq!(table.len(), 2);
        assert_eq!(table.take(b"FDLIST=1", None), Taken::Asked);
        assert_eq!(table.take(b"FDHOLDER=1", None), Taken::Watched);
        let names: Vec<String> = table.names().map(|name| name.to_string()).collect();
        assert_eq!(names, ["later-1", "slot-1"]);
        for _ in 0..2 {
            let taken = table.take(b"FDSTOREREMOVE=1\nFDNAME=slot-1", None);
            assert_eq!((taken, table.len()), (Taken::Removed(slot_1()), 1));
        }
    }

    #[test]
    fn what_is_odd_changes_nothing() {
        let mut table = Table::default();
        table.take(b"FDSTORE=1\nFDNAME=slot-1", file(b"1"));
        for (body, descriptor) in [
            (&b"FDSTORE=1\nFDNAME=slot-1"[..], None),
            (b"FDSTORE=1\nFDNAME=", file(b"2")),
            (b"FDSTOREREMOVE=1\nFDNAME=slot-1", file(b"2")),
            (b"FDLIST=1", file(b"2")),
            (b"READY=1", None),
            (b"\xff", None),
        ] {
            assert_eq!(table.take(body, descriptor), Taken::Odd, "{body:?}");
        }
        assert_eq!(content(&table, "slot-1"), Some(b"1".into()));
        assert_eq!(table.len(), 1);
    }
}
