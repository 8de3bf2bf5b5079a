"""Checkpoints of PyTorch jobs: `StoragedWriter` and `StoragedReader` for DCP, and the plain `Checkpointer`."""

from ._checkpointer import CheckpointInfo, Checkpointer
from ._events import Event
from ._fence import Verdict
from ._handle import SaveFuture, SaveHandle
from ._progress import progress_bar
from ._reader import StoragedLoadPlanner, StoragedReader
from ._writer import StoragedWriter

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "Event",
    "SaveFuture",
    "SaveHandle",
    "StoragedLoadPlanner",
    "StoragedReader",
    "StoragedWriter",
    "Verdict",
    "progress_bar",
]
