//! Bytes at a place in a file, all of them.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

/// Fills `out` from an offset on; how many bytes came before the file's end.
pub(crate) fn read_at(file: BorrowedFd<'_>, offset: u64, out: &mut [u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < out.len() {
        match rustix::io::pread(file, &mut out[done..], offset + done as u64)? {
            0 => break,
            got => done += got,
        }
    }
    Ok(done)
}

/// Writes all of these bytes from an offset on.
pub(crate) fn write_at(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        done += rustix::io::pwrite(file, &bytes[done..], offset + done as u64)?;
    }
    Ok(())
}
