"""Hugging Face: `class MyTrainer(StoragedTrainer, Trainer)` saves to and resumes from storaged; `save_state` and
`load_state` do the same for a loop of one's own with Accelerate.

For one process and DDP. FSDP and DeepSpeed states are sharded in ways that these two leave to their own files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import StoragedError
from .torch import Checkpointer
from .torch._rng import random_states, set_random_states
from .torch._whole import pack, unpack


class StoragedTrainer:
    """Put before `transformers.Trainer` among the bases. `train(resume_from_checkpoint=True)` goes on from the newest checkpoint,
    or begins anew if there is none.

    `storaged` is the checkpointer: set it before training to have other settings than the environment's. Model, optimizer,
    scheduler, random states and the trainer's state are saved; only `trainer_state.json` is written to `output_dir`.
    """

    storaged: Checkpointer | None = None
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _storaged_loaded: dict[str, Any] | None = None

    def _storaged(self) -> Checkpointer:
        if self.storaged is None:
            self.storaged = Checkpointer(on_error="warn")
        return self.storaged

    def create_scheduler(self, *arguments: Any, **named: Any) -> Any:
        # The last thing that is made before training, in every release.
        made = super().create_scheduler(*arguments, **named)  # type: ignore[misc]
        if self.args.save_strategy != "no":
            # Accelerate's own takes no hooks.
            self._storaged().watch(getattr(self.optimizer, "optimizer", self.optimizer), self._storaged_state)
        return made

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # The next update is the trainer's own business: nobody would wait for a copy in the background.
        self._storaged().save(self.state.global_step, self._storaged_state(), background=False)

    def _storaged_state(self) -> dict[str, Any]:
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "trainer": json.dumps(_plain(self.state), sort_keys=True),
        }
        return _of_ranks(shared, int(self.args.process_index))

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._storaged_folder()
        try:
            trained = super().train(resume_from_checkpoint, *arguments, **named)  # type: ignore[misc]
        finally:
            self._storaged_loaded = None
        self._storaged().wait()
        return trained

    def _storaged_folder(self) -> str | None:
        """The folder that the trainer reads its own state from, of the newest checkpoint, which is loaded."""
        state = self._storaged().load_all()
        if state is None:
            return None
        # It goes on to save such states.
        self._storaged().prepare(state)
        self._storaged_loaded = _own_part(state, int(self.args.process_index))
        trainer = self._storaged_loaded["trainer"]
        folder = Path(self.args.output_dir) / f"checkpoint-{json.loads(trainer)['global_step']}"
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"trainer_state.json.{os.getpid()}"
        written.write_text(trainer)
        written.replace(folder / "trainer_state.json")
        return str(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load_state_dict(self._loaded()["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.optimizer.load_state_dict(self._loaded()["optimizer"])
            self.lr_scheduler.load_state_dict(self._loaded()["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._loaded()["random"] is not None:
            set_random_states(self._loaded()["random"])

    def _loaded(self) -> dict[str, Any]:
        if self._storaged_loaded is None:
            raise StoragedError("train(resume_from_checkpoint=True) resumes from storaged; a folder was given, which it does not read")
        return self._storaged_loaded


def save_state(accelerator: Any, checkpointer: Checkpointer, step: int) -> None:
    """What `accelerator.save_state` saves: models, optimizers, schedulers, objects that were registered, random states.

    Every process calls it.
    """
    parts = _parts(accelerator)
    shared = {name: [part.state_dict() for part in of_kind] for name, of_kind in parts.items()}
    checkpointer.save(step, _of_ranks(shared, int(accelerator.process_index)))


def load_state(accelerator: Any, checkpointer: Checkpointer, step: int | None = None) -> bool:
    """Puts it back into what was prepared and registered; False if nothing was saved yet. Every process calls it."""
    state = checkpointer.load_all(step)
    if state is None:
        return False
    loaded = _own_part(state, int(accelerator.process_index))
    for name, of_kind in _parts(accelerator).items():
        if len(loaded[name]) != len(of_kind):
            raise StoragedError(f"expected {len(loaded[name])} {name} as they were saved, {len(of_kind)} were prepared or registered")
        for part, saved in zip(of_kind, loaded[name]):
            part.load_state_dict(saved)
    if loaded["random"] is not None:
        set_random_states(loaded["random"])
    return True


def _parts(accelerator: Any) -> dict[str, list[Any]]:
    # Accelerate has no public list of what it has prepared; its own save_state reads these.
    return {
        "models": accelerator._models,
        "optimizers": accelerator._optimizers,
        "schedulers": accelerator._schedulers,
        "objects": accelerator._custom_objects,
    }


def _of_ranks(shared: Any, rank: int) -> dict[str, Any]:
    """What is the same on all ranks, and this rank's random states."""
    return {"shared": pack(shared), f"rank{rank}": pack(random_states())}


def _own_part(state: dict[str, Any], rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = unpack(state["shared"])
    own = state.get(f"rank{rank}")
    # There may be more ranks now than there were.
    loaded["random"] = None if own is None else unpack(own)
    return loaded


def _plain(state: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(vars(state), default=lambda other: None))
    return fields
