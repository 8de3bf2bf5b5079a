"""Saving and loading through DCP, against the stand-in daemon."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake import FakeSession
from storaged.errors import InvalidArgument, NoCheckpointError, ProcessModeUnsupported
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter
from torch.distributed.checkpoint.api import CheckpointException


def state_of(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(64, 300, generator=generator)
    return {
        "model": {"w": weights, "tied": weights, "t": weights.t(), "half": weights[3:5].to(torch.bfloat16)},
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 4),
        "param": torch.nn.Parameter(weights[0].clone()),
        "step": seed,
        "nested": [1, {"text": "x" * 3000}],
    }


def blank(state):
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros_like(state).detach() if isinstance(state, torch.Tensor) else None


def assert_same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def staged_save(session, step, state):
    """What async_save does with a writer that is also the stager."""
    writer = StoragedWriter(step, session=session)
    staged = writer.stage(state)
    dcp.save(staged, storage_writer=writer, no_dist=True)
    return writer


@pytest.fixture
def session(tmp_path):
    return FakeSession(tmp_path)


@pytest.mark.parametrize("save", ["plain", "staged"])
def test_what_was_saved_is_loaded(session, save):
    state = state_of(7)
    if save == "plain":
        dcp.save(state, storage_writer=StoragedWriter(7, session=session), no_dist=True)
    else:
        staged_save(session, 7, state)
    loaded = blank(state)
    dcp.load(loaded, storage_reader=StoragedReader(session=session), no_dist=True)
    assert_same(loaded, state)


def test_staged_tensors_are_copied_once_and_never_again(session):
    state = {"a": torch.randn(1000, 70), "b": torch.ones(3)}
    writer = staged_save(session, 1, state)
    assert writer.copied_bytes == sum(tensor.nbytes for tensor in state.values())
    assert writer.spilled_bytes == 0


def test_tied_tensors_are_staged_once(session):
    tensor = torch.randn(100)
    assert staged_save(session, 1, {"a": tensor, "b": tensor}).copied_bytes == tensor.nbytes


def test_parameters_may_change_once_staged(session):
    state = {"w": torch.ones(5000)}
    writer = StoragedWriter(1, session=session)
    staged = writer.stage(state)
    state["w"].zero_()
    dcp.save(staged, storage_writer=writer, no_dist=True)
    loaded = {"w": torch.empty(5000)}
    dcp.load(loaded, storage_reader=StoragedReader(session=session), no_dist=True)
    assert torch.equal(loaded["w"], torch.ones(5000))


def test_a_shard_damaged_in_own_ram_is_read_from_elsewhere(session):
    state = state_of(4)
    staged_save(session, 4, state)
    session.damaged = {"own ram"}
    loaded, reader = blank(state), StoragedReader(session=session)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_same(loaded, state)
    assert set(reader.rungs) == {"decoded"}
    session.damaged = {"own ram", "decoded"}
    with pytest.raises(CheckpointException, match="does not have its digest"):
        dcp.load(blank(state), storage_reader=StoragedReader(session=session), no_dist=True)


@pytest.mark.parametrize("reader", ["file", "fsspec"])
def test_stock_readers_read_the_directory(session, reader):
    state = state_of(3)
    staged_save(session, 3, state)
    folder = str(session.folder / "step-3")
    if reader == "file":
        stock = dcp.FileSystemReader(folder)
    else:
        fsspec = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")
        stock = fsspec.FsspecReader(f"file://{folder}")
    loaded = blank(state)
    dcp.load(loaded, storage_reader=stock, no_dist=True)
    assert_same(loaded, state)


def test_offsets_are_equal_from_step_to_step_and_slots_are_reused(session):
    for step in (1, 2, 3):
        staged_save(session, step, state_of(step))
    assert session.slots == 1
    sizes = {path.stat().st_size for path in session.folder.glob("step-*/__0_0.distcp")}
    assert len(sizes) == 1


def test_a_layout_that_changes_leaves_no_old_bytes_between_records(session, tmp_path):
    staged_save(session, 1, {"a": torch.full((40000,), 3.0), "b": torch.ones(7)})
    staged_save(session, 2, {"b": torch.ones(7), "a": torch.full((4000,), 3.0)})
    fresh = FakeSession(tmp_path / "fresh")
    fresh.folder.mkdir()
    staged_save(fresh, 2, {"b": torch.ones(7), "a": torch.full((4000,), 3.0)})
    used, clean = (s.folder / "step-2" / "__0_0.distcp" for s in (session, fresh))
    assert used.read_bytes() == clean.read_bytes()


def test_byte_items_beyond_the_spare_room_move_to_a_larger_slot(session):
    state = {"w": torch.randn(100), "text": "y" * (3 << 20)}
    staged_save(session, 1, state)
    loaded = {"w": torch.empty(100), "text": ""}
    dcp.load(loaded, storage_reader=StoragedReader(session=session), no_dist=True)
    assert_same(loaded, state)


def test_only_the_ranges_asked_for_are_opened(session):
    staged_save(session, 1, {"a": torch.randn(500, 1000), "b": torch.randn(500, 1000)})
    dcp.load({"b": torch.empty(500, 1000)}, storage_reader=StoragedReader(session=session), no_dist=True)
    ((_, ranges),) = session.opened
    assert sum(length for _, length in ranges) <= 2_000_000 + 2 * 4096


def test_an_object_that_needs_trust_is_not_loaded(session):
    class Plain:
        pass

    Plain.__qualname__ = "Plain"
    globals()["Plain"] = Plain
    staged_save(session, 1, {"x": Plain()})
    with pytest.raises(BaseException, match="not plain data"):
        dcp.load({"x": 1}, storage_reader=StoragedReader(session=session), no_dist=True)


def test_process_mode_is_refused(session):
    with pytest.raises(ProcessModeUnsupported, match="THREAD"):
        pickle.dumps(StoragedWriter(1, session=session))


def test_a_save_without_a_step_is_refused(session):
    with pytest.raises(BaseException, match="expected a step"):
        dcp.save({"w": torch.ones(1)}, storage_writer=StoragedWriter(session=session), no_dist=True)
    with pytest.raises(InvalidArgument, match="names a step"):
        StoragedWriter(session=session).reset("latest")


def test_metadata_has_the_five_fields_that_old_readers_know(session):
    staged_save(session, 1, {"w": torch.ones(1)})
    states = []

    class Spy(pickle.Unpickler):
        def find_class(self, module, name):
            if name != "TensorProperties":
                return super().find_class(module, name)
            return type("Properties", (), {"__setstate__": lambda self, state: states.append(state)})

    with open(session.folder / "step-1" / ".metadata", "rb") as file:
        Spy(file).load()
    assert states and all(len(state) == 5 for state in states)


def test_checkpointer(session):
    state = state_of(5)
    with Checkpointer(session=session) as checkpointer:
        assert checkpointer.load(blank(state)) is None
        with pytest.raises(NoCheckpointError):
            checkpointer.load(blank(state), step=9)
        checkpointer.save(5, state)
        assert checkpointer.latest_step() == 5
        loaded = blank(state)
        assert checkpointer.load(loaded)["step"] == 5
    assert_same(loaded, state)
