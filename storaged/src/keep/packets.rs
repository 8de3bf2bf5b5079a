//! Datagrams over connections (SOCK_SEQPACKET), a descriptor at most with each: who is connected is known, and so is its end.
//!
//! Nothing here waits but what says so. What a process sent before it ended is received, and its end after that.

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use storaged_arena::{Received, Recipient, recv_datagram, send_datagram};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

/// Who waits to be let in.
const BACKLOG: i32 = 16;

/// One end of a connection.
#[derive(Debug)]
pub struct Packets {
    /// It is called a stream because that is the only kind of connection that tokio has a name for.
    socket: UnixStream,
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

impl Packets {
    /// To whoever listens there. It belongs to the runtime that runs now.
    ///
    /// # Errors
    /// What the system says: `NotFound` or `ConnectionRefused` if nobody does.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        let socket = UnixStream::from_std(socket.into())?;
        Ok(Self { socket })
    }

    /// Of a listener's.
    pub fn of(socket: UnixStream) -> Self {
        Self { socket }
    }

    /// The user id of the process at the other end, as the kernel says it.
    ///
    /// # Errors
    /// What the system says.
    pub fn peer(&self) -> io::Result<u32> {
        // Not rustix: a process of another container has the number 0 here, for which it has no value.
        Ok(self.socket.peer_cred()?.uid())
    }

    /// Waits until one of these may go without waiting, or the connection has ended.
    ///
    /// # Errors
    /// If the runtime is ending.
    pub async fn ready(&self, wish: Interest) -> io::Result<()> {
        self.socket.ready(wish).await.map(|_| ())
    }

    /// What has come.
    ///
    /// # Errors
    /// `WouldBlock` if that is nothing, `UnexpectedEof` if nothing can come any more.
    pub fn try_receive(&self, body: &mut [u8]) -> io::Result<Received> {
        let mut receive = || {
            self.socket
                .try_io(Interest::READABLE, || recv_datagram(&self.socket, body))
        };
        let received = match receive() {
            // Said once, before what the other end had sent: it has closed without reading all.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => receive(),
            received => received,
        };
        match received? {
            Received::Whole {
                length: 0,
                descriptor: None,
            } => Err(io::ErrorKind::UnexpectedEof.into()),
            received => Ok(received),
        }
    }

    /// What the other end said before it closed, also where the runtime has not noticed it yet.
    ///
    /// # Errors
    /// What the system says.
    pub fn last_word(&self, body: &mut [u8]) -> io::Result<Received> {
        match recv_datagram(&self.socket, body) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                recv_datagram(&self.socket, body)
            }
            received => received,
        }
    }

    /// Sends without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if the queue is full, or what the system says.
    pub fn try_send(&self, body: &str, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.socket.try_io(Interest::WRITABLE, || {
            send_datagram(&self.socket, &Recipient::Peer, body.as_bytes(), descriptor)
        })
    }

    /// Waits for what comes next.
    ///
    /// # Errors
    /// `UnexpectedEof` if nothing can come any more.
    pub async fn receive(&self, body: &mut [u8]) -> io::Result<Received> {
        loop {
            self.ready(Interest::READABLE).await?;
            match self.try_receive(body) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return received,
            }
        }
    }

    /// Sends a datagram without a descriptor, once there is room for it.
    ///
    /// # Errors
    /// What the system says.
    pub async fn send(&self, body: &str) -> io::Result<()> {
        loop {
            self.ready(Interest::WRITABLE).await?;
            match self.try_send(body, None) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return sent,
            }
        }
    }
}

/// Whether an error of a send says that the other end is gone, and not that the system has no room for a while.
pub fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::NotConnected
    )
}

/// Listens at a path, for this user and root alone.
///
/// # Errors
/// `AddrInUse` if somebody listens there, or what the system says.
pub fn listen_at(path: &Path) -> io::Result<UnixListener> {
    let address = SocketAddrUnix::new(path)?;
    match rustix::net::connect(socket()?, &address) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => {}
        // So many wait there that there is no room for one more.
        Ok(()) | Err(Errno::AGAIN) => return Err(io::ErrorKind::AddrInUse.into()),
        Err(error) => return Err(error.into()),
    }
    // Left by one that has ended. What is no socket is nobody's of ours.
    if fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    let socket = socket()?;
    rustix::net::bind(&socket, &address)?;
    // Nobody can connect before this process listens.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::keep::message::DATAGRAM_MAX;
    use std::time::Duration;

    /// What comes next as text, within a time that a busy machine needs.
    pub(crate) async fn text(packets: &Packets) -> io::Result<String> {
        let mut body = [0; DATAGRAM_MAX];
        let received = packets.receive(&mut body);
        let received = tokio::time::timeout(Duration::from_secs(20), received).await;
        match received.expect("something comes")? {
            Received::Whole { length, .. } => Ok(str::from_utf8(&body[..length]).unwrap().into()),
            Received::Odd => panic!("an odd datagram"),
        }
    }

    #[tokio::test]
    async fn what_was_sent_before_the_end_comes_and_then_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = listen_at(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let here = Packets::connect(&path).unwrap();
        let there = Packets::of(listener.accept().await.unwrap().0);
        assert_eq!(there.peer().unwrap(), rustix::process::geteuid().as_raw());
        // It ends without having read this.
        there.send("unread").await.unwrap();
        for body in ["one", "two"] {
            here.send(body).await.unwrap();
        }
        drop(here);
        assert_eq!(text(&there).await.unwrap(), "one");
        assert_eq!(text(&there).await.unwrap(), "two");
        for _ in 0..2 {
            let end = text(&there).await.unwrap_err();
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        }
        assert!(is_gone(&there.send("late").await.unwrap_err()));
    }

    #[tokio::test]
    async fn a_path_is_taken_from_who_has_ended_and_from_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = listen_at(&path).unwrap();
        let refused = listen_at(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(Packets::connect(&path).is_err());
        drop(listen_at(&path).unwrap());
        fs::remove_file(&path).unwrap();
        fs::write(&path, "not ours").unwrap();
        assert!(listen_at(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"not ours");
    }
}
