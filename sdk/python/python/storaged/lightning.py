"""PyTorch Lightning: `Trainer(plugins=[StoragedCheckpointIO("job")], callbacks=[StoragedPrepare()])`, and `fit(..., ckpt_path=io.newest())`
to go on.

For strategies that save on rank 0 alone (one device, DDP). FSDP and model-parallel strategies do not use a CheckpointIO.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from .errors import NoCheckpointError
from .torch import Checkpointer
from .torch._whole import pack, unpack

if TYPE_CHECKING:
    Callback = object
    CheckpointIO = object
else:
    try:
        from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

        try:
            from pytorch_lightning.callbacks import Callback
        except ImportError:  # Fabric alone has none, and needs none
            Callback = object

logger = logging.getLogger("storaged")

NEWEST = "storaged-newest"


class StoragedCheckpointIO(CheckpointIO):
    """Saves what Lightning hands over as the checkpoint of its `global_step`, in the background.

    `path` only names the step: `epoch=1-step=40.ckpt`. Files are never written, and `save_top_k` keeps nothing: the daemon's
    retention does. Settings are those of `Checkpointer`; a failed save is logged unless `on_error="raise"`.
    """

    def __init__(self, namespace: str | None = None, **settings: Any) -> None:
        self._trust = bool(settings.get("trust_pickle", False))
        self._namespace = namespace
        self._settings = {"on_error": "warn", **settings}
        self._checkpointer: Checkpointer | None = None
        self._last_step: int | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """Made when first needed: on the rank that saves."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self._namespace, alone=True, **self._settings)
        return self._checkpointer

    def newest(self) -> str | None:
        """What `fit(ckpt_path=...)` takes to go on from the newest checkpoint, or None if nothing was saved yet."""
        step = self.checkpointer.latest_step()
        return None if step is None else f"{NEWEST}-step={step}"

    def prepare(self, checkpoint: dict[str, Any]) -> None:
        """Makes the slots of the first save of such a checkpoint in the background; on the rank that saves."""
        self.checkpointer.prepare(pack(checkpoint, self._trust))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        step = int(checkpoint["global_step"])
        # Callbacks may ask for the same step under several names (`save_last`).
        if step != self._last_step:
            self._last_step = step
            # Lightning trains on: it would not wait for a copy in the background.
            self.checkpointer.save(step, pack(checkpoint, self._trust), background=False)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        found = re.search(r"step[=_-](\d+)", str(path))
        state = self.checkpointer.load_all(int(found.group(1)) if found else None)
        if state is None:
            raise NoCheckpointError(f"nothing was saved yet in {self.checkpointer.session.namespace}: fit without ckpt_path")
        loaded: dict[str, Any] = unpack(state, self._trust)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """The daemon's retention removes checkpoints."""

    def teardown(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


class StoragedPrepare(Callback):
    """Makes the slots of the first save after the optimizer's first step, while training goes on: that save is as fast as later ones.

    Opens the run. Lightning has no public way to ask for a checkpoint: where its own fails, that is logged, and the first save
    makes its slots itself.
    """

    def __init__(self) -> None:
        self._is_done = False

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        if self._is_done or trainer.global_step < 1:
            return
        self._is_done = True
        try:
            storage = trainer.strategy.checkpoint_io
            if not isinstance(storage, StoragedCheckpointIO):
                logger.warning("nothing is made ahead: the trainer saves with %s", type(storage).__name__)
                return
            # On all ranks: strategies may gather.
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            if trainer.is_global_zero:
                storage.prepare(checkpoint)
        except Exception as error:
            logger.warning("nothing is made ahead: %s: %s", type(error).__name__, error)
