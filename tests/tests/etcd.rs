//! Clusters whose nodes are agreed on in etcd: a real one, which is killed and started again.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged::membership::{
    EtcdConfig, EtcdError, EtcdRecords, NumberedRecords, Proposal, RegistryError,
};
use storaged_sdk::ClientError;
use storaged_sdk::wire::RefusalCode;
use storaged_tests::clients::WAIT_MS;
use storaged_tests::etcd::Etcd;
use storaged_tests::registries::{
    Nodes, no_run_gets_a_number_below_the_newest, one_of_many_comes_first, record,
    the_largest_roster_fits, write_certificates,
};
use storaged_tests::system::{shards, wait, write_secret};
use tempfile::TempDir;

fn config(etcd: &Etcd) -> EtcdConfig {
    EtcdConfig {
        endpoints: vec![etcd.endpoint()],
        prefix: "storaged/test".into(),
        ca: None,
        certificate: None,
        key: None,
        user: None,
        password_file: None,
    }
}

fn records(etcd: &Etcd) -> Result<Arc<dyn NumberedRecords>> {
    Ok(Arc::new(EtcdRecords::open(&config(etcd))?))
}

#[tokio::test]
async fn of_many_that_create_an_epoch_one_comes_first_and_all_read_its_record() -> Result<()> {
    let etcd = Etcd::start()?;
    one_of_many_comes_first(|| records(&etcd)).await
}

/// Far above what etcd takes in one request.
#[tokio::test]
async fn a_roster_of_the_largest_cluster_fits() -> Result<()> {
    let etcd = Etcd::start()?;
    the_largest_roster_fits(records(&etcd)?).await
}

#[tokio::test]
async fn no_run_gets_a_number_below_the_newest_one() -> Result<()> {
    let etcd = Etcd::start()?;
    no_run_gets_a_number_below_the_newest(records(&etcd)?).await
}

/// A proxy whose members are away; where it listens. It answers once.
fn proxy() -> Result<String> {
    let proxy = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = proxy.local_addr()?;
    std::thread::spawn(move || -> Result<()> {
        let (mut stream, _) = proxy.accept()?;
        let mut asked = [0; 4096];
        ensure!(stream.read(&mut asked)? > 0);
        let answer = "HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nwhat";
        Ok(stream.write_all(answer.as_bytes())?)
    });
    Ok(format!("http://{address}/"))
}

#[tokio::test]
async fn the_next_member_is_asked_where_one_does_not_answer_as_etcd_does() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut config = config(&etcd);
    config.endpoints.insert(0, proxy()?);
    let records = EtcdRecords::open(&config)?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    config.endpoints = vec![proxy()?];
    let answer = EtcdRecords::open(&config)?.record(1).await;
    let Err(RegistryError::Etcd(EtcdError::Answer { got })) = answer else {
        anyhow::bail!("{answer:?}");
    };
    ensure!(got.contains("502") && got.contains("127.0.0.1"), "{got}");
    Ok(())
}

#[tokio::test]
async fn the_next_member_is_asked_and_where_none_answers_that_is_said() -> Result<()> {
    let mut etcd = Etcd::start()?;
    let mut config = config(&etcd);
    config.endpoints.insert(0, "http://127.0.0.1:1".into());
    let records = EtcdRecords::open(&config)?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    etcd.kill()?;
    let Err(RegistryError::Etcd(EtcdError::Away { .. })) = records.record(1).await else {
        anyhow::bail!("nobody is there");
    };
    etcd.start_again()?;
    let found = records.record(1).await?.context("it is there")?;
    ensure!(found.bytes == record("one"));
    Ok(())
}

/// etcd takes only whom its authority has signed for, and this side takes only an etcd that its own has.
#[tokio::test]
async fn certificates_are_checked_on_both_sides() -> Result<()> {
    let (ours, others) = (tempfile::tempdir()?, tempfile::tempdir()?);
    for folder in [&ours, &others] {
        write_certificates(folder.path())?;
    }
    let etcd = Etcd::start_with_tls(ours.path())?;
    let of = |ca: &TempDir, own: Option<&TempDir>| EtcdConfig {
        ca: Some(ca.path().join("ca.pem")),
        certificate: own.map(|it| it.path().join("localhost.pem")),
        key: own.map(|it| it.path().join("localhost.key")),
        ..config(&etcd)
    };
    let records = EtcdRecords::open(&of(&ours, Some(&ours)))?;
    wait_for_it(&records).await?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    for refused in [
        of(&ours, None),
        of(&ours, Some(&others)),
        of(&others, Some(&ours)),
    ] {
        let answer = EtcdRecords::open(&refused)?.record(1).await;
        let Err(RegistryError::Etcd(EtcdError::Away { .. })) = answer else {
            anyhow::bail!("{refused:?}: {answer:?}");
        };
    }
    Ok(())
}

/// Certificates are given for months, and a daemon runs for longer. What is in their files is used from then on.
#[tokio::test]
async fn certificates_are_read_again_when_their_files_change() -> Result<()> {
    let (ours, expired) = (tempfile::tempdir()?, tempfile::tempdir()?);
    for folder in [&ours, &expired] {
        write_certificates(folder.path())?;
    }
    let etcd = Etcd::start_with_tls(ours.path())?;
    let file = |name: &str| expired.path().join(name);
    let config = EtcdConfig {
        ca: Some(file("ca.pem")),
        certificate: Some(file("localhost.pem")),
        key: Some(file("localhost.key")),
        ..config(&etcd)
    };
    let records = EtcdRecords::open(&config)?;
    ensure!(
        records.newest().await.is_err(),
        "it is of another authority"
    );
    std::fs::write(file("localhost.pem"), "half of a certificate")?;
    ensure!(records.newest().await.is_err());
    for name in ["ca.pem", "localhost.pem", "localhost.key"] {
        std::fs::copy(ours.path().join(name), file(name))?;
    }
    wait_for_it(&records).await?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    Ok(())
}

/// It listens before it answers.
async fn wait_for_it(records: &EtcdRecords) -> Result<()> {
    for _ in 0..600 {
        if records.newest().await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("etcd does not answer")
}

/// One token is asked for and used until etcd does not know it any more.
#[tokio::test]
async fn a_user_gets_a_new_token_when_etcd_has_forgotten_the_old_one() -> Result<()> {
    let mut etcd = Etcd::start()?;
    for (path, body) in [
        ("auth/user/add", r#"{"name":"root","password":"r"}"#),
        ("auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("auth/enable", "{}"),
    ] {
        etcd.post(path, body).with_context(|| path.to_owned())?;
    }
    let folder = tempfile::tempdir()?;
    let password_file = folder.path().join("password");
    write_secret(&password_file, "r\n")?;
    let as_user = |name: &str| EtcdConfig {
        user: Some(name.into()),
        password_file: Some(password_file.clone()),
        ..config(&etcd)
    };
    let (records, stranger) = (
        EtcdRecords::open(&as_user("root"))?,
        EtcdRecords::open(&as_user("eve"))?,
    );
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    for refused in [stranger, EtcdRecords::open(&config(&etcd))?] {
        let error = refused.record(1).await.err().context("it is refused")?;
        let refused = matches!(error, RegistryError::Etcd(EtcdError::Refused { .. }));
        ensure!(refused, "{error:?}");
    }
    // Tokens live in its memory.
    etcd.kill()?;
    etcd.start_again()?;
    let found = records.record(1).await?.context("it is there")?;
    ensure!(found.bytes == record("one"));
    Ok(())
}

/// Signed tokens say for which users and roles they were given; whoever changes a role makes all of them useless.
#[tokio::test]
async fn a_user_gets_a_new_token_when_roles_have_changed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (key, password_file) = (folder.path().join("key"), folder.path().join("password"));
    std::fs::write(&key, "thirty-two bytes that sign tokens")?;
    write_secret(&password_file, "r")?;
    let signed = format!("jwt,priv-key={},sign-method=HS256,ttl=1h", key.display());
    let etcd = Etcd::start_with(&["--auth-token".into(), signed])?;
    for (path, body) in [
        ("auth/user/add", r#"{"name":"root","password":"r"}"#),
        ("auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("auth/enable", "{}"),
    ] {
        etcd.post(path, body).with_context(|| path.to_owned())?;
    }
    let login = r#"{"name":"root","password":"r"}"#;
    let operator = || -> Result<String> {
        let answer = etcd.post("auth/authenticate", login)?;
        Ok(answer["token"].as_str().context("a token")?.to_owned())
    };
    let records = EtcdRecords::open(&EtcdConfig {
        user: Some("root".into()),
        password_file: Some(password_file.clone()),
        ..config(&etcd)
    })?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    etcd.post_as(Some(&operator()?), "auth/role/add", r#"{"name":"new"}"#)?;
    let found = records.record(1).await?.context("it is there")?;
    ensure!(found.bytes == record("one"));
    // Nobody needs a token any more, and nobody gets one.
    etcd.post_as(Some(&operator()?), "auth/disable", "{}")?;
    let again = EtcdRecords::open(&EtcdConfig {
        user: Some("root".into()),
        password_file: Some(password_file),
        ..config(&etcd)
    })?;
    ensure!(again.record(1).await?.is_some() && records.record(1).await?.is_some());
    Ok(())
}

fn nodes_of(etcd: &Etcd, nodes: usize, places: usize, extra: &str) -> Result<Nodes> {
    nodes_of_members(&[etcd], nodes, places, extra)
}

fn nodes_of_members(etcd: &[&Etcd], nodes: usize, places: usize, extra: &str) -> Result<Nodes> {
    let endpoints: Vec<String> = etcd.iter().map(|it| it.endpoint()).collect();
    let registry =
        format!("{{ kind = \"etcd\", endpoints = {endpoints:?}, prefix = \"storaged/test\" }}");
    let config = EtcdConfig {
        endpoints,
        ..config(etcd[0])
    };
    let records = Arc::new(EtcdRecords::open(&config)?);
    Nodes::with_registry(&registry, records, nodes, places, extra)
}

/// A job saves on and on; a node is lost, first while etcd is there, then while it is away.
#[test]
fn nodes_are_replaced_under_a_saving_job_and_once_etcd_is_back() -> Result<()> {
    let mut etcd = Etcd::start()?;
    let mut nodes = nodes_of(&etcd, 5, 3, "replace_after = \"3s\"\n")?;
    nodes.start(0..3)?;
    nodes.linked(0..3, 2)?;
    nodes.start(3..5)?;
    let (run, mut trainers) = nodes.system.trainers(2)?;
    nodes.save(run, &mut trainers, 1)?;
    nodes.system.cluster.kill(2)?;
    let second = nodes.last_is_one_of(&[3, 4])?;
    nodes.linked([0, 1, second], 2)?;
    nodes.save(run, &mut trainers, 2)?;
    etcd.kill()?;
    nodes.save(run, &mut trainers, 3)?;
    nodes.system.cluster.kill(second)?;
    std::thread::sleep(Duration::from_secs(5));
    nodes.linked([0, 1], 1)?;
    etcd.start_again()?;
    let spare = nodes
        .last_is_one_of(&[7 - second])
        .with_context(|| nodes.system.cluster.log_end(0, 40))?;
    nodes.linked([0, 1, spare], 2)?;
    nodes.save(run, &mut trainers, 4)?;
    let restored = nodes.system.restore(&[0, 1], 4, &shards(2, 4))?;
    ensure!(restored.len() == 2);
    Ok(())
}

/// Each member is away once; the other two agree, and a node that is lost meanwhile is replaced. Runs are opened by them as well.
#[test]
fn an_etcd_of_three_loses_a_member_under_a_saving_job() -> Result<()> {
    let mut etcd = Etcd::start_members(3)?;
    let members: Vec<&Etcd> = etcd.iter().collect();
    let mut nodes = nodes_of_members(&members, 5, 3, "replace_after = \"3s\"\n")?;
    nodes.start(0..3)?;
    nodes.linked(0..3, 2)?;
    nodes.start(3..5)?;
    let (run, mut trainers) = nodes.system.trainers(2)?;
    nodes.save(run, &mut trainers, 1)?;
    etcd[0].kill()?;
    nodes.save(run, &mut trainers, 2)?;
    nodes.system.cluster.kill(2)?;
    let second = nodes.last_is_one_of(&[3, 4])?;
    nodes.linked([0, 1, second], 2)?;
    nodes.save(run, &mut trainers, 3)?;
    // It has slept through that, and is needed at once.
    etcd[0].start_again()?;
    etcd[1].kill()?;
    nodes.system.cluster.kill(second)?;
    let spare = nodes.last_is_one_of(&[7 - second])?;
    nodes.linked([0, 1, spare], 2)?;
    nodes.save(run, &mut trainers, 4)?;
    drop(trainers);
    etcd[1].start_again()?;
    etcd[2].kill()?;
    let (next, mut trainers) = nodes.system.trainers(2)?;
    ensure!(next.number() == run.number() + 1, "{next} after {run}");
    nodes.save(next, &mut trainers, 5)?;
    let restored = nodes.system.restore(&[0, 1], 5, &shards(2, 5))?;
    ensure!(restored.len() == 2);
    Ok(())
}

/// One member of three cannot agree on anything: jobs go on, a new run is refused, and comes once there are two.
#[test]
fn an_etcd_without_a_majority_opens_no_run_until_it_has_one() -> Result<()> {
    let mut etcd = Etcd::start_members(3)?;
    let members: Vec<&Etcd> = etcd.iter().collect();
    let mut nodes = nodes_of_members(&members, 3, 3, "replace_after = \"0s\"\n")?;
    nodes.start(0..3)?;
    nodes.linked(0..3, 2)?;
    let (run, mut trainers) = nodes.system.trainers(2)?;
    nodes.save(run, &mut trainers, 1)?;
    etcd[1].kill()?;
    etcd[2].kill()?;
    nodes.save(run, &mut trainers, 2)?;
    let refused = nodes.system.reader(0)?.open_run(8_000);
    let Err(ClientError::Refused(refusal)) = refused else {
        anyhow::bail!("{refused:?}");
    };
    ensure!(refusal.code == RefusalCode::TimedOut, "{refusal}");
    ensure!(refusal.message.contains("membership.registry"), "{refusal}");
    nodes.save(run, &mut trainers, 3)?;
    etcd[2].spawn()?;
    let next = nodes.system.reader(0)?.open_run(WAIT_MS)?;
    ensure!(next.number() > run.number(), "{next} after {run}");
    Ok(())
}

#[test]
fn two_nodes_that_join_at_once_both_get_places() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut nodes = nodes_of(&etcd, 8, 6, "")?;
    nodes.start(0..6)?;
    nodes.linked(0..6, 5)?;
    let (run, mut trainers) = nodes.system.trainers(2)?;
    nodes.save(run, &mut trainers, 1)?;
    let resized = std::process::Command::new(storaged_tests::system::executable())
        .args(["node", "resize", "8", "--config"])
        .arg(nodes.system.cluster.config_path(0))
        .output()?;
    ensure!(resized.status.success(), "{resized:?}");
    nodes.start(6..8)?;
    wait("all places", || {
        let filled = nodes.filled()?;
        ensure!(filled.len() == 8, "{filled:?}");
        Ok(())
    })?;
    nodes.linked(0..8, 7)?;
    nodes.save(run, &mut trainers, 2)?;
    Ok(())
}

/// etcd takes no writes any more until somebody makes room: jobs go on, and a drain says what etcd says.
#[test]
fn an_etcd_without_space_is_said_and_holds_up_no_job() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut nodes = nodes_of(&etcd, 3, 3, "replace_after = \"0s\"\n")?;
    nodes.start(0..3)?;
    nodes.linked(0..3, 2)?;
    let (run, mut trainers) = nodes.system.trainers(2)?;
    nodes.save(run, &mut trainers, 1)?;
    let alarm = |action: &str| {
        let body = format!(r#"{{"action":"{action}","memberID":0,"alarm":"NOSPACE"}}"#);
        etcd.post("maintenance/alarm", &body)
    };
    alarm("ACTIVATE")?;
    nodes.save(run, &mut trainers, 2)?;
    let socket = nodes.system.cluster.socket(2);
    let drained = std::process::Command::new(storaged_tests::system::executable())
        .args(["drain", "--json", "--socket"])
        .arg(socket.with_file_name("admin.sock"))
        .output()?;
    let said = String::from_utf8_lossy(&drained.stdout);
    ensure!(drained.status.code() == Some(75), "{drained:?}");
    ensure!(said.contains("database space exceeded"), "{said}");
    ensure!(nodes.filled()?.contains(&"n2".to_owned()));
    nodes.system.cluster.wait(2)?;
    nodes.system.cluster.start(2)?;
    nodes.linked(0..3, 2)?;
    nodes.save(run, &mut trainers, 3)
}
