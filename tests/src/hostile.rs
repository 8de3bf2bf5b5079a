//! What hostile programs of the same machine say to a daemon: the local protocol itself, where the SDK is too polite.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Gid, Uid};
use storaged_arena::{recv_frame, send_frame};
use storaged_sdk::wire::local::{LOCAL_VERSION, Reply, Request, Role};
use storaged_sdk::wire::{Namespace, RefusalCode, decode, encode};

use crate::system::System;

/// A user that is in no tenant.
pub const NOBODY: u32 = 65534;

/// What a hostile program does as another user. The kernel takes the user of a thread for that of its connections.
pub fn as_nobody<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|threads| {
        let hostile = threads.spawn(|| {
            let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            // Of this thread alone, and for good: it ends with the attack.
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            work()
        });
        hostile.join().expect("it does not panic")
    })
}

/// Everybody may reach the socket, as in the directory of a machine.
pub fn open_to_all(system: &System) -> Result<()> {
    let mut path = system.sockets[0].as_path();
    while path.starts_with(system.root.path()) {
        if path.is_dir() {
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755))?;
        }
        path = path.parent().context("a parent")?;
    }
    Ok(())
}

/// Announces a frame and sends a part of it, as much as is taken within a second.
pub fn begin_frame(socket: &Path, announced: u32, sent: usize) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_write_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(&announced.to_le_bytes())?;
    let piece = vec![0; 1 << 20];
    for _ in 0..sent.div_ceil(piece.len()) {
        if stream.write_all(&piece).is_err() {
            break;
        }
    }
    Ok(stream)
}

pub fn call(stream: &mut UnixStream, request: &Request) -> Result<Reply> {
    send_frame(stream, &encode(request), None)?;
    let (body, _) = recv_frame(stream, 64 << 20)?;
    Ok(decode("reply", &body)?)
}

pub fn hello(namespace: &str, token: &[u8]) -> Result<Request> {
    Ok(Request::Hello {
        version: LOCAL_VERSION,
        namespace: Namespace::new(namespace)?,
        token: token.to_vec().into(),
        role: Role::Reader,
    })
}

pub fn refusal(reply: Reply) -> Result<RefusalCode> {
    match reply {
        Reply::Refused(refusal) => Ok(refusal.code),
        other => anyhow::bail!("expected a refusal, got {other:?}"),
    }
}
