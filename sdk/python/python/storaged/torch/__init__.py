"""Checkpoints of PyTorch jobs: `StoragedWriter` and `StoragedReader` for DCP, and the plain `Checkpointer`."""

from ._checkpointer import Checkpointer
from ._reader import StoragedLoadPlanner, StoragedReader
from ._writer import SaveHandle, StoragedWriter

__all__ = ["Checkpointer", "SaveHandle", "StoragedLoadPlanner", "StoragedReader", "StoragedWriter"]
