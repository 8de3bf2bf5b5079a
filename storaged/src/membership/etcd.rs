//! Numbered records in etcd, through the JSON gateway of its v3 API: two requests, `kv/range` and `kv/txn`, both linearizable. A gRPC client would
//! need `protoc` on every machine that builds this (docs/decisions/2026-11-23-etcd.md).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Request, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use serde_json::{Value, json};
use storaged_wire::Namespace;
use thiserror::Error;

use super::registry::{NumberedRecord, NumberedRecords, Proposal, RegistryError, name_of_number};

/// One member of etcd answers within this time, or the next one is asked.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// An answer is never longer: a roster of 20,000 places, in base64.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// etcd takes requests of up to 1.5 MiB (`--max-request-bytes`), base64 and all: what is longer is packed.
const PACKED_FROM: usize = 512 << 10;
/// How zstd begins.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// An unpacked roster is never longer.
const RECORD_BYTES_MAX: usize = 64 << 20;

/// `membership.registry` with `kind = "etcd"`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// Its members, as `https://10.0.0.1:2379`; each is asked in turn until one answers.
    pub endpoints: Vec<String>,
    /// What all keys begin with: of this cluster alone.
    pub prefix: String,
    /// The authority that signed its certificates; without one https endpoints cannot be used.
    pub ca: Option<PathBuf>,
    /// This node's certificate for it, where it asks for one.
    pub certificate: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// A user of it, where it has users.
    pub user: Option<String>,
    /// The file with the user's password.
    pub password_file: Option<PathBuf>,
}

/// Why etcd cannot be used.
#[derive(Debug, Error)]
pub enum EtcdError {
    /// In the configuration.
    #[error("expected {expected} in membership.registry, got {got}")]
    Config { expected: &'static str, got: String },
    /// A file that it names.
    #[error("{path} (membership.registry) cannot be used: {reason}")]
    File { path: PathBuf, reason: String },
    /// No member has answered; what the last one said.
    #[error("no member of etcd answers: {endpoint}: {reason}")]
    Away { endpoint: String, reason: String },
    /// An answer that is none of etcd's.
    #[error("expected an answer of etcd's, got {got}")]
    Answer { got: String },
    /// etcd refuses.
    #[error("etcd refuses (code {code}): {message}")]
    Refused { code: i64, message: String },
}

/// gRPC's codes that a member answers with when another one, or a later try, may do better.
const UNAVAILABLE: i64 = 14;
const DEADLINE_EXCEEDED: i64 = 4;
/// gRPC's codes with which a token is refused that was good before: it has expired, or etcd was started again; or it was given before users
/// or roles were changed, of which a signed one (`--auth-token jwt`) knows nothing.
const UNAUTHENTICATED: i64 = 16;
const INVALID_ARGUMENT: i64 = 3;
const PERMISSION_DENIED: i64 = 7;
/// Of a login where users are turned off: then nobody needs one.
const FAILED_PRECONDITION: i64 = 9;

type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// What connections are made with.
#[derive(Debug)]
struct Dialler {
    client: HttpClient,
    /// What the files of the certificates had in them.
    files: Vec<Vec<u8>>,
}

/// Records that are keys of one folder of etcd.
#[derive(Debug)]
pub struct EtcdRecords {
    etcd: Arc<EtcdMembers>,
    folder: String,
}

/// Its members, and how they are asked.
#[derive(Debug)]
struct EtcdMembers {
    config: EtcdConfig,
    dialler: tokio::sync::Mutex<Dialler>,
    user: Option<User>,
    /// The member that answered last.
    first: AtomicUsize,
    token: tokio::sync::Mutex<Option<String>>,
}

#[derive(Debug)]
struct User {
    name: String,
    password: PathBuf,
}

impl EtcdConfig {
    /// What is wrong with it, without asking anybody.
    ///
    /// # Errors
    /// [`EtcdError::Config`].
    pub fn check(&self) -> Result<(), EtcdError> {
        let wrong = |expected, got: &str| {
            Err(EtcdError::Config {
                expected,
                got: got.into(),
            })
        };
        let has_https = self.endpoints.iter().any(|it| it.starts_with("https://"));
        for endpoint in &self.endpoints {
            let uri = endpoint.parse::<Uri>().ok();
            let scheme = uri.as_ref().and_then(Uri::scheme_str);
            let is_url = matches!(scheme, Some("http" | "https"));
            let is_bare = |uri: Uri| matches!(uri.path(), "" | "/") && uri.query().is_none();
            if !is_url || !uri.is_some_and(is_bare) {
                return wrong("endpoints such as https://10.0.0.1:2379", endpoint);
            }
        }
        match self {
            Self { endpoints, .. } if endpoints.is_empty() => wrong("endpoints", "none"),
            Self { prefix, .. } if prefix.is_empty() || prefix.len() > 200 => {
                wrong("a prefix of 1 to 200 bytes, of this cluster alone", prefix)
            }
            Self { ca: None, .. } if has_https => wrong("ca beside https endpoints", "none"),
            it if it.certificate.is_some() != it.key.is_some() => {
                wrong("certificate and key together", "one of them")
            }
            it if it.user.is_some() != it.password_file.is_some() => {
                wrong("user and password_file together", "one of them")
            }
            _ => Ok(()),
        }
    }

    fn folder(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix.trim_end_matches('/'))
    }

    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let all = [&self.ca, &self.certificate, &self.key];
        all.into_iter().flatten()
    }

    fn client(&self) -> Result<HttpClient, EtcdError> {
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

    fn tls(&self) -> Result<ClientConfig, EtcdError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for (path, certificate) in certificates(self.ca.as_ref())? {
            let unusable = |error: rustls::Error| unusable(&path, error);
            roots.add(certificate).map_err(unusable)?;
        }
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| unusable(&PathBuf::from("TLS"), error))?;
        let config = config.with_root_certificates(roots);
        let Some(key_file) = &self.key else {
            return Ok(config.with_no_client_auth());
        };
        let key =
            PrivateKeyDer::from_pem_file(key_file).map_err(|error| unusable(key_file, error))?;
        let own = certificates(self.certificate.as_ref())?;
        let own = own
            .into_iter()
            .map(|(_, certificate)| certificate)
            .collect();
        config
            .with_client_auth_cert(own, key)
            .map_err(|error| unusable(key_file, error))
    }
}

fn unusable(path: &std::path::Path, error: impl std::fmt::Display) -> EtcdError {
    EtcdError::File {
        path: path.into(),
        reason: error.to_string(),
    }
}

fn certificates(
    file: Option<&PathBuf>,
) -> Result<Vec<(PathBuf, CertificateDer<'static>)>, EtcdError> {
    let Some(path) = file else {
        return Ok(Vec::new());
    };
    let found = CertificateDer::pem_file_iter(path).map_err(|error| unusable(path, error))?;
    found
        .map(|it| {
            it.map(|it| (path.clone(), it))
                .map_err(|error| unusable(path, error))
        })
        .collect()
}

/// Text of JSON that etcd's gateway takes for bytes.
fn coded(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
}

fn pack(record: Bytes) -> Bytes {
    if record.len() < PACKED_FROM {
        return record;
    }
    zstd::bulk::compress(&record, 3).map_or(record, Bytes::from)
}

fn unpack(name: &str, value: Vec<u8>) -> Result<Bytes, EtcdError> {
    if !value.starts_with(&ZSTD_MAGIC) {
        return Ok(value.into());
    }
    let unpacked = zstd::bulk::decompress(&value, RECORD_BYTES_MAX);
    unpacked
        .map(Bytes::from)
        .map_err(|error| EtcdError::Answer {
            got: format!("a packed record at {name} that cannot be unpacked: {error}"),
        })
}

/// The first key and value of a range's answer.
fn first_of(range: &Value) -> Result<Option<NumberedRecord>, EtcdError> {
    let Some(pair) = range["kvs"].get(0) else {
        return Ok(None);
    };
    let field = |name: &str, text: Option<&str>| {
        let decoded = text.map(|text| BASE64.decode(text));
        decoded
            .and_then(Result::ok)
            .ok_or_else(|| EtcdError::Answer {
                got: format!("a pair without its {name}"),
            })
    };
    let name = field("key", pair["key"].as_str())?;
    let name = String::from_utf8_lossy(&name).into_owned();
    // The gateway leaves out what is empty.
    let value = match &pair["value"] {
        Value::Null => Vec::new(),
        value => field("value", value.as_str())?,
    };
    let bytes = unpack(&name, value)?;
    Ok(Some(NumberedRecord { name, bytes }))
}

impl EtcdRecords {
    /// As the configuration says. Nobody is asked yet.
    ///
    /// # Errors
    /// [`EtcdError`] if the configuration, or a file that it names, cannot be used.
    pub fn open(config: &EtcdConfig) -> Result<Self, EtcdError> {
        config.check()?;
        let read = |path: &PathBuf| std::fs::read(path).map_err(|error| unusable(path, error));
        let dialler = Dialler {
            files: config.files().map(read).collect::<Result<_, _>>()?,
            client: config.client()?,
        };
        let user = config.user.clone().zip(config.password_file.clone());
        let members = EtcdMembers {
            config: config.clone(),
            dialler: tokio::sync::Mutex::new(dialler),
            user: user.map(|(name, password)| User { name, password }),
            first: AtomicUsize::new(0),
            token: tokio::sync::Mutex::new(None),
        };
        Ok(Self {
            etcd: Arc::new(members),
            folder: config.folder("epochs"),
        })
    }

    fn key(&self, number: u64) -> String {
        format!("{}/{}", self.folder, name_of_number(number))
    }
}

impl EtcdMembers {
    /// What to dial with. Certificates expire, and a node that follows the registry for months is given new ones in the files of the old.
    async fn client(&self) -> HttpClient {
        let mut files = Vec::new();
        for path in self.config.files() {
            files.push(tokio::fs::read(path).await);
        }
        let mut dialler = self.dialler.lock().await;
        // One that cannot be read is being replaced at this moment: the next request finds it.
        let files: Result<Vec<Vec<u8>>, _> = files.into_iter().collect();
        if let Ok(files) = files
            && files != dialler.files
        {
            match self.config.client() {
                Ok(client) => {
                    tracing::info!("the certificates of membership.registry were read again");
                    dialler.client = client;
                }
                Err(error) => {
                    let error = crate::driver::chain(&error);
                    tracing::warn!(error, "the old certificates of membership.registry stay");
                }
            }
            dialler.files = files;
        }
        dialler.client.clone()
    }

    /// Asks, as a user where there is one: a token that is not good any more is asked for anew, once.
    async fn ask(&self, path: &str, body: &Value) -> Result<Value, EtcdError> {
        let Some(user) = &self.user else {
            return self.ask_members(path, body, None).await;
        };
        let mut token = self.token.lock().await;
        if let Some(known) = token.as_deref() {
            match self.ask_members(path, body, Some(known)).await {
                Err(EtcdError::Refused {
                    code: UNAUTHENTICATED | INVALID_ARGUMENT | PERMISSION_DENIED,
                    ..
                }) => {}
                other => return other,
            }
        }
        let password = tokio::fs::read_to_string(&user.password).await;
        let password = password.map_err(|error| unusable(&user.password, error))?;
        let login = json!({"name": user.name, "password": password.trim_end_matches('\n')});
        let answer = match self.ask_members("auth/authenticate", &login, None).await {
            Err(EtcdError::Refused {
                code: FAILED_PRECONDITION,
                ..
            }) => return self.ask_members(path, body, None).await,
            answered => answered?,
        };
        let new = answer["token"].as_str().ok_or_else(|| EtcdError::Answer {
            got: "no token".into(),
        })?;
        let new = token.insert(new.to_owned());
        self.ask_members(path, body, Some(new)).await
    }

    /// Asks one member after the other, beginning with the one that answered last.
    async fn ask_members(
        &self,
        path: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<Value, EtcdError> {
        let first = self.first.load(Ordering::Relaxed);
        let endpoints = &self.config.endpoints;
        let client = self.client().await;
        let mut last = None;
        for turn in 0..endpoints.len() {
            let number = (first + turn) % endpoints.len();
            let endpoint = &endpoints[number];
            let asked = ask_one(&client, endpoint, path, body, token);
            let answered = tokio::time::timeout(ANSWER_WITHIN, asked).await;
            let away = |reason: String| EtcdError::Away {
                endpoint: endpoint.clone(),
                reason,
            };
            let late = |_| Err(away(format!("no answer within {ANSWER_WITHIN:?}")));
            match answered.unwrap_or_else(late) {
                // A proxy before a member that is away answers too, as anything else that listens there now.
                Err(error @ (EtcdError::Away { .. } | EtcdError::Answer { .. })) => {
                    last = Some(error);
                }
                Err(EtcdError::Refused {
                    code: UNAVAILABLE | DEADLINE_EXCEEDED,
                    message,
                }) => last = Some(away(message)),
                answered => {
                    self.first.store(number, Ordering::Relaxed);
                    return answered;
                }
            }
        }
        Err(last.unwrap_or_else(|| EtcdError::Config {
            expected: "endpoints",
            got: "none".into(),
        }))
    }
}

async fn ask_one(
    client: &HttpClient,
    endpoint: &str,
    path: &str,
    body: &Value,
    token: Option<&str>,
) -> Result<Value, EtcdError> {
    let away = |reason: String| EtcdError::Away {
        endpoint: endpoint.into(),
        reason,
    };
    let uri = format!("{}/v3/{path}", endpoint.trim_end_matches('/'));
    let mut request = Request::post(uri).header(CONTENT_TYPE, "application/json");
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, token);
    }
    let request = request.body(Full::from(Bytes::from(body.to_string())));
    let request = request.map_err(|error| away(error.to_string()))?;
    let mut answer = client.request(request.clone()).await;
    if answer.as_ref().is_err_and(|error| !error.is_connect()) {
        // On a connection of a member that has been started again since. Asking twice is as good as once: reads, and a record that
        // is created again is its own.
        answer = client.request(request).await;
    }
    let answer = answer.map_err(|error| away(crate::driver::chain(&error)))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect();
    let body = body.await.map_err(|error| {
        if error.is::<LengthLimitError>() {
            let got = format!("one of more than {ANSWER_BYTES_MAX} bytes from {endpoint}");
            return EtcdError::Answer { got };
        }
        away(error.to_string())
    })?;
    read_answer(endpoint, status, &body.to_bytes())
}

fn read_answer(endpoint: &str, status: StatusCode, body: &[u8]) -> Result<Value, EtcdError> {
    let answer: Result<Value, _> = serde_json::from_slice(body);
    match answer {
        Ok(answer) if status.is_success() => Ok(answer),
        Ok(refusal) if refusal["code"].is_i64() => Err(EtcdError::Refused {
            code: refusal["code"].as_i64().unwrap_or_default(),
            message: refusal["message"].as_str().unwrap_or_default().into(),
        }),
        _ => Err(EtcdError::Answer {
            got: format!("HTTP status {status} from {endpoint}"),
        }),
    }
}

#[async_trait]
impl NumberedRecords for EtcdRecords {
    fn runs_of(&self, namespace: &Namespace) -> Arc<dyn NumberedRecords> {
        Arc::new(Self {
            etcd: self.etcd.clone(),
            folder: self.etcd.config.folder(&format!("runs/{namespace}")),
        })
    }

    async fn record(&self, number: u64) -> Result<Option<NumberedRecord>, RegistryError> {
        let range = json!({"key": coded(self.key(number))});
        let answer = self.etcd.ask("kv/range", &range).await?;
        Ok(first_of(&answer)?)
    }

    async fn newest(&self) -> Result<Option<NumberedRecord>, RegistryError> {
        let first = format!("{}/", self.folder);
        // `0` follows `/`.
        let end = format!("{}0", self.folder);
        let range = json!({"key": coded(first), "range_end": coded(end), "limit": 1});
        let answer = self.etcd.ask("kv/range", &range).await?;
        Ok(first_of(&answer)?)
    }

    async fn create(&self, number: u64, record: Bytes) -> Result<Proposal, RegistryError> {
        let key = coded(self.key(number));
        let put = json!({"key": key, "value": coded(pack(record.clone()))});
        let answer = self
            .etcd
            .ask(
                "kv/txn",
                &json!({
                    "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                    "success": [{"request_put": put}],
                    "failure": [{"request_range": {"key": key}}],
                }),
            )
            .await?;
        if answer["succeeded"] == true {
            return Ok(Proposal::Taken);
        }
        let there = first_of(&answer["responses"][0]["response_range"])?;
        match there {
            Some(there) if there.bytes == record => Ok(Proposal::Taken),
            Some(_) => Ok(Proposal::Outrun),
            None => Err(RegistryError::Etcd(EtcdError::Answer {
                got: "a transaction that neither created the record nor found one".into(),
            })),
        }
    }

    /// A key that is not there is not there: reads are linearizable.
    async fn check_place(&self) -> Result<(), RegistryError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> EtcdConfig {
        EtcdConfig {
            endpoints: vec!["http://127.0.0.1:1".into()],
            prefix: "storaged/a".into(),
            ca: None,
            certificate: None,
            key: None,
            user: None,
            password_file: None,
        }
    }

    #[test]
    fn what_cannot_be_is_said_before_anybody_is_asked() {
        assert!(config().check().is_ok());
        let wrong = [
            EtcdConfig {
                endpoints: vec![],
                ..config()
            },
            EtcdConfig {
                endpoints: vec!["10.0.0.1:2379".into()],
                ..config()
            },
            EtcdConfig {
                endpoints: vec!["http://a:1/v3".into()],
                ..config()
            },
            EtcdConfig {
                endpoints: vec!["http://a:1/?timeout=3".into()],
                ..config()
            },
            EtcdConfig {
                endpoints: vec!["https://a:1".into()],
                ..config()
            },
            EtcdConfig {
                prefix: String::new(),
                ..config()
            },
            EtcdConfig {
                key: Some("k".into()),
                ..config()
            },
            EtcdConfig {
                user: Some("u".into()),
                ..config()
            },
        ];
        for config in wrong {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains("membership.registry"), "{error}");
        }
    }

    #[test]
    fn a_long_record_is_packed_and_comes_back() {
        for length in [10, PACKED_FROM - 1, PACKED_FROM, 4 * PACKED_FROM] {
            let record = Bytes::from(b"{place}".repeat(length / 7 + 1));
            let packed = pack(record.clone());
            assert_eq!(packed.starts_with(&ZSTD_MAGIC), record.len() >= PACKED_FROM);
            assert_eq!(unpack("k", packed.to_vec()).unwrap(), record);
        }
        assert!(unpack("k", ZSTD_MAGIC.to_vec()).is_err());
    }

    #[test]
    fn answers_that_are_none_are_errors() {
        let ok = StatusCode::OK;
        assert!(read_answer("e", ok, b"{}").is_ok());
        let refusal = read_answer(
            "e",
            StatusCode::BAD_REQUEST,
            br#"{"code": 16, "message": "m"}"#,
        );
        assert!(matches!(
            refusal,
            Err(EtcdError::Refused {
                code: UNAUTHENTICATED,
                ..
            })
        ));
        for (status, body) in [
            (ok, "<html>"),
            (StatusCode::BAD_GATEWAY, "{}"),
            (StatusCode::NOT_FOUND, "404"),
        ] {
            let answer = read_answer("e", status, body.as_bytes());
            assert!(
                matches!(answer, Err(EtcdError::Answer { .. })),
                "{answer:?}"
            );
        }
        for pair in [
            json!({"kvs": [{}]}),
            json!({"kvs": [{"key": "a", "value": "%"}]}),
        ] {
            assert!(first_of(&pair).is_err());
        }
        assert_eq!(first_of(&json!({})).unwrap(), None);
        let empty = first_of(&json!({"kvs": [{"key": "YQ=="}]})).unwrap();
        assert!(empty.is_some_and(|it| it.name == "a" && it.bytes.is_empty()));
    }
}
