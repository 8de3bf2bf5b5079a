//! Logs to stderr, as text or JSON.

use tracing_subscriber::EnvFilter;

/// Text for people, JSON for collectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// Starts logging; `STORAGED_LOG` takes filters such as `info,storaged::net=debug`.
pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_env("STORAGED_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // A second start in one process (tests) keeps the first.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
