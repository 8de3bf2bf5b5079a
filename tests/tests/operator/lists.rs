//! One list of nodes for all of them, and failure domains that the launcher says.

use std::fs;
use std::process::Command;

use anyhow::Result;
use storaged::cluster::Hosts;
use storaged_tests::system::{System, executable};

use crate::node::{said, storaged};

/// The nodes' files with all of them in one section, each with its own among them.
fn list_all(system: &System, nodes: usize) -> Result<()> {
    let all = |each: &dyn Fn(usize) -> String| (0..nodes).map(each).collect::<Vec<_>>().join(",");
    let addresses = all(&|node| system.cluster.hosts().address(node).to_string());
    let section = format!(
        "[[peers]]\nname = \"n[0-{}]\"\naddress = \"{addresses}\"\nfailure_domain = \"zone[0-{}]/rack\"\n\n",
        nodes - 1,
        nodes - 1
    );
    for node in 0..nodes {
        let path = system.cluster.config_path(node);
        let text = fs::read_to_string(&path)?;
        let (before, _) = text.split_once("[[peers]]").unwrap_or((&text, ""));
        let (_, after) = text.split_once("[coding]").unwrap_or(("", ""));
        fs::write(path, format!("{before}{section}[coding]{after}"))?;
    }
    Ok(())
}

#[test]
fn nodes_that_share_a_host_list_link_up() -> Result<()> {
    let mut system = System::prepared(3, Some((1, 1)), "")?;
    list_all(&system, 3)?;
    system.cluster.start_all()?;
    let path = system.cluster.config_path(0).display().to_string();
    let told = said(&storaged(&system, 0, &["config", &path])?);
    assert!(told.contains("node n0 of 3"), "{told}");
    assert!(
        told.contains("in one failure domain: at most 1 at level 1 (its loss is borne), 1 at level 2 (its loss is borne)"),
        "{told}"
    );
    // Two in one zone, as the launcher says of this one.
    let executable = executable();
    let checked = Command::new(&executable)
        .args(["config", &path])
        .env("STORAGED_FAILURE_DOMAIN", "zone1/other")
        .output()?;
    let told = said(&checked);
    assert!(
        checked.status.success() && told.contains("at most 2 at level 1 (its loss is not borne)"),
        "{told}"
    );
    let unset = Command::new(&executable)
        .args(["config", &path, "--failure-domain", "zone1/"])
        .output()?;
    let told = said(&unset);
    assert!(
        !unset.status.success()
            && told.contains("node.failure_domain")
            && told.contains("\"zone1/\""),
        "{told}"
    );
    Ok(())
}
