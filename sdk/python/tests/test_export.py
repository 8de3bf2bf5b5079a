"""Checkpoints as files of stock PyTorch and safetensors, and back: bit for bit, by the command line, to folders and object stores."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import PACKAGE, executable, run_ranks
from fsspec.implementations.memory import MemoryFileSystem
from s3 import s3_server
from storaged.errors import CheckpointLoadError, ExportError, UnsavableState
from storaged.torch import Checkpointer, _export
from storaged.torch._export import export, import_dcp

fsspec_files = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")

STATE = {"model": {"w": torch.randn(40, 7), "h": torch.arange(5.0).to(torch.bfloat16)}, "list": [torch.ones(2), torch.zeros(1)]}
BLANK = {"model": {"w": torch.zeros(40, 7), "h": torch.zeros(5, dtype=torch.bfloat16)}, "list": [torch.zeros(2), torch.ones(1)]}


def run(daemon, namespace, *arguments, command=(sys.executable, "-m", "storaged"), **variables):
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "STORAGED_TOKEN": "a-secret-of-tests"} | variables
    words = [*map(str, command), *map(str, arguments), "--socket", str(daemon.socket), "--namespace", namespace]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def save(session, step, state):
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(step, state)
        assert checkpointer.wait()


def blank(state):
    return {key: blank(value) if isinstance(value, dict) else torch.zeros_like(value) for key, value in state.items()}


def same(loaded, state):
    pairs = ((loaded["model"][name], tensor) for name, tensor in state["model"].items())
    return all(torch.equal(got, tensor) for got, tensor in pairs)


def test_stock_pytorch_reads_what_was_exported_and_it_is_imported_again(shared_daemon, session, tmp_path):
    save(session, 5, STATE | {"step": 5, "pair": (1, "two")})
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "dcp")
    assert code == 0 and "step 5" in text, text
    into = BLANK | {"step": 0, "pair": (0, "")}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert into["step"] == 5 and same(into, STATE) and torch.equal(into["list"][1], torch.zeros(1))
    # Nothing is overwritten.
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "dcp")
    assert code == 1 and "which holds files" in text, text

    other = "imported"
    code, text = run(shared_daemon, other, "import", "--from", tmp_path / "dcp", "--step", 9)
    assert code == 0, text
    whole = Checkpointer(session=shared_daemon.session(other)).load_all()
    assert whole["step"] == 5 and torch.equal(whole["model"]["w"], STATE["model"]["w"]) and whole["pair"] == (1, "two")
    # It would end a job that saves there, and hide what it has saved.
    again = ("--from", tmp_path / "dcp", "--step", 3)
    code, text = run(shared_daemon, other, "import", *again)
    assert code == 1 and "has step 9" in text and "--force" in text, text
    code, text = run(shared_daemon, other, "import", *again, "--force")
    assert code == 0, text
    assert Checkpointer(session=shared_daemon.session(other)).latest_step() == 3


def test_torch_reads_it_too(shared_daemon, session, tmp_path):
    save(session, 1, STATE)
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "pt", "--format", "torch", "--step", 1)
    assert code == 0, text
    loaded = torch.load(tmp_path / "pt" / "checkpoint.pt", weights_only=True)
    assert same(loaded, STATE) and torch.equal(loaded["list"][0], torch.ones(2))


KINDS = {
    f"{name}-{dims}": torch.arange(-8, 16).abs().reshape(shape).to(getattr(torch, name))
    for name in _export.SAFETENSORS if hasattr(torch, name) for dims, shape in enumerate([(24,), (2, 12), (4, 3, 2)])
} | {"nothing": torch.empty(0, 3), "one": torch.tensor(7.5), "true": torch.tensor(True)}


def test_safetensors_reads_every_type(session, tmp_path, monkeypatch):
    files = pytest.importorskip("safetensors.torch", reason="make frameworks installs safetensors")
    # Small enough that several batches and one tensor larger than a batch occur.
    monkeypatch.setattr(_export, "PIECE_BYTES", 100)
    save(session, 1, KINDS)
    with Checkpointer(session=session, alone=True) as checkpointer:
        export(checkpointer, tmp_path / "st", form="safetensors")
    loaded = files.load_file(tmp_path / "st" / "model.safetensors")
    assert sorted(loaded) == sorted(KINDS)
    for name, tensor in KINDS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape, name
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("value", [3, torch.ones(2, dtype=torch.complex128)], ids=["no tensor", "complex128"])
def test_what_safetensors_cannot_hold_is_refused_by_name(session, tmp_path, value):
    save(session, 1, {"model": {"odd": value, "w": torch.ones(1)}})
    with Checkpointer(session=session, alone=True) as checkpointer, pytest.raises(UnsavableState, match=r"'model\.odd'"):
        export(checkpointer, tmp_path / "st", form="safetensors")
    assert not (tmp_path / "st").exists()


@pytest.mark.parametrize("form", _export.FORMATS)
def test_a_url_of_fsspec_is_a_target(session, form, monkeypatch):
    monkeypatch.setattr(_export, "PIECE_BYTES", 1000)
    save(session, 3, STATE)
    url = f"memory://{session.namespace}/out"
    with Checkpointer(session=session, alone=True) as checkpointer:
        assert export(checkpointer, url, form=form) == 3
    name = {"dcp": ".metadata", "torch": "checkpoint.pt", "safetensors": "model.safetensors"}[form]
    with MemoryFileSystem().open(f"{url}/{name}") as stream:
        data = stream.read()
    if form == "dcp":
        into = blank({"model": STATE["model"]})
        dcp.load(into, storage_reader=fsspec_files.FsspecReader(url))
        assert same(into, STATE)
        with Checkpointer(session=session, alone=True) as checkpointer:
            import_dcp(checkpointer, url, 4)
            assert same(checkpointer.load_all(4), STATE)
    elif form == "safetensors":
        files = pytest.importorskip("safetensors.torch", reason="make frameworks installs safetensors")
        assert torch.equal(files.load(data)["model.w"], STATE["model"]["w"])


SHARDED = """
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from dtensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (world,))
whole = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
state = {"model": {
    "rows": distribute_tensor(whole(50, 30), mesh, [Shard(0)]), "columns": distribute_tensor(whole(21, 50), mesh, [Shard(1)]),
    "same": whole(100, 1000), "scalar": whole(1)[0],
}, "step": 8}
checkpointer = Checkpointer(timeout=120)
attempt(checkpointer.save, 8, state)
said.append(["saved", checkpointer.wait()])
checkpointer.close()
"""


def test_what_several_ranks_have_is_whole_and_what_all_of_them_have_is_there_once(daemons, tmp_path):
    files = pytest.importorskip("safetensors.torch", reason="make frameworks installs safetensors")
    daemon = daemons()
    said, errors = run_ranks(tmp_path, [daemon.socket] * 3, SHARDED, limit=200)
    assert all(said) and all(lines[-1] == ["saved", True] for lines in said), errors
    shapes = {"rows": (50, 30), "columns": (21, 50), "same": (100, 1000)}
    whole = {name: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) for name, shape in shapes.items()}
    with Checkpointer(session=daemon.session(), alone=True) as checkpointer:
        export(checkpointer, tmp_path / "dcp")
        into = {"model": blank(whole), "step": 0}
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
        assert same(into, {"model": whole}) and into["step"] == 8
        written = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
        assert written < 1.5 * 4 * sum(tensor.numel() for tensor in whole.values()), written
        with pytest.raises(UnsavableState, match="'step'"):
            export(checkpointer, tmp_path / "st", form="safetensors")
        checkpointer.save(9, {"model": whole})
        assert checkpointer.wait()
        export(checkpointer, tmp_path / "st", form="safetensors")
    loaded = files.load_file(tmp_path / "st" / "model.safetensors")
    assert all(torch.equal(loaded[f"model.{name}"], tensor) for name, tensor in whole.items())


def test_increments_are_whole_once_exported_when_no_ram_is_left(daemons, tmp_path):
    daemon = daemons('slots_per_rank = 4\n[durable]\nkind = "directory"\npath = "TIER"\n[trickle]\nincrements = 3\nrate = "8MiB"\n')
    session, weights = daemon.session(), torch.randn(1 << 20)
    states = {}
    for step in (1, 2, 3):
        weights[step * 1000 : step * 1000 + 500] += 1
        states[step] = {"model": {"w": weights.clone(), "b": torch.full((3,), float(step))}}
        with Checkpointer(session=session, alone=True, durable="required", until="durable") as checkpointer:
            checkpointer.save(step, states[step])
            assert checkpointer.wait("durable")
    assert [(daemon.step_folder(session, step) / "storaged.increment.0").exists() for step in states] == [False, True, True]
    daemon.kill()
    daemon.start()
    for step, state in states.items():
        with Checkpointer(session=daemon.session(), alone=True) as checkpointer:
            assert export(checkpointer, tmp_path / f"{step}", step) == step
        into = blank(state)
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / f"{step}"))
        assert same(into, state), step


WATCHED = """
import re, sys, threading, time
from pathlib import Path
import storaged.__main__, storaged.torch, storaged.torch._export as files

files.PIECE_BYTES = 8 << 20
own = lambda: int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
before, seen = own(), [0]

def watch():
    while True:
        seen[0] = max(seen[0], own())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
code = storaged.__main__.main(sys.argv[1:])
print("GREW", seen[0] - before)
sys.exit(code)
"""


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_an_export_holds_a_piece_of_the_step_in_memory_and_not_the_step(shared_daemon, session, tmp_path, form):
    state = {"model": {f"w{number}": torch.randn(1 << 20) for number in range(48)}}
    save(session, 1, state)
    code, text = run(
        shared_daemon, session.namespace, "export", "--to", tmp_path / form, "--format", form, command=(sys.executable, "-c", WATCHED)
    )
    assert code == 0, text
    grew = int(re.search(r"GREW (\d+)", text)[1])
    # 192 MiB in all; a piece, and what a reader and torch take beside it.
    assert grew < 64 << 20, f"{grew >> 20} MiB"


class Full(MemoryFileSystem):
    """An object store that has no room for a second megabyte."""

    protocol = "full"
    store, pseudo_dirs = {}, [""]

    def _open(self, path, mode="rb", **settings):
        stream = super()._open(path, mode, **settings)
        if "w" in mode:
            write, room = stream.write, [1 << 20]

            def bounded(data):
                room[0] -= len(data)
                if room[0] < 0:
                    raise OSError(28, "No space left")
                return write(data)

            stream.write = bounded
        return stream


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_an_export_that_failed_leaves_nothing_that_reads_as_one(session, form, monkeypatch):
    import fsspec

    fsspec.register_implementation("full", Full, clobber=True)
    monkeypatch.setattr(_export, "PIECE_BYTES", 256 << 10)
    save(session, 1, {"w": torch.randn(1 << 20)})
    with Checkpointer(session=session, alone=True) as checkpointer, pytest.raises(ExportError, match="No space left"):
        export(checkpointer, f"full://{form}", form=form)
    assert not [path for path in Full.store if f"/{form}/" in path], Full.store


def test_targets_and_sources_that_cannot_be_are_refused(session, tmp_path):
    save(session, 1, STATE)
    with Checkpointer(session=session, alone=True) as checkpointer:
        with pytest.raises(ExportError, match="nowhere"):
            export(checkpointer, "nowhere://bucket/folder")
        (tmp_path / "file").write_text("a file")
        with pytest.raises(ValueError, match="which holds files"):
            export(checkpointer, tmp_path / "file")
        for source in (tmp_path / "none", tmp_path, tmp_path / "file", "memory://none/there"):
            with pytest.raises(CheckpointLoadError, match="found no .metadata"):
                import_dcp(checkpointer, source, 5)


def test_s3_is_a_target_and_a_source(shared_daemon, session, tmp_path, monkeypatch):
    pytest.importorskip("s3fs", reason="s3fs not installed: make frameworks installs it")
    # Larger than a part of an upload in parts.
    state = {"model": {"w": torch.randn(15 << 20), "b": torch.randn(7)}}
    save(session, 6, state)
    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        url = "s3://bucket/of/job"
        code, text = run(shared_daemon, session.namespace, "export", "--to", url)
        assert code == 0, text
        into = blank(state)
        dcp.load(into, storage_reader=fsspec_files.FsspecReader(url))
        assert same(into, state)
        code, text = run(shared_daemon, session.namespace, "export", "--to", url)
        assert code == 1 and "which holds files" in text, text
        code, text = run(shared_daemon, session.namespace, "export", "--to", "s3://no-such-bucket/job")
        assert code == 1 and "ExportError" in text, text
        code, text = run(shared_daemon, "from-s3", "import", "--from", url, "--step", 7)
        assert code == 0, text
    assert same(Checkpointer(session=shared_daemon.session("from-s3")).load_all(7), state)


def test_the_storaged_command_does_both(shared_daemon, session, tmp_path):
    save(session, 5, STATE)
    storaged, python = (executable(),), {"STORAGED_PYTHON": sys.executable}
    code, text = run(shared_daemon, session.namespace, "export", "--step", 5, "--to", tmp_path / "out", command=storaged, **python)
    assert code == 0 and "step 5" in text, text
    into = blank({"model": STATE["model"]})
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert same(into, STATE)
    code, text = run(shared_daemon, "by-command", "import", "--from", tmp_path / "out", "--step", 6, command=storaged, **python)
    assert code == 0 and "step 6" in text, text
    # What Python says and its exit code are passed on.
    code, text = run(shared_daemon, session.namespace, "export", "--to", tmp_path / "out", command=storaged, **python)
    assert code == 1 and "which holds files" in text, text


def test_the_storaged_command_says_what_is_missing(shared_daemon, tmp_path):
    bare = {"STORAGED_PYTHON": "/nowhere/python3"}
    code, text = run(shared_daemon, "job", "export", "--to", tmp_path / "out", command=(executable(),), **bare)
    assert code == 1 and "/nowhere/python3, which says: there is no such interpreter" in text, text
    # An interpreter without the package; a folder of that name where one stands is none, for a Python that can be told so.
    if sys.version_info >= (3, 11):
        (tmp_path / "storaged").mkdir()
        (tmp_path / "storaged" / "__init__.py").write_text("print('not this one')")
    isolated = tmp_path / "python3"
    isolated.write_text(f'#!/bin/sh\ncd {tmp_path} && unset PYTHONPATH && exec {sys.executable} -S "$@"\n')
    isolated.chmod(0o755)
    code, text = run(shared_daemon, "job", "import", "--from", "x", "--step", 1, command=(executable(),), STORAGED_PYTHON=str(isolated))
    assert code == 1 and "No module named 'storaged'" in text and "STORAGED_PYTHON" in text, text
