"""What rank 0 tells the other ranks stays until they have read it, however far ahead it is. Real processes and a real daemon."""

import torch.distributed as dist
from daemon import run_ranks
from storaged.torch import _ranks

LATE_READER = """
checkpointer = Checkpointer("asked", timeout=20, on_error="warn")
ranks = checkpointer._ranks
if rank == 1:
    # A thread that the machine gives no time: it looks a second later for how the save ended.
    heard = ranks.heard
    def later(key):
        if key.startswith("end/"):
            time.sleep(1)
        return heard(key)
    ranks.heard = later
attempt(checkpointer.save, 1, state(1))
if rank == 0:
    checkpointer.wait()
for _ in range(3):
    attempt(checkpointer.latest_step)
attempt(checkpointer.wait)
said.append([checkpointer.failed_saves, str(checkpointer.last_error)])
"""


def test_calls_of_all_ranks_take_no_word_of_a_save_away(shared_daemon, tmp_path):
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, LATE_READER, limit=120)
    for one in said:
        assert [line[:2] for line in one[1:4]] == [["ok", 1]] * 3, one
        assert one[4][:2] == ["ok", True] and one[5] == [0, "None"], (one, errors)


FAR_AHEAD = """
checkpointer = Checkpointer("ahead", timeout=20)
checkpointer.save(1, state(1)).saved.result()
dist.barrier()
if rank == 1:
    time.sleep(1)
for _ in range(CALLS):
    attempt(checkpointer.latest_step)
"""


def test_rank_zero_may_be_many_calls_ahead(shared_daemon, tmp_path):
    calls = 100
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 3, f"CALLS = {calls}\n{FAR_AHEAD}", limit=120)
    for one in said:
        assert [line[:2] for line in one[:calls]] == [["ok", 1]] * calls, (one, errors)


IN_STEP = """
checkpointer = Checkpointer("in-step", timeout=20)
checkpointer.save(1, state(1)).saved.result()
keys = []
for number in range(160):
    checkpointer.latest_step()
    if number % 40 == 0:
        into = state(0)
        checkpointer.load(into)
    dist.barrier()
    keys.append(checkpointer._ranks._store.num_keys())
said.append([max(keys[:80]), max(keys)])
"""


def test_words_that_all_have_read_are_cleared(shared_daemon, tmp_path):
    """The store is in the memory of rank 0 or of torchrun's agent."""
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, IN_STEP, limit=120)
    for (early, most), in said:
        # 80 calls lie between them.
        assert most < early + 40, errors


TOO_LATE = """
checkpointer = Checkpointer("late", timeout=60, on_error="warn")
ranks = checkpointer._ranks
free = []
if rank == 1:
    # A thread that the machine gives no time, until rank 0 has given up saves without this rank and clears up behind the first.
    heard = ranks.heard
    def later(key):
        while not free and key.startswith("end/") and heard("begin/0/1"):
            time.sleep(0.1)
        if key.startswith("end/"):
            free.append(time.monotonic())
        return heard(key)
    ranks.heard = later
attempt(checkpointer.save, 1, state(1))
if rank == 0:
    said.append(checkpointer.wait())
    checkpointer.timeout = 2
    for step in (2, 3, 4):
        attempt(checkpointer.save, step, state(step))
    checkpointer.wait()
    checkpointer.timeout = 60
else:
    said.append([checkpointer.wait(), time.monotonic() - free[0], type(checkpointer.last_error).__name__, str(checkpointer.last_error)])
dist.barrier()
attempt(lambda: checkpointer.save(5, state(5)).saved.result())
attempt(checkpointer.latest_step)
"""


def test_a_rank_that_finds_the_words_of_its_save_cleared_says_so_at_once(shared_daemon, tmp_path):
    (leader, follower), errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, TOO_LATE, limit=120)
    assert leader[1] is True, (leader, errors)
    ended, seconds, kind, text = follower[1]
    assert not ended and seconds < 10, follower
    assert kind == "CheckpointSaveError" and "rank 0 is at step" in text and "may have been committed" in text, follower
    for one in (leader, follower):
        assert one[-2][0] == "ok" and one[-1][:2] == ["ok", 5], (one, errors)


def test_workers_that_torchrun_has_started_again_hear_no_word_of_those_before_them(monkeypatch):
    """Its agent keeps one store over all starts. A rank that took the first start's word would begin anew beside others that go on."""
    store = dist.HashStore()
    monkeypatch.setattr(_ranks, "_own_store", lambda: store)
    monkeypatch.setattr(_ranks, "distributed", lambda: True)

    def ranks(rank, start, **environment):
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "STORAGED_VERDICT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment | {"TORCHELASTIC_RESTART_COUNT": start}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(_ranks, "rank_and_world", lambda group: (rank, 2))
        monkeypatch.setattr(_ranks.Ranks, "_made", {})
        return _ranks.Ranks("job")

    kept = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks(0, "0", **kept).tell("plan", "nothing was saved")
    assert ranks(1, "0", **kept).heard("plan") and not ranks(1, "1", **kept).heard("plan")
    # Where the store is this start's alone nodes that have counted differently hear each other.
    for environment in ({}, kept | {"STORAGED_VERDICT": "{}"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        ranks(0, "1", **environment).tell("plan", "step 20")
        assert ranks(1, "0", **environment).value("plan") == "step 20"
