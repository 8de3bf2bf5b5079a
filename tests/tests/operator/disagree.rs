//! Nodes that are configured differently say so, by key and with both values, and are not ready.

use std::time::Duration;

use anyhow::Result;
use storaged::cluster::Page;
use storaged_tests::system::{System, said};

use crate::node::{log, rewrite, status, until};

const LONG: Duration = Duration::from_secs(20);

fn disagree(from: &str, to: &str, told: &[&str]) -> Result<()> {
    let mut system = System::start(3, Some((1, 1)), "")?;
    system.cluster.kill(2)?;
    rewrite(&system, 2, from, to)?;
    system.cluster.start(2)?;
    for (node, peers) in [(0, 1), (2, 2)] {
        let refused = || {
            Ok(system
                .cluster
                .metric::<f64>(node, "storaged_place_peers_refused")?
                == f64::from(peers))
        };
        until("the others are refused", LONG, refused)?;
        let Page {
            code,
            body: reasons,
        } = system.cluster.page(node, "/readyz")?;
        assert_eq!(code, 503, "{reasons}");
        let json = status(&system, node)?;
        assert_eq!(json["ready"], false);
        let text = said(&system.storaged(node, &["status"])?);
        for part in told {
            assert!(reasons.contains(part), "readyz: {part} in {reasons}");
            assert!(text.contains(part), "status: {part} in {text}");
        }
    }
    // Once, not at every dial.
    std::thread::sleep(Duration::from_secs(4));
    let text = log(&system, 0)?;
    assert_eq!(text.matches("not linked to a peer").count(), 1, "{text}");
    Ok(())
}

#[test]
fn another_m_is_named_with_both_values() -> Result<()> {
    disagree("m = 1\n", "m = 2\n", &["coding.m", "1 ", "2 "])
}

#[test]
fn another_chunk_size_is_named_with_both_values() -> Result<()> {
    disagree(
        "m = 1\n",
        "m = 1\nchunk = \"64KiB\"\n",
        &["coding.chunk", "256KiB", "64KiB"],
    )
}

#[test]
fn another_failure_domain_is_named_with_both_values() -> Result<()> {
    let to = "name = \"n2\"\nfailure_domain = \"rack-7\"\n";
    disagree(
        "name = \"n2\"\n",
        to,
        &["failure_domain", "n2=rack-7", "n2=n2"],
    )
}

/// It is changed node by node, so links come up; what is said to bear losses is wrong meanwhile, and that is told.
#[test]
fn another_number_of_kept_steps_is_told_and_parts_nobody() -> Result<()> {
    let mut system = System::prepared(2, None, "[memory]\nkeep_steps = 1\n")?;
    rewrite(&system, 1, "keep_steps = 1", "keep_steps = 2")?;
    system.cluster.start_all()?;
    let values = ["is 1 here and 2 there", "is 2 here and 1 there"];
    for (node, values) in values.into_iter().enumerate() {
        let text = said(&system.storaged(node, &["status"])?);
        let told = format!("memory.keep_steps {values}");
        assert!(text.contains(&told), "{text}");
        assert_eq!(status(&system, node)?["ready"], true);
        let text = log(&system, node)?;
        assert_eq!(
            text.matches("should be configured as this node").count(),
            1,
            "{text}"
        );
    }
    rewrite(&system, 1, "keep_steps = 2", "keep_steps = 1")?;
    system.cluster.kill(1)?;
    system.cluster.start(1)?;
    system.cluster.wait_for_links()?;
    until("nothing differs", LONG, || {
        let json = status(&system, 0)?;
        Ok(json["differing"] == serde_json::json!([]))
    })
}
