"""Whether a start of a torchrun job has failed from its step, as far as the rounds of the rendezvous tell. See `_rendezvous.py`.

No backend is told why the workers of a round have ended. What can be known: the nodes are the ones that began from the step, workers of one of
them have failed there, and nothing newer was saved. That may be a machine's fault once; twice in a row it is taken for the step's. So in each round every node says which start it comes from, and
the one that asks for the verdict counts them. A node that was lost, or one that has come, says another start or none.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

    from ._verdict import RestartVerdict

#: Where the node that asks says which start this round is to be.
START_KEY = "storaged/start"
#: Nodes that were in no start before.
CAME_NEW_KEY = "storaged/came/new"
#: All nodes of a round say where they come from when they have met. One that is older, and says nothing, is waited for so long.
COME_WITHIN_S = 10.0
#: A first failure may be a process that was killed, a link or a machine: the step is tried once more before any failure of it is counted.
COUNTED_FROM = 2
#: Between looks at the store.
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Start:
    """What the nodes of a round have begun from."""

    name: str
    """Of this start alone."""
    nodes: int
    run: str
    step: int
    newest_run: str | None
    newest_step: int | None
    """What had been committed by then, restorable or not."""
    failed_before: int = 0
    """Starts of the same nodes from the same, one after the other, that have failed before this one."""

    @classmethod
    def of(cls, found: RestartVerdict, nodes: int, failed_before: int = 0) -> Start | None:
        if found.plan is None:
            return None
        run, step = found.newest_seen or (None, None)
        return cls(uuid.uuid4().hex, nodes, found.plan.run, found.plan.step, run, step, failed_before)

    @property
    def came_key(self) -> str:
        return f"storaged/came/{self.name}"

    @property
    def failed_key(self) -> str:
        return f"storaged/failed/{self.name}"

    def is_offered_again_by(self, found: RestartVerdict) -> bool:
        """The same step is the newest one, and nothing newer was saved since, not even something that is lost by now."""
        again = Start.of(found, self.nodes, self.failed_before)
        return again is not None and asdict(again) | {"name": self.name} == asdict(self)


class LastStart:
    """Of one agent: what it has begun from."""

    def __init__(self) -> None:
        self._start: Start | None = None
        self._others_wait = False
        self._failures = 0

    def note_waiting(self, nodes: int) -> None:
        """The agent asks this while its own workers are well, and meets the others anew if somebody waits."""
        self._others_wait = nodes > 0

    def say_in(self, store: Any) -> None:
        """Once in each round."""
        if self._start is None:
            store.add(CAME_NEW_KEY, 1)
            return
        if not self._others_wait:
            store.add(self._start.failed_key, 1)
        store.add(self._start.came_key, 1)

    def is_offered_again_by(self, found: RestartVerdict) -> bool:
        return self._start is not None and self._start.is_offered_again_by(found)

    def failures(self, met: RendezvousInfo) -> int:
        """For the node that asks, if its step is offered again: how many starts from it have failed one after the other; none if the last one did not."""
        start = self._start
        same = start is not None and start.nodes == met.world_size and _all_came(met.store, start)
        if same and start is not None and met.store.add(start.failed_key, 0) > 0:
            self._failures = start.failed_before + 1
        return self._failures

    def offer_next(self, met: RendezvousInfo, found: RestartVerdict) -> None:
        """By the node that asks, before it says the verdict."""
        start = Start.of(found, met.world_size, self._failures if self.is_offered_again_by(found) else 0)
        met.store.set(START_KEY, json.dumps(None if start is None else asdict(start)))

    def begin(self, store: Any, *, was_asked: bool) -> None:
        """By all nodes, once their workers are to be started. Without a verdict nobody knows from where."""
        said = json.loads(store.get(START_KEY)) if was_asked and store.check([START_KEY]) else None
        self._start = None if said is None else Start(**said)
        self._others_wait = False
        self._failures = 0


def _all_came(store: Any, start: Start) -> bool:
    """Whether the nodes of this round are those of that start. Not `wait`: in there signals would be waited for too."""
    until = time.monotonic() + COME_WITHIN_S
    while store.add(start.came_key, 0) < start.nodes:
        if store.add(CAME_NEW_KEY, 0) > 0 or time.monotonic() >= until:
            return False
        time.sleep(LOOK_EVERY_S)
    return True
