"""storaged on the machines of the lab, installed as deploy/README.md tells an operator, with the shipped configuration."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import re
import secrets
import subprocess
from pathlib import Path

from lab import ROOT, Lab, Machine, expect, run, until

#: The user whom the shipped configuration lets in.
TRAINER, TRAINER_UID = "trainer", 1000
SOCKET = "/run/storaged/training/storaged.sock"
SOURCE = "/opt/source"
TRAINER_PROGRAM = "/opt/tests/trainer.py"
TOKEN = secrets.token_hex(32)
CREDENTIALS = "/run/credentials/storaged.service"


def binary() -> Path:
    path = Path(os.environ.get("STORAGED_BIN", ROOT / "target" / "debug" / "storaged")).absolute()
    expect(path.exists(), f"no executable at {path}: make builds it")
    return path


def package(name: str) -> Path:
    """Where this Python has a package."""
    found = importlib.util.find_spec(name)
    expect(found is not None, f"no package {name} in this Python: make python-for-tests")
    return Path(found.submodule_search_locations[0])


def binds() -> dict[str, Path]:
    """What the machines see of this one: what an operator would copy to them, read-only."""
    return {
        f"{SOURCE}/deploy": ROOT / "deploy", f"{SOURCE}/target/release/storaged": binary(),
        "/opt/tests": ROOT / "tests" / "nodes", "/opt/python": package("storaged").parent,
    }


def section(title: str) -> str:
    """The commands that deploy/README.md has under a title."""
    text = (ROOT / "deploy" / "README.md").read_text()
    _, found, rest = text.partition(f"\n## {title}\n")
    expect(bool(found), f"deploy/README.md has no section {title}")
    block = re.search(r"(?:^    .*\n|^\n(?=    ))+", rest, re.M)
    return re.sub(r"^    ", "", block[0], flags=re.M)


def configuration(lab: Lab, machine: Machine, changes: list[tuple[str, str]]) -> str:
    """deploy/storaged.toml for a smaller cluster, (2, 1) over three nodes; what is replaced must be there."""
    text = (ROOT / "deploy" / "storaged.toml").read_text()
    head, _, _ = text.partition("\n[[peers]]\n")
    own = [
        ("node-1", machine.name), ("rack-1", f"rack-{machine.name[-1]}"), ("10.0.0.1:", f"{machine.address}:"), ("k = 4", "k = 2"), ("m = 2", "m = 1"),
        ('# budget = "256GiB"', 'budget = "256MiB"'),
    ]
    for old, new in own + changes:
        expect(old in head, f"deploy/storaged.toml has no {old}")
        head = head.replace(old, new)
    peers = [peer for peer in lab.machines if peer is not machine]
    entries = [f'[[peers]]\nname = "{peer.name}"\naddress = "{peer.address}:9300"\nfailure_domain = "rack-{peer.name[-1]}"\n' for peer in peers]
    return "\n".join([head, *entries])


class Node:
    """A machine with storaged on it."""

    def __init__(self, lab: Lab, machine: Machine):
        self.lab, self.machine, self.name = lab, machine, machine.name

    def install(self, changes: list[tuple[str, str]], dropins: dict[str, str]) -> None:
        self.machine.does("useradd", "--create-home", f"--uid={TRAINER_UID}", TRAINER)
        self.install_with(configuration(self.lab, self.machine, changes), dropins)

    def install_with(self, text: str, dropins: dict[str, str], certificate: str | None = None) -> None:
        """Every line of "With systemd"; the files of /etc/storaged come where its comment names them."""
        commands = section("With systemd").splitlines(keepends=True)
        folder = next(number for number, line in enumerate(commands) if "/etc/storaged" in line)
        expect("install -d" in commands[folder], f"expected the line that makes /etc/storaged first, got {commands[folder]}")
        self.machine.shell("".join(commands[: folder + 1]), cwd=SOURCE)
        self.put("storaged.toml", text)
        self.take_certificates(certificate or self.name)
        for name, lines in dropins.items():
            self.machine.write(f"/etc/systemd/system/storaged.service.d/{name}.conf", lines)
        self.machine.shell("".join(commands[folder + 1 :]), cwd=SOURCE)

    def put(self, name: str, text: str, mode: int = 0o640, group: str = "storaged") -> None:
        self.machine.write(f"/etc/storaged/{name}", text, mode)
        self.machine.does("chown", f"root:{group}", f"/etc/storaged/{name}")

    def change(self, *changes: tuple[str, str]) -> str:
        """Changes the configuration; as it was before."""
        before = after = (self.machine.root / "etc/storaged/storaged.toml").read_text()
        for old, new in changes:
            expect(old in after, f"the configuration has no {old}")
            after = after.replace(old, new)
        self.put("storaged.toml", after)
        return before

    def take_certificates(self, called: str | None = None) -> None:
        """As the operator copies them from where the authority is."""
        authority, called = authority_folder(self.lab), called or self.name
        for name, source, mode in [("ca.pem", "ca.pem", 0o644), (f"{called}.pem", f"{self.name}.pem", 0o644), (f"{called}.key", f"{self.name}.key", 0o640)]:
            self.put(name, (authority / source).read_text(), mode)

    def pid(self) -> str:
        pid = self.machine.property("MainPID")
        expect(pid != "0", f"{self.name}: no daemon runs: {self.machine.property('Result')}")
        return pid

    def wait_ready(self, limit: float = 60) -> float:
        return until(f"{self.name} ready", self._is_ready, limit)

    def _is_ready(self) -> bool | str:
        done = self.machine.tries("storaged", "status", "--probe", "ready")
        return done.returncode == 0 or done.stderr.strip() + self.machine.journal()[-1000:]

    def operator(self, *arguments) -> subprocess.CompletedProcess:
        """`storaged` as an operator of the node runs it."""
        return self.machine.tries("storaged", *arguments)

    def status(self) -> dict:
        return json.loads(self.machine.does("storaged", "status", "--json"))

    def trainer(self, *arguments, user: str = TRAINER, socket: str = SOCKET) -> subprocess.CompletedProcess:
        environment = {"PYTHONPATH": "/opt/python", "STORAGED_SOCKET": socket, "STORAGED_TOKEN": TOKEN}
        return self.machine.tries("python3", TRAINER_PROGRAM, *arguments, user=user, environment=environment)

    def asks(self, *arguments) -> str:
        done = self.trainer(*arguments)
        expect(done.returncode == 0, f"{self.name}: {arguments} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.stdout.strip()

    def metric(self, name: str) -> float:
        """From the address that the shipped configuration has, added up over its labels."""
        script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9301/metrics', timeout=10).read().decode())"
        lines = self.machine.does("python3", "-c", script).splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.split(r"[{ ]", line)[0] == name)


def authority_folder(lab: Lab) -> Path:
    return lab.memory / "authority"


def make_certificates(lab: Lab) -> None:
    folder = str(authority_folder(lab))
    run(str(binary()), "cert", "ca", folder)
    for machine in lab.machines:
        run(str(binary()), "cert", "issue", folder, machine.name)


def everywhere(nodes: list[Node], what) -> list:
    """On all nodes at once: what(number, node)."""
    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(what, range(len(nodes)), nodes))


class Job:
    """A rank on each node."""

    def __init__(self, nodes: list[Node], namespace: str):
        self.nodes, self.namespace = nodes, namespace
        self.run = nodes[0].asks("open", namespace)

    def save(self, step: int, state: str = "protected") -> None:
        everywhere(self.nodes, lambda rank, node: node.asks("save", self.namespace, self.run, rank, len(self.nodes), step, state))

    def load(self, step: int, rung: str | None = None) -> list[dict]:
        """All ranks read the newest step and compare every byte."""
        got = everywhere(self.nodes, lambda rank, node: json.loads(node.asks("load", self.namespace, rank)))
        for rank, one in enumerate(got):
            expect(one["step"] == step and one["wrong"] == 0, f"rank {rank}: expected step {step} without a wrong byte, got {one}")
            expect(rung is None or one["rung"] == rung, f"rank {rank}: expected its bytes from {rung}, got {one}")
        return got

    def wait_whole(self, limit: float = 60) -> None:
        """Until all blocks of the newest step are where they belong, read and compared by `storaged verify`."""
        until("all blocks in their places", self._is_whole, limit)

    def _is_whole(self) -> bool | str:
        # To the operator a job of a tenant is TENANT~JOB.
        done = self.nodes[0].operator("verify", f"training~{self.namespace}", "--json")
        try:
            parts = json.loads(done.stdout)["parts"]
        except (ValueError, LookupError):
            return done.stdout + done.stderr
        kinds = [part["what"].split()[0] for part in parts if not part["fault"]]
        # (2, 1) over three ranks: a group of two and one of one.
        return (kinds.count("shard"), kinds.count("parity")) == (3, 2) or done.stdout


