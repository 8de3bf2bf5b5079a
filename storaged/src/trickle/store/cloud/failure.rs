//! From the errors of `object_store` to the store's.

use object_store::Error;

use crate::trickle::store::{ObjectKey, StoreError};

/// Stands before the status of an answer in the words of an error: the error itself does not have it.
const STATUS: &str = "code: ";
/// In the words of an error of whoever gives credentials.
const OF_CREDENTIALS: &str = "token request";
/// What services say of a bucket or container that is not there, or not any more.
const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"];
/// A server may answer with megabytes, which would be in the log and the status.
const WORDS_MAX: usize = 600;

/// An error in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct CloudSaid(String);

/// What an error says, on one line and of bounded length. Its causes are in it.
pub(super) fn words(error: &Error) -> String {
    let said = error.to_string();
    let printable = said
        .chars()
        .map(|it| if it.is_control() { ' ' } else { it });
    printable.take(WORDS_MAX).collect()
}

/// What a request was about, for the error that it may end in.
#[derive(Debug, Clone)]
pub(super) struct CloudRequest {
    pub what: String,
    pub key: Option<ObjectKey>,
}

impl CloudRequest {
    /// Of a request that creates an object unless there is one.
    pub(super) fn error_of_creation(&self, error: Error) -> StoreError {
        match (&error, &self.key) {
            (Error::AlreadyExists { .. } | Error::Precondition { .. }, Some(key))
                if !is_without_bucket(&words(&error)) =>
            {
                StoreError::AlreadyExists { key: key.clone() }
            }
            _ => self.error(error),
        }
    }

    pub(super) fn error(&self, error: Error) -> StoreError {
        let (what, said) = (self.what.clone(), words(&error));
        if is_without_bucket(&said) {
            return StoreError::NotMounted {
                what: format!("{what} ({said})"),
            };
        }
        let source = CloudSaid(said.clone()).into();
        match error {
            Error::NotFound { .. } => StoreError::NotFound { what },
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                StoreError::Denied { what, source }
            }
            Error::InvalidPath { .. }
            | Error::NotSupported { .. }
            | Error::NotImplemented { .. }
            | Error::UnknownConfigurationKey { .. } => refused(what, said),
            _ => answered(what, said),
        }
    }
}

fn is_without_bucket(said: &str) -> bool {
    NO_BUCKET.iter().any(|code| said.contains(code))
}

fn refused(what: String, said: String) -> StoreError {
    StoreError::Invalid {
        what,
        expected: "a request that the server accepts".into(),
        got: said,
    }
}

/// By the status, if there was an answer.
fn answered(what: String, said: String) -> StoreError {
    let status = said.split_once(STATUS).map(|(_, rest)| rest);
    let status = status.and_then(|rest| rest.get(..3)?.parse::<u16>().ok());
    let source = CloudSaid(said.clone()).into();
    match status {
        Some(429) => StoreError::Throttled { what, source },
        // Azure has it for accounts that ask too often.
        Some(503) if said.contains("ServerBusy") || said.contains("SlowDown") => {
            StoreError::Throttled { what, source }
        }
        Some(401 | 403) => StoreError::Denied { what, source },
        // An identity that is not there may be given later: no reason not to serve RAM till then.
        Some(400..=499) if said.contains(OF_CREDENTIALS) => StoreError::Denied { what, source },
        Some(507) => StoreError::Full { what, source },
        // Somebody else is at it, or it took too long: that may pass.
        Some(408 | 409 | 412) => StoreError::Unavailable { what, source },
        Some(404) => StoreError::NotFound { what },
        Some(400..=499) => refused(what, said),
        _ => StoreError::Unavailable { what, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> CloudRequest {
        CloudRequest {
            what: "write part 3 of gs://ckpt/a".into(),
            key: Some("a".parse().unwrap()),
        }
    }

    fn generic(said: &str) -> Error {
        Error::Generic {
            store: "test",
            source: said.into(),
        }
    }

    fn conflict() -> Error {
        Error::AlreadyExists {
            path: "a".into(),
            source: "Server returned non-2xx status code: 409 Conflict: busy".into(),
        }
    }

    #[test]
    fn an_answer_says_whether_to_try_again() {
        let of = |said: &str| request().error(generic(said));
        let status = |code: &str| of(&format!("Server returned non-2xx status code: {code}: x"));
        assert!(matches!(
            status("429 Too Many"),
            StoreError::Throttled { .. }
        ));
        assert!(matches!(
            status("408 Timeout"),
            StoreError::Unavailable { .. }
        ));
        assert!(matches!(
            status("500 Internal"),
            StoreError::Unavailable { .. }
        ));
        assert!(matches!(status("507 Storage"), StoreError::Full { .. }));
        assert!(matches!(status("400 Bad"), StoreError::Invalid { .. }));
        assert!(matches!(status("404 Not"), StoreError::NotFound { .. }));
        assert!(matches!(of("no answer"), StoreError::Unavailable { .. }));
        // As of one request of a batch.
        assert!(matches!(
            of("Forbidden (code: 403)"),
            StoreError::Denied { .. }
        ));
        let token = "Error performing token request: status code: 400 Bad Request";
        assert!(matches!(of(token), StoreError::Denied { .. }));
        let gone = "status code: 404 Not Found: <Code>NoSuchBucket</Code>";
        assert!(matches!(of(gone), StoreError::NotMounted { .. }));
    }

    #[test]
    fn another_writer_was_first_only_where_an_object_is_created() {
        let created = request().error_of_creation(conflict());
        assert!(
            matches!(created, StoreError::AlreadyExists { .. }),
            "{created}"
        );
        let written = request().error(conflict());
        assert!(
            matches!(written, StoreError::Unavailable { .. }),
            "{written}"
        );
    }

    #[test]
    fn what_a_server_says_is_one_line_of_bounded_length() {
        let body = format!(
            "status code: 400 Bad Request: x\nERROR forged\n{}",
            "y".repeat(3 << 20)
        );
        let error = request().error(generic(&body));
        let shown = crate::driver::chain(&error);
        assert!(
            shown.len() < 1_000 && !shown.contains('\n'),
            "{}",
            shown.len()
        );
    }
}
