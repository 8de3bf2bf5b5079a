"""Megatron-Core: `dist_checkpointing.save(..., sharded_strategy=SaveStrategy())` and `load(..., sharded_strategy=LoadStrategy())`.

Sharded tensors and objects go through the daemon. What Megatron-Core calls common state, and its `metadata.json`, stay small files in
the checkpoint's folder: it has no other place for them. `LocalCheckpointManager` is what nvidia_resiliency_ext calls so, and needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._strategies import BACKEND, VERSION, LoadStrategy, SaveStrategy, install, latest_checkpoint, step_of_folder

if TYPE_CHECKING:
    from ._local import LocalCheckpointManager

__all__ = [
    "BACKEND",
    "VERSION",
    "LoadStrategy",
    "LocalCheckpointManager",
    "SaveStrategy",
    "install",
    "latest_checkpoint",
    "step_of_folder",
]


def __getattr__(name: str) -> Any:
    if name == "LocalCheckpointManager":
        from ._local import LocalCheckpointManager

        return LocalCheckpointManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
