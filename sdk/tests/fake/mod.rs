//! A daemon's stand-in that says what each test wants, one connection after the other.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use storaged_arena::{Slot, recv_frame, send_frame};
use storaged_sdk::ConnectOptions;
use storaged_sdk::wire::local::{Reply, Request, Role};
use storaged_sdk::wire::{ChunkSize, Generation, Namespace, NodeName, decode, encode};

pub const CHUNK_BYTES: u32 = 65536;
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Listens on a socket, on which another daemon may have listened before.
pub fn listen(socket: &Path) -> UnixListener {
    let _ = std::fs::remove_file(socket);
    UnixListener::bind(socket).unwrap()
}

pub fn accept(listener: &UnixListener) -> UnixStream {
    listener.accept().unwrap().0
}

pub fn options(socket: PathBuf) -> ConnectOptions {
    let namespace = Namespace::new("job").unwrap();
    ConnectOptions {
        socket,
        namespace,
        token: Vec::new(),
        role: Role::Reader,
    }
}

pub fn hear(stream: &mut UnixStream) -> Request {
    decode("request", &recv_frame(stream, FRAME_BYTES_MAX).unwrap().0).unwrap()
}

pub fn say(stream: &mut UnixStream, reply: &Reply, slot: Option<&Slot>) {
    send_frame(stream, &encode(reply), slot.map(AsFd::as_fd)).unwrap();
}

pub fn welcome(stream: &mut UnixStream) {
    welcome_by(stream, 1);
}

/// Hears a hello and welcomes whoever said it; their role.
pub fn welcome_by(stream: &mut UnixStream, generation: u64) -> Role {
    let Request::Hello { role, .. } = hear(stream) else {
        panic!("expected a hello");
    };
    let reply = Reply::Welcome {
        node: NodeName::new("n").unwrap(),
        generation: Generation::new(generation),
        geometry: None,
        chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
    };
    say(stream, &reply, None);
    role
}
