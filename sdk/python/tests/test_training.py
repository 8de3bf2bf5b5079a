"""The demo's training job on several ranks: interrupted and resumed, its losses are the uninterrupted run's, bit for bit."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import PACKAGE, ROOT, free_port
from storaged.torch import StoragedReader

TRAIN = ROOT / "tests" / "demo" / "train.py"
DURABLE = '[durable]\nkind = "directory"\npath = "TIER"\n\n[trickle]\nevery = 8\n'


#: Before 2.7 FSDP2, which the job uses, needs a GPU.
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def run(daemon, ranks, *arguments):
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(PACKAGE), "STORAGED_SOCKET": str(daemon.socket), "STORAGED_NAMESPACE": "job", "STORAGED_TOKEN": "a-secret-of-tests",
    }
    command = [sys.executable, str(TRAIN), *map(str, arguments)]
    workers = [
        subprocess.Popen(command, env=common | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
    return outputs[0]


@pytest.mark.skipif(VERSION < (2, 7), reason="FSDP2 without a GPU needs torch 2.7")
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(daemons, tmp_path):
    daemon = daemons(DURABLE)
    straight, resumed = tmp_path / "straight.txt", tmp_path / "resumed.txt"
    run(daemon, 2, "--steps", 8, "--no-save", "--losses", straight)
    output = run(daemon, 2, "--steps", 5, "--save-every", 2, "--losses", resumed, "--resume")
    assert "nothing saved yet" in output
    kept = resumed.read_text().splitlines()[:4]
    output = run(daemon, 2, "--steps", 8, "--save-every", 2, "--losses", resumed, "--resume")
    assert "restored step 4" in output
    assert kept + resumed.read_text().splitlines()[5:] == straight.read_text().splitlines()
    reads_whole_on_one_rank(daemon)


def reads_whole_on_one_rank(daemon):
    """Another world size: unsharded, through our reader and the stock one, the same."""
    session = daemon.session()
    metadata = StoragedReader(session=session).read_metadata()
    entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}

    def blank():
        return {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}

    ours, stock = blank(), blank()
    reader = StoragedReader(session=session)
    run_of_8 = reader.resolve()["run"]
    session.connect().wait(run_of_8, 8, "durable", 30_000)
    dcp.load(ours, storage_reader=reader)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(daemon.step_folder(session, 8)))
    assert entries and any(value.any() for value in ours.values())
    assert all(torch.equal(ours[name], stock[name]) for name in entries)
