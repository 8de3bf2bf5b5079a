//! A daemon under a service's umask: trainers get to their sockets all the same.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Result;
use storaged_tests::system::executable;

use crate::node::until;

/// A daemon that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn sockets_can_be_reached_under_a_tight_umask() -> Result<()> {
    let root = tempfile::tempdir()?;
    let run = root.path().join("run/storaged");
    let config = root.path().join("storaged.toml");
    let text = format!(
        "[node]\nname = \"n0\"\nops_listen = \"127.0.0.1:0\"\nruntime_dir = \"{}\"\n[memory]\nbudget = \"16MiB\"\n[[tenants]]\ndirectory = \"{}\"\nuids = [0, 4242]\n",
        run.display(),
        run.display(),
    );
    fs::write(&config, text)?;
    // The same limits as in the unit, as far as a process can set them for itself.
    let limited = "umask 077; ulimit -c 0; exec \"$0\" run --keep none --config \"$1\"";
    let daemon = Command::new("sh")
        .args(["-c", limited])
        .arg(executable())
        .arg(&config)
        .stderr(Stdio::null())
        .spawn()?;
    let _daemon = Running(daemon);
    let socket = run.join("storaged.sock");
    let mode =
        |path: &Path| -> Result<u32> { Ok(fs::metadata(path)?.permissions().mode() & 0o777) };
    until("the socket has its mode", Duration::from_secs(60), || {
        Ok(socket.exists() && mode(&socket)? == 0o666)
    })?;
    for directory in [run.as_path(), &root.path().join("run")] {
        assert_eq!(mode(directory)?, 0o755, "{}", directory.display());
    }
    Ok(())
}
