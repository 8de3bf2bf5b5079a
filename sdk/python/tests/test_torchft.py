"""torchft's transport: a replica that was killed goes on with what the other one sends, and what goes wrong is typed."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
from daemon import HERE, PACKAGE, cluster, free_port
from storaged.errors import CheckpointLoadError, UnsavableState

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make frameworks installs it")

EXAMPLE = HERE.parent / "examples" / "torchft_ddp.py"
STEPS, KILLED_AT = 8, 4
LIMIT = timedelta(seconds=30)


def state(step):
    return {
        "user": {"default": {"w": torch.full((300, 200), float(step)), "optimizer": {0: {"step": torch.tensor(step)}, "groups": (1, 2.5)}}},
        "torchft": OrderedDict(step=step, batches_committed=2 * step),
    }


def test_a_state_comes_back_type_for_type_from_another_node(tmp_path):
    from storaged.torchft import StoragedTransport

    nodes = cluster(tmp_path, nodes=3, k=2, m=1, extra="")
    try:
        source = StoragedTransport(session=nodes[0].session())
        target = StoragedTransport(session=nodes[1].session())
        # The third time it is a step that was not committed, and sent again.
        for step in (3, 4, 4):
            sent = state(step)
            source.send_checkpoint([1], step, sent, LIMIT)
            sent["user"]["default"]["w"].zero_()
            source.disallow_checkpoint()
            got = target.recv_checkpoint(0, source.metadata(), step, LIMIT)
            assert torch.equal(got["user"]["default"]["w"], state(step)["user"]["default"]["w"])
            assert got["user"]["default"]["optimizer"][0]["step"] == step and got["user"]["default"]["optimizer"]["groups"] == (1, 2.5)
            assert got["torchft"] == state(step)["torchft"]
        with pytest.raises(CheckpointLoadError, match="no step 9 within 1 s"):
            target.recv_checkpoint(0, source.metadata(), 9, timedelta(seconds=1))
        with pytest.raises(CheckpointLoadError, match="no step 3 within 1 s"):
            target.recv_checkpoint(0, target.metadata(), 3, timedelta(seconds=1))
        source.shutdown()
    finally:
        for node in nodes:
            node.kill()


def test_what_cannot_be_sent_is_refused_before(session):
    from storaged.torchft import StoragedTransport
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    transport = StoragedTransport(session=session)
    with pytest.raises(UnsavableState):
        transport.send_checkpoint([1], 1, {"user": object()}, LIMIT)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = zeros(4, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)])
        with pytest.raises(UnsavableState, match="'user.w' is a DTensor"):
            transport.send_checkpoint([1], 1, {"user": {"w": part}}, LIMIT)
    finally:
        dist.destroy_process_group()


def losses(daemon, namespace, folder, *killed):
    """What two replicas print by step, and what is logged."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200)
    environment = os.environ | {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}", "PYTHONPATH": str(PACKAGE), "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests",
        "STORAGED_NAMESPACE": namespace, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
    }
    workers = []
    for replica in range(2):
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1", "--master-port", str(free_port())]
        command = [sys.executable, *torchrun, str(EXAMPLE), "--replica", str(replica), "--steps", str(STEPS)]
        command += killed if replica == 1 else ()
        with (folder / f"{namespace}-{replica}.log").open("w") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True))
    try:
        outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        lighthouse.shutdown()
    logs = [(folder / f"{namespace}-{replica}.log").read_text() for replica in range(2)]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(logs)
    return [dict(re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)) for output in outputs], logs


def test_a_killed_replica_is_healed_and_has_the_same_losses(shared_daemon, tmp_path):
    (straight, same), logs = losses(shared_daemon, "torchft-straight", tmp_path)
    assert straight == same and len(straight) == STEPS, (straight, same, logs)
    disturbed, logs = losses(shared_daemon, "torchft-killed", tmp_path, "--kill-at", str(KILLED_AT))
    assert "exitcode: -9" in logs[1], logs[1]
    assert disturbed == [straight, straight], (disturbed, straight, logs[1])
