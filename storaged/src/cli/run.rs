//! `storaged run` and `storaged config`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{CliError, print};
use crate::config::{CodecThreads, Config, ConfigFile};
use crate::driver::{Daemon, Offload, Seams};
use crate::encode::Pool;
use crate::log::{self, LogFormat};
use crate::net::UdpFactory;
use crate::seam::SystemEntropy;

/// Threads of the network's runtime: one encrypts and sends while another receives.
const NET_THREADS: usize = 2;

#[derive(Debug, Args)]
#[command(
    after_help = "Without --config: one node without peers, its socket at /run/storaged/storaged.sock, metrics at\nhttp://127.0.0.1:9301/metrics, RAM for checkpoints up to half of this machine's. SIGTERM or SIGINT stops it."
)]
pub struct RunArgs {
    /// Configuration file (TOML); see docs/operate/config.md
    #[arg(long, env = "STORAGED_CONFIG")]
    config: Option<PathBuf>,
    /// Socket directory instead of the configured one
    #[arg(long)]
    runtime_dir: Option<PathBuf>,
    /// How log lines look
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  storaged config /etc/storaged.toml")]
pub struct ConfigArgs {
    /// Configuration file
    file: PathBuf,
}

fn load(file: Option<&PathBuf>, runtime_dir: Option<PathBuf>) -> Result<Config, CliError> {
    let mut config = match file {
        Some(path) => ConfigFile::load(path)?,
        None => ConfigFile::default(),
    };
    if let Some(directory) = runtime_dir {
        config.node.runtime_dir = directory;
    }
    Ok(config.validate()?)
}

pub fn run(args: RunArgs) -> Result<(), CliError> {
    log::start(args.log_format);
    let config = load(args.config.as_ref(), args.runtime_dir)?;
    let io = |what| move |source| CliError::Io { what, source };
    let net = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(NET_THREADS)
        .thread_name("net")
        .enable_all()
        .build()
        .map_err(io("starting the network's runtime"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(io("starting the runtime"))?;
    let pool = match &config.codec_threads {
        CodecThreads::Anywhere(threads) => Pool::start(*threads),
        CodecThreads::Cores(cores) => Pool::start_on(cores),
    };
    let pool = pool.map_err(io("starting the codec's threads"))?;
    let outcome = runtime.block_on(async {
        let seams = Seams {
            sockets: Arc::new(UdpFactory),
            entropy: Arc::new(SystemEntropy),
            net_runtime: net.handle().clone(),
            pool,
            offload: Offload::Threads,
            store: None,
        };
        let mut term = signal(SignalKind::terminate()).map_err(io("listening for SIGTERM"))?;
        let mut int = signal(SignalKind::interrupt()).map_err(io("listening for SIGINT"))?;
        let daemon = Daemon::start(config, seams).await?;
        let stop = async {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        daemon.run(stop).await;
        Ok(())
    });
    // Connections may still wait for trainers: they end with the process.
    runtime.shutdown_background();
    net.shutdown_background();
    outcome
}

pub fn config(args: &ConfigArgs) -> Result<(), CliError> {
    let file = ConfigFile::load(&args.file)?;
    let config = file.validate()?;
    let protection = match config.geometry {
        Some(geometry) => format!(
            "{geometry}: survives the loss of any {} nodes",
            geometry.m()
        ),
        None => "none: a node's loss loses its shards unless the durable tier has them".into(),
    };
    print(&format!(
        "node {} of {}\nprotection {protection}\nRAM for checkpoints {}\nslots per rank {}\nsocket {}",
        config.name,
        config.members.len(),
        bytesize::ByteSize::b(config.budget),
        config.slots_per_rank,
        config
            .sockets
            .iter()
            .map(|socket| socket.path.display().to_string())
            .collect::<Vec<_>>()
            .join(", ")
    ));
    Ok(())
}
