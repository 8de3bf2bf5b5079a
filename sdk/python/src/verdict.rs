//! The verdict on a restart, as dictionaries, lists and words; `storaged/_verdict.py` makes its types of them.

use crate::control::plan_head;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use storaged_sdk::wire::plan::{RestorePlan, ShardSource, Source, Unrestorable};
use storaged_sdk::wire::verdict::{ExpectedTime, Reason, RestartVerdict, Returning, WaitingGain};

pub(crate) fn verdict_dict<'py>(
    py: Python<'py>,
    verdict: &RestartVerdict,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("namespace", verdict.namespace.as_str())?;
    dict.set_item("verdict", verdict.verdict.as_str())?;
    dict.set_item("exit_code", verdict.exit_code())?;
    dict.set_item("reasons", all(&verdict.reasons, |it| reason(py, it))?)?;
    let offered = verdict.plan.as_ref().map(|it| plan(py, it)).transpose()?;
    dict.set_item("plan", offered)?;
    dict.set_item("expected", all(&verdict.expected, |it| expected(py, it))?)?;
    let newest = verdict.newest_seen;
    dict.set_item(
        "newest_seen",
        newest.map(|it| (it.run.to_string(), it.step.get())),
    )?;
    dict.set_item(
        "passed_over",
        all(&verdict.passed_over, |it| passed_over(py, it))?,
    )?;
    dict.set_item("waiting", all(&verdict.waiting, |it| gain(py, it))?)?;
    Ok(dict)
}

fn all<'py, T>(
    items: &[T],
    convert: impl Fn(&T) -> PyResult<Bound<'py, PyDict>>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    items.iter().map(convert).collect()
}

fn reason<'py>(py: Python<'py>, reason: &Reason) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("code", reason.code.as_str())?;
    dict.set_item("text", &reason.text)?;
    Ok(dict)
}

fn plan<'py>(py: Python<'py>, plan: &RestorePlan) -> PyResult<Bound<'py, PyDict>> {
    let dict = plan_head(py, plan)?;
    dict.set_item("shards", all(&plan.shards, |it| shard(py, it))?)?;
    Ok(dict)
}

fn shard<'py>(py: Python<'py>, shard: &ShardSource) -> PyResult<Bound<'py, PyDict>> {
    let (source, nodes) = match &shard.source {
        Source::Ram(node) => ("ram", vec![node.to_string()]),
        Source::Decode(nodes) => ("decode", nodes.iter().map(ToString::to_string).collect()),
        Source::Durable => ("durable", Vec::new()),
    };
    let dict = PyDict::new(py);
    dict.set_item("rank", shard.rank.get())?;
    dict.set_item("nbytes", shard.length)?;
    dict.set_item("source", source)?;
    dict.set_item("nodes", nodes)?;
    Ok(dict)
}

fn expected<'py>(py: Python<'py>, part: &ExpectedTime) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("stretch", part.stretch.as_str())?;
    dict.set_item("ms", part.ms)?;
    dict.set_item("rate", part.rate.as_str())?;
    Ok(dict)
}

fn passed_over<'py>(py: Python<'py>, one: &Unrestorable) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("run", one.run.to_string())?;
    dict.set_item("step", one.step.get())?;
    dict.set_item("cause", one.cause_word())?;
    dict.set_item("text", &one.reason)?;
    Ok(dict)
}

fn gain<'py>(py: Python<'py>, gain: &WaitingGain) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("run", gain.at.run.to_string())?;
    dict.set_item("step", gain.at.step.get())?;
    dict.set_item("verdict", gain.verdict.as_str())?;
    dict.set_item("returning", all(&gain.returning, |it| returning(py, it))?)?;
    dict.set_item("text", gain.to_string())?;
    Ok(dict)
}

fn returning<'py>(py: Python<'py>, returning: &Returning) -> PyResult<Bound<'py, PyDict>> {
    let names: Vec<&str> = returning.of.iter().map(|node| node.as_str()).collect();
    let dict = PyDict::new(py);
    dict.set_item("any", returning.any)?;
    dict.set_item("of", names)?;
    dict.set_item("basis", returning.basis.as_str())?;
    Ok(dict)
}
