//! The `storaged` command. Data on stdout, everything else on stderr; `--json` for programs.

mod bench;
mod cert;
mod drain;
mod drill;
mod drop_job;
mod export;
mod failure_domain;
mod going;
mod hand_over;
mod hold;
mod inspect;
mod members;
mod plan_encode;
mod restart_safe;
mod rotate;
mod run;
mod status;
mod tier;
mod token;
mod verdict;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand};
use storaged_sdk::wire::local::{Keep, Role};
use storaged_sdk::wire::{Namespace, Step};
use storaged_sdk::{
    Client, ClientError, ConnectOptions, DEFAULT_SOCKET, Patience, RotateError, TokenError,
};
use thiserror::Error;

use crate::config::ConfigError;
use crate::driver::StartError;
use crate::keep::KeepError;
use crate::keep::keeper::EXIT_AGAIN;
use crate::log::FilterError;
use crate::membership::{ChangeError, KubernetesError, RegistryError, Twin};
use crate::net::TlsError;
use crate::net::cert::CertError;

/// Why a command failed.
#[derive(Debug, Error)]
pub enum CliError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Starting the daemon.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Having its memory kept.
    #[error(transparent)]
    Keep(#[from] KeepError),
    /// Talking to it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Changing the job's token.
    #[error(transparent)]
    Rotate(#[from] RotateError),
    /// Reading the job's token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Making certificates.
    #[error(transparent)]
    Cert(#[from] CertError),
    /// Certificates that are there.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// What is to be logged.
    #[error("configuration key log.filter")]
    Log(#[from] FilterError),
    /// The system.
    #[error("{what} failed")]
    Io {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// Arguments that do not fit together.
    #[error("{0}")]
    Usage(String),
    /// An answer of the daemon's, or a benched process, that cannot be.
    #[error("{0}")]
    Unexpected(String),
    /// A daemon that answers and cannot serve jobs.
    #[error("not ready: {0}")]
    NotReady(String),
    /// A node that must not be restarted now.
    #[error("not safe to restart now: {0}")]
    NotSafe(String),
    /// A daemon that was stopped before it had finished what only it could.
    #[error("stopped with work unfinished: {0}; node.leave_within says for how long it goes on")]
    LeftUnfinished(String),
    /// A node that was drained, and ended before it had finished.
    #[error(
        "drained with work unfinished, which is lost with this node's memory, or left to others: {0}"
    )]
    DrainedUnfinished(String),
    /// A node that was told to drain, and does not say how far it is.
    #[error(
        "the daemon does not answer: expected to hear how far the drain is within {0:?}, got nothing; it is stopped (SIGSTOP) or overloaded, and \
         drains itself once it goes on"
    )]
    DrainUnanswered(Duration),
    /// A daemon whose place another node has taken.
    #[error("at epoch {epoch} {place}; started again, this node is a spare")]
    PlaceTaken { epoch: u64, place: String },
    /// Another machine has this node's name and certificate.
    #[error(transparent)]
    Twin(#[from] Twin),
    /// The registry of members.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Asking whether the machine goes.
    #[error("it cannot be said whether this machine goes")]
    Kubernetes(#[from] KubernetesError),
    /// Asking where this node lies.
    #[error("it cannot be said in which failure domain this node lies")]
    Labels(#[source] KubernetesError),
    /// A node without a label that says where it lies.
    #[error(
        "expected a label {label} on node {node}, got none: all nodes name the same levels of failure domains"
    )]
    NoLabel { label: String, node: String },
    /// A change of the members that cannot be.
    #[error(transparent)]
    Members(#[from] ChangeError),
    /// A check that found faults.
    #[error("{faults} of {parts} parts have faults")]
    Faults { faults: usize, parts: usize },
    /// A daemon and a keeper that have not ended.
    #[error(
        "the keeper has not ended within {0:?}: without a holder that has the memory it does not; its log says why"
    )]
    NotHandedOver(Duration),
    /// A drill that showed losses that the checkpoint does not bear.
    #[error("{failures} of {tried} decodes without nodes failed")]
    Drill { failures: usize, tried: usize },
    /// A drill that could not try all of the step.
    #[error("not all of the step could be drilled: {reason}")]
    DrillInPart { reason: String },
    /// Steps that newer ones replace faster than they are drilled.
    #[error(
        "{steps} steps, one after the other, were replaced by newer ones while they were drilled: take a smaller --sample, --lanes or --subsets"
    )]
    DrillOvertaken { steps: usize },
    /// A job that nobody holds: a name that was mistyped, most often.
    #[error(
        "expected a job with something in RAM, got {0}, of which no node holds anything: `storaged ls` lists jobs"
    )]
    NothingToDrop(Namespace),
    /// What moves checkpoints to files and back is not there.
    #[error(
        "expected the Python package `storaged` with {python}, which says: {why}; name the interpreter that has it with --python or STORAGED_PYTHON"
    )]
    NoPackage { python: String, why: String },
    /// A job that some nodes may still hold.
    #[error("{faults} of {nodes} nodes may still hold some of it")]
    NotDropped { faults: usize, nodes: usize },
}

/// A configuration that cannot be used (EX_CONFIG of sysexits.h): starting again does not help.
const EXIT_CONFIG: u8 = 78;
/// A daemon that was told to stop, and did with work unfinished (EX_TEMPFAIL): not a failure that a new start would mend.
const EXIT_UNFINISHED: u8 = 75;
/// As for arguments that cannot be read at all.
const EXIT_USAGE: u8 = 2;

impl CliError {
    /// What a script sees.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Config(_)
            | Self::Tls(_)
            | Self::Log(_)
            | Self::Twin(_)
            | Self::NoLabel { .. }
            | Self::Labels(KubernetesError::Refused(_)) => EXIT_CONFIG.into(),
            Self::Usage(_) | Self::Keep(KeepError::NoAddress | KeepError::Address { .. }) => {
                EXIT_USAGE.into()
            }
            Self::LeftUnfinished(_) | Self::DrainedUnfinished(_) => EXIT_UNFINISHED.into(),
            Self::PlaceTaken { .. } => EXIT_AGAIN.into(),
            _ => ExitCode::FAILURE,
        }
    }
}

/// Keeps training checkpoints in the RAM of the nodes that train, erasure-coded, and trickles them to S3.
#[derive(Debug, Parser)]
#[command(
    name = "storaged",
    version,
    after_help = "First steps:\n  storaged run                      one node, no config\n  storaged status                   what it holds\n  storaged cert ca DIR              certificates for a cluster, then `storaged cert issue DIR NAME`\n  storaged run --config FILE        one node of a cluster\n\nExit codes: 0 success, 1 failure, 2 wrong arguments, 74 a daemon that is to be started\nagain (SIGUSR2, or another node has its place), 75 one that was stopped with work unfinished, 78 a configuration that cannot be used;\nof `storaged plan --verdict` also 10 to 13 (`storaged plan --help`), of `storaged going` 3."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon of this node
    Run(run::RunArgs),
    /// Show what the daemon of this node holds and whom it sees
    Status(status::StatusArgs),
    /// List the checkpoints that this node knows
    Ls(inspect::LsArgs),
    /// Say what a restart would do: which checkpoint, from where, how long; or how a group would encode
    Plan(inspect::PlanArgs),
    /// Read every byte of a checkpoint on every live node and check it; with --drill try out what the loss of nodes would do
    Verify(verify::VerifyArgs),
    /// Say whether this node may be restarted now without losing anything; exit code 1 if not
    RestartSafe(restart_safe::RestartSafeArgs),
    /// Hold the memory of this node's daemon for longer than its pod lives
    Hold(hold::HoldArgs),
    /// End the daemon of this node at once, and leave its memory to the holder
    HandOver(hand_over::HandOverArgs),
    /// End the daemon of this node in order, before the machine goes
    Drain(drain::DrainArgs),
    /// Say whether this machine is about to go, and how long a drain may take; exit code 1 if not
    Going(going::GoingArgs),
    /// Say in which failure domain this node lies, by its labels in Kubernetes
    FailureDomain(failure_domain::FailureDomainArgs),
    /// Keep a checkpoint in RAM and in the durable tier, whatever is saved later
    Pin(tier::PinArgs),
    /// Let it go as others do again
    Unpin(tier::PinArgs),
    /// Remove checkpoints from the durable tier
    Rm(tier::RmArgs),
    /// Drop all checkpoints of a job from the RAM of all nodes
    Drop(drop_job::DropArgs),
    /// Write a checkpoint as files that stock PyTorch and safetensors read, to a directory or an object store
    Export(export::ExportArgs),
    /// Take a directory of torch.distributed.checkpoint in as a checkpoint
    Import(export::ImportArgs),
    /// Show and change which machines a cluster with a registry is made of
    #[command(subcommand)]
    Node(members::NodeCommand),
    /// Make certificates for a cluster
    #[command(subcommand)]
    Cert(cert::CertCommand),
    /// Make a job's token
    Token(token::NewTokenArgs),
    /// Change a job's token for another one
    Rotate(rotate::RotateArgs),
    /// Check a configuration file and show what it means
    Config(run::ConfigArgs),
    /// Measure staging, encoding and restoring on this machine against memcpy and raw QUIC
    Bench(bench::BenchArgs),
}

/// How to reach the daemon.
#[derive(Debug, Clone, Args)]
pub struct SocketArgs {
    /// Socket of the daemon; by default the operator's, /run/storaged/admin.sock, or if that one cannot be used
    /// /run/storaged/storaged.sock
    #[arg(long, env = "STORAGED_SOCKET")]
    socket: Option<PathBuf>,
}

/// How long the daemon's welcome may take, whatever the operator gives the command: one that is well answers at once.
const WELCOME_MIN: Duration = Duration::from_secs(1);
const WELCOME_MAX: Duration = Duration::from_secs(15);

/// Where the operator's socket is unless the configuration says otherwise.
const ADMIN_SOCKET: &str = "/run/storaged/admin.sock";

impl SocketArgs {
    /// Where to connect.
    pub fn path(&self) -> PathBuf {
        let usable = |path: &str| std::os::unix::net::UnixStream::connect(path).is_ok();
        match &self.socket {
            Some(socket) => socket.clone(),
            None if usable(ADMIN_SOCKET) || !usable(DEFAULT_SOCKET) => ADMIN_SOCKET.into(),
            None => DEFAULT_SOCKET.into(),
        }
    }
}

/// A namespace and the token it belongs to.
#[derive(Debug, Clone, Args)]
pub struct NamespaceArgs {
    /// Namespace of the job
    #[arg(env = "STORAGED_NAMESPACE")]
    pub namespace: Namespace,
    #[command(flatten)]
    pub token: token::TokenArgs,
    /// Step instead of the newest protected one
    #[arg(long, value_parser = parse_step)]
    pub step: Option<Step>,
    /// Longest wait, in seconds
    #[arg(long, default_value_t = 60)]
    pub timeout: u32,
}

fn parse_step(text: &str) -> Result<Step, std::num::ParseIntError> {
    text.parse().map(Step::new)
}

impl NamespaceArgs {
    fn connect(&self, socket: &SocketArgs) -> Result<Client, CliError> {
        let options = ConnectOptions {
            socket: socket.path(),
            namespace: self.namespace.clone(),
            token: self.token.read()?,
            role: Role::Reader,
        };
        connect(&options, self.timeout)
    }

    fn timeout_ms(&self) -> u32 {
        self.timeout.saturating_mul(1000)
    }
}

/// Connects within the seconds that the operator gives, also to a daemon that is stopped.
fn connect(options: &ConnectOptions, timeout_s: u32) -> Result<Client, CliError> {
    let most = Duration::from_secs(timeout_s.into()).clamp(WELCOME_MIN, WELCOME_MAX);
    Ok(Client::connect_with(options, Patience::of(most))?.0)
}

/// Runs the command of this process's arguments.
///
/// # Errors
/// [`CliError`] with what was expected, what was got and what to do.
pub fn main() -> Result<ExitCode, CliError> {
    let done = match Cli::parse().command {
        Command::Run(args) => return run::run(args),
        Command::Status(args) => status::status(&args),
        Command::Ls(args) => inspect::ls(&args),
        Command::Plan(args) => return inspect::plan(&args),
        Command::Verify(args) => verify::verify(&args),
        Command::RestartSafe(args) => restart_safe::restart_safe(&args),
        Command::Hold(args) => hold::hold(&args),
        Command::HandOver(args) => hand_over::hand_over(&args),
        Command::Drain(args) => drain::drain(&args),
        Command::Going(args) => return going::going(&args),
        Command::FailureDomain(args) => failure_domain::failure_domain(&args),
        Command::Pin(args) => tier::pin(&args, Keep::Pin),
        Command::Unpin(args) => tier::pin(&args, Keep::Unpin),
        Command::Rm(args) => tier::rm(&args),
        Command::Drop(args) => drop_job::drop_job(&args),
        Command::Export(args) => export::export(&args),
        Command::Import(args) => export::import(&args),
        Command::Node(command) => members::node(command),
        Command::Cert(command) => cert::cert(command),
        Command::Token(args) => token::token(&args),
        Command::Rotate(args) => rotate::rotate(&args),
        Command::Config(args) => run::config(&args),
        Command::Bench(args) => bench::bench(&args),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes)
        .display()
        .iec()
        .to_string()
        .replace(' ', "")
}

/// Writes to stdout; a reader that went away is no error.
fn print(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{text}");
}
