//! A throw-away certificate authority for one cluster, and certificates for its nodes (`storaged cert`).

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use storaged_wire::NodeName;
use thiserror::Error;
use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;

use super::node_naming::dns_name;

/// Why no certificate came to be.
#[derive(Debug, Error)]
pub enum CertError {
    /// A file.
    #[error("writing or reading {path} failed")]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// There is something already; nothing is overwritten.
    #[error(
        "{0} exists already: `storaged cert renew` puts a new one in its place; or name another directory"
    )]
    Exists(PathBuf),
    /// There is no authority in the directory.
    #[error(
        "expected an authority's ca.pem and ca.key in {directory}, got no {missing}: make one with `storaged cert ca {directory}`, or name the directory where it is"
    )]
    NoAuthority {
        directory: PathBuf,
        missing: &'static str,
    },
    /// There is nothing to renew.
    #[error("{0} does not exist: `storaged cert issue` makes the first one")]
    NotIssued(PathBuf),
    /// What should be a certificate or a list of revoked ones is none.
    #[error("expected {what} at {path}, got something else: {reason}")]
    Content {
        what: &'static str,
        path: PathBuf,
        reason: String,
    },
    /// The certificate library.
    #[error("making the certificate failed")]
    Rcgen(#[from] rcgen::Error),
}

/// File names in a certificate directory.
pub const CA_CERTIFICATE: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
/// The certificates that the authority has revoked.
pub const REVOKED: &str = "crl.pem";
/// The list is renewed by the next revocation, not by time.
const REVOKED_VALID: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Makes `ca.pem` and `ca.key` in `directory`.
///
/// # Errors
/// [`CertError::Exists`] rather than overwriting an authority.
pub fn create_ca(directory: &Path, valid: Duration) -> Result<PathBuf, CertError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
        .distinguished_name
        .push(DnType::CommonName, "storaged cluster authority");
    set_validity(&mut params, valid);
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    std::fs::create_dir_all(directory).map_err(|source| file(directory, source))?;
    let path = directory.join(CA_CERTIFICATE);
    write_new(&directory.join(CA_KEY), &key.serialize_pem(), 0o600)?;
    write_new(&path, &certificate.pem(), 0o644)?;
    Ok(path)
}

/// Makes `NODE.pem` and `NODE.key` in `directory`, signed by the authority there. A zero validity makes one that
/// has already expired, for tests.
///
/// # Errors
/// [`CertError`] if there is no authority, or the node has a certificate already.
pub fn issue(directory: &Path, node: &NodeName, valid: Duration) -> Result<PathBuf, CertError> {
    let (certificate, key) = sign(directory, node, valid)?;
    let (path, key_path) = paths(directory, node);
    write_new(&key_path, &key, 0o600)?;
    write_new(&path, &certificate, 0o644)?;
    Ok(path)
}

/// The same in place of the ones that the node has: a daemon that reads the files meanwhile gets old or new ones, whole.
///
/// # Errors
/// [`CertError`] if there is no authority, or the node has no certificate yet.
pub fn renew(directory: &Path, node: &NodeName, valid: Duration) -> Result<PathBuf, CertError> {
    let (path, key_path) = paths(directory, node);
    if !path.exists() {
        return Err(CertError::NotIssued(path));
    }
    let (certificate, key) = sign(directory, node, valid)?;
    for (path, text, mode) in [(&key_path, key, 0o600), (&path, certificate, 0o644)] {
        replace(path, &text, mode)?;
    }
    Ok(path)
}

/// Puts a file in place of another one, whole.
fn replace(path: &Path, text: &str, mode: u32) -> Result<(), CertError> {
    let fresh = path.with_added_extension("new");
    // Of one that was broken off.
    let _ = std::fs::remove_file(&fresh);
    write_new(&fresh, text, mode)?;
    std::fs::rename(&fresh, path).map_err(|source| file(path, source))
}

/// Adds a certificate to the list of revoked ones in `directory`, `crl.pem`: `DIR/NODE.pem`, or the one at `certificate`.
/// One that is there already stays as it is.
///
/// # Errors
/// [`CertError`] if there is no authority, no such certificate, or a list that cannot be read.
pub fn revoke(
    directory: &Path,
    node: &NodeName,
    certificate: Option<&Path>,
) -> Result<PathBuf, CertError> {
    let (own, _) = paths(directory, node);
    let serial = serial_of(certificate.unwrap_or(&own))?;
    let issuer = authority(directory)?;
    let path = directory.join(REVOKED);
    let (number, mut revoked) = revoked_before(&path)?;
    if revoked.iter().any(|one| one.serial_number == serial) {
        return Ok(path);
    }
    let now = OffsetDateTime::now_utc();
    revoked.push(RevokedCertParams {
        serial_number: serial,
        revocation_time: now,
        reason_code: None,
        invalidity_date: None,
    });
    let list = CertificateRevocationListParams {
        this_update: now,
        next_update: now + REVOKED_VALID,
        crl_number: SerialNumber::from(number + 1),
        issuing_distribution_point: None,
        revoked_certs: revoked,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    replace(&path, &list.signed_by(&issuer)?.pem()?, 0o644)?;
    Ok(path)
}

/// A certificate's number.
fn serial_of(path: &Path) -> Result<SerialNumber, CertError> {
    let wrong = |reason: String| content("a certificate in PEM", path, reason);
    let bytes = std::fs::read(path).map_err(|source| file(path, source))?;
    let der = CertificateDer::from_pem_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|error| wrong(error.to_string()))?;
    Ok(SerialNumber::from_slice(parsed.raw_serial()))
}

/// The number of the list that there is, and what is in it; 0 and nothing if there is none.
fn revoked_before(path: &Path) -> Result<(u64, Vec<RevokedCertParams>), CertError> {
    let wrong = |reason: String| content("a list of revoked certificates in PEM", path, reason);
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, Vec::new())),
        Err(source) => return Err(file(path, source)),
    };
    let der = CertificateRevocationListDer::from_pem_slice(&bytes)
        .map_err(|error| wrong(error.to_string()))?;
    let (_, list) =
        CertificateRevocationList::from_der(&der).map_err(|error| wrong(error.to_string()))?;
    let number = list.crl_number().and_then(|number| {
        let digits = number.to_u64_digits();
        digits.first().copied()
    });
    let revoked = list
        .iter_revoked_certificates()
        .map(|one| RevokedCertParams {
            serial_number: SerialNumber::from_slice(one.raw_serial()),
            revocation_time: one.revocation_date.to_datetime(),
            reason_code: None,
            invalidity_date: None,
        });
    Ok((number.unwrap_or(0), revoked.collect()))
}

fn content(what: &'static str, path: &Path, reason: String) -> CertError {
    let path = path.into();
    CertError::Content { what, path, reason }
}

fn paths(directory: &Path, node: &NodeName) -> (PathBuf, PathBuf) {
    let path = |kind: &str| directory.join(format!("{node}.{kind}"));
    (path("pem"), path("key"))
}

/// The authority in a directory.
fn authority(directory: &Path) -> Result<Issuer<'static, KeyPair>, CertError> {
    let read = |name: &'static str| {
        let path = directory.join(name);
        std::fs::read_to_string(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => CertError::NoAuthority {
                directory: directory.into(),
                missing: name,
            },
            _ => file(&path, source),
        })
    };
    let ca_key = KeyPair::from_pem(&read(CA_KEY)?)?;
    Ok(Issuer::from_ca_cert_pem(&read(CA_CERTIFICATE)?, ca_key)?)
}

/// A certificate and its key, in PEM.
fn sign(directory: &Path, node: &NodeName, valid: Duration) -> Result<(String, String), CertError> {
    let issuer = authority(directory)?;
    let mut params = CertificateParams::new(vec![dns_name(node)])?;
    params
        .distinguished_name
        .push(DnType::CommonName, node.as_str());
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    // By its authority's key whoever refuses it says which one it is of.
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, valid);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// From an hour ago, so that clocks may differ a little.
fn set_validity(params: &mut CertificateParams, valid: Duration) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::from_secs(3600);
    params.not_after = now + valid - Duration::from_secs(u64::from(valid.is_zero()));
}

fn file(path: &Path, source: io::Error) -> CertError {
    CertError::File {
        path: path.into(),
        source,
    }
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), CertError> {
    let opened = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    let mut opened = opened.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => CertError::Exists(path.into()),
        _ => file(path, source),
    })?;
    opened
        .write_all(text.as_bytes())
        .map_err(|source| file(path, source))
}
