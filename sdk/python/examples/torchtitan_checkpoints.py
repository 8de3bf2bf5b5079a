"""torchtitan's own checkpoint manager, with `storaged://` as its folder and nothing else changed.

    torchrun --nproc-per-node 2 torchtitan_checkpoints.py --steps 20

Training is a few lines here, because torchtitan's trainer needs a GPU; `CheckpointManager` is the one that it uses.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="the last rank kills itself after this step was saved")
arguments.add_argument("--async-mode", default="async")
options = arguments.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """As torchtitan's container: states by parameter, flat."""

    def state_dict(self):
        return get_optimizer_state_dict(model, optimizer, options=FLAT)

    def load_state_dict(self, state):
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)


class TrainState:
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


train = TrainState()
config = CheckpointManager.Config(
    enable=True, folder=f"storaged://{os.environ.get('STORAGED_NAMESPACE', 'default')}", interval=1, async_mode=options.async_mode
)
checkpointer = CheckpointManager(
    config, dataloader=None, model_parts=[model], optimizers=Optimizers(), lr_schedulers=scheduler,
    states={"train_state": train}, sd_adapter=None, base_folder="./outputs",
)
checkpointer.load()
for step in range(train.step + 1, options.steps + 1):
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank))
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    checkpointer.maybe_wait_for_staging()
    optimizer.step()
    scheduler.step()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item().hex()}", flush=True)
    train.step = step
    checkpointer.save(step)
    if step == options.kill_at:
        checkpointer.maybe_wait_for_saving()
        dist.barrier()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
checkpointer.maybe_wait_for_saving()
checkpointer.close()
dist.destroy_process_group()
