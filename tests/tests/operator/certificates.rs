//! Certificates that have expired or were revoked, and files that cannot be used: what the node says, and what mends it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use storaged::cluster::Page;
use storaged::net::cert::issue;
use storaged_sdk::wire::NodeName;
use storaged_tests::system::{System, said};

use crate::node::{log, rewrite, until};

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
    let checked = system.storaged(1, &["config", &file])?;
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
    let renewed = system.storaged(1, &["cert", "renew", &directory, "n1"])?;
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
    let good = said(&system.storaged(0, &["config", &file])?);
    assert!(
        good.contains("certificate until 2") && good.contains("ranks per node 8"),
        "{good}"
    );
    for (wrong, told) in [("missing", "missing.pem"), ("n1", "n0.node.storaged")] {
        let text = sound.replace("n0.pem", &format!("{wrong}.pem"));
        fs::write(&path, text.replace("n0.key", "n1.key"))?;
        let checked = system.storaged(0, &["config", &file])?;
        assert!(!checked.status.success(), "{wrong}");
        let error = said(&checked);
        assert!(error.contains(told) || error.contains("n0"), "{error}");
    }
    // A key that belongs to another certificate.
    fs::write(&path, sound.replace("n0.key", "n1.key"))?;
    let checked = system.storaged(0, &["config", &file])?;
    assert!(!checked.status.success(), "{}", said(&checked));
    Ok(())
}

#[test]
fn a_revoked_peer_is_cut_off_without_a_reload_and_let_in_with_another_certificate() -> Result<()> {
    let mut system = System::start(2, None, "")?;
    let certificates = system.root.path().join("certs");
    let directory = certificates.display().to_string();
    let revoke = |system: &System, node: &str| -> Result<()> {
        let revoked = system.storaged(0, &["cert", "revoke", &directory, node])?;
        ensure!(revoked.status.success(), "{}", said(&revoked));
        Ok(())
    };
    // 0 while it starts.
    let code = |system: &System, node| {
        let page = system.cluster.page(node, "/readyz");
        page.map_or(0, |page| page.code)
    };
    let ready = |system: &System| Ok(code(system, 0) == 200 && code(system, 1) == 200);

    // A list that says nothing of the nodes that there are.
    issue(
        &certificates,
        &NodeName::new("n9")?,
        Duration::from_secs(3600),
    )?;
    revoke(&system, "n9")?;
    let list = certificates.join("crl.pem");
    let with_list = format!("[tls]\ncrl = \"{}\"\nwatch = \"1s\"\n", list.display());
    rewrite(&system, 0, "[tls]\n", &with_list)?;
    system.cluster.kill(0)?;
    system.cluster.start(0)?;
    until("both are ready", LONG, || ready(&system))?;

    revoke(&system, "n1")?;
    let refused = "the certificate of n1 was refused here";
    until("the link ends and the log says whose it was", LONG, || {
        Ok(log(&system, 0)?.contains(refused) && code(&system, 0) == 503)
    })?;

    // What is no list leaves the one before in use.
    let sound = fs::read(&list)?;
    fs::write(&list, "no list")?;
    until("the broken list is told of", LONG, || {
        let metrics = system.cluster.page(0, "/metrics")?.body;
        let counted = metrics.contains("storaged_place_certificate_refused_total 1");
        Ok(counted && log(&system, 0)?.contains("the old certificate stays"))
    })?;
    ensure!(code(&system, 0) == 503, "n1 was let in again");

    fs::write(&list, sound)?;
    let renewed = system.storaged(1, &["cert", "renew", &directory, "n1"])?;
    ensure!(renewed.status.success(), "{}", said(&renewed));
    system.cluster.signal(1, Signal::HUP)?;
    until("both are ready again", LONG, || ready(&system))
}

#[test]
fn a_key_that_others_may_read_is_refused_and_the_links_go_on() -> Result<()> {
    let system = System::start(2, None, "")?;
    let key = system.root.path().join("certs/n0.key");
    let file = system.cluster.config_path(0).display().to_string();
    fs::set_permissions(&key, Permissions::from_mode(0o644))?;
    let checked = system.storaged(0, &["config", &file])?;
    let error = said(&checked);
    ensure!(
        !checked.status.success() && error.contains("chmod 640"),
        "{error}"
    );
    system.cluster.signal(0, Signal::HUP)?;
    until("the reload says so", LONG, || {
        Ok(log(&system, 0)?.contains("chmod 640"))
    })?;
    ensure!(
        system.cluster.page(0, "/readyz")?.code == 200,
        "the link was lost"
    );
    fs::set_permissions(&key, Permissions::from_mode(0o640))?;
    let checked = system.storaged(0, &["config", &file])?;
    ensure!(checked.status.success(), "{}", said(&checked));
    Ok(())
}
