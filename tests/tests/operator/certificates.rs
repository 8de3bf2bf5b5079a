//! A certificate that has expired: the node says that it is its own, is not ready, and a renewal and a reload mend it.

use std::fs;
use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;
use storaged::cluster::Page;
use storaged::net::cert::issue;
use storaged_sdk::wire::NodeName;
use storaged_tests::system::System;

use crate::node::{log, said, storaged, until};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn an_expired_certificate_is_named_and_mended_without_a_restart() -> Result<()> {
    let mut system = System::start(2, None, "")?;
    let certificates = system.root.path().join("certs");
    system.cluster.kill(1)?;
    fs::remove_file(certificates.join("n1.pem"))?;
    fs::remove_file(certificates.join("n1.key"))?;
    issue(&certificates, &NodeName::new("n1")?, Duration::ZERO)?;

    let file = system.cluster.config_path(1).display().to_string();
    let checked = storaged(&system, 1, &["config", &file])?;
    assert!(
        !checked.status.success() && said(&checked).contains("cert renew"),
        "{}",
        said(&checked)
    );

    system.cluster.start(1)?;
    let own = "the certificate of this node expired";
    until("it says so at start", LONG, || {
        Ok(log(&system, 1)?.contains(own))
    })?;
    // After the grace as well.
    std::thread::sleep(Duration::from_secs(6));
    let Page {
        code,
        body: reasons,
    } = system.cluster.page(1, "/readyz")?;
    assert!(
        code == 503 && reasons.contains(own) && reasons.contains("none: n0"),
        "{reasons}"
    );
    let Page {
        code,
        body: reasons,
    } = system.cluster.page(0, "/readyz")?;
    assert!(
        code == 503 && reasons.contains("the certificate of n1"),
        "{reasons}"
    );

    // What it advises works.
    let directory = certificates.display().to_string();
    let renewed = storaged(&system, 1, &["cert", "renew", &directory, "n1"])?;
    assert!(renewed.status.success(), "{}", said(&renewed));
    system.cluster.signal(1, Signal::HUP)?;
    for node in [0, 1] {
        until("it is ready", LONG, || {
            Ok(system.cluster.page(node, "/readyz")?.code == 200)
        })?;
    }
    Ok(())
}

#[test]
fn a_configuration_with_wrong_certificates_is_refused_before_it_runs() -> Result<()> {
    let system = System::start(2, None, "")?;
    let path = system.cluster.config_path(0);
    let sound = fs::read_to_string(&path)?;
    let file = path.display().to_string();
    let good = said(&storaged(&system, 0, &["config", &file])?);
    assert!(
        good.contains("certificate until 2") && good.contains("ranks per node 8"),
        "{good}"
    );
    for (wrong, told) in [("missing", "missing.pem"), ("n1", "n0.node.storaged")] {
        let text = sound.replace("n0.pem", &format!("{wrong}.pem"));
        fs::write(&path, text.replace("n0.key", "n1.key"))?;
        let checked = storaged(&system, 0, &["config", &file])?;
        assert!(!checked.status.success(), "{wrong}");
        let error = said(&checked);
        assert!(error.contains(told) || error.contains("n0"), "{error}");
    }
    // A key that belongs to another certificate.
    fs::write(&path, sound.replace("n0.key", "n1.key"))?;
    let checked = storaged(&system, 0, &["config", &file])?;
    assert!(!checked.status.success(), "{}", said(&checked));
    Ok(())
}
