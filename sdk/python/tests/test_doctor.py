"""`python -m storaged doctor`, in a process of its own and without torch."""

import os
import subprocess
import sys

import torch
from daemon import PACKAGE
from storaged.torch import Checkpointer


def doctor(socket, *arguments):
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": "job"}
    command = [sys.executable, "-m", "storaged", "doctor", "--socket", str(socket), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_what_a_trainer_would_meet(daemons, tmp_path):
    daemon = daemons()
    code, text = doctor(daemon.socket)
    assert code == 0 and "nothing was saved yet" in text, text
    with Checkpointer(session=daemon.session()) as checkpointer:
        checkpointer.save(7, {"w": torch.ones(1000)})
        assert checkpointer.wait()
    code, text = doctor(daemon.socket, "--copy")
    assert code == 0 and "would get step 7" in text and "GB/s into a slot" in text, text
    daemon.kill()
    code, text = doctor(daemon.socket)
    assert code == 1 and "FAIL  daemon: DaemonUnavailable" in text, text
