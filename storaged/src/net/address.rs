//! Where a peer listens: an IP address, or a host's name that is looked up when it is dialled, because it may have moved.

use std::net::SocketAddr;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::lookups::Lookups;

/// A peer's address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub enum PeerAddress {
    /// An IP address and port.
    Ip(SocketAddr),
    /// A host and port.
    Host { name: String, port: u16 },
}

/// Neither kind of address.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "expected an IP address or a host's name, a colon and a port, such as 10.0.0.1:9300, got {0:?}"
)]
pub struct AddressError(String);

impl FromStr for PeerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Ip(address));
        }
        let wrong = || AddressError(text.into());
        let (name, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let is_name = (1..=253).contains(&name.len())
            && name.bytes().all(letters)
            // Digits and dots alone are an IP address with a mistake in it.
            && name.bytes().any(|byte| byte.is_ascii_alphabetic());
        let port = port.parse().map_err(|_| wrong())?;
        if is_name && port > 0 {
            Ok(Self::Host {
                name: name.into(),
                port,
            })
        } else {
            Err(wrong())
        }
    }
}

impl TryFrom<String> for PeerAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<SocketAddr> for PeerAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

impl std::fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Host { name, port } => write!(f, "{name}:{port}"),
        }
    }
}

impl PeerAddress {
    /// An address of the same family as the socket that dials.
    ///
    /// # Errors
    /// As the resolver says, or that the host has no such address.
    pub async fn resolve(&self, from: SocketAddr) -> std::io::Result<SocketAddr> {
        let (name, port) = match self {
            Self::Ip(address) => return Ok(*address),
            Self::Host { name, port } => (name.as_str(), *port),
        };
        let found = Lookups::of_the_system().addresses(name).await?;
        let none = || {
            let family = if from.is_ipv4() { "IPv4" } else { "IPv6" };
            std::io::Error::other(format!("expected an {family} address of {name}, got none"))
        };
        let fits = |address: &&SocketAddr| address.is_ipv4() == from.is_ipv4();
        let mut address = *found.iter().find(fits).ok_or_else(none)?;
        address.set_port(port);
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_are_taken_and_shown_as_written() {
        for text in [
            "10.0.0.1:9300",
            "[::1]:9300",
            "node2.cluster.local:9300",
            "n3:1",
        ] {
            assert_eq!(text.parse::<PeerAddress>().unwrap().to_string(), text);
        }
        for text in [
            "node2",
            "node2:",
            "node2:0",
            "node2:70000",
            ":9300",
            "no de:1",
            "10.0.0:9300",
            "10.0.0.300:9300",
        ] {
            let error = text.parse::<PeerAddress>().unwrap_err().to_string();
            assert!(
                error.contains(text) && error.contains("10.0.0.1:9300"),
                "{error}"
            );
        }
    }

    #[tokio::test]
    async fn a_name_is_looked_up_in_the_family_of_the_socket() {
        let address: PeerAddress = "localhost:9300".parse().unwrap();
        let from = SocketAddr::from(([127, 0, 0, 1], 0));
        let found = address.resolve(from).await.unwrap();
        assert_eq!(found, SocketAddr::from(([127, 0, 0, 1], 9300)));
    }
}
