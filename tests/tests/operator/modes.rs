//! A daemon under a service's umask: trainers get to their sockets all the same.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
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

fn mode(path: &Path) -> Result<u32> {
    Ok(fs::metadata(path)?.permissions().mode() & 0o777)
}

/// Starts a daemon with a tenant under a tight umask; where its sockets are.
fn started(root: &Path, tenant: &str) -> Result<(Running, PathBuf)> {
    let run = root.join("run/storaged");
    let config = root.join("storaged.toml");
    let text = format!(
        "[node]\nname = \"n0\"\nops_listen = \"127.0.0.1:0\"\nruntime_dir = \"{}\"\n[memory]\nbudget = \"16MiB\"\n[[tenants]]\ndirectory = \"{}\"\n{tenant}",
        run.display(),
        run.join("tenant").display(),
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
    Ok((Running(daemon), run.join("tenant")))
}

#[test]
fn sockets_can_be_reached_under_a_tight_umask() -> Result<()> {
    let root = tempfile::tempdir()?;
    let (_daemon, directory) = started(root.path(), "uids = [0, 4242]\n")?;
    let socket = directory.join("storaged.sock");
    until("the socket has its mode", Duration::from_secs(60), || {
        Ok(socket.exists() && mode(&socket)? == 0o666)
    })?;
    for directory in [
        &directory,
        &root.path().join("run/storaged"),
        &root.path().join("run"),
    ] {
        assert_eq!(mode(directory)?, 0o755, "{}", directory.display());
    }
    Ok(())
}

#[test]
fn a_tenants_group_alone_reaches_its_socket() -> Result<()> {
    let root = tempfile::tempdir()?;
    let (_daemon, directory) = started(root.path(), "uids = [0, 4242]\ngroup = 4343\n")?;
    let socket = directory.join("storaged.sock");
    until("the socket has its mode", Duration::from_secs(60), || {
        Ok(socket.exists() && mode(&socket)? == 0o660)
    })?;
    assert_eq!(mode(&directory)?, 0o750);
    assert_eq!(mode(&root.path().join("run/storaged"))?, 0o755);
    for path in [&directory, &socket] {
        assert_eq!(fs::metadata(path)?.gid(), 4343, "{}", path.display());
    }
    Ok(())
}
