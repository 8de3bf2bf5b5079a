//! The operator's HTTP: metrics, health and status. Names and numbers only, no bytes of checkpoints.

pub(crate) mod doors;
pub(crate) mod places;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRef, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use storaged_plan::Cordon;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

use doors::{Cut, HeadLimits, ListenerLimits};
use places::WhenFull;

use crate::metrics::Metrics;

/// A node has a scraper or two, a probe and now and then a person, who ask with a line and a few headers.
const LIMITS: ListenerLimits = ListenerLimits {
    connections_max: 64,
    when_full: WhenFull::Displace,
    cut: Cut::AfterLife(Duration::from_secs(60)),
    head: HeadLimits {
        within: Duration::from_secs(5),
        bytes_max: 16 << 10,
    },
};

/// The driver answers between two inputs; what takes longer is a driver that is stuck.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Whether this node may be restarted now: asked at the moment, because a status that is a second old does not know of
/// the peer that has just gone.
#[derive(Debug)]
pub struct RestartAsked {
    /// Node losses that must be bearable before, as in `storaged restart-safe --bears`.
    pub bears: Option<u32>,
    /// Where what speaks against it goes.
    pub answer: oneshot::Sender<Vec<String>>,
}

/// What the pages are made of.
#[derive(Debug, Clone)]
struct Pages {
    ops: Arc<OpsState>,
    driver: mpsc::Sender<RestartAsked>,
}

impl FromRef<Pages> for Arc<OpsState> {
    fn from_ref(pages: &Pages) -> Self {
        pages.ops.clone()
    }
}

/// What the pages show; the driver keeps it up to date.
#[derive(Debug, Default)]
pub struct OpsState {
    /// Metrics.
    pub metrics: Metrics,
    status: Mutex<Shown>,
    cordon: Mutex<Cordon>,
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

    /// Whether an operator has cordoned this node. It is ready all the same: trainers on it go on.
    pub fn set_cordon(&self, cordon: Cordon) {
        *self.cordon.lock().unwrap_or_else(PoisonError::into_inner) = cordon;
    }

    fn good_word(&self) -> &'static str {
        match *self.cordon.lock().unwrap_or_else(PoisonError::into_inner) {
            Cordon::Open => "ready",
            Cordon::Cordoned => "ready, cordoned",
        }
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
pub async fn serve(
    address: SocketAddr,
    ops: Arc<OpsState>,
    driver: mpsc::Sender<RestartAsked>,
) -> std::io::Result<()> {
    let pages = Pages { ops, driver };
    start(address, pages, LIMITS).await.map(|_| ())
}

/// Starts serving and says where.
async fn start(
    address: SocketAddr,
    pages: Pages,
    limits: ListenerLimits,
) -> std::io::Result<SocketAddr> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    let app = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .with_state(pages);
    tokio::spawn(doors::serve(listener, limits, app));
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

async fn ready(State(pages): State<Pages>, RawQuery(query): RawQuery) -> (StatusCode, String) {
    match Asked::parse(query.as_deref().unwrap_or_default()) {
        Ok(Asked::Ready) => verdict(pages.ops.good_word(), pages.ops.status().not_ready),
        Ok(Asked::RestartSafe { bears }) => restart_safe(&pages, bears).await,
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")),
    }
}

async fn restart_safe(pages: &Pages, bears: Option<u32>) -> (StatusCode, String) {
    let (answer, answered) = oneshot::channel();
    let asking = async {
        let asked = RestartAsked { bears, answer };
        pages.driver.send(asked).await.ok()?;
        answered.await.ok()
    };
    match tokio::time::timeout(ANSWER_WAIT, asking).await {
        Ok(Some(objections)) => verdict("safe to restart", objections),
        _ => verdict(
            "",
            vec![format!(
                "expected an answer of the daemon within {} s, got none",
                ANSWER_WAIT.as_secs()
            )],
        ),
    }
}

fn verdict(good: &str, against: Vec<String>) -> (StatusCode, String) {
    if against.is_empty() {
        (StatusCode::OK, format!("{good}\n"))
    } else {
        let lines: String = against.iter().map(|reason| format!("{reason}\n")).collect();
        (StatusCode::SERVICE_UNAVAILABLE, lines)
    }
}

/// What a probe wants to know.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Ready,
    RestartSafe { bears: Option<u32> },
}

/// A question that is not understood.
#[derive(Debug, Error)]
enum AskedError {
    #[error(
        "expected restart=safe, with bears=N beside it if another number of losses must be bearable, got {got:?}"
    )]
    Unknown { got: String },
    #[error("expected restart=safe beside bears=N")]
    BearsAlone,
}

impl Asked {
    /// Whatever is not understood is refused: a probe with a slip of the pen must not take readiness for safety.
    fn parse(query: &str) -> Result<Self, AskedError> {
        let (mut restart, mut bears) = (false, None);
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("restart", "safe")) => restart = true,
                Some(("bears", number)) if number.parse::<u32>().is_ok() => {
                    bears = number.parse().ok();
                }
                _ => return Err(AskedError::Unknown { got: part.into() }),
            }
        }
        if restart {
            Ok(Self::RestartSafe { bears })
        } else if bears.is_none() {
            Ok(Self::Ready)
        } else {
            Err(AskedError::BearsAlone)
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
    use tokio::net::{TcpSocket, TcpStream};
    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    async fn server(limits: ListenerLimits) -> (SocketAddr, Arc<OpsState>) {
        let (address, ops, _) = server_and_driver(limits).await;
        (address, ops)
    }

    async fn server_and_driver(
        limits: ListenerLimits,
    ) -> (SocketAddr, Arc<OpsState>, mpsc::Receiver<RestartAsked>) {
        let ops = Arc::new(OpsState::default());
        let (driver, asked) = mpsc::channel(4);
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let pages = Pages {
            ops: ops.clone(),
            driver,
        };
        (start(any, pages, limits).await.unwrap(), ops, asked)
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
    async fn a_restart_is_safe_if_the_driver_says_so_at_this_moment() {
        let (address, state, mut asked) = server_and_driver(LIMITS).await;
        // Ready is another question, and an old status is no answer.
        state.set_status("{}".into(), Vec::new());
        let answers = [vec!["job: step 3 bears 1 of 2".to_owned()], Vec::new()];
        let driver = tokio::spawn(async move {
            let mut seen = Vec::new();
            for answer in answers {
                let one: RestartAsked = asked.recv().await.unwrap();
                seen.push(one.bears);
                one.answer.send(answer).unwrap();
            }
            seen
        });
        let got = get(address, "/readyz?restart=safe").await;
        assert!(got.starts_with("HTTP/1.1 503"), "{got}");
        assert!(got.ends_with("job: step 3 bears 1 of 2\n"), "{got}");
        let got = get(address, "/readyz?restart=safe&bears=1").await;
        assert!(got.starts_with("HTTP/1.1 200"), "{got}");
        assert!(got.ends_with("safe to restart\n"), "{got}");
        assert_eq!(driver.await.unwrap(), [None, Some(1)]);
        // The driver is gone.
        let got = get(address, "/readyz?restart=safe").await;
        assert!(got.starts_with("HTTP/1.1 503"), "{got}");
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn a_question_that_is_not_understood_is_not_answered_with_ready() {
        let (address, state) = server(LIMITS).await;
        state.set_status("{}".into(), Vec::new());
        for query in ["restart=sure", "restart", "bears=2", "restart=safe&bears=x"] {
            let got = get(address, &format!("/readyz?{query}")).await;
            assert!(got.starts_with("HTTP/1.1 400"), "{query}: {got}");
        }
        assert!(get(address, "/readyz?").await.starts_with("HTTP/1.1 200"));
    }

    /// So many requests from there that do not end.
    async fn half_open(address: SocketAddr, from: [u8; 4], count: usize) -> Vec<TcpStream> {
        let mut held = Vec::new();
        for _ in 0..count {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from((from, 0))).unwrap();
            let mut stream = socket.connect(address).await.unwrap();
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nx: ")
                .await
                .unwrap();
            held.push(stream);
        }
        held
    }

    async fn get_from(address: SocketAddr, from: [u8; 4]) -> String {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        let request = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        rest(&mut stream).await
    }

    /// Whoever asks meanwhile is answered long before the first of them are cut.
    #[tokio::test]
    async fn half_open_requests_of_one_address_keep_nobody_out() {
        let (address, _) = server(LIMITS).await;
        let held = half_open(address, [127, 0, 0, 1], 2 * LIMITS.connections_max).await;
        for from in [[127, 0, 0, 2], [127, 0, 0, 1]] {
            let answer = timeout(LIMITS.head.within / 2, get_from(address, from)).await;
            let answer = answer.expect("an answer while others hold their requests open");
            assert!(answer.starts_with("HTTP/1.1 200"), "{from:?}: {answer}");
        }
        drop(held);
    }

    #[tokio::test]
    async fn a_head_that_does_not_end_is_cut_however_it_gets_on() {
        let within = Duration::from_millis(300);
        let limits = ListenerLimits {
            connections_max: 1,
            when_full: WhenFull::Wait,
            head: HeadLimits {
                within,
                ..LIMITS.head
            },
            ..LIMITS
        };
        let (address, _) = server(limits).await;
        let mut slow = half_open(address, [127, 0, 0, 1], 1).await.remove(0);
        let began = std::time::Instant::now();
        let dribbled = async {
            while slow.write_all(b"x").await.is_ok() {
                tokio::time::sleep(within / 20).await;
            }
        };
        timeout(PATIENCE, dribbled).await.expect("it is cut");
        assert!(began.elapsed() >= within);
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn a_head_that_is_too_long_is_refused() {
        let (address, _) = server(LIMITS).await;
        let path = |bytes: usize| format!("/healthz?{}", "x".repeat(bytes));
        let short = get(address, &path(LIMITS.head.bytes_max / 2)).await;
        assert!(short.starts_with("HTTP/1.1 200"), "{short}");
        let long = get(address, &path(LIMITS.head.bytes_max)).await;
        assert!(long.starts_with("HTTP/1.1 4"), "{long}");
    }

    #[tokio::test]
    async fn nobody_speaks_http_2_however_slowly_it_begins() {
        let (address, _) = server(LIMITS).await;
        for pieces in [
            &["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"][..],
            &["P", "RI *", " HTTP/2.0\r\n\r\n", "SM\r\n\r\n"],
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            for piece in pieces {
                stream.set_nodelay(true).unwrap();
                if stream.write_all(piece.as_bytes()).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let answer = rest(&mut stream).await;
            assert!(
                answer.is_empty() || answer.starts_with("HTTP/1.1 4"),
                "{answer:?}"
            );
        }
    }
}
