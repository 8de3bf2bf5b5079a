"""Orbax with our handler: saved by its manager, killed, and restored by another process's."""

import os
import subprocess
import sys

import pytest
from daemon import PACKAGE

pytest.importorskip("orbax.checkpoint")

JOB = """
import os, signal, sys
import jax, jax.numpy as jnp
import orbax.checkpoint as ocp
from storaged.orbax import StoragedHandler, StoragedRestore, StoragedSave

def state_of(step):
    return {"w": jnp.full((300, 20), step, jnp.float32), "half": jnp.arange(7, dtype=jnp.bfloat16) * step, "opt": [jnp.int32(step), step]}

manager = ocp.CheckpointManager(sys.argv[1], item_handlers=StoragedHandler("orbax"), options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False))
latest = manager.latest_step()
if latest is not None:
    blank = {"w": jnp.zeros((300, 20)), "half": jnp.zeros(7, jnp.bfloat16), "opt": [jnp.int32(0), 0]}
    got, expected = manager.restore(latest, args=StoragedRestore(blank)), state_of(latest)
    same = jax.tree_util.tree_map(lambda a, b: bool((jnp.asarray(a) == jnp.asarray(b)).all()), got, expected)
    print("RESTORED", latest, jax.tree_util.tree_all(same), got["half"].dtype, flush=True)
for step in range((latest or 0) + 1, (latest or 0) + 4):
    manager.save(step, args=StoragedSave(state_of(step)))
print("SAVED", manager.latest_step(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_goes_on_from_what_the_daemon_has(shared_daemon, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    environment = os.environ | {
        "STORAGED_SOCKET": str(shared_daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "PYTHONPATH": str(PACKAGE), "JAX_PLATFORMS": "cpu",
    }
    said = []
    for _ in range(2):
        run = subprocess.run([sys.executable, str(script), str(tmp_path / "steps")], env=environment, capture_output=True, text=True, timeout=240)
        assert run.returncode == -9, run.stderr
        said += run.stdout.splitlines()
    assert said == ["SAVED 3", "RESTORED 3 True bfloat16", "SAVED 6"]
    # Orbax's folder holds names, not arrays.
    assert sum(path.stat().st_size for path in (tmp_path / "steps").rglob("*") if path.is_file()) < 20_000
