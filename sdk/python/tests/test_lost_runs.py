"""A run that the daemon has forgotten, because the job was dropped or the daemon started anew: all ranks go on in a new one."""

import os
import subprocess
import threading
import time

import pytest
from daemon import executable, run_ranks

BODY = """
import torch.distributed.checkpoint as dcp
from pathlib import Path
folder = Path(FOLDER)

def lose():
    dist.barrier()
    if rank == 0:
        (folder / "lose").touch()
        while not (folder / "lost").exists():
            time.sleep(0.02)
    dist.barrier()

def save(step, writer):
    result = dcp.async_save(state(step), storage_writer=writer, checkpoint_id=f"step-{step}")
    getattr(result, "upload_completion", result).result(60)

one = StoragedWriter(timeout=10)
WRITERS = {
    "a writer for each save": lambda step: save(step, StoragedWriter(timeout=10)),
    "one writer for all saves": lambda step: save(step, one),
    "nothing staged": lambda step: dcp.save(state(step), storage_writer=StoragedWriter(step, timeout=10)),
    "a path": lambda step: dcp.save(state(step), checkpoint_id=f"storaged://job/step-{step}"),
}
saves = WRITERS[KIND]
for step in (1, 2):
    attempt(saves, step)
lose()
# What is in flight when it happens fails, on all ranks, and so does what first hears of it; then all is well.
for step in (3, 4, 5, 6):
    # Rank 0 finds out first, and waits for rank 1 in the save's first collective.
    if step in (3, 4): time.sleep(rank)
    attempt(saves, step)
into = state(0)
attempt(lambda: dcp.load(into, storage_reader=StoragedReader(timeout=20)))
said.append(["loaded", into["step"], into[f"w{rank}"][0].item()])
"""


@pytest.mark.parametrize("kind", ["a writer for each save", "one writer for all saves", "nothing staged", "a path"])
@pytest.mark.parametrize("cause", ["dropped", "restarted"])
def test_all_ranks_go_on_in_a_new_run(daemons, tmp_path, cause, kind):
    daemon = daemons()

    def lose():
        while not (tmp_path / "lose").exists():
            time.sleep(0.02)
        if cause == "dropped":
            command = [executable(), "drop", "job", "--force", "--socket", str(daemon.socket)]
            subprocess.run(command, check=True, capture_output=True, env=os.environ | {"STORAGED_TOKEN": "a-secret-of-tests"})
        else:
            daemon.kill()
            daemon.start()
        (tmp_path / "lost").touch()

    loses = threading.Thread(target=lose, daemon=True)
    loses.start()
    body = BODY.replace("FOLDER", repr(str(tmp_path))).replace("KIND", repr(kind))
    said, errors = run_ranks(tmp_path, [daemon.socket] * 2, "import storaged.fsspec\n" + body, limit=240)
    for rank, one in enumerate(said):
        assert one, errors
        kinds = [line[0] for line in one]
        assert kinds[:2] == ["ok", "ok"], (one, errors[rank])
        assert kinds[4:6] == ["ok", "ok"], one
        assert kinds == [line[0] for line in said[0]], said
        assert max(line[2] for line in one[2:6]) < 8, one
        assert one[6][0] == "ok" and one[7] == ["loaded", 6, 60.0 + rank], one


TWO = """
from pathlib import Path
folder = Path(FOLDER)
one, other = Checkpointer(on_error="warn", timeout=10), Checkpointer(on_error="warn", timeout=10)

def both(step):
    for at, checkpointer in enumerate((one, other)):
        checkpointer.save(step + at, state(step + at))
        said.append([step + at, checkpointer.wait()])

both(1)
dist.barrier()
if rank == 0:
    (folder / "lose").touch()
    while not (folder / "lost").exists():
        time.sleep(0.02)
dist.barrier()
for step in range(3, 11, 2):
    time.sleep(LATE)
    both(step)
    dist.barrier()
said.append(["runs", *one.session._runs.values()])
"""


@pytest.mark.parametrize("late", ["0.5 * rank", "0.5 * (1 - rank)", "0"])
def test_two_checkpointers_of_a_job_go_on_in_the_same_new_run(daemons, tmp_path, late):
    daemon = daemons()

    def lose():
        while not (tmp_path / "lose").exists():
            time.sleep(0.02)
        daemon.kill()
        daemon.start()
        (tmp_path / "lost").touch()

    threading.Thread(target=lose, daemon=True).start()
    body = TWO.replace("FOLDER", repr(str(tmp_path))).replace("LATE", late)
    said, errors = run_ranks(tmp_path, [daemon.socket] * 2, body, limit=120)
    assert said[0] == said[1], (said, errors)
    assert said[0][:2] == [[1, True], [2, True]]
    # Each loses the save that finds the run lost, and none after it; and only one new run was opened.
    assert said[0][4:-1] == [[step, True] for step in range(5, 11)], (said, errors)
    assert len(said[0][-1]) == 2 and said[0][-1][1].startswith("1-"), said


NEWER = """
checkpointer = Checkpointer(on_error="warn", timeout=10)
for step in range(1, 5):
    if step == 2 and rank == 0:
        # As after a daemon's restart, of which rank 0 has heard first.
        checkpointer.session._runs.clear()
    if step == 2:
        time.sleep(rank)
    checkpointer.save(step, state(step))
    said.append(checkpointer.wait())
    dist.barrier()
said.append(*checkpointer.session._runs.values())
"""


def test_a_rank_whose_run_is_turned_away_for_a_newer_one_goes_on_in_that(daemons, tmp_path):
    said, errors = run_ranks(tmp_path, [daemons().socket] * 2, NEWER)
    assert said[0] == said[1], (said, errors)
    assert said[0][:4] == [True, False, True, True], (said, errors)
