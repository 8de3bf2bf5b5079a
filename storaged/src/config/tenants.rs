//! Tenants: who may use the daemon, each on a socket of its own, and what each may have.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use serde::Deserialize;
use storaged_core::{TenantShare, Viewer};
use storaged_wire::TenantName;

use super::admin::GroupName;
use super::{ConfigError, ConfigFile, value};
use crate::stage::{Access, CONNECTIONS_MAX, TenantSocket};
use crate::trickle::TenantRates;

/// `[[tenants]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantSection {
    /// Its jobs are `NAME~JOB` to everybody else; one tenant may do without.
    pub name: Option<String>,
    /// A directory of the tenant's own; the socket is `storaged.sock` in it.
    pub directory: PathBuf,
    /// Users that may use the socket.
    pub uids: BTreeSet<u32>,
    /// A group that all of them are in; the socket's file and directory are then open to it alone.
    pub group: Option<GroupName>,
    /// Bytes of the budget that no other tenant takes.
    pub memory_guaranteed: Option<ByteSize>,
    /// Bytes of the budget that it may have at most.
    pub memory_max: Option<ByteSize>,
    /// Bytes per second that it uploads at most.
    pub trickle_rate: Option<ByteSize>,
    /// Requests per second that it gets through at most.
    #[serde(default = "requests_max")]
    pub requests_max: NonZeroU32,
    /// Connections that it has at once at most.
    pub connections_max: Option<usize>,
    /// Jobs that it opens within a minute and that save nothing, at most.
    pub new_jobs_max: Option<NonZeroUsize>,
}

/// Tenants as the daemon uses them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tenants {
    /// Theirs and the operator's.
    pub sockets: Vec<TenantSocket>,
    pub shares: TenantShares,
}

/// What tenants may have, those of which the file says it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantShares {
    /// Of the budget, and jobs.
    pub of_node: BTreeMap<Option<TenantName>, TenantShare>,
    /// Bytes per second that they upload at most.
    pub trickle_rates: TenantRates,
}

impl TenantSection {
    /// A socket that nobody may use, or whose place hangs on where the daemon was started, is a slip.
    fn check(&self) -> Result<(), ConfigError> {
        if self.uids.is_empty() {
            let text = "expected the user ids that may use the socket, got none";
            return Err(value("tenants.uids", text));
        }
        if self.directory.is_relative() {
            let text = "expected an absolute path, got a relative one";
            return Err(value("tenants.directory", text));
        }
        Ok(())
    }

    fn name(&self) -> Result<Option<TenantName>, ConfigError> {
        let name = self.name.as_ref().map(|name| TenantName::new(name.clone()));
        let name = name.transpose();
        name.map_err(|error| value("tenants.name", error))
    }

    fn socket(&self, tenant: Option<TenantName>) -> Result<TenantSocket, ConfigError> {
        let group = self.group.as_ref();
        let group = group.map(|group| group.number("tenants.group"));
        Ok(TenantSocket {
            path: socket_in(&self.directory),
            access: Access::Users {
                uids: self.uids.clone(),
                group: group.transpose()?,
            },
            viewer: Viewer::Tenant(tenant),
            requests: Some(self.requests_max),
            connections: self.connections()?,
        })
    }

    fn connections(&self) -> Result<usize, ConfigError> {
        match self.connections_max.unwrap_or(CONNECTIONS_MAX) {
            most @ 1..=CONNECTIONS_MAX => Ok(most),
            got => {
                let text = format!("expected 1 to {CONNECTIONS_MAX} connections, got {got}");
                Err(value("tenants.connections_max", text))
            }
        }
    }

    fn upload_rate(&self) -> Result<Option<u64>, ConfigError> {
        match self.trickle_rate {
            Some(ByteSize(0)) => {
                let text = "expected bytes per second, got 0; without the key there is no limit";
                Err(value("tenants.trickle_rate", text))
            }
            rate => Ok(rate.map(|rate| rate.0)),
        }
    }

    fn share(&self) -> Result<TenantShare, ConfigError> {
        let guaranteed = self.memory_guaranteed.map_or(0, |bytes| bytes.0);
        let most = self.memory_max.map(|bytes| bytes.0);
        if most.is_some_and(|most| most < guaranteed || most == 0) {
            let text = format!(
                "expected more than nothing, and at least tenants.memory_guaranteed, {guaranteed} bytes, got {}",
                most.unwrap_or_default()
            );
            return Err(value("tenants.memory_max", text));
        }
        let new_jobs = self.new_jobs_max.map(NonZeroUsize::get);
        if new_jobs.is_some_and(|most| most > NEW_JOBS_MOST) {
            let text = format!(
                "expected at most {NEW_JOBS_MOST}, got {}: nodes remember so many names that save nothing, of all tenants",
                new_jobs.unwrap_or_default()
            );
            return Err(value("tenants.new_jobs_max", text));
        }
        Ok(TenantShare {
            guaranteed,
            most,
            new_jobs,
        })
    }
}

/// Half of the empty jobs that a node remembers (`EMPTY_JOBS_MAX` of the core), and of the names that it takes from one other node: beyond that one
/// tenant would keep others from opening theirs.
const NEW_JOBS_MOST: usize = 512;

/// A save is some ten requests of a rank; the loop that serves all tenants does many times that many.
fn requests_max() -> NonZeroU32 {
    const { NonZeroU32::new(5_000).unwrap() }
}

fn socket_in(directory: &Path) -> PathBuf {
    directory.join("storaged.sock")
}

impl ConfigFile {
    pub(super) fn tenants(&self, budget: u64) -> Result<Tenants, ConfigError> {
        let mut tenants = Tenants::default();
        if self.tenants.is_empty() {
            tenants.sockets.push(self.own_socket());
        }
        let mut names = BTreeSet::new();
        for section in &self.tenants {
            section.check()?;
            let name = section.name()?;
            let socket = section.socket(name.clone())?;
            if tenants.sockets.iter().any(|it| it.path == socket.path) {
                let text = "expected a directory of its own for every tenant, got one twice";
                return Err(value("tenants.directory", text));
            }
            tenants.sockets.push(socket);
            if !names.insert(name.clone()) {
                return Err(value("tenants.name", said_twice(name.as_ref())));
            }
            if let Some(rate) = section.upload_rate()? {
                let rates = &mut tenants.shares.trickle_rates;
                rates.insert(name.clone(), rate);
            }
            let share = section.share()?;
            if share != TenantShare::default() {
                tenants.shares.of_node.insert(name, share);
            }
        }
        check_guarantees(&tenants.shares.of_node, budget)?;
        tenants.sockets.push(self.admin_socket()?);
        Ok(tenants)
    }

    /// Without tenants the daemon serves its own user.
    fn own_socket(&self) -> TenantSocket {
        let own = rustix::process::getuid().as_raw();
        TenantSocket {
            path: socket_in(&self.node.runtime_dir),
            access: Access::Users {
                uids: BTreeSet::from([own]),
                group: None,
            },
            viewer: Viewer::Tenant(None),
            requests: None,
            connections: CONNECTIONS_MAX,
        }
    }
}

/// Jobs of two tenants with one name would be one.
fn said_twice(name: Option<&TenantName>) -> String {
    match name {
        Some(name) => format!("expected a name of its own for every tenant, got {name} twice"),
        None => {
            "expected names for all tenants but one, got two without: jobs of both would be the same"
                .into()
        }
    }
}

fn check_guarantees(
    shares: &BTreeMap<Option<TenantName>, TenantShare>,
    budget: u64,
) -> Result<(), ConfigError> {
    let all = shares.values().map(|share| share.guaranteed);
    let all = all.fold(0, u64::saturating_add);
    if all > budget {
        let text = format!(
            "expected at most memory.budget, {budget} bytes, for all tenants together, got {all}"
        );
        return Err(value("tenants.memory_guaranteed", text));
    }
    Ok(())
}
