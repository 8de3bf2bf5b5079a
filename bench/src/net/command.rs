//! Other programs: run to their end with text on standard input, and whether the ones needed are there.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// What makes networks, with the Debian package that has it.
const PROGRAMS: [(&str, &str); 5] = [
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nft", "nftables"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
];

/// Why no network can be made here; none if one can.
pub fn obstacle() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("making network namespaces needs root".into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> = std::env::split_paths(&path).collect();
    let is_there = |name: &str| folders.iter().any(|folder| folder.join(name).is_file());
    if let Some((name, package)) = PROGRAMS.iter().find(|(name, _)| !is_there(name)) {
        return Some(format!(
            "the program {name} is missing: install the package {package}"
        ));
    }
    let name = format!("stbn{}-try", std::process::id());
    let tried = run("ip", &["netns", "add", &name], "");
    let error = tried.as_ref().err().map(|error| format!("{error:#}"));
    if error.is_none() {
        // It was made a moment ago, so it can go.
        let _ = run("ip", &["netns", "del", &name], "");
    }
    error.map(|error| format!("network namespaces cannot be made here: {error}"))
}

/// Runs a program to its end and gives what it printed.
///
/// # Errors
/// If it cannot be run or says that it failed.
pub fn run(program: &str, arguments: &[&str], input: &str) -> Result<String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("running {program}"))?;
    let Some(mut stdin) = child.stdin.take() else {
        bail!("{program} has no standard input");
    };
    // A program that ends before it has read all says why on standard error.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{program} {} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::run;

    #[test]
    fn output_comes_back_and_failure_says_why() {
        assert_eq!(run("cat", &[], "text").expect("cat runs"), "text");
        let error = run("ls", &["/no/such/folder"], "").expect_err("it is not there");
        assert!(error.to_string().contains("/no/such/folder"), "{error}");
    }
}
