//! Frames on a Unix stream socket, one descriptor at most with a frame's first byte (SCM_RIGHTS).
//!
//! The daemon blocks, on a thread per connection. The SDK's sockets do not block: what they would wait for is handed
//! to a [`Wait`], which ends the call at its caller's limit or when its caller is called away.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use thiserror::Error;

const PREFIX_BYTES: usize = 4;

/// Memory for so much of a body is taken before any of it has come.
const PIECE_BYTES: usize = 64 << 10;

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

/// What a socket is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// Bytes to read, or the end.
    Read,
    /// Room to write.
    Write,
}

/// How a caller waits for a socket that does not block.
pub trait Wait {
    /// Returns once the socket may be tried again.
    ///
    /// # Errors
    /// What ends the call: the limit passed, or the caller was called away.
    fn until(&mut self, stream: &UnixStream, wish: Wish) -> io::Result<()>;
}

/// For sockets that block: one that says that it would block has had its time-out.
struct Blocking;

impl Wait for Blocking {
    fn until(&mut self, _: &UnixStream, _: Wish) -> io::Result<()> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}

/// A stream whose every wait goes through a [`Wait`].
struct Waited<'a> {
    stream: &'a UnixStream,
    wait: &'a mut dyn Wait,
}

impl Waited<'_> {
    fn again<T>(
        &mut self,
        wish: Wish,
        mut attempt: impl FnMut(&UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match attempt(self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait.until(self.stream, wish)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
        }
    }
}

impl Read for Waited<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.again(Wish::Read, |mut stream| stream.read(out))
    }
}

impl Write for Waited<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.again(Wish::Write, |stream| {
            let slices = [IoSlice::new(bytes)];
            let sent = rustix::net::sendmsg(
                stream,
                &slices,
                &mut SendAncillaryBuffer::default(),
                SendFlags::NOSIGNAL,
            );
            Ok(sent?)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
    send_frame_waiting(stream, body, descriptor, &mut Blocking)
}

/// Like [`send_frame`] on a socket that does not block.
///
/// # Errors
/// [`PassingError`] if the socket fails or the wait is ended.
pub fn send_frame_waiting(
    stream: &UnixStream,
    body: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    wait: &mut dyn Wait,
) -> Result<(), PassingError> {
    let length = u32::try_from(body.len()).map_err(|_| PassingError::TooLong {
        got: body.len(),
        limit: u32::MAX as usize,
    })?;
    let prefix: [u8; PREFIX_BYTES] = length.to_le_bytes();
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    let mut waited = Waited { stream, wait };
    let sent = waited.again(Wish::Write, |stream| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let slices = [IoSlice::new(&prefix), IoSlice::new(body)];
        let flags = SendFlags::NOSIGNAL;
        Ok(rustix::net::sendmsg(
            stream,
            &slices,
            &mut ancillary,
            flags,
        )?)
    })?;
    // A long body is in memory once.
    let of_prefix = sent.min(PREFIX_BYTES);
    waited.write_all(&prefix[of_prefix..])?;
    waited.write_all(&body[sent - of_prefix..])?;
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
    recv_frame_waiting(stream, limit, &mut Blocking)
}

/// Like [`recv_frame`] on a socket that does not block.
///
/// # Errors
/// As `recv_frame`, or what ended the wait.
pub fn recv_frame_waiting(
    stream: &UnixStream,
    limit: usize,
    wait: &mut dyn Wait,
) -> Result<(Vec<u8>, Option<OwnedFd>), PassingError> {
    let FrameStart { length, descriptor } = begin_frame(stream, wait)?;
    if length > limit {
        return Err(PassingError::TooLong { got: length, limit });
    }
    let mut body = Vec::new();
    recv_body(stream, length, &mut body, wait)?;
    Ok((body, descriptor))
}

/// A frame whose length has come.
#[derive(Debug)]
pub struct FrameStart {
    /// Bytes of the body, as the sender says.
    pub length: usize,
    /// What came with it.
    pub descriptor: Option<OwnedFd>,
}

/// Receives the length of a frame, and the descriptor that comes with it.
///
/// # Errors
/// [`PassingError`] if the socket fails, ends, or the wait is ended.
pub fn begin_frame(stream: &UnixStream, wait: &mut dyn Wait) -> Result<FrameStart, PassingError> {
    let mut prefix = [0; PREFIX_BYTES];
    let mut waited = Waited { stream, wait };
    let (got, mut descriptors, cut) =
        waited.again(Wish::Read, |stream| recv_first(stream, &mut prefix))?;
    if descriptors.len() > 1 || cut {
        return Err(PassingError::Descriptors);
    }
    if got == 0 {
        return Err(PassingError::Closed);
    }
    waited.read_exact(&mut prefix[got..])?;
    Ok(FrameStart {
        length: u32::from_le_bytes(prefix) as usize,
        descriptor: descriptors.pop(),
    })
}

/// Receives a frame's body until it has `length` bytes. Memory is taken for what has come: a length that is only announced takes none.
///
/// # Errors
/// [`PassingError`] if the socket fails, ends, or the wait is ended.
pub fn recv_body(
    stream: &UnixStream,
    length: usize,
    body: &mut Vec<u8>,
    wait: &mut dyn Wait,
) -> Result<(), PassingError> {
    let mut waited = Waited { stream, wait };
    while body.len() < length {
        let come = body.len();
        // Doubled each time, so that copies of what has come are few.
        let next = length.min(come + come.max(PIECE_BYTES));
        body.resize(next, 0);
        waited.read_exact(&mut body[come..])?;
    }
    Ok(())
}

/// The first bytes, the descriptors that came with them, and whether some were cut off.
fn recv_first(stream: &UnixStream, prefix: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>, bool)> {
    // Room for two, so that a second descriptor is seen (and closed) instead of cut off unseen.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(prefix)];
    let message =
        rustix::net::recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = part {
            descriptors.extend(fds);
        }
    }
    let cut = message.flags.contains(ReturnFlags::CTRUNC);
    Ok((message.bytes, descriptors, cut))
}

/// Connects without blocking; a daemon whose queue is full (a stopped one accepts nobody) is tried again until `wait`
/// ends it. The stream does not block.
///
/// # Errors
/// What the system or `wait` says.
pub fn connect_waiting(
    path: &Path,
    wait: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Err(Errno::AGAIN) => wait()?,
            Err(Errno::INTR) => {}
            outcome => break outcome?,
        }
    }
    Ok(socket.into())
}

/// Waits until the socket is ready for `wish`, for at most `slice`; whether it is ready.
///
/// # Errors
/// What the system says. A signal only ends the wait early.
pub fn ready_within(stream: &UnixStream, wish: Wish, slice: Duration) -> io::Result<bool> {
    let events = match wish {
        Wish::Read => PollFlags::IN,
        Wish::Write => PollFlags::OUT,
    };
    let slice = Timespec {
        tv_sec: i64::try_from(slice.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: slice.subsec_nanos().into(),
    };
    match rustix::event::poll(&mut [PollFd::new(stream, events)], Some(&slice)) {
        Err(Errno::INTR) => Ok(false),
        outcome => Ok(outcome? > 0),
    }
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
