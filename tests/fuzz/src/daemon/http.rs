//! HTTP for HyperPod's clients and for operators, as it comes on a connection: bytes to the parser, the handlers, and what they ask
//! the daemon, which answers as a node with one job does. What is answered is HTTP, and nothing of it is a fault of the server's own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use storaged::config::{Config, ConfigFile};
use storaged::http::{OpsState, RestartAsked};
use storaged::hyperpod;
use storaged::stage::{Answer, StageEvent};
use storaged_wire::local::{LOCAL_VERSION, Reply, Request};
use storaged_wire::{ChunkSize, Generation, NodeName, Refusal, RefusalCode, RunId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::Inputs;

/// The token of all requests.
const TOKEN: &str = "a token of tests";
/// What is read of an answer.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// An answer that has not come by then never comes: handlers wait for the daemon, which answers at once here.
const ANSWER_WAIT: Duration = Duration::from_secs(60);

/// The servers, and the runtime on which they go on between inputs.
struct Servers {
    runtime: Runtime,
    hyperpod: SocketAddr,
    operators: SocketAddr,
}

thread_local! {
    static SERVERS: Servers = Servers::start();
}

impl Servers {
    fn start() -> Self {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().expect("a runtime");
        let (hyperpod, operators) = runtime.block_on(serve());
        Self {
            runtime,
            hyperpod,
            operators,
        }
    }
}

async fn serve() -> (SocketAddr, SocketAddr) {
    let (events, asked) = mpsc::channel(64);
    tokio::spawn(answers(asked));
    let ops = Arc::new(OpsState::default());
    ops.set_status("{}".into(), Vec::new());
    let config = config();
    let section = config.hyperpod.as_ref().expect("it is configured");
    let settings = hyperpod::Settings::of(&config, section, TOKEN.into());
    let started = hyperpod::start(settings, events, ops.clone()).await;
    let (driver, safe) = mpsc::channel(64);
    tokio::spawn(says_safe(safe));
    let operators = free_address().await;
    let pages = storaged::http::serve(operators, ops, driver).await;
    pages.expect("a free address");
    (started.expect("a free address"), operators)
}

async fn free_address() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let bound = listener.and_then(|listener| listener.local_addr());
    bound.expect("a free address")
}

fn config() -> Config {
    let folder = std::env::temp_dir().join(format!("storaged-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path: PathBuf = folder.join("storaged.toml");
    let text = "[memory]\nbudget = \"64MiB\"\n[hyperpod]\nlisten = \"127.0.0.1:0\"\nwithout_token = true\n";
    std::fs::write(&path, text).expect("a file");
    let config = ConfigFile::load(&path).and_then(ConfigFile::validate);
    let _ = std::fs::remove_dir_all(&folder);
    config.expect("a configuration")
}

/// The daemon: one node, no job, and runs for whoever opens them.
async fn answers(mut asked: mpsc::Receiver<StageEvent>) {
    while let Some(event) = asked.recv().await {
        if let StageEvent::Request {
            request, answer, ..
        } = event
        {
            let reply = reply_to(&request);
            // Whoever has asked may be gone.
            let _ = answer.send(Answer { reply, slot: None });
        }
    }
}

fn reply_to(request: &Request) -> Reply {
    match request {
        Request::Hello { version, .. } if *version == LOCAL_VERSION => Reply::Welcome {
            node: NodeName::new("n0").expect("a name"),
            generation: Generation::new(1),
            geometry: None,
            chunk: ChunkSize::new(4096).expect("a size"),
        },
        Request::OpenRun { .. } => Reply::RunOpened { run: RunId::new(1) },
        Request::List { .. } => Reply::Checkpoints(Vec::new()),
        Request::ReleaseSlot { .. } | Request::CloseShard { .. } => Reply::Done,
        Request::AcquireSlot { .. } => refused(RefusalCode::BudgetFull),
        _ => refused(RefusalCode::NoCheckpoint),
    }
}

fn refused(code: RefusalCode) -> Reply {
    Reply::Refused(Refusal::new(code, "there is nothing"))
}

async fn says_safe(mut asked: mpsc::Receiver<RestartAsked>) {
    while let Some(RestartAsked { answer, .. }) = asked.recv().await {
        let _ = answer.send(Vec::new());
    }
}

/// The target: the first byte says whose port, the others are what comes on one connection.
pub fn http(bytes: &[u8]) {
    let Some((whose, said)) = bytes.split_first() else {
        return;
    };
    SERVERS.with(|servers| {
        let address = if whose.is_multiple_of(2) {
            servers.hyperpod
        } else {
            servers.operators
        };
        let answer = servers.runtime.block_on(exchange(address, said));
        check(&answer);
    });
}

async fn exchange(address: SocketAddr, said: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    // A server that has heard enough closes the connection.
    let _ = stream.write_all(said).await;
    let _ = stream.shutdown().await;
    let mut answer = vec![0; ANSWER_BYTES_MAX];
    let mut length = 0;
    let reading = async {
        while let Ok(read @ 1..) = stream.read(&mut answer[length..]).await {
            length += read;
        }
    };
    let ended = tokio::time::timeout(ANSWER_WAIT, reading).await;
    assert!(ended.is_ok(), "the connection is not closed");
    answer.truncate(length);
    answer
}

/// Answers begin as HTTP does, and say nothing of a fault that has no name.
fn check(answer: &[u8]) {
    if answer.is_empty() {
        return;
    }
    assert!(answer.starts_with(b"HTTP/1."), "no HTTP: {answer:?}");
    let status = answer.get(9..12).unwrap_or_default();
    assert_ne!(status, b"500", "{}", String::from_utf8_lossy(answer));
}

/// Every path and method, with what clients send beside.
pub fn http_seeds() -> Inputs {
    let hyperpod = [
        "GET /health",
        "GET /v1/cp/namespaces/job",
        "POST /v1/cp/namespaces/job?num_ranks=2&steps_to_retain_per_rank=1",
        "DELETE /v1/cp/namespaces/job",
        "GET /v1/cp/checkpoints/job/latest?limit=3",
        "GET /v1/cp/checkpoints/job/0/5",
        "POST /v1/cp/checkpoints/job/0/5",
        "DELETE /v1/cp/checkpoints/job/0/5",
        "POST /v1/cp/cluster/reset",
        "PUT /v1/cp/nothing",
    ];
    let operators = [
        "GET /",
        "GET /metrics",
        "GET /healthz",
        "GET /readyz?restart=safe&bears=1",
        "GET /status",
    ];
    let all = hyperpod.iter().map(|line| (0, *line));
    let all = all.chain(operators.iter().map(|line| (1, *line)));
    let seeds = all.enumerate().map(|(at, (whose, line))| {
        let text = format!(
            "{line} HTTP/1.1\r\nHost: n0\r\nAuthorization: Bearer {TOKEN}\r\nRange: bytes=0-9\r\n\
             Shard-Meta: 0000000000000000\r\nContent-Length: 10\r\n\r\n0123456789"
        );
        (
            format!("request-{at}"),
            [&[whose], text.as_bytes()].concat(),
        )
    });
    seeds.collect()
}
