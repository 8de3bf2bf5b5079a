//! Logs to stderr, as text or JSON.

use std::sync::OnceLock;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

/// The environment variable with the filter; it goes before `log.filter` of the configuration.
const VARIABLE: &str = "STORAGED_LOG";

static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Text for people, JSON for collectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// A filter that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("expected a log filter such as info,storaged::net=debug, got {filter:?}")]
pub struct FilterError {
    filter: String,
    #[source]
    source: tracing_subscriber::filter::ParseError,
}

/// Starts logging at `info`, or as the environment says.
pub fn start(format: LogFormat) {
    let asked = std::env::var(VARIABLE).map(|filter| check_filter(&filter));
    let (filter, fault) = match asked {
        Ok(Ok(filter)) => (filter, None),
        Ok(Err(fault)) => (EnvFilter::new("info"), Some(fault)),
        Err(_) => (EnvFilter::new("info"), None),
    };
    let (filter, handle) = reload::Layer::new(filter);
    // A second start in one process (tests) keeps the first.
    let _ = FILTER.set(handle);
    let layers = tracing_subscriber::registry().with(filter);
    let lines = fmt::layer().with_writer(std::io::stderr);
    let _ = match format {
        LogFormat::Text => layers.with(lines.with_ansi(false)).try_init(),
        LogFormat::Json => layers.with(lines.json()).try_init(),
    };
    if let Some(fault) = fault {
        tracing::warn!(
            error = crate::driver::chain(&fault),
            "{VARIABLE} in the environment cannot be used: logging at info"
        );
    }
}

/// Whether a filter can be used.
///
/// # Errors
/// [`FilterError`] for one that cannot be read.
pub fn check_filter(filter: &str) -> Result<EnvFilter, FilterError> {
    let parsed = EnvFilter::builder().parse(filter);
    parsed.map_err(|source| FilterError {
        filter: filter.into(),
        source,
    })
}

/// Takes the configuration's filter, at start and at a reload; the environment's stays if there is one.
///
/// # Errors
/// [`FilterError`] for one that cannot be read; then nothing changes.
pub fn set_filter(filter: &str) -> Result<(), FilterError> {
    let parsed = check_filter(filter)?;
    if std::env::var_os(VARIABLE).is_none()
        && let Some(handle) = FILTER.get()
    {
        // It fails only when logging has ended with the process.
        let _ = handle.reload(parsed);
        tracing::debug!(filter, "logging by this filter");
    }
    Ok(())
}
