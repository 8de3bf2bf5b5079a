//! `[[peers]]`: the other nodes of a cluster without a registry, one by one or as host lists, which all nodes may share.

use serde::Deserialize;
use storaged_plan::{Cordon, LostWithOne, Member, check_domain, lost_by_level};
use storaged_wire::NodeName;

use super::hostlist::{expand, is_list};
use super::{Config, ConfigError, ConfigFile, value};
use crate::net::{Peer, PeerAddress};

/// `[[peers]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerSection {
    /// Its name, or a host list of names, this node's among them or not.
    pub name: String,
    /// Its UDP address: an IP address or a host's name, and a port; or a list of as many.
    pub address: String,
    /// What fails together with it, or a list of as many; by default the node alone.
    pub failure_domain: Option<String>,
}

/// Whether the host lists of `[[peers]]` name the node that reads them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnListing {
    /// One of them does, or there are none.
    AsExpected,
    /// There are some, and none does.
    InNoList(NodeName),
}

impl OwnListing {
    /// What the operator should hear: each file may list the other nodes alone, but where all nodes share the lists this one would be a member
    /// that no other node knows.
    pub fn warning(&self) -> Option<String> {
        match self {
            Self::AsExpected => None,
            Self::InNoList(name) => Some(format!(
                "expected one of the host lists of peers.name to name this node, {name}, got none that does: it is a member beside those, and \
                 nodes whose files do not name it do not link to it; correct the list, or node.name (by default the host's name), unless the \
                 list is this node's own, of the other nodes alone"
            )),
        }
    }
}

/// The nodes of a file, as the one that reads it sees them.
pub(super) struct Nodes {
    /// This node first.
    pub members: Vec<Member>,
    pub peers: Vec<Peer>,
    pub own_listing: OwnListing,
}

/// A node that a section lists.
#[derive(Debug)]
struct Listed {
    member: Member,
    address: PeerAddress,
}

impl PeerSection {
    fn listed(&self) -> Result<Vec<Listed>, ConfigError> {
        let names = expand(&self.name).map_err(|error| value("peers.name", error))?;
        let addresses = self.addresses(names.len())?;
        let domains = self.domains(&names)?;
        let nodes = names.into_iter().zip(addresses).zip(domains);
        let listed = nodes.map(|((name, address), failure_domain)| {
            let name = NodeName::new(name).map_err(|error| value("peers.name", error))?;
            let member = Member {
                failure_domain,
                ..alone(name)
            };
            Ok(Listed { member, address })
        });
        listed.collect()
    }

    fn addresses(&self, count: usize) -> Result<Vec<PeerAddress>, ConfigError> {
        // Those of IPv6 have brackets too.
        if let Ok(one) = self.address.parse() {
            return as_many("peers.address", vec![one], count);
        }
        let listed = expand(&self.address).map_err(|error| value("peers.address", error))?;
        let parsed = listed.iter().map(|it| it.parse());
        let parsed: Result<Vec<PeerAddress>, _> = parsed.collect();
        let parsed = parsed.map_err(|error| value("peers.address", error))?;
        as_many("peers.address", parsed, count)
    }

    fn domains(&self, names: &[String]) -> Result<Vec<String>, ConfigError> {
        let key = "peers.failure_domain";
        let domains = match &self.failure_domain {
            None => names.to_vec(),
            Some(domain) if is_list(domain) => {
                let listed = expand(domain).map_err(|error| value(key, error))?;
                as_many(key, listed, names.len())?
            }
            Some(domain) => vec![domain.clone(); names.len()],
        };
        for domain in &domains {
            check_domain(domain).map_err(|error| value(key, error))?;
        }
        Ok(domains)
    }
}

fn as_many<T>(key: &'static str, listed: Vec<T>, count: usize) -> Result<Vec<T>, ConfigError> {
    if listed.len() == count {
        return Ok(listed);
    }
    let got = listed.len();
    Err(value(
        key,
        format!("expected as many as peers.name has, {count}, got {got}"),
    ))
}

impl ConfigFile {
    /// This node and its peers, and where the peers are.
    pub(super) fn nodes(&self, name: &NodeName) -> Result<Nodes, ConfigError> {
        let (mut own, mut others, mut peers) = (Vec::new(), Vec::new(), Vec::new());
        for section in &self.peers {
            for Listed { member, address } in section.listed()? {
                if member.name == *name && is_list(&section.name) {
                    own.push(member);
                    continue;
                }
                peers.push(Peer::named(member.name.clone(), address));
                others.push(member);
            }
        }
        let mut sections = self.peers.iter();
        let own_listing = if !own.is_empty() || !sections.any(|section| is_list(&section.name)) {
            OwnListing::AsExpected
        } else {
            OwnListing::InNoList(name.clone())
        };
        if own.is_empty() {
            let domain = self.node.failure_domain.clone();
            let failure_domain = domain.unwrap_or_else(|| name.to_string());
            own.push(Member {
                failure_domain,
                ..alone(name.clone())
            });
        }
        self.check_own_domain(&own)?;
        Ok(Nodes {
            members: own.into_iter().chain(others).collect(),
            peers,
            own_listing,
        })
    }

    /// The lists of others say of this node what its own says, or they would not link.
    fn check_own_domain(&self, own: &[Member]) -> Result<(), ConfigError> {
        let Some(domain) = &self.node.failure_domain else {
            return Ok(());
        };
        let wrong = |reason: String| Err(value("node.failure_domain", reason));
        if let Err(error) = check_domain(domain) {
            return wrong(error.to_string());
        }
        match own.iter().find(|member| member.failure_domain != *domain) {
            None => Ok(()),
            Some(Member { failure_domain, .. }) => wrong(format!(
                "expected what peers.failure_domain says of this node, {failure_domain}, because the list that names it is the same on all \
                 nodes, got {domain} (from the file, --failure-domain or STORAGED_FAILURE_DOMAIN): say it in the list"
            )),
        }
    }
}

/// A node with which nothing else fails.
fn alone(name: NodeName) -> Member {
    Member {
        failure_domain: name.to_string(),
        name,
        cordon: Cordon::Open,
        seat: None,
    }
}

impl Config {
    /// What is lost with one failure domain of these members, by level; none where nothing is coded.
    pub fn domains_told(&self, members: &[Member]) -> Option<String> {
        let groups = storaged_plan::groups(members, self.geometry?).ok()?;
        let lost = lost_by_level(members, &groups);
        let count = lost.len();
        let told = (1..).zip(lost).map(|(level, lost)| {
            let borne = self.borne(lost, members.len());
            let at = if count == 1 {
                String::new()
            } else {
                format!(" at level {level}")
            };
            format!("{}{at} ({borne})", lost.blocks)
        });
        let told: Vec<String> = told.collect();
        let told = Some(told.join(", ")).filter(|told| !told.is_empty())?;
        Some(format!(
            "blocks of a stripe in one failure domain: at most {told}"
        ))
    }

    fn borne(&self, lost: LostWithOne, members: usize) -> &'static str {
        let m = self.geometry.map_or(0, |geometry| geometry.m());
        let left = members - lost.nodes.min(members);
        if lost.blocks > m {
            "its loss is not borne"
        } else if 2 * left <= members {
            "its loss is borne, but leaves no majority: the restart needs --allow-older"
        } else {
            "its loss is borne"
        }
    }
}
