//! One list of nodes for all of them, and failure domains that the launcher says.

use std::process::Command;

use anyhow::Result;
use storaged_tests::system::{System, executable};

use crate::node::{said, storaged};

#[test]
fn nodes_that_share_a_host_list_link_up() -> Result<()> {
    let mut system = System::prepared(3, Some((1, 1)), "")?;
    system.list_together("zone[0-2]/rack")?;
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
