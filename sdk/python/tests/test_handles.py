"""What a save hands back, what is made ahead of it, and what a job does when it is ended: against a real daemon."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from daemon import PACKAGE, run_ranks
from storaged import errors
from storaged.torch import Checkpointer, Event, progress_bar


def state(step):
    return {"w": torch.full((50_000,), float(step)), "step": step}


def test_futures_can_be_waited_for_and_awaited(session):
    with Checkpointer(session=session, durable="required") as checkpointer:
        handle = checkpointer.save(1, state(1))
        assert handle.committed.result(30) in ("committed", "protected", "durable")
        assert handle.durable.result(60) == "durable"

        async def save():
            second = checkpointer.save(2, state(2))
            return await second.staged, await second, await second.durable

        staged, committed, durable = asyncio.run(save())
        assert staged is None and committed in ("committed", "protected", "durable") and durable == "durable"


def test_futures_of_a_save_that_fails_have_its_error(daemons):
    daemon = daemons(budget="8MiB")
    checkpointer = Checkpointer(session=daemon.session(), timeout=2, on_error="warn")
    handle = checkpointer.save(1, {"w": torch.zeros(8 << 20)})
    assert isinstance(handle.committed.exception(20), errors.ArenaTooSmall)
    with pytest.raises(errors.ArenaTooSmall):
        asyncio.run(wait_for(handle))
    checkpointer.close()


async def wait_for(handle):
    return await handle


def test_what_there_is_is_listed(session):
    with Checkpointer(session=session, durable="required") as checkpointer:
        assert checkpointer.list() == []
        for step in (1, 2):
            checkpointer.save(step, state(step))
            assert checkpointer.wait("durable")
        listed = checkpointer.list()
    assert listed[-1].step == 2 and listed[-1].world_size == 1  # a daemon may have dropped older ones from RAM
    assert listed[-1].is_durable and listed[-1].nbytes > 200_000


def test_slots_are_made_ahead(session):
    with Checkpointer(session=session) as checkpointer:
        large = {"w": torch.ones(4 << 20), "rng": b"x", "step": 1}
        assert checkpointer.prepare(large).result(60) >= 2 * (16 << 20)
        trainer = checkpointer.session.trainer(checkpointer.session.run_of(checkpointer._key), 0, 1)
        asked = checkpointer.save(1, large)
        assert checkpointer.wait() and asked.run is not None
        # The same connection, which keeps the slots mapped, and the same structure.
        assert checkpointer.session.trainer(asked.run, 0, 1) is trainer
        assert checkpointer.load_all()["w"].sum() == 4 << 20
        large["w"].zero_()
        assert checkpointer.save(2, large) and checkpointer.wait() and checkpointer._memory.again == 1
        assert checkpointer.load_all()["w"].sum() == 0


def test_a_load_makes_the_slots_of_the_next_save_if_it_is_asked_to(session, monkeypatch):
    def large(value):
        return {"w": torch.full((4 << 20,), value), "step": 1}

    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, large(1.0))
        assert checkpointer.wait()
    reads = Checkpointer(session=session)
    assert reads.load(large(0.0))["step"] == 1 and reads._prepared is None
    session.forget_run(reads._key)
    assert reads.load_all() is not None and session.run_of(reads._key) is None, "who only reads must not end another's saves"

    acquired, connect = [], session.trainer
    monkeypatch.setattr(session, "trainer", lambda *arguments: Watched(connect(*arguments), acquired))
    resumes, again = Checkpointer(session=session, ahead="load"), large(0.0)
    assert resumes.load(again)["step"] == 1 and resumes._prepared.result(60) >= 2 * (16 << 20)
    made = set(acquired)
    acquired.clear()
    assert resumes.save(2, again) is not None and resumes.wait()
    assert len(made) == 2 and set(acquired) <= made
    resumes.close()


def test_slots_are_made_after_the_first_step_of_an_optimizer(session, caplog):
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    made = []

    def state():
        made.append({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
        return made[-1]

    def fails():
        raise RuntimeError("no state yet")

    def step():
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()

    with Checkpointer(session=session) as checkpointer:
        checkpointer.watch(optimizer, state)
        assert checkpointer._prepared is None and session.run_of(checkpointer._key) is None
        step()
        # Weights and both moments, in two slots.
        assert checkpointer._prepared.result(60) >= 2 * 3 * (4 << 20)
        step()
        assert len(made) == 1
        checkpointer.save(1, state())
        assert checkpointer.wait() and torch.equal(checkpointer.load_all()["model"]["weight"], model.weight)
        checkpointer.watch(optimizer, fails)
        step()
        assert "nothing is made ahead: RuntimeError: no state yet" in caplog.text


class Watched:
    """A connection that notes which slots it gets."""

    def __init__(self, trainer, acquired):
        self._trainer, self._acquired = trainer, acquired

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def acquire(self, *arguments):
        slot = self._trainer.acquire(*arguments)
        self._acquired.append(slot.id)
        return slot


def test_states_that_are_asked_for_are_asked_in_the_callers_thread(session):
    class State:
        def state_dict(self):
            threads.append(threading.current_thread())
            return {"w": torch.zeros(3)}

        def load_state_dict(self, state):
            pass

    threads = []
    with Checkpointer(session=session) as checkpointer:
        checkpointer.prepare({"model": State()}).result(60)
        assert set(threads) == {threading.current_thread()}, "what gives a state may be collective"


def test_nothing_is_raised_where_nothing_can_be_made_ahead(daemons):
    daemon = daemons(budget="8MiB")
    with Checkpointer(session=daemon.session(), timeout=3) as checkpointer:
        assert checkpointer.prepare({"w": torch.zeros(8 << 20)}).result(20) == 0
        checkpointer.save(1, state(1))
        assert checkpointer.wait()
        daemon.kill()
        assert checkpointer.prepare(state(2)).result(20) == 0


def test_a_hook_hears_what_happens_and_cannot_stop_it(session, caplog):
    heard = []

    def hook(event: Event):
        heard.append(event)
        if event.name == "storaged.load":
            raise RuntimeError("the hook's own trouble")

    with Checkpointer(session=session, events=hook) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        checkpointer.load(state(0))
    names = [event.name for event in heard]
    assert names == ["storaged.save.staged", "storaged.save.ended", "storaged.load"]
    assert heard[0].attributes == {"namespace": session.namespace, "rank": 0, "step": 1, "bytes": 200_000}
    assert all(event.seconds >= 0 and event.began <= time.time() for event in heard)
    assert "the hook for events failed" in caplog.text


def test_a_hook_hears_how_far_a_load_is(session, monkeypatch, caplog):
    monkeypatch.setattr("storaged.torch._progress.EVERY_BYTES", 300_000)
    heard = []
    large = {"a": torch.arange(250_000.0), "b": torch.arange(90_000.0).view(300, 300), "step": 3}
    with Checkpointer(session=session, progress=lambda *told: heard.append(told)) as checkpointer:
        checkpointer.save(1, large)
        assert checkpointer.wait()
        into = {"a": torch.zeros(250_000), "b": torch.zeros(300, 300), "step": 0}
        checkpointer.load(into)
    assert torch.equal(into["a"], large["a"]) and torch.equal(into["b"], large["b"])
    done, totals = [one for one, _ in heard], {total for _, total in heard}
    assert done[0] == 0 and done == sorted(done) and totals == {done[-1]} and done[-1] > 1_360_000 and len(done) >= 6

    def fails(done, total):
        heard.append(done)
        raise RuntimeError("the hook's own trouble")

    heard.clear()
    with Checkpointer(session=session, progress=fails) as checkpointer:
        assert checkpointer.load(into)["step"] == 1
    assert heard == [0] and "the hook for progress failed" in caplog.text


def test_a_bar_is_drawn_where_tqdm_is(session, capsys):
    with Checkpointer(session=session, progress=progress_bar("here")) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        for _ in range(2):
            checkpointer.load(state(0))
    drawn = capsys.readouterr().err
    if importlib.util.find_spec("tqdm") is None:
        assert drawn == ""
    else:
        assert drawn.count("here: 100%") == 2


@pytest.mark.parametrize("save_on_term", [True, False])
def test_sigterm_alone(session, save_on_term):
    with Checkpointer(session=session, save_on_term=save_on_term) as checkpointer:
        if not save_on_term:
            checkpointer.on_sigterm()
        assert not checkpointer.is_last_step(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.is_last_step(2) and checkpointer.is_last_step(3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# A second signal comes in each line of what the first one runs.
SIGNALLED_TWICE = """
import os, signal, sys
from storaged.torch._ahead import Termination
termination = Termination(None, None)
termination.listen()
sent = 0
def trace(frame, event, argument):
    global sent
    if sent < 20 and any(file in frame.f_code.co_filename for file in ("_ahead", "threading")):
        sent += 1
        signal.raise_signal(signal.SIGTERM)
    return trace
sys.settrace(trace)
os.kill(os.getpid(), signal.SIGTERM)
sys.settrace(None)
assert termination.came and sent > 0
print("went on")
"""


def test_a_second_sigterm_while_the_first_is_handled_stops_nothing():
    ran = subprocess.run([sys.executable, "-c", SIGNALLED_TWICE], env=os.environ | {"PYTHONPATH": str(PACKAGE)}, capture_output=True, timeout=60)
    assert ran.stdout == b"went on\n", ran.stderr.decode()


ENDED = """
checkpointer = Checkpointer(timeout=20)
checkpointer.on_sigterm()
last = None
for step in range(1, 40):
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    if checkpointer.is_last_step(step):
        last = step
        attempt(checkpointer.save, step, state(step))
        attempt(checkpointer.wait)
        break
said.append(["last", last, checkpointer.latest_step()])
checkpointer.close()
"""


def test_sigterm_on_one_rank_saves_the_same_step_on_all(daemons, tmp_path):
    daemon = daemons()
    said, errors_of = run_ranks(tmp_path, [daemon.socket] * 3, ENDED, limit=200)
    assert all(said), errors_of
    ends = [one[-1] for one in said]
    assert ends[0][1] is not None and 5 <= ends[0][1] < 39, said
    assert all(end == ["last", ends[0][1], ends[0][1]] for end in ends), said
