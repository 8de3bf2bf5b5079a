//! Descriptors that this process was started with, as a service manager hands them over: by number.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// The first number that is not one of the three streams.
const FIRST: RawFd = 3;

/// Two that ask for one number at once must not both get it.
static TAKING: Mutex<()> = Mutex::new(());

/// Takes an inherited descriptor, which no child of this process inherits any more. A number is had once: whoever asks again is refused.
///
/// # Errors
/// `InvalidInput` for a descriptor that this process opened itself, or has taken already; what the system says for a number that is not
/// open.
pub fn take_inherited(number: RawFd) -> io::Result<OwnedFd> {
    // Nothing is left half done by a panic: there is none.
    let _alone = TAKING
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if number < FIRST {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the number is not -1, and it is only asked for its flags and given one within this call: the kernel answers EBADF if it is
    // not open, and no reference to it leaves the function.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(descriptor)?;
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    fcntl_setfd(descriptor, flags | FdFlags::CLOEXEC)?;
    // SAFETY: nobody else in this process owns the number. A descriptor survives exec only without FD_CLOEXEC, and what this process
    // opens has the flag from the beginning: the standard library, tokio and rustix as it is used here set it with the call that
    // opens. So one without it was inherited, which nothing but this function takes, and it was not taken before, because taking sets
    // the flag; the lock makes looking and setting one step.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, IntoRawFd};

    #[test]
    fn what_was_inherited_is_taken_once() {
        let file = File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        let number = file.into_raw_fd();
        let taken = take_inherited(number).unwrap();
        assert!(fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        let again = take_inherited(number).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn what_this_process_opened_and_what_is_not_open_is_refused() {
        let file = File::open("/dev/null").unwrap();
        for number in [file.as_raw_fd(), 0, 2, -1, RawFd::MAX] {
            assert!(take_inherited(number).is_err(), "{number}");
        }
    }
}
