"""`os.fork` between two saves: what a child may do, and that its parent goes on as if there were none. A real daemon."""

import os
import threading
import time
import traceback

import pytest
import torch
from storaged import errors
from storaged.torch import Checkpointer
from test_background import Held


def state(step):
    return {"w": torch.arange(10_000.0) + step, "step": step}


def in_a_child(body):
    """Whether it came to its end there."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def saved(checkpointer, step):
    checkpointer.save(step, state(step))
    return checkpointer.wait() and torch.equal(checkpointer.load_all()["w"], state(step)["w"])


@pytest.mark.parametrize("background", [False, True])
def test_a_child_saves_and_loads_under_a_job_of_its_own(daemons, background):
    daemon = daemons()
    session = daemon.session()
    with Checkpointer(session=session, background=background) as checkpointer:
        assert saved(checkpointer, 1)

        def child():
            with Checkpointer(session=daemon.session("child"), background=background) as own:
                assert own.load_all() is None
                assert saved(own, 5) and saved(own, 6)

        for step in (2, 3):
            checkpointer.save(step, state(step))
            assert in_a_child(child) if step == 2 else True
            assert checkpointer.wait() and checkpointer.failed_saves == 0
        run = session.run_of(checkpointer._key)
        assert saved(checkpointer, 4) and {info.run for info in checkpointer.list()} == {run}
        assert [info.step for info in Checkpointer(session=daemon.session("child")).list()][-1] == 6


def test_a_child_that_saves_as_its_parents_rank_takes_part_in_its_run(daemons):
    """Both are that rank: steps ascend over both, and who comes too late hears of it."""
    session = daemons().session()
    with Checkpointer(session=session, timeout=10) as checkpointer:
        assert saved(checkpointer, 1)

        def child():
            with Checkpointer(session=session, timeout=10) as own:
                assert own.load_all()["step"] == 1
                assert saved(own, 3)

        assert in_a_child(child)
        checkpointer.save(2, state(2))
        with pytest.raises(errors.CheckpointSaveError, match="step 2"):
            checkpointer.wait()
        assert torch.equal(checkpointer.load_all()["w"], state(3)["w"])
        assert saved(checkpointer, 4) and len({info.run for info in checkpointer.list()}) == 1


@pytest.mark.parametrize("saving", [False, True])
def test_the_checkpointer_of_a_parent_is_refused_at_once(daemons, saving):
    """Its threads are not there, and its connection to the other ranks is the parent's."""
    daemon = daemons()
    with Checkpointer(session=daemon.session(), timeout=60, background=True) as checkpointer:
        assert saved(checkpointer, 1)

        def child():
            started = time.monotonic()
            for call in (
                lambda: checkpointer.save(2, state(2)), lambda: checkpointer.load(state(0)), lambda: checkpointer.prepare(state(0)),
                checkpointer.load_all, checkpointer.latest_step, checkpointer.list, checkpointer.verdict, lambda: checkpointer.step(3),
            ):
                with pytest.raises(errors.CheckpointerClosed, match="fork"):
                    call()
            assert checkpointer.wait()
            checkpointer.close()
            assert time.monotonic() - started < 10

        if saving:
            with Held(daemon):
                checkpointer.save(2, state(2))
                assert in_a_child(child)
            assert checkpointer.wait()
        else:
            assert in_a_child(child)
        assert saved(checkpointer, 3) and checkpointer.failed_saves == 0


def test_a_lock_that_another_thread_held_at_the_fork_holds_no_child_up(daemons):
    session = daemons().session(timeout=30)
    with Checkpointer(session=session) as checkpointer:
        assert saved(checkpointer, 1)
        entered, leave = threading.Event(), threading.Event()

        def hold():
            with session._lock:
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait()

        def child():
            started = time.monotonic()
            with Checkpointer(session=session, alone=True) as own:
                assert own.load_all()["step"] == 1 and time.monotonic() - started < 10

        try:
            assert in_a_child(child)
        finally:
            leave.set()
            thread.join()
        assert saved(checkpointer, 2)
