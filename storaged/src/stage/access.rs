//! Who may use a socket, by the credentials that the kernel gives of whoever connects.

use std::collections::BTreeSet;
use std::fs;

use rustix::net::UCred;
use storaged_wire::{Refusal, RefusalCode};

use super::places::Users;

/// Who may use a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Processes of these users. With a group that they are in, the file's mode keeps all others out before the daemon hears of them.
    Users {
        uids: BTreeSet<u32>,
        group: Option<u32>,
    },
    /// Root, the daemon's own user, and who is in this group: they may see every namespace.
    Operators { group: Option<u32> },
}

impl Access {
    /// How many users that are.
    pub(super) fn users(&self) -> Users {
        match self {
            Self::Users { uids, .. } if uids.len() < 2 => Users::One,
            Self::Users { .. } | Self::Operators { .. } => Users::Several,
        }
    }

    /// The group that the socket's file gets.
    pub(super) fn group(&self) -> Option<u32> {
        let (Self::Users { group, .. } | Self::Operators { group }) = self;
        *group
    }

    /// Mode of the socket's file.
    pub(super) fn mode(&self) -> u32 {
        match self {
            Self::Users { group: Some(_), .. } | Self::Operators { group: Some(_) } => 0o660,
            Self::Operators { group: None } => 0o600,
            Self::Users { uids, group: None } if uids.iter().eq([&own_uid()]) => 0o600,
            // Users of several groups have no mode of their own: the kernel's word decides alone.
            Self::Users { .. } => 0o666,
        }
    }

    /// Mode of the socket's directory, where the daemon makes it.
    pub(super) fn directory_mode(&self) -> u32 {
        if self.group().is_some() { 0o750 } else { 0o755 }
    }

    /// Lets a process in, or says why not.
    pub(super) fn check(&self, peer: &UCred) -> Result<(), Refusal> {
        let uid = peer.uid.as_raw();
        match self {
            Self::Users { uids, .. } if uids.contains(&uid) => Ok(()),
            Self::Users { uids, .. } => Err(refused(format!(
                "expected a process of user id {uids:?} on this socket, got {uid}: use your own tenant's socket, as an operator the one of [admin], or add the user to [[tenants]]"
            ))),
            Self::Operators { group } => self.check_operator(peer, *group),
        }
    }

    fn check_operator(&self, peer: &UCred, group: Option<u32>) -> Result<(), Refusal> {
        let uid = peer.uid.as_raw();
        if uid == 0 || uid == own_uid() {
            return Ok(());
        }
        let Some(group) = group else {
            return Err(refused(format!(
                "expected root or the daemon's own user on the operator's socket, got user id {uid}: set admin.group to let a group in"
            )));
        };
        let all = groups_of(peer.pid.as_raw_nonzero().get());
        if peer.gid.as_raw() == group || all.contains(&group) {
            Ok(())
        } else {
            Err(refused(format!(
                "expected root or a process in group {group} on the operator's socket, got user id {uid} in groups {all:?}: see admin.group"
            )))
        }
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn refused(message: String) -> Refusal {
    Refusal::new(RefusalCode::WrongUser, message)
}

/// All groups of a process; none if it is gone or in another pid namespace. The socket's mode lets nobody else connect
/// in the first place, so that a process number used again opens nothing.
fn groups_of(pid: i32) -> BTreeSet<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    let numbers = line.unwrap_or_default().split_whitespace();
    numbers.filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use rustix::process::{Gid, Pid, Uid};

    use super::*;

    fn peer(uid: u32, gid: u32) -> UCred {
        UCred {
            pid: Pid::from_raw(i32::MAX).unwrap(),
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(gid),
        }
    }

    #[test]
    fn the_operators_socket_lets_in_root_and_its_group() {
        let door = Access::Operators { group: Some(42) };
        assert!(door.check(&peer(0, 0)).is_ok() && door.check(&peer(7, 42)).is_ok());
        let refusal = door.check(&peer(7, 43)).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::WrongUser);
        assert!(
            refusal.message.contains("admin.group"),
            "{}",
            refusal.message
        );
        let alone = Access::Operators { group: None };
        assert!(alone.check(&peer(0, 9)).is_ok() && alone.check(&peer(7, 0)).is_err());
    }

    #[test]
    fn a_tenants_socket_lets_in_its_users_only() {
        let door = Access::Users {
            uids: BTreeSet::from([7]),
            group: None,
        };
        assert!(door.check(&peer(7, 1)).is_ok());
        let refusal = door.check(&peer(0, 0)).unwrap_err();
        assert!(refusal.message.contains("[admin]"), "{}", refusal.message);
    }

    #[test]
    fn a_socket_is_open_to_no_more_users_than_a_mode_can_say() {
        let of = |uids: &[u32], group| Access::Users {
            uids: uids.iter().copied().collect(),
            group,
        };
        let own = own_uid();
        assert_eq!(of(&[own], None).mode(), 0o600);
        assert_eq!(of(&[own, own + 1], None).mode(), 0o666);
        assert_eq!(of(&[own + 1], None).mode(), 0o666);
        let grouped = of(&[own, own + 1], Some(42));
        assert_eq!((grouped.mode(), grouped.directory_mode()), (0o660, 0o750));
        assert_eq!(grouped.group(), Some(42));
    }
}
