"""The demo's training job on several ranks: interrupted and resumed, its losses are the uninterrupted run's, bit for bit."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from fake import FakeSession
from storaged.torch import StoragedReader

HERE = Path(__file__).parent
TRAIN = HERE.parents[2] / "tests" / "demo" / "train.py"


def run(folder, ranks, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(HERE), *filter(None, sys.path)]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", "STORAGED_RUN": "1-00f3a9c1d2e4b5a6"}
    command = [sys.executable, str(HERE / "with_fake.py"), str(folder), str(TRAIN), *map(str, arguments)]
    workers = [
        subprocess.Popen(command, env=common | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
    return outputs[0]


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path):
    straight, resumed = tmp_path / "straight.txt", tmp_path / "resumed.txt"
    run(tmp_path, 2, "--steps", 8, "--no-save", "--losses", straight)
    run(tmp_path, 2, "--steps", 6, "--save-every", 2, "--losses", resumed)
    for late in (tmp_path / "step-6").iterdir():
        late.unlink()
    kept = resumed.read_text().splitlines()[:4]
    output = run(tmp_path, 2, "--steps", 8, "--save-every", 2, "--losses", resumed, "--resume")
    assert "restored step 4" in output
    assert kept + resumed.read_text().splitlines()[6:] == straight.read_text().splitlines()
    reads_whole_on_one_rank(tmp_path)


def reads_whole_on_one_rank(folder):
    """Another world size: unsharded, through our reader and the stock one, the same."""
    metadata = StoragedReader(session=FakeSession(folder)).read_metadata()
    names = [name for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")]
    blank = lambda: {
        name: torch.zeros(metadata.state_dict_metadata[name].size, dtype=metadata.state_dict_metadata[name].properties.dtype)
        for name in names
    }
    ours, stock = blank(), blank()
    dcp.load(ours, storage_reader=StoragedReader(session=FakeSession(folder)), no_dist=True)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(folder / "step-8"), no_dist=True)
    assert names and any(value.any() for value in ours.values())
    assert all(torch.equal(ours[name], stock[name]) for name in names)
