"""The Hugging Face Trainer's adapter: what is not seen from its losses."""

import pytest
import torch


def test_slots_are_made_after_the_first_step(session, tmp_path):
    transformers = pytest.importorskip("transformers", reason="make frameworks installs it")
    from storaged.huggingface import StoragedTrainer
    from storaged.torch import Checkpointer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(512, 512)

        def forward(self, x, labels=None):
            return {"loss": (self.inner(x).sum(1) - labels).square().mean()}

    class MyTrainer(StoragedTrainer, transformers.Trainer):
        pass

    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_steps=100, report_to=[], use_cpu=True, disable_tqdm=True,
    )
    trainer = MyTrainer(Model(), settings, train_dataset=[{"x": torch.ones(512), "labels": torch.tensor(1.0)}] * 4)
    trainer.storaged, prepared = Checkpointer(session=session), []
    prepare = trainer.storaged.prepare
    trainer.storaged.prepare = lambda state: prepared.append(prepare(state))
    trainer.train()
    # Weights and both moments, in two slots. It saves after its last step only.
    (made,) = prepared
    assert made.result(60) >= 2 * 3 * (512 * 512 * 4)
    assert trainer.storaged.latest_step() == 2
    trainer.storaged.close()
