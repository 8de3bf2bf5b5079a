//! The daemon's own memory: what has been freed goes back to the system.
//!
//! A daemon lives for weeks beside a job that needs the memory. The C library's allocator keeps most of what a large request has
//! freed; jemalloc gives pages back that nobody has used for ten seconds, but a thread looks after its pages only while it
//! allocates. A thread of the allocator does it for those that sleep (docs/decisions/2026-11-23-allocator.md).

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::ptr;

use tikv_jemalloc_sys::mallctl;

/// The switch of the allocator's thread.
const BACKGROUND_THREAD: &CStr = c"background_thread";

/// Starts the allocator's thread. The keeper, which has no threads, does not call this.
///
/// # Errors
/// What the system says, if the thread cannot be started: memory is given back late then.
pub fn give_back_in_background() -> io::Result<()> {
    let mut on = true;
    // SAFETY: the name ends with a zero byte; nothing is read back, so both pointers for an old value may be null; the new value is
    // a `bool` that lives through the call, and its length is the one that jemalloc documents for this name (it checks it).
    let code = unsafe {
        mallctl(
            BACKGROUND_THREAD.as_ptr(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::from_mut(&mut on).cast(),
            size_of::<bool>(),
        )
    };
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
