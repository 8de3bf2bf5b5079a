"""A rendezvous of torchrun's that ends with a verdict on the restart. See `torchrun.py`.

Another backend does all of the rendezvous. When its round is complete one node asks its daemon and writes what is to be done into the
round's store; the others read that, so either all start their workers or none does. The first node asks; if its daemon does not
answer the second does, then the third. Without an answer the job is started as if nobody had asked. Every wait is bounded, and
gives way to signals. Where the last start has failed from the step that is offered again (`_failed_start.py`), that is counted before.

The workers of each round get a store of their own. torch (2.15) keeps one over all rounds, where they read what those before them have
written: addresses of processes that have ended, and words of other starts.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from ._failed_start import COUNTED_FROM, LastStart
from ._verdict import RestartPlan, RestartVerdict, restart_failed, verdict
from .errors import InvalidArgument, RestartRefused, StoragedError
from .torchrun import VERDICT_VARIABLE, AgreedVerdict

log = logging.getLogger("storaged.torchrun")

#: Settings that say who the job is, and where the package, in agents and workers, looks for them.
NAMED_IN = {"namespace": "STORAGED_NAMESPACE", "socket": "STORAGED_SOCKET", "token_file": "STORAGED_TOKEN_FILE"}
#: So many nodes are asked, one after the other, for a daemon that answers.
ASKED_MAX = 3
#: So often the nodes meet anew because the one that was to ask has said nothing.
ROUNDS_MAX = 3
#: Between questions while a node is waited for; each of them waits for nodes that are silent too.
ASK_AGAIN_S = 5.0
#: Where the first node says at which address the round's workers find their store.
STORE_KEY = "storaged/store"
#: Between looks at the store.
LOOK_EVERY_S = 0.25
#: What the node that asks may take beyond its own limits before the others do without it.
SLACK_S = 30.0
#: How long a node that refuses stays, so that the others can read why: it may be the one that has the store.
LINGER_S = 10.0


@dataclass(frozen=True)
class Settings:
    """From `--rdzv-conf`; the same on all nodes."""

    wait_s: int
    ask_s: int
    allow_older: bool

    @classmethod
    def of(cls, parameters: RendezvousParameters) -> Settings:
        wait_s, ask_s = parameters.get_as_int("wait_s", 300), parameters.get_as_int("ask_s", 20)
        if wait_s is None or wait_s < 0 or ask_s is None or ask_s < 1:
            raise InvalidArgument(f"expected wait_s from 0 and ask_s from 1 on in --rdzv-conf, got {wait_s} and {ask_s}")
        return cls(wait_s, ask_s, bool(parameters.get_as_bool("allow_older", False)))

    @property
    def patience_s(self) -> float:
        """How long others wait for the node that asks: a question that counts a failure, and the last one, which may begin just before its
        time is over."""
        return self.wait_s + 3 * self.ask_s + SLACK_S


class VerdictRendezvous(RendezvousHandler):
    """`over` does the rendezvous."""

    def __init__(self, over: RendezvousHandler, settings: Settings, address: str) -> None:
        self._over = over
        self._settings = settings
        self._address = address
        #: The store of this round's workers, if this is the first node.
        self._server: Any = None
        self._last = LastStart()

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> VerdictRendezvous:
        over = copy.copy(parameters)
        over.backend = parameters.get("over", "c10d")
        if over.backend in ("static", parameters.backend):
            raise InvalidArgument(
                f"over={over.backend} in --rdzv-conf has no rounds that nodes agree on: leave it out for c10d, or name another backend"
            )
        settings = Settings.of(parameters)
        for name, variable in NAMED_IN.items():
            if (value := parameters.get(name)) is not None:
                os.environ[variable] = value
        _log_as_torchrun_does()
        return cls(rendezvous_handler_registry.create_handler(over), settings, parameters.local_addr or socket.getfqdn())

    def next_rendezvous(self) -> RendezvousInfo:
        for _ in range(ROUNDS_MAX):
            met = self._over.next_rendezvous()
            self._last.say_in(met.store)
            self._serve_store(met)
            agreed = self._agree(met)
            if agreed is not None:
                self._obey(agreed, met)
                self._last.begin(met.store, was_asked=agreed.decision is not None)
                return self._with_own_store(met)
            log.warning("the node that was to ask for the verdict has said nothing for %.0f s: meeting anew", self._settings.patience_s)
        raise RendezvousTimeoutError(f"no node has told the others of a verdict in {ROUNDS_MAX} rounds: does one of them hang?")

    def _serve_store(self, met: RendezvousInfo) -> None:
        """On the first node, before it says anything else: whoever has heard its verdict finds the address."""
        if met.rank == 0 and self.use_agent_store:
            server = getattr(dist, "TCPStore")  # noqa: B009, torch does not export it by name
            self._server = server(self._address, 0, is_master=True, multi_tenant=True)
            met.store.set(STORE_KEY, json.dumps([self._address, self._server.port]))

    def _with_own_store(self, met: RendezvousInfo) -> RendezvousInfo:
        if not self.use_agent_store:
            return met
        address, port = json.loads(met.store.get(STORE_KEY))
        return RendezvousInfo(met.store, met.rank, met.world_size, RendezvousStoreInfo(address, port))

    def _agree(self, met: RendezvousInfo) -> AgreedVerdict | None:
        """What the first node says whose daemon answers, the same for all; None if a node that was to ask is silent."""
        agreed = None
        for rank in range(min(met.world_size, ASKED_MAX)):
            key = f"storaged/verdict/{rank}"
            if rank == met.rank:
                met.store.set(key, self._ask(met).to_json())
            elif not self._came(met.store, key):
                return None
            agreed = AgreedVerdict.from_json(met.store.get(key))
            if agreed.decision is not None:
                break
            log.warning("no verdict from the daemon of node %d: %s", rank, agreed.text)
        return agreed

    def _ask(self, met: RendezvousInfo) -> AgreedVerdict:
        """The verdict to act on: at once, or when waiting gains nothing more."""
        until = time.monotonic() + self._settings.wait_s
        looked = False
        try:
            while True:
                found = verdict(timeout=self._settings.ask_s)
                if not looked and found.plan is not None and self._last.is_offered_again_by(found):
                    looked = True
                    if self._last.failures(met) >= COUNTED_FROM:
                        self._count(found.namespace, found.plan)
                        continue
                why, left = found.why_wait(allow_older=self._settings.allow_older), until - time.monotonic()
                if why is None or left <= 0:
                    self._last.offer_next(met, found)
                    return AgreedVerdict.of(found, allow_older=self._settings.allow_older)
                log.info("waiting up to %.0f s more: %s", left, why)
                time.sleep(min(ASK_AGAIN_S, left))
        except StoragedError as error:
            return AgreedVerdict.unanswered(error)

    def _count(self, namespace: str, plan: RestartPlan) -> None:
        """A start from this step has failed. If it cannot be said the job goes on as if it had not."""
        try:
            failed = restart_failed(plan.step, run=plan.run, timeout=self._settings.ask_s)
        except StoragedError as error:
            log.warning("a restart from step %d has failed, which could not be counted: %s", plan.step, error)
        else:
            log.warning("a restart from step %d has failed, %d by now: the next one gets another step if there is one", failed.step, failed.times)
            if failed.wait_ms is None:
                log.warning("step %d is passed over for good: mend the fault, then `storaged plan %s --lift %d`", failed.step, namespace, failed.step)

    def _came(self, store: Any, key: str) -> bool:
        # Not `wait`: in there signals would be waited for too.
        until = time.monotonic() + self._settings.patience_s
        while not store.check([key]):
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _obey(self, agreed: AgreedVerdict, met: RendezvousInfo) -> None:
        """Tells the workers, or raises on all nodes."""
        if not agreed.may_start:
            self._linger(met)
            raise RestartRefused(f"not started, because a load would be given nothing of what was saved: {agreed.text}", agreed.exit_code)
        if agreed.decision is None:
            log.warning("starting without a verdict: none of the daemons that were asked has answered")
        else:
            log.info("starting: %s", agreed.text)
        os.environ[VERDICT_VARIABLE] = agreed.to_json()

    def _linger(self, met: RendezvousInfo) -> None:
        until = time.monotonic() + LINGER_S
        try:
            read = met.store.add("storaged/read", 1)
            while read < met.world_size and time.monotonic() < until:
                time.sleep(LOOK_EVERY_S)
                read = met.store.add("storaged/read", 0)
        except dist.DistError as error:
            # The node that had the store has counted all and left between two looks of this one; what it said has been read here.
            log.info("the store of the rendezvous is gone: %s", str(error).partition("\n")[0])

    def get_backend(self) -> str:
        return "storaged"

    @property
    def use_agent_store(self) -> bool:
        return self._over.use_agent_store

    def is_closed(self) -> bool:
        return self._over.is_closed()

    def set_closed(self) -> None:
        self._over.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        waiting = self._over.num_nodes_waiting()
        self._last.note_waiting(waiting)
        return waiting

    def get_run_id(self) -> str:
        return self._over.get_run_id()

    def shutdown(self) -> bool:
        return self._over.shutdown()


def _log_as_torchrun_does() -> None:
    """To stderr: torchrun shows what its own loggers say, and no other's. A program that has set up logging keeps it."""
    if not logging.getLogger().handlers and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
