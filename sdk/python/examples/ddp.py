"""torchrun, DistributedDataParallel: every rank saves, and a restart goes on bit for bit.

    torchrun --nproc-per-node 2 ddp.py --steps 20
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from storaged.torch import Checkpointer
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="the last rank kills itself after this step was saved")
options = arguments.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_at(step):
    return {
        # The same on all ranks: one of them saves it.
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "step": step,
        # Each rank's own.
        f"random{rank}": torch.get_rng_state(),
    }


with Checkpointer(on_error="warn") as checkpointer:
    checkpointer.watch(optimizer, lambda: state_at(0))
    # Without a template: the optimizer has no states before its first step.
    whole = checkpointer.load_all()
    first = 1
    if whole is not None:
        model.load_state_dict(whole["model"])
        fresh = optimizer.state_dict()
        states = {int(key): value for key, value in whole["optimizer"].items()}
        optimizer.load_state_dict(fresh | {"state": states})
        torch.set_rng_state(whole[f"random{rank}"])
        first = whole["step"] + 1
    for step in range(first, options.steps + 1):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank))
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item().hex()}", flush=True)
        checkpointer.save(step, state_at(step))
        if step == options.kill_at:
            checkpointer.wait()
            dist.barrier()
            if rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
