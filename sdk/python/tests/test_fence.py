"""Step fences: what a process holds after a fault, told by marks that outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from daemon import PACKAGE, run_ranks
from storaged._deadline import Deadline
from storaged.errors import CheckpointLoadError, NoCheckpointError, WaitTimeout
from storaged.torch import Checkpointer
from storaged.torch._fence import Fence, Live, judged, last_mark

HERE = Path(__file__).resolve().parent


def state(step):
    return {"w": torch.full((100,), float(step)), "step": step}


def test_verdicts_on_what_ranks_hold():
    whole, torn, lost, unmarked = (Live.WHOLE, 7), (Live.TORN, 8), (Live.LOST, 7), (Live.UNMARKED, 0)
    assert str(judged([whole, whole], 5)) == "recover-in-place step 7: all of 2 ranks hold it whole"
    assert str(judged([whole, torn], 5)) == "restore step 5: rank 1 was in the middle of step 8"
    assert str(judged([lost, whole], 5)) == "restore step 5: rank 0 has lost its process, last at step 7"
    assert str(judged([whole, (Live.WHOLE, 8)], 5)) == "restore step 5: rank 0 is at step 7, rank 1 is at step 8"
    assert str(judged([unmarked], None)) == "nothing: rank 0 has marked no step; nothing was saved yet"
    assert judged([torn] * 9, 1).reason.endswith("and 4 more")


def test_a_step_is_whole_once_it_has_ended(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        assert checkpointer.verdict().action == "nothing"
        with checkpointer.step(1):
            assert checkpointer.verdict().action == "nothing", "in the middle of it"
        assert str(checkpointer.verdict()) == "recover-in-place step 1: all of 1 ranks hold it whole"
        checkpointer.save(1, state(1))
        checkpointer.wait()
        with pytest.raises(ZeroDivisionError), checkpointer.step(2):
            raise ZeroDivisionError
        verdict = checkpointer.verdict()
        assert (verdict.action, verdict.step) == ("restore", 1) and "in the middle of step 2" in verdict.reason
        checkpointer.load(state(0))
        assert checkpointer.verdict().step == 1 and checkpointer.verdict().action == "recover-in-place"


def test_a_load_that_fails_leaves_no_whole_state(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        with checkpointer.step(2):
            pass
        with pytest.raises(CheckpointLoadError):
            checkpointer.load({"w": torch.zeros(3)})
        assert checkpointer.verdict().action == "restore"


def test_what_load_all_gave_may_be_in_memory(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        with checkpointer.step(2):
            pass
        assert checkpointer.load_all() is None
        assert checkpointer.verdict().step == 2, "nothing was given"
        checkpointer.save(1, state(1))
        checkpointer.wait()
        with pytest.raises(NoCheckpointError):
            checkpointer.load_all(7)
        assert checkpointer.verdict().action == "recover-in-place", "nothing was given"
        weights = state(2)
        weights.update(checkpointer.load_all())
        verdict = checkpointer.verdict()
        assert (verdict.action, verdict.step) == ("restore", 1), verdict
        with checkpointer.step(2):
            pass
        assert (checkpointer.verdict().action, checkpointer.verdict().step) == ("recover-in-place", 2)
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.load_all()
        assert checkpointer.verdict().action == "restore", "the mark was the earlier one's"
        checkpointer.load(state(0))
        assert (checkpointer.verdict().action, checkpointer.verdict().step) == ("recover-in-place", 1)


@pytest.mark.parametrize("load", [lambda one: one.load(state(0)), lambda one: one.load_all()])
def test_a_load_whose_marks_did_not_come_leaves_no_earlier_mark(session, monkeypatch, load):
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        with checkpointer.step(2):
            pass

    def silent(*_):
        raise WaitTimeout("expected an answer, got none")

    with Checkpointer(session=session, alone=True) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr("storaged.torch._fence.Board", silent)
            load(checkpointer)
        assert checkpointer.verdict().action == "restore"
        with checkpointer.step(2):
            pass
        assert checkpointer.verdict().action == "recover-in-place"


def test_the_next_checkpointer_of_the_process_goes_on_with_its_marks(session):
    for step in (1, 2):
        with Checkpointer(session=session, alone=True) as checkpointer, checkpointer.step(step):
            pass
    with Checkpointer(session=session, alone=True) as checkpointer:
        assert checkpointer.verdict().step == 2


class Silent:
    """A session whose daemon waits for its durable tier for as long as anybody asks."""

    namespace = "silent"

    def __init__(self):
        self.waited = 0.0

    def connect(self, limit):
        self.waited += limit.left()
        time.sleep(limit.left())
        raise WaitTimeout("expected an answer to hello, got none")


def test_marks_that_do_not_come_leave_a_load_its_time():
    session, deadline = Silent(), Deadline(1.0)
    with Fence(session, 0, 1, 1.0).loading(deadline) as plan:
        assert plan == {}
    assert session.waited <= 0.25 and deadline.left() > 0.5


def test_a_connection_without_time_says_so_and_nothing_of_the_daemon(daemons):
    daemon = daemons()
    with pytest.raises(WaitTimeout, match=r"no time is left for connecting to the daemon: the limit of 0 s is used up"):
        daemon.session().connect(Deadline(0))


def test_without_a_daemon_training_goes_on_unmarked(daemons, caplog):
    daemon = daemons()
    daemon.kill()
    with Checkpointer(session=daemon.session(), alone=True, on_error="warn") as checkpointer:
        for step in (1, 2):
            with checkpointer.step(step):
                pass
    assert caplog.text.count("not marked") == 1


def test_a_mark_that_was_torn_leaves_the_one_before(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        with checkpointer.step(1):
            pass
        view = checkpointer._fence._board.view
        assert last_mark(view)[:3] == (2, 1, True)
        view[5] ^= 1  # the second mark is in the first cell
        assert last_mark(view)[:3] == (1, 1, False)
        assert checkpointer.verdict().action == "nothing"


TRAINER = """
import os, sys, time
import torch
from storaged.torch import Checkpointer
checkpointer = Checkpointer(alone=True)
print("VERDICT", checkpointer.verdict(), flush=True)
weights = {"w": torch.zeros(200_000), "step": 0}
found = checkpointer.load(weights)
first = weights["step"] + 1 if found else 1
said = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for step in range(first, 100_000):
    with checkpointer.step(step):
        os.write(said, f"begin {step}\\n".encode())
        weights["w"] += 1
    os.write(said, f"end {step}\\n".encode())
    weights["step"] = step
    if step % 10 == 0:
        checkpointer.save(step, weights)
"""


def test_killed_trainers_leave_word_of_the_step_they_were_in(shared_daemon, tmp_path):
    script, log = tmp_path / "trainer.py", tmp_path / "log"
    script.write_text(TRAINER)
    environment = os.environ | {
        "STORAGED_SOCKET": str(shared_daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": "fence-kills",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]), "OMP_NUM_THREADS": "1",
    }
    for round_ in range(4):
        worker = subprocess.Popen([sys.executable, str(script), str(log)], env=environment, stdout=subprocess.PIPE, text=True)
        told = worker.stdout.readline()
        if round_ == 0:
            assert told == "VERDICT nothing: rank 0 has marked no step; nothing was saved yet\n"
        else:
            words, last = log.read_text().split()[-2:]
            # The mark is made just before and just after what the process wrote down.
            steps = {f"rank 0 has lost its process, last at step {at}" for at in (int(last), int(last) + 1)}
            assert told.startswith("VERDICT restore step ") and any(one in told for one in steps), (told, words, last)
        began = log.stat().st_size if log.exists() else 0
        limit = time.monotonic() + 60
        while (log.stat().st_size if log.exists() else 0) < began + 700 * (round_ + 1):
            assert worker.poll() is None and time.monotonic() < limit
            time.sleep(0.002)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=30)


RANKS = """
checkpointer = Checkpointer(timeout=20)
say = lambda: said.append(str(checkpointer.verdict()))
say()
with checkpointer.step(1):
    pass
say()
checkpointer.save(1, state(1))
checkpointer.wait()
try:
    with checkpointer.step(2):
        if rank == 1:
            raise OSError("a fault")
except OSError:
    pass
say()
checkpointer.close()
"""


def test_all_ranks_hear_the_same_verdict(daemons, tmp_path):
    daemon = daemons()
    (first, second), errors = run_ranks(tmp_path, [daemon.socket] * 2, RANKS)
    assert first == second, errors
    assert first == [
        "nothing: rank 0 has marked no step, rank 1 has marked no step; nothing was saved yet",
        "recover-in-place step 1: all of 2 ranks hold it whole",
        "restore step 1: rank 1 was in the middle of step 2",
    ]



def test_a_mark_of_a_larger_group_is_no_state_of_this_one(session):
    before = Fence(session, 0, 3, 20.0)
    with before.step(7):
        pass
    assert before.live(session.deadline()) == (Live.WHOLE, 7)
    assert Fence(session, 0, 2, 20.0).live(session.deadline()) == (Live.ELSEWHERE, 7)
    verdict = judged([(Live.ELSEWHERE, 7), (Live.ELSEWHERE, 7)], 5)
    assert (verdict.action, verdict.step) == ("restore", 5)


def test_a_load_of_the_next_checkpointer_takes_the_earlier_ones_mark_down(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        with checkpointer.step(2):
            pass
    with Checkpointer(session=session, alone=True) as checkpointer:
        with pytest.raises(CheckpointLoadError):
            checkpointer.load({"w": torch.zeros(3)})
        assert checkpointer.verdict().action == "restore"
        checkpointer.load(state(0))
        assert (checkpointer.verdict().action, checkpointer.verdict().step) == ("recover-in-place", 1)


def test_steps_are_marked_on_a_new_board_where_the_daemon_gave_the_old_one_up(daemons, monkeypatch):
    monkeypatch.setattr("storaged._board.LOOK_EVERY", 0.1)
    daemon = daemons()
    session = daemon.session()
    fence = Fence(session, 0, 1, 20.0)
    with fence.step(1):
        pass
    daemon.kill()
    daemon.start()
    deadline = time.monotonic() + 20
    step = 1
    while Fence(session, 0, 1, 20.0).live(session.deadline())[0] is Live.UNMARKED and time.monotonic() < deadline:
        time.sleep(0.1)
        step += 1
        with fence.step(step):
            pass
    assert Fence(session, 0, 1, 20.0).live(session.deadline()) == (Live.WHOLE, step) == fence.live(session.deadline())
    daemon.stop()
    time.sleep(0.2)
    began = time.monotonic()
    for _ in range(5):
        time.sleep(0.1)
        step += 1
        with fence.step(step):
            pass
    assert time.monotonic() - began < 10, "a mark waits for no answer"
    daemon.go_on()
    assert Fence(session, 0, 1, 20.0).live(session.deadline()) == (Live.WHOLE, step)
