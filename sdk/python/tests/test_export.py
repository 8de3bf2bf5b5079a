"""Checkpoints as files of stock PyTorch and safetensors, and back: bit for bit, by the command line."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import PACKAGE
from storaged.torch import Checkpointer

STATE = {"model": {"w": torch.randn(40, 7), "h": torch.arange(5.0).to(torch.bfloat16)}, "list": [torch.ones(2), torch.zeros(1)]}


def run(daemon, namespace, *arguments):
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "STORAGED_TOKEN": "a-secret-of-tests"}
    command = [sys.executable, "-m", "storaged", *map(str, arguments), "--socket", str(daemon.socket), "--namespace", namespace]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def save(session, step, state):
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(step, state)
        assert checkpointer.wait()


def test_stock_pytorch_reads_what_was_exported_and_it_is_imported_again(shared_daemon, session, tmp_path):
    save(session, 5, STATE | {"step": 5})
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "dcp")
    assert code == 0 and "step 5" in text, text
    into = {"model": {"w": torch.zeros(40, 7), "h": torch.zeros(5, dtype=torch.bfloat16)}, "list": [torch.zeros(2), torch.ones(1)], "step": 0}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert into["step"] == 5 and torch.equal(into["model"]["w"], STATE["model"]["w"])
    assert torch.equal(into["model"]["h"], STATE["model"]["h"]) and torch.equal(into["list"][1], torch.zeros(1))
    # Nothing is overwritten.
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "dcp")
    assert code == 1 and "which holds files" in text, text

    other = "imported"
    code, text = run(shared_daemon, other, "import", "--from", tmp_path / "dcp", "--step", 9)
    assert code == 0, text
    whole = Checkpointer(session=shared_daemon.session(other)).load_all()
    assert whole["step"] == 5 and torch.equal(whole["model"]["w"], STATE["model"]["w"])


def test_torch_and_safetensors_read_it_too(shared_daemon, session, tmp_path):
    save(session, 1, STATE)
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "pt", "--format", "torch", "--step", 1)
    assert code == 0, text
    loaded = torch.load(tmp_path / "pt" / "checkpoint.pt", weights_only=True)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"]) and torch.equal(loaded["list"][0], torch.ones(2))
    if importlib.util.find_spec("safetensors") is None:
        pytest.skip("safetensors is not installed: make frameworks installs it with transformers")
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "st", "--format", "safetensors")
    assert code == 0, text
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "st" / "model.safetensors")
    assert torch.equal(tensors["model.h"], STATE["model"]["h"]) and torch.equal(tensors["list.1"], torch.zeros(1))
