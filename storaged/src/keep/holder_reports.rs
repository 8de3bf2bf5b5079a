//! What a keeper tells its daemon of the holder: how it is with that one when the daemon asks, and each change from then on.
//!
//! A daemon that reads nothing is not waited for: it is told how it is once there is room. One of an earlier release does not ask, and is told
//! nothing: it would take a report for an answer that no keeper gives.

use std::io;

use storaged_arena::{Recipient, send_datagram};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use super::message::{FromKeeper, HolderReport};
use super::packets::is_gone;

/// What a daemon was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToldOfHolder {
    /// Nothing: it has not asked.
    #[default]
    Unasked,
    /// Not how it is now: it is told once there is room.
    Waits,
    /// Nor is there room in the system: it is told at the keeper's next turn.
    Missed,
    /// This.
    Told(HolderReport),
}

impl ToldOfHolder {
    /// Something is to be said once there is room.
    pub fn waits(self) -> bool {
        self == Self::Waits
    }

    /// Says what the daemon at the other end does not know, if it has asked and there is room.
    pub fn tell(&mut self, report: HolderReport, socket: &UnixDatagram) {
        if *self == Self::Unasked || *self == Self::Told(report) {
            return;
        }
        let body = FromKeeper::Holder(report).encode();
        let gone = socket.try_io(Interest::WRITABLE, || {
            send_datagram(socket, &Recipient::Peer, body.as_bytes(), None)
        });
        *self = match gone {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Self::Waits,
            Err(error) if !is_gone(&error) => Self::Missed,
            // Whoever is gone needs nothing more.
            Ok(()) | Err(_) => Self::Told(report),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::message::DATAGRAM_MAX;

    fn heard(daemon: &std::os::unix::net::UnixDatagram) -> Option<FromKeeper> {
        let mut body = [0; DATAGRAM_MAX];
        let length = daemon.recv(&mut body).ok()?;
        FromKeeper::decode(&body[..length])
    }

    #[tokio::test]
    async fn a_daemon_that_asks_is_told_each_change_and_the_last_of_them_where_it_reads_late() {
        let (here, daemon) = std::os::unix::net::UnixDatagram::pair().unwrap();
        for socket in [&here, &daemon] {
            socket.set_nonblocking(true).unwrap();
        }
        let socket = UnixDatagram::from_std(here).unwrap();
        socket.writable().await.unwrap();
        let mut told = ToldOfHolder::default();
        told.tell(HolderReport::HasAll, &socket);
        assert_eq!((told.waits(), heard(&daemon)), (false, None));
        told = ToldOfHolder::Waits;
        for _ in 0..2 {
            told.tell(HolderReport::HasAll, &socket);
        }
        let report = |of| Some(FromKeeper::Holder(of));
        assert_eq!(heard(&daemon), report(HolderReport::HasAll));
        assert_eq!(heard(&daemon), None);
        let lacks = |since| HolderReport::Lacks { since };
        let mut since = 0;
        while !told.waits() {
            since += 1;
            assert!(since < 100_000, "there is room without end");
            told.tell(lacks(since), &socket);
        }
        let last = std::iter::from_fn(|| heard(&daemon)).last();
        assert_eq!(last, report(lacks(since - 1)));
        socket.writable().await.unwrap();
        told.tell(lacks(since), &socket);
        assert_eq!(told, ToldOfHolder::Told(lacks(since)));
        assert_eq!(heard(&daemon), report(lacks(since)));
        // Nobody is there any more: it is not tried again and again.
        drop(daemon);
        told.tell(HolderReport::HasAll, &socket);
        assert!(!told.waits());
    }
}
