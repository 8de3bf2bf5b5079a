"""Saves whose copy goes on beside training: what they hold, who waits for them, and what becomes of a copy that fails. A real daemon."""

import gc
import threading
import time
import weakref

import pytest
import torch
from daemon import run_ranks
from storaged import errors
from storaged.torch import Checkpointer


def state(step):
    weights = torch.full((300, 400), float(step))
    return {
        "w": weights, "tied": weights, "turned": torch.arange(6.0).view(2, 3).t() + step, "none": torch.zeros(0),
        "step": step, "losses": [step, {"last": float(step)}], "nested": {"deep": [torch.full((7,), step)]},
    }


def same(loaded, expected):
    assert loaded["step"] == expected["step"] and loaded["losses"] == expected["losses"]
    for name in ("w", "tied", "turned", "none"):
        assert torch.equal(loaded[name], expected[name]), name
    assert torch.equal(loaded["nested"]["deep"][0], expected["nested"]["deep"][0])


class Held:
    """A daemon that is stopped in the block: whoever needs it waits."""

    def __init__(self, daemon):
        self.daemon = daemon

    def __enter__(self):
        self.daemon.stop()
        return self

    def __exit__(self, *_):
        self.daemon.go_on()

    def for_a(self, seconds):
        """Ends it after so long, in another thread."""
        threading.Timer(seconds, self.daemon.go_on).start()


@pytest.fixture
def job(daemons):
    """A daemon, and a checkpointer whose first step is saved: its run is open, and the structure known."""
    daemon = daemons()
    with Checkpointer(session=daemon.session(), background=True, timeout=30) as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.wait()
        yield daemon, checkpointer


@pytest.mark.parametrize("structure", ["unknown", "known"])
def test_a_save_returns_before_the_copy_and_holds_what_was_there(job, structure):
    daemon, checkpointer = job
    mine = state(2)
    if structure == "unknown":
        mine["more"] = {"x": torch.ones(5), 3: "three"}
    with Held(daemon):
        handle = checkpointer.save(2, mine)
        assert not handle.staged.done()
        # Everything but the tensors' elements may change at once.
        mine["losses"].append("later")
        mine["losses"][1]["last"] = None
        mine["step"] = 99
        mine["nested"]["deep"][0] = torch.zeros(7)
        mine["w"].data = torch.zeros(300, 400)
        mine["new"] = torch.ones(3)
        del mine["turned"]
        gc.collect()
        time.sleep(0.2)
        assert not handle.staged.done()
    assert handle.staged.result(20) is None
    mine["tied"].zero_()
    assert checkpointer.wait() and checkpointer._memory.again == (0 if structure == "unknown" else 1)
    loaded = checkpointer.load_all()
    expected = state(2)
    same(loaded, expected)
    assert "new" not in loaded and ("more" in loaded) is (structure == "unknown")


def test_memory_that_a_tensor_was_given_up_for_stays_until_it_is_copied(job):
    daemon, checkpointer = job
    mine = state(2)
    kept = weakref.ref(mine["w"].untyped_storage())
    with Held(daemon):
        handle = checkpointer.save(2, mine)
        for name in ("w", "tied"):
            mine[name].data = torch.zeros(300, 400)
        gc.collect()
        assert kept() is not None
    handle.staged.result(20)
    assert checkpointer.wait()
    gc.collect()
    assert kept() is None, "and no longer"
    assert torch.equal(checkpointer.load_all()["w"], state(2)["w"])


def test_whatever_changes_weights_waits_for_the_copy(job):
    daemon, checkpointer = job
    mine = state(2)
    with Held(daemon) as held:
        handle = checkpointer.save(2, mine)
        held.for_a(0.5)
        with checkpointer.step(3):
            assert handle.staged.done()
            mine["w"].zero_()
    assert checkpointer.wait()
    same(checkpointer.load_all(), state(2))
    with Held(daemon) as held:
        third = checkpointer.save(3, state(3))
        held.for_a(0.5)
        assert checkpointer.wait("staged") and third.staged.done()
    assert checkpointer.wait()
    into = state(0)
    with Held(daemon) as held:
        fourth = checkpointer.save(4, state(4))
        held.for_a(0.5)
        assert checkpointer.load(into)["step"] == 4 and fourth.staged.done()
    same(into, state(4))
    with Held(daemon) as held:
        fifth = checkpointer.save(5, state(5))
        held.for_a(0.5)
        checkpointer.save(6, state(6), background=False)
        assert fifth.committed.result(20) and checkpointer._last.copied.is_set()
    assert checkpointer.wait()
    with Held(daemon) as held:
        last = checkpointer.save(7, state(7))
        held.for_a(0.5)
        checkpointer.close()
        assert last.staged.done() and last.saved.exception() is None


def test_one_save_may_be_in_the_background_and_others_not(session):
    with Checkpointer(session=session) as checkpointer:
        assert checkpointer.save(1, state(1)).staged.done()
        handle = checkpointer.save(2, state(2), background=True)
        handle.staged.result(20)
        assert checkpointer.wait()
        same(checkpointer.load_all(), state(2))


def test_the_first_save_makes_its_slots_in_the_background_too(session):
    with Checkpointer(session=session, background=True) as checkpointer:
        future = checkpointer.prepare(state(1))
        handle = checkpointer.save(1, state(1))
        handle.staged.result(20)
        assert future.done() and checkpointer.wait()
        run = handle.run
        assert checkpointer.save(2, state(2)).run == run and checkpointer.wait()
        same(checkpointer.load_all(), state(2))


def test_a_copy_that_fails_is_told_by_the_handle_and_once_by_the_next_call(daemons):
    daemon = daemons(budget="16MiB")
    with Checkpointer(session=daemon.session(), background=True, timeout=10) as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.wait()
        handle = checkpointer.save(2, {"w": torch.zeros(16 << 20)})
        assert isinstance(handle.staged.exception(20), errors.ArenaTooSmall)
        assert isinstance(handle.committed.exception(20), errors.ArenaTooSmall)
        with pytest.raises(errors.CheckpointSaveError, match="step 2 .*ArenaTooSmall"):
            checkpointer.save(3, state(3))
        assert checkpointer.failed_saves == 1 and checkpointer.wait() and checkpointer.latest_step() == 3
        checkpointer.save(4, {"w": torch.zeros(16 << 20)})
        with pytest.raises(errors.CheckpointSaveError, match="step 4"):
            checkpointer.wait("staged")
        assert checkpointer.failed_saves == 2


def test_what_cannot_be_saved_is_refused_at_the_call(session):
    with Checkpointer(session=session, background=True) as checkpointer:
        with pytest.raises(errors.UnsavableState, match="model"):
            checkpointer.save(1, {"model": {"w": object()}})
        with pytest.raises(errors.InvalidArgument):
            checkpointer.save(1, [torch.zeros(3)])
        checkpointer.save(1, state(1))
        assert checkpointer.wait()


def test_a_daemon_that_is_stopped_costs_the_step_and_no_torn_one(daemons):
    daemon = daemons()
    checkpointer = Checkpointer(session=daemon.session(), background=True, on_error="warn")
    checkpointer.save(1, state(1))
    assert checkpointer.wait()
    checkpointer.timeout = 2
    with checkpointer.step(2):
        mine = state(2)
    with Held(daemon):
        handle = checkpointer.save(2, mine)
        started = time.monotonic()
        with checkpointer.step(3):
            mine["w"].zero_()
        assert 1 < time.monotonic() - started < 20
        assert isinstance(handle.staged.exception(3), errors.StoragedError)
        assert not checkpointer.wait("staged") and checkpointer.failed_saves == 1
    checkpointer.timeout = 60
    assert checkpointer.save(3, state(3)) and checkpointer.wait() and checkpointer.latest_step() == 3
    checkpointer.close()


@pytest.mark.parametrize("goes_on", ["to its update", "to the next save", "to the end"])
def test_training_that_does_not_wait_any_longer_ends_the_save(session, monkeypatch, goes_on):
    """The copy itself may hang, on storage that is far away, say."""
    import storaged.torch._writer as writer

    real = writer.captured

    def slow(*arguments):
        stage = real(*arguments)
        return lambda: (time.sleep(3), stage())[1]

    with Checkpointer(session=session, on_error="warn", background=True) as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.wait()
        checkpointer.timeout = 1
        monkeypatch.setattr(writer, "captured", slow)
        mine = state(2)
        save = checkpointer.save(2, mine)
        if goes_on == "to its update":
            with checkpointer.step(3):
                mine["w"].zero_()
        elif goes_on == "to the next save":
            assert isinstance(checkpointer.save(3, mine).staged.exception(), errors.WaitTimeout)
            mine["w"].zero_()
        else:
            checkpointer.close()
            mine["w"].zero_()
        monkeypatch.undo()
        assert "were not copied in time" in str(save.saved.exception(20))
    with Checkpointer(session=session) as after:
        assert after.latest_step() == 1


def test_a_hook_hears_of_the_copy_when_it_has_ended(job):
    daemon, checkpointer = job
    heard = []
    checkpointer._events._hook = heard.append
    with Held(daemon):
        checkpointer.save(2, state(2))
        time.sleep(0.2)
        assert heard == []
    assert checkpointer.wait()
    assert [event.name for event in heard] == ["storaged.save.staged", "storaged.save.ended"]
    assert heard[0].attributes["bytes"] > 480_000 and heard[0].seconds > 0.2


RANKS = """
checkpointer = Checkpointer(timeout=4, on_error="warn", background=True)
for step in range(1, 4):
    mine = state(step)
    socket = checkpointer.session.socket
    if step == 2 and rank == 1:
        mine["large"] = torch.zeros(200 << 20, dtype=torch.uint8)
    dist.barrier()
    attempt(checkpointer.save, step, mine)
    if checkpointer.wait("staged"):
        mine[f"w{rank}"].fill_(-1)
    said.append([step, checkpointer.wait(), checkpointer.failed_saves, str(checkpointer.last_error)])
into = state(0)
said.append([checkpointer.load(into)["step"], into[f"w{rank}"][0].item()])
checkpointer.close()
"""


def test_a_copy_that_fails_on_one_rank_drops_the_step_on_all(daemons, tmp_path):
    daemon = daemons(budget="128MiB")
    said, errors_of = run_ranks(tmp_path, [daemon.socket] * 2, RANKS, limit=100)
    assert all(said), errors_of
    for rank, one in enumerate(said):
        saves, ends = one[0:6:2], one[1:6:2]
        assert all(kind == "ok" for kind, _, _ in saves), one
        assert [end[1] for end in ends] == [True, False, True], one
        assert ends[1][2] == 1 and "rank 1" in ends[1][3] and "ArenaTooSmall" in ends[1][3], one
        assert one[6] == [3, 30.0 + rank], one
