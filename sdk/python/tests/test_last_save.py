"""The example that saves once more when its job is told to end, under a real torchrun."""

import os
import re
import signal
import subprocess
import sys
import time

from daemon import HERE, PACKAGE, cluster

EXAMPLE = HERE.parent / "examples" / "last_save.py"
LIMIT = 120


def started(environment, log):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("w") as out:
        return subprocess.Popen([*command, str(EXAMPLE), "--steps", "100000000"], env=environment, stdout=out, stderr=out)


def until(found, log, what):
    """What the pattern finds of both ranks."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ends = re.findall(found, log.read_text())
        if len(ends) == 2:
            return ends
        time.sleep(0.1)
    raise AssertionError(f"{what}: {log.read_text()[-3000:]}")


def test_a_job_that_is_told_to_end_goes_on_where_it_ended(tmp_path):
    with_peers = cluster(tmp_path, 3, 2, 1, "")
    try:
        environment = os.environ | {
            "PYTHONPATH": str(PACKAGE), "STORAGED_SOCKET": str(with_peers[0].socket), "STORAGED_TOKEN": "a-secret-of-tests",
            "STORAGED_NAMESPACE": "job", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        }
        before = "0"
        for start in range(2):
            log = tmp_path / f"log{start}"
            job = started(environment, log)
            begun = until(r"rank \d begins after step (\d+)", log, "a start")
            assert begun == [before, before]
            time.sleep(1)
            job.send_signal(signal.SIGTERM)
            ended = until(r"rank \d ends after step (\d+), saved: True", log, "a last save")
            assert job.wait(LIMIT) != 0, "torchrun says that it was told to end"
            assert ended[0] == ended[1] and int(ended[0]) > int(before)
            before = ended[0]
    finally:
        for daemon in with_peers:
            daemon.kill()
