//! The daemon's own memory: what has been freed goes back to the system.
//!
//! A daemon lives for weeks beside a job that needs the memory. The C library's allocator keeps most of what a large request has
//! freed; jemalloc gives pages back that nobody has used for some time, but a thread looks after its pages only while it
//! allocates. A thread of the allocator does it for those that sleep (docs/decisions/2026-11-23-allocator.md).

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::ptr;

use tikv_jemalloc_sys::mallctl;

/// The switch of the allocator's thread, a C `bool`.
const BACKGROUND_THREAD: &CStr = c"background_thread";
/// Milliseconds for which pages that are not used stay, for arenas that begin later; an `ssize_t`.
const DECAY_MS: &CStr = c"arenas.dirty_decay_ms";
/// Long enough that the parts of an upload find the pages of those before them.
const UNUSED_MS: isize = 2_000;

/// Has freed memory given back soon. Called before threads begin that allocate much; the keeper, which has no threads, does not call it.
///
/// # Errors
/// What the system says, if the allocator's thread cannot be started: memory is given back late then.
pub fn give_back_soon() -> io::Result<()> {
    write(DECAY_MS, UNUSED_MS)?;
    write(BACKGROUND_THREAD, true)
}

/// Sets one of the allocator's values.
fn write<T: Copy>(name: &CStr, mut value: T) -> io::Result<()> {
    // SAFETY: the name ends with a zero byte; nothing is read back, so both pointers for an old value may be null; the new value
    // lives through the call and is plain data, and jemalloc refuses it if its length is not that of the value's C type.
    let code = unsafe {
        mallctl(
            name.as_ptr(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::from_mut(&mut value).cast(),
            size_of::<T>(),
        )
    };
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_another_length_or_name_is_refused() {
        write(DECAY_MS, UNUSED_MS).unwrap();
        assert!(write(DECAY_MS, 1_u8).is_err());
        assert!(write(c"no.such_name", true).is_err());
    }
}
