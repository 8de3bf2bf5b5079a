"""Six daemons and four ranks on one machine, for the demo and the kill loop: real processes on loopback addresses."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NODES, K, M, RANKS = 6, 4, 2, 4
NAMESPACE, TOKEN = "demo", secrets.token_hex(32)


class CheckFailed(Exception):
    """Something that must hold did not."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise CheckFailed(text)


def place(checkpoint: tuple[str, int]) -> tuple[int, str, int]:
    """Orders (run, step): a run is a number, and an identity that tells it from others of its number."""
    number, _, identity = checkpoint[0].partition("-")
    return int(number), identity, checkpoint[1]


class Cluster:
    """The daemons. Every process started here is killed at the end, by its own id."""

    def __init__(self, directory: Path, durable: str, every: int, port: int, environment: dict[str, str] | None = None):
        self.directory, self.port = directory, port
        self.binary = Path(os.environ.get("STORAGED_BIN", ROOT / "target" / "release" / "storaged"))
        check(self.binary.exists(), f"no executable at {self.binary}: run `make demo`, which builds it")
        # Who kills a node here means its memory too.
        self.environment = dict(os.environ, STORAGED_KEEP="none", STORAGED_TOKEN=TOKEN, **(environment or {}))
        self.daemons: dict[int, subprocess.Popen] = {}
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.certificates = directory / "certs"
        self.storaged("cert", "ca", self.certificates)
        for node in range(NODES):
            self.storaged("cert", "issue", self.certificates, f"n{node}")
            self.config(node).write_text(self.config_text(node, durable, every))

    def storaged(self, *arguments, expect: int | None = 0) -> str:
        command = [str(self.binary), *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=180, check=False)
        if expect is not None:
            check(done.returncode == expect, f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def config(self, node: int) -> Path:
        return self.directory / f"n{node}.toml"

    def socket(self, node: int) -> Path:
        return self.directory / f"n{node}" / "storaged.sock"

    def log(self, node: int) -> Path:
        return self.directory / f"n{node}.log"

    def config_text(self, node: int, durable: str, every: int) -> str:
        certificates = self.certificates
        text = f"""[node]
name = "n{node}"
listen = "127.0.0.{node + 1}:{self.port}"
runtime_dir = "{self.socket(node).parent}"
ops_listen = "127.0.0.{node + 1}:{self.port + 1}"

[tls]
ca = "{certificates}/ca.pem"
certificate = "{certificates}/n{node}.pem"
key = "{certificates}/n{node}.key"

[coding]
k = {K}
m = {M}

[memory]
budget = "1GiB"
slots_per_rank = 4

[trickle]
every = {every}

{durable}
"""
        for peer in (peer for peer in range(NODES) if peer != node):
            text += f'[[peers]]\nname = "n{peer}"\naddress = "127.0.0.{peer + 1}:{self.port}"\n\n'
        return text

    def start(self, *nodes: int) -> None:
        for node in nodes:
            with self.log(node).open("ab") as log:
                command = [str(self.binary), "run", "--config", str(self.config(node))]
                self.daemons[node] = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def status(self, node: int) -> dict | None:
        command = [str(self.binary), "status", "--json", "--socket", str(self.socket(node))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def wait_up(self, nodes=range(NODES), limit: float = 40) -> float:
        """Until each of the nodes sees all others."""
        started = time.monotonic()
        for node in nodes:
            while True:
                status = self.status(node)
                if status and all(peer["up"] for peer in status["peers"]):
                    break
                check(time.monotonic() - started < limit, f"node n{node} does not see all peers after {limit:.0f} s; its log is {self.log(node)}")
                time.sleep(0.1)
        return time.monotonic() - started

    def checkpoints(self, node: int) -> list[dict]:
        """What `storaged ls` says; empty while the daemon is away."""
        command = [str(self.binary), "ls", "--json", "--socket", str(self.socket(node))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else []

    def newest(self, node: int, *states: str) -> tuple[str, int] | None:
        """(run, step) of the newest checkpoint in one of the states."""
        found = [(one["run"], one["step"]) for one in self.checkpoints(node) if one["state"] in states]
        return max(found, key=place, default=None)

    def kill(self, *nodes: int) -> None:
        for node in nodes:
            kill(self.daemons.pop(node, None))

    def plan(self, node: int, step: int | None = None) -> dict:
        chosen = [] if step is None else ["--step", step]
        output = self.storaged("plan", NAMESPACE, "--json", "--socket", self.socket(node), *chosen)
        return json.loads(output)

    def metric(self, name: str, **labels: str) -> float:
        """A counter, added up over all daemons that live."""
        wanted = name + ("{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}" if labels else "")
        total = 0.0
        for node in self.daemons:
            with urllib.request.urlopen(f"http://127.0.0.{node + 1}:{self.port + 1}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.split()[0] == wanted)
        return total

    def verify(self, node: int) -> dict:
        output = self.storaged("verify", NAMESPACE, "--json", "--socket", self.socket(node))
        return json.loads(output)

    def wait_healed(self, node: int, limit: float = 60) -> float:
        """Until every shard and parity set of the newest protected checkpoint is where it belongs."""
        started = time.monotonic()
        while True:
            parts = self.verify(node)["parts"]
            check(not any(part["fault"] for part in parts), f"verify found faults: {parts}")
            shards = {part["what"] for part in parts if part["what"].startswith("shard")}
            parity = {part["what"] for part in parts if part["what"].startswith("parity")}
            if len(shards) == RANKS and len(parity) == M:
                return time.monotonic() - started
            check(time.monotonic() - started < limit, f"not healed after {limit:.0f} s: {sorted(shards | parity)}")
            time.sleep(0.3)

    def end(self) -> None:
        self.kill(*list(self.daemons))


def end_all(cluster: Cluster | None) -> None:
    """Ends every process that was started here."""
    for job in Job.started:
        job.kill()
    if cluster is not None:
        cluster.end()


def kill(process: subprocess.Popen | None) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """One incarnation of the trainers: rank r on node r."""

    started: list[Job] = []

    def __init__(self, cluster: Cluster | None, directory: Path, name: str, *options: str):
        self.directory = directory
        self.log = directory / f"train-{name}.log"
        self.losses = directory / f"losses-{name}.txt"
        port = free_port()
        self.ranks: list[subprocess.Popen] = []
        Job.started.append(self)
        for rank in range(RANKS):
            environment = dict(
                os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                OMP_NUM_THREADS="1", STORAGED_NAMESPACE=NAMESPACE, STORAGED_TOKEN=TOKEN, PYTHONWARNINGS="ignore",
            )
            if cluster is not None:
                environment["STORAGED_SOCKET"] = str(cluster.socket(rank))
            command = [sys.executable, "-u", str(HERE / "train.py"), "--losses", str(self.losses), *options]
            with self.log.open("ab") as log:
                self.ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def wait(self, limit: float = 600) -> None:
        """Until every rank has ended well."""
        started = time.monotonic()
        while any(rank.poll() is None for rank in self.ranks):
            failed = [index for index, rank in enumerate(self.ranks) if rank.poll() not in (None, 0)]
            check(not failed, f"ranks {failed} of the job failed; the log is {self.log}")
            check(time.monotonic() - started < limit, f"the job did not end within {limit:.0f} s; its log is {self.log}")
            time.sleep(0.2)
        check(all(rank.returncode == 0 for rank in self.ranks), f"the job failed; its log is {self.log}")

    def step(self) -> int:
        return max(read_losses(self.losses), default=0)

    def wait_step(self, step: int, limit: float = 300) -> None:
        started = time.monotonic()
        while self.step() < step:
            check(all(rank.poll() is None for rank in self.ranks), f"the job ended before step {step}; its log is {self.log}")
            check(time.monotonic() - started < limit, f"the job did not reach step {step} within {limit:.0f} s; its log is {self.log}")
            time.sleep(0.1)

    def kill(self, *ranks: int) -> None:
        for rank in ranks or range(RANKS):
            kill(self.ranks[rank])


def read_losses(path: Path) -> dict[int, str]:
    """Loss per step, as exact hexadecimal text. A line that is still being written is left out."""
    if not path.exists():
        return {}
    lines = path.read_text("ascii").split("\n")[:-1]
    return {int(step): loss for step, loss in (line.split() for line in lines)}
