"""The Slurm job of deploy/ without Slurm: its scripts as they are, real torchruns and daemons, and commands of Slurm's that do to
processes what the real ones do."""

import os
import re
import signal
import stat
import subprocess
import sys
import time

import pytest
from daemon import HERE, PACKAGE, ROOT, cluster, executable, free_port, run_ranks
from torch.distributed.elastic.rendezvous import registry

SCRIPTS = ROOT / "deploy/slurm"
JOB = SCRIPTS / "train.sbatch"
EXAMPLE = HERE.parent / "examples" / "last_save.py"
BEGINS = r"rank \d begins after step (\d+)"
ENDS = r"rank \d ends after step (\d+), saved: True"

# Starts its command once for each node and ends as the worst of them. Of signals it gives on what srun gives on; SIGTERM kills the tasks,
# as srun does ("forcing job termination").
SRUN = """#!PYTHON
import os, signal, subprocess, sys
arguments = sys.argv[1:]
with open("FOLDER/sruns", "a") as out:
    print(*arguments, file=out)
while arguments[0].startswith("--"):
    arguments.pop(0)
tasks = [subprocess.Popen(arguments, start_new_session=True) for _ in range(int(os.environ["SLURM_NNODES"]))]
with open("FOLDER/tasks", "w") as out:
    print(*[task.pid for task in tasks], file=out)
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
sys.exit(max(128 - code if code < 0 else code for code in [task.wait() for task in tasks]))
"""
# `scancel --signal=S JOB`: to all processes of the steps, and not to the batch script.
SCANCEL = """#!PYTHON
import os, pathlib, signal, sys
with open("FOLDER/asked", "a") as out:
    print("scancel", *sys.argv[1:], file=out)
number = signal.Signals["SIG" + sys.argv[1].removeprefix("--signal=")]
tasks = pathlib.Path("FOLDER/tasks")
ends = [int(pid) for pid in tasks.read_text().split()] if tasks.exists() else []
parents = {}
for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdecimal():
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass
for pid in ends:
    ends += [child for child, parent in parents.items() if parent == pid]
for pid in ends:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") printf '127.0.0.1\\n127.0.0.1\\n' ;;
*) echo "scontrol $*" >> FOLDER/asked ;;
esac
"""


class Slurm:
    """Starts batch scripts as slurmd does, and has its commands."""

    def __init__(self, folder, daemon):
        self.folder, self.daemon = folder, daemon
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in [("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)]:
            script = self.bin / name
            script.write_text(text.replace("PYTHON", sys.executable).replace("FOLDER", str(folder)))
            script.chmod(0o755)
        (self.bin / "storaged").symlink_to(executable().absolute())
        (self.bin / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run --local-addr 127.0.0.1 "$@"\n')
        (self.bin / "torchrun").chmod(0o755)
        self.jobs = []

    def batch(self, script, *arguments, **extra):
        """A batch script's process, which SIGTERM and SIGUSR1 reach alone."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("STORAGED_", "SLURM_"))}
        environment = own | {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": "1", "GLOO_SOCKET_IFNAME": "lo", "STORAGED_SOCKET": str(self.daemon.socket), "STORAGED_TOKENS": str(self.folder / "tokens"),
            "STORAGED_ASK_S": "5", "STORAGED_SLEEP_S": "1", "NPROC_PER_NODE": "1", "RDZV_PORT": str(free_port()),
            "SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_SUBMIT_DIR": str(ROOT),
        }
        log = self.folder / f"log-{len(self.jobs)}"
        with log.open("w") as out:
            command = ["bash", str(script), *map(str, arguments)]
            job = subprocess.Popen(command, env=environment | extra, stdout=out, stderr=out, start_new_session=True)
        job.log = log
        self.jobs.append(job)
        return job

    def signal_tasks(self, name):
        subprocess.run([str(self.bin / "scancel"), f"--signal={name}", "77"], check=True)

    def cancel_tasks(self):
        self.signal_tasks("KILL")

    def ended(self, job, limit=120):
        """Its exit code; if it hangs, where its processes are."""
        try:
            return job.wait(limit)
        except subprocess.TimeoutExpired:
            self.signal_tasks("ABRT")
            time.sleep(2)
            raise AssertionError(f"no end after {limit} s: {job.log.read_text()[-12000:]}") from None

    def lines(self, name):
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


# Of two ranks: with both nodes it is lost.
SAVES = """
with Checkpointer(timeout=60) as checkpointer:
    attempt(checkpointer.save, 20, state(20))
    attempt(checkpointer.wait, until="protected")
"""


@pytest.fixture
def nodes(tmp_path):
    made = cluster(tmp_path / "nodes", 3, 2, 1, "")
    yield made
    for one in made:
        one.kill()


@pytest.fixture
def slurm(tmp_path, nodes):
    made = Slurm(tmp_path, nodes[0])
    yield made
    for job in made.jobs:
        if job.poll() is None:
            job.kill()
            job.wait()
    made.cancel_tasks()


def until(job, pattern, count=2, limit=120):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        hits = re.findall(pattern, job.log.read_text())
        if len(hits) >= count:
            return hits
        if job.poll() is not None and len(re.findall(pattern, job.log.read_text())) < count:
            break
        time.sleep(0.1)
    raise AssertionError(f"{pattern}: {job.log.read_text()[-4000:]}")


needs_backends = pytest.mark.skipif(
    not hasattr(registry, "_register_out_of_tree_handlers"), reason="this torch takes no rendezvous backends of other packages"
)


@needs_backends
def test_a_job_whose_time_is_nearly_over_saves_once_more_and_goes_on_there_when_it_is_requeued(slurm):
    before = "0"
    for start in range(2):
        job = slurm.batch(JOB, EXAMPLE, "--steps", "100000000", SLURM_RESTART_COUNT=str(start))
        assert until(job, BEGINS) == [before, before]
        time.sleep(1)
        # What --signal=B:USR1@180 does.
        job.send_signal(signal.SIGUSR1)
        assert slurm.ended(job) == 0, job.log.read_text()
        ended = until(job, ENDS)
        assert len(ended) == 2 and ended[0] == ended[1] and int(ended[0]) > int(before), job.log.read_text()
        before = ended[0]
        assert slurm.lines("asked") == ["scancel --signal=TERM 77", "scontrol requeue 77"] * (start + 1)
        assert len(slurm.lines("sruns")) == start + 1, "nothing is started in the time that is left"
    (token,) = (slurm.folder / "tokens").iterdir()
    assert token.name == "slurm-77.token" and stat.S_IMODE(token.stat().st_mode) == 0o600


@needs_backends
def test_the_last_requeue_that_is_allowed_is_not_the_last_save(slurm):
    """A job of many allotments of time is no job that fails again and again."""
    job = slurm.batch(JOB, EXAMPLE, "--steps", "100000000", SLURM_RESTART_COUNT="5")
    until(job, BEGINS)
    job.send_signal(signal.SIGUSR1)
    assert slurm.ended(job) == 0, job.log.read_text()
    assert slurm.lines("asked")[-1] == "scontrol requeue 77"


def test_a_cancelled_job_is_neither_started_again_nor_requeued(slurm):
    job = slurm.batch(SCRIPTS / "restart.sh", "srun", "sleep", "600")
    deadline = time.monotonic() + 60
    while not (slurm.folder / "tasks").exists():
        assert time.monotonic() < deadline and job.poll() is None, job.log.read_text()
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    slurm.cancel_tasks()
    assert slurm.ended(job, 60) == 128 + signal.SIGKILL, job.log.read_text()
    assert len(slurm.lines("sruns")) == 1 and not any("requeue" in line for line in slurm.lines("asked")), job.log.read_text()


def test_a_job_that_waits_for_a_node_when_its_time_is_over_is_requeued_without_a_start(slurm, nodes, tmp_path):
    said, errors = run_ranks(tmp_path, [one.socket for one in nodes[:2]], SAVES, limit=120)
    assert all(one and one[-1][:2] == ["ok", True] for one in said), (said, errors)
    nodes[0].stop()
    nodes[1].stop()
    slurm.daemon = nodes[2]
    job = slurm.batch(SCRIPTS / "restart.sh", "srun", "true", STORAGED_TOKEN="a-secret-of-tests", STORAGED_NAMESPACE="job")
    until(job, "waiting .* s more for a node", 1)
    job.send_signal(signal.SIGUSR1)
    assert slurm.ended(job, 60) == 0, job.log.read_text()
    assert slurm.lines("asked")[-1] == "scontrol requeue 77" and slurm.lines("sruns") == [], job.log.read_text()


def test_the_job_names_what_there_is():
    text = JOB.read_text()
    head = text[: text.index("\nset -euo")]
    assert {"--requeue", "--open-mode=append"} <= set(re.findall(r"^#SBATCH (\S+)$", head, re.M))
    (number,) = re.findall(r"^#SBATCH --signal=B:(\w+)@\d+$", head, re.M)
    assert f"trap save_once_more {number}\n" in (SCRIPTS / "restart.sh").read_text()
    assert not re.findall(r"^#SBATCH", text[len(head) :], re.M), "Slurm reads none behind the first command"
    named = re.findall(r"[\w./]*\w+\.(?:sh|sbatch|py)\b", text.replace("$scripts/", ""))
    assert {"restart.sh", "task_prolog.sh", "prolog.sh", "epilog.sh", "health_check.sh"} <= {name.rsplit("/")[-1] for name in named}
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT, SCRIPTS, EXAMPLE.parent)), name
    for script in [*SCRIPTS.glob("*.sh"), JOB]:
        assert script.stat().st_mode & 0o111, f"{script} cannot be executed"
        subprocess.run(["bash", "-n", script], check=True)
