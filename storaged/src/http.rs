//! The operator's HTTP: metrics, health and status. Names and numbers only, no bytes of checkpoints.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::metrics::Metrics;

/// What the pages show; the driver keeps it up to date.
#[derive(Debug, Default)]
pub struct OpsState {
    /// Metrics.
    pub metrics: Metrics,
    status: Mutex<(String, bool)>,
}

impl OpsState {
    /// The newest status, and whether the node is ready: it knows its peers or has had time to.
    pub fn set_status(&self, json: String, ready: bool) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = (json, ready);
    }

    fn status(&self) -> (String, bool) {
        self.status
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Serves until the process ends.
///
/// # Errors
/// As the system says, if the address cannot be bound.
pub async fn serve(address: SocketAddr, state: Arc<OpsState>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    let app = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .with_state(state);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(%error, "the operator's HTTP ended");
        }
    });
    Ok(())
}

async fn metrics(State(state): State<Arc<OpsState>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], state.metrics.text()).into_response()
}

async fn ready(State(state): State<Arc<OpsState>>) -> (StatusCode, &'static str) {
    match state.status().1 {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "waiting for peers\n"),
    }
}

async fn status(State(state): State<Arc<OpsState>>) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        state.status().0,
    )
        .into_response()
}
