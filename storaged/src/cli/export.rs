//! `storaged export` and `storaged import`: the Python package does both, because the files are PyTorch's; these find it and become it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};
use storaged_sdk::wire::{Namespace, Step};

use super::token::TokenArgs;
use super::{CliError, parse_step};

/// What the files are.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// As torch.distributed.checkpoint writes them: its FileSystemReader and FsspecReader read them
    Dcp,
    /// One file of tensors alone
    Safetensors,
    /// One file for torch.load(weights_only=True)
    Torch,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  storaged export --namespace llama-70b --step 1200 --to /mnt/out\n  storaged export --namespace llama-70b --to s3://bucket/folder --format safetensors\nIt runs `python3 -m storaged export` (another interpreter: --python), so that the storaged package and PyTorch must be there, and\nfor s3:// s3fs. Any step that can be restored, from RAM or the durable tier; every byte is verified. A step that a running job\nreplaces meanwhile ends it: pin it, or export an older one that the durable tier has. The exit code is Python's: 1 if it failed."
)]
pub struct ExportArgs {
    #[command(flatten)]
    of: PackageArgs,
    /// Step [default: the newest restorable one]
    #[arg(long, value_parser = parse_step)]
    step: Option<Step>,
    /// A directory, empty or not there yet, or the URL of one that fsspec knows, such as s3://bucket/folder
    #[arg(long, value_name = "DIR|URL")]
    to: OsString,
    /// What the files are
    #[arg(long, value_enum, default_value = "dcp")]
    format: Format,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  storaged import --namespace llama-70b --from s3://bucket/folder --step 1200\nIt runs `python3 -m storaged import` (another interpreter: --python). The directory's .metadata is a pickle: import only what you\ntrust. All of it passes through the memory of one process."
)]
pub struct ImportArgs {
    #[command(flatten)]
    of: PackageArgs,
    /// Step that it becomes
    #[arg(long, value_parser = parse_step)]
    step: Step,
    /// A directory of torch.distributed.checkpoint, or the URL of one that fsspec knows
    #[arg(long, value_name = "DIR|URL")]
    from: OsString,
    /// Also where the namespace has checkpoints: a job that saves there is ended, and the step counts as newer than all of its steps
    #[arg(long)]
    force: bool,
}

/// Where the Python package is, and what it is told of the job.
#[derive(Debug, Args)]
struct PackageArgs {
    /// Namespace of the job
    #[arg(long, env = "STORAGED_NAMESPACE")]
    namespace: Option<Namespace>,
    #[command(flatten)]
    token: TokenArgs,
    /// Socket of the daemon [default: the package's, /run/storaged/storaged.sock]
    #[arg(long, env = "STORAGED_SOCKET")]
    socket: Option<PathBuf>,
    /// Interpreter that has the storaged package and PyTorch
    #[arg(long, env = "STORAGED_PYTHON", default_value = "python3")]
    python: PathBuf,
}

pub fn export(args: &ExportArgs) -> Result<(), CliError> {
    let mut python = args.of.package("export")?;
    if let Some(step) = args.step {
        python.arg("--step").arg(step.get().to_string());
    }
    let format = match args.format {
        Format::Dcp => "dcp",
        Format::Safetensors => "safetensors",
        Format::Torch => "torch",
    };
    // In one word: a folder may begin with a dash.
    python
        .arg("--format")
        .arg(format)
        .arg(joined("--to=", &args.to));
    Err(become_it(python))
}

pub fn import(args: &ImportArgs) -> Result<(), CliError> {
    let mut python = args.of.package("import")?;
    python.arg("--step").arg(args.step.get().to_string());
    python.arg(joined("--from=", &args.from));
    if args.force {
        python.arg("--force");
    }
    Err(become_it(python))
}

fn joined(option: &str, value: &OsString) -> OsString {
    let mut word = OsString::from(option);
    word.push(value);
    word
}

impl PackageArgs {
    /// The package's command of this name, once it is known to be there.
    fn package(&self, command: &str) -> Result<Command, CliError> {
        self.find()?;
        let mut python = self.interpreter();
        python.args(["-m", "storaged", command]);
        if let Some(namespace) = &self.namespace {
            python.arg("--namespace").arg(namespace.as_str());
        }
        if let Some(socket) = &self.socket {
            python.arg("--socket").arg(socket);
        }
        if let Some(file) = self.token.file() {
            python.env("STORAGED_TOKEN_FILE", file);
        }
        Ok(python)
    }

    fn interpreter(&self) -> Command {
        let mut python = Command::new(&self.python);
        // What lies in the working directory is nobody's package.
        python.env("PYTHONSAFEPATH", "1");
        python
    }

    fn find(&self) -> Result<(), CliError> {
        let mut python = self.interpreter();
        python.args(["-c", "import storaged"]).stdin(Stdio::null());
        let asked = python.output().map_err(|source| match source.kind() {
            ErrorKind::NotFound => self.missing("there is no such interpreter"),
            _ => CliError::Io {
                what: "starting the Python interpreter",
                source,
            },
        })?;
        if asked.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&asked.stderr);
        Err(self.missing(said.trim().lines().last().unwrap_or("it ended at once")))
    }

    fn missing(&self, why: &str) -> CliError {
        CliError::NoPackage {
            python: self.python.display().to_string(),
            why: why.to_owned(),
        }
    }
}

/// This process becomes Python's: signals and the exit code are its own. Returns only why it could not.
fn become_it(mut python: Command) -> CliError {
    CliError::Io {
        what: "starting the Python interpreter",
        source: python.exec(),
    }
}
