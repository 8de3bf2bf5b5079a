//! TLS 1.3 with certificates on both sides. `node_naming` says how they name nodes.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::CipherSuite;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use storaged_wire::NodeName;
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::authority::{Authorities, Naming, OfAuthority};
use super::node_naming::{NameError, NodeNaming};
use super::revoked::Revoked;

/// The protocol's name in TLS.
const ALPN: &[u8] = b"storaged/1";

/// Certificates that cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file is missing or is not PEM of the right kind.
    #[error("expected {what} in PEM at {path}: {reason}; `storaged cert` makes one")]
    File {
        what: &'static str,
        path: PathBuf,
        reason: String,
    },
    /// Users of the machine who are neither the key's owner nor in its group may read or write it.
    #[error(
        "expected a private key that only its owner and its group may read at {path}, got mode {mode:04o}: chmod 640 {path}"
    )]
    KeyExposed { path: PathBuf, mode: u32 },
    /// The pieces do not go together.
    #[error("the certificates cannot be used: {0}")]
    Unusable(String),
    /// A list of revoked certificates is of nobody who issues certificates here.
    #[error(
        "expected a list of revoked certificates at {path} that an authority in tls.ca has signed, got one of {issuer} that none has: `storaged cert revoke` makes one"
    )]
    ForeignList { path: PathBuf, issuer: String },
    /// No peer with the list lets this node in.
    #[error(
        "the certificate of {node} is revoked by tls.crl: `storaged cert renew DIR {node}` makes another one"
    )]
    Revoked { node: NodeName },
    /// The certificate is somebody else's.
    #[error("expected a certificate for node {node}, got one that is not valid for it: {reason}")]
    Name { node: NodeName, reason: NameError },
}

/// Where the certificates are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate authority of the cluster.
    pub ca: PathBuf,
    /// This node's certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The certificates that the authority has revoked, if it has any.
    pub crl: Option<PathBuf>,
    /// How they name nodes.
    pub naming: NodeNaming,
}

impl TlsFiles {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Path> {
        let always = [&self.ca, &self.certificate, &self.key];
        always.into_iter().chain(&self.crl).map(PathBuf::as_path)
    }
}

/// When a certificate is valid, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// From.
    pub begins: i64,
    /// To.
    pub ends: i64,
}

/// Certificates in memory.
#[derive(Debug)]
pub struct TlsIdentity {
    ca: Vec<CertificateDer<'static>>,
    certificate: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    revoked: Arc<Revoked>,
    naming: NodeNaming,
}

/// The library's ciphers, AES-128-GCM first: as good as AES-256 for this and the cheapest that there is.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = library();
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

#[cfg(not(feature = "aws-lc"))]
fn library() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

#[cfg(feature = "aws-lc")]
fn library() -> CryptoProvider {
    rustls::crypto::aws_lc_rs::default_provider()
}

fn unusable(error: impl std::fmt::Display) -> TlsError {
    TlsError::Unusable(error.to_string())
}

impl TlsIdentity {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError::File`] if one is missing or no PEM, [`TlsError::KeyExposed`] if others may read the key,
    /// [`TlsError::ForeignList`] if no authority has signed the list.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let ca = read_certificates("the authority's certificate", &files.ca)?;
        let revoked = match &files.crl {
            Some(path) => Revoked::read(path, &ca, &provider())?,
            None => Revoked::default(),
        };
        Ok(Self {
            ca,
            revoked: Arc::new(revoked),
            certificate: read_certificates("the node's certificate", &files.certificate)?,
            key: read_key(&files.key)?,
            naming: files.naming.clone(),
        })
    }

    /// Checks that the certificate is `node`'s own.
    ///
    /// # Errors
    /// [`TlsError::Name`] if it is not.
    pub fn check_name(&self, node: &NodeName) -> Result<(), TlsError> {
        let first = self
            .certificate
            .first()
            .ok_or_else(|| unusable("no certificate"))?;
        self.naming
            .check(first, node)
            .map_err(|reason| TlsError::Name {
                node: node.clone(),
                reason,
            })
    }

    /// From when to when the certificate is valid.
    ///
    /// # Errors
    /// [`TlsError::Unusable`] if it cannot be read.
    pub fn validity(&self) -> Result<Validity, TlsError> {
        let first = self.certificate.first();
        let first = first.ok_or_else(|| unusable("no certificate"))?;
        let (_, parsed) = X509Certificate::from_der(first).map_err(unusable)?;
        let dates = parsed.validity();
        Ok(Validity {
            begins: dates.not_before.timestamp(),
            ends: dates.not_after.timestamp(),
        })
    }

    /// The authorities that certificates must be of, by name and key.
    pub fn authorities(&self) -> String {
        Authorities::of(&self.ca).to_string()
    }

    /// Checks all that starting with it would: that it is `node`'s own, and goes together with its key.
    ///
    /// # Errors
    /// [`TlsError`] for what does not fit.
    pub fn check(&self, node: &NodeName) -> Result<(), TlsError> {
        self.check_name(node)?;
        if self
            .certificate
            .iter()
            .any(|one| self.revoked.contains(one))
        {
            return Err(TlsError::Revoked { node: node.clone() });
        }
        self.server().map(drop)?;
        self.client().map(drop)
    }

    /// How certificates name nodes.
    pub(super) fn naming(&self) -> NodeNaming {
        self.naming.clone()
    }

    /// What peers may not show.
    pub(super) fn revoked(&self) -> Arc<Revoked> {
        self.revoked.clone()
    }

    pub(super) fn server(&self) -> Result<QuicServerConfig, TlsError> {
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()?), provider())
                .build()
                .map_err(unusable)?;
        let verifier: Arc<Naming<dyn ClientCertVerifier>> = Arc::new(Naming {
            authorities: Authorities::of(&self.ca),
            revoked: self.revoked.clone(),
            inner: verifier,
        });
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.certificate.clone(), self.key.clone_key())
            .map_err(unusable)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        QuicServerConfig::try_from(config).map_err(unusable)
    }

    pub(super) fn client(&self) -> Result<QuicClientConfig, TlsError> {
        let roots = Arc::new(self.roots()?);
        let inner: Arc<dyn ServerCertVerifier> = match self.naming {
            NodeNaming::Dns => WebPkiServerVerifier::builder_with_provider(roots, provider())
                .build()
                .map_err(unusable)?,
            NodeNaming::Spiffe(_) => {
                Arc::new(OfAuthority::new(roots, provider()).map_err(unusable)?)
            }
        };
        let verifier: Arc<Naming<dyn ServerCertVerifier>> = Arc::new(Naming {
            authorities: Authorities::of(&self.ca),
            revoked: self.revoked.clone(),
            inner,
        });
        let mut config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unusable)?
            // The library's own check, with other words.
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(self.certificate.clone(), self.key.clone_key())
            .map_err(unusable)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        QuicClientConfig::try_from(config).map_err(unusable)
    }

    fn roots(&self) -> Result<rustls::RootCertStore, TlsError> {
        let mut roots = rustls::RootCertStore::empty();
        for certificate in &self.ca {
            roots.add(certificate.clone()).map_err(unusable)?;
        }
        Ok(roots)
    }
}

/// What others may do with a file: read and write it.
const OTHERS: u32 = 0o006;

/// Reads a private key. Its mode is that of the file that is read, so that no other one can be put in between.
fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let failed = |reason: String| TlsError::File {
        what: "a private key",
        path: path.into(),
        reason,
    };
    let of_system = |error: io::Error| failed(error.to_string());
    let mut file = File::open(path).map_err(of_system)?;
    let mode = file.metadata().map_err(of_system)?.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(TlsError::KeyExposed {
            path: path.into(),
            mode,
        });
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(of_system)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| failed(error.to_string()))
}

fn read_certificates(
    what: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |reason: String| TlsError::File {
        what,
        path: path.into(),
        reason,
    };
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .map_err(|error| failed(error.to_string()))?
        .collect();
    let found = found.map_err(|error| failed(error.to_string()))?;
    if found.is_empty() {
        Err(failed("no certificate in it".into()))
    } else {
        Ok(found)
    }
}

/// The certificates that the other end of a connection has shown, its own first.
pub(super) fn shown(connection: &quinn::Connection) -> Option<Vec<CertificateDer<'static>>> {
    let identity = connection.peer_identity()?;
    identity.downcast().ok().map(|chain| *chain)
}
