//! Numbered records in etcd, through the JSON gateway of its v3 API: two requests, `kv/range` and `kv/txn`, both linearizable. A gRPC client would
//! need `protoc` on every machine that builds this (docs/decisions/2026-11-23-etcd.md).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Request, StatusCode, Uri};
use serde::Deserialize;
use serde_json::{Value, json};
use storaged_wire::Namespace;
use thiserror::Error;

use super::https::{ANSWER_WITHIN, Dialler, NoAnswer, RegistryFileError, RegistryTls, password_in};
use super::packed::{pack, unpack};
use super::registry::{NumberedRecord, NumberedRecords, Proposal, RegistryError, name_of_number};

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
    #[error(transparent)]
    File(#[from] RegistryFileError),
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
    dialler: Dialler,
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

    fn files(&self) -> RegistryTls {
        RegistryTls {
            ca: self.ca.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone(),
        }
    }
}

/// Text of JSON that etcd's gateway takes for bytes.
fn coded(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
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
    let bytes = unpack(&name, value).map_err(|error| EtcdError::Answer {
        got: crate::driver::chain(&error),
    })?;
    Ok(Some(NumberedRecord { name, bytes }))
}

impl EtcdRecords {
    /// As the configuration says. Nobody is asked yet.
    ///
    /// # Errors
    /// [`EtcdError`] if the configuration, or a file that it names, cannot be used.
    pub fn open(config: &EtcdConfig) -> Result<Self, EtcdError> {
        config.check()?;
        let user = config.user.clone().zip(config.password_file.clone());
        let members = EtcdMembers {
            config: config.clone(),
            dialler: Dialler::open(config.files())?,
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
        let password = password_in(&user.password).await?;
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
        let mut last = None;
        for turn in 0..endpoints.len() {
            let number = (first + turn) % endpoints.len();
            let endpoint = &endpoints[number];
            let asked = ask_one(&self.dialler, endpoint, path, body, token);
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
    dialler: &Dialler,
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
    // Asking twice is as good as once: reads, and a record that is created again is its own.
    let answer = dialler.exchange(request).await.map_err(|none| match none {
        NoAnswer::Away(reason) => away(reason),
        NoAnswer::TooLong => EtcdError::Answer {
            got: NoAnswer::too_long_from(endpoint),
        },
    })?;
    read_answer(endpoint, answer.status(), answer.body())
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
