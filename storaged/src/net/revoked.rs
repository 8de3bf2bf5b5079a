//! Certificates that an authority has revoked: the lists that it has signed, in a file (`tls.crl`).
//!
//! A list counts only with the signature of an authority in `tls.ca`, which is checked when it is read and not at each
//! connection: nodes of two authorities with one name, while one takes the place of the other, need a list of one of them only.
//! A list whose next update is overdue still counts: a list that nobody renewed must not cut a cluster.

use std::collections::BTreeSet;
use std::path::Path;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;

use super::TlsError;

/// A certificate, as its authority counts: by the authority's name and a number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Serial {
    issuer: Vec<u8>,
    number: Vec<u8>,
}

/// What is revoked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revoked(BTreeSet<Serial>);

impl Revoked {
    /// Reads the lists in a file, PEM or DER; `authorities` are those of `tls.ca`.
    ///
    /// # Errors
    /// [`TlsError::File`] if there is none in it, [`TlsError::ForeignList`] if one is not signed by an authority.
    pub(super) fn read(
        path: &Path,
        authorities: &[CertificateDer<'_>],
        provider: &CryptoProvider,
    ) -> Result<Self, TlsError> {
        let mut revoked = BTreeSet::new();
        for list in lists(path)? {
            let (rest, list) = CertificateRevocationList::from_der(&list)
                .map_err(|error| failed(path, error.to_string()))?;
            if !rest.is_empty() {
                return Err(failed(path, "there is more than a list in it".into()));
            }
            let is_signed = authorities
                .iter()
                .any(|authority| is_signed_by(&list, authority, provider));
            if !is_signed {
                return Err(TlsError::ForeignList {
                    path: path.into(),
                    issuer: list.issuer().to_string(),
                });
            }
            let issuer = list.issuer().as_raw();
            revoked.extend(list.iter_revoked_certificates().map(|one| Serial {
                issuer: issuer.into(),
                number: one.raw_serial().into(),
            }));
        }
        Ok(Self(revoked))
    }

    /// Whether a certificate is among them. One that cannot be read is none that was let in.
    pub(super) fn contains(&self, certificate: &CertificateDer<'_>) -> bool {
        let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
            return false;
        };
        self.0.contains(&Serial {
            issuer: parsed.issuer().as_raw().into(),
            number: parsed.raw_serial().into(),
        })
    }
}

fn failed(path: &Path, reason: String) -> TlsError {
    TlsError::File {
        what: "a list of revoked certificates",
        path: path.into(),
        reason,
    }
}

/// The lists of a file: several of a PEM file, or one in DER.
fn lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let bytes = std::fs::read(path).map_err(|error| failed(path, error.to_string()))?;
    if !bytes.trim_ascii_start().starts_with(b"-----BEGIN") {
        return Ok(vec![bytes.into()]);
    }
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| failed(path, error.to_string()))?;
    if found.is_empty() {
        Err(failed(path, "no list in it".into()))
    } else {
        Ok(found)
    }
}

/// Whether an authority has signed a list, by any algorithm that TLS accepts of its key.
fn is_signed_by(
    list: &CertificateRevocationList<'_>,
    authority: &CertificateDer<'_>,
    provider: &CryptoProvider,
) -> bool {
    let Ok((_, authority)) = X509Certificate::from_der(authority) else {
        return false;
    };
    if authority.subject().as_raw() != list.issuer().as_raw() {
        return false;
    }
    let key = &authority.public_key().subject_public_key.data;
    let (message, signature) = (list.tbs_cert_list.as_ref(), &list.signature_value.data);
    let algorithms = provider.signature_verification_algorithms.all;
    algorithms
        .iter()
        .any(|algorithm| algorithm.verify_signature(key, message, signature).is_ok())
}
