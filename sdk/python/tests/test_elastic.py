"""Saved with W ranks, loaded with another number, another mesh and another dimension: what DCP's own files give, bit for bit."""

import pytest
from daemon import run_ranks

COMMON = """
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from dtensor import DTensor, Replicate, Shard, distribute_tensor

FOLDER = "@FOLDER@"

def whole(name, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(name) + sum(shape)))

def placed(fill, grid=False):
    mesh = init_device_mesh("cpu", (2, world // 2)) if grid else init_device_mesh("cpu", (world,))
    rest = [Replicate()] * (mesh.ndim - 1)
    make = lambda name, *shape: whole(name, *shape) if fill else torch.zeros(*shape)
    return {
        # 13 rows and 5 columns: no world size divides them, and with 6 or 8 ranks some have nothing.
        "rows": distribute_tensor(make("rows", 13, 6), mesh, [*rest, Shard(0 if fill else 1)]),
        "columns": distribute_tensor(make("columns", 6, 5).to(torch.bfloat16), mesh, [*rest, Shard(1 if fill else 0)]),
        "same": make("same", 7),
        "model": {"deep": distribute_tensor(make("deep", 64, 33), mesh, [*rest, Shard(0)])},
    }
"""
SAVE = (
    COMMON
    + """
checkpointer = Checkpointer(timeout=120)
for step in (1, 2):
    attempt(checkpointer.save, step, placed(True))
    said.append(["saved", checkpointer.wait()])
attempt(dcp.save, placed(True), storage_writer=dcp.FileSystemWriter(FOLDER))
checkpointer.close()
"""
)
LOAD = (
    COMMON
    + """
checkpointer = Checkpointer(timeout=120)
for grid in (False, True):
    ours, stock = placed(False, grid), placed(False, grid)
    attempt(checkpointer.load, ours)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(FOLDER))
    local = lambda value: value.to_local() if isinstance(value, DTensor) else value
    leaves = lambda state: [local(value) for value in (state["rows"], state["columns"], state["same"], state["model"]["deep"])]
    said.append(["equal", all(map(torch.equal, leaves(ours), leaves(stock))), sum(bool(one.any()) for one in leaves(ours))])
    said.append(["right", torch.equal(ours["model"]["deep"].full_tensor(), whole("deep", 64, 33))])
everything = checkpointer.load_all() if world < 6 else None
said.append(["whole", everything is None or torch.equal(everything["rows"], whole("rows", 13, 6))])
"""
)


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 6), (2, 8)])
def test_another_number_of_ranks_gets_the_same_bits(daemons, tmp_path, before, after):
    daemon = daemons()
    save, load = (text.replace("@FOLDER@", str(tmp_path / "stock")) for text in (SAVE, LOAD))
    said, errors = run_ranks(tmp_path, [daemon.socket] * before, save, limit=500)
    assert all(said), errors
    assert all(one == ["saved", True] for lines in said for one in lines if one[0] == "saved"), said
    said, errors = run_ranks(tmp_path, [daemon.socket] * after, load, limit=500)
    assert all(said), errors
    for lines in said:
        equal = [line for line in lines if line[0] == "equal"]
        assert len(equal) == 2 and all(line[1] for line in equal), lines
        assert [line[1] for line in lines if line[0] in ("right", "whole")] == [True, True, True], lines
    assert any(line[2] == 4 for lines in said for line in lines if line[0] == "equal"), said
