"""torchrun with storaged's rendezvous: before each start the nodes agree on what a load would get, and tell the workers.

    torchrun --nproc-per-node 2 --max-restarts 3 --rdzv-backend storaged --rdzv-endpoint localhost:29400 \
        --rdzv-conf namespace=first torchrun_rendezvous.py --steps 1000

Kill a worker: torchrun starts all of them again, and they say what they were told.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from storaged.torch import Checkpointer
from storaged.torchrun import agreed_verdict

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--pause", type=float, default=0.1, help="seconds that a step takes")
options = arguments.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"weights": torch.zeros(1000), "step": 0}
told = agreed_verdict()

with Checkpointer(on_error="warn") as checkpointer:
    # An older step than a load takes by itself is taken where --rdzv-conf says allow_older=1, else nothing was started.
    checkpointer.load(state, allow_older=told is not None and told.needs_allow_older)
    decision = told.decision.value if told and told.decision else "nothing"
    print(f"rank {rank} pid {os.getpid()} told {decision} step {told and told.step}, begins after step {state['step']}", flush=True)
    for step in range(state["step"] + 1, options.steps + 1):
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        state["weights"] += gradient
        state["step"] = step
        time.sleep(options.pause)
        checkpointer.save(step, state)
    print(f"rank {rank} ends after step {state['step']}", flush=True)
dist.destroy_process_group()
