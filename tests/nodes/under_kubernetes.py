"""Nodes of a real Kubernetes with the shipped DaemonSet, the registry in its API server, and the trainers' Job: `make kubernetes`.

The image has what deploy/container/Containerfile puts there, the files are the shipped ones with sizes for small machines. RAM outlives the daemon
within its pod, pods are replaced one after the other without a loss, the registry may be away, and machines go and come.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from cluster import PROGRAMS, SERVER, Cluster, away, expect_controllers, image, image_of_containerfile
from lab import ROOT, Checks, Machine, expect, in_namespaces, until
from node import Job, authority_folder, binary, everywhere, make_certificates, package

DEPLOY = ROOT / "deploy" / "kubernetes"
IMAGE, TRAINER_IMAGE = "localhost/storaged:0.1.0", "localhost/llama:1"
DAEMON_UID = 65532
#: In place of torchrun: the checks say what each rank does.
TORCHRUN = b'#!/bin/sh\ntrap "exit 143" TERM\nsleep infinity &\nwait\n'
# What the shipped files say for big machines, and what these ones have.
SMALL = [("66Gi", "2304Mi"), ('cpu: "2"', 'cpu: "1"')]
#: What logs say of what the checks bring about.
EXPECTED = (
    "is now a new durable tier", '"message":"given up"', "is no peer of this node", "has not read the newest roster yet", "the roster is not followed",
)


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        expect(old in text, f"expected {old} in the shipped file")
        text = text.replace(old, new)
    return text


def daemonset() -> str:
    """The shipped one for small machines, with the directory tier that its comments show."""
    text = changed((DEPLOY / "daemonset.yaml").read_text(), *SMALL)
    for block in (r"            # - name: checkpoints\n(?:            #   .*\n)+", r"        # - name: checkpoints\n(?:        #   .*\n)+"):
        shown = re.search(rf"^{block}", text, re.M)
        expect(shown is not None, "daemonset.yaml shows no directory as durable tier")
        text = text.replace(shown[0], shown[0].replace("# ", "", 1).replace("#   ", "  "))
    return text


def configuration(machine: Machine) -> str:
    """deploy/storaged.toml with the registry that registry.yaml shows, (2, 1) over three nodes."""
    head, _, _ = (ROOT / "deploy" / "storaged.toml").read_text().partition("\n# Or, instead of all [[peers]]")
    own = [
        ("node-1", machine.name), ("rack-1", f"rack-{machine.name[-1]}"), ("10.0.0.1:", f"{machine.address}:"), ("k = 4", "k = 2"), ("m = 2", "m = 1"),
        ('# budget = "256GiB"', 'budget = "256MiB"'),
    ]
    shown = re.search(r"^#   \[membership\]\n(?:#   .*\n)+", (DEPLOY / "registry.yaml").read_text(), re.M)
    expect(shown is not None, "registry.yaml shows no [membership]")
    membership = changed(re.sub(r"^#   ", "", shown[0], flags=re.M), ('poll = "10s"', 'poll = "2s"\nsize = 3'))
    return f"{changed(head, *own)}\n{membership}"


class KubeNode:
    """A node of the cluster: its machine, the daemon's pod there, and the trainer's."""

    def __init__(self, cluster: Cluster, machine: Machine):
        self.cluster, self.machine, self.name = cluster, machine, machine.name

    def provision(self) -> None:
        """What a machine of the pool has when it joins."""
        authority = authority_folder(self.cluster)
        files = {
            "storaged.toml": (configuration(self.machine), 0o644, 0), "ca.pem": ((authority / "ca.pem").read_text(), 0o644, 0),
            f"{self.name}.pem": ((authority / f"{self.name}.pem").read_text(), 0o644, 0),
            f"{self.name}.key": ((authority / f"{self.name}.key").read_text(), 0o400, DAEMON_UID),
        }
        for name, (text, mode, owner) in files.items():
            self.machine.write(f"/etc/storaged/{name}", text, mode)
            os.chown(self.machine.root / "etc/storaged" / name, owner, owner)

    def pods(self, namespace: str = "storaged", label: str = "storaged") -> list[dict]:
        return self.cluster.get(
            "pods", f"--namespace={namespace}", f"--selector=app.kubernetes.io/name={label}", f"--field-selector=spec.nodeName={self.name}",
        )

    def pod(self, namespace: str = "storaged", label: str = "storaged") -> dict:
        """The one that is not on its way out."""
        there = [pod for pod in self.pods(namespace, label) if "deletionTimestamp" not in pod["metadata"]]
        expect(len(there) == 1, f"{self.name}: {len(there)} pods of {label}")
        return there[0]

    def is_ready(self) -> bool | str:
        pods = self.pods()
        if len(pods) != 1 or "deletionTimestamp" in pods[0]["metadata"]:
            return f"{self.name}: {[pod['metadata']['name'] for pod in pods]}"
        status = pods[0]["status"]
        if any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", [])):
            return True
        return f"{self.name}: {json.dumps(status.get('containerStatuses') or status)[:1500]}{self.log()[-1500:]}"

    def wait_ready(self, limit: float = 120) -> float:
        return until(f"{self.name} ready", self.is_ready, limit)

    def log(self, *arguments: str) -> str:
        pods = self.pods()
        return "".join(self.cluster.tries("logs", "--namespace=storaged", pod["metadata"]["name"], *arguments).stdout for pod in pods)

    def inside(self, *command: str, limit: float = 120) -> subprocess.CompletedProcess:
        """In the daemon's container."""
        return self.cluster.tries("exec", "--namespace=storaged", self.pod()["metadata"]["name"], "--container=storaged", "--", *map(str, command), limit=limit)

    def does(self, *command: str, code: int = 0, limit: float = 120) -> str:
        done = self.inside(*command, limit=limit)
        expect(done.returncode == code, f"{self.name}: {' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        return done.stdout

    def operator(self, *arguments) -> subprocess.CompletedProcess:
        return self.inside("storaged", *arguments)

    def status(self) -> dict:
        return json.loads(self.does("storaged", "status", "--json"))

    def asks(self, *arguments) -> str:
        """Of the trainer's pod on this node."""
        arguments = tuple(map(str, arguments))
        pod = self.pod("training", "llama")["metadata"]["name"]
        done = self.cluster.tries("exec", "--namespace=training", pod, "--", "python3", "/opt/tests/trainer.py", *arguments, limit=200)
        expect(done.returncode == 0, f"{self.name}: {arguments} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.stdout.strip()

    @contextlib.contextmanager
    def trains(self, job: Job, rank: int) -> Iterator[subprocess.Popen]:
        """A rank's process in the trainer's pod: it saves the step that each line names, and says what came of it."""
        pod = self.pod("training", "llama")["metadata"]["name"]
        program = ["python3", "/opt/tests/trainer.py", "train", job.namespace, job.run, str(rank), str(len(job.nodes))]
        command = self.cluster.kubectl("exec", "--stdin", "--namespace=training", pod, "--", *program)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            # A stream that stalls without an end would hold the checks up for good.
            limit = threading.Timer(900, process.kill)
            limit.start()
            try:
                yield process
            finally:
                limit.cancel()
                process.kill()

    def daemon(self) -> int:
        """The daemon's process, as the machine sees it: the child of the keeper."""
        listed = self.machine.does("ps", "-eo", "pid,ppid,comm").split("\n")
        keepers = [line.split()[0] for line in listed if "storaged-keeper" in line]
        found = [line.split()[0] for line in listed if len(line.split()) == 3 and line.split()[1] in keepers]
        expect(len(found) == 1, f"{self.name}: {listed}")
        return int(found[0])

    def kill_daemon(self) -> None:
        """Until the keeper has started another one."""
        before = self.daemon()
        self.machine.does("kill", "-KILL", str(before))

        until(f"another daemon on {self.name}", lambda: self.daemon() != before or "it is there", 30)

    def served_after(self) -> float:
        """Seconds from when the pod's keeper had the holder's memory until its daemon served all of it."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        at = {line["fields"]["message"]: datetime.datetime.fromisoformat(line["timestamp"].rstrip("Z")) for line in reversed(lines)}
        return (at["took over the memory of an earlier daemon"] - at["took over what the holder has"]).total_seconds()

    def restarts(self) -> int:
        return self.pod()["status"]["containerStatuses"][0]["restartCount"]


class Kubernetes:
    def __init__(self, checks: Checks, cluster: Cluster):
        self.check, self.cluster = checks.check, cluster
        self.nodes = [KubeNode(cluster, machine) for machine in cluster.machines]
        self.pool, self.reserve = self.nodes[:3], self.nodes[3]
        self.first = self.nodes[0]
        self.job: Job | None = None
        #: The newest one that is protected, and the newest one that any rank has begun.
        self.step, self.begun = 0, 0

    def run(self) -> None:
        self.files()
        self.daemons_come()
        self.what_it_may()
        self.registry()
        self.trainers()
        self.memory_outlives()
        self.server_away()
        self.spare()
        self.pods_are_replaced()
        self.machine_goes()
        self.machine_is_lost()
        self.quiet()

    def saves(self) -> None:
        self.begun += 1
        self.job.save(self.begun)
        self.step = self.begun
        self.job.wait_whole()

    def files(self) -> None:
        with self.check("the API server takes the shipped files as they are"):
            self.cluster.does("create", "namespace", "storaged")
            self.cluster.does("create", "namespace", "training")
            for name in ("daemonset.yaml", "registry.yaml"):
                self.cluster.does("apply", "--dry-run=server", f"--filename={DEPLOY / name}")
        with self.check("the image has what the Containerfile puts there"):
            shared = self.cluster.shared
            release = {"target/release/storaged": binary()}
            image_of_containerfile(shared / "storaged.tar", IMAGE, PROGRAMS / "base.tar", release)
            image(shared / "pause.tar", "localhost/pause:3.2", [{"/pause": ((PROGRAMS / "pause").read_bytes(), 0o755)}], {"Entrypoint": ["/pause"]})
            python = {"/usr/local/bin/torchrun": (TORCHRUN, 0o755), "/opt/tests/trainer.py": ((ROOT / "tests/nodes/trainer.py").read_bytes(), 0o644)}
            for file in package("storaged").rglob("*"):
                if file.is_file():
                    python[f"/opt/python/storaged/{file.relative_to(package('storaged'))}"] = (file.read_bytes(), 0o644)
            environment = ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONPATH=/opt/python", "PYTHONDONTWRITEBYTECODE=1"]
            image(shared / "llama.tar", TRAINER_IMAGE, [PROGRAMS / "python.tar", python], {"Env": environment})
            for name in ("pause", "storaged", "llama"):
                everywhere(self.nodes, lambda _, node, name=name: self.cluster.load_image(shared / f"{name}.tar", [node.machine]))
                (shared / f"{name}.tar").unlink()

    def daemons_come(self) -> None:
        with self.check("the DaemonSet's pods come to the labelled nodes and are ready, started once"):
            for node in self.nodes:
                node.provision()
            self.cluster.does("apply", "--filename=-", text=daemonset())
            self.cluster.does("apply", f"--filename={DEPLOY / 'registry.yaml'}")
            for node in self.pool:
                self.cluster.does("label", "node", node.name, "storaged/node=true")
            for node in self.pool:
                node.wait_ready(180)
            until("links", self._are_linked)
            expect([node.restarts() for node in self.pool] == [0, 0, 0], "started again")

    def _are_linked(self) -> bool | str:
        said = [node.operator("status", "--json") for node in self.pool]
        return all(self._has_links(one.stdout) for one in said) or "; ".join(one.stdout[:300] + one.stderr for one in said)

    def _has_links(self, status: str) -> bool:
        peers = json.loads(status or "{}").get("peers", [])
        return len(peers) == 2 and all(peer["up"] for peer in peers)

    def what_it_may(self) -> None:
        with self.check("the daemon is 65532 without capabilities, below seccomp, with a root that it cannot write to, on the node's network"):
            fields = dict(line.split(":\t", 1) for line in self.first.machine.process_file(str(self.first.daemon()), "status").splitlines() if ":\t" in line)
            wanted = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "CapAmb": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
            got = {name: fields[name] for name in wanted}
            expect(got == wanted and set(fields["Uid"].split()) == {str(DAEMON_UID)}, f"{got} {fields['Uid']}")
            self.first.does("sh", "-c", "test -w /run/storaged && ! test -e /dev/kmsg")
            mounts = [line.split() for line in self.first.machine.process_file(str(self.first.daemon()), "mountinfo").splitlines()]
            options = {mount[4]: mount[5].split(",") for mount in mounts}
            expect("ro" in options["/"] and "ro" in options["/etc/storaged"], f"{options}")
            networks = {self.first.machine.does("readlink", f"/proc/{process}/ns/net") for process in (1, self.first.daemon())}
            expect(len(networks) == 1, f"{networks}")
        with self.check("the directories of sockets are the daemon's"):
            place = self.first.machine.does("stat", "--format=%a %u", "/run/storaged", "/run/storaged/training").split()
            expect(place == ["755", str(DAEMON_UID)] * 2, f"{place}")

    def registry(self) -> None:
        may = ("auth", "can-i", "--namespace=storaged", "--as=system:serviceaccount:storaged:storaged")
        with self.check("the roster lies in immutable ConfigMaps, and names the nodes"):
            maps = self.cluster.get("configmaps", "--namespace=storaged")
            records = [one for one in maps if one.get("immutable")]
            heads = [one for one in maps if not one.get("immutable") and one["metadata"]["name"].startswith("a")]
            expect(len(records) >= 1 and len(heads) >= 1, f"{[one['metadata']['name'] for one in maps]}")
            listed = self.first.does("storaged", "node", "ls", "--config", "/etc/storaged/storaged.toml")
            expect(all(node.name in listed for node in self.pool), listed)
        with self.check("the service account may do what it needs and no more"):
            for right, answer in {
                "create configmaps": "yes", "update configmaps": "yes", "delete configmaps": "no", "get secrets": "no", "get nodes": "yes", "list nodes": "no", "get pods": "yes",
            }.items():
                said = self.cluster.tries(*may, *right.split()).stdout.strip()
                expect(said == answer, f"{right}: {said}")
        with self.check("a record cannot be changed, not by an administrator either"):
            name = records[0]["metadata"]["name"]
            done = self.cluster.tries("patch", "configmap", name, "--namespace=storaged", "--type=merge", "--patch", '{"data": {"x": "y"}}')
            expect(done.returncode != 0 and "immutable" in done.stderr, done.stderr)

        with self.check("what the tests ask of their own API server, the real one does, to the service account"):
            secret = next(one for one in self.cluster.get("secrets", "--namespace=storaged") if one["type"] == "kubernetes.io/service-account-token"
                          and one["metadata"]["annotations"]["kubernetes.io/service-account.name"] == "storaged")
            (self.cluster.folder / "token").write_bytes(base64.b64decode(secret["data"]["token"]))
            environment = dict(
                os.environ, STORAGED_TESTS_API_SERVER=SERVER, STORAGED_TESTS_API_CA=str(self.cluster.folder / "ca.pem"),
                STORAGED_TESTS_API_TOKEN_FILE=str(self.cluster.folder / "token"),
            )
            # The crates that `make tests-built` has built: other ones would be built anew here.
            test = ["cargo", "test", "--offline", "--quiet", "--workspace", "--exclude", "storaged-python", "--test", "kubernetes", "--"]
            test += ["--exact", "--ignored", "a_real_api_server_is_a_registry"]
            done = subprocess.run(test, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            expect(done.returncode == 0 and "1 passed" in done.stdout, (done.stdout + done.stderr)[-3000:])

    def trainers(self) -> None:
        with self.check("make-token.sh makes the job's Secret, once, and the trainers' pods come"):
            # Whatever plugs them in advertises GPUs like this.
            for node in self.pool:
                self._patch_status(node, '{"status": {"capacity": {"nvidia.com/gpu": "8"}}}')
            text = changed(
                (DEPLOY / "trainer.yaml").read_text(), ("  completionMode: Indexed\n", ""), ("completions: 2", "completions: 3"), ("parallelism: 2", "parallelism: 3"),
            )
            self.cluster.does("apply", "--filename=-", text=text)
            environment = dict(os.environ, KUBECTL=str(PROGRAMS / "kubectl"), KUBECONFIG=str(self.cluster.kubeconfig), STORAGED_BIN=str(binary()))
            for said in ("created", "is there already"):
                done = subprocess.run([DEPLOY / "make-token.sh", "llama", "training"], env=environment, capture_output=True, text=True, check=True)
                expect(said in done.stdout + done.stderr, done.stdout + done.stderr)
            until("the trainers' pods", self._trainers_run, 120)
        with self.check("three ranks save, the step is protected, loads return its bytes"):
            self.job = Job(self.pool, "llama")
            self.saves()
            self.job.load(self.step, "own ram")

    def _patch_status(self, node: KubeNode, patch: str) -> None:
        """kubectl of this release has no --subresource."""
        address = f"/api/v1/nodes/{node.name}/status"
        folder = self.cluster.folder
        done = subprocess.run(
            ["curl", "-sS", "--fail-with-body", "--cacert", folder / "ca.pem", "--cert", folder / "admin.pem", "--key", folder / "admin.key", "-X", "PATCH",
             "-H", "Content-Type: application/merge-patch+json", "--data", patch, f"{SERVER}{address}"],
            capture_output=True, text=True, check=False,
        )
        expect(done.returncode == 0, done.stdout + done.stderr)

    def _trainers_run(self) -> bool | str:
        pods = self.cluster.get("pods", "--namespace=training")
        running = [
            pod["spec"].get("nodeName") for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(running) == sorted(node.name for node in self.pool) or f"{running} {json.dumps(pods[0]['status'] if pods else '')[:1500]}"

    def memory_outlives(self) -> None:
        with self.check("the daemon is killed on all nodes at once: the keepers start it again in the same pods, with its memory"):
            before = [node.pod()["metadata"]["uid"] for node in self.pool]
            everywhere(self.pool, lambda _, node: node.kill_daemon())
            until("links", self._are_linked)
            self.job.wait_whole()
            self.job.load(self.step, "own ram")
            after = [node.pod()["metadata"]["uid"] for node in self.pool]
            expect(after == before and [node.restarts() for node in self.pool] == [0, 0, 0], "other pods or containers")
            self.saves()

    def server_away(self) -> None:
        with self.check("without the API server the job goes on, a daemon that is killed comes back to its place, and a run is refused with words"):
            with away(self.cluster):
                self.first.kill_daemon()
                until("its word on the registry", lambda: "Kubernetes" in (said := self._directly(self.first, "status", "--json")) or said[-2000:], 60)
                until("links", lambda: all(self._has_links(self._directly(node, "status", "--json")) for node in self.pool), 60)
                self.begun += 1
                saved = everywhere(
                    self.pool, lambda rank, node: self._trainer_directly(node, "save", "llama", self.job.run, str(rank), "3", str(self.begun), "protected"),
                )
                expect([done.returncode for done in saved] == [0, 0, 0], f"{saved}")
                self.step = self.begun
                done = self._trainer_directly(self.first, "open", "llama")
                expect(done.returncode != 0 and "Kubernetes" in done.stderr and "no place" not in done.stderr, f"a run without the registry: {done}")
            until("links", self._are_linked)
            self.job.wait_whole()
            self.saves()
            self.job.load(self.step, "own ram")
            expect([node.restarts() for node in self.pool] == [0, 0, 0], "containers were started again")

    def _directly(self, node: KubeNode, *arguments: str) -> str:
        """In the container of the daemon, without the API server."""
        return node.machine.does("nsenter", f"--target={node.daemon()}", "--mount", "--", "/usr/local/bin/storaged", *arguments)

    def _trainer_directly(self, node: KubeNode, *arguments: str) -> subprocess.CompletedProcess:
        """In the trainer's container and as its user, without the API server."""
        listed = node.machine.does("ps", "-eo", "pid,comm").split("\n")
        process = [line.split()[0] for line in listed if line.endswith(" torchrun")][0]
        environment = ["PYTHONPATH=/opt/python", "WAIT_MS=10000", "STORAGED_SOCKET=/run/storaged/training/storaged.sock", "STORAGED_TOKEN_FILE=/run/secrets/storaged/token"]
        inside = ["nsenter", f"--target={process}", "--mount", "--setuid=1000", "--setgid=1000", "--", "env", *environment]
        return node.machine.tries(*inside, "/usr/bin/python3", "/opt/tests/trainer.py", *arguments)

    def spare(self) -> None:
        spare = self.reserve
        with self.check("a node more is a spare: its pod does not hold up a rollout, and it is not ready"):
            self.cluster.does("label", "node", spare.name, "storaged/node=true")
            self._patch_status(spare, '{"status": {"capacity": {"nvidia.com/gpu": "8"}}}')
            until("the spare's pod", lambda: self._is_spare(spare), 90)
            spare.does("storaged", "status", "--probe", "live")
            spare.does("storaged", "status", "--probe", "rollout")
            expect(spare.operator("status", "--probe", "ready").returncode != 0, "a spare is ready")

    def pods_are_replaced(self) -> None:
        with self.check("kubectl delete pod: it ends at once, and the next one has from the holder what it had"):
            before = self.first.pod()["metadata"]["uid"]
            self.cluster.does("delete", "pod", "--namespace=storaged", self.first.pod()["metadata"]["name"], limit=700)
            self.first.wait_ready()
            expect(self.first.pod()["metadata"]["uid"] != before, "the same pod")
            until("links", self._are_linked)
            self.job.wait_whole()
            self.job.load(self.step, "own ram")
        with self.check("kubectl rollout restart beside a job that saves: one after the other, at most one failed save per node, nothing lost"):
            took, failed = self._saves_while(self._rollout)
            # None of them has lost its place to the spare.
            until("links", self._are_linked)
            self.job.wait_whole()
            # A save of which one rank has not heard in time may be protected all the same.
            newest = json.loads(self.first.asks("load", self.job.namespace, 0))["step"]
            expect(self.step <= newest <= self.begun, f"step {newest} of {self.step} to {self.begun}")
            self.step = newest
            got = self.job.load(newest)
            expect(self._is_spare(self.reserve) is True, "the spare has a place")
            expect(len(took) >= 3 and len(failed) <= 3, f"{len(took)} saved, {failed}")
            served = max(node.served_after() for node in self.pool)
            expect(served <= 2, f"a daemon served {served:.1f} s after its keeper had the memory")
            print(
                f"        {len(took)} steps protected meanwhile, {len(failed)} failed; the longest save took {max(took):.0f} s, and a new daemon up to {served:.2f} s to serve;"
                f" rank 0 from {got[0]['rung']}", *failed, sep="\n        ", flush=True,
            )

    def _rollout(self) -> None:
        self.cluster.does("rollout", "restart", "daemonset/storaged", "--namespace=storaged")
        self.cluster.does("rollout", "status", "daemonset/storaged", "--namespace=storaged", "--timeout=300s", limit=320)

    def _saves_while(self, what) -> tuple[list[float], list[str]]:
        """Saves without a pause until it has ended: the seconds of those that were protected, of which the newest is the last one, and the others' errors.

        A rank's process keeps its connection, as trainers do, and each request waits for a minute, as the SDK's do by default: of that 5 s for a daemon
        that has gone. How long a pod is away is the kubelet's: of 1.20 mostly 3 to 11 s, at times 60.
        """
        took, failed = [], []
        with contextlib.ExitStack() as running, concurrent.futures.ThreadPoolExecutor(1) as pool:
            ranks = [running.enter_context(node.trains(self.job, rank)) for rank, node in enumerate(self.pool)]
            doing = pool.submit(what)
            while not doing.done():
                self.begun += 1
                began = time.monotonic()
                for rank in ranks:
                    print(self.begun, file=rank.stdin, flush=True)
                said = [rank.stdout.readline().strip() for rank in ranks]
                if said == [f"saved {self.begun}"] * len(ranks):
                    took.append(time.monotonic() - began)
                    self.step = self.begun
                else:
                    failed.append(f"{said}")
                    time.sleep(1)
            doing.result()
        return took, failed

    def machine_goes(self) -> None:
        third, spare = self.pool[2], self.reserve
        with self.check("storaged going says that a node stays, and that one goes that is cordoned"):
            self.first.does("storaged", "going", code=3)
            self.cluster.does("cordon", self.first.name)
            expect(re.fullmatch(r"\d+s\n", self.first.does("storaged", "going")) is not None, "no time")
            self.cluster.does("uncordon", self.first.name)
            self.first.does("storaged", "going", code=3)
        with self.check("the pod of a cordoned node is deleted: the hook drains the daemon first, and the next one has its place"):
            self.cluster.does("cordon", third.name)
            name = third.pod()["metadata"]["name"]
            command = self.cluster.kubectl("logs", "--follow", "--namespace=storaged", name)
            follow = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.cluster.does("delete", "pod", "--namespace=storaged", name, limit=700)
            log, _ = follow.communicate(timeout=60)
            expect("an operator drains this node" in log, log[-2000:])
            third.wait_ready()
            until("links", self._are_linked)
            self.job.wait_whole(120)
            self.job.load(self.step)
        # The kubelet of 1.20 lets the pod be deleted while its hook runs at the machine's end, and kills it then: no drain is looked for.
        with self.check("kubectl drain, and the machine is shut down: the spare takes its place, and nothing is lost"):
            self.cluster.does("drain", third.name, "--ignore-daemonsets", "--delete-emptydir-data", limit=120)
            began = time.monotonic()
            third.machine.tries("systemctl", "poweroff")
            third.machine.container.wait(timeout=120)
            took = time.monotonic() - began
            waited = until("the spare's place", lambda: self._has_place(spare), 180)
            self.cluster.does("delete", "node", third.name)
            self.pool[2] = spare
            until("the trainers' pods", self._trainers_run, 180)
            until("links", self._are_linked)
            self.job.wait_whole(120)
            got = self.job.load(self.step)
            print(f"        down after {took:.0f} s, replaced {waited:.0f} s later; rank 2 on another machine from {got[2]['rung']}", flush=True)
            self.saves()

    def _is_spare(self, node: KubeNode) -> bool | str:
        if len(node.pods()) != 1:
            return "no pod"
        done = node.operator("status")
        return "spare" in done.stdout + done.stderr or done.stdout + done.stderr

    def _has_place(self, node: KubeNode) -> bool | str:
        done = node.operator("status", "--probe", "ready")
        return done.returncode == 0 or done.stdout + done.stderr

    def machine_is_lost(self) -> None:
        second, third = self.pool[1], self.nodes[2]
        with self.check("a machine that was away comes back as a spare"):
            third.machine.boot()
            third.machine.wait_booted()
            self.cluster.start_kubelet(third.machine)
            until("the node", lambda: self.cluster.tries("label", "node", third.name, "storaged/node=true").returncode == 0 or "none", 60)
            self._patch_status(third, '{"status": {"capacity": {"nvidia.com/gpu": "8"}}}')
            until("the spare's pod", lambda: self._is_spare(third), 120)
        with self.check("a machine that is lost without a word: the spare takes its place, and the job goes on"):
            second.machine.pull_the_plug()
            until("the spare's place", lambda: self._has_place(third), 180)
            self.cluster.does("delete", "node", second.name)
            self.pool[1] = third
            until("the trainers' pods", self._trainers_run, 180)
            until("links", self._are_linked)
            self.job.wait_whole(120)
            self.job.load(self.step)
            self.saves()

    def quiet(self) -> None:
        with self.check("the logs hold no WARN or ERROR that was not brought about"):
            logs = [node.log().splitlines() for node in self.pool]
            expect(all(logs), "a node without a log")
            said = [line for lines in logs for line in lines if re.search(r'"level":"(WARN|ERROR)"', line)]
            odd = [line for line in said if not any(known in line for known in EXPECTED)]
            expect(not odd, "\n".join(odd[:20]))


def main() -> int:
    expect_controllers()
    in_namespaces(("kubernetes.sh", PROGRAMS))
    checks = Checks()
    cluster = Cluster([f"node-{number}" for number in (1, 2, 3, 4)], {})
    try:
        tier = cluster.shared / "checkpoints"
        tier.mkdir()
        tier.chmod(0o777)
        make_certificates(cluster)
        with checks.check("a cluster of four nodes is ready"):
            cluster.start()
        if not checks.failed:
            Kubernetes(checks, cluster).run()
    finally:
        cluster.end()
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
