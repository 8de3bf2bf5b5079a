"""What a launcher should make of a restart: the verdict, in types.

    verdict = storaged.verdict("llama-70b")
    print(verdict)
    if verdict.decision is Decision.IMPOSSIBLE and not verdict.is_first_start:
        sys.exit(verdict.exit_code)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ._arguments import step_number
from ._deadline import Deadline
from ._session import DEFAULT_TIMEOUT, Session

if TYPE_CHECKING:
    from . import _native

# Reasons that go once nodes or the durable tier answer.
UNHEARD = ("nodes-silent", "too-few-answered", "durable-unreadable")


class Decision(str, Enum):
    """What a restart can do with what can be had now."""

    RECOVER_IN_PLACE = "recover-in-place"
    """Only processes died: every rank's bytes are in the RAM of the node that sealed them."""
    RECOVER = "recover"
    """Some shards are decoded from survivors, or are in another node's RAM."""
    RESTART_FROM_DURABLE = "restart-from-durable"
    """The newest restorable step needs the durable tier."""
    IMPOSSIBLE = "impossible"
    """No step is restorable now."""


@dataclass(frozen=True)
class Reason:
    """Why: a word for programs and a sentence."""

    code: str
    text: str


@dataclass(frozen=True)
class ShardSource:
    """Where a rank's bytes come from: `ram` of a node, `decode` from nodes, or `durable`."""

    rank: int
    nbytes: int
    source: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class RestartPlan:
    """The step that a restart gets; `expected_ms` is for its slowest rank."""

    run: str
    step: int
    manifest: str
    world_size: int
    state: str
    expected_ms: int
    shards: tuple[ShardSource, ...]


@dataclass(frozen=True)
class ExpectedTime:
    """A part of the expected time, in milliseconds: of `ram`, `network` or `durable`; its rate is `measured` or a `first-guess`."""

    stretch: str
    ms: int
    rate: str


@dataclass(frozen=True)
class PassedOver:
    """A newer step that is not restorable now; `cause` is a word for programs."""

    run: str
    step: int
    cause: str | None
    text: str


@dataclass(frozen=True)
class Returning:
    """So many of these nodes must return with the RAM that they had. `basis` says what is known of it: that they `sealed` shards, or
    that the step was `coded` too, which a coding node that was away at that time does not bear out."""

    any: int
    of: tuple[str, ...]
    basis: str


@dataclass(frozen=True)
class WaitingGain:
    """What becomes possible if all of `returning` is so. No promise that anybody returns."""

    run: str
    step: int
    decision: Decision
    returning: tuple[Returning, ...]
    text: str


@dataclass(frozen=True)
class RestartVerdict:
    """The verdict with all that it rests on. `str()` of it is for logs."""

    namespace: str
    decision: Decision
    exit_code: int
    """As `storaged plan --verdict` exits."""
    reasons: tuple[Reason, ...]
    plan: RestartPlan | None
    """None if the decision is `IMPOSSIBLE`."""
    expected: tuple[ExpectedTime, ...]
    newest_seen: tuple[str, int] | None
    """Run and step of the newest committed checkpoint that anybody who answered has heard of."""
    passed_over: tuple[PassedOver, ...]
    waiting: tuple[WaitingGain, ...]
    """What waiting would gain, the newest step first."""

    def has_reason(self, code: str) -> bool:
        return any(reason.code == code for reason in self.reasons)

    @property
    def is_first_start(self) -> bool:
        """Nothing was ever saved, as far as a majority of the nodes and the durable tier know."""
        return self.has_reason("nothing-saved")

    @property
    def needs_allow_older(self) -> bool:
        """A load takes the plan's step only with `allow_older=True`: a newer one was protected, or may have been."""
        return self.plan is not None and (self.has_reason("goes-back") or self.has_reason("too-few-answered"))

    @property
    def newer_if_waited(self) -> tuple[WaitingGain, ...]:
        """What waiting would gain beside the step that can be had now."""
        here = None if self.plan is None else (self.plan.run, self.plan.step)
        return tuple(gain for gain in self.waiting if (gain.run, gain.step) != here)

    def may_start(self, *, allow_older: bool = False) -> bool:
        """Whether a start gets somewhere: a load would be given a step, or nothing was ever saved. `allow_older` as the load has it."""
        if self.plan is None:
            return self.is_first_start
        return allow_older or not self.needs_allow_older

    def why_wait(self, *, allow_older: bool = False) -> str | None:
        """What may become better by itself: a newer step, one that restarts have not failed from, or a start at all. None if nothing may.
        `allow_older` as for `may_start`."""
        if self.newer_if_waited:
            return self.newer_if_waited[0].text
        if self.may_start(allow_older=allow_older) and not self.has_reason("last-resort"):
            return None
        return next((reason.text for reason in self.reasons if reason.code in UNHEARD), None)

    def __str__(self) -> str:
        step = "" if self.plan is None else f" step {self.plan.step} of run {self.plan.run}, expected {self.plan.expected_ms} ms"
        parts = [f"{self.namespace}: {self.decision.value}{step}"]
        parts += [reason.text for reason in self.reasons]
        parts += [f"passed over step {one.step} of run {one.run}: {one.text}" for one in self.passed_over]
        parts += [f"waiting would gain {gain.text}" for gain in self.waiting]
        return "; ".join(parts)


def verdict(
    namespace: str | None = None,
    *,
    socket: str | os.PathLike[str] | None = None,
    token: bytes | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> RestartVerdict:
    """What a launcher should make of a restart from the newest checkpoint. Moves nothing.

    It is answered at once if everybody who matters answers, and after `timeout` seconds at the latest: for so long nodes that
    are silent are waited for. That nothing is restorable is a verdict; a daemon that does not answer, and a namespace of another
    token, raise a `StoragedError`. What is not given comes from STORAGED_NAMESPACE, STORAGED_SOCKET and STORAGED_TOKEN.
    """
    session = Session(namespace, socket=socket, token=token, timeout=timeout)
    limit = Deadline(session.timeout)
    client = session.connect(limit)
    return _typed(client.verdict(limit.left_ms()))


@dataclass(frozen=True)
class FailedRestart:
    """How a step stands that restarts have failed from. `wait_ms` is the time until it is offered again, earlier only if nothing
    else is restorable; None: until an operator lifts it (`storaged plan JOB --lift STEP`)."""

    run: str
    step: int
    times: int
    wait_ms: int | None


def restart_failed(
    step: int,
    namespace: str | None = None,
    *,
    run: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    token: bytes | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> FailedRestart:
    """Says that a restart from a step has failed, so that the next one gets another step: it is passed over for 10 minutes, then for
    20, and after the third time until an operator lifts it. Within 30 s it counts once: the launcher of every node may say it.
    """
    session = Session(namespace, socket=socket, token=token, timeout=timeout)
    limit = Deadline(session.timeout)
    client = session.connect(limit)
    (failed,) = client.restart_failed(run, step_number(step), limit.left_ms())
    return FailedRestart(*failed)


def _typed(said: _native.VerdictDict) -> RestartVerdict:
    plan = said["plan"]
    return RestartVerdict(
        namespace=said["namespace"],
        decision=Decision(said["verdict"]),
        exit_code=said["exit_code"],
        reasons=tuple(Reason(**reason) for reason in said["reasons"]),
        plan=None if plan is None else _plan(plan),
        expected=tuple(ExpectedTime(**part) for part in said["expected"]),
        newest_seen=said["newest_seen"],
        passed_over=tuple(PassedOver(**one) for one in said["passed_over"]),
        waiting=tuple(_gain(gain) for gain in said["waiting"]),
    )


def _plan(plan: _native.VerdictPlan) -> RestartPlan:
    shards = (ShardSource(one["rank"], one["nbytes"], one["source"], tuple(one["nodes"])) for one in plan["shards"])
    return RestartPlan(
        plan["run"], plan["step"], plan["manifest"], plan["world_size"], plan["state"], plan["expected_ms"], tuple(shards)
    )


def _gain(gain: _native.GainDict) -> WaitingGain:
    returning = tuple(Returning(one["any"], tuple(one["of"]), one["basis"]) for one in gain["returning"])
    return WaitingGain(gain["run"], gain["step"], Decision(gain["verdict"]), returning, gain["text"])
