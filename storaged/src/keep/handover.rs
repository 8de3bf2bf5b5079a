//! What is handed over as it is made, and taken back as it goes. Where the store takes nothing, the daemon goes on: it
//! protects training as before, and a restart loses its RAM.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::{DescriptorStore, KeptBy, KeptName};

/// A store, and what it did not take.
#[derive(Debug)]
pub(crate) struct Handover {
    store: Arc<dyn DescriptorStore>,
    missing: Mutex<BTreeSet<KeptName>>,
}

impl Handover {
    /// To this store.
    pub fn new(store: Arc<dyn DescriptorStore>) -> Self {
        let missing = Mutex::default();
        Self { store, missing }
    }

    /// Hands a descriptor over.
    pub fn hand(&self, name: KeptName, descriptor: BorrowedFd<'_>) {
        let Err(error) = self.store.store(name, descriptor) else {
            return;
        };
        tracing::warn!(%name, %error, "memory was not handed over: a restart of this daemon loses it");
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        missing.insert(name);
    }

    /// Lets go of it.
    pub fn let_go(&self, name: KeptName) {
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        missing.remove(&name);
        drop(missing);
        self.store.remove(name);
    }

    /// Lets go of what nobody of this release would ever use.
    pub fn let_go_unknown(&self) {
        self.store.remove_unknown();
    }

    /// Lets go of everything, for good. How many descriptors that were.
    pub fn let_go_of_all(&self) -> usize {
        self.store.remove_all()
    }

    /// Who has it once this daemon has ended.
    pub fn kept_by(&self) -> KeptBy {
        self.store.kept_by()
    }

    /// How many descriptors the store did not take, of memory that is there.
    pub fn missing(&self) -> usize {
        let missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        missing.len()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::io;
    use std::os::fd::OwnedFd;

    use super::*;

    /// Keeps duplicates, as another process would.
    #[derive(Debug, Default)]
    pub(crate) struct RecordingStore {
        held: Mutex<BTreeMap<KeptName, OwnedFd>>,
    }

    impl RecordingStore {
        pub(crate) fn names(&self) -> Vec<KeptName> {
            self.held.lock().unwrap().keys().copied().collect()
        }

        /// What a new daemon is given.
        pub(crate) fn duplicates(&self) -> Vec<(KeptName, OwnedFd)> {
            let held = self.held.lock().unwrap();
            let duplicate = |fd: &OwnedFd| fd.try_clone().unwrap();
            held.iter()
                .map(|(name, fd)| (*name, duplicate(fd)))
                .collect()
        }
    }

    impl DescriptorStore for RecordingStore {
        fn store(&self, name: KeptName, descriptor: BorrowedFd<'_>) -> io::Result<()> {
            let kept = descriptor.try_clone_to_owned()?;
            self.held.lock().unwrap().insert(name, kept);
            Ok(())
        }

        fn remove(&self, name: KeptName) {
            self.held.lock().unwrap().remove(&name);
        }

        fn remove_all(&self) -> usize {
            std::mem::take(&mut *self.held.lock().unwrap()).len()
        }
    }

    #[derive(Debug)]
    struct FullStore;

    impl DescriptorStore for FullStore {
        fn store(&self, _: KeptName, _: BorrowedFd<'_>) -> io::Result<()> {
            Err(io::ErrorKind::QuotaExceeded.into())
        }

        fn remove(&self, _: KeptName) {}

        fn remove_all(&self) -> usize {
            0
        }
    }

    #[test]
    fn what_a_store_does_not_take_is_counted_until_it_goes() {
        use std::os::fd::AsFd;
        let slot = storaged_arena::Slot::create(0).unwrap();
        let handover = Handover::new(Arc::new(FullStore));
        handover.hand(KeptName::Parity(1), slot.as_fd());
        assert_eq!(handover.missing(), 1);
        handover.let_go(KeptName::Parity(1));
        assert_eq!(handover.missing(), 0);
    }
}
