//! A throw-away S3 server on loopback: Ceph with its gateway, which `tests/s3/ceph.sh` starts and stops.

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

/// A running server; it ends with its owner, and what lies in it too.
#[derive(Debug)]
pub struct S3Server {
    directory: PathBuf,
    port: u16,
}

impl S3Server {
    /// Starts one whose state is in `directory` and which listens on `port` of 127.0.0.1.
    ///
    /// # Errors
    /// What the script says; among others that the port is taken.
    pub fn start(directory: PathBuf, port: u16) -> Result<Self> {
        let server = Self { directory, port };
        server.script("start")?;
        Ok(server)
    }

    /// Where it is reached.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
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
        let mut command = Command::new("bash");
        command.args([script, what]).arg(&self.directory);
        output(command.arg(self.port.to_string())).map(drop)
    }
}

impl Drop for S3Server {
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
