"""PyTorch Lightning: one plugin, and the newest checkpoint to go on from. One process, or DDP.

    python lightning_trainer.py --steps 20
    torchrun --nproc-per-node 2 lightning_trainer.py --steps 20
"""

import argparse
import os
import signal
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from storaged.lightning import StoragedCheckpointIO, StoragedPrepare

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--kill-at", type=int, help="kills itself after this step was saved")
options = arguments.parse_args()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        # A function of the step: where a loader stood within an epoch, Lightning restores only of loaders with a state.
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.global_step * world + rank))
        return (self.inner(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Watch(Callback):
    def on_train_batch_end(self, trainer, module, outputs, *_):
        if rank == 0:
            print(f"step {trainer.global_step} loss {outputs['loss'].item().hex()}", flush=True)
        # Callbacks that save run after all others: this one comes a step later than the save that it waits for.
        if options.kill_at is not None and trainer.global_step == options.kill_at + 1:
            if rank == 0:
                storage.checkpointer.wait()
            trainer.strategy.barrier()
            if rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(7)
storage = StoragedCheckpointIO()
trainer = Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp" if world > 1 else "auto",
    max_steps=options.steps,
    plugins=[storage],
    callbacks=[ModelCheckpoint(tempfile.mkdtemp(), every_n_train_steps=1, save_top_k=-1), StoragedPrepare(), Watch()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(16, 1), batch_size=4), ckpt_path=storage.newest())
