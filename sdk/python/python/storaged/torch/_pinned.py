"""Slots that are page-locked for GPUs: each once, as long as its connection uses it, and given back before its memory goes."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from .. import _native
from . import _devices

logger = logging.getLogger("storaged")

#: Slots that stay page-locked: as many as a connection keeps mapped.
PINNED_MAX = 8
#: How long the end of the process waits for memory to be given back, in seconds: a device that hangs would never do it.
EXIT_SECONDS = 5.0


class _Clerk:
    """The thread that page-locks and gives back, for the whole process.

    An error of CUDA's stays with the thread that met it, and PyTorch's next launch of a kernel there takes it for its own: a slot that
    cannot be page-locked must not fail the trainer. And memory is given back from wherever Python collects its owner, where
    nothing may be waited for.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        # The one queue that may be used where garbage is collected.
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="storaged-pin", daemon=True).start()

    def register(self, device: int, slot: _native.Slot) -> str | None:
        """Why the slot could not be page-locked, if it could not."""
        outcome: Future[str | None] = Future()

        def job() -> None:
            try:
                error = _devices.register(device, slot.address, slot.capacity)
                outcome.set_result(f"CUDA error {error}" if error else None)
            except Exception as error:
                outcome.set_result(f"{type(error).__name__}: {error}")

        self._jobs.put(job)
        try:
            return outcome.result()
        except BaseException:
            # Ctrl-C: nobody will have it.
            self._jobs.put(lambda: None if outcome.result() else self.unregister(device, slot))
            raise

    def unregister(self, device: int, slot: _native.Slot) -> None:
        """Gives it back, later; the slot stays mapped until then."""

        def job() -> None:
            error = _devices.unregister(device, slot.address)
            if error:
                logger.warning("page-locked memory could not be given back: CUDA error %d", error)

        self._jobs.put(job)

    def finish(self, seconds: float) -> None:
        """Waits for what was given to it so far."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait(seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as error:
                logger.warning("page-locked memory could not be given back: %s", error)
            del job  # it keeps a slot


_clerk: _Clerk | None = None
_clerk_lock = threading.Lock()
_all: weakref.WeakSet[Pins] = weakref.WeakSet()


def _clerk_of_process() -> _Clerk:
    global _clerk
    with _clerk_lock:
        # A child of a fork has none of its parent's threads.
        if _clerk is None or _clerk.pid != os.getpid():
            _clerk = _Clerk()
        return _clerk


def _give_back(clerk: _Clerk, device: int, slot: _native.Slot) -> None:
    # What a parent has page-locked is no business of its child's, and CUDA is out of its reach.
    if clerk.pid == os.getpid():
        clerk.unregister(device, slot)


class Pinned:
    """A slot that is page-locked as long as this lives; or why it is not."""

    def __init__(self, slot: _native.Slot, device: int) -> None:
        self.address = slot.address
        clerk = _clerk_of_process()
        self.error = clerk.register(device, slot)
        if self.error is None:
            # It keeps the slot, and so the mapping, until it has run.
            weakref.finalize(self, _give_back, clerk, device, slot).atexit = False


class Pins:
    """The page-locked slots of one connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the slot's number; the one that was used last at the end.
        self._known: dict[int, Pinned] = {}
        self._has_warned = False
        _all.add(self)

    def of(self, slot: _native.Slot, device: int) -> Pinned | None:
        """Page-locks the slot, if that was not tried before; None if it cannot be. Who copies keeps what comes of it until the copy ended."""
        with self._lock:
            known = self._known.pop(slot.id, None)
            if known is None or known.address != slot.address:
                known = None  # the number's earlier memory goes first
                slot.get_ready()  # piece by piece: the driver would do it in one call, and hold up all that maps memory
                known = Pinned(slot, device)
                self._warn(slot, known)
            self._known[slot.id] = known
            while len(self._known) > PINNED_MAX:
                del self._known[next(iter(self._known))]
            return known if known.error is None else None

    def clear(self) -> None:
        """Gives all of them back, each once nobody copies into it."""
        self._known.clear()

    def _warn(self, slot: _native.Slot, pinned: Pinned) -> None:
        if pinned.error is None or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "a slot of %.0f MiB could not be page-locked (%s): tensors on GPUs are copied through two page-locked blocks instead",
            slot.capacity / 2**20, pinned.error,
        )


@atexit.register
def _give_all_back() -> None:
    """While CUDA is still there."""
    if _clerk is None or _clerk.pid != os.getpid():
        return
    for pins in list(_all):
        pins.clear()
    _clerk.finish(EXIT_SECONDS)
