"""Hugging Face Trainer: one more base class. One process, or DDP.

    python hf_trainer.py --steps 20
    torchrun --nproc-per-node 2 hf_trainer.py --steps 20
"""

import argparse
import os
import signal
import tempfile

import torch
from storaged.huggingface import StoragedTrainer
from transformers import Trainer, TrainerCallback, TrainingArguments

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="kills itself after this step was saved")
options = arguments.parse_args()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def forward(self, x, labels=None):
        loss = (self.inner(x).squeeze(1) - labels).square().mean()
        return {"loss": loss}


class MyTrainer(StoragedTrainer, Trainer):
    pass


class Watch(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']).hex()}", flush=True)

    def on_save(self, args, state, control, **_):
        if state.global_step == options.kill_at:
            trainer.storaged.wait()
            trainer.accelerator.wait_for_everyone()
            if args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(7)
samples = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
settings = TrainingArguments(
    tempfile.mkdtemp(), max_steps=options.steps, per_device_train_batch_size=4, save_steps=1, logging_steps=1, report_to=[],
    use_cpu=True, disable_tqdm=True, learning_rate=1e-2, ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
)
dataset = [{"x": sample, "labels": sample.sum()} for sample in samples]
trainer = MyTrainer(Model(), settings, train_dataset=dataset, callbacks=[Watch()])
trainer.train(resume_from_checkpoint=True)
