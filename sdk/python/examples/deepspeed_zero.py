"""DeepSpeed, ZeRO 1: every rank saves its part of the optimizer, and a restart goes on bit for bit.

    torchrun --nproc-per-node 2 deepspeed_zero.py --steps 20 --folder /shared/job
"""

import argparse
import os
import signal
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from storaged.deepspeed import StoragedCheckpointEngine

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--folder", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / os.environ.get("STORAGED_NAMESPACE", "job"))
arguments.add_argument("--kill-at", type=int, help="the last rank kills itself after this step was saved")
options = arguments.parse_args()

# DeepSpeed would compile a collective of its own for CPUs, which needs ninja and a compiler.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
settings = {
    "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
}
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=settings)
# ZeRO saves its loss scaler as an object of its own class.
engine.checkpoint_engine = StoragedCheckpointEngine(trust_pickle=True)

engine.load_checkpoint(str(options.folder))
for step in range(engine.global_steps + 1, options.steps + 1):
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank))
    loss = (engine(data) - data.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item().hex()}", flush=True)
    engine.save_checkpoint(str(options.folder))
    if step == options.kill_at and rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
