"""A real `storaged` process for tests, and ranks that are real processes."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import storaged
from storaged import Session

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACKAGE = Path(storaged.__file__).parents[1]


def executable():
    """STORAGED_BIN, or what was built last: `make test` builds it in the debug profile, `make demo` for release."""
    named = os.environ.get("STORAGED_BIN")
    built = [ROOT / "target" / profile / "storaged" for profile in ("debug", "release")]
    found = [Path(named)] if named else [path for path in built if path.exists()]
    assert found, "no storaged executable: run `make test`, which builds it, or `cargo build -p storaged`"
    return max(found, key=lambda path: path.stat().st_mtime)


# The kernel gives ports from 32768 on to whoever connects: a daemon that is started again could not listen there then. Each of pytest's
# workers gives away its own, another process of tests begins elsewhere among them.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS_EACH = 1_000
NEXT_PORT = itertools.count(os.getpid())


def is_free(port):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def free_port():
    """A port of TCP and of UDP on which nobody listens."""
    first = 20_000 + WORKER % 12 * PORTS_EACH
    some = (first + next(NEXT_PORT) % PORTS_EACH for _ in range(PORTS_EACH))
    return next(port for port in some if is_free(port))


class Daemon:
    """One node. What it writes to the durable tier lies in `tier`."""

    def __init__(self, folder, extra="", budget="256MiB", name="n0", listen=None, tier=None):
        self.folder = Path(folder)
        self.tier = tier or self.folder / "tier"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tier.mkdir(exist_ok=True)
        self.socket = self.folder / "run" / "storaged.sock"
        self.log = self.folder / "daemon.log"
        self.config = self.folder / "storaged.toml"
        self.config.write_text(f"""[node]
name = "{name}"
listen = "{listen or f'127.0.0.1:{free_port()}'}"
ops_listen = "127.0.0.1:{free_port()}"
runtime_dir = "{self.socket.parent}"

[memory]
budget = "{budget}"

{extra.replace("TIER", str(self.tier))}
""")
        self.process = None
        self.start()

    def start(self):
        with self.log.open("ab") as log:
            # Whoever kills it means its memory too.
            command = [str(executable()), "run", "--keep", "none", "--config", str(self.config)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        limit = time.monotonic() + 20
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < limit, f"no answer from the daemon: {self.log.read_text()}"
            time.sleep(0.02)

    def answers(self):
        try:
            Session("probe", socket=self.socket, timeout=1).connect()
        except storaged.StoragedError:
            return False
        return True

    def session(self, namespace="job", **settings):
        return Session(namespace, socket=self.socket, token=b"a-secret-of-tests", **settings)

    def stop(self):
        """Stopped, not ended: the process does nothing, its sockets stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def status(self):
        return json.loads(self.page("status"))

    def page(self, name):
        """What the operator's HTTP shows."""
        address = re.search(r'ops_listen = "(.*)"', self.config.read_text())[1]
        with urllib.request.urlopen(f"http://{address}/{name}", timeout=10) as answer:
            return answer.read().decode()

    def metrics(self):
        lines = (line.rsplit(" ", 1) for line in self.page("metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def anonymous_bytes(self):
        """Memory of its own: neither slots nor files."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) << 10

    def kill(self):
        if self.process.poll() is None:
            self.go_on()
            self.process.kill()
            self.process.wait(30)

    def step_folder(self, session, step):
        """Where the durable copy of a step is."""
        (folder,) = (self.tier / session.namespace).glob(f"**/step-{step}")
        return folder


def cluster(folder, nodes, k, m, extra, ports=()):
    """Nodes that know each other, with one durable tier. A node's port stands for PORT in `extra`."""
    folder, names = Path(folder), [f"n{number}" for number in range(nodes)]
    certificates, addresses = folder / "certs", {name: f"127.0.0.1:{free_port()}" for name in names}
    issue = [["ca", certificates], *(["issue", certificates, name] for name in names)]
    for arguments in issue:
        subprocess.run([executable(), "cert", *map(str, arguments)], check=True, capture_output=True)
    started = []
    for number, name in enumerate(names):
        its = extra.replace("PORT", str(ports[number])) if ports else extra
        peers = "".join(f'[[peers]]\nname = "{peer}"\naddress = "{addresses[peer]}"\n\n' for peer in names if peer != name)
        files = f'[tls]\nca = "{certificates}/ca.pem"\ncertificate = "{certificates}/{name}.pem"\nkey = "{certificates}/{name}.key"\n'
        text = f"{files}\n[coding]\nk = {k}\nm = {m}\n\n{its}\n{peers}"
        started.append(Daemon(folder / name, text, name=name, listen=addresses[name], tier=folder / "tier"))
    return started


#: A durable tier that gets what is asked for alone.
ON_REQUEST = '[durable]\nkind = "directory"\npath = "TIER"\n[trickle]\nevery = 1000\n'


def saved_by_one(daemon, step, durable="never"):
    """A step of a job of one rank, as safe as it gets."""
    until = "durable" if durable == "required" else daemon.newest_state
    body = f"""
import torch
from storaged.torch import Checkpointer
with Checkpointer(timeout=60, durable={durable!r}) as checkpointer:
    checkpointer.save({step}, {{"w": torch.full((100_000,), {float(step)}), "step": {step}}})
    assert checkpointer.wait(until={until!r})
"""
    settings = os.environ | {
        "PYTHONPATH": str(PACKAGE), "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": "job",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, "-c", body], env=settings, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def saved_by_two(nodes, tmp_path, step, durable="never"):
    """A step of two ranks on nodes 0 and 1, so that every node is in the manifest and has it."""
    until = "durable" if durable == "required" else "protected"
    body = f"""
with Checkpointer(timeout=60, durable={durable!r}) as checkpointer:
    attempt(checkpointer.save, {step}, state({step}))
    attempt(checkpointer.wait, until={until!r})
"""
    said, errors = run_ranks(tmp_path, [one.socket for one in nodes[:2]], body, limit=200)
    assert all(ranks and ranks[1][:2] == ["ok", True] for ranks in said), (said, errors)


def flip(daemon, body, at):
    """Changes a byte of a shard in the daemon's shared memory; how many slots have it."""
    found = 0
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        try:
            is_slot = "storaged-slot" in os.readlink(link)
        except FileNotFoundError:  # closed meanwhile
            continue
        if not is_slot:
            continue
        with link.open("r+b") as memory:
            if memory.read(4096) != body[:4096]:
                continue
            memory.seek(at)
            memory.write(bytes([body[at] ^ 1]))
            found += 1
    return found


# How a test tells the ranks it starts what to do: the body of a function, with `rank`, `checkpointer` and friends at hand.
PRELUDE = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
from storaged import errors, Session
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
said = []

def attempt(call, *arguments, **named):
    started = time.monotonic()
    try:
        result = call(*arguments, **named)
        outcome = ["ok", result if isinstance(result, (int, str, bool, type(None))) else "something"]
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    said.append([*outcome, round(time.monotonic() - started, 2)])
    return outcome[0] == "ok"

def state(step):
    return {f"w{rank}": torch.full((1000,), float(step * 10 + rank)), "step": step}
"""
CLOSING = """
print("SAID " + json.dumps(said), flush=True)
if world_is_whole:
    dist.barrier()
elif rank == 0:
    time.sleep(2)  # it keeps the store for those that are left
os._exit(0)
"""


def run_ranks(folder, sockets, body, whole=True, limit=60):
    """Runs `body` in one process per socket; what each rank `said`. `whole`: no rank ends before the others."""
    script = Path(folder) / "ranks.py"
    script.write_text(PRELUDE + body + CLOSING.replace("world_is_whole", str(whole)))
    port = free_port()
    workers = []
    for rank, path in enumerate(sockets):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(len(sockets)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "STORAGED_SOCKET": str(path), "STORAGED_TOKEN": "a-secret-of-tests",
            "STORAGED_NAMESPACE": "job", "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]),
        }
        command = [sys.executable, str(script)]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said, errors = [], []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=limit)
            lines = [line for line in out.splitlines() if line.startswith("SAID ")]
            said.append(json.loads(lines[-1][5:]) if lines else None)
            errors.append(err)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    assert any(said), "\n".join(errors)
    return said, errors
