//! The operator's own socket.

use std::path::PathBuf;

use serde::Deserialize;
use storaged_core::Viewer;

use super::{ConfigError, ConfigFile, value};
use crate::stage::{Access, CONNECTIONS_MAX, TenantSocket};

/// Name of the operator's socket in the runtime directory.
const SOCKET: &str = "admin.sock";

/// `[admin]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminSection {
    /// Where it is; by default `admin.sock` in `node.runtime_dir`.
    pub socket: Option<PathBuf>,
    /// Who may use it beside root and the daemon's own user: a group's name or number.
    pub group: Option<GroupName>,
}

/// A group as it is written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum GroupName {
    /// By number.
    Number(u32),
    /// By name.
    Name(String),
}

impl GroupName {
    /// # Errors
    /// [`ConfigError::Value`] of this key.
    pub(super) fn number(&self, key: &'static str) -> Result<u32, ConfigError> {
        let name = match self {
            Self::Number(number) => return Ok(*number),
            Self::Name(name) => name,
        };
        let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
        number_of(&groups, name).ok_or_else(|| {
            let reason = format!(
                "expected the name of a group in /etc/group, or a number, got {name:?}: make the group first"
            );
            value(key, reason)
        })
    }
}

fn number_of(groups: &str, name: &str) -> Option<u32> {
    let mut fields = groups.lines().map(|line| line.split(':'));
    let mut found =
        fields.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
    found.nth(1)?.parse().ok()
}

impl ConfigFile {
    pub(super) fn admin_socket(&self) -> Result<TenantSocket, ConfigError> {
        let beside = || self.node.runtime_dir.join(SOCKET);
        let group = self.admin.group.as_ref();
        let group = group.map(|group| group.number("admin.group"));
        Ok(TenantSocket {
            path: self.admin.socket.clone().unwrap_or_else(beside),
            access: Access::Operators {
                group: group.transpose()?,
            },
            viewer: Viewer::Operator,
            requests: None,
            connections: CONNECTIONS_MAX,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_its_name() {
        let groups = "root:x:0:\nops:x:995:ann,bob\n";
        assert_eq!(number_of(groups, "ops"), Some(995));
        assert_eq!(number_of(groups, "op"), None);
    }
}
