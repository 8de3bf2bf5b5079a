//! The operator's HTTP: metrics, health and status. Names and numbers only, no bytes of checkpoints.

mod doors;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;

use doors::{DoorLimits, Doors};

use crate::metrics::Metrics;

/// A node has a scraper or two, a probe and now and then a person.
const LIMITS: DoorLimits = DoorLimits {
    connections_max: 64,
    lifetime: Duration::from_secs(60),
};

/// What the pages show; the driver keeps it up to date.
#[derive(Debug, Default)]
pub struct OpsState {
    /// Metrics.
    pub metrics: Metrics,
    status: Mutex<Shown>,
}

/// The newest status.
#[derive(Debug, Clone)]
struct Shown {
    json: String,
    /// Why the node is not ready; empty if it is.
    not_ready: Vec<String>,
}

impl Default for Shown {
    fn default() -> Self {
        Self {
            json: String::new(),
            not_ready: vec!["the daemon is starting".into()],
        }
    }
}

impl OpsState {
    /// The newest status, and why the node is not ready, if it is not.
    pub fn set_status(&self, json: String, not_ready: Vec<String>) {
        let shown = Shown { json, not_ready };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = shown;
    }

    fn status(&self) -> Shown {
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
    start(address, state, LIMITS).await.map(|_| ())
}

/// Starts serving and says where.
async fn start(
    address: SocketAddr,
    state: Arc<OpsState>,
    limits: DoorLimits,
) -> std::io::Result<SocketAddr> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    let app = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .with_state(state);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(Doors::new(listener, limits), app).await {
            tracing::error!(%error, "the operator's HTTP ended");
        }
    });
    Ok(bound)
}

/// The status for people: a page without scripts that any browser shows.
async fn page(State(state): State<Arc<OpsState>>) -> Html<String> {
    let shown = state.status();
    let ready = match shown.not_ready.as_slice() {
        [] => "ready".into(),
        reasons => format!("<b>not ready</b>: {}", escaped(&reasons.join("; "))),
    };
    Html(format!(
        "<!doctype html><meta charset=\"utf-8\"><title>storaged</title><h1>storaged</h1>\
         <p>Version {}, {ready}. <a href=\"/metrics\">metrics</a> <a href=\"/status\">status as JSON</a></p>\
         <pre>{}</pre>",
        env!("CARGO_PKG_VERSION"),
        escaped(&indented(&shown.json)),
    ))
}

fn indented(json: &str) -> String {
    let parsed = serde_json::from_str::<serde_json::Value>(json);
    match parsed.map(|value| format!("{value:#}")) {
        Ok(text) => text,
        Err(_) => json.to_owned(),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

async fn metrics(State(state): State<Arc<OpsState>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], state.metrics.text()).into_response()
}

async fn ready(State(state): State<Arc<OpsState>>) -> (StatusCode, String) {
    let reasons = state.status().not_ready;
    match reasons.is_empty() {
        true => (StatusCode::OK, "ready\n".into()),
        false => {
            let lines: String = reasons.iter().map(|reason| format!("{reason}\n")).collect();
            (StatusCode::SERVICE_UNAVAILABLE, lines)
        }
    }
}

async fn status(State(state): State<Arc<OpsState>>) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        state.status().json,
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    async fn server(limits: DoorLimits) -> (SocketAddr, Arc<OpsState>) {
        let state = Arc::new(OpsState::default());
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        (start(any, state.clone(), limits).await.unwrap(), state)
    }

    /// Everything that comes until the server closes or cuts the connection.
    async fn rest(stream: &mut TcpStream) -> String {
        let mut bytes = Vec::new();
        let ended = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await;
        let _ = ended.expect("the server ends the connection");
        String::from_utf8(bytes).unwrap()
    }

    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        rest(&mut stream).await
    }

    #[tokio::test]
    async fn the_pages_say_how_the_node_is() {
        let (address, state) = server(LIMITS).await;
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 503"));
        state.set_status(r#"{"node":"<b>"}"#.into(), vec!["n2 <is> down".into()]);
        let ready = get(address, "/readyz").await;
        assert!(ready.starts_with("HTTP/1.1 503") && ready.ends_with("n2 <is> down\n"));
        assert!(get(address, "/").await.contains("n2 &lt;is> down"));
        state.set_status(r#"{"node":"<b>"}"#.into(), Vec::new());
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/status").await.ends_with(r#"{"node":"<b>"}"#));
        let page = get(address, "/").await;
        assert!(page.contains("&lt;b>") && !page.contains("\"<b>"), "{page}");
        assert!(get(address, "/metrics").await.ends_with("# EOF\n"));
        assert!(get(address, "/other").await.starts_with("HTTP/1.1 404"));
    }

    #[tokio::test]
    async fn who_never_ends_a_request_is_cut_and_frees_the_place() {
        let limits = DoorLimits {
            connections_max: 1,
            lifetime: Duration::from_millis(300),
        };
        let (address, _) = server(limits).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET /healthz HTTP/1.1\r\nx: ")
            .await
            .unwrap();
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert_eq!(rest(&mut slow).await, "");
    }
}
