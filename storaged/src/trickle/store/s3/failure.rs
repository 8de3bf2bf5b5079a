//! From the client's errors to the store's.

use std::error::Error;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use crate::trickle::store::{ObjectKey, StoreError};

/// What a request was about, for the error that it may end in.
#[derive(Debug, Clone)]
pub(super) struct Context {
    pub what: String,
    pub key: Option<ObjectKey>,
    pub upload: Option<String>,
}

/// The text of a client error with its causes, as an error of its own.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Cause(String);

impl Context {
    pub(super) fn error<E>(&self, error: SdkError<E, HttpResponse>) -> StoreError
    where
        E: ProvideErrorMetadata + Error + Send + Sync + 'static,
    {
        let status = error
            .raw_response()
            .map(|response| response.status().as_u16());
        let code = error.code().unwrap_or_default().to_owned();
        let message = error.message().unwrap_or_default().to_owned();
        let cause = Cause(crate::driver::chain(&error));
        if let Some(failed) = credentials_failure(&error) {
            return self.without_credentials(failed, cause);
        }
        match (&error, status) {
            (SdkError::ConstructionFailure(_), _) => StoreError::Invalid {
                what: self.what.clone(),
                expected: "settings from which a request can be made".into(),
                got: cause.0,
            },
            (_, None) => StoreError::Unavailable {
                what: self.described("no answer"),
                source: cause.into(),
            },
            (_, Some(status)) => self.answered(status, &code, &message, cause),
        }
    }

    /// A body that ended or failed before its announced length.
    pub(super) fn broken_off(&self, error: impl Error + 'static) -> StoreError {
        let source = Cause(crate::driver::chain(&error));
        StoreError::Unavailable {
            what: self.described("answer broke off"),
            source: source.into(),
        }
    }

    fn answered(&self, status: u16, code: &str, message: &str, cause: Cause) -> StoreError {
        let said = [&format!("status {status}"), code, message]
            .join(" ")
            .trim()
            .to_owned();
        let what = self.described(&said);
        match (status, code) {
            (_, "QuotaExceeded") | (507, _) => StoreError::Full {
                what,
                source: cause.into(),
            },
            (429, _) | (_, "SlowDown" | "TooManyRequests" | "Throttling") => {
                StoreError::Throttled {
                    what,
                    source: cause.into(),
                }
            }
            (_, "BadDigest" | "XAmzContentSHA256Mismatch" | "XAmzContentChecksumMismatch") => {
                match &self.key {
                    Some(key) => StoreError::Corrupt {
                        key: key.clone(),
                        what,
                    },
                    None => StoreError::Unavailable {
                        what,
                        source: cause.into(),
                    },
                }
            }
            (404, _) => self.missing(code, what),
            (401 | 403, _) => StoreError::Denied {
                what,
                source: cause.into(),
            },
            (412, _) => match &self.key {
                Some(key) => StoreError::AlreadyExists { key: key.clone() },
                None => StoreError::Unavailable {
                    what,
                    source: cause.into(),
                },
            },
            (416, _) => match &self.key {
                // The caller fills in the lengths.
                Some(key) => StoreError::Truncated {
                    key: key.clone(),
                    expected: 0,
                    got: 0,
                },
                None => StoreError::Unavailable {
                    what,
                    source: cause.into(),
                },
            },
            // A conflict between concurrent conditional writes, and a request cut short, pass.
            (408 | 409 | 500.., _) | (_, "RequestTimeout" | "IncompleteBody") => {
                StoreError::Unavailable {
                    what,
                    source: cause.into(),
                }
            }
            _ => StoreError::Invalid {
                what: self.what.clone(),
                expected: "a request that the server accepts".into(),
                got: said,
            },
        }
    }

    /// Nobody has given credentials; an answer that did not come may come later.
    fn without_credentials(&self, failed: &CredentialsError, cause: Cause) -> StoreError {
        let source = cause.into();
        let what =
            self.described("no S3 credentials from a file, the environment, a profile or a role");
        match failed {
            CredentialsError::CredentialsNotLoaded(_)
            | CredentialsError::InvalidConfiguration(_) => StoreError::Denied { what, source },
            _ => StoreError::Unavailable { what, source },
        }
    }

    /// A server that has computed another checksum than that of what was sent.
    pub(super) fn kept_otherwise(&self, key: &ObjectKey, sent: u64, kept: u64) -> StoreError {
        StoreError::Corrupt {
            key: key.clone(),
            what: self.described(&format!(
                "sent bytes with CRC-64/NVME {sent:016x}, the server keeps {kept:016x}"
            )),
        }
    }

    fn missing(&self, code: &str, what: String) -> StoreError {
        match (&self.key, &self.upload) {
            (Some(key), Some(upload)) if code != "NoSuchBucket" => StoreError::NoUpload {
                key: key.clone(),
                upload: upload.clone(),
            },
            _ => StoreError::NotFound { what },
        }
    }

    fn described(&self, said: &str) -> String {
        format!("{} ({said})", self.what)
    }
}

/// What the provider of credentials said, if it is that which failed.
fn credentials_failure<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e CredentialsError> {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let mut failures = causes.filter_map(|error| error.downcast_ref());
    failures.next()
}

/// A server's answer without something that every answer of its kind has.
pub(super) fn answer_lacks(context: &Context, lack: &str) -> StoreError {
    StoreError::Invalid {
        what: format!("answer to {}", context.what),
        expected: lack.to_owned(),
        got: "none".into(),
    }
}
