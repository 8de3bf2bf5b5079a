//! A reader's connection: runs, waits, plans, manifests, shards.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use storaged_sdk::wire::local::{ByteRange, Role, Rung};
use storaged_sdk::wire::plan::{RestorePlan, Source};
use storaged_sdk::wire::{CheckpointState, Digest, Namespace, Rank, RunId, Step};
use storaged_sdk::{ClientError, ConnectOptions};

use crate::fault::{invalid, raised};
use crate::load::{Manifest, Shard};

/// A connection that saves nothing. One call at a time; others wait.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Client(Mutex<storaged_sdk::Client>);

pub(crate) fn options(
    py: Python<'_>,
    socket: PathBuf,
    namespace: &str,
    token: Vec<u8>,
) -> PyResult<ConnectOptions> {
    let namespace = Namespace::new(namespace).map_err(|error| invalid(py, &error))?;
    Ok(ConnectOptions {
        socket,
        namespace,
        token,
        role: Role::Reader,
    })
}

/// A poisoned lock only says that another thread panicked between two calls; the connection knows if it is broken.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        call: impl FnOnce(&mut storaged_sdk::Client) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        py.detach(|| call(&mut locked(&self.0)))
            .map_err(|error| raised(py, &error))
    }
}

#[pymethods]
impl Client {
    #[new]
    fn new(py: Python<'_>, socket: PathBuf, namespace: &str, token: Vec<u8>) -> PyResult<Self> {
        let options = options(py, socket, namespace, token)?;
        let connected = py.detach(|| storaged_sdk::Client::connect(&options));
        let (client, _) = connected.map_err(|error| raised(py, &error))?;
        Ok(Self(Mutex::new(client)))
    }

    fn open_run(&self, py: Python<'_>, timeout_ms: u32) -> PyResult<String> {
        let run = self.call(py, |client| client.open_run(timeout_ms))?;
        Ok(run.to_string())
    }

    /// The state reached, and the manifest's digest once there is one.
    fn wait(
        &self,
        py: Python<'_>,
        run: &str,
        step: u64,
        state: &str,
        timeout_ms: u32,
    ) -> PyResult<(String, Option<String>)> {
        let state: CheckpointState = state
            .parse()
            .map_err(pyo3::exceptions::PyValueError::new_err::<String>)?;
        let (run, step) = (run_of(py, run)?, Step::new(step));
        let (state, manifest) =
            self.call(py, |client| client.wait(run, step, state, timeout_ms))?;
        Ok((state.to_string(), manifest.map(|digest| digest.to_string())))
    }

    fn plan<'py>(
        &self,
        py: Python<'py>,
        step: Option<u64>,
        timeout_ms: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        let plan = self.call(py, |client| client.plan(step.map(Step::new), timeout_ms))?;
        plan_dict(py, &plan)
    }

    fn manifest(&self, py: Python<'_>, digest: &str) -> PyResult<Manifest> {
        let digest = digest_of(py, digest)?;
        Ok(Manifest(self.call(py, |client| client.manifest(digest))?))
    }

    /// Brings byte ranges `(offset, length)` of a rank's shard into this node's RAM; none means all of it.
    #[pyo3(signature = (manifest, rank, ranges, timeout_ms, without_own_ram=false))]
    fn open_shard(
        &self,
        py: Python<'_>,
        manifest: &Manifest,
        rank: u32,
        ranges: Vec<(u64, u64)>,
        timeout_ms: u32,
        without_own_ram: bool,
    ) -> PyResult<Shard> {
        let ranges = ranges
            .into_iter()
            .map(|(offset, length)| ByteRange { offset, length })
            .collect();
        let rank = Rank::new(rank);
        let without = without_own_ram.then_some(Rung::OwnRam);
        let opened = self.call(py, |client| {
            client.open_shard_without(&manifest.0, rank, ranges, timeout_ms, without)
        })?;
        Ok(Shard(opened))
    }

    fn close_shard(&self, py: Python<'_>, manifest: &Manifest, rank: u32) -> PyResult<()> {
        self.call(py, |client| {
            client.close_shard(manifest.0.name(), Rank::new(rank))
        })
    }

    /// The daemon's state as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, storaged_sdk::Client::status)
    }

    /// The namespace's checkpoints: (run, step, state, durable, world size, bytes, manifest).
    #[allow(clippy::type_complexity)]
    fn list(
        &self,
        py: Python<'_>,
        namespace: &str,
    ) -> PyResult<Vec<(String, u64, String, Durable, u32, u64, Option<String>)>> {
        let namespace = Namespace::new(namespace).map_err(|error| invalid(py, &error))?;
        let infos = self.call(py, |client| client.list(Some(namespace)))?;
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

/// Whether the durable tier holds a checkpoint.
type Durable = bool;

fn plan_dict<'py>(py: Python<'py>, plan: &RestorePlan) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("run", plan.run.to_string())?;
    dict.set_item("step", plan.step.get())?;
    dict.set_item("manifest", plan.manifest.to_string())?;
    dict.set_item("world_size", plan.world_size.get())?;
    dict.set_item("state", plan.state.as_str())?;
    dict.set_item("expected_ms", plan.expected_ms)?;
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
