"""torchrun, and Slurm: a job that is told to end saves once more, the same step on all ranks, and goes on from there at its next start.

    torchrun --nproc-per-node 2 last_save.py --steps 1000000
    kill -TERM (torchrun's process)                          # or scancel, or #SBATCH --signal=TERM@90

torchrun passes SIGTERM on to its ranks and kills them 30 seconds later; Slurm does KillWait seconds later.
"""

import argparse

import torch
import torch.distributed as dist
from storaged.torch import Checkpointer

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--every", type=int, default=1000, help="steps between two saves; the last one comes beside them")
options = arguments.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"weights": torch.zeros(1000), "step": 0}

with Checkpointer(on_error="warn") as checkpointer:
    checkpointer.on_sigterm()
    checkpointer.load(state)
    print(f"rank {rank} begins after step {state['step']}", flush=True)
    for step in range(state["step"] + 1, options.steps + 1):
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        state["weights"] += gradient
        state["step"] = step
        is_last = checkpointer.is_last_step(step)
        if is_last or step % options.every == 0:
            checkpointer.save(step, state)
        if is_last:
            # Copied, and safe from the loss of this node too, before the processes go. `until="durable"` if all nodes go.
            is_safe = checkpointer.wait("protected", timeout=20)
            print(f"rank {rank} ends after step {step}, saved: {is_safe}", flush=True)
            break
dist.destroy_process_group()
