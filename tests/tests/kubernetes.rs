//! Clusters whose nodes are agreed on in Kubernetes: its API server is one of the tests' own (`storaged_tests::kubernetes`), as strict as the
//! real one where a registry hangs on it.

#[path = "kubernetes/hand_over.rs"]
mod hand_over;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use storaged::membership::{
    KubernetesConfig, KubernetesError, KubernetesRecords, NumberedRecords, Proposal, RegistryError,
};
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, RefusalCode};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::kubernetes::{ApiServer, Fault, NAMESPACE};
use storaged_tests::registries::{
    Nodes, no_run_gets_a_number_below_the_newest, one_of_many_comes_first, record,
    the_largest_roster_fits, write_certificates,
};
use storaged_tests::system::{System, executable, shards, wait};

fn config(api: &ApiServer) -> KubernetesConfig {
    KubernetesConfig {
        namespace: NAMESPACE.into(),
        prefix: "a".into(),
        server: Some(api.server()),
        ca: None,
        token_file: None,
    }
}

fn records(api: &ApiServer) -> Result<Arc<dyn NumberedRecords>> {
    Ok(Arc::new(KubernetesRecords::open(&config(api))?))
}

/// What is said of a failure, with its causes.
fn words(failed: &RegistryError) -> String {
    storaged::driver::chain(failed)
}

#[tokio::test]
async fn of_many_that_create_an_epoch_one_comes_first_and_all_read_its_record() -> Result<()> {
    let api = ApiServer::start()?;
    one_of_many_comes_first(|| records(&api)).await?;
    // The first to come found no head, and looked at all names; nobody else had to.
    ensure!(api.asked("LIST") <= 8, "{}", api.asked("LIST"));
    Ok(())
}

#[tokio::test]
async fn a_roster_of_the_largest_cluster_fits() -> Result<()> {
    the_largest_roster_fits(records(&ApiServer::start()?)?).await
}

#[tokio::test]
async fn no_run_gets_a_number_below_the_newest_one() -> Result<()> {
    no_run_gets_a_number_below_the_newest(records(&ApiServer::start()?)?).await
}

/// What the tests' own server is like, or should be.
#[tokio::test]
#[ignore = "needs a real API server: make kubernetes"]
async fn a_real_api_server_is_a_registry() -> Result<()> {
    let variable = |name| std::env::var(name).context(name);
    let at = KubernetesConfig {
        namespace: NAMESPACE.into(),
        prefix: String::new(),
        server: Some(variable("STORAGED_TESTS_API_SERVER")?),
        ca: Some(variable("STORAGED_TESTS_API_CA")?.into()),
        token_file: Some(variable("STORAGED_TESTS_API_TOKEN_FILE")?.into()),
    };
    let open = |prefix: &str| -> Result<Arc<dyn NumberedRecords>> {
        let prefix = prefix.into();
        Ok(Arc::new(KubernetesRecords::open(&KubernetesConfig {
            prefix,
            ..at.clone()
        })?))
    };
    ensure!(open("empty")?.newest().await?.is_none());
    one_of_many_comes_first(|| open("race")).await?;
    the_largest_roster_fits(open("large")?).await?;
    no_run_gets_a_number_below_the_newest(open("runs")?).await?;
    let records = open("gaps")?;
    for number in [3, 12, 40] {
        ensure!(records.create(number, record("one")).await? == Proposal::Taken);
        ensure!(records.create(number, record("other")).await? == Proposal::Outrun);
    }
    ensure!(records.create(13, record("late")).await? == Proposal::Taken);
    let newest = records.newest().await?.context("a record")?;
    ensure!(newest.bytes == record("one") && records.record(14).await?.is_none());
    Ok(())
}

/// Its names come in the order in which they were created, as the test's server lists them, and numbers have gaps.
#[tokio::test]
async fn the_newest_is_found_beside_a_head_that_is_ahead_or_gone() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    ensure!(records.newest().await?.is_none());
    for number in [3, 4, 12] {
        ensure!(records.create(number, record(&number.to_string())).await? == Proposal::Taken);
    }
    let newest = |text: &'static str| async {
        let found = records.newest().await?.context("a record")?;
        ensure!(found.bytes == record(text), "{found:?}");
        anyhow::Ok(())
    };
    newest("12").await?;
    // A node dies between the two.
    api.fault("POST", [Fault::Cut, Fault::Cut]);
    ensure!(records.create(40, record("40")).await.is_err());
    newest("12").await?;
    ensure!(records.create(13, record("13")).await? == Proposal::Taken);
    newest("13").await?;
    ensure!(records.create(40, record("other")).await? == Proposal::Taken);
    newest("other").await?;
    api.delete("a-epochs");
    newest("other").await?;
    // One that was held up since.
    ensure!(records.create(12, record("late")).await? == Proposal::Outrun);
    newest("other").await?;
    ensure!(records.create(14, record("late")).await? == Proposal::Taken);
    newest("other").await
}

/// Or a list that shows nothing to whoever asks: a cluster that began anew then would be a second one.
#[tokio::test]
async fn a_head_without_its_epochs_is_no_new_cluster() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    let delete_records = || {
        let names = api.names().into_iter().filter(|name| name != "a-epochs");
        names.for_each(|name| api.delete(&name));
    };
    // As a node leaves it that dies between head and first record, which has begun nothing.
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    delete_records();
    ensure!(records.newest().await?.is_none());
    for number in [1, 2] {
        ensure!(records.create(number, record("any")).await? == Proposal::Taken);
    }
    delete_records();
    let error = records.newest().await.unwrap_err();
    ensure!(
        words(&error).contains("head of epoch 2"),
        "{}",
        words(&error)
    );
    Ok(())
}

#[tokio::test]
async fn an_answer_that_was_lost_costs_nothing() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    for (method, number) in [("PUT", 2), ("POST", 3), ("GET", 4)] {
        api.fault(method, [Fault::AnswerLost]);
        let created = records.create(number, record("x")).await;
        ensure!(
            matches!(created, Ok(Proposal::Taken)),
            "{method}: {created:?}"
        );
    }
    // Head and records, each once.
    ensure!(api.names().len() == 5, "{:?}", api.names());
    Ok(())
}

#[tokio::test]
async fn a_busy_server_is_asked_again_for_as_long_as_it_says_and_not_for_ever() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    let begun = Instant::now();
    api.fault(
        "GET",
        [Fault::Status(429, Some(1)), Fault::Status(503, None)],
    );
    api.fault("POST", [Fault::Status(500, None), Fault::Status(410, None)]);
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    ensure!(begun.elapsed() >= Duration::from_secs(1));
    for (faults, within) in [
        (vec![Fault::Status(429, Some(60))], 1),
        (vec![Fault::Status(503, None); 100], 4),
    ] {
        api.fault("GET", faults);
        let begun = Instant::now();
        let failed = records.record(1).await.err().context("it is busy")?;
        ensure!(begun.elapsed() < Duration::from_secs(within), "{begun:?}");
        let said = words(&failed);
        ensure!(
            said.contains("try again later") && said.contains("asked again"),
            "{said}"
        );
        ensure!(said.contains("429") || said.contains("503"), "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn what_is_refused_says_what_to_do() -> Result<()> {
    let api = ApiServer::start()?;
    let kubernetes = records(&api)?;
    ensure!(kubernetes.create(1, record("one")).await? == Proposal::Taken);
    let far = KubernetesRecords::open(&KubernetesConfig {
        namespace: "elsewhere".into(),
        ..config(&api)
    })?;
    // Reads find nothing there; writes say that there is no there.
    ensure!(far.newest().await?.is_none());
    let said = words(
        &far.create(1, record("one"))
            .await
            .err()
            .context("refused")?,
    );
    ensure!(
        said.contains("404") && said.contains("\"elsewhere\" not found"),
        "{said}"
    );
    ensure!(said.contains("create the namespace"), "{said}");
    let too_long = record(&"x".repeat(100)).repeat(20_000);
    ensure!(
        kubernetes.create(2, too_long.into()).await? == Proposal::Taken,
        "it is packed"
    );
    api.forbid("POST");
    let said = words(
        &kubernetes
            .create(3, record("x"))
            .await
            .err()
            .context("refused")?,
    );
    ensure!(
        said.contains("403") && said.contains("registry.yaml"),
        "{said}"
    );
    ensure!(said.contains("create configmap a-epochs-"), "{said}");
    Ok(())
}

/// The API server counts what a quota allows with versions of its own, and says so in the same words.
#[tokio::test]
async fn a_quota_that_is_being_changed_is_no_other_node() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    let quota = Fault::InTheWay("resourcequotas", "Conflict");
    // Of the head, and of the record.
    api.fault("POST", [quota, quota]);
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    api.fault("POST", [quota]);
    api.fault("PUT", [quota]);
    ensure!(records.create(2, record("two")).await? == Proposal::Taken);
    let newest = records.newest().await?.context("a record")?;
    ensure!(newest.bytes == record("two"), "{newest:?}");
    // What else is in the way is said as it is.
    api.fault("POST", [Fault::InTheWay("configmaps", "NotNow")]);
    let failed = records.create(3, record("three")).await;
    let said = words(&failed.err().context("it was refused")?);
    ensure!(
        said.contains("409") && said.contains("has been modified"),
        "{said}"
    );
    Ok(())
}

#[tokio::test]
async fn a_head_that_others_raise_again_and_again_is_tried_with_pauses() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    let other = Fault::InTheWay("configmaps", "Conflict");
    api.fault("PUT", vec![other; 100]);
    let begun = Instant::now();
    let failed = records.create(2, record("two")).await;
    let said = words(&failed.err().context("others were faster")?);
    ensure!(said.contains("again and again"), "{said}");
    // Twenty tries, and a longer pause after each till it is 200 ms.
    ensure!(
        begun.elapsed() >= Duration::from_secs(3),
        "{:?}",
        begun.elapsed()
    );
    ensure!(api.asked("PUT") == 0, "none was done");
    Ok(())
}

/// A proxy's page, or another server's, must not look like an empty registry: a cluster would begin anew.
#[tokio::test]
async fn a_page_that_is_not_there_is_no_registry_without_records() -> Result<()> {
    let api = ApiServer::start()?;
    let records = records(&api)?;
    for (status, page) in [(404, 404), (403, 403), (200, 200)] {
        api.fault("GET", [Fault::Page(page)]);
        let failed = records.newest().await;
        let Err(RegistryError::Kubernetes(KubernetesError::Answer { got })) = failed else {
            anyhow::bail!("{failed:?}");
        };
        ensure!(
            got.contains(&status.to_string()) && got.contains("<html>"),
            "{got}"
        );
    }
    api.fault("GET", [Fault::Status(404, None)]);
    ensure!(
        records.newest().await.is_err(),
        "it is absent only by its kind"
    );
    Ok(())
}

/// The kubelet replaces the token within the hour, in its file.
#[tokio::test]
async fn the_token_is_read_anew_and_given_to_the_right_server_alone() -> Result<()> {
    let (ours, others) = (tempfile::tempdir()?, tempfile::tempdir()?);
    for folder in [&ours, &others] {
        write_certificates(folder.path())?;
    }
    let api = ApiServer::start_with_tls(ours.path(), "first")?;
    let token_file = ours.path().join("token");
    std::fs::write(&token_file, "first\n")?;
    let with_ca = |ca: PathBuf| KubernetesConfig {
        ca: Some(ca),
        token_file: Some(token_file.clone()),
        ..config(&api)
    };
    let records = KubernetesRecords::open(&with_ca(ours.path().join("ca.pem")))?;
    ensure!(records.create(1, record("one")).await? == Proposal::Taken);
    api.set_token("second");
    let said = words(&records.record(1).await.err().context("it is refused")?);
    ensure!(
        said.contains("401") && said.contains("token_file"),
        "{said}"
    );
    ensure!(!said.contains("first"), "{said}");
    std::fs::write(&token_file, "second\n")?;
    ensure!(records.record(1).await?.is_some());
    std::fs::remove_file(&token_file)?;
    let said = words(&records.record(1).await.err().context("no token")?);
    ensure!(said.contains(&token_file.display().to_string()), "{said}");
    std::fs::write(&token_file, "second\n")?;
    let stranger = KubernetesRecords::open(&with_ca(others.path().join("ca.pem")))?;
    let asked = api.asked("GET");
    let failed = stranger.record(1).await;
    ensure!(
        matches!(
            failed,
            Err(RegistryError::Kubernetes(KubernetesError::Away { .. }))
        ),
        "{failed:?}"
    );
    ensure!(api.asked("GET") == asked, "it was asked nothing");
    Ok(())
}

/// A job saves on and on; a node is lost, first while the API server is there, then while it is away. Runs are opened by it too.
#[test]
fn nodes_are_replaced_under_a_saving_job_and_once_kubernetes_is_back() -> Result<()> {
    let api = ApiServer::start()?;
    let named = format!(
        "{{ kind = \"kubernetes\", namespace = \"{NAMESPACE}\", prefix = \"a\", server = \"{}\" }}",
        api.server()
    );
    let mut nodes = Nodes::with_registry(&named, records(&api)?, 5, 3, "replace_after = \"3s\"\n")?;
    nodes.start(0..3)?;
    nodes.linked(0..3, 2)?;
    nodes.start(3..5)?;
    let (run, mut trainers) = nodes.system.trainers(2)?;
    nodes.save(run, &mut trainers, 1)?;
    nodes.system.cluster.kill(2)?;
    let second = nodes.last_is_one_of(&[3, 4])?;
    nodes.linked([0, 1, second], 2)?;
    nodes.save(run, &mut trainers, 2)?;
    api.leave();
    nodes.save(run, &mut trainers, 3)?;
    nodes.system.cluster.kill(second)?;
    let refused = nodes.system.reader(0)?.open_run(8_000);
    let Err(ClientError::Refused(refusal)) = refused else {
        anyhow::bail!("{refused:?}");
    };
    ensure!(refusal.code == RefusalCode::TimedOut, "{refusal}");
    ensure!(refusal.message.contains("membership.registry"), "{refusal}");
    nodes.linked([0, 1], 1)?;
    api.come_back();
    let spare = nodes.last_is_one_of(&[7 - second])?;
    nodes.linked([0, 1, spare], 2)?;
    nodes.save(run, &mut trainers, 4)?;
    drop(trainers);
    let next = nodes.system.reader(0)?.open_run(WAIT_MS)?;
    ensure!(next.number() > run.number(), "{next} after {run}");
    let restored = nodes.system.restore(&[0, 1], 4, &shards(2, 4))?;
    ensure!(restored == [Rung::OwnRam, Rung::OwnRam], "{restored:?}");
    Ok(())
}

/// What the kubelet does before it ends the daemon of a node.
fn pre_stop(api: &ApiServer, system: &System, node: usize) -> Result<Command> {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/kubernetes/pre-stop.sh"
    );
    let (bin, socket) = (executable(), system.cluster.socket(node));
    let path = format!("{}:/usr/bin:/bin", bin.parent().context("bin")?.display());
    let mut command = Command::new(script);
    command
        .arg("--keep-place")
        .env("PATH", path)
        .env("STORAGED_SOCKET", socket.with_file_name("admin.sock"))
        .env("STORAGED_KUBERNETES_SERVER", api.server())
        // As daemon.sh may have it in the same pod: a second here.
        .env("STORAGED_LOOK_S", "0.5")
        .env("NODE_NAME", "worker")
        .env("POD_NAME", "storaged-x")
        .env("POD_NAMESPACE", NAMESPACE)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Ok(command)
}

/// What the container starts, with a daemon that only says what it was given.
fn daemon_script(api: &ApiServer, folder: &Path) -> Result<Command> {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/kubernetes/daemon.sh"
    );
    let (bin, given) = (executable(), "${STORAGED_FAILURE_DOMAIN-none}");
    let told = format!("[ \"$1\" = run ] && echo \"{given} $*\" && exit");
    let fake = folder.join("storaged");
    std::fs::write(
        &fake,
        format!("#!/bin/sh\n{told}\nexec {} \"$@\"\n", bin.display()),
    )?;
    std::fs::set_permissions(&fake, PermissionsExt::from_mode(0o755))?;
    let mut command = Command::new(script);
    command
        .args(["run", "--config", "file"])
        .env("PATH", format!("{}:/usr/bin:/bin", folder.display()))
        .env("STORAGED_KUBERNETES_SERVER", api.server())
        .env("STORAGED_LOOK_S", "0.1")
        .env("NODE_NAME", "worker")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Ok(command)
}

/// Without it a daemon would move to another one: it is not started before the API server has said it.
#[test]
fn a_daemon_is_started_in_the_failure_domain_that_its_nodes_labels_say() -> Result<()> {
    const LABELS: &str = "STORAGED_FAILURE_DOMAIN_LABELS";
    let zone_and_node = "topology.kubernetes.io/zone,kubernetes.io/hostname";
    let (api, folder) = (ApiServer::start()?, tempfile::tempdir()?);
    let labels = json!({"topology.kubernetes.io/zone": "zone-a", "kubernetes.io/hostname": "n3"});
    api.put(NODE, json!({"metadata": {"labels": labels}}));
    let with = |labels: &str| -> Result<Command> {
        let mut command = daemon_script(&api, folder.path())?;
        command.env(LABELS, labels);
        Ok(command)
    };
    let plain = with("")?.output()?;
    ensure!(plain.stdout == b"none run --config file\n", "{plain:?}");
    let placed = with(zone_and_node)?.output()?;
    ensure!(
        placed.stdout == b"zone-a/n3 run --config file\n",
        "{placed:?}"
    );
    let lacking = with("topology.kubernetes.io/zone,example.com/rack")?.output()?;
    let said = String::from_utf8_lossy(&lacking.stderr);
    ensure!(lacking.status.code() == Some(78), "{lacking:?}");
    ensure!(
        said.contains("example.com/rack") && said.contains("worker"),
        "{said}"
    );
    api.leave();
    let mut waiting = with(zone_and_node)?.spawn()?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(waiting.try_wait()?.is_none(), "it waits");
    api.come_back();
    let placed = waiting.wait_with_output()?;
    ensure!(
        placed.stdout == b"zone-a/n3 run --config file\n",
        "{placed:?}"
    );
    Ok(())
}

const NODE: &str = "/api/v1/nodes/worker";
const POD: &str = "/api/v1/namespaces/storaged/pods/storaged-x";

/// Three nodes, (2,1), whose first one may not be restarted: its step bears no loss.
fn three_of_which_one_is_lost() -> Result<System> {
    let mut system = System::start(3, Some((2, 1)), "")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, 1, CheckpointState::Protected))?;
    system.cluster.kill(2)?;
    wait("a loss", || system.bears(0, 0))?;
    Ok(system)
}

#[test]
fn a_pod_that_is_started_again_alone_waits_until_that_loses_nothing() -> Result<()> {
    let mut system = three_of_which_one_is_lost()?;
    let api = ApiServer::start()?;
    api.put(NODE, json!({"metadata": {"name": "worker"}, "spec": {}}));
    let mut hook = pre_stop(&api, &system, 0)?.spawn()?;
    std::thread::sleep(Duration::from_secs(3));
    ensure!(hook.try_wait()?.is_none(), "it waits");
    // Nor is the machine taken for one that goes where nobody says.
    api.leave();
    std::thread::sleep(Duration::from_secs(2));
    ensure!(hook.try_wait()?.is_none(), "it waits");
    system.cluster.start(2)?;
    ensure!(hook.wait()?.success());
    ensure!(system.cluster.status(0).is_ok(), "the kubelet ends it");
    let over = pre_stop(&api, &system, 0)?
        .env("STORAGED_RESTART_WAIT_S", "0")
        .output()?;
    ensure!(over.status.code() == Some(1), "{over:?}");
    Ok(())
}

/// As by `kubectl delete pod --grace-period=12`. What only this node can finish is given some of it, beside what the others are to put back.
#[test]
fn a_pod_with_little_time_is_drained_before_that_is_over() -> Result<()> {
    let mut system = three_of_which_one_is_lost()?;
    let api = ApiServer::start()?;
    api.put(NODE, json!({"metadata": {}, "spec": {}}));
    api.put(POD, json!({"metadata": {"deletionGracePeriodSeconds": 12}}));
    let begun = Instant::now();
    let done = pre_stop(&api, &system, 0)?
        .env("STORAGED_LEAVE_S", "4")
        .output()?;
    let (took, said) = (begun.elapsed(), String::from_utf8_lossy(&done.stderr));
    ensure!(done.status.code() == Some(75), "{}: {said}", done.status);
    ensure!(said.contains("a restart is not safe"), "{said}");
    let gives_time = said.contains("within 4 s:") || said.contains("within 3 s:");
    ensure!(gives_time && said.contains("bears 0 of 1 losses"), "{said}");
    // 5 s of it are the pod's own.
    let expected = Duration::from_secs(6)..Duration::from_secs(12);
    ensure!(expected.contains(&took), "{took:?}: {said}");
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    Ok(())
}

#[test]
fn a_machine_that_goes_is_drained_within_what_the_pod_is_given() -> Result<()> {
    let mut system = three_of_which_one_is_lost()?;
    let api = ApiServer::start()?;
    api.put(NODE, json!({"metadata": {}, "spec": {}}));
    let hook = pre_stop(&api, &system, 0)?.spawn()?;
    std::thread::sleep(Duration::from_secs(2));
    // It is cordoned while the hook waits for a restart that loses nothing.
    api.put(POD, json!({"metadata": {"deletionGracePeriodSeconds": 7}}));
    api.put(
        NODE,
        json!({"metadata": {}, "spec": {"unschedulable": true}}),
    );
    let begun = Instant::now();
    let done = hook.wait_with_output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.code() == Some(75), "{}: {said}", done.status);
    ensure!(said.contains("goes: it takes no pods"), "{said}");
    ensure!(
        said.contains("within 2 s:") && said.contains("bears 0 of 1 losses"),
        "{said}"
    );
    ensure!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    let ended = system.cluster.wait(0)?.context("its end")?;
    ensure!(ended.code() == Some(75), "{ended}");
    // A machine that shuts down tells its pods nothing.
    api.put(POD, json!({"metadata": {}}));
    let message = json!({"type": "Ready", "message": "node is shutting down"});
    api.put(NODE, json!({"status": {"conditions": [message]}}));
    system.cluster.start(2)?;
    let done = pre_stop(&api, &system, 1)?.output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(said.contains("goes: it is shutting down"), "{said}");
    system.cluster.wait(1)?.context("its end")?;
    Ok(())
}

/// Hooks read its stdout, people its stderr.
#[test]
fn who_goes_hears_how_long_a_drain_may_take() -> Result<()> {
    let api = ApiServer::start()?;
    let going = || {
        let mut command = Command::new(executable());
        command.args(["going", "--server", &api.server(), "--node", "worker"]);
        command.args(["--pod", "storaged-x", "--namespace", NAMESPACE]);
        command.output()
    };
    let unknown = going()?;
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(
        unknown.status.code() == Some(1) && unknown.stdout.is_empty(),
        "{said}"
    );
    ensure!(
        said.contains("get node worker") && said.contains("404"),
        "{said}"
    );
    api.put(NODE, json!({"spec": {}}));
    // Its pod might be told first.
    let unknown = going()?;
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(
        unknown.status.code() == Some(1) && said.contains("get pod"),
        "{said}"
    );
    api.put(POD, json!({"metadata": {}}));
    let stays = going()?;
    ensure!(
        stays.status.code() == Some(3) && stays.stdout.is_empty(),
        "{stays:?}"
    );
    // The pod alone ends.
    api.put(POD, json!({"metadata": {"deletionGracePeriodSeconds": 30}}));
    let stays = going()?;
    ensure!(
        stays.status.code() == Some(3) && stays.stdout == b"25s\n",
        "{stays:?}"
    );
    // Its kubelet ends it, before the node says why.
    let shutdown = "Pod was terminated in response to imminent node shutdown.";
    let condition = json!({"type": "DisruptionTarget", "message": shutdown});
    api.put(POD, json!({"status": {"conditions": [condition]}}));
    let goes = going()?;
    ensure!(goes.status.success() && goes.stdout == b"25s\n", "{goes:?}");
    // It was to be deleted before, with more time than a kubelet gives that shuts down.
    let deleted = json!({"deletionGracePeriodSeconds": 630});
    api.put(
        POD,
        json!({"metadata": deleted, "status": {"conditions": [condition]}}),
    );
    let goes = going()?;
    ensure!(goes.status.success() && goes.stdout == b"25s\n", "{goes:?}");
    api.put(
        NODE,
        json!({"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}}),
    );
    for (pod, deadline) in [
        (None, "25s\n"),
        (Some(json!({"metadata": {}})), "25s\n"),
        (
            Some(json!({"metadata": {"deletionGracePeriodSeconds": 630}})),
            "625s\n",
        ),
        (
            Some(json!({"metadata": {"deletionGracePeriodSeconds": 2}})),
            "1s\n",
        ),
    ] {
        if let Some(pod) = pod {
            api.put(POD, pod);
        }
        let goes = going()?;
        ensure!(
            goes.status.success() && goes.stdout == deadline.as_bytes(),
            "{goes:?}"
        );
    }
    Ok(())
}
