//! The HTTP interface that clients of HyperPod's managed tiered checkpointing speak (`/v1/cp`), on the same slots,
//! encoding and promises as the SDK: it is a client of the daemon's own local protocol, in the same process, and decides
//! nothing about checkpoints.
//!
//! Order of reading: this file (paths), `names` (what requests say), `save` and `load` (shards in and out), `footer` (what
//! stands behind a body), `jobs` (what is known of a namespace, and when a new run begins), `record` (what all nodes know
//! of it), `retain` (older steps), `local` (requests to the daemon), `fault` (what can go wrong).
//!
//! A checkpoint of a job of W ranks has W + 1 here: clients save their metadata as one more rank, last. Its shard commits
//! the step.

mod fault;
mod footer;
mod jobs;
mod load;
mod local;
mod names;
mod record;
mod retain;
mod save;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use storaged_wire::CheckpointState;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::config::{Config, HyperpodSection, LatestName};
use crate::http::OpsState;
use crate::http::doors::{self, Cut, HeadLimits, ListenerLimits};
use crate::http::places::WhenFull;
use crate::stage::StageEvent;
use fault::{ApiFault, answer};
use jobs::HyperJobs;
use load::Outgoing;
use local::Connector;
use names::{Checksum, Creation, HyperName, Wanted};
use save::Incoming;

/// A node has some dozens of ranks, each with a connection or two, and a body may take as long as it moves. That is cut later
/// than any answer takes, and so is one on which the next request does not come: clients keep connections. No shard on its way
/// gives way to another.
const DOORS: ListenerLimits = ListenerLimits {
    connections_max: 512,
    when_full: WhenFull::Wait,
    cut: Cut::WhenStill(STILL_MAX),
    head: HeadLimits {
        within: STILL_MAX,
        bytes_max: 400 << 10,
    },
};
const STILL_MAX: Duration = Duration::from_secs(90);
const SHARD_META: &str = "shard-meta";
/// What is of no use any more, or must give way, is looked for so often.
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// What the interface needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    listen: SocketAddr,
    /// Of all requests, and of all its namespaces; empty for none.
    token: String,
    save_wait: Duration,
    budget: u64,
    /// The state from which a checkpoint counts as safe.
    safe: CheckpointState,
    /// The state from which it is offered.
    offered: CheckpointState,
    has_tier: bool,
    has_peers: bool,
}

impl Settings {
    pub fn of(config: &Config, section: &HyperpodSection, token: String) -> Self {
        let safe = match config.geometry {
            Some(_) => CheckpointState::Protected,
            None => CheckpointState::Committed,
        };
        Self {
            listen: section.listen,
            token,
            save_wait: Duration::from_millis(section.save_wait.as_ms()),
            budget: config.budget,
            safe,
            offered: match section.latest {
                LatestName::Protected => safe,
                LatestName::Committed => CheckpointState::Committed,
            },
            has_tier: config.durable.is_some(),
            has_peers: !config.peers.is_empty(),
        }
    }
}

#[derive(Debug, Clone)]
struct Api {
    jobs: Arc<HyperJobs>,
    ops: Arc<OpsState>,
    /// Digest of the token: comparing digests takes the same time whatever is wrong.
    token: Option<blake3::Hash>,
}

/// Starts serving and says where.
///
/// # Errors
/// As the system says, if the address cannot be bound.
pub async fn start(
    settings: Settings,
    events: mpsc::Sender<StageEvent>,
    ops: Arc<OpsState>,
) -> std::io::Result<SocketAddr> {
    let listener = tokio::net::TcpListener::bind(settings.listen).await?;
    let bound = listener.local_addr()?;
    let connector = Connector::new(events, &settings.token);
    let token = Some(&settings.token).filter(|token| !token.is_empty());
    let token = token.map(|token| blake3::hash(token.as_bytes()));
    let jobs = Arc::new(HyperJobs::new(connector, settings, ops.clone()));
    tokio::spawn(tidy(jobs.clone()));
    let app = router(Api { jobs, ops, token });
    tokio::spawn(doors::serve(listener, DOORS, app));
    Ok(bound)
}

async fn tidy(jobs: Arc<HyperJobs>) {
    let mut every = interval(TIDY_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        jobs.tidy();
    }
}

fn router(api: Api) -> Router {
    let namespaces = get(begin).post(create).delete(delete_namespace);
    let shards = get(get_shard).post(post_shard).delete(delete_shard);
    Router::new()
        .route("/v1/cp/namespaces/{namespace}", namespaces)
        .route("/v1/cp/checkpoints/{namespace}/latest", get(latest))
        .route("/v1/cp/checkpoints/{namespace}/{rank}/{step}", shards)
        .route("/v1/cp/cluster/reset", post(reset))
        .layer(from_fn_with_state(api.clone(), check_token))
        .route("/health", get(health))
        .fallback(|| async { ApiFault::NoPath })
        .method_not_allowed_fallback(|| async { ApiFault::NoMethod })
        .layer(from_fn_with_state(api.clone(), count))
        .layer(DefaultBodyLimit::disable())
        .with_state(api)
}

async fn count(State(api): State<Api>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    api.ops.metrics.observe_hyperpod(response.status().as_u16());
    response
}

async fn check_token(
    State(api): State<Api>,
    request: Request,
    next: Next,
) -> Result<Response, ApiFault> {
    let said = request.headers().get(header::AUTHORIZATION);
    let said = said.and_then(bearer).map(|token| blake3::hash(&token));
    if api.token.is_none_or(|token| said == Some(token)) {
        Ok(next.run(request).await)
    } else {
        Err(ApiFault::Unauthorized)
    }
}

/// The token of `Bearer TOKEN`, or the password of `Basic`, which is what clients send that know of users only.
fn bearer(header: &HeaderValue) -> Option<Vec<u8>> {
    let text = header.to_str().ok()?;
    match text.split_once(' ')? {
        ("Bearer", token) => Some(token.trim().into()),
        ("Basic", pair) => {
            let pair = STANDARD.decode(pair.trim()).ok()?;
            let colon = pair.iter().position(|byte| *byte == b':')?;
            Some(pair[colon + 1..].to_vec())
        }
        _ => None,
    }
}

/// Does what a request asks for to its end, also if whoever asked does not wait for it: what it holds is given back by it.
async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiFault>> + Send + 'static,
) -> Result<T, ApiFault> {
    tokio::spawn(work).await.map_err(|_| ApiFault::Ended)?
}

fn ok(word: &str) -> Response {
    answer(StatusCode::OK, &json!({"status": word}))
}

async fn health() -> Response {
    ok("healthy")
}

async fn begin(
    State(api): State<Api>,
    Path(namespace): Path<String>,
) -> Result<Response, ApiFault> {
    let name = HyperName::parse(&namespace)?;
    to_its_end(async move {
        let job = api.jobs.job(name);
        let record = api.jobs.begin(&job).await?;
        let body = json!({
            "num_ranks": record.world().get(),
            "steps_to_retain_per_rank": record.steps_retained,
        });
        Ok(answer(StatusCode::OK, &body))
    })
    .await
}

async fn create(
    State(api): State<Api>,
    Path(namespace): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiFault> {
    let name = HyperName::parse(&namespace)?;
    let creation = Creation::parse(query.as_deref())?;
    to_its_end(async move {
        let job = api.jobs.job(name);
        api.jobs.create(&job, creation).await?;
        Ok(ok("created"))
    })
    .await
}

async fn delete_namespace(
    State(api): State<Api>,
    Path(namespace): Path<String>,
) -> Result<Response, ApiFault> {
    let name = HyperName::parse(&namespace)?;
    to_its_end(async move {
        api.jobs.delete(&api.jobs.job(name)).await?;
        Ok(ok("deleted"))
    })
    .await
}

async fn reset(State(api): State<Api>) -> Result<Response, ApiFault> {
    to_its_end(async move {
        for job in api.jobs.all().await? {
            match api.jobs.delete(&job).await {
                Ok(()) | Err(ApiFault::NoNamespace(_)) => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(ok("reset"))
    })
    .await
}

async fn latest(
    State(api): State<Api>,
    Path(namespace): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiFault> {
    let job = api.jobs.job(HyperName::parse(&namespace)?);
    let limit = names::limit(query.as_deref())?;
    let steps = load::latest(&api.jobs, &job, limit).await?;
    Ok(answer(StatusCode::OK, &json!(steps)))
}

/// Namespace, rank and step of a path.
type ShardPath = Path<(String, String, String)>;

async fn post_shard(
    State(api): State<Api>,
    Path((namespace, rank, step)): ShardPath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiFault> {
    let parsed = incoming(&namespace, &rank, &step, &headers);
    to_its_end(async move {
        let (name, incoming) = match parsed {
            Ok(parsed) => parsed,
            Err(fault) => {
                save::drain(body).await;
                return Err(fault);
            }
        };
        let (job, length) = (api.jobs.job(name), incoming.length);
        let state = save::save(&api.jobs, &job, &incoming, body).await?;
        api.ops.metrics.observe_hyperpod_received(length);
        let body = json!({"status": "ok", "state": state.as_str()});
        Ok(answer(StatusCode::OK, &body))
    })
    .await
}

fn incoming(
    namespace: &str,
    rank: &str,
    step: &str,
    headers: &HeaderMap,
) -> Result<(HyperName, Incoming), ApiFault> {
    let meta = headers.get(SHARD_META).map(HeaderValue::as_bytes);
    let incoming = Incoming {
        rank: names::rank(rank)?,
        step: names::step(step)?,
        length: content_length(headers)?,
        checksum: meta.map(Checksum::parse).transpose()?,
    };
    Ok((HyperName::parse(namespace)?, incoming))
}

fn content_length(headers: &HeaderMap) -> Result<u64, ApiFault> {
    let length = headers.get(header::CONTENT_LENGTH);
    let length = length
        .ok_or(ApiFault::NoLength)?
        .to_str()
        .unwrap_or_default();
    length.parse().map_err(|_| ApiFault::NoLength)
}

async fn get_shard(
    State(api): State<Api>,
    Path((namespace, rank, step)): ShardPath,
    headers: HeaderMap,
) -> Result<Response, ApiFault> {
    let job = api.jobs.job(HyperName::parse(&namespace)?);
    let (rank, step) = (names::rank(&rank)?, names::step(&step)?);
    let range = headers.get(header::RANGE).and_then(|it| it.to_str().ok());
    let outgoing = load::load(&api.jobs, &job, rank, step, range).await?;
    api.ops.metrics.observe_hyperpod_sent(outgoing.length);
    Ok(sent(outgoing))
}

fn sent(outgoing: Outgoing) -> Response {
    let footer = outgoing.footer;
    let mut response = outgoing.body.into_response();
    let headers = response.headers_mut();
    let mut set = |name, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    set(header::CONTENT_TYPE, "application/octet-stream");
    set(header::ACCEPT_RANGES, "bytes");
    set(header::CONTENT_LENGTH, &outgoing.length.to_string());
    set(
        header::HeaderName::from_static(SHARD_META),
        &footer.checksum.header(),
    );
    set(
        header::HeaderName::from_static("storaged-rung"),
        &format!("{:?}", outgoing.rung),
    );
    if let Wanted::Part { first, last } = outgoing.wanted {
        let range = format!("bytes {first}-{last}/{}", footer.length);
        set(header::CONTENT_RANGE, &range);
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    response
}

async fn delete_shard(
    State(api): State<Api>,
    Path((namespace, rank, step)): ShardPath,
) -> Result<Response, ApiFault> {
    let name = HyperName::parse(&namespace)?;
    let (rank, step) = (names::rank(&rank)?, names::step(&step)?);
    to_its_end(async move {
        let job = api.jobs.job(name);
        load::check_there(&api.jobs, &job, rank, step).await?;
        let deleted = api.jobs.change(&job, |record| {
            record.delete(step, rank);
            true
        });
        deleted.await?;
        Ok(ok("deleted"))
    })
    .await
}
