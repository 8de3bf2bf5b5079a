//! The API server of Kubernetes, asked as a pod asks it: by the address that is in its environment, with the token of its service account,
//! which the kubelet replaces within the hour and which is therefore read for each request.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, Uri};
use serde_json::Value;
use thiserror::Error;

use crate::membership::https::{ANSWER_WITHIN, Dialler, NoAnswer, RegistryFileError, RegistryTls};

/// Where a pod finds what its service account needs.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Where it finds the API server.
const HOST_VARIABLE: &str = "KUBERNETES_SERVICE_HOST";
const PORT_VARIABLE: &str = "KUBERNETES_SERVICE_PORT";
/// A server that is busy and does not say for how long is asked again after this time.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(200);
/// Of a text that is no answer of its own so much is shown.
const SHOWN_BYTES: usize = 200;
/// Answers to the names of objects instead of the objects.
const METADATA: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

/// Why Kubernetes cannot be used.
#[derive(Debug, Error)]
pub enum KubernetesError {
    /// In the configuration.
    #[error("expected {expected}, got {got}")]
    Config { expected: &'static str, got: String },
    /// A file that it names.
    #[error(transparent)]
    File(#[from] RegistryFileError),
    /// Nobody answers.
    #[error("the API server {server} does not answer: {reason}")]
    Away { server: String, reason: String },
    /// It says that it cannot, for now.
    #[error(
        "the API server {server} takes no request now (HTTP status {status}): {message}; it is asked again"
    )]
    Busy {
        server: String,
        status: u16,
        message: String,
    },
    /// It says no.
    #[error(transparent)]
    Refused(Box<Refusal>),
    /// An answer that is none of an API server's.
    #[error("expected an answer of an API server's, got {got}")]
    Answer { got: String },
}

impl Refusal {
    /// Whether somebody else was faster: an object of this kind is there, or is another version by now. In the same status, and the
    /// same words, an API server tells of what is in its own way.
    pub fn is_outrun(&self, kind: &str) -> bool {
        let reasons = ["AlreadyExists", "Conflict"];
        self.status == 409 && self.kind == kind && reasons.contains(&self.reason.as_str())
    }
}

/// What an API server does not do, and why.
#[derive(Debug, Error)]
#[error("Kubernetes refuses to {action} (HTTP status {status}): {message}{remedy}")]
pub struct Refusal {
    action: String,
    /// Of HTTP.
    pub status: u16,
    /// What is lacking or in the way.
    pub kind: String,
    /// The API server's word for why.
    pub reason: String,
    message: String,
    remedy: &'static str,
}

/// Where the API server is and who asks it; what is not said is as a pod has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ApiAccess {
    /// As `https://10.0.0.1:6443`.
    pub server: Option<String>,
    /// The authority of its certificate.
    pub ca: Option<PathBuf>,
    /// The token.
    pub token_file: Option<PathBuf>,
}

/// A request.
#[derive(Debug, Clone)]
pub(super) struct ApiRequest {
    method: Method,
    path: String,
    body: Option<Value>,
    accept: &'static str,
    /// In words, for whoever reads why it was refused.
    action: String,
}

/// How a request went.
enum Failed {
    /// It may go better soon.
    For {
        error: KubernetesError,
        now: Duration,
    },
    Finally(KubernetesError),
}

impl From<KubernetesError> for Failed {
    fn from(error: KubernetesError) -> Self {
        Self::Finally(error)
    }
}

impl ApiRequest {
    pub fn get(path: impl Into<String>, action: impl Into<String>) -> Self {
        Self {
            method: Method::GET,
            path: path.into(),
            body: None,
            accept: "application/json",
            action: action.into(),
        }
    }

    /// The names of what is there.
    pub fn names(path: impl Into<String>, action: impl Into<String>) -> Self {
        Self {
            accept: METADATA,
            ..Self::get(path, action)
        }
    }

    pub fn create(path: impl Into<String>, body: Value, action: impl Into<String>) -> Self {
        Self {
            method: Method::POST,
            body: Some(body),
            ..Self::get(path, action)
        }
    }

    /// Of the version that the body names.
    pub fn replace(path: impl Into<String>, body: Value, action: impl Into<String>) -> Self {
        Self {
            method: Method::PUT,
            body: Some(body),
            ..Self::get(path, action)
        }
    }
}

/// What whoever runs the cluster can do about a refusal.
fn remedy(status: u16, kind: &str) -> &'static str {
    match (status, kind) {
        (401, _) => {
            ": the token is not this cluster's, or its service account is gone; token_file in membership.registry names another one"
        }
        (403, _) => {
            ": the service account needs the rules of deploy/kubernetes (registry.yaml, daemonset.yaml), and a quota must leave room"
        }
        (404, "namespaces") => ": create the namespace, or name another one in membership.registry",
        _ => "",
    }
}

impl ApiAccess {
    /// Whether this can be an API server.
    ///
    /// # Errors
    /// [`KubernetesError::Config`].
    pub fn check(&self) -> Result<(), KubernetesError> {
        match &self.server {
            Some(server) => check_server(server),
            None => Ok(()),
        }
    }

    fn server(&self) -> Result<String, KubernetesError> {
        if let Some(server) = &self.server {
            return Ok(server.trim_end_matches('/').into());
        }
        let lacking = |_| KubernetesError::Config {
            expected: "a server, or a pod's environment (KUBERNETES_SERVICE_HOST and _PORT)",
            got: "neither".into(),
        };
        let host = std::env::var(HOST_VARIABLE).map_err(lacking)?;
        let port = std::env::var(PORT_VARIABLE).map_err(lacking)?;
        let server = match host.parse::<std::net::Ipv6Addr>() {
            Ok(address) => format!("https://[{address}]:{port}"),
            Err(_) => format!("https://{host}:{port}"),
        };
        check_server(&server).map(|()| server)
    }
}

/// A token goes to nobody whose certificate was not checked. `kubectl proxy` needs none.
fn check_server(server: &str) -> Result<(), KubernetesError> {
    let uri = server.parse::<Uri>().ok();
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    let is_local = || matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    let is_bare = |uri: &Uri| matches!(uri.path(), "" | "/") && uri.query().is_none();
    match uri.as_ref().filter(|uri| is_bare(uri)) {
        Some(uri) if uri.scheme_str() == Some("https") => Ok(()),
        Some(uri) if uri.scheme_str() == Some("http") && is_local() => Ok(()),
        _ => Err(KubernetesError::Config {
            expected: "as server one such as https://10.0.0.1:6443, or http://127.0.0.1:8001 of `kubectl proxy`",
            got: server.into(),
        }),
    }
}

/// An API server, and how it is asked.
#[derive(Debug)]
pub struct ApiServer {
    server: String,
    /// None for `kubectl proxy`, which has a user of its own.
    token_file: Option<PathBuf>,
    dialler: Dialler,
}

impl ApiServer {
    /// Nobody is asked yet.
    ///
    /// # Errors
    /// [`KubernetesError`] if it is not known where it is, or a file cannot be read.
    pub fn open(access: &ApiAccess) -> Result<Self, KubernetesError> {
        access.check()?;
        let server = access.server()?;
        let is_tls = server.starts_with("https:");
        let file = |given: &Option<PathBuf>, name: &str| {
            let own = || Path::new(ACCOUNT).join(name);
            is_tls.then(|| given.clone().unwrap_or_else(own))
        };
        let dialler = Dialler::open(RegistryTls {
            ca: file(&access.ca, "ca.crt"),
            certificate: None,
            key: None,
        })?;
        Ok(Self {
            server,
            token_file: file(&access.token_file, "token"),
            dialler,
        })
    }

    /// Asks, and again while it is busy, for 3 s in all. What is asked may be done twice.
    pub(super) async fn ask(&self, asked: &ApiRequest) -> Result<Value, KubernetesError> {
        let mut last = None;
        let answered = tokio::time::timeout(ANSWER_WITHIN, self.ask_on(asked, &mut last)).await;
        answered.unwrap_or_else(|_| {
            let reason = format!("no answer within {ANSWER_WITHIN:?}");
            Err(last.unwrap_or_else(|| self.away(reason)))
        })
    }

    async fn ask_on(
        &self,
        asked: &ApiRequest,
        last: &mut Option<KubernetesError>,
    ) -> Result<Value, KubernetesError> {
        loop {
            match self.ask_once(asked).await {
                Ok(answer) => return Ok(answer),
                Err(Failed::For { error, now }) if now < ANSWER_WITHIN => {
                    *last = Some(error);
                    tokio::time::sleep(now).await;
                }
                Err(Failed::Finally(error) | Failed::For { error, .. }) => return Err(error),
            }
        }
    }

    async fn ask_once(&self, asked: &ApiRequest) -> Result<Value, Failed> {
        let mut request = Request::builder()
            .method(&asked.method)
            .uri(format!("{}{}", self.server, asked.path))
            .header(ACCEPT, asked.accept)
            .header(CONTENT_TYPE, "application/json");
        if let Some(token) = self.token().await? {
            request = request.header(AUTHORIZATION, token);
        }
        let body = asked.body.as_ref().map(Value::to_string);
        let request = request.body(Full::from(Bytes::from(body.unwrap_or_default())));
        let request = request.map_err(|error| self.away(error.to_string()))?;
        let answer = self.dialler.exchange(request).await;
        let answer = answer.map_err(|none| match none {
            NoAnswer::Away(reason) => self.away(reason),
            NoAnswer::TooLong => KubernetesError::Answer {
                got: NoAnswer::too_long_from(&self.server),
            },
        })?;
        read_answer(&self.server, asked, &answer)
    }

    async fn token(&self) -> Result<Option<HeaderValue>, KubernetesError> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        let token = tokio::fs::read_to_string(path).await;
        let token = token.map_err(|error| RegistryFileError::of(path, error))?;
        let bearer = HeaderValue::try_from(format!("Bearer {}", token.trim()));
        let mut bearer = bearer.map_err(|error| RegistryFileError::of(path, error))?;
        bearer.set_sensitive(true);
        Ok(Some(bearer))
    }

    fn away(&self, reason: String) -> KubernetesError {
        KubernetesError::Away {
            server: self.server.clone(),
            reason,
        }
    }
}

fn read_answer(
    server: &str,
    asked: &ApiRequest,
    answer: &Response<Bytes>,
) -> Result<Value, Failed> {
    let (status, body) = (answer.status(), answer.body());
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    let shown = || String::from_utf8_lossy(&body[..body.len().min(SHOWN_BYTES)]).into_owned();
    let message = parsed["message"].as_str().map_or_else(shown, Into::into);
    let number = status.as_u16();
    let kind = parsed["details"]["kind"].as_str().unwrap_or_default();
    let reason = parsed["reason"].as_str().unwrap_or_default();
    match number {
        _ if status.is_success() && parsed.is_object() => Ok(parsed),
        // 410: a version that it has forgotten meanwhile; 500 is also etcd behind it, or a webhook, that took too long.
        410 | 429 | 500 | 502..=504 => Err(busy(server, answer, message)),
        // What a quota allows is counted with versions too, and others create objects at the same time.
        409 if kind == "resourcequotas" && reason == "Conflict" => {
            Err(busy(server, answer, message))
        }
        _ if parsed["kind"] == "Status" && !status.is_success() => {
            Err(KubernetesError::Refused(Box::new(Refusal {
                action: asked.action.clone(),
                status: number,
                kind: kind.into(),
                reason: reason.into(),
                message,
                remedy: remedy(number, kind),
            }))
            .into())
        }
        _ => Err(KubernetesError::Answer {
            got: format!("HTTP status {status} from {server}: {}", shown()),
        }
        .into()),
    }
}

fn busy(server: &str, answer: &Response<Bytes>, message: String) -> Failed {
    Failed::For {
        error: KubernetesError::Busy {
            server: server.into(),
            status: answer.status().as_u16(),
            message,
        },
        now: retry_after(answer.headers()),
    }
}

fn retry_after(headers: &HeaderMap) -> Duration {
    let said = headers.get(RETRY_AFTER).and_then(|it| it.to_str().ok());
    let seconds = said.and_then(|it| it.trim().parse().ok());
    seconds.map_or(ASK_AGAIN_AFTER, Duration::from_secs)
}
