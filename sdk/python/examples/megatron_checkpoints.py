"""Megatron-Core's dist_checkpointing: a layer's rows on two ranks, saved and loaded through the daemon.

    torchrun --nproc-per-node 2 megatron_checkpoints.py --steps 20 --folder /shared/job --asynchronous
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from storaged.megatron import LoadStrategy, SaveStrategy, latest_checkpoint

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--folder", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / os.environ.get("STORAGED_NAMESPACE", "job"))
arguments.add_argument("--asynchronous", action="store_true", help="train on while a step is committed")
arguments.add_argument("--kill-at", type=int, help="the last rank kills itself after this step was saved, or while it is being saved")
options = arguments.parse_args()

if not torch.cuda.is_available():
    # Megatron-Core's queue counts on a GPU which saves have ended.
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7 + rank)
# Each rank has its rows of one matrix, and both the same bias.
rows, bias = torch.nn.Parameter(torch.randn(4, 16)), torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([rows, bias], lr=1e-3, momentum=0.9)


def sharded_state(momenta):
    state = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows.detach(), (0, rank, world)),
        "bias": ShardedTensor.from_rank_offsets("bias", bias.detach(), replica_id=rank),
        "random": ShardedObject("random", torch.get_rng_state(), (world,), (rank,)),
    }
    if momenta is not None:
        state["rows momentum"] = ShardedTensor.from_rank_offsets("rows momentum", momenta[0], (0, rank, world))
        state["bias momentum"] = ShardedTensor.from_rank_offsets("bias momentum", momenta[1], replica_id=rank)
    return state


def folder_of(step):
    return options.folder / f"iter_{step:07d}"


first, strategy, queue = 1, SaveStrategy(), AsyncCallsQueue()
newest = latest_checkpoint(options.folder)
if newest is not None:
    momenta = [torch.zeros_like(rows), torch.zeros_like(bias)]
    loaded = dist_checkpointing.load(sharded_state(momenta), newest, sharded_strategy=LoadStrategy())
    with torch.no_grad():
        rows.copy_(loaded["rows"])
        bias.copy_(loaded["bias"])
    for parameter, name in ((rows, "rows momentum"), (bias, "bias momentum")):
        optimizer.state[parameter]["momentum_buffer"] = loaded[name]
    torch.set_rng_state(loaded["random"])
    first = loaded["step"] + 1
for step in range(first, options.steps + 1):
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) + 0.01 * torch.randn(1)
    loss = ((data @ rows.T).sum(1) + bias - data.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(bias.grad)
    optimizer.step()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item().hex()}", flush=True)
        folder_of(step).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in (rows, bias)]
    # What ended meanwhile gets its metadata.json.
    queue.maybe_finalize_async_calls(blocking=False)
    request = dist_checkpointing.save(
        {**sharded_state(momenta), "step": step}, str(folder_of(step)), strategy, async_sharded_save=options.asynchronous
    )
    if request is not None:
        queue.schedule_async_request(request)
    if step == options.kill_at and rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
queue.maybe_finalize_async_calls(blocking=True)
dist.destroy_process_group()
