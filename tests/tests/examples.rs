//! The example of the Rust SDK, as its reader runs it.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use storaged_tests::system::{System, executable};

fn example(name: &str) -> PathBuf {
    executable().with_file_name("examples").join(name)
}

fn start(system: &System, namespace: &str, steps: u32) -> Result<Child> {
    let mut command = Command::new(example("save_and_restore"));
    command
        .arg(steps.to_string())
        .env("STORAGED_SOCKET", system.cluster.socket(0))
        .env("STORAGED_NAMESPACE", namespace)
        .env("STORAGED_TOKEN", "a-secret-of-tests")
        .stdout(Stdio::piped());
    command
        .spawn()
        .context("make tests-built builds the examples")
}

/// What it prints until it ends, or is killed after a line that begins so.
fn lines(mut example: Child, killed_after: Option<&str>) -> Result<Vec<String>> {
    let output = example.stdout.take().context("its output is piped")?;
    let mut lines = Vec::new();
    for line in BufReader::new(output).lines() {
        lines.push(line?);
        let last = lines.last().map(String::as_str).unwrap_or_default();
        if killed_after.is_some_and(|prefix| last.starts_with(prefix)) {
            example.kill()?;
        }
    }
    let status = example.wait()?;
    ensure!(status.success() || killed_after.is_some(), "{status}");
    Ok(lines)
}

/// The sum that a step ended with.
fn sum(lines: &[String], step: u32) -> Option<String> {
    let prefix = format!("step {step} sum ");
    let mut sums = lines.iter().filter_map(|line| line.strip_prefix(&prefix));
    sums.next().map(Into::into)
}

#[test]
fn the_solver_goes_on_where_it_was_killed() -> Result<()> {
    let system = System::start(1, None, "")?;
    let straight = lines(start(&system, "straight", 40)?, None)?;
    let killed = lines(start(&system, "killed", 10_000)?, Some("step 20 "))?;
    ensure!(
        sum(&killed, 10_000).is_none(),
        "it was killed before its end"
    );
    let last = killed.len() - 1;
    let resumed = lines(start(&system, "killed", last as u32 + 20)?, None)?;
    let done = resumed[0]
        .strip_prefix("goes on after step ")
        .context("it says so")?;
    // The last steps, of as many as a rank has slots, may have been sealed and not digested when their trainer died.
    ensure!(done.parse::<usize>()? + 3 >= last, "{done} of {last}");
    for step in 1..=40 {
        let of_killed = sum(&killed, step).or_else(|| sum(&resumed, step));
        ensure!(of_killed == sum(&straight, step), "step {step}");
    }
    Ok(())
}
