//! `storaged run` and `storaged config`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::members::PlaceFound;
use super::{CliError, members, print};
use crate::config::{Config, ConfigFile};
use crate::driver::{Daemon, Ending, date, end_programs, expiry_fault, first_keys};
use crate::encode::Pool;
use crate::env::{Environment, Offload, SystemEntropy};
use crate::heap;
use crate::keep::keeper::{self, EXIT_AGAIN, Program};
use crate::keep::{HOLDER_VARIABLE, Holding, KEEP_VARIABLE};
use crate::log::{self, LogFormat};
use crate::net::{TlsIdentity, UdpFactory, runtime_of};

/// Who stops a process and its group says so twice.
const ONE_SIGNAL: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Without --config: one node without peers, its socket at /run/storaged/storaged.sock, metrics at\nhttp://127.0.0.1:9301/metrics, RAM for checkpoints up to half of this machine's. SIGTERM or SIGINT stops it\nonce it has finished what only it can (uploads, coding), within node.leave_within; a second one at once. SIGHUP reads the\nconfiguration and the certificates again; links and RAM stay. SIGUSR2 ends the daemon at once and starts it again, from a\nbinary that was replaced too, with its descriptors kept. SIGUSR1 ends daemon and keeper at once where --holder has all of\ntheir memory; where it does not, the daemon goes on or is started again (`storaged hand-over`)."
)]
pub struct RunArgs {
    /// Configuration file (TOML); see docs/operate/config.md
    #[arg(long, env = "STORAGED_CONFIG")]
    config: Option<PathBuf>,
    /// Socket directory instead of the configured one
    #[arg(long)]
    runtime_dir: Option<PathBuf>,
    #[command(flatten)]
    domain: DomainArgs,
    /// How log lines look
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
    /// Who holds the descriptors of the daemon's memory, so that it outlives a crash, a restart and an upgrade of the daemon
    #[arg(long, value_enum, env = KEEP_VARIABLE, default_value = "keeper")]
    keep: Keep,
    /// Socket of the holder (`storaged hold`) that has what the keeper has, so that it outlives the keeper too, as when a pod is replaced
    #[arg(long, env = HOLDER_VARIABLE, value_name = "PATH")]
    holder: Option<OsString>,
}

/// What a launcher knows of the node and a file that all nodes share does not.
#[derive(Debug, Clone, Args)]
struct DomainArgs {
    /// What fails together with this node, such as zone-a/rack-7, instead of node.failure_domain
    #[arg(long, env = "STORAGED_FAILURE_DOMAIN")]
    failure_domain: Option<String>,
}

impl DomainArgs {
    fn set_in(&self, config: &mut ConfigFile) {
        if self.failure_domain.is_some() {
            config.node.failure_domain.clone_from(&self.failure_domain);
        }
    }
}

/// Who holds descriptors for the daemon's next life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Keep {
    /// This process, which runs the daemon as its child and starts it again when it dies
    Keeper,
    /// systemd, in a unit with FileDescriptorStoreMax= and NotifyAccess=main
    Systemd,
    /// Nobody: memory ends with the daemon
    None,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  storaged config /etc/storaged.toml")]
pub struct ConfigArgs {
    /// Configuration file
    file: PathBuf,
    #[command(flatten)]
    domain: DomainArgs,
}

impl RunArgs {
    /// An empty one, as a template leaves where there is none, is none.
    fn holder(&self) -> Option<PathBuf> {
        let holder = self.holder.clone().filter(|it| !it.is_empty());
        holder.map(PathBuf::from)
    }

    fn load(&self) -> Result<Config, CliError> {
        let mut config = match &self.config {
            Some(path) => ConfigFile::load(path)?,
            None => ConfigFile::default(),
        };
        if let Some(directory) = &self.runtime_dir {
            config.node.runtime_dir.clone_from(directory);
        }
        self.domain.set_in(&mut config);
        Ok(config.validate()?)
    }
}

/// Runs as the keeper of a daemon, or as the daemon.
pub fn run(args: RunArgs) -> Result<ExitCode, CliError> {
    if args.keep != Keep::Keeper && args.holder().is_some() {
        let what = "expected --keep keeper beside --holder (or STORAGED_HOLDER): who else keeps memory hands none on";
        return Err(CliError::Usage(what.into()));
    }
    if args.keep == Keep::Keeper && !keeper::is_kept() {
        log::start(args.log_format);
        let code = keeper::keep(Program::of_this_process()?, args.holder())?;
        return Ok(code.into());
    }
    // Before there are threads: each goes by what holds when it begins.
    let gives_back = heap::give_back_soon();
    // Before anything that takes time: by default SIGHUP ends a process, and whoever reloads all nodes does not know which have just started.
    let runtime = runtime()?;
    let hup = {
        let _within = runtime.enter();
        signal(SignalKind::hangup()).map_err(io("listening for SIGHUP"))?
    };
    log::start(args.log_format);
    if let Err(error) = gives_back {
        tracing::warn!(%error, "freed memory is given back late: the allocator could not start its thread");
    }
    if let Err(error) = storaged_arena::survive_memory_faults() {
        tracing::warn!(%error, "a page of memory that fails ends the daemon: the system took no handler");
    }
    let holding = match args.keep {
        Keep::Keeper => Holding::by_keeper()?,
        Keep::Systemd => Holding::by_systemd()?,
        Keep::None => Holding::nobody(),
    };
    let process = DaemonProcess {
        runtime,
        hup,
        holding,
    };
    run_daemon(args, process).map(|()| ExitCode::SUCCESS)
}

/// What a daemon has before it reads its configuration.
struct DaemonProcess {
    runtime: Runtime,
    /// It is heard from the start.
    hup: Signal,
    holding: Holding,
}

fn io(what: &'static str) -> impl Fn(std::io::Error) -> CliError {
    move |source| CliError::Io { what, source }
}

/// Threads that wait for the kernel at once; more work waits its turn. A directory that hangs keeps 16 of them, and where the registry is one too
/// it is 32. tokio's 512 came about where a job let go of 224 slots at once.
const BLOCKING_THREADS_MAX: usize = 64;
/// They are woken in turns, so that all of a burst stay as long as each has work once within this time, and each keeps its stack and the
/// allocator's memory for it, 0.15 MiB: after such a burst the node's ordinary work kept all of them.
const BLOCKING_THREADS_KEPT_FOR: Duration = Duration::from_secs(1);

fn runtime() -> Result<Runtime, CliError> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_keep_alive(BLOCKING_THREADS_KEPT_FOR)
        .build()
        .map_err(io("starting the runtime"))
}

fn run_daemon(args: RunArgs, process: DaemonProcess) -> Result<(), CliError> {
    let DaemonProcess {
        runtime,
        hup,
        holding,
    } = process;
    let mut config = args.load()?;
    log::set_filter(&config.log_filter)?;
    if let Some(warning) = config.swap_state.warning(config.swap) {
        tracing::warn!(key = "memory.swap", "{warning}");
    }
    warn_of_listing(&config);
    let net = runtime_of("net", &config.network.threads);
    let net = net.map_err(io("starting the network's threads"))?;
    let pool = Pool::start_named("codec", &config.codec_threads);
    let pool = pool.map_err(io("starting the codec's threads"))?;
    let outcome = runtime.block_on(async {
        let mut env = Environment {
            sockets: Arc::new(UdpFactory),
            entropy: Arc::new(SystemEntropy),
            net_runtime: net.handle().clone(),
            pool,
            offload: Offload::Threads,
            store: None,
            descriptors: holding.store,
            inherited: holding.inherited.descriptors,
            ops: None,
            stage: None,
            members: None,
        };
        let mut term = signal(SignalKind::terminate()).map_err(io("listening for SIGTERM"))?;
        let mut int = signal(SignalKind::interrupt()).map_err(io("listening for SIGINT"))?;
        let usr2 = signal(SignalKind::user_defined2()).map_err(io("listening for SIGUSR2"))?;
        // What would end a process that does not say otherwise.
        let ignored = [SignalKind::user_defined1(), SignalKind::alarm()];
        let ignored = ignored.map(signal);
        tokio::spawn(start_again_at(usr2, args.keep));
        if config.membership.is_some() {
            let entered = members::enter(&mut config, &mut env);
            let entered = unless_told(&mut term, &mut int, entered).await;
            let Some(PlaceFound::Placed(roster)) = entered.transpose()? else {
                return Ok(());
            };
            tracing::info!(place = %config.name, epoch = roster.epoch, "this node has its place");
        }
        // A key service that hangs holds nobody up who ends the daemon.
        let asked = unless_told(&mut term, &mut int, first_keys(&mut config)).await;
        let Some(()) = asked else { return Ok(()) };
        let daemon = Daemon::start(config, env).await?;
        tokio::spawn(reload_at(hup, args, daemon.reloads()));
        let (stop, stops) = mpsc::channel(1);
        tokio::spawn(stop_at(term, int, stop));
        let ending = daemon.run(stops).await;
        drop(ignored);
        ended(&ending)
    });
    // Connections may still wait for trainers: they end with the process.
    runtime.shutdown_background();
    net.shutdown_background();
    outcome
}

/// One node of a thousand whose host has another name than the list has for it would be one more member, of which nobody is told.
fn warn_of_listing(config: &Config) {
    if let Some(warning) = config.own_listing.warning() {
        tracing::warn!(key = "peers.name", "{warning}");
    }
}

fn ended(ending: &Ending) -> Result<(), CliError> {
    let left = match ending {
        Ending::PlaceTaken(taken) => {
            let (epoch, place) = (taken.epoch, taken.place.clone());
            return Err(CliError::PlaceTaken { epoch, place });
        }
        Ending::Told(left) if left.is_empty() => return Ok(()),
        Ending::Told(left) => left,
    };
    Err(CliError::LeftUnfinished(left.join("; ")))
}

/// What comes of it, unless the process is told to end before.
async fn unless_told<T>(
    term: &mut Signal,
    int: &mut Signal,
    work: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        _ = term.recv() => None,
        _ = int.recv() => None,
    }
}

/// Stops the daemon at SIGTERM and SIGINT.
async fn stop_at(mut term: Signal, mut int: Signal, stop: mpsc::Sender<()>) {
    let mut told_at: Option<Instant> = None;
    loop {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        if told_at.is_some_and(|at| at.elapsed() < ONE_SIGNAL) {
            continue;
        }
        told_at = Some(Instant::now());
        if stop.send(()).await.is_err() {
            return;
        }
    }
}

/// Ends the process at SIGUSR2, as a crash would, for whoever holds its descriptors to start it again. Where nobody does the signal
/// is ignored.
async fn start_again_at(mut usr2: Signal, keep: Keep) {
    while usr2.recv().await.is_some() {
        if keep != Keep::None {
            tracing::info!("ending, to be started again");
            end_programs();
            std::process::exit(EXIT_AGAIN.into());
        }
    }
}

/// Reads the configuration again at every SIGHUP.
async fn reload_at(mut hup: Signal, args: RunArgs, reloads: mpsc::Sender<Config>) {
    while hup.recv().await.is_some() {
        let file = args.load();
        let taken = file.and_then(|config| {
            log::set_filter(&config.log_filter)?;
            Ok(config)
        });
        match taken {
            Ok(config) => {
                warn_of_listing(&config);
                drop(reloads.send(config).await);
            }
            Err(error) => {
                tracing::error!(
                    error = crate::driver::chain(&error),
                    "the configuration cannot be used: the old one stays"
                );
            }
        }
    }
}

/// What `run` would find wrong with the certificates, or when this node's expires and which authority peers must have.
fn check_certificates(config: &Config) -> Result<String, CliError> {
    let Some(files) = &config.tls else {
        return Ok("certificate none".into());
    };
    let identity = TlsIdentity::load(files)?;
    identity.check(&config.name)?;
    let validity = identity.validity()?;
    match expiry_fault(&config.name, validity) {
        Some(fault) => Err(CliError::Unexpected(fault)),
        None => Ok(format!(
            "certificate until {}\nauthority {}",
            date(validity.ends),
            identity.authorities()
        )),
    }
}

pub fn config(args: &ConfigArgs) -> Result<(), CliError> {
    let mut file = ConfigFile::load(&args.file)?;
    args.domain.set_in(&mut file);
    let config = file.validate()?;
    if let Some(warning) = config.own_listing.warning() {
        eprintln!("{warning}");
    }
    let certificate = check_certificates(&config)?;
    let protection = match config.geometry {
        Some(geometry) => format!(
            "{geometry}: survives the loss of any {} nodes",
            geometry.m()
        ),
        None => "none: a node's loss loses its shards unless the durable tier has them".into(),
    };
    let encryption = match &config.encryption {
        Some(encryption) => encryption.to_string(),
        None => "none".into(),
    };
    // A registry's members are what `storaged node ls` shows.
    let listed = config.membership.is_none().then_some(&config.members);
    let domains = listed.and_then(|members| config.domains_told(members));
    let domains = domains.map_or_else(String::new, |told| format!("\n{told}"));
    print(&format!(
        "{}\nprotection {protection}{domains}\nencryption of the durable tier {encryption}\nRAM for checkpoints {}\nswap {}\nslots per rank {}\ncodec {}\nnetwork {}\nsockets {}\n{certificate}\n{}",
        config.listing(),
        bytesize::ByteSize::b(config.budget),
        config.swap_state,
        config.slots_per_rank,
        config.codec_threads,
        config.network.threads,
        config
            .sockets
            .iter()
            .map(|socket| socket.path.display().to_string())
            .collect::<Vec<_>>()
            .join(", "),
        config.bill()
    ));
    Ok(())
}
