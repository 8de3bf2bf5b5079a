"""Other processes wait for work of this one, and not for ever."""

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
from daemon import PACKAGE
from storaged._busy import Work, wait_for


def waits(awaited, told):
    told.put("waits")
    wait_for(*awaited)
    told.put("went on")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_waits_for_the_work_that_it_was_given(method):
    context = multiprocessing.get_context(method)
    told, work, other = context.Queue(), Work(), Work()
    process = context.Process(target=waits, args=(work.awaited, told))
    process.start()
    assert told.get() == "waits"
    other.end()
    process.join(0.5)
    assert process.is_alive() and told.empty()
    wait_for(*work.awaited)  # in this process it returns, and leaves the others waiting
    process.join(0.2)
    assert process.is_alive() and told.empty()
    work.end()
    assert told.get() == "went on"
    process.join()
    wait_for(*other.awaited)


def test_who_dies_is_waited_for_no_longer():
    program = "import sys; from storaged._busy import Work; print(*Work().awaited, flush=True); sys.stdin.read()"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    awaited = tuple(map(int, worker.stdout.readline().split()))
    thread = threading.Thread(target=wait_for, args=awaited)
    thread.start()
    thread.join(0.3)
    waited = thread.is_alive()
    worker.kill()
    worker.wait()
    thread.join()
    assert waited
    wait_for(*awaited)
