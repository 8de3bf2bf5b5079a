//! How registries that speak HTTP are asked: connections with the certificates that are in their files now, and an answer of bounded length.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Request, Response};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use storaged_sdk::read_secret;
use thiserror::Error;

/// Whoever is asked answers within this time.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// An answer is never longer: a roster of 20,000 places, in base64.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// A key or a password is no longer.
const SECRET_BYTES_MAX: u64 = 64 << 10;

type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A file of a registry, which `membership.registry` names or a pod has.
#[derive(Debug, Error)]
#[error("{path} cannot be used: {reason}")]
pub struct RegistryFileError {
    path: PathBuf,
    reason: String,
}

impl RegistryFileError {
    pub(super) fn of(path: &Path, error: impl std::fmt::Display) -> Self {
        Self {
            path: path.into(),
            reason: error.to_string(),
        }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// Nobody is there.
    Away(String),
    /// It is longer than any that is right.
    TooLong,
}

impl NoAnswer {
    /// An answer that cannot be read, in words.
    pub(super) fn too_long_from(server: &str) -> String {
        format!("one of more than {ANSWER_BYTES_MAX} bytes from {server}")
    }
}

/// Who is believed, and who this side is.
#[derive(Debug, Clone)]
pub(super) struct RegistryTls {
    /// The authority.
    pub ca: Option<PathBuf>,
    /// This node's certificate.
    pub certificate: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
}

/// What connections are made with.
#[derive(Debug)]
pub(super) struct Dialler {
    files: RegistryTls,
    current: tokio::sync::Mutex<Connecting>,
}

#[derive(Debug)]
struct Connecting {
    client: HttpClient,
    /// The files that it was made of, or that it could not be made of.
    seen: Vec<SeenFile>,
}

/// What tells a file from another one at its place. A key that only its owner can read now is another one too.
#[derive(Debug, PartialEq, Eq)]
struct SeenFile {
    mode: u32,
    text: Vec<u8>,
}

impl SeenFile {
    fn read(path: &Path) -> Result<Self, RegistryFileError> {
        let failed = |error: io::Error| RegistryFileError::of(path, error);
        let mut file = File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode();
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed)?;
        Ok(Self { mode, text })
    }
}

impl RegistryTls {
    fn see(&self) -> Result<Vec<SeenFile>, RegistryFileError> {
        let all = [&self.ca, &self.certificate, &self.key];
        let paths = all.into_iter().flatten();
        paths.map(|path| SeenFile::read(path)).collect()
    }

    fn client(&self) -> Result<HttpClient, RegistryFileError> {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(ANSWER_WITHIN));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(self.tls()?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        Ok(Client::builder(TokioExecutor::new()).build(connector))
    }

    fn tls(&self) -> Result<ClientConfig, RegistryFileError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for (path, certificate) in certificates(self.ca.as_ref())? {
            let unusable = |error: rustls::Error| RegistryFileError::of(&path, error);
            roots.add(certificate).map_err(unusable)?;
        }
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| RegistryFileError::of(Path::new("TLS"), error))?;
        let config = config.with_root_certificates(roots);
        let Some(key_file) = &self.key else {
            return Ok(config.with_no_client_auth());
        };
        let key = PrivateKeyDer::from_pem_slice(&secret_in(key_file)?)
            .map_err(|error| RegistryFileError::of(key_file, error))?;
        let own = certificates(self.certificate.as_ref())?;
        let own = own
            .into_iter()
            .map(|(_, certificate)| certificate)
            .collect();
        config
            .with_client_auth_cert(own, key)
            .map_err(|error| RegistryFileError::of(key_file, error))
    }
}

/// What is in a file that other users cannot read.
fn secret_in(path: &Path) -> Result<Vec<u8>, RegistryFileError> {
    let text = read_secret(path, SECRET_BYTES_MAX);
    text.map_err(|error| RegistryFileError::of(path, crate::driver::chain(&error)))
}

/// Reads a password, as it is now.
pub(super) async fn password_in(path: &Path) -> Result<String, RegistryFileError> {
    let file = path.to_owned();
    let read = tokio::task::spawn_blocking(move || {
        let text = secret_in(&file)?;
        String::from_utf8(text).map_err(|error| RegistryFileError::of(&file, error))
    });
    let read = read.await;
    read.unwrap_or_else(|error| Err(RegistryFileError::of(path, error)))
}

fn certificates(
    file: Option<&PathBuf>,
) -> Result<Vec<(PathBuf, CertificateDer<'static>)>, RegistryFileError> {
    let Some(path) = file else {
        return Ok(Vec::new());
    };
    let found =
        CertificateDer::pem_file_iter(path).map_err(|error| RegistryFileError::of(path, error))?;
    found
        .map(|it| {
            it.map(|it| (path.clone(), it))
                .map_err(|error| RegistryFileError::of(path, error))
        })
        .collect()
}

impl Dialler {
    /// Reads the files. Nobody is asked yet.
    pub fn open(files: RegistryTls) -> Result<Self, RegistryFileError> {
        let current = Connecting {
            seen: files.see()?,
            client: files.client()?,
        };
        let current = tokio::sync::Mutex::new(current);
        Ok(Self { files, current })
    }

    /// What to dial with. Certificates expire, and a node that follows the registry for months is given new ones in the files of the old.
    async fn client(&self) -> HttpClient {
        let files = self.files.clone();
        let seen = tokio::task::spawn_blocking(move || files.see()).await;
        let mut current = self.current.lock().await;
        // One that cannot be read is being replaced at this moment: the next request finds it.
        if let Ok(Ok(seen)) = seen
            && seen != current.seen
        {
            match self.files.client() {
                Ok(client) => {
                    tracing::info!("the certificates of membership.registry were read again");
                    current.client = client;
                }
                Err(error) => {
                    let error = crate::driver::chain(&error);
                    tracing::warn!(error, "the old certificates of membership.registry stay");
                }
            }
            current.seen = seen;
        }
        current.client.clone()
    }

    /// The answer to a request that may be sent twice: the connection that it goes out on may be one of a server that was started again since.
    pub async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Bytes>, NoAnswer> {
        let client = self.client().await;
        let mut answer = client.request(request.clone()).await;
        if answer.as_ref().is_err_and(|error| !error.is_connect()) {
            answer = client.request(request).await;
        }
        let answer = answer.map_err(|error| NoAnswer::Away(crate::driver::chain(&error)))?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect();
        let body = body.await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                NoAnswer::TooLong
            } else {
                NoAnswer::Away(error.to_string())
            }
        })?;
        Ok(Response::from_parts(head, body.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    fn set(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    /// A node's certificate for the registry, and its key.
    fn own(folder: &Path) -> RegistryTls {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["node".to_owned()]).unwrap();
        let files = [folder.join("node.pem"), folder.join("node.key")];
        let certificate = params.self_signed(&key).unwrap().pem();
        for (path, text) in files.iter().zip([certificate, key.serialize_pem()]) {
            std::fs::write(path, text).unwrap();
        }
        let [certificate, key] = files;
        RegistryTls {
            ca: None,
            certificate: Some(certificate),
            key: Some(key),
        }
    }

    #[tokio::test]
    async fn a_key_for_the_registry_that_others_can_read_is_refused_until_its_mode_is_right() {
        let folder = tempfile::tempdir().unwrap();
        let files = own(folder.path());
        let key = files.key.clone().unwrap();
        for exposed in [0o644, 0o604, 0o602] {
            set(&key, exposed);
            let refused = Dialler::open(files.clone()).unwrap_err().to_string();
            let mode = format!("{exposed:04o}");
            assert!(refused.contains("node.key"), "{refused}");
            assert!(refused.contains(&mode), "{refused}");
        }
        // 0440: a Secret of Kubernetes that its pod's group may read.
        for allowed in [0o600, 0o400, 0o640, 0o440] {
            set(&key, allowed);
            Dialler::open(files.clone()).unwrap();
        }
    }

    #[tokio::test]
    async fn a_key_whose_mode_was_mended_is_looked_at_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = own(folder.path());
        let key = files.key.clone().unwrap();
        set(&key, 0o644);
        let exposed = files.see().unwrap();
        set(&key, 0o600);
        assert_ne!(files.see().unwrap(), exposed);
    }

    #[tokio::test]
    async fn a_password_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        std::fs::write(&path, "r\n").unwrap();
        set(&path, 0o644);
        let refused = password_in(&path).await.unwrap_err().to_string();
        assert!(refused.contains("0644"), "{refused}");
        set(&path, 0o600);
        assert_eq!(password_in(&path).await.unwrap(), "r\n");
    }
}
