"""Saving and loading through DCP, against a real daemon."""

import importlib
import pickle
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from daemon import flip
from storaged import errors
from storaged.errors import InvalidArgument, ProcessModeUnsupported
from storaged.torch import StoragedReader, StoragedWriter
from storaged.torch._reader import RANGES_MAX, merged
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


def staged_save(session, step, state, **settings):
    """What async_save does with a writer that is also the stager."""
    writer = StoragedWriter(step, session=session, **settings)
    staged = writer.stage(state)
    dcp.save(staged, storage_writer=writer)
    return writer


def durable(daemon, session, step, state):
    """The folder that the durable tier has of a step."""
    staged_save(session, step, state, durable="required", until="durable")
    return daemon.step_folder(session, step)


@pytest.mark.parametrize("save", ["plain", "staged"])
def test_what_was_saved_is_loaded(session, save):
    state = state_of(7)
    if save == "plain":
        dcp.save(state, storage_writer=StoragedWriter(7, session=session))
    else:
        staged_save(session, 7, state)
    loaded = blank(state)
    dcp.load(loaded, storage_reader=StoragedReader(session=session))
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
    dcp.save(staged, storage_writer=writer)
    loaded = {"w": torch.empty(5000)}
    dcp.load(loaded, storage_reader=StoragedReader(session=session))
    assert torch.equal(loaded["w"], torch.ones(5000))


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_a_shard_damaged_in_own_ram_is_read_from_elsewhere(daemons, verify):
    daemon = daemons('[durable]\nkind = "directory"\npath = "TIER"\n')
    session, state = daemon.session(), state_of(4)
    file = durable(daemon, session, 4, state) / "__0_0.distcp"
    body = file.read_bytes()
    weights = body.index(state["model"]["w"].numpy().tobytes())
    assert flip(daemon, body, weights + 1000) == 1
    loaded, reader = blank(state), StoragedReader(session=session, verify=verify)
    dcp.load(loaded, storage_reader=reader)
    assert_same(loaded, state)
    assert set(reader.rungs) == {"durable tier"}
    # Wrong bytes everywhere are an error, never an answer.
    file.write_bytes(body[: weights + 1000] + bytes([body[weights + 1000] ^ 1]) + body[weights + 1001 :])
    with pytest.raises(CheckpointException, match="digest"):
        dcp.load(blank(state), storage_reader=StoragedReader(session=session, verify=verify, timeout=20))


def test_what_own_ram_is_compared_with_is_a_choice(session):
    state = state_of(5)
    staged_save(session, 5, state)
    for verify in ("fast", "full"):
        loaded = blank(state)
        reader = StoragedReader(session=session, verify=verify)
        dcp.load(loaded, storage_reader=reader)
        assert_same(loaded, state)
        assert set(reader.rungs) == {"own ram"}
    with pytest.raises(InvalidArgument, match="verify must be one of fast, full"):
        StoragedReader(session=session, verify="none")


@pytest.mark.parametrize("reader", ["file", "fsspec"])
def test_stock_readers_read_the_directory(shared_daemon, session, reader):
    state = state_of(3)
    folder = str(durable(shared_daemon, session, 3, state))
    if reader == "file":
        stock = dcp.FileSystemReader(folder)
    else:
        fsspec = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")
        stock = fsspec.FsspecReader(f"file://{folder}")
    loaded = blank(state)
    dcp.load(loaded, storage_reader=stock)
    assert_same(loaded, state)


def test_offsets_are_equal_from_step_to_step(shared_daemon, session):
    folders = [durable(shared_daemon, session, step, state_of(step)) for step in (1, 2, 3, 4, 5, 6)]
    assert len({(folder / "__0_0.distcp").stat().st_size for folder in folders}) == 1


def test_a_layout_that_changes_leaves_no_old_bytes_between_records(shared_daemon, session):
    shapes = {"b": torch.ones(7), "a": torch.full((4000,), 3.0)}
    staged_save(session, 1, {"a": torch.full((40000,), 3.0), "b": torch.ones(7)})
    used = durable(shared_daemon, session, 2, shapes)
    fresh = shared_daemon.session("fresh-slot")
    clean = durable(shared_daemon, fresh, 2, shapes)
    assert (used / "__0_0.distcp").read_bytes() == (clean / "__0_0.distcp").read_bytes()


def test_byte_items_beyond_the_spare_room_move_to_a_larger_slot(session):
    state = {"w": torch.randn(100), "text": "y" * (3 << 20)}
    staged_save(session, 1, state)
    loaded = {"w": torch.empty(100), "text": ""}
    dcp.load(loaded, storage_reader=StoragedReader(session=session))
    assert_same(loaded, state)


def test_only_the_ranges_asked_for_are_opened(session, monkeypatch):
    staged_save(session, 1, {"a": torch.randn(500, 1000), "b": torch.randn(500, 1000)})
    opened = []

    class Spy:
        def __init__(self, client):
            self.client = client

        def __getattr__(self, name):
            return getattr(self.client, name)

        def open_shard(self, manifest, rank, ranges, *rest):
            opened.append(ranges)
            return self.client.open_shard(manifest, rank, ranges, *rest)

    real = session.client
    monkeypatch.setattr(session, "client", lambda deadline=None: Spy(real(deadline)))
    wanted = {"b": torch.empty(500, 1000)}
    reader = StoragedReader(session=session)
    dcp.load(wanted, storage_reader=reader)
    (ranges,) = opened
    assert sum(length for _, length in ranges) <= 2_000_000 + 2 * reader._manifest.chunk_bytes


def test_process_mode_is_refused(session):
    with pytest.raises(ProcessModeUnsupported, match="THREAD"):
        pickle.dumps(StoragedWriter(1, session=session))


def test_process_mode_is_refused_before_anything_is_staged(session, tmp_path):
    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    if not hasattr(saver, "AsyncCheckpointerType"):
        pytest.skip("this torch has no process mode")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        writer = StoragedWriter(1, session=session, rank=0, world_size=1)
        with pytest.raises(ProcessModeUnsupported, match="THREAD"):
            dcp.async_save(state_of(1), storage_writer=writer, async_checkpointer_type=saver.AsyncCheckpointerType.PROCESS)
        assert writer._shard is None and not session._trainers
    finally:
        dist.destroy_process_group()


def test_a_save_without_a_step_is_refused(session):
    with pytest.raises(BaseException, match="expected a step"):
        dcp.save({"w": torch.ones(1)}, storage_writer=StoragedWriter(session=session))
    with pytest.raises(InvalidArgument, match="names a step"):
        StoragedWriter(session=session).reset("latest")


def test_metadata_has_the_five_fields_that_old_readers_know(shared_daemon, session):
    folder = durable(shared_daemon, session, 1, {"w": torch.ones(1)})
    states = []

    class Spy(pickle.Unpickler):
        def find_class(self, module, name):
            if name != "TensorProperties":
                return super().find_class(module, name)
            return type("Properties", (), {"__setstate__": lambda self, state: states.append(state)})

    with open(folder / ".metadata", "rb") as file:
        Spy(file).load()
    assert states and all(len(state) == 5 for state in states)


def test_what_planners_are_told_of_the_storage(shared_daemon, session):
    """As stock PyTorch does it: which checkpoint is saved and loaded, and what a planner says of it is kept."""
    told = {}

    class Saving(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            told["save"] = storage_meta
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

        def create_global_plan(self, plans):
            plans, metadata = super().create_global_plan(plans)
            return plans, replace(metadata, storage_meta=told["save"])

    class Loading(dcp.DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            told["load"] = metadata.storage_meta
            super().set_up_planner(state_dict, metadata, is_coordinator)

    state = {"w": torch.ones(3)}
    writer = StoragedWriter(5, session=session, durable="required", until="durable")
    dcp.save(state, storage_writer=writer, planner=Saving())
    assert told["save"].checkpoint_id == writer.checkpoint_id and told["save"].save_id
    kept = dcp.FileSystemReader(shared_daemon.step_folder(session, 5)).read_metadata()
    assert (kept.storage_meta.checkpoint_id, kept.storage_meta.save_id) == (writer.checkpoint_id, told["save"].save_id)
    reader = StoragedReader(session=session)
    dcp.load(state, storage_reader=reader, planner=Loading())
    assert told["load"].checkpoint_id == reader.checkpoint_id and "step-5" in reader.checkpoint_id and told["load"].load_id


def test_two_saves_of_one_session_at_once_are_both_right(session):
    first, second = StoragedWriter(1, session=session), StoragedWriter(2, session=session)
    kept = [writer.stage({"w": torch.full((3000,), float(writer.step))}) for writer in (first, second)]
    for writer, staged in zip((first, second), kept):
        dcp.save(staged, storage_writer=writer)
    loaded = {"w": torch.empty(3000)}
    dcp.load(loaded, storage_reader=StoragedReader(session=session))
    assert torch.equal(loaded["w"], torch.full((3000,), 2.0))


def test_a_null_address_is_refused(session):
    slot = session.trainer(session.connect().open_run(5000), 0, 1).acquire(1000, 5000)
    with pytest.raises(InvalidArgument, match="null"):
        slot.copy_many([(0, 0, 10)], 1)
    slot.copy_many([(0, 0, 0)], 1)


def test_the_plain_loop_goes_back_to_an_older_step(session):
    for step in (1, 2):
        writer = StoragedWriter(step, session=session, durable="required", until="durable")
        dcp.save(state_of(step), storage_writer=writer)
    dcp.load(blank(state_of(1)), storage_reader=StoragedReader(1, session=session))
    dcp.save(state_of(12), storage_writer=StoragedWriter(2, session=session))
    loaded = blank(state_of(12))
    dcp.load(loaded, storage_reader=StoragedReader(session=session))
    assert_same(loaded, state_of(12))


def test_a_stopped_daemon_costs_a_plain_save_and_load_the_limit(daemons):
    daemon = daemons()
    session = daemon.session()
    staged_save(session, 1, state_of(1))
    writer, reader = (kind(2, session=session, timeout=1) for kind in (StoragedWriter, StoragedReader))
    daemon.stop()
    calls = (
        lambda: dcp.save(state_of(2), storage_writer=writer),
        lambda: dcp.load(blank(state_of(1)), storage_reader=reader),
        lambda: writer.handle.wait(timeout=1),
    )
    for call in calls:
        started = time.monotonic()
        with pytest.raises((CheckpointException, errors.StoragedError)):
            call()
        assert time.monotonic() - started < 15


def test_a_shard_of_which_very_many_pieces_are_wanted_is_opened_whole():
    chunk, pieces = 4096, RANGES_MAX + 1
    spans = [(2 * chunk * piece, 1) for piece in range(pieces)]
    length = 2 * chunk * pieces
    assert merged(spans, chunk, length) == [(0, length)]
    assert len(merged(spans[1:], chunk, length)) == RANGES_MAX
