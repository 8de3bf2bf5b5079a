//! The quick set of `make attack`, against the daemon that was built with the tests: all is held, nothing crosses, and it does not say so by itself.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Result, ensure};
use serde_json::Value;

fn attack(arguments: &[&str], file: &Path) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attack"));
    Ok(command.args(arguments).arg("--write").arg(file).output()?)
}

#[test]
fn the_quick_attacks_are_held_and_nothing_crosses_between_tenants() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("security.json");
    std::fs::write(&file, r#"{"of_others": 7}"#)?;
    let ended = attack(&["--quick"], &file)?;
    ensure!(ended.status.success(), "{ended:?}");
    let written: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    let number = |key: &str| written[key].as_f64();
    let attacks = number("attacks").unwrap_or_default();
    ensure!(attacks >= 12.0, "{written}");
    ensure!(number("attacks_held") == Some(attacks), "{written}");
    let crossed = number("cross_tenant_operations_possible");
    ensure!(crossed == Some(0.0), "{written}");
    let tried = number("cross_tenant_operations_tried");
    ensure!(tried >= Some(20.0), "{written}");
    ensure!(number("daemon_aborts") == Some(0.0), "{written}");
    // Five descriptions of 60 MiB, which count in the budget, and the sixth on its way. One has a few bytes unpacked to a gibibyte.
    let own_memory = number("rss_over_budget_mib_max");
    ensure!(own_memory < Some(400.0), "{written}");
    // One description is kept and one on its way, of sixteen.
    let of_one_step = number("attack_commits_again_and_again_mib");
    ensure!(of_one_step < Some(192.0), "{written}");
    // The daemon is not optimized, and other tests run beside it: what stops its only loop is seen all the same.
    let status = number("attack_ranges_of_the_tier_p99_ms");
    ensure!(status < Some(2_000.0), "{written}");
    ensure!(number("of_others") == Some(7.0), "{written}");
    Ok(())
}

/// A daemon ends, the honest job loses its steps, memory is kept: a program that does not notice these notices nothing.
#[test]
fn an_attack_that_falls_is_told() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("security.json");
    let ended = attack(&["--only", "planted", "--memory-wait", "5"], &file)?;
    ensure!(!ended.status.success(), "{ended:?}");
    let written: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    let number = |key: &str| written[key].as_f64();
    ensure!(number("attacks") == Some(3.0), "{written}");
    ensure!(number("attacks_held") == Some(0.0), "{written}");
    ensure!(number("daemon_aborts") == Some(1.0), "{written}");
    Ok(())
}
