"""torchrun, FSDP2: each rank saves its shards, and a restart may have another number of ranks.

    torchrun --nproc-per-node 2 fsdp2.py --steps 20
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from storaged.torch import Checkpointer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="the last rank kills itself after this step was saved")
options = arguments.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_at(step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


with Checkpointer(on_error="warn") as checkpointer:
    state = state_at(0)
    checkpointer.prepare(state)
    if checkpointer.load(state) is not None:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(state["step"] + 1, options.steps + 1):
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
