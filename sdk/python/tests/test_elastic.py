"""Saved with W ranks, loaded with another number, another mesh and another dimension: what DCP's own files give, bit for bit, also
without a node that had some of it; and hardly more is read than what is needed."""

import pytest
from daemon import cluster, run_ranks

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
        "large": distribute_tensor(make("large", 1021, 1024), mesh, [*rest, Shard(0)]),
    }
"""
SAVE = (
    COMMON
    + """
checkpointer = Checkpointer(timeout=120)
for step in (1, 2):
    attempt(checkpointer.save, step, placed(True))
    said.append(["saved", checkpointer.wait("@UNTIL@")])
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
    leaves = lambda state: [local(value) for value in (state["rows"], state["columns"], state["same"], state["model"]["deep"], state["large"])]
    said.append(["equal", all(map(torch.equal, leaves(ours), leaves(stock))), sum(bool(one.any()) for one in leaves(ours))])
    said.append(["right", torch.equal(ours["model"]["deep"].full_tensor(), whole("deep", 64, 33))])
everything = checkpointer.load_all() if world < 6 else None
said.append(["whole", everything is None or torch.equal(everything["rows"], whole("rows", 13, 6))])
"""
)


# As bench/sdk/ranks.py counts: bytes of the chunks that are opened, beside those that this rank holds.
COUNT = """
from storaged.torch import _reader

opened, merged = [0], _reader.merged

def counted(*arguments):
    ranges = merged(*arguments)
    opened[0] += sum(count for _, count in ranges)
    return ranges

_reader.merged = counted
large = {"large": placed(False)["large"]}
attempt(checkpointer.load, large)
both = torch.tensor([opened[0], large["large"].to_local().nbytes])
dist.all_reduce(both)
said.append(["opened", both.tolist()])
"""


def saved_and_loaded(folder, save_at, load_at, until="committed", between=lambda: None, count=""):
    """Checks what ranks on these sockets load after ranks on those have saved; what the loading ones said."""
    save, load = (text.replace("@FOLDER@", str(folder / "stock")).replace("@UNTIL@", until) for text in (SAVE, LOAD + count))
    said, errors = run_ranks(folder, save_at, save, limit=500)
    assert all(said), errors
    assert all(one == ["saved", True] for lines in said for one in lines if one[0] == "saved"), said
    between()
    said, errors = run_ranks(folder, load_at, load, limit=500)
    assert all(said), errors
    for lines in said:
        equal = [line for line in lines if line[0] == "equal"]
        assert len(equal) == 2 and all(line[1] for line in equal), lines
        assert [line[1] for line in lines if line[0] in ("right", "whole")] == [True, True, True], lines
    assert any(line[2] == 5 for lines in said for line in lines if line[0] == "equal"), said
    return said


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 6), (2, 8)])
def test_another_number_of_ranks_gets_the_same_bits(daemons, tmp_path, before, after):
    socket = daemons().socket
    saved_and_loaded(tmp_path, [socket] * before, [socket] * after)


@pytest.mark.parametrize("after", [2, 6])
def test_another_number_of_ranks_gets_the_same_bits_when_a_node_is_lost(tmp_path, after):
    nodes = cluster(tmp_path, 3, 2, 1, 'chunk = "4KiB"')
    try:
        left = [nodes[0].socket, nodes[2].socket]
        said = saved_and_loaded(
            tmp_path, [nodes[0].socket, nodes[1].socket] * 2, left * (after // 2), "protected", nodes[1].kill, COUNT
        )
        for lines in said:
            opened, needed = next(line[1] for line in lines if line[0] == "opened")
            assert needed == 1021 * 1024 * 4 and needed <= opened <= 1.05 * needed, (opened, needed)
    finally:
        for node in nodes:
            node.kill()
