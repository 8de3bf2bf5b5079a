"""Accelerate: what was prepared and registered, saved by one call.

    accelerate launch accelerate_loop.py --steps 20
"""

import argparse
import os
import signal

import torch
from accelerate import Accelerator
from storaged.huggingface import load_state, save_state
from storaged.torch import Checkpointer

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="kills itself after this step was saved")
options = arguments.parse_args()


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


torch.manual_seed(7)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
progress = Progress()
accelerator.register_for_checkpointing(progress)

with Checkpointer(on_error="warn") as checkpointer:
    load_state(accelerator, checkpointer)
    while progress.step < options.steps:
        progress.step += 1
        seed = progress.step * accelerator.num_processes + accelerator.process_index
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        if accelerator.is_main_process:
            print(f"step {progress.step} loss {loss.item().hex()}", flush=True)
        save_state(accelerator, checkpointer, progress.step)
        if progress.step == options.kill_at:
            checkpointer.wait()
            accelerator.wait_for_everyone()
            if accelerator.process_index == accelerator.num_processes - 1:
                os.kill(os.getpid(), signal.SIGKILL)
