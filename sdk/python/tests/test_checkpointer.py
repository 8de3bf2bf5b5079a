"""`Checkpointer` against a real daemon: first start, failures that must not stop training, limits, going back."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from daemon import HERE, PACKAGE, cluster
from storaged import Session, errors
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter

LIMIT = 1.0
#: What a busy machine may need for a save that must succeed.
PATIENT = 60.0
DURABLE = '[durable]\nkind = "directory"\npath = "TIER"\n'
#: What a call may take beyond its limit.
GRACE = 1.0


def state(step):
    return {"w": torch.full((50_000,), float(step)), "step": step}


def timed(call, *arguments, **named):
    started = time.monotonic()
    try:
        return call(*arguments, **named), time.monotonic() - started
    except errors.StoragedError as error:
        return error, time.monotonic() - started


def loaded(checkpointer, **named):
    into = state(0)
    plan = checkpointer.load(into, **named)
    return plan and plan["step"], into


def test_a_new_job_has_nothing_to_load(session):
    with Checkpointer(session=session) as checkpointer:
        assert checkpointer.load(state(0)) is None
        assert checkpointer.latest_step() is None
        with pytest.raises(errors.NoCheckpointError):
            checkpointer.load(state(0), step=9)
        checkpointer.save(1, state(1))
    with Checkpointer(session=session) as checkpointer:
        assert checkpointer.latest_step() == 1
        step, into = loaded(checkpointer)
        assert step == 1 and into["step"] == 1 and torch.equal(into["w"], state(1)["w"])


def test_a_save_returns_once_staged_and_the_next_call_says_how_it_ended(session):
    with Checkpointer(session=session) as checkpointer:
        tensors = state(1)
        handle = checkpointer.save(1, tensors)
        assert handle.staged.done() and handle.staged.exception() is None
        tensors["w"].zero_()
        assert handle.wait() == "committed" and checkpointer.wait()
        assert torch.equal(loaded(checkpointer)[1]["w"], state(1)["w"])


def saved_once(daemon, on_error):
    """A checkpointer that has saved step 1 and has LIMIT for whatever comes next."""
    checkpointer = Checkpointer(session=daemon.session(), timeout=PATIENT, on_error=on_error)
    checkpointer.save(1, state(1))
    assert checkpointer.wait()
    checkpointer.timeout = LIMIT
    return checkpointer


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_killed_daemon(daemons, caplog, on_error):
    daemon = daemons()
    checkpointer = saved_once(daemon, on_error)
    daemon.kill()
    outcomes = [timed(checkpointer.save, step, state(step)) for step in (2, 3, 4)]
    assert all(took < LIMIT + GRACE for _, took in outcomes)
    if on_error == "raise":
        assert all(isinstance(outcome, errors.CheckpointSaveError) for outcome, _ in outcomes)
        assert [outcome.step for outcome, _ in outcomes] == [2, 3, 4]
    else:
        assert all(isinstance(outcome.staged.exception(), errors.DaemonUnavailable) for outcome, _ in outcomes)
    assert checkpointer.failed_saves == 3 and isinstance(checkpointer.last_error.__cause__, errors.DaemonUnavailable)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and "was not saved" in r.getMessage()]) == 3
    daemon.start()
    checkpointer.timeout = PATIENT
    assert restored_soon(checkpointer, 5)
    checkpointer.close()


def test_one_save_is_lost_with_a_daemon_that_ends_in_the_middle_of_it(daemons, monkeypatch):
    daemon = daemons()
    seal = StoragedWriter._seal

    def back_again():
        time.sleep(1.5)
        daemon.start()

    def end_first(writer, shard):
        if writer.step == 2:
            daemon.kill()
            threading.Thread(target=back_again).start()
        seal(writer, shard)

    monkeypatch.setattr(StoragedWriter, "_seal", end_first)
    with Checkpointer(session=daemon.session(), timeout=10, on_error="warn") as checkpointer:
        outcomes = []
        for step in range(1, 6):
            checkpointer.save(step, state(step))
            outcomes.append(checkpointer.wait())
        # The one whose slot went with the daemon, and the one that is told that the daemon knows the run no more.
        assert outcomes == [True, False, False, True, True], checkpointer.last_error
        assert loaded(checkpointer)[0] == 5


def restored_soon(checkpointer, first):
    """A daemon that was restarted may not know the run any more: the save after the one that hears so opens a new one."""
    for step in range(first, first + 3):
        try:
            checkpointer.save(step, state(step))
            if checkpointer.wait():
                return checkpointer.latest_step() == step
        except errors.CheckpointSaveError:
            pass
    return False


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_stopped_daemon_costs_the_limit(daemons, on_error):
    daemon = daemons()
    checkpointer = saved_once(daemon, on_error)
    daemon.stop()
    calls = [
        lambda: checkpointer.save(2, state(2)),
        lambda: checkpointer.save(3, state(3)),
        checkpointer.latest_step,
        lambda: checkpointer.load(state(0)),
        lambda: Checkpointer(session=daemon.session(), timeout=LIMIT).latest_step(),
        lambda: checkpointer.save(4, state(4)).wait(timeout=LIMIT),
    ]
    for number, call in enumerate(calls):
        outcome, took = timed(call)
        assert took < LIMIT + GRACE, (number, took, outcome)
        if on_error == "raise" or number in (2, 3, 4, 5):
            assert isinstance(outcome, errors.StoragedError), number
    assert checkpointer.failed_saves == 3
    daemon.go_on()
    checkpointer.timeout = PATIENT
    checkpointer.save(5, state(5))
    assert checkpointer.wait() and checkpointer.latest_step() == 5
    checkpointer.close()


def test_a_daemon_that_stops_after_staging_costs_the_next_save_the_limit(daemons):
    daemon = daemons()
    checkpointer = saved_once(daemon, "warn")
    checkpointer.save(2, state(2))
    daemon.stop()
    _, took = timed(checkpointer.wait)
    assert took < LIMIT + GRACE
    _, took = timed(checkpointer.save, 3, state(3))
    assert took < LIMIT + GRACE
    daemon.go_on()
    checkpointer.close()


def test_a_full_budget_lets_training_go_on(daemons):
    daemon = daemons(budget="8MiB")
    checkpointer = Checkpointer(session=daemon.session(), timeout=PATIENT, on_error="warn")
    large = {"w": torch.zeros(8 << 20)}
    handle = checkpointer.save(1, large)
    assert isinstance(handle.staged.exception(), errors.ArenaTooSmall)
    assert checkpointer.failed_saves == 1 and not checkpointer.load(state(0))
    checkpointer.save(2, state(2))
    assert checkpointer.wait() and checkpointer.failed_saves == 1
    checkpointer.close()


def test_a_durable_tier_that_cannot_be_read_is_not_nothing_saved(daemons):
    daemon = daemons(DURABLE)
    with Checkpointer(session=daemon.session(), durable="required") as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.wait("durable")
    daemon.kill()
    daemon.start()
    away = daemon.tier.rename(daemon.tier.with_name("away"))
    daemon.tier.write_text("no directory")
    checkpointer = Checkpointer(session=daemon.session(), timeout=10, on_error="warn")
    for call in (checkpointer.latest_step, lambda: checkpointer.load(state(0))):
        with pytest.raises(errors.DurableTierError):
            call()
    # The daemon lets nobody in for 3 s of this: there is time left to ask for a plan.
    with pytest.raises(errors.DurableTierError):
        Checkpointer(session=daemon.session(), timeout=6, on_error="warn").load(state(0))
    daemon.tier.unlink()
    away.rename(daemon.tier)
    assert loaded(Checkpointer(session=daemon.session()))[0] == 1


def test_an_older_step_is_loaded_only_if_it_is_allowed(tmp_path):
    nodes = cluster(tmp_path, 3, 2, 1, DURABLE)
    try:
        checkpointer = Checkpointer(session=nodes[0].session(), durable="required", timeout=60)
        checkpointer.save(1, state(1))
        assert checkpointer.wait("durable")
        checkpointer.durable = "never"
        handle = checkpointer.save(2, state(2))
        # None: this node has heard that it is protected, and not yet of all its blocks.
        assert handle.wait("protected", 30) == "protected" and handle.bears in {(1, 1), None}
        for node in (nodes[0], nodes[2]):
            node.stop()
        left = Checkpointer(session=nodes[1].session(), timeout=3)
        outcome, took = timed(left.load, state(0))
        assert isinstance(outcome, errors.NewerUnreachable) and took < 3 + GRACE, (outcome, took)
        assert isinstance(timed(left.latest_step)[0], errors.NewerUnreachable)
        assert loaded(left, allow_older=True, timeout=10)[0] == 1
        for node in (nodes[0], nodes[2]):
            node.go_on()
        assert loaded(left, timeout=30)[0] == 2
    finally:
        for node in nodes:
            node.kill()


def test_a_load_that_goes_back_opens_a_new_run(session):
    with Checkpointer(session=session, durable="required") as checkpointer:
        for step in (100, 150):
            checkpointer.save(step, state(step))
            assert checkpointer.wait("durable")
        first = checkpointer.save(160, state(160)).run
        assert loaded(checkpointer, step=150)[0] == 150
        handle = checkpointer.save(151, state(-151))
        assert checkpointer.wait() and handle.run != first
        assert loaded(checkpointer)[0] == 151
        again = checkpointer.save(152, state(152))
        assert checkpointer.wait() and again.run == handle.run


def test_a_load_of_the_newest_step_keeps_the_run(session):
    with Checkpointer(session=session) as checkpointer:
        first = checkpointer.save(1, state(1))
        checkpointer.wait()
        assert loaded(checkpointer)[0] == 1
        assert checkpointer.save(2, state(2)).run == first.run


def test_a_step_that_is_retired_while_it_is_loaded_gives_way_to_the_newest(daemons, monkeypatch):
    session = daemons().session()
    ask = StoragedReader.ask

    def asked_and_saved(reader, deadline=None):
        plan = ask(reader, deadline)
        for step in range(plan["step"] + 1, 4):
            assert trainer.save(step, state(step)).wait() == "committed"
        return plan

    other = Session(session.namespace, socket=session.socket, token=session.token)
    with Checkpointer(session=session) as trainer, Checkpointer(session=other) as evaluation:
        assert trainer.save(1, state(1)).wait() == "committed"
        monkeypatch.setattr(StoragedReader, "ask", asked_and_saved)
        step, into = loaded(evaluation)
        assert step == 3 and into["step"] == 3 and torch.equal(into["w"], state(3)["w"])
        monkeypatch.undo()
        with pytest.raises(errors.NoCheckpointError):
            loaded(evaluation, step=1)


def test_a_step_whose_shards_go_while_it_is_loaded_gives_way_to_the_newest_and_a_lost_one_is_tried_twice(daemons, monkeypatch):
    session = daemons().session()
    real, opened = StoragedReader._open, []
    other = Session(session.namespace, socket=session.socket, token=session.token)
    with Checkpointer(session=session) as trainer, Checkpointer(session=other) as evaluation:

        def retired(reader, *given, **named):
            opened.append(reader.resolve()["step"])
            if opened[-1] == 1:
                assert trainer.save(2, state(2)).wait() == "committed"
                raise errors.TooManyLost("the shard of rank 0 at step 1 could not be restored on any rung; tried: []")
            return real(reader, *given, **named)

        assert trainer.save(1, state(1)).wait() == "committed"
        monkeypatch.setattr(StoragedReader, "_open", retired)
        step, into = loaded(evaluation)
        assert step == 2 and into["step"] == 2 and torch.equal(into["w"], state(2)["w"])

        def lost(reader, *given, **named):
            opened.append(reader.resolve()["step"])
            raise errors.TooManyLost("the shard of rank 0 at step 2 could not be restored on any rung; tried: []")

        opened.clear()
        monkeypatch.setattr(StoragedReader, "_open", lost)
        with pytest.raises(errors.CheckpointLoadError, match="TooManyLost"):
            loaded(evaluation)
        assert opened == [2, 2]


def test_a_durable_step_that_is_not_among_the_newest_is_loaded(daemons):
    session = daemons(DURABLE).session()
    with Checkpointer(session=session, durable="required", until="durable") as checkpointer:
        for step in range(1, 8):
            assert checkpointer.save(step, state(step)).wait() == "durable"
        step, into = loaded(checkpointer, step=1)
        assert step == 1 and into["step"] == 1 and torch.equal(into["w"], state(1)["w"])


def test_a_save_is_skipped_while_the_one_before_it_goes_on(daemons, monkeypatch):
    daemon = daemons()
    checkpointer = Checkpointer(session=daemon.session(), timeout=5, on_error="warn", busy="skip")
    checkpointer.save(1, state(1))
    assert checkpointer.wait()
    real = StoragedWriter.commit
    monkeypatch.setattr(StoragedWriter, "commit", lambda *given: (time.sleep(3), real(*given)))
    assert checkpointer.save(2, state(2)) is not None
    outcome, took = timed(checkpointer.save, 3, state(3))
    assert outcome is None and took < 2.5 and checkpointer.skipped_saves == 1
    assert checkpointer.wait() and checkpointer.failed_saves == 0 and checkpointer.latest_step() == 2
    checkpointer.close()


def test_one_rank_that_saves_alone_and_loads_all(session):
    tensors = {"model": {"w": torch.arange(6.0).view(2, 3), "b": [torch.ones(2), torch.zeros(1)]}, "epoch": 3, "note": "x"}
    with Checkpointer(session=session, alone=True) as checkpointer:
        assert checkpointer.load_all() is None
        checkpointer.save(1, tensors)
        assert checkpointer.wait()
    with Checkpointer(session=session) as checkpointer:
        loaded = checkpointer.load_all()
    assert loaded.keys() == tensors.keys() and loaded["epoch"] == 3 and loaded["note"] == "x"
    assert torch.equal(loaded["model"]["w"], tensors["model"]["w"])
    assert type(loaded["model"]["b"]) is list and torch.equal(loaded["model"]["b"][0], torch.ones(2))


INTERRUPTED = """
import os, signal, sys, time, torch
# What a shell starts in the background inherits that it ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from storaged import Session
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter
session = Session("job", socket=sys.argv[1], token=b"a-secret-of-tests")
checkpointer = Checkpointer(session=session, timeout=30)
tensors = {"w": torch.ones(1000)}
handle = checkpointer.save(1, tensors)
checkpointer.wait()
handle.saved, handle.step = None, 99
calls = {
    "wait": lambda: handle.wait("committed", 30),
    "save": lambda: checkpointer.save(2, tensors),
    "load": lambda: checkpointer.load(tensors),
    "latest step": lambda: checkpointer.latest_step(),
}
for line in sys.stdin:
    try:
        print("begun", flush=True)
        calls[line.strip()]()
        print("ended", flush=True)
    except KeyboardInterrupt:
        print(f"heard {time.time()}", flush=True)
"""


def test_ctrl_c_is_heard_at_once(daemons):
    daemon = daemons()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)])}
    command = [sys.executable, "-c", INTERRUPTED, str(daemon.socket)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            for what in ("wait", "save", "load", "latest step"):
                # Whoever shares the processor may hold one of them up; nothing holds up two of three.
                delays = sorted(interrupt(daemon, process, what) for _ in range(3))
                assert delays[1] < 0.2, (what, delays)
        finally:
            process.kill()


def interrupt(daemon, process, what):
    """How long after Ctrl-C a call that would wait for 30 s was left."""
    if what != "wait":
        daemon.stop()
    process.stdin.write(what + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    sent = time.time()
    process.send_signal(signal.SIGINT)
    word, _, when = process.stdout.readline().partition(" ")
    daemon.go_on()
    assert word == "heard", (what, word)
    return float(when) - sent


def test_other_threads_wait_no_longer_than_their_limit(daemons):
    daemon = daemons()
    session = daemon.session(timeout=LIMIT)
    client = session.client()
    run = session.connect().open_run(5000)
    # The first wait keeps the connection that both share; the second gives up at its own limit.
    first = threading.Thread(target=lambda: timed(client.wait, run, 1, "committed", 4000))
    first.start()
    time.sleep(0.2)
    outcome, took = timed(client.wait, run, 1, "committed", 1000)
    assert isinstance(outcome, errors.WaitTimeout) and took < 1 + GRACE
    first.join()
