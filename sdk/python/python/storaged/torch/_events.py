"""What happened, for logs, meters and traces of the caller's own: a name, when it began, how long it took, and attributes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger("storaged")

Attribute = str | int | float | bool


@dataclass(frozen=True)
class Event:
    """`storaged.save.staged`, `storaged.save.ended`, `storaged.save.failed`, `storaged.save.skipped` or `storaged.load`.

    `began` is in seconds since the epoch and `seconds` the duration: what a span takes. Attributes are numbers and texts,
    as OpenTelemetry has them.
    """

    name: str
    began: float
    seconds: float
    attributes: dict[str, Attribute] = field(default_factory=dict)


Hook = Callable[[Event], None]


class Events:
    """Tells a hook, if there is one; what goes wrong in it is logged and stops nothing."""

    def __init__(self, hook: Hook | None, **attributes: Attribute) -> None:
        self._hook = hook
        self._attributes = attributes

    def tell(self, name: str, began: float, **attributes: Attribute) -> None:
        """`began` is of `time.time()`."""
        if self._hook is None:
            return
        event = Event(f"storaged.{name}", began, time.time() - began, self._attributes | attributes)
        try:
            self._hook(event)
        except Exception:
            logger.exception("the hook for events failed at %s", event.name)
