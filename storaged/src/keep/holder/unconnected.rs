//! A holder without a socket to listen at: whoever feeds it datagrams one by one, as a fuzz target does, sees after each of them what comes
//! of it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use storaged_arena::{Received, recv_datagram};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::{ConnectionNumber, HeldMemory, Reaction};
use crate::keep::message::{DATAGRAM_MAX, HoldAnswer, HolderName};
use crate::keep::packets::Packets;
use crate::keep::table::Table;

/// What a holder has, and one way to whoever is attached to it, for all of its connections.
#[derive(Debug)]
pub struct UnconnectedHolder {
    held: HeldMemory,
    packets: Arc<Packets>,
    /// Where that way ends.
    told: OwnedFd,
}

impl UnconnectedHolder {
    /// One that holds nothing. It belongs to the runtime that runs now.
    ///
    /// # Errors
    /// What the system says.
    pub async fn start() -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (here, told) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let packets = Packets::of(UnixStream::from_std(here.into())?);
        // Else the runtime would not know yet that there is room.
        packets.ready(Interest::WRITABLE).await?;
        Ok(Self {
            held: HeldMemory::default(),
            packets: Arc::new(packets),
            told,
        })
    }

    /// Nothing is held and nobody attached any more; it takes so many descriptors from now on.
    pub fn begin_anew(&mut self, descriptors_max: usize) {
        self.held = HeldMemory {
            table: Table::of_at_most(descriptors_max),
            ..HeldMemory::default()
        };
    }

    /// A datagram comes over a connection. No number is given to two of them.
    pub fn take(&mut self, connection: u64, body: &[u8], descriptor: Option<OwnedFd>) -> Reaction {
        let connection = ConnectionNumber(connection);
        self.held.take(connection, &self.packets, body, descriptor)
    }

    /// One comes that is too long, or has more descriptors than one.
    pub fn take_odd(&mut self, connection: u64) -> Reaction {
        self.held.missed(ConnectionNumber(connection))
    }

    /// A connection ends.
    pub fn ended(&mut self, connection: u64) {
        self.held.ended(ConnectionNumber(connection));
    }

    /// What the keeper that is attached was told unasked, once.
    pub fn told(&self) -> Option<HoldAnswer> {
        let mut body = [0; DATAGRAM_MAX];
        match recv_datagram(&self.told, &mut body) {
            Ok(Received::Whole { length, .. }) => HoldAnswer::decode(&body[..length]),
            Ok(Received::Odd) | Err(_) => None,
        }
    }

    /// Whether the keeper of this connection is attached.
    pub fn is_attached(&self, connection: u64) -> bool {
        self.held.is_attached(ConnectionNumber(connection))
    }

    /// All that is held, by name.
    pub fn held(&self) -> impl Iterator<Item = (HolderName, BorrowedFd<'_>)> {
        let table = &self.held.table;
        table.names().filter_map(move |name| {
            let descriptor = table.get(&name)?;
            Some((name, descriptor))
        })
    }
}
