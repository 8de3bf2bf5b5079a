"""Mistakes of the caller: typed errors that say what was expected, what came and what to do; nothing is saved or lost by them."""

import os

import numpy
import pytest
import torch
from daemon import run_ranks
from storaged import Session, StoragedError
from storaged.errors import CheckpointerClosed, CheckpointLoadError, InvalidArgument
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter

BAD_STEPS = [-1, 1.5, 2**64, True, "3", [1], float("nan"), torch.ones(2), torch.tensor(2.0)]
BAD_STATES = [[1], None, torch.ones(2), "x", 7]
NO_LIMITS = [0, -1, "x", None, float("nan"), True]
#: What every text says, whatever was wrong.
EXPECTED_AND_GOT = r"(?s)expected .* got .*: "


def state(value=1.0):
    return {"w": torch.full((10,), value)}


@pytest.mark.parametrize("step", [*BAD_STEPS, None], ids=repr)
def test_a_step_that_is_none_is_refused_before_anything_is_staged(session, step):
    checkpointer = Checkpointer(session=session)
    with pytest.raises(InvalidArgument, match=EXPECTED_AND_GOT):
        checkpointer.save(step, state())
    assert checkpointer.failed_saves == 0
    checkpointer.save(1, state())
    assert checkpointer.wait() and checkpointer.latest_step() == 1
    checkpointer.close()


@pytest.mark.parametrize("step", BAD_STEPS, ids=repr)
def test_loads_writers_and_readers_refuse_it_too(session, step):
    calls = [
        lambda: Checkpointer(session=session).load(state(), step=step),
        lambda: Checkpointer(session=session).load_all(step),
        lambda: StoragedWriter(step, session=session),
        lambda: StoragedReader(step, session=session),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=EXPECTED_AND_GOT):
            call()


def test_a_step_in_a_checkpoint_id_beyond_64_bits(session):
    for made in (StoragedWriter(1, session=session), StoragedReader(1, session=session)):
        with pytest.raises(InvalidArgument, match="expected a step from 0 to"):
            made.reset(f"step-{2**64}")


def test_integers_of_numpy_and_torch_are_steps_and_so_is_the_highest(session):
    with Checkpointer(session=session) as checkpointer:
        for step in (numpy.int64(4), torch.tensor(5), 2**64 - 1):
            handle = checkpointer.save(step, state())
            assert type(handle.step) is int and handle.step == int(step)
            assert checkpointer.wait() and checkpointer.latest_step() == int(step)
        assert checkpointer.load(state(0.0), step=numpy.uint64(2**64 - 1))["step"] == 2**64 - 1


@pytest.mark.parametrize("bad", BAD_STATES, ids=lambda bad: type(bad).__name__.lower())
def test_a_state_that_is_no_dict(session, bad):
    checkpointer = Checkpointer(session=session, on_error="warn")
    # Also where nothing was saved yet.
    for call in (lambda: checkpointer.load(bad), lambda: checkpointer.prepare(bad), lambda: checkpointer.save(1, bad), lambda: checkpointer.load(bad)):
        with pytest.raises(InvalidArgument, match="expected the state as a dict, got .*: put what is to be saved into one"):
            call()
    checkpointer.save(2, state(2.0))
    assert checkpointer.wait()
    with pytest.raises(InvalidArgument):
        checkpointer.load(bad)
    into = state(0.0)
    assert checkpointer.load(into)["step"] == 2 and torch.equal(into["w"], state(2.0)["w"])
    checkpointer.close()


def test_what_is_closed_neither_saves_nor_loads(session):
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, state())
    calls = [
        lambda: checkpointer.save(2, state()),
        lambda: checkpointer.load(state()),
        checkpointer.load_all,
        checkpointer.latest_step,
        checkpointer.list,
        lambda: checkpointer.prepare(state()),
    ]
    for call in calls:
        with pytest.raises(CheckpointerClosed, match="expected an open checkpointer, .* was closed .*: make a new one"):
            call()
    checkpointer.close()
    assert checkpointer.wait()
    with Checkpointer(session=session) as another:
        assert another.latest_step() == 1


@pytest.mark.parametrize("timeout", NO_LIMITS, ids=repr)
def test_limits_are_seconds_above_0(session, timeout):
    calls = [
        lambda: Checkpointer(session=session, timeout=timeout),
        lambda: StoragedWriter(1, session=session, timeout=timeout),
        lambda: StoragedReader(1, session=session, timeout=timeout),
        lambda: Session("job", timeout=timeout),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="expected timeout as seconds above 0, got "):
            call()


@pytest.mark.parametrize("timeout", [float("inf"), 1e300], ids=lambda value: str(value)[:5])
def test_a_limit_may_be_none_at_all(session, timeout):
    with Checkpointer(session=session, timeout=timeout) as checkpointer:
        checkpointer.save(1, state())
        assert checkpointer.wait() and checkpointer.latest_step() == 1 and checkpointer.load(state())["step"] == 1


def test_a_step_of_thousands_of_digits(session):
    with Checkpointer(session=session) as checkpointer, pytest.raises(InvalidArgument, match="thousands of digits"):
        checkpointer.save(10**5000, state())


@pytest.mark.parametrize(
    "settings",
    [{"threads": 0}, {"threads": -3}, {"threads": 1.5}, {"durable": "x"}, {"until": "x"}, {"busy": "x"}, {"on_error": 3}],
    ids=repr,
)
def test_settings_are_refused_when_they_are_made(session, settings):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(InvalidArgument, match=rf"{name}.* got {value!r}"):
        Checkpointer(session=session, **settings)


def test_threads_are_a_ranks_share_of_the_cores_up_to_four(session, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, ranks, threads in ((1, None, 1), (2, None, 2), (64, None, 4), (16, "8", 2), (16, "64", 1), (4, "x", 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert Checkpointer(session=session).threads == threads
        assert StoragedReader(session=session).threads == StoragedWriter(1, session=session).threads == threads
    assert Checkpointer(session=session, threads=7).threads == 7


def test_a_namespace_is_text():
    with pytest.raises(InvalidArgument, match="expected the namespace as text, got 3 of type int"):
        Checkpointer(3)


def test_all_are_errors_of_the_package_and_of_python():
    assert issubclass(InvalidArgument, ValueError) and issubclass(CheckpointerClosed, RuntimeError)
    assert issubclass(CheckpointerClosed, StoragedError) and issubclass(CheckpointLoadError, StoragedError)


def test_one_ranks_mistake_is_told_to_the_others(daemons, tmp_path):
    daemon = daemons()
    body = """
checkpointer = Checkpointer(timeout=20, on_error="warn")
attempt(checkpointer.save, 1, [1] if rank == 1 else state(1)); checkpointer.wait()
attempt(checkpointer.save, 2, state(2)); said.append([checkpointer.wait(), checkpointer.failed_saves])
attempt(checkpointer.load, None if rank == 1 else state(0))
into = state(0); checkpointer.load(into); said.append([into["step"]])
"""
    said, errors = run_ranks(tmp_path, [daemon.socket] * 2, body)
    for rank, told in enumerate(said):
        assert told is not None, errors[rank]
        saved, after, ended, loaded, again = told
        assert saved[0] == ("InvalidArgument" if rank == 1 else "ok") and saved[-1] < 10, told
        assert after[0] == "ok" and ended == [True, 1] and again == [2], told
        assert loaded[0] == ("InvalidArgument" if rank == 1 else "CheckpointLoadError") and loaded[-1] < 10, told
        assert "expected the state as a dict" in loaded[1]
