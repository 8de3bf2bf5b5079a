//! `[network]`: with how many sockets and threads a node talks to its peers.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::Deserialize;

use super::threads::{ThreadKeys, network_threads};
use super::{ConfigError, NodeSection, value};
use crate::cores::WorkerThreads;
use crate::net::SOCKETS_MAX;

/// `[network]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkSection {
    /// UDP sockets per address, on ports from that of `node.listen` on; by default 1.
    pub sockets: Option<usize>,
    /// Addresses of further interfaces, for data alone.
    pub rails: Vec<IpAddr>,
    /// Threads that the sockets are served by; by default a quarter as many as there are cores, from 2 to 32.
    pub threads: Option<usize>,
    /// Cores for the network: one thread on each, which stays there.
    pub cores: Option<Vec<usize>>,
}

/// How a node talks to its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Where it takes trunks, beside `node.listen`.
    pub trunks: Vec<SocketAddr>,
    /// Threads.
    pub threads: WorkerThreads,
}

impl fmt::Display for NetworkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trunks: Vec<String> = self.trunks.iter().map(ToString::to_string).collect();
        write!(f, "{}, trunks at [{}]", self.threads, trunks.join(" "))
    }
}

impl NetworkSection {
    pub(super) fn validate(&self, node: &NodeSection) -> Result<NetworkConfig, ConfigError> {
        Ok(NetworkConfig {
            trunks: self.trunks(node.listen)?,
            threads: self.threads()?,
        })
    }

    fn trunks(&self, listen: SocketAddr) -> Result<Vec<SocketAddr>, ConfigError> {
        let wrong = |reason: String| value("network.rails", reason);
        if !self.rails.is_empty() && listen.ip().is_unspecified() {
            let reason = format!(
                "expected node.listen to be an address of one interface beside it, got {listen}"
            );
            return Err(wrong(reason));
        }
        for (at, rail) in self.rails.iter().enumerate() {
            let is_twice = self.rails[..at].contains(rail) || *rail == listen.ip();
            let is_of_all = rail.is_unspecified()
                || rail.is_multicast()
                || *rail == IpAddr::V4(Ipv4Addr::BROADCAST);
            if is_twice || is_of_all || rail.is_ipv4() != listen.is_ipv4() {
                return Err(wrong(format!(
                    "expected addresses of interfaces that differ from each other and from node.listen, of its family, got {rail}"
                )));
            }
        }
        let sockets = self.sockets.unwrap_or(1);
        let all = sockets.saturating_mul(1 + self.rails.len());
        if !(1..=SOCKETS_MAX).contains(&all) {
            return Err(value(
                "network.sockets",
                format!(
                    "expected 1 to {SOCKETS_MAX} for all addresses together, got {sockets} for each of {}",
                    1 + self.rails.len()
                ),
            ));
        }
        let ports = (0..sockets).map(|number| port_after(listen.port(), number));
        let ports: Vec<u16> = ports.collect::<Result<_, _>>()?;
        // Socket by socket over the rails: a peer that has fewer sockets uses all rails nevertheless.
        let mut addresses = vec![listen.ip()];
        addresses.extend(&self.rails);
        let of_port = |port: u16| {
            let addresses = addresses.clone().into_iter();
            addresses.map(move |ip| SocketAddr::new(ip, port))
        };
        // The first one is that of links.
        Ok(ports.into_iter().flat_map(of_port).skip(1).collect())
    }

    fn threads(&self) -> Result<WorkerThreads, ConfigError> {
        let keys = ThreadKeys {
            threads: "network.threads",
            cores: "network.cores",
        };
        keys.validate(self.threads, self.cores.as_deref(), network_threads)
    }
}

/// Port 0 is any, for every socket.
fn port_after(first: u16, number: usize) -> Result<u16, ConfigError> {
    if first == 0 {
        return Ok(0);
    }
    let port = usize::from(first) + number;
    u16::try_from(port).map_err(|_| {
        let reason = format!(
            "expected ports up to 65535 from node.listen's {first} on, got {}",
            number + 1
        );
        value("network.sockets", reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trunks(listen: &str, sockets: usize, rails: &[&str]) -> Result<Vec<String>, String> {
        let rail = |text: &&str| text.parse().expect("an address");
        let section = NetworkSection {
            sockets: Some(sockets),
            rails: rails.iter().map(rail).collect(),
            ..NetworkSection::default()
        };
        let node = NodeSection {
            listen: listen.parse().expect("an address"),
            ..NodeSection::default()
        };
        let config = section.validate(&node).map_err(|error| error.to_string())?;
        Ok(config.trunks.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn sockets_have_ports_in_a_row_on_every_rail() {
        assert_eq!(trunks("10.0.0.1:9300", 1, &[]).unwrap(), [""; 0]);
        assert_eq!(
            trunks("0.0.0.0:9300", 3, &[]).unwrap(),
            ["0.0.0.0:9301", "0.0.0.0:9302"]
        );
        assert_eq!(
            trunks("10.0.0.1:9300", 2, &["10.1.0.1", "10.2.0.1"]).unwrap(),
            [
                "10.1.0.1:9300",
                "10.2.0.1:9300",
                "10.0.0.1:9301",
                "10.1.0.1:9301",
                "10.2.0.1:9301"
            ]
        );
    }

    #[test]
    fn what_cannot_be_bound_is_refused_by_its_key() {
        for (listen, sockets, rails, key) in [
            ("10.0.0.1:9300", 0, &[][..], "network.sockets"),
            ("10.0.0.1:9300", 17, &[], "network.sockets"),
            ("10.0.0.1:9300", 9, &["10.1.0.1"], "network.sockets"),
            ("10.0.0.1:65535", 2, &[], "network.sockets"),
            (
                "10.0.0.1:9300",
                usize::MAX,
                &["10.1.0.1"],
                "network.sockets",
            ),
            ("0.0.0.0:9300", 1, &["10.1.0.1"], "network.rails"),
            ("10.0.0.1:9300", 1, &["10.0.0.1"], "network.rails"),
            (
                "10.0.0.1:9300",
                1,
                &["10.1.0.1", "10.1.0.1"],
                "network.rails",
            ),
            ("10.0.0.1:9300", 1, &["::1"], "network.rails"),
            ("10.0.0.1:9300", 1, &["0.0.0.0"], "network.rails"),
            ("10.0.0.1:9300", 1, &["224.0.0.1"], "network.rails"),
            ("10.0.0.1:9300", 1, &["255.255.255.255"], "network.rails"),
        ] {
            let refused = trunks(listen, sockets, rails).unwrap_err();
            assert!(
                refused.contains(key),
                "{listen} {sockets} {rails:?}: {refused}"
            );
        }
    }
}
