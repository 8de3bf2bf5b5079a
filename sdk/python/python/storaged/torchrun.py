"""torchrun asks storaged before each start what its workers would get: a rendezvous backend, and what it tells them.

    torchrun --rdzv-backend storaged --rdzv-conf namespace=llama-70b,wait_s=300 --rdzv-endpoint HEAD:29400 ... train.py

    told = storaged.torchrun.agreed_verdict()       # in train.py
    checkpointer.load(state, allow_older=told is not None and told.needs_allow_older)

The nodes meet as ever; then one of them asks its daemon, and all do what it says. docs/operate/restart.md has the settings.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ._verdict import Decision, RestartVerdict
from .errors import StoragedError

#: Where workers find it.
VERDICT_VARIABLE = "STORAGED_VERDICT"
#: The text comes second: a variable of the environment has 128 KiB.
TEXT_MAX = 4000


@dataclass(frozen=True)
class AgreedVerdict:
    """What the nodes of a torchrun job have agreed on for a start. Without a `decision` no daemon that was asked has answered; `text`
    says why, and the job is started as without the backend."""

    decision: Decision | None
    exit_code: int | None
    """As `storaged plan --verdict` exits."""
    run: str | None
    step: int | None
    """What a load gets, as far as was known then; None if there is nothing."""
    needs_allow_older: bool
    may_start: bool
    text: str

    @classmethod
    def of(cls, verdict: RestartVerdict, *, allow_older: bool) -> AgreedVerdict:
        plan = verdict.plan
        return cls(
            decision=verdict.decision,
            exit_code=verdict.exit_code,
            run=None if plan is None else plan.run,
            step=None if plan is None else plan.step,
            needs_allow_older=verdict.needs_allow_older,
            may_start=verdict.may_start(allow_older=allow_older),
            text=str(verdict)[:TEXT_MAX],
        )

    @classmethod
    def unanswered(cls, error: StoragedError) -> AgreedVerdict:
        text = f"{type(error).__name__}: {error}"[:TEXT_MAX]
        return cls(None, None, None, None, needs_allow_older=False, may_start=True, text=text)

    @classmethod
    def from_json(cls, text: str | bytes) -> AgreedVerdict:
        said = json.loads(text)
        word = said.pop("decision")
        return cls(decision=None if word is None else Decision(word), **said)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def agreed_verdict() -> AgreedVerdict | None:
    """In a worker: what the nodes agreed on before it was started. None under another launcher or backend."""
    text = os.environ.get(VERDICT_VARIABLE)
    return None if text is None else AgreedVerdict.from_json(text)
