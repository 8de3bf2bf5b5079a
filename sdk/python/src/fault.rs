//! Which exception of `storaged.errors` a failure becomes.

use std::cell::RefCell;
use std::error::Error;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use storaged_sdk::ClientError;
use storaged_sdk::wire::RefusalCode;

thread_local! {
    /// What a signal's handler raised while this thread waited.
    static SIGNALLED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Signals are looked for this often where it costs much: whoever wants the interpreter back may wait 5 ms for a thread that has it.
const LOOK: Duration = Duration::from_millis(50);

/// Looks for signals now and then.
#[derive(Default)]
pub(crate) struct Signals(Option<Instant>);

impl Signals {
    /// Whether a signal's handler has raised something, as far as was looked; [`raised`] gives it on.
    pub(crate) fn came(&mut self) -> bool {
        let began = *self.0.get_or_insert_with(Instant::now);
        if began.elapsed() < LOOK {
            return false;
        }
        self.0 = Some(Instant::now());
        is_signalled()
    }
}

/// Whether a signal's handler has raised something, such as `KeyboardInterrupt`; [`raised`] gives it on. Only the main
/// thread runs handlers.
pub(crate) fn is_signalled() -> bool {
    let handled = Python::attach(|py| py.check_signals());
    let Err(error) = handled else {
        return false;
    };
    SIGNALLED.set(Some(error));
    true
}

/// The exception for a failed call: what a signal's handler raised, if that is why. Who hung up is told that the wait was ended.
pub(crate) fn raised(py: Python<'_>, error: &ClientError) -> PyErr {
    let is_called_away = matches!(error, ClientError::CalledAway { .. });
    let signalled = is_called_away.then(|| SIGNALLED.take()).flatten();
    signalled.unwrap_or_else(|| exception(py, class_of(error), &sentence(error)))
}

/// The exception for an argument that cannot be.
pub(crate) fn invalid(py: Python<'_>, error: &dyn Error) -> PyErr {
    exception(py, "InvalidArgument", &sentence(error))
}

/// The exception for memory that is nowhere.
pub(crate) fn null(py: Python<'_>, length: usize) -> PyErr {
    let text = format!(
        "expected the address of {length} bytes, got a null one: the tensor has no memory of its own"
    );
    exception(py, "InvalidArgument", &text)
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
        ClientError::Unavailable { .. }
        | ClientError::Broken { .. }
        | ClientError::SlotLost { .. } => "DaemonUnavailable",
        ClientError::NotAllowed { .. } => "AccessDenied",
        ClientError::Refused(refusal) => class_of_code(refusal.code),
        ClientError::TimedOut { .. } | ClientError::CalledAway { .. } => "WaitTimeout",
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
        RefusalCode::UnknownRun => "UnknownRun",
        RefusalCode::NoRunLeft => "StoragedError",
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
        RefusalCode::DurableUnavailable => "DurableTierError",
        RefusalCode::Draining | RefusalCode::NoPlace => "DaemonUnavailable",
        RefusalCode::InUse => "Busy",
        RefusalCode::NewerUnreachable => "NewerUnreachable",
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
