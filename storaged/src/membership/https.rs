//! How registries that speak HTTP are asked: connections with the certificates that are in their files now, and an answer of bounded length.

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
use thiserror::Error;

/// Whoever is asked answers within this time.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// An answer is never longer: a roster of 20,000 places, in base64.
const ANSWER_BYTES_MAX: usize = 32 << 20;

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
    /// What the files had in them.
    read: Vec<Vec<u8>>,
}

impl RegistryTls {
    fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        let all = [&self.ca, &self.certificate, &self.key];
        all.into_iter().flatten()
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
        let key = PrivateKeyDer::from_pem_file(key_file)
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
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|error| RegistryFileError::of(path, error))
        };
        let current = Connecting {
            read: files.paths().map(read).collect::<Result<_, _>>()?,
            client: files.client()?,
        };
        let current = tokio::sync::Mutex::new(current);
        Ok(Self { files, current })
    }

    /// What to dial with. Certificates expire, and a node that follows the registry for months is given new ones in the files of the old.
    async fn client(&self) -> HttpClient {
        let mut read = Vec::new();
        for path in self.files.paths() {
            read.push(tokio::fs::read(path).await);
        }
        let mut current = self.current.lock().await;
        // One that cannot be read is being replaced at this moment: the next request finds it.
        let read: Result<Vec<Vec<u8>>, _> = read.into_iter().collect();
        if let Ok(read) = read
            && read != current.read
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
            current.read = read;
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
