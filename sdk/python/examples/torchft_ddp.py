"""torchft: two replicas, one process each; one that was killed gets its state from the other through storaged.

    torchft_lighthouse --min_replicas 2 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    torchrun --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 torchft_ddp.py --replica 0 &
    torchrun --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 torchft_ddp.py --replica 1
"""

import argparse
import os
import signal
from datetime import timedelta

import torch
from storaged.torchft import StoragedTransport
from torchft import Manager, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper

arguments = argparse.ArgumentParser()
arguments.add_argument("--replica", type=int, required=True)
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="this replica kills itself after that step, the first time")
options = arguments.parse_args()

# A replica that is healed must not need this: its weights come from the other.
torch.manual_seed(7 if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else 8)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def load_state_dict(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


limit = timedelta(seconds=60)
transport = StoragedTransport()
manager = Manager(
    pg=ProcessGroupGloo(timeout=limit), min_replica_size=2, replica_id=f"replica-{options.replica}", timeout=limit, quorum_timeout=limit,
    load_state_dict=load_state_dict, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    # Healed before the step and not beside it: then its loss counts too.
    use_async_quorum=False, checkpoint_transport=transport,
)
replicated, wrapped = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
while manager.current_step() < options.steps:
    wrapped.zero_grad()
    step = manager.current_step() + 1
    # All replicas have the same data here: so the losses do not depend on how many there are.
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = (replicated(data) - data.sum(1, keepdim=True)).square().mean()
    loss.backward()
    wrapped.step()
    if manager.current_step() == step:
        print(f"step {step} loss {loss.item().hex()}", flush=True)
    if step == options.kill_at and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
manager.shutdown(wait=False)
os._exit(0)
