"""The one budget of a call: every wait in it takes what is left, so that all of them together end in time."""

from __future__ import annotations

import time

from .errors import WaitTimeout

# What the native calls take: milliseconds in 32 bits.
LIMIT_MS_MAX = 0xFFFF_FFFF


class Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 0.0)
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds, never below 0."""
        return max(self._end - time.monotonic(), 0.0)

    def left_ms(self) -> int:
        return int(min(self.left() * 1000, LIMIT_MS_MAX))

    def passed(self) -> bool:
        return self.left() <= 0

    def later(self, seconds: float) -> Deadline:
        """One that ends so much later."""
        return Deadline(self.left() + seconds)

    def check(self, what: str) -> None:
        """Raises if no time is left for something."""
        if self.passed():
            raise WaitTimeout(f"no time is left for {what}: the limit of {self.seconds:g} s is used up")
