"""What a save hands back: futures that can be waited for in threads, and awaited in coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from .._deadline import Deadline
from .._session import Session
from ..errors import InvalidArgument, WaitTimeout

T = TypeVar("T")

STATES = ("staged", "committed", "protected", "durable")
#: A future of a state ends with `WaitTimeout` after this long, in seconds.
FUTURE_SECONDS = 3600.0


class SaveFuture(Future[T]):
    """A future of `concurrent.futures` that a coroutine can await."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class SaveHandle:
    """One save. `staged` is done when parameters may change again, and has the exception if staging failed.

    `committed`, `protected` and `durable` are futures of the state's name, done when the checkpoint has reached it; each has
    the exception if it never will. A thread waits for each that is asked for. All of them can be awaited, and `await handle`
    is `await handle.committed`.
    """

    def __init__(self, session: Session, run: str | None) -> None:
        self.session = session
        self.run = run
        self.step: int | None = None
        self.staged: SaveFuture[None] = SaveFuture()
        #: Done when the save ended on all ranks (`Checkpointer` only); has the exception if it failed.
        self.saved: Future[None] | None = None
        #: How many more node losses the checkpoint survived when it was last waited for, and how many with every block in
        #: place; None if it is not coded, nobody waited yet, or this node had not heard of all its blocks.
        self.bears: tuple[int, int] | None = None
        self._futures: dict[str, SaveFuture[str]] = {}

    def __await__(self) -> Generator[Any, None, str]:
        return self.committed.__await__()

    @property
    def committed(self) -> SaveFuture[str]:
        """Done when every rank has staged and the manifest is agreed."""
        return self._future("committed")

    @property
    def protected(self) -> SaveFuture[str]:
        """Done when the checkpoint survives lost nodes; `bears` says how many."""
        return self._future("protected")

    @property
    def durable(self) -> SaveFuture[str]:
        """Done when the durable tier holds it. Most steps never go there: pass `durable="required"` to save one that does."""
        return self._future("durable")

    def wait(self, until: str = "committed", timeout: float = 120.0) -> str:
        """Waits until the checkpoint is at least in that state; the state that it is in. Ends within `timeout` and 1 s."""
        deadline = Deadline(timeout)
        if self.saved is not None:
            self._wait_saved(deadline)
        if self.step is None or self.run is None:
            raise InvalidArgument("the save has not reached its step yet: wait for async_save's future first")
        return self._reached(until, deadline)

    def _future(self, state: str) -> SaveFuture[str]:
        future = self._futures.get(state)
        if future is None:
            future = self._futures[state] = SaveFuture()
            threading.Thread(target=self._fill, args=(state, future), name=f"storaged-{state}", daemon=True).start()
        return future

    def _fill(self, state: str, future: SaveFuture[str]) -> None:
        try:
            self.staged.result(FUTURE_SECONDS)
            reached = self.wait(state, FUTURE_SECONDS)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(reached)

    def _reached(self, until: str, deadline: Deadline) -> str:
        assert self.step is not None and self.run is not None
        reached = self.session.connect(deadline).wait(self.run, self.step, until, deadline.left_ms())
        state, _, self.bears = reached
        return state

    def _wait_saved(self, deadline: Deadline) -> None:
        assert self.saved is not None
        try:
            self.saved.result(deadline.left())
        except TimeoutError as error:
            if self.saved.done():
                raise
            raise WaitTimeout(f"expected step {self.step} to be saved within {deadline.seconds:g} s, it is still being saved") from error

    def _fail(self, error: BaseException) -> None:
        if not self.staged.done():
            self.staged.set_exception(error)
