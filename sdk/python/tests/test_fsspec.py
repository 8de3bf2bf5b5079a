"""`storaged://` under stock `torch.distributed.checkpoint`: one checkpoint per step, whole or not there."""

import importlib.metadata
import inspect
import os
import subprocess
from types import SimpleNamespace

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import executable, run_ranks
from storaged import Session
from storaged.errors import InvalidArgument, NoCheckpointError, StepConflict, StoragedError
from storaged.fsspec import StoragedFileSystem, place_of
from storaged.torch import Checkpointer
from torch.distributed.checkpoint.api import CheckpointException

try:
    from torch.distributed.checkpoint import FsspecWriter
except ImportError:  # torch up to 2.6
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

STATE = """
def tensors(factor=1.0):
    mesh = init_device_mesh("cpu", (world,))
    local = torch.arange(24.0).view(4, 6) * factor + 100 * rank
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return {"model": {"sharded": sharded, "bf": (torch.arange(9) * factor).to(torch.bfloat16), "scalar": torch.tensor(factor)},
            f"only{rank}": torch.full((1000,), float(rank)), "step": int(factor), "text": "abc"}
"""
IMPORTS = """
import fsspec
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from dtensor import DTensor, Shard
"""
SAVED_BY_TWO = IMPORTS + STATE + """
dcp.save(tensors(1.0), checkpoint_id="storaged://job/step-1")
future = dcp.async_save(tensors(2.0), checkpoint_id="storaged://job/step-2", process_group=dist.new_group(backend="gloo"))
getattr(future, "upload_completion", future).result()
dcp.save(tensors(3.0), storage_writer=dcp.FileSystemWriter(os.environ["STOCK"]))
dcp.save(tensors(3.0), checkpoint_id="storaged://job/step-3")
into = {"model": {"sharded": tensors(0.0)["model"]["sharded"], "bf": torch.zeros(9, dtype=torch.bfloat16)}, "step": 0}
dcp.load(into, checkpoint_id="storaged://job/step-3")
said.append([torch.equal(into["model"]["sharded"].to_local(), tensors(3.0)["model"]["sharded"].to_local()), into["step"]])
"""


@pytest.fixture
def node(daemons, monkeypatch):
    """A daemon that the environment names."""
    daemon = daemons('[durable]\nkind = "directory"\npath = "TIER"\n')
    monkeypatch.setenv("STORAGED_SOCKET", str(daemon.socket))
    monkeypatch.setenv("STORAGED_TOKEN", "a-secret-of-tests")
    return daemon


def blank():
    """All of what the ranks saved, on one rank."""
    return {"model": {"sharded": torch.zeros(8, 6), "bf": torch.zeros(9, dtype=torch.bfloat16), "scalar": torch.tensor(0.0)},
            "only0": torch.zeros(1000), "only1": torch.ones(1000), "step": 0, "text": ""}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return one == other


def listed(daemon):
    out = subprocess.run([executable(), "ls", "--socket", str(daemon.socket)], capture_output=True, text=True, check=True).stdout
    return [line for line in out.splitlines() if line.startswith("job")]


def test_two_ranks_save_with_stock_dcp_and_one_loads(node, tmp_path, monkeypatch):
    monkeypatch.setenv("STOCK", str(tmp_path / "stock"))
    said, errors = run_ranks(tmp_path, [node.socket] * 2, SAVED_BY_TWO, limit=200)
    assert said == [[[True, 3]], [[True, 3]]], errors
    rows = listed(node)
    assert len(rows) == len({row.split()[2] for row in rows}) and any(row.split()[2] == "3" for row in rows), rows

    stock, ours, written = blank(), blank(), blank()
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "stock"))
    dcp.load(ours, checkpoint_id="storaged://job/step-3")
    assert same(stock, ours) and ours["step"] == 3 and float(ours["model"]["sharded"][4, 1]) == 103.0
    # Our own reader reads it too, into another layout, and without a template.
    checkpointer = Checkpointer("job")
    assert checkpointer.load(written)["step"] == 3 and same(written, stock)
    whole = checkpointer.load_all()
    assert same(whole["model"], stock["model"]) and whole["text"] == "abc"

    fs = fsspec.filesystem("storaged")
    assert fs.ls("storaged://job", detail=False)[-1] == "job/step-3" and fs.isdir("storaged://job/step-3")
    assert fs.isfile("storaged://job/step-3/.metadata") and not fs.exists("storaged://job/step-9/.metadata")
    names = fs.ls("storaged://job/step-3", detail=False)
    assert names == ["job/step-3/.metadata", "job/step-3/__0_0.distcp", "job/step-3/__1_0.distcp"]
    with fs.open("storaged://job/step-3/__1_0.distcp") as file:
        assert len(file.read()) == fs.info("storaged://job/step-3/__1_0.distcp")["size"] > 4000


def test_what_checkpointer_saved_stock_dcp_loads(node):
    with Checkpointer("job") as checkpointer:
        checkpointer.save(7, {"w": torch.arange(1e6), "n": 5})
        assert checkpointer.wait()
    into = {"w": torch.zeros(1_000_000), "n": 0}
    dcp.load(into, checkpoint_id="storaged://job/step-7")
    assert into["n"] == 5 and torch.equal(into["w"], torch.arange(1e6))


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_files_are_verified_as_asked(node, monkeypatch, verify):
    with Checkpointer("job") as checkpointer:
        checkpointer.save(7, {"w": torch.arange(1e6)})
        assert checkpointer.wait()
    asked, connect = [], Session.connect

    class Asked:
        """A connection that notes how shards are opened."""

        def __init__(self, client):
            self.client = client

        def open_shard(self, manifest, rank, spans, timeout_ms, without_own_ram, verify):
            asked.append(verify)
            return self.client.open_shard(manifest, rank, spans, timeout_ms, without_own_ram, verify)

        def __getattr__(self, name):
            return getattr(self.client, name)

    monkeypatch.setattr(Session, "connect", lambda *arguments: Asked(connect(*arguments)))
    fs = fsspec.filesystem("storaged", verify=verify)
    with fs.open("storaged://job/step-7/__0_0.distcp") as file:
        assert torch.arange(1e6).numpy().tobytes() in file.read()
    assert set(asked) == {verify}
    with pytest.raises(InvalidArgument, match="verify must be one of fast, full"):
        StoragedFileSystem(verify="none", skip_instance_cache=True)


@pytest.mark.skipif("kwargs" not in inspect.signature(FsspecWriter).parameters, reason="this FsspecWriter takes no settings")
def test_the_durable_copy_is_read_by_stock_dcp_and_a_restarted_node_has_it(node):
    writer = FsspecWriter("storaged://job/step-1", durable="required", until="durable")
    dcp.save({"w": torch.arange(50.0)}, storage_writer=writer)
    (folder,) = (node.tier / "job").glob("**/step-1")
    into = {"w": torch.zeros(50)}
    dcp.load(into, storage_reader=dcp.FileSystemReader(folder))
    assert torch.equal(into["w"], torch.arange(50.0))
    node.kill()
    node.start()
    assert fsspec.filesystem("storaged").ls("storaged://job", detail=False) == ["job/step-1"]
    into = {"w": torch.zeros(50)}
    dcp.load(into, checkpoint_id="storaged://job/step-1")
    assert torch.equal(into["w"], torch.arange(50.0))


KILLED = IMPORTS + """
state = {f"w{rank}": torch.full((1000,), 1.0)}
dcp.save(state, checkpoint_id="storaged://job/step-1")
said.append("saved")
if rank == int(os.environ["KILLED"]):
    from storaged.torch import _files
    seal = _files.ShardWriter._seal
    def die(*arguments):
        if os.environ["WHEN"] == "after": seal(*arguments)
        print("SAID " + json.dumps(said), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    _files.ShardWriter._seal = die
try:
    dcp.save(state, checkpoint_id="storaged://job/step-2")
    said.append("saved again")
except BaseException as error:
    said.append("failed")
"""


@pytest.mark.parametrize(("killed", "when"), [(1, "before"), (1, "after"), (0, "after")])
def test_a_rank_that_is_killed_in_the_middle_leaves_the_older_step(node, tmp_path, monkeypatch, killed, when):
    monkeypatch.setenv("KILLED", str(killed))
    monkeypatch.setenv("WHEN", when)
    said, errors = run_ranks(tmp_path, [node.socket] * 2, KILLED, whole=False, limit=200)
    assert said[killed] == ["saved"] and (said[1 - killed] or [])[1:] != ["saved again"], errors
    fs = fsspec.filesystem("storaged")
    assert fs.ls("storaged://job", detail=False) == ["job/step-1"] and not fs.exists("storaged://job/step-2/.metadata")
    with pytest.raises(FileNotFoundError):
        fs.open("storaged://job/step-2/__0_0.distcp")
    assert Checkpointer("job").latest_step() == 1
    into = {"w0": torch.zeros(1000), "w1": torch.zeros(1000)}
    dcp.load(into, checkpoint_id="storaged://job/step-1")
    assert into["w0"].sum() == into["w1"].sum() == 1000
    # The next start saves on.
    dcp.save({"w0": torch.ones(3)}, checkpoint_id="storaged://job/step-2")
    assert Checkpointer("job").latest_step() == 2


def test_a_save_that_fails_in_the_middle_is_given_up_and_can_be_done_again(node):
    fs = fsspec.filesystem("storaged")
    with pytest.raises(ZeroDivisionError), fs.open("storaged://job/step-1/__0_0.distcp", "wb") as file:
        file.write(b"abc")
        1 / 0
    with fs.open("storaged://job/step-1/.metadata.tmp", "wb") as file:
        file.write(b"described")
    with pytest.raises(InvalidArgument, match="no whole file"):
        fs.mv("storaged://job/step-1/.metadata.tmp", "storaged://job/step-1/.metadata")
    fs.rm("storaged://job/step-1", recursive=True)
    assert fs.ls("storaged://job") == []
    dcp.save({"w": torch.ones(3)}, checkpoint_id="storaged://job/step-1")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="storaged://job/step-1")
    assert StepConflict.__name__ in str(caught.value)
    dcp.save({"w": torch.ones(3)}, checkpoint_id="storaged://job/step-2")
    assert fs.ls("storaged://job", detail=False)[-1] == "job/step-2"


def test_within_transactions_as_torch_2_4_writes(node):
    fs = fsspec.filesystem("storaged")

    def write(name, data, failure=None):
        with fs.transaction, fsspec.open(f"storaged://job/step-1/{name}", "wb") as stream:
            stream.write(data)
            if failure is not None:
                raise failure

    write("__0_0.distcp", b"shard")
    with pytest.raises(ZeroDivisionError):
        write(".metadata.tmp", b"half", ZeroDivisionError())
    with pytest.raises(InvalidArgument, match="no description"):
        fs.rename("storaged://job/step-1/.metadata.tmp", "storaged://job/step-1/.metadata")
    write(".metadata.tmp", b"described")
    fs.rename("storaged://job/step-1/.metadata.tmp", "storaged://job/step-1/.metadata")
    assert fs.cat("storaged://job/step-1/.metadata") == b"described" and fs.cat("storaged://job/step-1/__0_0.distcp") == b"shard"
    assert fs.cat_file("storaged://job/step-1/__0_0.distcp", start=1, end=3) == b"ha"


def test_a_file_that_outgrows_its_slot(node, monkeypatch):
    monkeypatch.setattr("storaged.torch._files.FIRST_BYTES", 1 << 20)
    state = {"a": torch.arange(1_000_000.0), "b": torch.arange(700_000)}
    for step in (1, 2):
        dcp.save(state, checkpoint_id=f"storaged://job/step-{step}")
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(into, checkpoint_id=f"storaged://job/step-{step}")
        assert same(state, into)


def test_files_that_nobody_closes_give_their_slots_back(node):
    fs = fsspec.filesystem("storaged", timeout=3.0)
    state = {"a": torch.arange(1000.0)}
    dcp.save(state, checkpoint_id="storaged://job/step-1")
    for step in range(2, 7):
        fs.open(f"storaged://job/step-{step}/__0_0.distcp", "wb").write(b"half")
    dcp.save(state, checkpoint_id="storaged://job/step-7")
    assert fs.ls("storaged://job", detail=False)[-1] == "job/step-7"


def test_a_step_that_is_retired_while_it_is_looked_at_is_a_file_that_is_not_there(node, monkeypatch):
    state = {"a": torch.arange(1000.0)}
    dcp.save(state, checkpoint_id="storaged://job/step-1")

    def gone(*_):
        raise NoCheckpointError("no checkpoint with that manifest is known here")

    client = SimpleNamespace(plan=lambda *_: {"manifest": "00"}, manifest=gone)
    monkeypatch.setattr(Session, "connect", lambda *_: client)
    assert not fsspec.filesystem("storaged").exists("storaged://job/step-1/.metadata")


def test_no_place_before_a_file_begins(node):
    dcp.save({"a": torch.arange(1000.0)}, checkpoint_id="storaged://job/step-1")
    with fsspec.filesystem("storaged").open("storaged://job/step-1/__0_0.distcp", "rb") as file:
        with pytest.raises(OSError, match="begins at 0"):
            file.seek(-5)
        assert file.seek(-2, os.SEEK_END) > 0 and len(file.read()) == 2


def test_what_has_no_place_in_a_step_is_refused(node):
    fs = fsspec.filesystem("storaged")
    refused = [
        lambda: fs.mkdir("storaged://job/../other/step-1"),
        lambda: fs.exists(f"storaged://job/step-{'9' * 5000}"),
        lambda: fs.open("storaged://job/step-1/__0_1.distcp", "wb"),
        lambda: fs.open("storaged://job/step-1/__1_0.distcp", "wb"),
        lambda: fs.open("storaged://job/step-1/notes.txt", "wb"),
        lambda: fs.open("storaged://job/step-1/__0_0.distcp", "ab"),
        lambda: fs.mv("storaged://job/step-1/.metadata.tmp", "storaged://job/step-2/.metadata"),
        lambda: fs.mkdir(f"storaged://job/step-{2**64}"),
        lambda: fs.exists("storaged:///step-1"),
        lambda: fs.exists("storaged://job/step-1/a/b"),
        lambda: StoragedFileSystem(until="now"),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(InvalidArgument, match="expected|must be"):
            print(number, call())


def test_folders_between_are_part_of_the_name():
    place = place_of("storaged://job/outputs/checkpoint/step-100/.metadata")
    assert (place.namespace, place.step, place.file) == ("job.outputs.checkpoint", 100, ".metadata")
    assert place_of("job/step_7") == place_of("storaged://job/step-7/")


def test_a_daemon_that_is_away_is_not_nothing_saved(node):
    node.kill()
    fs = fsspec.filesystem("storaged")
    for call in (lambda: fs.exists("storaged://job/step-1"), lambda: fs.ls("storaged://job"), lambda: fs.isdir("storaged://job/step-1")):
        with pytest.raises(StoragedError):
            call()


def test_the_protocol_is_an_entry_point():
    if "storaged" not in {found.name for found in importlib.metadata.distributions()}:
        pytest.skip("the package is on the path and not installed")
    (found,) = importlib.metadata.entry_points(group="fsspec.specs", name="storaged")
    assert found.load() is StoragedFileSystem
    assert os.fspath("storaged://x") and fsspec.get_filesystem_class("storaged") is StoragedFileSystem
