//! A throw-away S3 server on loopback: Ceph with its gateway, which `tests/s3/ceph.sh` starts and stops.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The bucket that is there from the start.
pub const BUCKET: &str = "storaged";
/// The only user, as the environment of S3 clients names it.
pub const KEYS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "storaged"),
    ("AWS_SECRET_ACCESS_KEY", "storaged-demo-secret"),
    ("AWS_REGION", "us-east-1"),
];

/// Makes the command that runs a program where the server is to be.
type CommandOf<'a> = Box<dyn Fn(&Path) -> Command + Send + Sync + 'a>;

/// A running server; it ends with its owner, and what lies in it too.
pub struct S3Server<'a> {
    directory: PathBuf,
    at: SocketAddr,
    command_of: CommandOf<'a>,
}

impl fmt::Debug for S3Server<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { directory, at, .. } = self;
        write!(f, "S3Server at {at} in {directory:?}")
    }
}

impl S3Server<'static> {
    /// Starts one whose state is in `directory` and which listens on `port` of 127.0.0.1.
    ///
    /// # Errors
    /// What the script says; among others that the port is taken.
    pub fn start(directory: PathBuf, port: u16) -> Result<Self> {
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        Self::start_where(directory, at, |program| Command::new(program))
    }
}

impl<'a> S3Server<'a> {
    /// Starts one where these commands run, a network namespace of its own for example, which is reached at this address and port.
    ///
    /// # Errors
    /// What the script says.
    pub fn start_where(
        directory: PathBuf,
        at: SocketAddr,
        command_of: impl Fn(&Path) -> Command + Send + Sync + 'a,
    ) -> Result<Self> {
        let server = Self {
            directory,
            at,
            command_of: Box::new(command_of),
        };
        server.script("start")?;
        Ok(server)
    }

    /// Where it is reached.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.at)
    }

    /// Kills the gateway with SIGKILL: nobody answers any more. What lies in it stays.
    ///
    /// # Errors
    /// What the script says.
    pub fn kill_gateway(&self) -> Result<()> {
        self.script("kill-gateway")
    }

    /// Starts the gateway again, and waits until it answers.
    ///
    /// # Errors
    /// What the script says.
    pub fn start_gateway(&self) -> Result<()> {
        self.script("start-gateway")
    }

    fn script(&self, what: &str) -> Result<()> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/s3/ceph.sh");
        let mut command = (self.command_of)(Path::new("bash"));
        command.args([script, what]).arg(&self.directory);
        if !self.at.ip().is_loopback() {
            command.env("S3_ADDRESS", self.at.ip().to_string());
        }
        output(command.arg(self.at.port().to_string())).map(drop)
    }
}

impl Drop for S3Server<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.script("stop") {
            eprintln!("the S3 server was not stopped: {error:#}");
        }
    }
}

/// Writes its keys into a file as `credentials_file` names one.
///
/// # Errors
/// If the file cannot be written.
pub fn credentials(directory: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join("s3-credentials");
    let lines = KEYS[..2]
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"));
    std::fs::write(&path, lines.collect::<String>())?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(path)
}

/// Runs a program to its end; its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let what = format!("{command:?}");
    let done = command
        .output()
        .with_context(|| format!("starting {what}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{what} failed: {said}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}
