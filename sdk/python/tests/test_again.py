"""Saves after the first one of a structure: no plan, hardly any Python, the same bytes."""

import struct
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import run_ranks
from storaged.torch import Checkpointer
from storaged.torch._saving import DefaultSavePlanner


def state(step):
    weights = torch.full((64, 30), float(step))
    return {
        "model": {"w": weights, "tied": weights, "t": torch.arange(6.0).view(2, 3).t() * step, "empty": torch.empty(0, 4)},
        "optimizer": {"state": {0: {"step": torch.tensor(step)}, 1: {"step": torch.tensor(-step)}}, "lr": 1e-3 * step},
        "list": [torch.ones(3) * step, {"deep": step}],
        "step": step,
        "rng": b"x" * 100,
    }


def blank():
    return {
        "model": {"w": torch.zeros(64, 30), "tied": torch.zeros(64, 30), "t": torch.zeros(3, 2), "empty": torch.empty(0, 4)},
        "optimizer": {"state": {0: {"step": torch.tensor(0)}, 1: {"step": torch.tensor(0)}}, "lr": 0.0},
        "list": [torch.zeros(3), {"deep": 0}],
        "step": 0,
        "rng": b"",
    }


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


def loaded(checkpointer, step):
    into = blank()
    checkpointer.load(into, step=step)
    return into


def saved(checkpointer, step, what=None):
    checkpointer.save(step, state(step) if what is None else what)
    assert checkpointer.wait()
    return checkpointer._memory.again


@pytest.fixture
def plans(monkeypatch):
    """How many plans were made."""
    made = []
    real = DefaultSavePlanner.create_local_plan
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", lambda self: (made.append(1), real(self))[1])
    return made


def test_saves_of_one_structure_are_planned_once_and_are_right(session, plans):
    with Checkpointer(session=session, durable="required") as checkpointer:
        again = [saved(checkpointer, step) for step in range(1, 6)]
        assert again == [0, 1, 2, 3, 4] and len(plans) == 1
        assert same(loaded(checkpointer, 5), state(5))
        # Longer objects lie elsewhere: that is planned anew, and then holds.
        longer = state(6) | {"rng": b"y" * 5000}
        assert saved(checkpointer, 6, longer) == 4 and len(plans) == 2
        assert same(loaded(checkpointer, 6), longer)
        assert saved(checkpointer, 7, state(7) | {"rng": b"z" * 5000}) == 5 and len(plans) == 2


def test_numbers_keep_their_bits_whatever_was_saved_before(session):
    def number(bits):
        return struct.unpack("<d", struct.pack("<Q", bits))[0]

    # NaNs with other payloads and signs, and zeros: Python writes each kind alike, or takes them for equal.
    bits = [0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000, 0x7FFC0000DEADBEEF, 0, 1 << 63]
    with Checkpointer(session=session) as checkpointer:
        for step, (one, other) in enumerate(zip(bits, bits[1:])):
            saved(checkpointer, step, {"w": torch.ones(3), "real": number(one), "pair": complex(number(one), number(other))})
            got = checkpointer.load_all()
            told = [struct.unpack("<Q", struct.pack("<d", value))[0] for value in (got["real"], got["pair"].real, got["pair"].imag)]
            assert told == [one, one, other], [hex(value) for value in told]
        assert checkpointer._memory.again == len(bits) - 2


def test_tensors_without_elements_are_described_every_time(session, shared_daemon):
    tensors = {"w": torch.ones(5), "none": torch.empty(0, 4), "none too": torch.empty(0, 4), "no rows": torch.empty(3, 0)}
    with Checkpointer(session=session, durable="required") as checkpointer:
        assert [saved(checkpointer, step, tensors) for step in (1, 2, 3)] == [0, 1, 2]
        whole = checkpointer.load_all()
        assert {name: value.shape for name, value in whole.items()} == {name: value.shape for name, value in tensors.items()}
        checkpointer.session.connect().wait(checkpointer.session.run_of(checkpointer._key), 3, "durable", 60_000)
    stock = {name: torch.ones_like(value) for name, value in tensors.items()}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(shared_daemon.step_folder(session, 3)))
    assert torch.equal(stock["w"], torch.ones(5))


def test_what_is_different_is_planned_anew(session, plans):
    with Checkpointer(session=session) as checkpointer:
        saved(checkpointer, 1)
        others = [state(2), state(3), state(4), state(5), state(6)]
        others[0]["model"]["w"] = torch.full((64, 31), 2.0)
        others[1]["model"]["tied"] = others[1]["model"]["w"].clone()
        others[2]["more"] = torch.ones(2)
        others[3]["list"].append(7)
        others[4]["model"]["w"] = others[4]["model"]["w"].double()
        for step, other in enumerate(others, 2):
            before = len(plans)
            assert saved(checkpointer, step, other) == 0, step
            assert len(plans) == before + 1
            whole = checkpointer.load_all(step)
            assert torch.equal(whole["model"]["w"], other["model"]["w"]) and whole["model"]["w"].dtype == other["model"]["w"].dtype
            assert torch.equal(whole["model"]["tied"], other["model"]["tied"])
            assert whole.get("more", torch.zeros(1)).sum() == ("more" in other) * 2
            assert len(whole["list"]) == len(other["list"])


def test_tensors_that_move_or_are_freed_are_seen(session):
    with Checkpointer(session=session, on_error="warn") as checkpointer:
        tensors = {"a": torch.ones(100), "b": torch.ones(100)}
        saved(checkpointer, 1, tensors)
        tensors["a"] = torch.full((100,), 2.0)
        tensors["b"].data = torch.full((100,), 3.0)
        assert saved(checkpointer, 2, tensors) == 1
        whole = checkpointer.load_all()
        assert whole["a"].sum() == 200 and whole["b"].sum() == 300
        tensors["a"].untyped_storage().resize_(0)
        with pytest.raises(Exception, match="'a'.*no memory"):
            checkpointer.save(3, tensors)


RANKS = """
from dtensor import DTensor, Shard, Replicate
from torch.distributed.device_mesh import init_device_mesh
from storaged.torch._saving import DefaultSavePlanner
mesh = init_device_mesh("cpu", (world,))
checkpointer = Checkpointer(timeout=20)

def sharded(step, rows=8):
    local = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) * step + rank
    return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "same": torch.ones(4) * step, "step": step, f"own{rank}": rank * step}

def planned():
    return checkpointer._memory.again

for step in (1, 2, 3):
    attempt(checkpointer.save, step, sharded(step))
    attempt(checkpointer.wait)
said.append(["planned once", planned()])
into = sharded(0)
checkpointer.load(into)
said.append(["loaded", torch.equal(into["w"].to_local(), sharded(3)["w"].to_local()), into["same"].sum().item(), into["step"], into[f"own{rank}"]])
# Only rank 1 has something new: all plan anew, with what they have staged.
other = sharded(4)
if rank == 1: other["extra"] = torch.ones(3)
attempt(checkpointer.save, 4, other)
attempt(checkpointer.wait)
said.append(["planned twice", planned()])
whole = checkpointer.load_all()
said.append(["whole", whole["w"].shape[0], whole["extra"].sum().item(), whole["step"], whole["own1"]])
attempt(checkpointer.save, 5, sharded(5)); attempt(checkpointer.wait)
attempt(checkpointer.save, 6, sharded(6)); attempt(checkpointer.wait)
said.append(["and again", planned(), checkpointer.latest_step()])
"""


def test_ranks_use_the_plan_again_only_together(daemons, tmp_path):
    daemon = daemons()
    said, errors = run_ranks(tmp_path, [daemon.socket] * 2, RANKS, limit=300)
    for rank, one in enumerate(said):
        assert one, errors
        notes = {line[0]: line[1:] for line in one if line[0] != "ok"}
        assert notes["planned once"] == [2], one
        assert notes["loaded"] == [True, 12.0, 3, 3 * rank], one
        assert notes["planned twice"] == [2] and notes["whole"] == [16, 3.0, 4, 4], one
        assert notes["and again"] == [3, 6], one


def test_many_small_tensors_cost_the_training_thread_little(session):
    tensors = {f"layer{i}.weight": torch.full((64,), float(i)) for i in range(10_000)}
    with Checkpointer(session=session, timeout=300) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, tensors) and checkpointer.wait()
        took = []
        for step in (4, 5, 6):
            started = time.thread_time()
            checkpointer.save(step, tensors)
            took.append(time.thread_time() - started)
            assert checkpointer.wait()
        assert checkpointer._memory.again >= 4
        # 2.5 MB are nothing to copy; of 0.65 s once, and 0.1 s while every tensor was asked whether it gives a state of its own.
        assert min(took) < 0.05, took
        whole = checkpointer.load_all()
        assert all(torch.equal(whole[name], value) for name, value in tensors.items())
