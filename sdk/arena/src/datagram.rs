//! Datagrams on a Unix socket, one descriptor at most with each (SCM_RIGHTS): how descriptors are handed to a process that keeps them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};

/// Whom a datagram is for.
#[derive(Debug, Clone)]
pub enum Recipient {
    /// Whoever the socket is connected with.
    Peer,
    /// Whoever is bound there at that moment.
    At(SocketAddrUnix),
}

impl Recipient {
    /// The recipient that a variable such as `NOTIFY_SOCKET` names: a path, or after `@` a name without a file.
    ///
    /// # Errors
    /// If it is neither, or too long for an address.
    pub fn named(address: &[u8]) -> io::Result<Self> {
        let address = match address {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
            [b'/', ..] => SocketAddrUnix::new(address)?,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        Ok(Self::At(address))
    }
}

/// What came.
#[derive(Debug)]
pub enum Received {
    /// A datagram that fits: its length, and the descriptor that came with it.
    Whole {
        length: usize,
        descriptor: Option<OwnedFd>,
    },
    /// One that is too long, or with more descriptors than one, or with one that this process has no room for. What came with it
    /// is closed.
    Odd,
}

/// Sends a datagram; it waits for room in the queue, unless the socket does not block.
///
/// # Errors
/// What the system says: `ConnectionRefused` if nobody will receive it.
pub fn send_datagram(
    socket: impl AsFd,
    to: &Recipient,
    body: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let (slices, flags) = ([IoSlice::new(body)], SendFlags::NOSIGNAL);
        let sent = match to {
            Recipient::Peer => rustix::net::sendmsg(&socket, &slices, &mut ancillary, flags),
            Recipient::At(address) => {
                rustix::net::sendmsg_addr(&socket, address, &slices, &mut ancillary, flags)
            }
        };
        match sent {
            Err(Errno::INTR) => {}
            // A datagram goes as a whole or not at all.
            sent => return Ok(sent.map(|_| ())?),
        }
    }
}

/// Receives a datagram of at most `body.len()` bytes.
///
/// # Errors
/// What the system says: `WouldBlock` if there is none, and the socket does not block or has waited for as long as it may.
pub fn recv_datagram(socket: impl AsFd, body: &mut [u8]) -> io::Result<Received> {
    loop {
        // Room for two, so that a second descriptor is seen (and closed) instead of cut off unseen.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(body)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let message = match rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, flags) {
            Err(Errno::INTR) => continue,
            message => message?,
        };
        let mut descriptors = Vec::new();
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = part {
                descriptors.extend(came);
            }
        }
        let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        if message.flags.intersects(cut) || descriptors.len() > 1 {
            return Ok(Received::Odd);
        }
        return Ok(Received::Whole {
            length: message.bytes,
            descriptor: descriptors.pop(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Slot;
    use std::os::unix::net::UnixDatagram;

    fn body(socket: &UnixDatagram) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut space = [0; 16];
        match recv_datagram(socket, &mut space).unwrap() {
            Received::Whole { length, descriptor } => Some((space[..length].into(), descriptor)),
            Received::Odd => None,
        }
    }

    #[test]
    fn a_datagram_and_its_descriptor_arrive() {
        let (a, b) = UnixDatagram::pair().unwrap();
        let slot = Slot::create(4096).unwrap();
        slot.write_at(0, b"seen").unwrap();
        send_datagram(&a, &Recipient::Peer, b"hello", Some(slot.as_fd())).unwrap();
        send_datagram(&a, &Recipient::Peer, b"", None).unwrap();
        drop((a, slot));
        let (text, descriptor) = body(&b).unwrap();
        assert_eq!(text, b"hello");
        let mut seen = [0; 4];
        let slot = Slot::adopt(descriptor.unwrap()).unwrap();
        slot.read_at(0, &mut seen).unwrap();
        assert_eq!(&seen, b"seen");
        assert!(matches!(body(&b), Some((text, None)) if text.is_empty()));
        let gone = send_datagram(&b, &Recipient::Peer, b"", None).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn what_is_too_long_or_has_two_descriptors_is_odd_and_the_next_one_whole() {
        let (a, b) = UnixDatagram::pair().unwrap();
        send_datagram(&a, &Recipient::Peer, &[1; 17], None).unwrap();
        assert!(body(&b).is_none());
        let two = [a.as_fd(), b.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&two));
        let slices = [IoSlice::new(b"two")];
        rustix::net::sendmsg(&a, &slices, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        assert!(body(&b).is_none());
        send_datagram(&a, &Recipient::Peer, &[1; 16], None).unwrap();
        assert_eq!(body(&b).unwrap().0, [1; 16]);
    }

    #[test]
    fn a_recipient_has_a_path_or_a_name_without_a_file() {
        let folder = std::env::temp_dir().join(format!("datagram-{}", std::process::id()));
        let socket = UnixDatagram::bind(&folder).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        let to = Recipient::named(folder.as_os_str().as_encoded_bytes()).unwrap();
        send_datagram(&sender, &to, b"file", None).unwrap();
        assert_eq!(body(&socket).unwrap().0, b"file");
        std::fs::remove_file(folder).unwrap();
        let nobody = Recipient::named(b"@storaged-test-nobody").unwrap();
        let refused = send_datagram(&sender, &nobody, b"", None).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        for odd in [&b""[..], b"vsock:2:1", &[b'/'; 200]] {
            assert!(Recipient::named(odd).is_err(), "{odd:?}");
        }
    }
}
