//! How certificates name nodes: by the DNS name `NAME.node.storaged`, or by a SPIFFE ID (SPIFFE-ID.md and X509-SVID.md of the SPIFFE
//! standards), as SPIRE and cert-manager's CSI driver give them.

use std::str::FromStr;

use rustls::pki_types::{CertificateDer, InvalidDnsNameError, ServerName};
use rustls::server::ParsedCertificate;
use storaged_wire::NodeName;
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

const SCHEME: &str = "spiffe://";
/// Where a template has the node's name.
const NODE: &str = "{node}";
/// The longest trust domain and the longest ID that the standard has.
const DOMAIN_BYTES_MAX: usize = 255;
const ID_BYTES_MAX: usize = 2048;

/// Why a certificate does not name a node.
#[derive(Debug, Error)]
pub enum NameError {
    /// It cannot be read, or names others.
    #[error(transparent)]
    Certificate(#[from] rustls::Error),
    /// The node's name makes no DNS name, so no certificate can have it.
    #[error(transparent)]
    NoDnsName(#[from] InvalidDnsNameError),
    /// It has another identity, or several, which the standard forbids.
    #[error("expected {expected} as its only URI (tls.spiffe), got {got:?}")]
    Spiffe { expected: String, got: Vec<String> },
    /// It cannot be read.
    #[error("expected a certificate, got something else: {0}")]
    Unreadable(String),
}

/// A text that is no template of SPIFFE IDs.
#[derive(Debug, Error)]
#[error(
    "expected spiffe://TRUST-DOMAIN/PATH with one {NODE} in its path, such as spiffe://example.org/storaged/{NODE}, got {got}: {reason}"
)]
pub struct SpiffeTemplateError {
    got: String,
    reason: &'static str,
}

/// A SPIFFE ID in which the node's name stands for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpiffeTemplate {
    before: String,
    behind: String,
}

impl FromStr for SpiffeTemplate {
    type Err = SpiffeTemplateError;

    fn from_str(text: &str) -> Result<Self, SpiffeTemplateError> {
        let refuse = |reason| SpiffeTemplateError {
            got: text.to_owned(),
            reason,
        };
        let (before, behind) = text.split_once(NODE).ok_or(refuse("no {node} in it"))?;
        let template = Self {
            before: before.to_owned(),
            behind: behind.to_owned(),
        };
        // No name of a node has another character than a path may have, so any of them stands for all.
        check_id(&template.with("n")).map_err(refuse)?;
        let in_domain = !before.strip_prefix(SCHEME).unwrap_or(before).contains('/');
        if in_domain {
            return Err(refuse("{node} is in the trust domain"));
        }
        Ok(template)
    }
}

impl SpiffeTemplate {
    fn with(&self, node: &str) -> String {
        format!("{}{node}{}", self.before, self.behind)
    }

    /// The ID of a node.
    pub fn id(&self, node: &NodeName) -> String {
        self.with(node.as_str())
    }
}

/// What the standard asks of an ID.
fn check_id(id: &str) -> Result<(), &'static str> {
    let rest = id
        .strip_prefix(SCHEME)
        .ok_or("it does not begin with spiffe://")?;
    let (domain, path) = rest.split_once('/').ok_or("it has no path")?;
    let in_domain =
        |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
    let in_path = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if domain.is_empty() || domain.len() > DOMAIN_BYTES_MAX || !domain.bytes().all(in_domain) {
        return Err("its trust domain is not 1 to 255 of a-z, 0-9, '.', '-' and '_'");
    }
    for segment in path.split('/') {
        if segment.is_empty() || segment == "." || segment == ".." || !segment.bytes().all(in_path)
        {
            return Err(
                "a segment of its path is empty, '.', '..', or has another character than letters, digits, '.', '-' and '_'",
            );
        }
    }
    (id.len() <= ID_BYTES_MAX)
        .then_some(())
        .ok_or("it is longer than 2048 bytes")
}

/// How certificates name nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodeNaming {
    /// By `NAME.node.storaged`.
    #[default]
    Dns,
    /// By a SPIFFE ID.
    Spiffe(SpiffeTemplate),
}

impl NodeNaming {
    /// Checks that a certificate names a node.
    ///
    /// # Errors
    /// An error that says so if it names another one, or several.
    pub fn check(
        &self,
        certificate: &CertificateDer<'_>,
        node: &NodeName,
    ) -> Result<(), NameError> {
        let Self::Spiffe(template) = self else {
            let parsed = ParsedCertificate::try_from(certificate)?;
            let name = ServerName::try_from(dns_name(node))?;
            return Ok(rustls::client::verify_server_name(&parsed, &name)?);
        };
        let (expected, got) = (template.id(node), uris(certificate)?);
        if got == [&*expected] {
            return Ok(());
        }
        Err(NameError::Spiffe { expected, got })
    }
}

/// The DNS name of a node in its certificate.
pub fn dns_name(node: &NodeName) -> String {
    format!("{node}.node.storaged")
}

fn uris(certificate: &CertificateDer<'_>) -> Result<Vec<String>, NameError> {
    let unreadable = |error: String| NameError::Unreadable(error);
    let (_, parsed) =
        X509Certificate::from_der(certificate).map_err(|error| unreadable(error.to_string()))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|error| unreadable(error.to_string()))?;
    let names = names.iter().flat_map(|names| &names.value.general_names);
    Ok(names
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some((*uri).to_owned()),
            _ => None,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_an_id_with_one_node_in_its_path() {
        let template: SpiffeTemplate = "spiffe://example.org/storaged/{node}".parse().unwrap();
        let node = NodeName::new("gpu-7.rack_2").unwrap();
        assert_eq!(
            template.id(&node),
            "spiffe://example.org/storaged/gpu-7.rack_2"
        );
        for (wrong, why) in [
            ("spiffe://example.org/storaged", "no {node}"),
            ("spiffe://{node}/storaged", "in the trust domain"),
            ("spiffe://{node}", "no path"),
            ("https://example.org/{node}", "begin with spiffe://"),
            ("spiffe:///{node}", "trust domain"),
            ("spiffe://Example.org/{node}", "trust domain"),
            ("spiffe://example.org:8443/{node}", "trust domain"),
            ("spiffe://example.org//{node}", "segment"),
            ("spiffe://example.org/{node}/", "segment"),
            ("spiffe://example.org/../{node}", "segment"),
            ("spiffe://example.org/{node}/{node}", "segment"),
            ("spiffe://example.org/{node}?x=1", "segment"),
            ("", "no {node}"),
        ] {
            let error = wrong.parse::<SpiffeTemplate>().unwrap_err().to_string();
            assert!(
                error.contains(why) && error.contains("example.org/storaged/{node}"),
                "{error}"
            );
        }
    }
}
