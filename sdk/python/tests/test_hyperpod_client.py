"""The client of HyperPod's managed tiered checkpointing as it is on PyPI, against real daemons: nothing of it is changed.
It asks for a host of its own; the environment sends what it asks there to the node's daemon, and gives it the token."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import hyper
import pytest
from daemon import Daemon, cluster, free_port
from hyper import Http
from s3 import s3_server

NEEDED = ("amzn_sagemaker_checkpointing", "boto3", "s3torchconnector", "tenacity", "xxhash")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: make frameworks installs it")

HOST = "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local"
SCRIPT = """
import logging, os, signal, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader, SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
# It logs to a file below /var/log unless its logger does already.
quiet = logging.FileHandler("/var/log/sagemaker_checkpointing/Job_1_checkpointing.log", delay=True)
quiet.setLevel(logging.CRITICAL + 1)
logger = logging.getLogger("client")
logger.addHandler(quiet)
config = SageMakerCheckpointConfig(
    namespace="Job_1", world_size=world, logger=logger, s3_tier_base_path=os.environ.get("BASE_IN_S3", ""),
)

def state(step):
    made = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.Generator().manual_seed(step)
    return {
        f"w{rank}": torch.randn(700, 1000, generator=made),
        f"half{rank}": torch.randn(33, generator=made).to(torch.bfloat16),
        "common": torch.randn(100, generator=common),
        "step": step,
    }

class DiesInTheMiddle(DefaultSavePlanner):
    def resolve_data(self, item):
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)

def save(step, planner=None, s3=False):
    config.save_to_s3 = s3
    writer = SageMakerTieredStorageWriter(checkpoint_config=config, step=step)
    dcp.async_save(state(step), storage_writer=writer, planner=planner).result()

def same(one, other):
    return all(torch.equal(one[key], other[key]) if torch.is_tensor(one[key]) else one[key] == other[key] for key in other)

def load(step=None):
    got = {key: torch.zeros_like(value) if torch.is_tensor(value) else -1 for key, value in state(0).items()}
    reader = SageMakerTieredStorageReader(checkpoint_config=config, step=step)
    dcp.load(got, storage_reader=reader)
    assert same(got, state(got["step"])), f"rank {rank} got other bits"
    return got["step"]
"""
CLOSING = "\ndist.barrier()\nos._exit(0)\n"


class Ranks:
    """One process per port, each through the daemon that listens there."""

    def __init__(self, folder, ports, body, way="http_proxy", **variables):
        (folder / "ranks.py").write_text(SCRIPT + body + CLOSING)
        netrc = folder / "netrc"
        netrc.write_text(f"machine {HOST} login anybody password {hyper.TOKEN}\n")
        netrc.chmod(0o600)
        common = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()} | {
            "WORLD_SIZE": str(len(ports)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NETRC": str(netrc), "CUDA_VISIBLE_DEVICES": "",
        } | variables
        self.workers = [
            subprocess.Popen(
                [sys.executable, str(folder / "ranks.py")], env=common | {"RANK": str(rank), way: f"http://127.0.0.1:{port}"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, port in enumerate(ports)
        ]

    def end(self, limit=120):
        """How they ended, and what they wrote."""
        codes, texts = [], []
        for worker in self.workers:
            try:
                texts.append(worker.communicate(timeout=limit)[0])
            except subprocess.TimeoutExpired:
                worker.kill()
                texts.append(worker.communicate()[0])
            codes.append(worker.returncode)
        return codes, "\n".join(texts)


def run(folder, ports, body, **variables):
    codes, text = Ranks(folder, ports, body, **variables).end()
    assert codes == [0] * len(ports), text


@pytest.fixture
def node(tmp_path):
    port = free_port()
    daemon = Daemon(tmp_path / "node", hyper.section(tmp_path, port))
    daemon.http = Http(port)
    yield daemon
    daemon.kill()


def test_every_call_of_its_http_client(node, tmp_path):
    """Also without a metadata rank, from a file, and with the token in the address."""
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions import InMemoryClientError
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient

    config = InMemoryClientConfig(base_url=f"http://anybody:{hyper.TOKEN}@127.0.0.1:{node.http.port}", request_retries=2)
    client = InMemoryCheckpointClient("Job-2", rank="0", world_size="1", config=config, metadata_file_count=0)
    assert client.get_namespace_config() == {} and client.get_latest_checkpoints() == []
    assert client.get_or_create_namespace() == {"num_ranks": 1, "steps_to_retain_per_rank": 3}
    assert client.get_checkpoint(1) is None
    file = tmp_path / "shard"
    file.write_bytes(os.urandom(3_000_000))
    client.put_checkpoint(1, b"bytes")
    client.put_checkpoint("2", str(file))
    with file.open("rb") as stream:
        client.put_checkpoint(3, stream)
    assert client.get_latest_checkpoints()[0] == 3
    assert client.get_checkpoint(2) == client.get_checkpoint(3) == file.read_bytes()
    with pytest.raises(InMemoryClientError, match="rank_outside"):
        client.put_checkpoint(4, b"x", rank=1)
    client.delete_checkpoint(3)
    assert client.get_checkpoint(3) is None and 3 not in client.get_latest_checkpoints()
    client.delete_namespace()
    assert client.get_namespace_config() == {}
    client.get_or_create_namespace()
    client.reset_cluster()
    assert client.get_namespace_config() == {}
    client.close()


def test_save_find_latest_and_load_bit_for_bit(node, tmp_path):
    ports = [node.http.port] * 2
    run(tmp_path, ports, "save(10)\nsave(20)\nassert load() == 20\n")
    assert node.http.latest("Job_1").json == [20]
    # Another incarnation finds it, goes on, and goes back.
    run(tmp_path, ports, "assert load() == 20\nsave(30)\nassert load(30) == 30\nsave(25)\nassert load() == 25\n")
    assert node.http.latest("Job_1").json == [25]


def test_a_rank_that_is_killed_in_the_middle_of_a_save(node, tmp_path):
    """Its step is not offered, the one before is; and what the others had saved of it is never part of the next try."""
    ports = [node.http.port] * 2
    run(tmp_path, ports, "save(10)\n")
    ranks = Ranks(tmp_path, ports, "assert load() == 10\nsave(20, DiesInTheMiddle())\n")
    assert ranks.workers[1].wait(60) == -signal.SIGKILL
    # Rank 0 has saved its shard; the launcher ends it, as torchrun does.
    received = "storaged_hyperpod_received_bytes_total"
    hyper.until(lambda: node.metrics()[received] > 8_000_000)
    time.sleep(0.5)
    ranks.workers[0].kill()
    ranks.end()
    assert node.http.latest("Job_1").json == [10]
    run(tmp_path, ports, "assert load() == 10\nsave(20)\nassert load() == 20\n")


def test_a_node_is_lost(tmp_path):
    """Its rank goes on at another node; its shard is decoded: there is no durable tier that it could come from."""
    ports = [free_port() for _ in range(3)]
    nodes = cluster(tmp_path, nodes=3, k=2, m=1, extra=hyper.section(tmp_path, "PORT"), ports=ports)
    try:
        run(tmp_path, ports[:2], "save(10)\nsave(20)\nassert load() == 20\n")
        nodes[1].kill()
        left = [ports[0], ports[2]]
        run(tmp_path, left, "assert load() == 20\nsave(30)\nassert load() == 30\n")
        assert Http(ports[2]).latest("Job_1").json == [30]
    finally:
        for node in nodes:
            node.kill()


def test_its_tier_in_s3_has_what_the_memory_lost(node, tmp_path):
    """What the daemon has is read there, what it lost from S3; and the next save goes to both again."""
    ports = [node.http.port] * 2
    with s3_server() as variables:
        # Its S3 client would send plain HTTP to what http_proxy names, without regard to no_proxy; it knows no all_proxy.
        variables |= {"way": "all_proxy", "NO_PROXY": "127.0.0.1", "BASE_IN_S3": "s3://bucket/of/jobs"}
        run(tmp_path, ports, "save(10, s3=True)\nsave(20)\nassert load() == 20\n", **variables)
        assert node.http.latest("Job_1").json == [20]
        node.kill()
        node.start()
        assert node.http.latest("Job_1").status == 404
        run(tmp_path, ports, "assert load() == 10\nsave(30, s3=True)\nassert load() == 30\n", **variables)
        assert node.http.latest("Job_1").json == [30]
