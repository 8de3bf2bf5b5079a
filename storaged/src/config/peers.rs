//! `[[peers]]`: the other nodes of a cluster without a registry, one by one or as host lists, which all nodes may share.

use serde::Deserialize;
use storaged_plan::{Cordon, Member, blocks_lost_by_level, check_domain};
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
    pub(super) fn members(&self, name: &NodeName) -> Result<(Vec<Member>, Vec<Peer>), ConfigError> {
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
        if own.is_empty() {
            own.push(alone(name.clone()));
        }
        if let Some(domain) = &self.node.failure_domain {
            check_domain(domain).map_err(|error| value("node.failure_domain", error))?;
            for member in &mut own {
                member.failure_domain.clone_from(domain);
            }
        }
        Ok((own.into_iter().chain(others).collect(), peers))
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
    /// How many blocks of a stripe are lost with one failure domain of these members, by level; none where they are not coded.
    pub fn domains_told(&self, members: &[Member]) -> Option<String> {
        let geometry = self.geometry?;
        let groups = storaged_plan::groups(members, geometry).ok()?;
        let lost = blocks_lost_by_level(members, &groups);
        let told = (1..).zip(&lost).map(|(level, blocks)| {
            let is_borne = *blocks <= geometry.m();
            let borne = if is_borne { "is borne" } else { "is not borne" };
            match lost.len() {
                1 => format!("{blocks} (its loss {borne})"),
                _ => format!("{blocks} at level {level} (its loss {borne})"),
            }
        });
        let told: Vec<String> = told.collect();
        let told = told.join(", ");
        Some(format!(
            "blocks of a stripe in one failure domain: at most {told}"
        ))
    }
}
