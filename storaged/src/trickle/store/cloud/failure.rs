//! From the errors of `object_store` to the store's.

use object_store::Error;

use crate::trickle::store::{ObjectKey, StoreError};

/// Stands before the status of an answer in the words of an error: the error itself does not have it.
const STATUS: &str = "status code: ";

/// What a request was about, for the error that it may end in.
#[derive(Debug, Clone)]
pub(super) struct CloudRequest {
    pub what: String,
    pub key: Option<ObjectKey>,
}

impl CloudRequest {
    pub(super) fn error(&self, error: Error) -> StoreError {
        let words = crate::driver::chain(&error);
        let (what, key) = (self.what.clone(), self.key.clone());
        match (error, key) {
            (Error::NotFound { .. }, _) => StoreError::NotFound { what },
            (Error::AlreadyExists { .. } | Error::Precondition { .. }, Some(key)) => {
                StoreError::AlreadyExists { key }
            }
            (error @ (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }), _) => {
                let source = error.into();
                StoreError::Denied { what, source }
            }
            (
                Error::InvalidPath { .. }
                | Error::NotSupported { .. }
                | Error::NotImplemented { .. }
                | Error::UnknownConfigurationKey { .. },
                _,
            ) => StoreError::Invalid {
                what,
                expected: "a request that the server accepts".into(),
                got: words,
            },
            (error, _) => answered(what, &words, error),
        }
    }
}

/// By the status, if there was an answer.
fn answered(what: String, words: &str, error: Error) -> StoreError {
    let status = words.split_once(STATUS).map(|(_, rest)| rest);
    let status = status.and_then(|rest| rest.get(..3)?.parse::<u16>().ok());
    let source = error.into();
    match status {
        Some(429) => StoreError::Throttled { what, source },
        // Azure has it for accounts that ask too often.
        Some(503) if words.contains("ServerBusy") || words.contains("SlowDown") => {
            StoreError::Throttled { what, source }
        }
        // Of whoever gives credentials.
        Some(401 | 403) => StoreError::Denied { what, source },
        Some(507) => StoreError::Full { what, source },
        Some(status @ 400..=499) if status != 408 => StoreError::Invalid {
            what,
            expected: "a request that the server accepts".into(),
            got: words.into(),
        },
        _ => StoreError::Unavailable { what, source },
    }
}
