"""Megatron-Core with our strategies: its own queue of asynchronous saves, its registry, and nvidia_resiliency_ext's local checkpoints."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from daemon import HERE, PACKAGE, free_port
from test_frameworks import KILLED_AT, STEPS, losses

pytest.importorskip("megatron.core")

# Megatron-Core's queue counts ended saves on a GPU, and its persistent worker takes one.
HEAD = """
import torch
torch.cuda.current_device, torch.cuda.device_count = (lambda: "cpu"), (lambda: 1)
torch.cuda.synchronize, torch.cuda.set_device = (lambda *_: None), (lambda *_: None)
if __name__ == "__main__":
    import json, os, sys, threading
    from pathlib import Path
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from storaged import errors
    from storaged.megatron import LoadStrategy, SaveStrategy, install, latest_checkpoint
    from storaged.torch import _saving

    dist.init_process_group("gloo")
    rank, world, said = dist.get_rank(), dist.get_world_size(), []
    ROOT = Path(sys.argv[1])

    def attempt(call):
        try:
            said.append(["ok", call()])
        except Exception as error:
            said.append([type(error).__name__, str(error)])

    def folder_of(step):
        path = ROOT / f"iter_{step:07d}"
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return path

    def is_complete(step):
        dist.barrier()
        return (folder_of(step) / "metadata.json").exists()

    def sharded(value, axis=0):
        # Rows or columns of one matrix, layers that each rank has one of, a bias that all have, and an object of each.
        matrix = torch.arange(32.0).reshape(4, 8).chunk(world, axis)[rank].contiguous() + value
        return {
            "matrix": ShardedTensor.from_rank_offsets("matrix", matrix, (axis, rank, world)),
            "layer": ShardedTensor.from_rank_offsets("layers", torch.full((3,), value + rank), (0, rank, world), prepend_axis_num=1),
            "bias": ShardedTensor.from_rank_offsets("bias", torch.full((5,), value), replica_id=rank),
            "state": ShardedObject("state", {"at": torch.tensor(rank), "value": value}, (world,), (rank,)),
        }

    def holds(loaded, value, axis=0):
        expected = torch.arange(32.0).reshape(4, 8).chunk(world, axis)[rank] + value
        return (
            torch.equal(loaded["matrix"], expected) and loaded["layer"].tolist() == [value + rank] * 3
            and loaded["bias"].tolist() == [value] * 5 and loaded["state"]["value"] == value and loaded["state"]["at"].item() == rank
        )

    def load(step, axis=0, strategy=None):
        return dist_checkpointing.load(sharded(0.0, axis), str(folder_of(step)), strategy or LoadStrategy())
"""
FOOT = """
    print("SAID " + json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def ranks(daemon, tmp_path, body, namespace="megatron", size=2):
    """What each of so many processes `said`."""
    script = tmp_path / "ranks.py"
    script.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    ") + FOOT)
    port = str(free_port())
    workers = []
    for rank in range(size):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "CUDA_VISIBLE_DEVICES": "",
            "STORAGED_NAMESPACE": namespace, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]), "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, str(script), str(tmp_path / "steps")]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    lines = [[line for line in out.splitlines() if line.startswith("SAID ")] for out, _ in outputs]
    assert all(lines), "\n".join(err for _, err in outputs)
    return [json.loads(one[-1][5:]) for one in lines]


# Until `commit` is set nothing is committed.
HELD_BACK = """
    commit, drive = threading.Event(), _saving.Save.drive
    _saving.Save.drive = lambda save: (commit.wait(), drive(save))
"""


@pytest.mark.parametrize("persistent", [False, True], ids=["forked", "spawned"])
def test_training_goes_on_until_an_asynchronous_save_has_ended(shared_daemon, tmp_path, persistent):
    body = HELD_BACK + f"""
    queue, strategy = AsyncCallsQueue(persistent={persistent}), SaveStrategy()
    for step, blocking in ((1, False), (2, True)):
        commit.clear()
        state = sharded(float(step))
        request = dist_checkpointing.save(dict(state, step=step), str(folder_of(step)), strategy, async_sharded_save=True)
        queue.schedule_async_request(request)
        # Training goes on, and changes what was saved.
        for one in ("matrix", "layer", "bias"):
            state[one].data.fill_(-1.0)
        worker = queue.async_calls[0].async_caller.process
        worker.join(2)
        if not worker.is_alive():
            commit.set()  # it should be; finalisation would wait for ever
        said.append([worker.is_alive(), queue.maybe_finalize_async_calls(blocking=False), is_complete(step)])
        commit.set()
        ended = queue.maybe_finalize_async_calls(blocking=blocking)
        while not ended and queue.async_calls:
            ended = queue.maybe_finalize_async_calls(blocking=False)
        said.append([ended, is_complete(step), holds(load(step), float(step)), load(step)["step"]])
    queue.close()
    """
    expected = [[True, [], False], [[0], True, True, 1], [True, [], False], [[1], True, True, 2]]
    assert ranks(shared_daemon, tmp_path, body, f"queue-{persistent}".lower()) == [expected] * 2


def test_killed_in_an_asynchronous_save_and_resumed(shared_daemon, tmp_path):
    def run(name, *arguments):
        folder = ("--asynchronous", "--folder", tmp_path / name)
        return losses(shared_daemon, f"asynchronous-{name}", "megatron_checkpoints.py", 2, *folder, *arguments)

    straight, code, output = run("straight")
    assert code == 0 and sorted(straight) == list(range(1, STEPS + 1)), output
    before, code, output = run("killed", "--kill-at", KILLED_AT)
    assert code == -9 and max(before) in (KILLED_AT, KILLED_AT + 1), output
    # The save had begun, and its end was not heard of.
    assert not (tmp_path / "killed" / f"iter_{KILLED_AT:07d}" / "metadata.json").exists()
    after, code, output = run("killed")
    assert code == 0 and KILLED_AT <= min(after) <= KILLED_AT + 1 and max(after) == STEPS, output
    assert before | after == straight and all(straight[step] == loss for step, loss in before.items()), (before, after, straight)


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_no_checkpoint(shared_daemon, tmp_path):
    body = """
    queue, strategy = AsyncCallsQueue(), SaveStrategy()

    def save(step, state, is_async):
        request = dist_checkpointing.save(state, str(folder_of(step)), strategy, async_sharded_save=is_async)
        if is_async:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)

    for step, is_async in ((1, False), (2, True)):
        state = sharded(1.0)
        if rank == 1:
            state["state"].data = print
        attempt(lambda: save(step, state, is_async))
        said.append(is_complete(step))
    attempt(lambda: save(3, sharded(3.0), True))
    said.append(is_complete(3) and holds(load(3), 3.0))
    """
    for told in ranks(shared_daemon, tmp_path, body, "one-fails"):
        (first, text), whole, (second, later), whole_too, *good = told
        assert (first, second, whole, whole_too) == ("CheckpointSaveError", "CheckpointSaveError", False, False), told
        assert "step 1" in text and "step 2" in later and "rank 1" in text and "trust_pickle=True" in text, told
        assert good == [["ok", None], True]


def test_every_replica_may_save_and_other_layouts_load(shared_daemon, tmp_path):
    body = """
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    durable = SaveStrategy(durable="required", until="durable")
    strategies = [SaveStrategy(keep_only_main_replica=False), FullyParallelSaveStrategyWrapper(durable), SaveStrategy(threads=1)]
    for step, strategy in enumerate(strategies, 1):
        dist_checkpointing.save(sharded(float(step)), str(folder_of(step)), strategy)
        said.append(holds(load(step, axis=1), float(step), axis=1))
    metadata = dist_checkpointing.load_tensors_metadata(str(folder_of(3)), LoadStrategy())
    said.append(sorted((key, list(one.global_shape)) for key, one in metadata.items()))
    _, not_asked_for, not_there = dist_checkpointing.load({"bias": sharded(0.0)["bias"]}, str(folder_of(3)), LoadStrategy(), strict="return_all")
    said.append([sorted(not_asked_for), sorted(not_there)])
    # Back to an older step: those that follow are saved anew.
    said.append(holds(load(2), 2.0))
    dist_checkpointing.save(sharded(9.0), str(folder_of(3)), SaveStrategy())
    said.append(holds(load(3), 9.0))
    """
    shapes = [["bias", [5]], ["layers", [2, 3]], ["matrix", [4, 8]]]
    others = ["layers", "matrix", "state"]
    assert ranks(shared_daemon, tmp_path, body, "layouts") == [[True, True, True, shapes, [others, []], True, True]] * 2


def test_the_newest_checkpoint_is_found_and_completed(shared_daemon, tmp_path):
    body = """
    attempt(lambda: latest_checkpoint(ROOT))
    for step in (1, 2):
        dist_checkpointing.save(sharded(float(step)), str(folder_of(step)), SaveStrategy())
    named = lambda: Path(latest_checkpoint(ROOT)).name
    attempt(named)
    for torn in (None, "{"):
        # The job died when the step was committed, before or while Megatron-Core said so.
        dist.barrier()
        if rank == 0:
            (ROOT / "iter_0000002" / "metadata.json").unlink()
            if torn:
                (ROOT / "iter_0000002" / "metadata.json").write_text(torn)
        dist.barrier()
        attempt(named)
        said.append(holds(load(2), 2.0))
    attempt(lambda: latest_checkpoint(ROOT / "elsewhere"))
    """
    for told in ranks(shared_daemon, tmp_path, body, "newest"):
        assert told[:-1] == [["ok", None], ["ok", "iter_0000002"], *([["ok", "iter_0000002"], True] * 2)]
        assert told[-1][0] == "CheckpointLoadError" and "newest step that can be restored is 2" in told[-1][1]


def test_installed_strategies_are_megatrons_defaults_and_files_stay_files(shared_daemon, tmp_path):
    body = """
    plain = lambda step: dist_checkpointing.load(sharded(0.0), str(folder_of(step)))
    dist_checkpointing.save(sharded(1.0), str(folder_of(1)))
    install()
    dist_checkpointing.save(sharded(2.0), str(folder_of(2)))
    dist_checkpointing.save(sharded(3.0), str(folder_of(3)), ("storaged", 1))
    said.append([json.loads((folder_of(step) / "metadata.json").read_text())["sharded_backend"] for step in (1, 2, 3)])
    said.append([len(list(folder_of(step).glob("*.distcp"))) > 0 for step in (1, 2, 3)])
    said.append([holds(plain(step), float(step)) for step in (1, 3)])
    """
    expected = [["torch_dist", "storaged", "storaged"], [True, False, False], [True, True]]
    assert ranks(shared_daemon, tmp_path, body, "installed") == [expected] * 2


LOCAL = """
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
    from storaged.megatron import LocalCheckpointManager

    manager = LocalCheckpointManager(trust_pickle=True)

    def aware(value):
        return MCoreTensorAwareStateDict.from_state_dict({**sharded(value), "step": value}, algo="atomic")[0]

    def loaded():
        state, ckpt_id = manager.load()
        got = state.to_state_dict(sharded(0.0), algo="atomic")
        return [manager.find_latest(), ckpt_id[:2] == (manager.find_latest(), rank), holds(got, got["step"]), got["step"]]
"""


def test_local_checkpoints_are_saved_and_loaded_by_as_many_ranks(shared_daemon, tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    first = HELD_BACK + LOCAL + """
    commit.set()
    said.append(manager.find_latest())
    attempt(manager.load)
    manager.save(aware(1.0), 1)
    manager.find_latest()
    said.append(loaded())
    commit.clear()
    queue, state = AsyncCallsQueue(), aware(2.0)
    queue.schedule_async_request(manager.save(state, 2, is_async=True))
    for tensor in state.tensors:
        tensor.fill_(-1.0)
    said.append(queue.maybe_finalize_async_calls(blocking=False))
    commit.set()
    said.append(queue.maybe_finalize_async_calls(blocking=True))
    manager.find_latest()
    said.append(loaded())
    said.append(manager.local_ckpt_dir)
    """
    again = LOCAL + "    said.append([manager.find_latest(), loaded()])\n"
    fewer = LOCAL + "    said.append(manager.find_latest())\n"
    for told in ranks(shared_daemon, tmp_path, first, "local"):
        assert told[0] == -1 and told[1][0] == "CheckpointingException"
        assert told[2:] == [[1, True, True, 1.0], [], [0], [2, True, True, 2.0], "storaged://local.local"]
    assert ranks(shared_daemon, tmp_path, again, "local") == [[[2, [2, True, True, 2.0]]]] * 2
    # A rank's part is of no use to another number of them.
    assert ranks(shared_daemon, tmp_path, fewer, "local", size=1) == [[-1]]


def test_a_local_checkpoint_that_fails_on_one_rank_fails_on_all(shared_daemon, tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    body = LOCAL + """
    unsaved = aware(1.0)
    if rank == 1:
        unsaved.common["strange"] = lambda: None
    attempt(lambda: manager.save(unsaved, 1))
    attempt(lambda: LocalCheckpointManager("untrusted").save(aware(1.0), 1))
    manager.save(aware(2.0), 2)
    attempt(lambda: manager.save(aware(2.0), 2) if manager.find_latest() == 2 else None)
    # Back behind a save that failed: rank 0 does not take rank 1, which comes late, for one that is past this one.
    attempt(lambda: manager.save(unsaved, 9))
    manager.find_latest()
    manager.load()
    state = aware(3.0)
    if rank == 1:
        import time
        time.sleep(1)
    attempt(lambda: manager.save(state, 3))
    said.append(manager.find_latest())
    if rank == 1:
        manager._unpickled = lambda _: 1 / 0
    attempt(manager.load)
    """
    for told in ranks(shared_daemon, tmp_path, body, "local-fails"):
        (unsaved, why), (untrusted, whose), (twice, _), (behind, _), saved, newest, (unloaded, text) = told
        assert (behind, saved, newest) == ("CheckpointSaveError", ["ok", None], 3), told
        assert (unsaved, untrusted, twice, unloaded) == ("CheckpointSaveError", "CheckpointSaveError", "CheckpointingException", "CheckpointLoadError")
        assert "rank 1" in why and "trust_pickle=True" in whose and "ZeroDivisionError" in text, told
