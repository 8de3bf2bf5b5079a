"""Client of the storaged daemon on this node. `storaged.torch` plugs it into PyTorch."""

import logging

from ._native import __version__
from ._session import Session
from ._verdict import Decision, RestartVerdict, restart_failed, verdict
from .errors import StoragedError

logging.getLogger("storaged").addHandler(logging.NullHandler())

__all__ = ["Decision", "RestartVerdict", "Session", "StoragedError", "__version__", "restart_failed", "verdict"]
