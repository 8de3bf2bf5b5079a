//! A reader's connection: runs, waits, plans, manifests, shards.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use pyo3::types::PyDict;
use storaged_sdk::wire::failed::FailedRestart;
use storaged_sdk::wire::local::{BoardKind, ByteRange, Role, Rung};
use storaged_sdk::wire::plan::{RestorePlan, Source};
use storaged_sdk::wire::{CheckpointState, Digest, Namespace, Rank, RunId, Step, UnknownState};
use storaged_sdk::{ClientError, ConnectOptions};

use crate::board::Board;
use crate::early::{Coming, Opener};
use crate::fault::{invalid, is_signalled, raised};
use crate::load::{Manifest, Opened, Shard};
use crate::turn::{limit, patience, take_turn};
use crate::verdict::verdict_dict;

/// How long a call may take that is given no limit.
pub(crate) const LIMIT_MS: u32 = 15_000;

/// A connection that saves nothing. One call at a time; others wait.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Client {
    connection: Arc<Mutex<storaged_sdk::Client>>,
    /// Whether another thread has ended it.
    is_hung_up: Arc<AtomicBool>,
}

pub(crate) fn options(
    py: Python<'_>,
    socket: PathBuf,
    namespace: &str,
    token: Vec<u8>,
) -> PyResult<ConnectOptions> {
    let namespace = Namespace::new(namespace).map_err(|error| invalid(py, &error))?;
    storaged_sdk::check_token(&token).map_err(|error| invalid(py, &error))?;
    Ok(ConnectOptions {
        socket,
        namespace,
        token,
        role: Role::Reader,
    })
}

/// The job's token as the process's environment has it; empty without one.
#[pyfunction]
pub(crate) fn token_of_environment(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    let token = py.detach(storaged_sdk::token_of_environment);
    let token = token.map_err(|error| invalid(py, &error))?;
    Ok(PyBytes::new(py, &token))
}

/// A run as `open_run` gave it.
pub(crate) fn run_of(py: Python<'_>, text: &str) -> PyResult<RunId> {
    text.parse().map_err(|error| invalid(py, &error))
}

fn digest_of(py: Python<'_>, text: &str) -> PyResult<Digest> {
    text.parse().map_err(|error| invalid(py, &error))
}

impl Client {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        limit_ms: u32,
        call: impl FnOnce(&mut storaged_sdk::Client, u32) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        take_turn(py, &self.connection, limit_ms, |client, left_ms| {
            // A broken connection is made anew by the next call, and an answer that is there at once is waited for by nobody.
            if self.is_hung_up.load(Ordering::Relaxed) {
                let request = "a call after hanging up";
                return Err(ClientError::CalledAway { request });
            }
            let is_hung_up = self.is_hung_up.clone();
            let is_ended = move || is_hung_up.load(Ordering::Relaxed) || is_signalled();
            client.be_patient(limit(left_ms).unless(is_ended));
            call(client, left_ms)
        })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket, namespace, token, timeout_ms=LIMIT_MS))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        namespace: &str,
        token: Vec<u8>,
        timeout_ms: u32,
    ) -> PyResult<Self> {
        let options = options(py, socket, namespace, token)?;
        let patience = patience(timeout_ms);
        let connected = py.detach(|| storaged_sdk::Client::connect_with(&options, patience));
        let (client, _) = connected.map_err(|error| raised(py, &error))?;
        Ok(Self {
            connection: Arc::new(Mutex::new(client)),
            is_hung_up: Arc::default(),
        })
    }

    /// Ends the connection for good, with all that the daemon holds for it. A call that another thread has on it fails
    /// within a twentieth of a second.
    fn hang_up(&self, py: Python<'_>) {
        self.is_hung_up.store(true, Ordering::Relaxed);
        py.detach(|| {
            let connection = self.connection.lock();
            connection.unwrap_or_else(PoisonError::into_inner).hang_up();
        });
    }

    fn open_run(&self, py: Python<'_>, timeout_ms: u32) -> PyResult<String> {
        let run = self.call(py, timeout_ms, storaged_sdk::Client::open_run)?;
        Ok(run.to_string())
    }

    /// A rank's board, `steps` or `batches`; with zero bytes the one that is there.
    #[pyo3(signature = (rank, kind, bytes, timeout_ms=LIMIT_MS))]
    fn board(
        &self,
        py: Python<'_>,
        rank: u32,
        kind: &str,
        bytes: u64,
        timeout_ms: u32,
    ) -> PyResult<Board> {
        let kind = match kind {
            "steps" => BoardKind::Steps,
            "batches" => BoardKind::Batches,
            other => {
                let text = format!("kind must be steps or batches, got {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        let rank = Rank::new(rank);
        let mapping = self.call(py, timeout_ms, |client, _| client.board(rank, kind, bytes))?;
        Ok(Board(mapping))
    }

    /// The state reached, the manifest's digest once there is one, and how many more node losses it bears now (of how many
    /// with every block in place), if it is coded.
    fn wait(
        &self,
        py: Python<'_>,
        run: &str,
        step: u64,
        state: &str,
        timeout_ms: u32,
    ) -> PyResult<(String, Option<String>, Option<Bears>)> {
        let state: CheckpointState = state
            .parse()
            .map_err(|error: UnknownState| PyValueError::new_err(error.to_string()))?;
        let (run, step) = (run_of(py, run)?, Step::new(step));
        let reached = self.call(py, timeout_ms, |client, left| {
            client.wait(run, step, state, left)
        })?;
        let manifest = reached.manifest.map(|digest| digest.to_string());
        let bears = reached.bears.map(|bears| (bears.losses, bears.of));
        Ok((reached.state.to_string(), manifest, bears))
    }

    #[pyo3(signature = (step, timeout_ms, allow_older=false))]
    fn plan<'py>(
        &self,
        py: Python<'py>,
        step: Option<u64>,
        timeout_ms: u32,
        allow_older: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let step = step.map(Step::new);
        let plan = self.call(py, timeout_ms, |client, left| {
            if allow_older {
                client.plan_allowing_older(step, left)
            } else {
                client.plan(step, left)
            }
        })?;
        plan_dict(py, &plan)
    }

    /// What a launcher should make of a restart.
    fn verdict<'py>(&self, py: Python<'py>, timeout_ms: u32) -> PyResult<Bound<'py, PyDict>> {
        let verdict = self.call(py, timeout_ms, storaged_sdk::Client::verdict)?;
        verdict_dict(py, &verdict)
    }

    /// Says that a restart from a step has failed; how all failed steps stand now.
    fn restart_failed(
        &self,
        py: Python<'_>,
        run: Option<&str>,
        step: u64,
        timeout_ms: u32,
    ) -> PyResult<Vec<FailedStep>> {
        let run = run.map(|run| run_of(py, run)).transpose()?;
        let failed = self.call(py, timeout_ms, |client, left| {
            client.restart_failed(run, Step::new(step), left)
        })?;
        let row =
            |one: FailedRestart| (one.run.to_string(), one.step.get(), one.times, one.wait_ms);
        Ok(failed.into_iter().map(row).collect())
    }

    #[pyo3(signature = (digest, timeout_ms=LIMIT_MS))]
    fn manifest(&self, py: Python<'_>, digest: &str, timeout_ms: u32) -> PyResult<Manifest> {
        let digest = digest_of(py, digest)?;
        let manifest = self.call(py, timeout_ms, |client, _| client.manifest(digest))?;
        Ok(Manifest(manifest))
    }

    /// Brings byte ranges `(offset, length)` of a rank's shard into this node's RAM; none means all of it. What never left
    /// the node is compared with fingerprints (`verify="fast"`), or with BLAKE3 digests like all else (`verify="full"`). An early one may
    /// still come when it is given: what is read of it is waited for.
    #[expect(
        clippy::too_many_arguments,
        reason = "one per keyword of the Python method"
    )]
    #[pyo3(signature = (manifest, rank, ranges, timeout_ms, without_own_ram=false, verify="fast", early=false))]
    fn open_shard(
        &self,
        py: Python<'_>,
        manifest: &Manifest,
        rank: u32,
        ranges: Vec<(u64, u64)>,
        timeout_ms: u32,
        without_own_ram: bool,
        verify: &str,
        early: bool,
    ) -> PyResult<Shard> {
        let is_full = match verify {
            "fast" => false,
            "full" => true,
            other => {
                let text = format!("expected verify as 'fast' or 'full', got {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        let ranges = ranges
            .into_iter()
            .map(|(offset, length)| ByteRange { offset, length })
            .collect();
        let rank = Rank::new(rank);
        let without = without_own_ram.then_some(Rung::OwnRam);
        if !early {
            let opened = self.call(py, timeout_ms, |client, left| {
                client.open_shard_without(&manifest.0, rank, ranges, left, without)
            })?;
            let opened = if is_full { opened.by_digests() } else { opened };
            return Ok(Shard(Opened::There(opened)));
        }
        let opened = self.call(py, timeout_ms, |client, left| {
            client.open_shard_early(&manifest.0, rank, ranges, left, without)
        })?;
        let opened = if is_full { opened.by_digests() } else { opened };
        Ok(Shard(match opened.into_whole() {
            Ok(there) => Opened::There(there),
            Err(coming) => Opened::Coming(Coming::new(
                *coming,
                Opener {
                    connection: self.connection.clone(),
                    is_hung_up: self.is_hung_up.clone(),
                    manifest: manifest.0.name(),
                    rank,
                },
            )),
        }))
    }

    #[pyo3(signature = (manifest, rank, timeout_ms=LIMIT_MS))]
    fn close_shard(
        &self,
        py: Python<'_>,
        manifest: &Manifest,
        rank: u32,
        timeout_ms: u32,
    ) -> PyResult<()> {
        self.call(py, timeout_ms, |client, _| {
            client.close_shard(manifest.0.name(), Rank::new(rank))
        })
    }

    /// The daemon's state as JSON.
    #[pyo3(signature = (timeout_ms=LIMIT_MS))]
    fn status(&self, py: Python<'_>, timeout_ms: u32) -> PyResult<String> {
        self.call(py, timeout_ms, |client, _| client.status())
    }

    /// The namespace's checkpoints: (run, step, state, durable, world size, bytes, manifest).
    #[allow(clippy::type_complexity)]
    #[pyo3(signature = (namespace, timeout_ms=LIMIT_MS))]
    fn list(
        &self,
        py: Python<'_>,
        namespace: &str,
        timeout_ms: u32,
    ) -> PyResult<Vec<(String, u64, String, Durable, u32, u64, Option<String>)>> {
        let namespace = Namespace::new(namespace).map_err(|error| invalid(py, &error))?;
        let infos = self.call(py, timeout_ms, |client, _| client.list(Some(namespace)))?;
        let row = |info: storaged_sdk::wire::local::CheckpointInfo| {
            let manifest = info.manifest.map(|digest| digest.to_string());
            let state = info.state.to_string();
            let (run, step) = (info.run.to_string(), info.step.get());
            (
                run,
                step,
                state,
                info.durable,
                info.world_size.get(),
                info.length,
                manifest,
            )
        };
        Ok(infos.into_iter().map(row).collect())
    }
}

/// A step that restarts fail from: run, step, how often, and milliseconds until it is offered again; none: not before it is lifted.
type FailedStep = (String, u64, u32, Option<u64>);

/// Whether the durable tier holds a checkpoint.
type Durable = bool;

/// Node losses that a checkpoint survives now, and with every block in place.
type Bears = (u32, u32);

/// What plans and verdicts say of a checkpoint alike.
pub(crate) fn plan_head<'py>(py: Python<'py>, plan: &RestorePlan) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("run", plan.run.to_string())?;
    dict.set_item("step", plan.step.get())?;
    dict.set_item("manifest", plan.manifest.to_string())?;
    dict.set_item("world_size", plan.world_size.get())?;
    dict.set_item("state", plan.state.as_str())?;
    dict.set_item("expected_ms", plan.expected_ms)?;
    Ok(dict)
}

fn plan_dict<'py>(py: Python<'py>, plan: &RestorePlan) -> PyResult<Bound<'py, PyDict>> {
    let dict = plan_head(py, plan)?;
    let shards: Vec<(u32, u64, String)> = plan
        .shards
        .iter()
        .map(|shard| (shard.rank.get(), shard.length, source_text(&shard.source)))
        .collect();
    dict.set_item("shards", shards)?;
    let passed_over: Vec<(String, u64, &str)> = plan
        .passed_over
        .iter()
        .map(|other| {
            (
                other.run.to_string(),
                other.step.get(),
                other.reason.as_str(),
            )
        })
        .collect();
    dict.set_item("passed_over", passed_over)?;
    Ok(dict)
}

fn source_text(source: &Source) -> String {
    match source {
        Source::Ram(node) => format!("ram of {node}"),
        Source::Decode(nodes) => {
            let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
            format!("decode from {}", names.join(", "))
        }
        Source::Durable => "durable tier".into(),
    }
}
