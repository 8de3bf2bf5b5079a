"""`ResumableLoader`: a restarted process has its next batch at once, while its data loader starts again in the background."""

from __future__ import annotations

import atexit
import itertools
import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from ._arguments import shown
from ._batches import BatchRing
from ._board import own_rank
from ._session import Session
from .errors import InvalidArgument, StoragedError

logger = logging.getLogger("storaged")

__all__ = ["ResumableLoader"]


class ResumableLoader:
    """Iterates over a data loader, `ahead` batches before the training loop, and keeps batches in memory of this node's daemon.

    After a restart `load_state_dict` says which batch is the next one. If it was kept, it is there at once, and so are those
    behind it; meanwhile the loader goes in the background to where they end: by its own `load_state_dict` if it has one
    (torchdata's `StatefulDataLoader`), else by leaving out as many batches as were taken. The order is the loader's own, and no batch is
    left out or comes twice, whatever was kept. A loader without a state must give the same batches again: same seed, same
    data, and a sampler told the epoch (`set_epoch`).

    Kept are the batches ahead, and at least `behind` that were taken already: as many as there are steps between two saves, if a restart
    goes back to a save. Memory: `ahead + behind + 2` times the largest batch and a quarter, from the daemon's budget. What is kept
    counts as the same data only with the same `key`, batch size, length of the data and number of ranks.

    `rank` is by default the process group's, or RANK; ranks must differ. A daemon that is not there stops nothing: `kept`
    is then False, and a restart waits for the loader. Batches of plain CPU tensors, NumPy arrays and plain values are kept as they are,
    anything else as a pickle; they come back unpinned and without Python attributes. One iteration at a time.
    """

    def __init__(
        self,
        loader: Any,
        *,
        ahead: int = 4,
        behind: int = 2,
        key: str = "",
        rank: int | None = None,
        namespace: str | None = None,
        session: Session | None = None,
    ) -> None:
        if ahead < 1 or behind < 0:
            raise InvalidArgument(f"expected ahead from 1 and behind from 0 on, got {ahead} and {behind}: they count batches")
        self.loader = loader
        self.ahead = ahead
        #: How often the loader was gone through: passes, as training loops count epochs.
        self.epoch = 0
        #: Batches of this epoch that were taken.
        self.batch = 0
        #: Batches that did not come from the loader but had been kept by an earlier process.
        self.recovered = 0
        self._entries = ahead + behind + 2
        self._key = f"{key} {_fingerprint(loader)}"
        self._rank = own_rank(rank)
        self._session = session or Session.shared(namespace)
        self._is_stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._state: bytes | None = None
        self._is_pending = False
        self._is_restart = False
        self._is_open = False
        self._pass: _Pass | None = None
        self._ring: BatchRing | None = None
        try:
            self._ring = BatchRing(self._session, self._rank, self._entries, self._key)
        except StoragedError as error:
            self._keep_no_more(error)

    @property
    def kept(self) -> bool:
        """Whether batches are being kept for the next process."""
        return self._ring is not None

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: behind the batch that was given last. Plain values, to be saved with the model of the same step."""
        state = {"epoch": self.epoch, "batch": self.batch}
        return state if self._state is None else state | {"loader": pickle.loads(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from there. `{"epoch": e, "batch": n}` is enough, n batches of epoch e were
        taken, but for a loader with a state of its own behind the first epoch."""
        epoch, batch = state.get("epoch"), state.get("batch")
        if not isinstance(epoch, int) or not isinstance(batch, int) or epoch < 0 or batch < 0:
            raise InvalidArgument(f"expected a state with epoch and batch from 0 on, got {shown(state)}")
        self._stop()
        self.epoch, self.batch = epoch, batch
        self._state = pickle.dumps(state["loader"]) if "loader" in state else None
        self._is_pending = True

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or the rest of the one whose state was loaded. An epoch that was left begins anew, as the next one."""
        self._stop()
        if not self._is_pending:
            if self._is_open:
                self.epoch, self.batch, self._state = self.epoch + 1, 0, None
            elif self._pass is None and self._ring is not None:
                # A job that begins at the beginning wants nothing of an earlier one.
                self._ring.clear()
        self._is_restart, self._is_pending = self._is_pending, False
        self._is_open = True
        self._pass = _Pass(self, self._is_restart)
        return self._given(self._pass)

    def _given(self, one: _Pass) -> Iterator[Any]:
        try:
            while (got := one.take()) is not None:
                self.batch += 1
                batch, self._state = got
                yield batch
            self.epoch, self.batch, self._state, self._is_open = self.epoch + 1, 0, one.end, False
        finally:
            one.stop()

    def _stop(self) -> None:
        if self._pass is not None:
            self._pass.stop()

    def _keep_no_more(self, error: Exception) -> None:
        self._ring = None
        logger.warning("batches are not kept for a restart: %s", error)

    # What a pass asks for, in its thread.

    def _recovered(self, epoch: int, number: int) -> tuple[Any, bytes | None] | None:
        return None if self._ring is None else self._ring.get(epoch, number)

    def _keep(self, epoch: int, number: int, batch: Any, state: bytes | None) -> None:
        if self._ring is None:
            return
        try:
            self._ring.put(epoch, number, batch, state)
        except Exception as error:  # a batch that cannot be pickled, too
            self._keep_no_more(error)

    def _inner_from(self, number: int, state: bytes | None) -> Iterator[Any]:
        """The loader's batches from that one on; `state` is the loader's before it, if this process has not been there."""
        if self._is_stateful and state is not None:
            self.loader.load_state_dict(pickle.loads(state))
            return iter(self.loader)
        if self._is_stateful and self._is_restart and self.epoch > 0:
            # It would give the first epoch's order.
            raise InvalidArgument(
                f"expected the loader's own state to go on in epoch {self.epoch}, got epoch and batch alone: pass on all of state_dict(), "
                "as load_all() gives it"
            )
        return itertools.islice(iter(self.loader), number, None)

    def _inner_state(self) -> bytes | None:
        return pickle.dumps(self.loader.state_dict()) if self._is_stateful else None


_running: weakref.WeakSet[_Pass] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for one in list(_running):
        one.stop()


class _Pass:
    """One pass over the loader, in a thread of its own: first what was kept, then the loader's, `ahead` of whoever takes."""

    def __init__(self, of: ResumableLoader, is_restart: bool) -> None:
        self._of, self._epoch, self._first = of, of.epoch, of.batch
        self._state = of._state if is_restart else None
        #: The loader's state at the end of the epoch.
        self.end: bytes | None = None
        self._taken = of.batch
        self._ready: deque[tuple[Any, bytes | None]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_over = self._is_stopped = False
        number = self._first
        if is_restart and (got := of._recovered(self._epoch, number)) is not None:
            # The first one here, before there is a thread.
            self._ready.append(got)
            self._state = got[1]
            of.recovered += 1
            number += 1
        self._thread = threading.Thread(target=self._run, args=(number,), name="storaged-batches", daemon=True)
        self._thread.start()
        # A thread that still asks the loader while the interpreter ends would abort the process.
        _running.add(self)

    def take(self) -> tuple[Any, bytes | None] | None:
        """The next batch and the loader's state behind it; None at the end. Raises what the loader raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_over or self._error is not None)
            if self._ready:
                self._taken += 1
                self._changed.notify_all()
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        return None

    def stop(self) -> None:
        """Returns once the thread asks the loader for nothing more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, number: int) -> None:
        try:
            number = self._give_recovered(number)
            inner = self._of._inner_from(number, self._state)
            for number, batch in enumerate(inner, number):
                state = self._of._inner_state()
                if not self._has_room(number):
                    return
                self._of._keep(self._epoch, number, batch, state)
                self._give((batch, state))
            self.end = self._of._inner_state()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _give_recovered(self, number: int) -> int:
        """Hands out what was kept, as far as it follows; the number of the first that was not."""
        if number == self._first:
            return number
        while (got := self._of._recovered(self._epoch, number)) is not None:
            self._state = got[1]
            self._of.recovered += 1
            number += 1
            self._give(got)
        return number

    def _has_room(self, number: int) -> bool:
        """Waits until that batch is less than `ahead` from the one that is taken next; False if nothing more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or number - self._taken < self._of.ahead)
            return not self._is_stopped

    def _give(self, got: tuple[Any, bytes | None]) -> None:
        with self._changed:
            self._ready.append(got)
            self._changed.notify_all()


def _fingerprint(loader: Any) -> str:
    """What must be as it was for batches of an earlier process to be the same."""
    import torch.distributed as dist

    def length(of: Any) -> int | None:
        try:
            return len(of)
        except (TypeError, NotImplementedError):
            return None

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    batches = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    share = [getattr(sampler, name, None) for name in ("num_replicas", "rank", "seed", "shuffle")]
    return f"{getattr(loader, 'batch_size', None)} {batches} {length(dataset)} {type(sampler).__name__} {share} {ranks}"
