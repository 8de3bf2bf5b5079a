"""Several ranks, real processes and a real daemon: what one rank does wrong costs that step, says who, and no other step."""

from daemon import run_ranks

BODY = """
from storaged.torch._ranks import run_key

LIMIT = 3
checkpointer = Checkpointer(timeout=LIMIT, on_error="warn", durable="required")

def save(step):
    # Training between two saves: without it ranks would only meet at saves.
    dist.barrier()
    attempt(checkpointer.save, step, state(step))

def ended(step):
    said.append([step, checkpointer.wait(), checkpointer.failed_saves, str(checkpointer.last_error)])

attempt(checkpointer.latest_step)
attempt(checkpointer.load, state(0))
save(1); ended("1 saved by all")

if rank != 1: attempt(checkpointer.save, 2, state(2))
save(3); ended("2 left out by rank 1, 3 saved by all")

if rank != 0: attempt(checkpointer.save, 4, state(4))
save(5); ended("4 left out by rank 0, 5 saved by all")

socket = checkpointer.session.socket
if rank == 1:
    checkpointer.session.socket = "/nowhere/storaged.sock"
    checkpointer.session.drop_connections()
save(6); ended("6 failed on rank 1")
checkpointer.session.socket = socket
save(7); ended("7 saved by all")

dist.barrier()
if rank == 2: time.sleep(LIMIT + 1)
attempt(checkpointer.save, 8, state(8))
ended("8 is given up without rank 2, which is late")
save(9); said.append(["9 durable", checkpointer.wait("durable", 30)])

save(20); ended("20 saved by all")
before = checkpointer.session.run_of(run_key())
into = state(0)
said.append(["gone back to", checkpointer.load(into, step=9, timeout=20)["step"], into[f"w{rank}"][0].item(), into["step"]])
if rank == 1: time.sleep(1)
attempt(checkpointer.save, 10, state(10)); ended("10 saved by all, though one rank was at 20 a moment ago")
after = checkpointer.session.run_of(run_key())
said.append(["runs", before, after])
said.append(["latest", checkpointer.latest_step()])

# Rank 0 is still at its first save when it comes to the second; the others learn it from rank 0.
skipping = Checkpointer("skipping", timeout=LIMIT, busy="skip")
dist.barrier()
if rank == 1: time.sleep(1)
for step in (1, 2):
    attempt(skipping.save, step, state(step))
said.append(["skipped", skipping.skipped_saves, skipping.wait(), skipping.failed_saves])
dist.barrier()
attempt(skipping.save, 3, state(3))
said.append(["then", skipping.skipped_saves, skipping.wait(), skipping.latest_step()])

dist.barrier()
if rank == 2:
    print("SAID " + json.dumps(said), flush=True)
    os._exit(0)
attempt(checkpointer.save, 11, state(11)); ended("11 is given up: rank 2 has died")
attempt(checkpointer.save, 12, state(12)); ended("12 too")
"""


def test_what_one_rank_does_wrong(daemons, tmp_path):
    daemon = daemons('[durable]\nkind = "directory"\npath = "TIER"\n')
    said, errors = run_ranks(tmp_path, [daemon.socket] * 3, BODY, whole=False, limit=120)
    told = [iter(one) for one in said]

    def next_of(rank):
        assert said[rank], errors[rank]
        return next(told[rank])

    def saved(ranks=(0, 1, 2)):
        for rank in ranks:
            kind, text, seconds = next_of(rank)
            assert kind == "ok" and seconds < 4, (rank, kind, text, seconds)

    def ended(well, failed, *words):
        for rank in range(3):
            line = next_of(rank)
            assert line[1] is well[rank], (rank, line, errors[rank])
            assert line[2] == failed[rank], (rank, line)
            assert not words or not failed[rank] or all(word in line[3] for word in words), (rank, line)

    for rank in range(3):
        assert next_of(rank)[:2] == ["ok", None] and next_of(rank)[:2] == ["ok", None]
    everybody = (True, True, True)
    saved(); ended(everybody, (0, 0, 0))
    saved((0, 2)); saved(); ended(everybody, (1, 0, 1), "step 2", "rank 1 left it out")
    saved((1, 2)); saved(); ended(everybody, (1, 1, 2))
    saved(); ended((False, False, False), (2, 2, 3), "step 6", "DaemonUnavailable")
    saved(); ended(everybody, (2, 2, 3))
    saved(); ended((False, False, False), (3, 3, 4), "step 8")
    saved()
    for rank in range(3):
        assert next_of(rank) == ["9 durable", True], errors[rank]
    saved(); ended(everybody, (3, 3, 4))
    for rank in range(3):
        assert next_of(rank) == ["gone back to", 9, 90.0 + rank, 9]
    saved(); ended(everybody, (3, 3, 4))
    runs = [next_of(rank)[1:] for rank in range(3)]
    assert all(both == runs[0] for both in runs) and runs[0][0] != runs[0][1]
    assert [next_of(rank)[1] for rank in range(3)] == [10, 10, 10]
    for rank in range(3):
        assert [next_of(rank)[1] for _ in (1, 2)] == ["something", None]
        assert next_of(rank) == ["skipped", 1, True, 0]
        assert next_of(rank)[1] == "something" and next_of(rank) == ["then", 1, True, 3]
    for step, failed in ((11, 4), (12, 5)):
        saved((0, 1))
        for rank in (0, 1):
            line = next_of(rank)
            assert line[1] is False and line[2] == failed and f"step {step}" in line[3], line
            assert "rank 2 did not come" in line[3], line


AGAIN = """
LIMIT = 30
checkpointer = Checkpointer(timeout=LIMIT, on_error="warn")

def save(step):
    dist.barrier()
    attempt(checkpointer.save, step, state(step))
    said.append([step, checkpointer.wait(), str(checkpointer.last_error)])

save(1)
if rank == 1:
    socket, checkpointer.session.socket = checkpointer.session.socket, "/nowhere/storaged.sock"
    checkpointer.session.drop_connections()
save(2)
dist.barrier()
if rank == 1:
    checkpointer.session.socket = socket
    attempt(checkpointer.save, 2, state(2))
attempt(checkpointer.save, 3, state(3))
said.append(["then", checkpointer.wait(), str(checkpointer.last_error)])
"""


def test_a_rank_that_repeats_a_step_alone_learns_that_rank_0_has_gone_on(daemons, tmp_path):
    """It waited for all of its limit, and with it the step at which the others were."""
    daemon = daemons()
    said, errors = run_ranks(tmp_path, [daemon.socket] * 2, AGAIN, limit=120)
    for rank, one in enumerate(said):
        assert one, errors
        assert [line[1] for line in one if line[0] in (1, 2)] == [True, False], one
        assert one[-1][:2] == ["then", True], (one, errors)
        assert sum(line[2] for line in one if line[0] == "ok") < 15, one
    assert "rank 0 left it out (rank 0 is at step 3 already)" in said[1][-1][2], said[1]


DCP_BODY = """
import torch.distributed.checkpoint as dcp
from storaged.torch._alone import save_alone
group = dist.new_group(backend="gloo")
namespace = "plain"
made = []

def save(step, into=None):
    writer = StoragedWriter(step, namespace=namespace, process_group=group, timeout=5)
    if rank == 1 and step == 2:
        writer.session.drop_connections()
        writer.session.socket, real = "/nowhere/storaged.sock", writer.session.socket
    result = dcp.async_save(state(step), storage_writer=writer, process_group=group)
    if rank == 1 and step == 2:
        said.append(["staged", type(writer.handle.staged.exception()).__name__])
        writer.session.socket = real
    getattr(result, "upload_completion", result).result(60)

for step in (1, 2, 3):
    attempt(save, step)
# Rank 0 left step 4 out: DCP pairs its 5 with rank 1's 4.
attempt(save, 5 - rank)

into = state(0)
attempt(lambda: dcp.load(into, storage_reader=StoragedReader(namespace=namespace, process_group=group), process_group=group))
said.append(["loaded", into["step"], into[f"w{rank}"][0].item()])

# A writer is made by rank 0 alone, and nobody waits; then both save with it, rank 1's made later.
if rank == 0:
    attempt(lambda: made.append(StoragedWriter(1, namespace="late", process_group=group, timeout=20)))
    time.sleep(1)
else:
    time.sleep(1)
    attempt(lambda: made.append(StoragedWriter(1, namespace="late", process_group=group, timeout=20)))
attempt(lambda: dcp.save(state(1), storage_writer=made[0], process_group=group))

# One rank alone, while the other does not even know of it.
if rank == 0:
    alone = StoragedWriter(1, namespace="alone", rank=0, world_size=1)
    attempt(save_alone, state(1), alone)
else:
    time.sleep(1)
"""


def test_dcp_with_a_rank_that_fails_or_leaves_a_save_out(daemons, tmp_path):
    daemon = daemons()
    (first, second), errors = run_ranks(tmp_path, [daemon.socket] * 2, DCP_BODY, limit=120)
    assert first and second, errors
    assert second.pop(1) == ["staged", "DaemonUnavailable"]
    for said in (first, second):
        kinds = [line[0] for line in said]
        assert kinds[0] == "ok" and kinds[1] == "CheckpointException" and kinds[2] == "ok", said
        assert "/nowhere/storaged.sock" in said[1][1]
        assert kinds[3] == "CheckpointException" and "left a save out" in said[3][1], said
        assert kinds[4] == "ok", said
    assert first[5] == ["loaded", 3, 30.0] and second[5] == ["loaded", 3, 31.0]
    for said in (first, second):
        assert [line[0] for line in said[6:8]] == ["ok", "ok"] and said[6][2] < 0.5, said
    assert first[8][0] == "ok", first


ONE_WRITER = """
import torch.distributed.checkpoint as dcp
group = dist.new_group(backend="gloo")
writer = StoragedWriter(namespace="one", process_group=group, timeout=5)

def save(step):
    if rank == 1 and step == 2:
        writer.session.drop_connections()
        writer.session.socket, real = "/nowhere/storaged.sock", writer.session.socket
    result = dcp.async_save(state(step), storage_writer=writer, process_group=group, checkpoint_id=f"step-{step}")
    if rank == 1 and step == 2:
        writer.session.socket = real
    getattr(result, "upload_completion", result).result(60)

for step in (1, 2, 3, 4, 5):
    attempt(save, step)
into = state(0)
attempt(lambda: dcp.load(into, storage_reader=StoragedReader(namespace="one", process_group=group), process_group=group))
said.append(["loaded", into["step"], into[f"w{rank}"][0].item()])
"""


def test_what_a_save_that_another_rank_failed_leaves_in_a_writer(daemons, tmp_path):
    """Rank 0 has staged step 2 and never writes it, and nobody tells its writer so."""
    daemon = daemons()
    said, errors = run_ranks(tmp_path, [daemon.socket] * 2, ONE_WRITER, limit=120)
    for rank, one in enumerate(said):
        assert one, errors
        assert [line[0] for line in one] == ["ok", "CheckpointException", "ok", "ok", "ok", "ok", "loaded"], one
        assert one[6] == ["loaded", 5, 50.0 + rank], one


DEAD_LEADER = """
LIMIT = 3
checkpointer = Checkpointer(timeout=LIMIT, on_error="warn")
attempt(checkpointer.save, 1, state(1))
said.append(["1", checkpointer.wait(), checkpointer.failed_saves])
dist.barrier()
if rank == 0:
    # It has begun step 2 and told the others, and dies before it has heard of their plans.
    checkpointer._background().submit(time.sleep, 60)
    attempt(checkpointer.save, 2, state(2))
    print("SAID " + json.dumps(said), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
attempt(checkpointer.save, 2, state(2))
attempt(checkpointer.save, 3, state(3))
started = time.monotonic()
said.append(["3", checkpointer.wait(), checkpointer.failed_saves, round(time.monotonic() - started, 2), str(checkpointer.last_error)])
"""


def test_rank_zero_dies_while_the_others_save(daemons, tmp_path):
    daemon = daemons()
    said, errors = run_ranks(tmp_path, [daemon.socket] * 3, DEAD_LEADER, whole=False, limit=120)
    for rank in (0, 1, 2):
        assert said[rank][:2] == [["ok", "something", said[rank][0][2]], ["1", True, 0]], errors[rank]
    for rank in (1, 2):
        (second, _, took), (third, _, took_too), end = said[rank][2:]
        # Each save ends by its limit, and training goes on whoever has died.
        assert second == third == "ok" and took < 20 and took_too < 20, said[rank]
        assert end[1] is False and end[2] == 2 and end[3] < 20, said[rank]
        assert "rank 0" in end[4], said[rank]


def test_a_state_that_cannot_be_made_is_heard_of_by_all_and_only_that_save_is_lost(shared_daemon, tmp_path):
    body = """
checkpointer = Checkpointer("made-late", on_error="warn")

def made(step):
    if rank == 1 and step == 1:
        raise ValueError("this rank has no state")
    return state(step)

for step in (1, 2):
    attempt(lambda: checkpointer.save(step, lambda: made(step)).saved.result())
loaded = checkpointer.load_all()
said.append(loaded["step"])
"""
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, body)
    for (first, text, _), (second, _, _), step in said:
        assert (first, second, step) == ("CheckpointSaveError", "ok", 2) and "this rank has no state" in text, errors
