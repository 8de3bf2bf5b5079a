//! Frames on a Unix stream socket, one descriptor at most with a frame's first byte (SCM_RIGHTS).
//!
//! Blocking calls: the SDK uses them under socket time-outs, the daemon on a thread per connection.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use thiserror::Error;

const PREFIX_BYTES: usize = 4;

/// A frame that did not come, or came wrong.
#[derive(Debug, Error)]
pub enum PassingError {
    /// The other side closed the connection between frames.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed, or its time-out passed.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// A length above the limit.
    #[error("frame of {got} bytes is longer than the limit of {limit}")]
    TooLong { got: usize, limit: usize },
    /// More than one descriptor, or one cut off.
    #[error("expected at most one whole descriptor with a frame, got more or a part")]
    Descriptors,
}

/// Sends a body with its length prefix, and a descriptor with its first byte.
///
/// # Errors
/// [`PassingError`] if the socket fails or its time-out passes.
pub fn send_frame(
    stream: &mut UnixStream,
    body: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), PassingError> {
    let length = u32::try_from(body.len()).map_err(|_| PassingError::TooLong {
        got: body.len(),
        limit: u32::MAX as usize,
    })?;
    let mut frame = Vec::with_capacity(PREFIX_BYTES + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let sent = loop {
        let slices = [IoSlice::new(&frame)];
        match rustix::net::sendmsg(&*stream, &slices, &mut ancillary, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome.map_err(io::Error::from)?,
        }
    };
    stream.write_all(&frame[sent..])?;
    Ok(())
}

/// Receives one frame of at most `limit` bytes, and the descriptor that came with it.
///
/// # Errors
/// [`PassingError`]; descriptors that came with a bad frame are closed.
pub fn recv_frame(
    stream: &mut UnixStream,
    limit: usize,
) -> Result<(Vec<u8>, Option<OwnedFd>), PassingError> {
    let mut prefix = [0; PREFIX_BYTES];
    let (got, descriptor) = recv_first(stream, &mut prefix)?;
    if got == 0 {
        return Err(PassingError::Closed);
    }
    stream.read_exact(&mut prefix[got..])?;
    let length = u32::from_le_bytes(prefix) as usize;
    if length > limit {
        return Err(PassingError::TooLong { got: length, limit });
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((body, descriptor))
}

fn recv_first(
    stream: &UnixStream,
    prefix: &mut [u8],
) -> Result<(usize, Option<OwnedFd>), PassingError> {
    // Room for two, so that a second descriptor is seen (and closed) instead of cut off unseen.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        let mut slices = [IoSliceMut::new(prefix)];
        match rustix::net::recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome.map_err(io::Error::from)?,
        }
    };
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = part {
            descriptors.extend(fds);
        }
    }
    let cut = message.flags.contains(ReturnFlags::CTRUNC);
    if descriptors.len() > 1 || cut {
        return Err(PassingError::Descriptors);
    }
    Ok((message.bytes, descriptors.pop()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Slot;
    use std::os::fd::AsFd;

    #[test]
    fn a_frame_and_its_descriptor_arrive() {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let slot = Slot::create(4096).unwrap();
        slot.write_at(0, b"seen").unwrap();
        send_frame(&mut a, b"hello", Some(slot.as_fd())).unwrap();
        send_frame(&mut a, b"", None).unwrap();
        let (body, fd) = recv_frame(&mut b, 100).unwrap();
        assert_eq!(body, b"hello");
        let mut out = [0; 4];
        Slot::adopt(fd.unwrap())
            .unwrap()
            .read_at(0, &mut out)
            .unwrap();
        assert_eq!(&out, b"seen");
        let (body, fd) = recv_frame(&mut b, 100).unwrap();
        assert!(body.is_empty() && fd.is_none());
        drop(a);
        assert!(matches!(recv_frame(&mut b, 100), Err(PassingError::Closed)));
    }

    #[test]
    fn long_frames_and_half_frames_are_refused() {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        send_frame(&mut a, b"12345", None).unwrap();
        assert!(matches!(
            recv_frame(&mut b, 4),
            Err(PassingError::TooLong { got: 5, limit: 4 })
        ));
        let (mut a, mut b) = UnixStream::pair().unwrap();
        a.write_all(&[9, 0, 0, 0, 1]).unwrap();
        drop(a);
        assert!(matches!(recv_frame(&mut b, 100), Err(PassingError::Io(_))));
    }
}
