//! Whose authority has signed a peer's certificate. The library says "bad signature" or "unknown issuer", and all
//! authorities that `storaged cert ca` makes have one name; so a refusal names both authorities by their keys.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    VerifierBuilderError, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor,
};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use thiserror::Error as ThisError;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{KeyIdentifier, ParsedExtension};
use x509_parser::prelude::FromDer;

use super::revoked::Revoked;

/// An authority by its name and the identifier of its key, as `openssl x509 -ext subjectKeyIdentifier` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Authority {
    name: String,
    key: Option<String>,
}

/// The authorities whose certificates are let in.
#[derive(Debug, Clone)]
pub(super) struct Authorities(Vec<Authority>);

/// A certificate of another authority.
#[derive(ThisError)]
#[error(
    "expected one of the authority {expected}, which tls.ca has there, got one of the authority {found}"
)]
struct OtherAuthority {
    expected: Authorities,
    found: Authority,
}

/// The library shows a cause that is not its own by this.
impl fmt::Debug for OtherAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            Some(key) => write!(f, "{} with key {key}", self.name),
            None => write!(f, "{} whose key is not named in it", self.name),
        }
    }
}

impl fmt::Display for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&names.join(" or "))
    }
}

fn hex(key: &KeyIdentifier<'_>) -> String {
    let bytes: Vec<String> = key.0.iter().map(|byte| format!("{byte:02X}")).collect();
    bytes.join(":")
}

impl Authority {
    /// An authority's own certificate.
    fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let key = parsed
            .extensions()
            .iter()
            .find_map(|one| match one.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(key) => Some(hex(key)),
                _ => None,
            });
        let name = parsed.subject().to_string();
        Some(Self { name, key })
    }

    /// Who has signed a certificate, as it says.
    fn behind(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let key = parsed
            .extensions()
            .iter()
            .find_map(|one| match one.parsed_extension() {
                ParsedExtension::AuthorityKeyIdentifier(found) => {
                    found.key_identifier.as_ref().map(hex)
                }
                _ => None,
            });
        let name = parsed.issuer().to_string();
        Some(Self { name, key })
    }
}

impl Authorities {
    /// Those of `tls.ca`.
    pub fn of(certificates: &[CertificateDer<'_>]) -> Self {
        Self(certificates.iter().filter_map(Authority::of).collect())
    }

    /// What a refusal says: where another authority is why, both by name and key.
    fn explain(&self, certificate: &CertificateDer<'_>, error: Error) -> Error {
        let Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) = error
        else {
            return error;
        };
        match Authority::behind(certificate) {
            // It says that it is of this authority, and is not: damaged or forged.
            Some(found) if found.key.is_some() && self.0.contains(&found) => error,
            Some(found) => {
                let expected = self.clone();
                let other = OtherAuthority { expected, found };
                CertificateError::Other(OtherError(Arc::new(other))).into()
            }
            None => error,
        }
    }
}

/// The library's check of certificates, with refusals that name authorities, and without what is revoked.
#[derive(Debug)]
pub(super) struct Naming<V: ?Sized> {
    pub authorities: Authorities,
    pub revoked: Arc<Revoked>,
    pub inner: Arc<V>,
}

impl<V: ?Sized> Naming<V> {
    /// Refuses what its authority has revoked.
    fn refuse_revoked(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), Error> {
        let mut shown = std::iter::once(end_entity).chain(intermediates);
        if shown.any(|one| self.revoked.contains(one)) {
            return Err(CertificateError::Revoked.into());
        }
        Ok(())
    }
}

/// Takes a server's certificate that an authority has signed, whatever it names: whoever dials looks at that before it says
/// anything (`hello::check_identity`), because the library knows no names but those of DNS and addresses.
#[derive(Debug)]
pub(super) struct OfAuthority {
    roots: Arc<RootCertStore>,
    inner: Arc<WebPkiServerVerifier>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl OfAuthority {
    pub fn new(
        roots: Arc<RootCertStore>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let algorithms = provider.signature_verification_algorithms;
        let inner = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider).build()?;
        Ok(Self {
            roots,
            inner,
            algorithms,
        })
    }
}

impl ServerCertVerifier for OfAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &self.roots,
            intermediates,
            now,
            self.algorithms.all,
        )?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

impl ServerCertVerifier for Naming<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let inner = &self.inner;
        inner
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            .map_err(|error| self.authorities.explain(end_entity, error))
            .and_then(|verified| {
                self.refuse_revoked(end_entity, intermediates)
                    .map(|()| verified)
            })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

impl ClientCertVerifier for Naming<dyn ClientCertVerifier> {
    fn offer_client_auth(&self) -> bool {
        self.inner.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let inner = &self.inner;
        inner
            .verify_client_cert(end_entity, intermediates, now)
            .map_err(|error| self.authorities.explain(end_entity, error))
            .and_then(|verified| {
                self.refuse_revoked(end_entity, intermediates)
                    .map(|()| verified)
            })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
