//! What a request can meet, as HTTP says it: a status, and a JSON object with a code to act on and a sentence to read.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use storaged_wire::RefusalCode;
use thiserror::Error;

use super::local::CallFault;

/// Why a request was not done.
#[derive(Debug, Error)]
pub enum ApiFault {
    #[error("expected {expected}, got {got:?}")]
    Malformed { expected: &'static str, got: String },
    #[error(
        "expected the interface's token, as `Authorization: Bearer TOKEN` or as the password of `Basic`"
    )]
    Unauthorized,
    #[error("there is no such path in this interface")]
    NoPath,
    #[error("this path has no such method")]
    NoMethod,
    #[error("there is no namespace {0:?}: create it first")]
    NoNamespace(String),
    #[error("namespace {0:?} exists already")]
    NamespaceExists(String),
    #[error("there is no shard of rank {rank} at step {step} in namespace {namespace:?}")]
    NoShard {
        namespace: String,
        rank: u32,
        step: u64,
    },
    #[error(
        "expected a rank below {num_ranks}, the ranks of namespace {namespace:?}, got {rank}: delete the namespace to use another number"
    )]
    RankOutside {
        namespace: String,
        rank: u32,
        num_ranks: u32,
    },
    #[error(
        "expected a Content-Length, got none: the memory for a shard is reserved before it comes"
    )]
    NoLength,
    #[error(
        "expected a shard of at most {most} bytes, the memory budget of this node, got {got}: raise memory.budget or save smaller shards"
    )]
    TooLarge { most: u64, got: u64 },
    #[error("expected {expected} bytes, got {got}: nothing of the shard was kept")]
    Truncated { expected: u64, got: u64 },
    #[error("expected at least {least} bytes within {} s, got {got}: nothing of the shard was kept", .within.as_secs())]
    Stalled {
        least: u64,
        got: u64,
        within: Duration,
    },
    #[error(
        "expected a body with the xxh3_128 checksum {expected}, got one with {got}: nothing of it was kept"
    )]
    Checksum { expected: String, got: String },
    #[error("the body could not be received: nothing of it was kept")]
    Receiving(#[source] axum::Error),
    #[error("expected a range within {length} bytes, got {got:?}")]
    Range { length: u64, got: String },
    #[error("another request saves rank {rank} of namespace {namespace:?} right now")]
    RankBusy { namespace: String, rank: u32 },
    #[error("step {step} was given up: {reason}")]
    GivenUp { step: u64, reason: String },
    #[error("step {step} is whole and not protected yet, and there is no other: ask again")]
    NotSafeYet { step: u64 },
    #[error("the shard is kept, and step {step} has not committed: {reason}")]
    NotCommitted { step: u64, reason: String },
    #[error("the shard was not written through this interface")]
    Foreign,
    #[error("shared memory failed")]
    Memory(#[from] storaged_arena::SlotError),
    #[error(transparent)]
    Shard(#[from] storaged_sdk::ClientError),
    #[error(transparent)]
    Daemon(#[from] CallFault),
    #[error("the request was ended: the daemon is stopping")]
    Ended,
}

impl ApiFault {
    /// What it is for a program.
    fn code(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::Unauthorized => "unauthorized",
            Self::NoPath => "no_such_path",
            Self::NoMethod => "no_such_method",
            Self::NoNamespace(_) => "namespace_not_found",
            Self::NamespaceExists(_) => "namespace_exists",
            Self::NoShard { .. } => "checkpoint_not_found",
            Self::RankOutside { .. } => "rank_outside",
            Self::NoLength => "length_required",
            Self::TooLarge { .. } => "too_large",
            Self::Truncated { .. } | Self::Receiving(_) => "truncated",
            Self::Stalled { .. } => "stalled",
            Self::Checksum { .. } => "checksum_mismatch",
            Self::Range { .. } => "range_outside",
            Self::RankBusy { .. } => "rank_busy",
            Self::GivenUp { .. } => "given_up",
            Self::NotSafeYet { .. } => "not_protected_yet",
            Self::NotCommitted { .. } => "not_committed",
            Self::Foreign => "foreign_checkpoint",
            Self::Memory(_) | Self::Shard(_) => "memory",
            Self::Daemon(fault) => code_of(fault),
            Self::Ended => "stopping",
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Malformed { .. } | Self::RankOutside { .. } => StatusCode::BAD_REQUEST,
            Self::Truncated { .. } | Self::Receiving(_) => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::NoPath | Self::NoNamespace(_) | Self::NoShard { .. } => StatusCode::NOT_FOUND,
            Self::NamespaceExists(_) | Self::RankBusy { .. } => StatusCode::CONFLICT,
            Self::GivenUp { .. } | Self::Foreign => StatusCode::CONFLICT,
            Self::NoMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::NoLength => StatusCode::LENGTH_REQUIRED,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Stalled { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::Checksum { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Range { .. } => StatusCode::RANGE_NOT_SATISFIABLE,
            Self::Memory(_) | Self::Shard(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Daemon(fault) => status_of(fault),
            Self::Ended | Self::NotSafeYet { .. } | Self::NotCommitted { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }
}

fn code_of(fault: &CallFault) -> &'static str {
    match fault.code() {
        Some(RefusalCode::WrongToken) => "wrong_token",
        Some(RefusalCode::BudgetFull) => "budget_full",
        Some(RefusalCode::Busy) => "busy",
        Some(RefusalCode::TimedOut) => "timed_out",
        Some(RefusalCode::TooManyLost) => "too_many_lost",
        Some(RefusalCode::Corrupt) => "corrupt",
        Some(RefusalCode::NewerUnreachable) => "newer_unreachable",
        Some(RefusalCode::DurableUnavailable) => "durable_unavailable",
        Some(RefusalCode::OlderRun | RefusalCode::UnknownRun) => "superseded",
        Some(_) => "refused",
        None => "unavailable",
    }
}

fn status_of(fault: &CallFault) -> StatusCode {
    match fault.code() {
        Some(RefusalCode::WrongToken) => StatusCode::FORBIDDEN,
        Some(RefusalCode::BudgetFull) => StatusCode::INSUFFICIENT_STORAGE,
        Some(RefusalCode::TooManyLost) => StatusCode::GONE,
        Some(
            RefusalCode::OlderRun
            | RefusalCode::UnknownRun
            | RefusalCode::WorldSize
            | RefusalCode::StepNotNewer
            | RefusalCode::Abandoned,
        ) => StatusCode::CONFLICT,
        Some(RefusalCode::Corrupt) => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

impl IntoResponse for ApiFault {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = json!({"error": self.code(), "message": crate::driver::chain(&self)});
        let mut response = answer(status, &body);
        if matches!(self, Self::Unauthorized) {
            let realm = HeaderValue::from_static("Basic realm=\"storaged\"");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, realm);
        }
        response
    }
}

/// A JSON answer.
pub fn answer(status: StatusCode, body: &serde_json::Value) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_page_has_every_code() {
        let page = include_str!("../../../docs/operate/hyperpod.md");
        let lines = include_str!("fault.rs").lines();
        let arms = lines.filter_map(|line| line.trim().strip_suffix("\","));
        let codes: Vec<&str> = arms
            .filter_map(|arm| Some(arm.split_once("=> \"")?.1))
            .collect();
        assert!(codes.len() > 25, "{codes:?}");
        for code in codes {
            assert!(page.contains(&format!("`{code}`")), "{code}");
        }
    }

    #[tokio::test]
    async fn a_fault_is_a_status_and_a_json_object() {
        let response = ApiFault::NoNamespace("a".into()).into_response();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        let body = axum::body::to_bytes(response.into_body(), 1000).await;
        let body: serde_json::Value = serde_json::from_slice(&body.unwrap()).unwrap();
        assert_eq!(body["error"], "namespace_not_found");
        assert!(body["message"].as_str().unwrap().contains("\"a\""));
    }
}
