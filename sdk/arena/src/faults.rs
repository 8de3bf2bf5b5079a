//! Pages that fail under a mapping, without the end of the process.
//!
//! Who touches a page whose memory has failed, or that the system cannot read back from swap, is sent a SIGBUS, and its
//! default is the end of the process. A daemon would lose a node's RAM to one bad page, and again after each restart, since
//! it reads the same page again. So ranges of addresses are watched: the handler puts a page of zeros in the place of one
//! that failed, for this process alone, and counts it. That the zeros are no bytes of anybody's is for the reader to see,
//! by the count.
//!
//! Two threads that touch a page at the same time may count it twice.
//!
//! The table is a fixed one of atomics, because a handler may neither allocate nor take a lock.

use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::{c_int, c_void, sigaction, siginfo_t};
use rustix::param::page_size;

/// Ranges that can be watched at a time. A node has one for each slot; what finds no place is not watched, and who asked must do
/// without.
const RANGES_MAX: usize = 8192;
/// The start of a range that nobody watches.
const FREE: usize = 0;
/// That of one that is being filled in: no address is above it.
const TAKEN: usize = usize::MAX;

static RANGES: [Range; RANGES_MAX] = [const { Range::free() }; RANGES_MAX];
/// What was done with the signal before.
static BEFORE: OnceLock<sigaction> = OnceLock::new();
static PAGES: AtomicU64 = AtomicU64::new(0);
/// Bytes of a page: asking may allocate the first time, which a handler must not.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
    pages: AtomicUsize,
}

impl Range {
    const fn free() -> Self {
        Self {
            start: AtomicUsize::new(FREE),
            end: AtomicUsize::new(0),
            pages: AtomicUsize::new(0),
        }
    }

    fn is_taken(&self) -> bool {
        let (before, after) = (Ordering::AcqRel, Ordering::Relaxed);
        let taken = self.start.compare_exchange(FREE, TAKEN, before, after);
        taken.is_ok()
    }

    fn has(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        let end = self.end.load(Ordering::Acquire);
        // Were the end another range's, which has taken this place meanwhile, addresses between the two would be nobody's.
        let is_one = self.start.load(Ordering::Acquire) == start;
        is_one && start != FREE && start <= address && address < end
    }
}

/// A range of addresses that is watched until this is dropped. It must be before the range is unmapped.
#[derive(Debug)]
pub(crate) struct Watched {
    range: &'static Range,
}

impl Watched {
    /// Watches a mapping of `length` bytes at `start`. None where faults are not survived, or too much is watched already.
    pub(crate) fn new(start: *const u8, length: usize) -> Option<Self> {
        BEFORE.get()?;
        let range = RANGES.iter().find(|range| range.is_taken())?;
        range.pages.store(0, Ordering::Relaxed);
        let start = start.addr();
        range.end.store(start + length, Ordering::Release);
        range.start.store(start, Ordering::Release);
        Some(Self { range })
    }

    /// How many of its pages have failed.
    pub(crate) fn pages_lost(&self) -> usize {
        self.range.pages.load(Ordering::Acquire)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.range.start.store(FREE, Ordering::Release);
    }
}

/// Has this process go on when a page fails in memory of its slots' views; for a daemon, not for a library in somebody else's
/// process. Mappings that were made before are not watched. A SIGBUS from anywhere else does what it did before.
///
/// # Errors
/// If the kernel refuses the handler.
pub fn survive_memory_faults() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    PAGE_BYTES.store(page_size(), Ordering::Relaxed);
    let mut before = MaybeUninit::<sigaction>::uninit();
    // SAFETY: asking what is done with a signal changes nothing; `before` has room for the answer.
    let asked = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) };
    if asked != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled it in.
    let before = unsafe { before.assume_init() };
    if BEFORE.set(before).is_err() {
        return Ok(());
    }
    // SAFETY: an action of zeros is a valid one: no flags, no signal blocked.
    let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_fault as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does what a handler may: it reads and writes atomics and
    // makes system calls.
    let set = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How many pages have failed in this process.
pub fn memory_pages_lost() -> u64 {
    PAGES.load(Ordering::Relaxed)
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`.
    let code = unsafe { (*info).si_code };
    match code {
        // Somewhere else, of a page that nobody here touches at the moment: by the time this runs its addresses may be another mapping's. Who
        // touches it is told then.
        libc::BUS_MCEERR_AO => return,
        libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR => {}
        // Not the kernel's: it has no address.
        _ => return pass_on(signal, info, context),
    }
    // SAFETY: of these codes it has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let range = RANGES.iter().find(|range| range.has(address));
    if range.is_some_and(|range| is_replaced(range, address)) {
        return;
    }
    pass_on(signal, info, context);
}

/// Puts a page of zeros where `address` is.
fn is_replaced(range: &Range, address: usize) -> bool {
    let bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let page = address - address % bytes;
    // Counted before it is there: who sees the zeros must see that they are not his.
    range.pages.fetch_add(1, Ordering::SeqCst);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let place = std::ptr::without_provenance_mut(page);
    // SAFETY: the page lies in a mapping of this crate's own, which is there as long as it is watched, and the thread that was stopped here is
    // reading it; whoever has a pointer into it finds other bytes there, which the failed page has given nobody. `mmap` is a plain system call.
    let mapped = unsafe { libc::mmap(place, bytes, protection, flags, -1, 0) };
    PAGES.fetch_add(1, Ordering::Relaxed);
    mapped != libc::MAP_FAILED
}

/// Does what was done before, which for the standard library's handler and for none is the end of the process.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let before = BEFORE.get().filter(|before| {
        let is_default = matches!(before.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !is_default && before.sa_flags & libc::SA_SIGINFO != 0
    });
    match before {
        Some(before) => {
            // SAFETY: an action with SA_SIGINFO that is neither of the two constants is a function of this signature, and it is called with what
            // the kernel gave.
            unsafe {
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    std::mem::transmute(before.sa_sigaction);
                handler(signal, info, context);
            }
        }
        None => {
            // The instruction runs again, and ends the process.
            // SAFETY: a handler may change what is done with a signal.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use rustix::fs::MemfdFlags;

    use super::*;
    use crate::mapping::Mapping;

    const PAGES: usize = 4;

    /// Pages of ones whose file may shrink: a page behind its end fails as one of bad memory does.
    fn mapped() -> (OwnedFd, Mapping) {
        let bytes = PAGES * page_size();
        let file = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        assert_eq!(rustix::io::pwrite(&file, &vec![1; bytes], 0), Ok(bytes));
        let mapping = Mapping::to_read(file.as_fd(), bytes).unwrap();
        (file, mapping)
    }

    fn byte(mapping: &Mapping, page: usize) -> u8 {
        assert!(page < PAGES);
        // SAFETY: the page is mapped; nobody else writes to it.
        unsafe { mapping.start().add(page * page_size()).read_volatile() }
    }

    #[test]
    fn a_page_that_fails_is_zeros_and_counted_and_the_others_stay() {
        survive_memory_faults().unwrap();
        let (file, mapping) = mapped();
        let watched = Watched::new(mapping.start(), mapping.length()).unwrap();
        assert_eq!((byte(&mapping, 3), watched.pages_lost()), (1, 0));
        rustix::fs::ftruncate(&file, page_size() as u64).unwrap();
        assert_eq!((byte(&mapping, 3), watched.pages_lost()), (0, 1));
        assert_eq!((byte(&mapping, 3), watched.pages_lost()), (0, 1));
        assert_eq!((byte(&mapping, 1), watched.pages_lost()), (0, 2));
        assert_eq!((byte(&mapping, 0), watched.pages_lost()), (1, 2));
        assert!(memory_pages_lost() >= 2);
        let range = watched.range;
        assert!(range.has(mapping.start().addr()));
        drop(watched);
        assert!(!range.has(mapping.start().addr()));
    }

    /// In a process of its own, which it ends.
    #[test]
    fn a_fault_elsewhere_ends_the_process() {
        const CHILD: &str = "STORAGED_TEST_FAULT";
        let name = "faults::tests::a_fault_elsewhere_ends_the_process";
        if std::env::var_os(CHILD).is_some() {
            survive_memory_faults().unwrap();
            let (file, mapping) = mapped();
            rustix::fs::ftruncate(&file, 0).unwrap();
            panic!("read {}", byte(&mapping, 2));
        }
        let itself = std::env::current_exe().unwrap();
        let ended = Command::new(itself)
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{ended:?}");
    }
}
