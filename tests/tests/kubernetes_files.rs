//! The files in `deploy/kubernetes`: that they are YAML, that what one names another one has, and how a job gets its token. No
//! cluster has seen them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use storaged_sdk::read_token;
use storaged_sdk::wire::Namespace;
use storaged_tests::system::executable;

fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(name)
}

/// The objects of a file.
fn objects(name: &str) -> Result<Vec<Value>> {
    let text = fs::read_to_string(deploy("kubernetes").join(name))?;
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    let objects = documents.map(|document| Ok(Value::deserialize(document)?));
    objects.collect::<Result<_>>().context(name.to_owned())
}

fn of_kind<'o>(objects: &'o [Value], kind: &str) -> Result<&'o Value> {
    let mut its = objects.iter().filter(|object| object["kind"] == kind);
    its.next().with_context(|| format!("a {kind}"))
}

/// Of a list of objects the one with this name.
fn named<'v>(list: &'v Value, name: &str) -> Result<&'v Value> {
    let mut all = list.as_array().context("a list")?.iter();
    all.find(|one| one["name"] == name)
        .with_context(|| format!("{name} in {list}"))
}

fn text(value: &Value) -> Result<&str> {
    value
        .as_str()
        .with_context(|| format!("expected text, got {value}"))
}

struct Trainer {
    objects: Vec<Value>,
    job: Value,
    /// Of its pods.
    spec: Value,
    container: Value,
}

impl Trainer {
    fn read() -> Result<Self> {
        let objects = objects("trainer.yaml")?;
        let job = of_kind(&objects, "Job")?.clone();
        let spec = job["spec"]["template"]["spec"].clone();
        let containers = spec["containers"].as_array().context("containers")?;
        ensure!(containers.len() == 1 && spec["initContainers"].is_null());
        Ok(Self {
            container: containers[0].clone(),
            job,
            spec,
            objects,
        })
    }

    fn variable(&self, name: &str) -> Result<&str> {
        text(&named(&self.container["env"], name)?["value"])
    }

    /// A volume, and where the container has it.
    fn volume(&self, name: &str) -> Result<(&Value, &str)> {
        let mount = named(&self.container["volumeMounts"], name)?;
        ensure!(mount["readOnly"] == true, "{mount}");
        let volume = named(&self.spec["volumes"], name)?;
        Ok((volume, text(&mount["mountPath"])?))
    }
}

#[test]
fn all_files_are_objects_of_kubernetes() -> Result<()> {
    for entry in fs::read_dir(deploy("kubernetes"))? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        if !name.ends_with(".yaml") {
            continue;
        }
        for object in objects(&name)? {
            let has_name = object["metadata"]["name"].is_string();
            ensure!(
                object["apiVersion"].is_string() && has_name,
                "{name}: {object}"
            );
        }
    }
    Ok(())
}

#[test]
fn trainers_run_where_a_daemon_does_and_see_their_tenants_socket_alone() -> Result<()> {
    let trainer = Trainer::read()?;
    let of_daemons = objects("daemonset.yaml")?;
    let daemon = &of_kind(&of_daemons, "DaemonSet")?["spec"]["template"]["spec"];
    ensure!(trainer.spec["nodeSelector"] == daemon["nodeSelector"]);

    let config = fs::read_to_string(deploy("storaged.toml"))?;
    let config: toml::Value = toml::from_str(&config)?;
    let tenant = &config["tenants"][0];
    let directory = tenant["directory"].as_str().context("a directory")?;
    let (volume, path) = trainer.volume("socket")?;
    ensure!(text(&volume["hostPath"]["path"])? == directory && path == directory);
    // It is the kubelet's and root's where the kubelet makes it.
    ensure!(volume["hostPath"]["type"] == "Directory");
    let sockets = text(&named(&daemon["volumes"], "sockets")?["hostPath"]["path"])?;
    ensure!(Path::new(directory).parent() == Some(Path::new(sockets)));
    let socket = trainer.variable("STORAGED_SOCKET")?;
    ensure!(socket == format!("{directory}/storaged.sock"), "{socket}");

    let volumes = trainer.spec["volumes"].as_array().context("volumes")?;
    let of_host = volumes
        .iter()
        .filter(|volume| !volume["hostPath"].is_null());
    ensure!(of_host.count() == 1);
    for share in ["hostNetwork", "hostPID", "hostIPC", "hostUsers"] {
        ensure!(trainer.spec[share].is_null(), "{share}");
    }
    let user = trainer.spec["securityContext"]["runAsUser"].as_i64();
    let uids = tenant["uids"].as_array().context("uids")?;
    ensure!(uids.iter().any(|uid| uid.as_integer() == user), "{user:?}");
    ensure!(user != Some(0) && trainer.spec["securityContext"]["runAsNonRoot"] == true);
    ensure!(trainer.container["securityContext"]["allowPrivilegeEscalation"] == false);
    Ok(())
}

#[test]
fn pods_of_a_job_find_the_first_of_them() -> Result<()> {
    let trainer = Trainer::read()?;
    let service = of_kind(&trainer.objects, "Service")?;
    let (name, labels) = (&service["metadata"]["name"], &service["spec"]["selector"]);
    ensure!(service["spec"]["clusterIP"] == "None" && trainer.spec["subdomain"] == *name);
    ensure!(trainer.job["spec"]["template"]["metadata"]["labels"] == *labels);
    let command = trainer.container["command"]
        .as_array()
        .context("a command")?;
    let leader = format!(
        "--master-addr={}-0.{}",
        text(&trainer.job["metadata"]["name"])?,
        text(name)?
    );
    ensure!(command.contains(&Value::from(leader)), "{command:?}");
    let nodes = format!("--nnodes={}", trainer.job["spec"]["completions"]);
    ensure!(command.contains(&Value::from(nodes)), "{command:?}");
    ensure!(trainer.job["spec"]["completions"] == trainer.job["spec"]["parallelism"]);
    let namespace = &of_kind(&trainer.objects, "Namespace")?["metadata"]["name"];
    let mut others = trainer.objects.iter().filter(|o| o["kind"] != "Namespace");
    ensure!(others.all(|object| object["metadata"]["namespace"] == *namespace));
    Ok(())
}

#[test]
fn scripts_of_the_daemons_pod_are_in_its_image() -> Result<()> {
    let image = fs::read_to_string(deploy("container/Containerfile"))?;
    let objects = objects("daemonset.yaml")?;
    let pod = &of_kind(&objects, "DaemonSet")?["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let hook = &container["lifecycle"]["preStop"]["exec"];
    for command in [&container["command"], &hook["command"]] {
        let path = text(&command[0])?;
        let name = path.strip_prefix("/usr/local/share/storaged/");
        let name = name.with_context(|| format!("a script in the image, got {path}"))?;
        ensure!(image.contains(&format!(" /build/deploy/kubernetes/{name} ")));
        let mode = fs::metadata(deploy("kubernetes").join(name))?.permissions();
        ensure!(mode.mode() & 0o111 == 0o111, "{name}: {mode:?}");
    }
    Ok(())
}

/// A holder that a daemon's pod does not find, or that is another user's, would hold nothing.
#[test]
fn the_daemons_pod_finds_the_holder_of_its_node() -> Result<()> {
    let objects = objects("daemonset.yaml")?;
    let mut sets = objects.iter().filter(|it| it["kind"] == "DaemonSet");
    let (daemons, holders) = (
        sets.next().context("daemons")?,
        sets.next().context("holders")?,
    );
    ensure!(holders["spec"]["updateStrategy"]["type"] == "OnDelete" && sets.next().is_none());
    let pods = [daemons, holders].map(|set| &set["spec"]["template"]["spec"]);
    let [daemon, holder] = pods.map(|pod| &pod["containers"][0]);
    ensure!(pods[0]["nodeSelector"] == pods[1]["nodeSelector"]);
    ensure!(holder["command"][0] == "storaged" && holder["args"][0] == "hold");
    let socket = text(&named(&daemon["env"], "STORAGED_HOLDER")?["value"])?;
    ensure!(holder["args"][1] == "--socket" && holder["args"][2] == socket);
    let mounts = [daemon, holder].map(|it| named(&it["volumeMounts"], "memory"));
    for (mount, pod) in mounts.into_iter().zip(pods) {
        let path = text(&mount?["mountPath"])?;
        ensure!(
            Path::new(socket).parent() == Some(Path::new(path)),
            "{path}"
        );
        let volume = named(&pod["volumes"], "memory")?;
        ensure!(text(&volume["hostPath"]["path"])? == path, "{volume}");
    }
    for key in [
        "runAsUser",
        "runAsGroup",
        "capabilities",
        "readOnlyRootFilesystem",
    ] {
        let [one, other] = [daemon, holder].map(|it| &it["securityContext"][key]);
        ensure!(one == other && !one.is_null(), "{key}");
    }
    let owner = &pods[1]["initContainers"][0];
    ensure!(
        text(&owner["command"][4])? == "/run/storaged-memory"
            && owner["volumeMounts"][0]["name"] == "memory"
    );
    Ok(())
}

/// `kubectl` as far as `make-token.sh` goes: Secrets are files, and what it was told is written down.
const KUBECTL: &str = r#"#!/usr/bin/env bash
set -euo pipefail
echo "$*" >>"$CLUSTER/told"
case "$1 $2" in
    "get secret")
        [[ ! -e "$CLUSTER/away" ]] || exit 1
        if [[ -e "$CLUSTER/$5/$3" ]]; then echo "secret/$3"; fi ;;
    "create secret")
        [[ "$3" == generic && "$5" == --namespace && "$7" == --from-file=token=* ]]
        mkdir -p "$CLUSTER/$6"
        if [[ -e "$CLUSTER/raced" ]]; then echo another >"$CLUSTER/$6/$4"; fi
        # Like the real one: what is there stays.
        [[ ! -e "$CLUSTER/$6/$4" ]]
        cp -p "${7#--from-file=token=}" "$CLUSTER/$6/$4" ;;
    *) exit 2 ;;
esac
"#;

/// A cluster of files.
struct Cluster(tempfile::TempDir);

impl Cluster {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let kubectl = folder.path().join("kubectl");
        fs::write(&kubectl, KUBECTL)?;
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755))?;
        fs::create_dir(folder.path().join("tmp"))?;
        Ok(Self(folder))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn make_token(&self, job: &str, namespace: &str) -> Result<Output> {
        let made = Command::new(deploy("kubernetes/make-token.sh"))
            .args([job, namespace])
            .env("KUBECTL", self.path("kubectl"))
            .env("STORAGED_BIN", executable())
            .env("CLUSTER", self.0.path())
            .env("TMPDIR", self.path("tmp"))
            .output()?;
        // Whatever became of it, the token lies nowhere else.
        ensure!(fs::read_dir(self.path("tmp"))?.next().is_none());
        Ok(made)
    }
}

#[test]
fn a_job_gets_a_token_once_where_its_pods_look_for_it() -> Result<()> {
    let trainer = Trainer::read()?;
    let job = trainer.variable("STORAGED_NAMESPACE")?;
    ensure!(Namespace::new(job).is_ok(), "{job}");
    let namespace = text(&trainer.job["metadata"]["namespace"])?;
    let cluster = Cluster::new()?;
    let made = cluster.make_token(job, namespace)?;
    ensure!(made.status.success(), "{made:?}");

    let (volume, path) = trainer.volume("token")?;
    let secret = cluster
        .path(namespace)
        .join(text(&volume["secret"]["secretName"])?);
    let token = read_token(&secret)?;
    ensure!(trainer.variable("STORAGED_TOKEN_FILE")? == format!("{path}/token"));
    ensure!(named(&trainer.container["env"], "STORAGED_TOKEN").is_err());
    // YAML's numbers are octal here, as Kubernetes reads them; the client refuses a file that others can read.
    let mode = volume["secret"]["defaultMode"].to_string();
    let mode = u32::from_str_radix(mode.trim_matches('"'), 8)?;
    ensure!(mode == 0o440, "{mode:o}");
    let security = &trainer.spec["securityContext"];
    ensure!(security["fsGroup"] == security["runAsGroup"] && security["fsGroup"].is_i64());

    let again = cluster.make_token(job, namespace)?;
    ensure!(again.status.success() && read_token(&secret)? == token);
    ensure!(cluster.make_token("other", namespace)?.status.success());
    let other = cluster.path(namespace).join("other-storaged-token");
    ensure!(read_token(&other)? != token);
    let told = fs::read_to_string(cluster.path("told"))?;
    ensure!(!told.contains(std::str::from_utf8(&token)?), "{told}");
    Ok(())
}

#[test]
fn a_token_that_is_not_known_to_be_missing_is_not_made() -> Result<()> {
    let cluster = Cluster::new()?;
    fs::write(cluster.path("away"), "")?;
    ensure!(!cluster.make_token("llama", "training")?.status.success());
    let told = fs::read_to_string(cluster.path("told"))?;
    ensure!(!told.contains("create"), "{told}");
    fs::remove_file(cluster.path("away"))?;
    // Somebody else makes it in between.
    fs::write(cluster.path("raced"), "")?;
    ensure!(cluster.make_token("llama", "training")?.status.success());
    let secret = fs::read(cluster.path("training/llama-storaged-token"))?;
    ensure!(secret == b"another\n");
    Ok(())
}
