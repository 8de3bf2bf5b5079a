"""A training job of the soak: a thread per rank, one save per interval, without torch. Content follows from (run, step, rank).

It restores first, and compares every byte. Then it saves step after step and never waits for protection. What happens is
written to its log as a line of JSON each: `restored`, `saved`, `refused`, `ended`. A save is taken by all ranks or by none:
if one gets no slot, the others give theirs back, as training frameworks do.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from storaged import _native
from storaged.errors import NoCheckpointError, RunFenced, StoragedError, UnknownNamespace

# How long a save waits for its slot, a restart for its plan.
SAVE_MS, RESTORE_MS = 5_000, 60_000
# How long a job that starts waits for daemons that start too.
DAEMON_SECONDS = 30
MARKED = 64


def content(namespace: str, run: str, step: int, rank: int, length: int) -> bytes:
    """Mostly the same from step to step, as training state is not; different for every run, step and rank."""
    base = bytearray(hashlib.shake_256(f"{namespace} {rank}".encode()).digest(4096) * (length // 4096 + 1))[:length]
    mark = hashlib.sha512(f"{namespace} {run} {step} {rank}".encode()).digest()
    for at in (0, (step * 7919) % (length - MARKED), length - MARKED):
        base[at : at + MARKED] = mark
    return bytes(base)


def wrong_bytes(got: bytes, expected: bytes) -> int:
    if got == expected:
        return 0
    return abs(len(got) - len(expected)) + sum(a != b for a, b in zip(got, expected))


@dataclass
class Settings:
    namespace: str
    token: str
    sockets: list[str]
    length: int
    interval: float
    seconds: float
    log: str
    attempt: int
    #: Of two jobs that save by turns, which this is, how long a turn takes, and when the first began.
    turn: int = 0
    turn_seconds: float = 0.0
    turns_began: float = 0.0


@dataclass
class Rank:
    """One rank's connection, made anew after it broke."""

    settings: Settings
    number: int
    run: str = ""
    trainer: _native.Trainer | None = None
    slot: _native.Slot | None = None
    sealed: list[float] = field(default_factory=list)

    def client(self) -> _native.Client:
        return _native.Client(self.settings.sockets[self.number], self.settings.namespace, self.settings.token.encode())

    def length(self) -> int:
        return self.settings.length + self.number * 4099

    def stage(self, step: int) -> None:
        """Connects if need be, and copies the shard into a slot."""
        if self.trainer is None:
            who = (self.settings.namespace, self.settings.token.encode(), self.run, self.number, len(self.settings.sockets))
            self.trainer = _native.Trainer(self.settings.sockets[self.number], *who)
        self.slot = self.trainer.acquire(self.length(), SAVE_MS)
        self.slot.write(0, content(self.settings.namespace, self.run, step, self.number, self.length()))

    def seal(self, step: int) -> None:
        slot, self.slot = self.slot, None
        self.trainer.seal(slot, step, self.length())

    def give_back(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            self.trainer.release(slot)

    def broke(self) -> None:
        self.trainer, self.slot = None, None


class Job:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.ranks = [Rank(settings, number) for number in range(len(settings.sockets))]
        self.pool = concurrent.futures.ThreadPoolExecutor(len(self.ranks))
        self.log = Path(settings.log).open("a", encoding="utf-8")
        self.ending = False

    def tell(self, event: str, **values) -> None:
        line = {"at": time.time(), "event": event, "attempt": self.settings.attempt, **values}
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()

    def each(self, what, *arguments) -> list[StoragedError]:
        """Does it on every rank at once; the errors."""
        waiting = [(rank, self.pool.submit(what, rank, *arguments)) for rank in self.ranks]
        errors = []
        for rank, future in waiting:
            try:
                future.result()
            except StoragedError as error:
                errors.append(error)
                if isinstance(error, ConnectionError):
                    rank.broke()
        return errors

    def wait_for_daemons(self) -> None:
        """A job that starts with its node finds the daemon on its way up."""
        until = time.monotonic() + DAEMON_SECONDS
        for rank in self.ranks:
            while True:
                try:
                    rank.client().status()
                    break
                except ConnectionError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.1)

    def restore(self) -> int:
        """The newest step there is, compared byte for byte; 0 if there is none."""
        started = time.time()
        self.wait_for_daemons()
        try:
            plan = self.ranks[0].client().plan(None, RESTORE_MS)
        except (NoCheckpointError, UnknownNamespace) as error:
            self.tell("restored", run="", step=0, wrong=0, seconds=time.time() - started, why=repr(error))
            return 0
        wrong, rungs = 0, []
        for rank in self.ranks:
            client = rank.client()
            shard = client.open_shard(client.manifest(plan["manifest"]), rank.number, [], RESTORE_MS)
            expected = content(self.settings.namespace, plan["run"], plan["step"], rank.number, rank.length())
            got = shard.read(0, shard.length)
            wrong += wrong_bytes(got, expected)
            rungs.append(shard.rung)
        seconds = time.time() - started
        self.tell("restored", run=plan["run"], step=plan["step"], wrong=wrong, rungs=rungs, seconds=seconds)
        return plan["step"]

    def save(self, step: int) -> None:
        started = time.time()
        errors = self.each(Rank.stage, step)
        if errors:
            self.each(Rank.give_back)
        else:
            errors = self.each(Rank.seal, step)
        if not errors:
            try:
                self.ranks[0].trainer.commit(step, b"", b"", "policy")
            except StoragedError as error:
                errors.append(error)
        seconds = round(time.time() - started, 3)
        if any(isinstance(error, RunFenced) for error in errors):
            raise next(error for error in errors if isinstance(error, RunFenced))
        if errors:
            first = errors[0]
            self.tell("refused", step=step, seconds=seconds, error=type(first).__name__, text=str(first), ranks=len(errors))
        else:
            self.tell("saved", step=step, seconds=seconds)

    def wait_turn(self) -> None:
        own = self.settings
        while own.turn_seconds and not self.ending and (time.time() - own.turns_began) // own.turn_seconds % 2 != own.turn:
            time.sleep(0.02)

    def train(self) -> None:
        step = self.restore()
        run = self.ranks[0].client().open_run(RESTORE_MS)
        for rank in self.ranks:
            rank.run = run
        self.tell("running", run=run, step=step)
        began = due = time.time()
        while not self.ending and time.time() - began < self.settings.seconds:
            self.wait_turn()
            if self.ending:
                break
            step += 1
            self.save(step)
            due = max(due + self.settings.interval, time.time())
            time.sleep(max(0.0, due - time.time()))
        self.tell("ended", step=step, seconds=time.time() - began)


def main() -> int:
    job = Job(Settings(**json.loads(sys.argv[1])))

    def end(_signal, _frame) -> None:
        job.ending = True

    signal.signal(signal.SIGTERM, end)
    try:
        job.train()
    except StoragedError as error:
        job.tell("failed", error=type(error).__name__, text=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
