"""Orbax with our handler: saved by its manager, killed, and restored by another process's."""

import os
import re
import subprocess
import sys

import pytest
from daemon import PACKAGE, free_port

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


# Four devices in all, of as many processes as are asked for. The last of these kills itself.
SEVERAL = """
import os, signal, sys, time
from pathlib import Path
count, index, address = int(os.environ["JOB_PROCESSES"]), int(os.environ["JOB_INDEX"]), os.environ["JOB_ADDRESS"]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // count}"
import jax, jax.numpy as jnp
if count > 1:
    jax.distributed.initialize(address, count, index)
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from storaged import errors
from storaged.orbax import StoragedHandler, StoragedRestore, StoragedSave

# Rows lie together with one number of processes and apart with another.
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2).T if count == 1 else np.array(jax.devices()).reshape(2, 2), ("a", "b"))
rng = np.random.default_rng(7)
WHOLE = {"both": rng.random((8, 12), np.float32), "rows": rng.random((4, 6), np.float32), "same": rng.random((5,), np.float32)}
SPECS = {"both": P("a", "b"), "rows": P("a"), "same": P()}

def placed(name, value):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, SPECS[name]), lambda index: value[index])

def state_of(step):
    arrays = {name: placed(name, value * step) for name, value in WHOLE.items()}
    return {**arrays, "half": placed("same", WHOLE["same"]).astype(jnp.bfloat16) * step, "step": step, "names": np.arange(3) + step}

def is_state_of(got, step):
    expected = state_of(step)
    for name in ("both", "rows", "same", "half"):
        for one, other in zip(got[name].addressable_shards, expected[name].addressable_shards):
            assert one.device == other.device and one.index == other.index, name
            assert one.data.dtype == other.data.dtype and (np.asarray(one.data) == np.asarray(other.data)).all(), name
        assert got[name].sharding == expected[name].sharding
    return got["step"] == step and (got["names"] == expected["names"]).all()

handler = StoragedHandler("orbax-several")
manager = ocp.CheckpointManager(sys.argv[1], item_handlers=handler)
latest = manager.latest_step() or 0
if latest:
    blank = {**state_of(0), "step": 0, "names": 0}
    print("RESTORED", latest, is_state_of(manager.restore(latest, args=StoragedRestore(blank)), latest), flush=True)
for step in range(latest + 1, latest + 3):
    state = state_of(step)
    manager.save(step, args=StoragedSave(state))
    for leaf in jax.tree_util.tree_leaves(state):
        if isinstance(leaf, jax.Array):
            leaf.delete()
manager.wait_until_finished()
print("SAVED", manager.latest_step(), flush=True)
if count > 1:
    # What one process cannot save, none has saved.
    try:
        handler.save(Path(sys.argv[1]) / "99", args=StoragedSave({"value": print if index else 1}))
    except errors.StoragedError as error:
        print("REFUSED", type(error).__name__, "trust_pickle=True" in str(error), flush=True)
    multihost_utils.sync_global_devices("all have spoken")
if index == count - 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def several(daemon, tmp_path, count):
    """What each of the job's processes said until the last one was killed."""
    script, address = tmp_path / "several.py", f"127.0.0.1:{free_port()}"
    script.write_text(SEVERAL)
    workers = []
    for index in range(count):
        environment = os.environ | {
            "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "PYTHONPATH": str(PACKAGE), "JAX_PLATFORMS": "cpu",
            "JOB_PROCESSES": str(count), "JOB_INDEX": str(index), "JOB_ADDRESS": address,
        }
        outputs = [(tmp_path / f"{name}-{count}-{index}").open("w+") for name in ("out", "err")]
        command = [sys.executable, str(script), str(tmp_path / "several")]
        workers.append((subprocess.Popen(command, env=environment, stdout=outputs[0], stderr=outputs[1]), *outputs))
    try:
        last = workers[-1][0].wait(240)
    finally:
        for worker, _, _ in workers:
            worker.kill()
            worker.wait()
    said = []
    for _, out, err in workers:
        out.seek(0)
        err.seek(0)
        said.append([line for line in out.read().splitlines() if not line.startswith("[Gloo]")])
        assert last == -9, err.read()
    return said


def test_processes_save_their_shards_and_another_number_of_them_restores(shared_daemon, tmp_path):
    refused = ["REFUSED CheckpointSaveError True", "REFUSED UnsavableState True"]
    assert several(shared_daemon, tmp_path, 2) == [["SAVED 2", one] for one in refused]
    assert several(shared_daemon, tmp_path, 2) == [["RESTORED 2 True", "SAVED 4", one] for one in refused]
    assert several(shared_daemon, tmp_path, 1) == [["RESTORED 4 True", "SAVED 6"]]
    assert several(shared_daemon, tmp_path, 4)[0][:2] == ["RESTORED 6 True", "SAVED 8"]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "several").rglob("*") if path.is_file()}
    assert sizes.pop("storaged") < 100 and not any(re.search("zarr|ocdbt|manifest", name) for name in sizes), sizes


REFUSED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from storaged import errors
from storaged.orbax import StoragedHandler, StoragedRestore, StoragedSave

handler, folder = StoragedHandler("orbax-refused"), Path(sys.argv[1])

def attempt(call):
    try:
        print("OK", call())
    except errors.StoragedError as error:
        print(type(error).__name__, error)

attempt(lambda: handler.save(folder / "1", args=StoragedSave({"key": jax.random.key(0)})))
attempt(lambda: handler.save(folder / "2", args=StoragedSave({"small": jnp.zeros(4, jnp.int4)})))
attempt(lambda: handler.restore(folder / "3", args=StoragedRestore({"w": jnp.zeros(4)})))
attempt(lambda: handler.save(folder / "4", args=StoragedSave({"w": jnp.arange(4.0), "mask": jnp.array([True, False])})))
attempt(lambda: handler.restore(folder / "4", args=StoragedRestore({"w": jnp.zeros(5)})))
attempt(lambda: handler.restore(folder / "4", args=StoragedRestore({"v": jnp.zeros(4)})))
blank = {"w": jax.ShapeDtypeStruct((4,), jnp.float32), "mask": jax.ShapeDtypeStruct((2,), jnp.bool_)}
attempt(lambda: {name: value.tolist() for name, value in handler.restore(folder / "4", args=StoragedRestore(blank)).items()})
"""


def test_what_cannot_be_saved_or_is_not_there_is_said(shared_daemon, tmp_path):
    environment = os.environ | {
        "STORAGED_SOCKET": str(shared_daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "PYTHONPATH": str(PACKAGE), "JAX_PLATFORMS": "cpu",
    }
    run = subprocess.run([sys.executable, "-c", REFUSED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240)
    said = run.stdout.splitlines()
    expected = [
        "UnsavableState .*PRNG key", "UnsavableState .*int4", "UnknownNamespace ", "OK None",
        r"CheckpointLoadError .*\(4,\), expected \(5,\)", r"CheckpointLoadError .*no values for \['v'\]", r"OK \{'mask': \[True, False\], 'w': \[0.0, 1.0, 2.0, 3.0\]\}",
    ]
    assert len(said) == len(expected) and all(map(re.match, expected, said)), (said, run.stderr)
