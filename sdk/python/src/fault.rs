//! Which exception of `storaged.errors` a failure becomes.

use std::error::Error;

use pyo3::prelude::*;
use storaged_sdk::ClientError;
use storaged_sdk::wire::RefusalCode;

/// The exception for a failed call.
pub(crate) fn raised(py: Python<'_>, error: &ClientError) -> PyErr {
    exception(py, class_of(error), &sentence(error))
}

/// The exception for an argument that cannot be.
pub(crate) fn invalid(py: Python<'_>, error: &dyn Error) -> PyErr {
    exception(py, "InvalidArgument", &sentence(error))
}

fn exception(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let build = || -> PyResult<PyErr> {
        let class = py.import("storaged.errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call1((text,))?))
    };
    build().unwrap_or_else(|failure| failure)
}

fn class_of(error: &ClientError) -> &'static str {
    match error {
        ClientError::Unavailable { .. } | ClientError::Broken { .. } => "DaemonUnavailable",
        ClientError::Refused(refusal) => class_of_code(refusal.code),
        ClientError::TimedOut { .. } => "WaitTimeout",
        ClientError::Corrupt { .. }
        | ClientError::WrongLeaves { .. }
        | ClientError::Manifest(_) => "CorruptData",
        ClientError::Protocol { .. } | ClientError::Wire(_) => "ProtocolError",
        ClientError::Slot(_) | ClientError::Outside { .. } => "ArenaError",
    }
}

fn class_of_code(code: RefusalCode) -> &'static str {
    match code {
        RefusalCode::Malformed | RefusalCode::Version => "ProtocolError",
        RefusalCode::UnknownNamespace => "UnknownNamespace",
        RefusalCode::WrongToken | RefusalCode::WrongUser => "AccessDenied",
        RefusalCode::OlderRun => "RunFenced",
        RefusalCode::StepNotNewer => "StepConflict",
        RefusalCode::WorldSize => "WorldSizeMismatch",
        RefusalCode::ShardTooLong | RefusalCode::BudgetFull => "ArenaTooSmall",
        RefusalCode::Busy => "Busy",
        RefusalCode::WrongSlot | RefusalCode::NotAttached => "ProtocolError",
        RefusalCode::NoCheckpoint => "NoCheckpointError",
        RefusalCode::TooManyLost => "TooManyLost",
        RefusalCode::Corrupt => "CorruptData",
        RefusalCode::Abandoned => "CheckpointAbandoned",
        RefusalCode::TimedOut => "WaitTimeout",
        RefusalCode::Durable => "DurableTierError",
        RefusalCode::Draining => "DaemonUnavailable",
    }
}

/// The error and its causes in one line.
fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
