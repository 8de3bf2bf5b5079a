//! `storaged hand-over`: the end of a daemon and its keeper that loses nothing, since a holder goes on with their memory. What a hook says before
//! a pod is replaced (deploy/kubernetes/pre-stop.sh).

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;

use super::{CliError, SocketArgs};
use crate::config::Span;
use crate::keep::{HOLDER_VARIABLE, KEEPER_NAME, holder};

#[derive(Debug, Args)]
#[command(
    after_help = "The daemon ends at once, as for an upgrade, and its keeper with it, once the holder (`storaged run --holder`) has said that it has\nall of the memory; the next daemon finds it there. Without such a holder nobody ends, and the keeper's log says why.\nA holder that does not confirm within 5 s costs a restart of the daemon: its keeper starts it again, with all of its memory.\nExit codes: 0 both have ended, 1 they have not."
)]
pub struct HandOverArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Socket of the holder, which knows the keeper where no daemon listens, as between two starts
    #[arg(long, env = HOLDER_VARIABLE, value_name = "PATH")]
    holder: Option<OsString>,
    /// Longest wait for their end
    #[arg(long, default_value = "10s")]
    timeout: Span,
}

/// Runs `storaged hand-over`.
pub fn hand_over(args: &HandOverArgs) -> Result<(), CliError> {
    let failed = |source| CliError::Io {
        what: "finding the keeper of this node's daemon",
        source,
    };
    let keeper = keeper_of(&args.socket.path(), args.holder.as_deref()).map_err(failed)?;
    let within = Duration::from_millis(args.timeout.as_ms());
    let ended = end(&keeper, within).map_err(|source| CliError::Io {
        what: "telling the keeper",
        source,
    })?;
    match ended {
        KeeperEnd::Ended => Ok(()),
        KeeperEnd::StillThere => Err(CliError::NotHandedOver(within)),
    }
}

/// Whether it has ended.
enum KeeperEnd {
    Ended,
    StillThere,
}

/// The process that runs the daemon which listens there, or would run it where nobody does.
fn keeper_of(socket: &Path, holder: Option<&OsStr>) -> io::Result<OwnedFd> {
    match listener_of(socket) {
        Ok(daemon) => {
            let stat = fs::read_to_string(format!("/proc/{daemon}/stat"))?;
            let parent = parent_in(&stat);
            opened(parent.ok_or_else(|| other(format!("expected a parent of {daemon}")))?)
        }
        Err(error) => match holder.and_then(attached_to) {
            Some(keeper) => opened(keeper),
            None => Err(error),
        },
    }
}

/// Whose memory the holder has, if it says so.
fn attached_to(path: &OsStr) -> Option<Pid> {
    let process = holder::attached_keeper(Path::new(path)).ok()?;
    Pid::from_raw(process.try_into().ok()?)
}

fn other(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, what)
}

/// A process, if it is a keeper.
fn opened(keeper: Pid) -> io::Result<OwnedFd> {
    let process = pidfd_open(keeper, PidfdFlags::empty())?;
    // Looked at once its number can be nobody else's.
    let name = fs::read_to_string(format!("/proc/{}/comm", keeper.as_raw_nonzero()))?;
    let (name, expected) = (name.trim_end(), KEEPER_NAME.to_string_lossy());
    if name != expected {
        return Err(other(format!(
            "expected a daemon below its keeper ({expected}), got {name}"
        )));
    }
    Ok(process)
}

/// The number of the process that listens at a socket.
fn listener_of(socket: &Path) -> io::Result<i32> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let peer = runtime.block_on(async { UnixStream::connect(socket).await?.peer_cred() })?;
    // Of a process that is not among those which this one sees it is 0.
    peer.pid()
        .filter(|it| *it > 0)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn parent_in(stat: &str) -> Option<Pid> {
    // The name in brackets may have anything in it.
    let (_, rest) = stat.rsplit_once(')')?;
    let parent = rest.split_whitespace().nth(1)?.parse().ok()?;
    Pid::from_raw(parent)
}

/// Tells the keeper, and waits for its end.
fn end(keeper: &OwnedFd, within: Duration) -> io::Result<KeeperEnd> {
    pidfd_send_signal(keeper, Signal::USR1)?;
    let within = Timespec {
        tv_sec: i64::try_from(within.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: within.subsec_nanos().into(),
    };
    let mut ended = [PollFd::new(keeper, PollFlags::IN)];
    Ok(match poll(&mut ended, Some(&within))? {
        0 => KeeperEnd::StillThere,
        _ => KeeperEnd::Ended,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_behind_any_name() {
        let parent = |stat| parent_in(stat).map(|it| it.as_raw_nonzero().get());
        assert_eq!(parent("7 (a) b) S 12 3 4"), Some(12));
        assert_eq!(parent("7 (a) S 0 3 4"), None);
        assert_eq!(parent("7"), None);
    }

    #[test]
    fn who_listens_is_found_and_is_below_no_keeper_here() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(listener_of(&path).unwrap(), own);
        let refused = keeper_of(&path, None).unwrap_err();
        assert!(
            refused.to_string().contains("below its keeper"),
            "{refused}"
        );
    }
}
