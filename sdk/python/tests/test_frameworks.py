"""The examples with the real frameworks: killed with kill -9 and started again, the losses are those of an undisturbed run."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from daemon import HERE, PACKAGE, free_port

EXAMPLES = HERE.parent / "examples"
CASES = [
    ("ddp.py", None, 2), ("fsdp2.py", None, 2), ("lightning_trainer.py", "lightning", 1), ("hf_trainer.py", "transformers", 1),
    ("accelerate_loop.py", "accelerate", 1), ("lightning_trainer.py", "lightning", 2), ("hf_trainer.py", "transformers", 2),
    ("accelerate_loop.py", "accelerate", 2), ("torchtitan_checkpoints.py", "torchtitan", 2),
    ("megatron_checkpoints.py", "megatron.core", 2), ("deepspeed_zero.py", "deepspeed", 2),
]
# What these frameworks look for beside what the daemon keeps.
WITH_FOLDER = ("megatron_checkpoints.py", "deepspeed_zero.py")
STEPS, KILLED_AT = 8, 4


def losses(daemon, namespace, example, ranks, *arguments):
    """What an example prints by step, and how its ranks ended."""
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(PACKAGE), "STORAGED_SOCKET": str(daemon.socket), "STORAGED_NAMESPACE": namespace,
        "STORAGED_TOKEN": "a-secret-of-tests", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }
    if ranks == 1:
        common = {key: value for key, value in common.items() if key not in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, str(EXAMPLES / example), "--steps", str(STEPS), *map(str, arguments)]
    environments = [common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}) for rank in range(ranks)]
    workers = [
        subprocess.Popen(command, env=one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for one in environments
    ]
    try:
        # As torchrun does: when the last rank has died, the others are ended too.
        last = workers[-1].communicate(timeout=400)[0]
        if workers[-1].returncode != 0:
            for worker in workers[:-1]:
                worker.kill()
        outputs = [worker.communicate(timeout=400)[0] for worker in workers[:-1]] + [last]
    finally:
        for worker in workers:
            worker.kill()
    found = re.findall(r"^step (\d+) loss (\S+)$", outputs[0], re.MULTILINE)
    return {int(step): loss for step, loss in found}, workers[-1].returncode, "\n".join(outputs)


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(("example", "framework", "ranks"), CASES, ids=[f"{example} on {ranks}" for example, _, ranks in CASES])
def test_killed_and_resumed(shared_daemon, tmp_path, example, framework, ranks):
    if framework is not None and not is_installed(framework):
        pytest.skip(f"{framework} is not installed: make frameworks installs it")
    folders = [("--folder", tmp_path / name) if example in WITH_FOLDER else () for name in ("straight", "killed")]
    straight, code, output = losses(shared_daemon, f"straight-{example[:-3]}-{ranks}", example, ranks, *folders[0])
    assert code == 0 and sorted(straight) == list(range(1, STEPS + 1)), output
    before, code, output = losses(shared_daemon, f"killed-{example[:-3]}-{ranks}", example, ranks, *folders[1], "--kill-at", KILLED_AT)
    assert code == -9 and max(before) in (KILLED_AT, KILLED_AT + 1), output
    after, code, output = losses(shared_daemon, f"killed-{example[:-3]}-{ranks}", example, ranks, *folders[1])
    assert code == 0 and min(after) > 1 and max(after) == STEPS, output
    assert before | after == straight, (before, after, straight)
    assert all(straight[step] == before[step] for step in before)


def test_a_lightning_job_makes_the_slots_of_its_first_save_while_it_trains(session, tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="make frameworks installs lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from storaged.lightning import StoragedCheckpointIO, StoragedPrepare
    from storaged.torch import Checkpointer

    made = []
    prepare = Checkpointer.prepare
    monkeypatch.setattr(Checkpointer, "prepare", lambda self, state: made.append(prepare(self, state)) or made[-1])
    storage = StoragedCheckpointIO(session=session)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=4, plugins=[storage], logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1), StoragedPrepare()],
    )
    trainer.fit(BoringModel())
    assert len(made) == 1 and made[0].result(10) > 0
    assert storage.newest() == "storaged-newest-step=3"
