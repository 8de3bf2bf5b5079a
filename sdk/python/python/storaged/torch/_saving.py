"""One save of all ranks: DCP's planner and our writer, and between the ranks words that name the step.

Rank 0 leads: it says that a step has begun (with the run), collects every rank's plan, hands out the final ones, collects
what was written, commits, and says how it ended. Where every rank's state is as in the last planned save but for its
values, the plan and the description of that save are used again, and the ranks tell each other that only. Nobody waits longer than the save's deadline, and a rank that fails or
does not come ends this step for all and no other.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._deadline import Deadline
from ..errors import CheckpointSaveError, RanksMissing, StoragedError, UnknownRun, WaitTimeout
from ._objects import Encoder
from ._ranks import At, Ranks, WordsCleared
from ._sharing import Holding, Share, Sharer, Sharing, agree, keys_of, share_nothing
from ._structure import Located, Structure, Twin, Whole
from ._writer import StoragedWriter

logger = logging.getLogger("storaged")

# Rank 0 keeps the time, which its last native call may pass a little; the others wait so much longer to hear how it ended.
FOLLOW_SECONDS = 0.8

Told = tuple[str, Any]


class Skipped(Exception):
    """Rank 0 leaves the save out, because the one before it is still going on."""


@dataclass
class Agreed:
    """What all ranks planned together, for the saves of the same structure that follow: on this rank."""

    #: The save that planned it.
    nonce: str
    structure: Structure
    #: The objects that this rank writes: where they are in the state dict, their offset and length.
    objects: list[tuple[Located, int, int]]
    #: On rank 0, how the checkpoint is described.
    described: tuple[bytes, bytes] | None


#: Rank 0 says to a save either: go on without a plan, or send one, because some rank has another structure. Or send one, and
#: agree anew on who stages what the next time, because some have not asked when others did.
AGAIN, PLAN, PLAN_AND_SHARE = "again", "plan", "plan and share"


class Memory:
    """What a checkpointer keeps from one save to the next."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.agreed: Agreed | None = None
        self.sharing = Sharing()
        self.encoder = Encoder()
        #: Saves that were made without a plan.
        self.again = 0


class Save:
    """A save on this rank."""

    def __init__(
        self,
        ranks: Ranks,
        at: At,
        deadline: Deadline,
        memory: Memory,
        lose: Callable[[set[str]], None],
        new_planner: Callable[[], DefaultSavePlanner] = DefaultSavePlanner,
    ) -> None:
        self.ranks = ranks
        self.at = at
        self.step = at[1]
        self.deadline = deadline if ranks.rank == 0 else deadline.later(FOLLOW_SECONDS)
        self.memory = memory
        self.seen = memory.seen
        #: The objects of a save that needs no plan.
        self.pieces: list[tuple[int, bytes]] = []
        #: Is told runs that no later save belongs to.
        self.lose = lose
        self.new_planner = new_planner
        #: What this rank saves in.
        self.run: str | None = None
        self.nonce = uuid.uuid4().hex
        self.writer: StoragedWriter | None = None
        self.staged: Twin | Whole | None = None
        #: Stages in the background, if that was not done before.
        self.stage: Callable[[], Twin | Whole] | None = None
        #: Set when this rank's tensors may change.
        self.copied = threading.Event()
        self._is_torn = False
        self.structure: Structure | None = None
        #: The names of the objects that this rank writes.
        self.objects: set[str] = set()
        #: Why this rank has nothing to save.
        self.failure: Exception | None = None
        #: Done when the save ended everywhere.
        self.ended: Future[None] = Future()
        self.has_begun = False
        #: Whether this rank has asked who stages what.
        self.has_asked = False
        #: Runs that a daemon does not know any more; ranks may have been in different ones.
        self.lost_runs: set[str] = set()

    @property
    def what(self) -> str:
        return f"the save of step {self.step}"

    def begin(self, run: str | None) -> None:
        """Tells the others that this rank has come, and on rank 0 in which run; or why there is none, if it failed."""
        self.has_begun = True
        self.ranks.come_to(self.at)
        if self.ranks.rank == 0:
            self.ranks.tell(self._begin_key, (self.nonce, run, said(self.failure)))

    def hear_begin(self, limit: Deadline | None = None) -> str:
        """On the other ranks: waits until rank 0 has begun the step; the run."""
        limit = limit or self.deadline
        ahead: dict[int, int] = {}
        while True:
            nonce, run, failure = self.ranks.hear_rank_zero([self._begin_key], self.what, limit, self.at)
            if nonce not in self.seen:
                break
            # What is left of an attempt that failed. Its word is read once more behind where rank 0 is: it may begin again and go on at once.
            if ahead:
                raise self.ranks.left_out(0, self.what, ahead, limit)
            limit.check(f"rank 0 to begin {self.what} again")
            ahead = self.ranks.ahead(0, self.at)
            time.sleep(0 if ahead else Ranks.LONGEST_PAUSE)
        self.nonce = nonce
        if run is None:
            self.seen.add(nonce)
            raise Skipped if failure is None else self.failed(f"rank 0: {failure}")
        return str(run)

    @property
    def _begin_key(self) -> str:
        return f"begin/{self.at[0]}/{self.step}"

    def failed(self, why: str) -> CheckpointSaveError:
        return CheckpointSaveError(f"step {self.step} was not saved: {why}", self.step)

    def sharer(self) -> Sharer | None:
        """What asks which tensors other ranks stage."""
        return None if self.ranks.size == 1 else Sharer(self.memory.sharing, self.ranks.size, self._ask)

    def _ask(self, holding: Holding) -> Share | None:
        # In the training thread: all ranks do this when a structure is new, and no longer than the save has time for after it.
        self.has_asked = True
        limit = Deadline(self.deadline.left() / 2)
        try:
            if self.ranks.rank != 0:
                self.hear_begin(limit)
            return agree(self.ranks, self.nonce, holding, self.what, limit, self.at, self._has_not_asked)
        except (RanksMissing, WaitTimeout) as error:
            logger.info("this rank stages all that it holds: %s", error)
            return None

    def _has_not_asked(self, rank: int) -> bool:
        """On rank 0: whether that rank has gone on, or has left the step out."""
        return self.ranks.heard(f"same/{self.nonce}/{rank}") or self.ranks.is_past(rank, self.at)

    def _answer_who_asks(self) -> None:
        """On rank 0, which knew its share: ranks that did not wait for its word."""
        if self.ranks.rank == 0 and self.ranks.size > 1 and not self.has_asked:
            try:
                share_nothing(self.ranks, self.nonce)
            except StoragedError as error:
                logger.debug("the other ranks could not be told: %s", error)

    def tear(self) -> None:
        """The tensors are going to change, whether they are copied or not: if not, this step is given up."""
        self._is_torn = not self.copied.is_set()

    def _stage(self) -> None:
        stage, self.stage = self.stage, None
        try:
            if stage is not None:
                self.staged = stage()
                if self._is_torn:
                    raise WaitTimeout("its tensors were not copied in time, training went on and may have changed them")
        except Exception as error:
            self.failure = error
        finally:
            # What the call keeps alive goes before anybody is told.
            del stage
            self.copied.set()

    def drive(self) -> None:
        """Brings the save to its end, in the background; `ended` says how."""
        self._answer_who_asks()
        self._stage()
        failure = self._driven()
        try:
            if self.writer is not None:
                # First: the next save asks for a slot over the same connection, and this one's may be the one that it waits for.
                self.writer.close()
        finally:
            # A handle that is kept keeps this.
            self.staged, self.pieces = None, []
            if failure is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(failure)

    def _driven(self) -> CheckpointSaveError | None:
        """Why it failed, if it did."""
        try:
            self._lead() if self.ranks.rank == 0 else self._follow()
        except CheckpointSaveError as error:
            return error
        except Exception as error:
            wrapped = self.failed(said(error) or "")
            wrapped.__cause__ = error
            return wrapped
        return None

    # Rank 0.

    def _lead(self) -> None:
        of_ranks = [f"{key}/{self.nonce}/{rank}" for key in ("same", "plan", "go", "done") for rank in range(1, self.ranks.size)]
        of_all = [f"{key}/{self.nonce}" for key in ("same", "go", "end")]
        of_all += keys_of(self.nonce, self.ranks.size)
        self.ranks.forget_later("saves", [*of_ranks, *of_all, self._begin_key], self._begin_key)
        try:
            self._lead_to_commit()
        except Exception as error:
            self._note_lost(error)
            told = error if isinstance(error, CheckpointSaveError) else self.failed(said(error) or "")
            self._tell_end(("failed", (str(told), self.lost_runs)))
            self.lose(self.lost_runs)
            raise
        self._tell_end(("ok", None))

    def _tell_end(self, told: Told) -> None:
        # Whoever waits for its plan hears it at once, whoever has written hears it too.
        if told[0] == "failed":
            self.ranks.tell(f"same/{self.nonce}", told)
            self.ranks.tell(f"go/{self.nonce}", told)
        self.ranks.tell(f"end/{self.nonce}", told)

    def _lead_to_commit(self) -> None:
        planner = self.new_planner()
        bases, shares = zip(*self._gathered("same", self._tried(self._base), "staging"))
        if bases[0] is not None and set(bases) == {bases[0]}:
            self.ranks.tell(f"same/{self.nonce}", ("ok", AGAIN))
            return self._lead_again()
        todo = PLAN if set(shares) == {shares[0]} else PLAN_AND_SHARE
        self.ranks.tell(f"same/{self.nonce}", ("ok", todo))
        self._plan_anew(todo)
        plans = self._gathered("plan", self._tried(lambda: self._local_plan(planner)), "planning")
        assert self.writer is not None
        plans, metadata = planner.create_global_plan(self.writer.prepare_global_plan(plans))
        for rank in range(1, self.ranks.size):
            self.ranks.tell(f"go/{self.nonce}/{rank}", ("ok", plans[rank]))
        written = self._tried(lambda: self._written(planner, plans[0]))
        results = self._gathered("done", written, "writing")
        assert self.writer is not None
        self.writer.deadline = self.deadline
        self.writer.finish(metadata, results)
        self._agree(planner, results[0])

    def _lead_again(self) -> None:
        agreed, writer = self.memory.agreed, self.writer
        assert agreed is not None and agreed.described is not None and writer is not None
        self._gathered("done", self._tried(self._written_again), "writing")
        writer.deadline = self.deadline
        writer.commit(*agreed.described)
        self.memory.again += 1

    def _gathered(self, key: str, own: Told, doing: str) -> list[Any]:
        """What every rank made of its part; the failures of all that failed in one error."""
        if own[0] == "failed":
            # The others need not be waited for; they hear of it.
            raise self.failed(f"rank 0: {own[1][0]}") from self.failure
        told = self.ranks.gather(f"{key}/{self.nonce}", own, self.what, self.deadline, self.at)
        bad = {rank: value for rank, (kind, value) in enumerate(told) if kind == "failed"}
        if bad:
            self.lost_runs.update(*(lost for _, lost in bad.values()))
            raise self.failed("; ".join(f"rank {rank} failed in {doing}: {why}" for rank, (why, _) in list(bad.items())[:5]))
        return [value for _, value in told]

    # The other ranks.

    def _follow(self) -> None:
        if self.nonce in self.seen and self.failure is not None:
            # Rank 0 had no run, and said so before this rank staged.
            raise self.failure
        run = self.hear_begin()
        self.seen.add(self.nonce)
        if self.run is not None and self.run != run:
            # Also where this rank could not stage: a daemon that knows a newer run turns the older one away for ever. The next save hears
            # rank 0's; this one's may be lost too.
            self.lose({self.run})
            self.failure = self.failure or StoragedError(f"rank 0 saves in run {run}, this rank has staged for run {self.run}")
        planner = self.new_planner()
        self._answer("same", self._tried(self._base))
        todo = self._heard([f"same/{self.nonce}"])
        if todo == AGAIN:
            self._answer("done", self._tried(self._written_again))
            self._heard([f"end/{self.nonce}"])
            self.memory.again += 1
            return
        self._plan_anew(todo)
        self._answer("plan", self._tried(lambda: self._local_plan(planner)))
        plan = self._heard([f"go/{self.nonce}/{self.ranks.rank}", f"go/{self.nonce}"])
        results = self._answer("done", self._tried(lambda: self._written(planner, plan)))
        self._heard([f"end/{self.nonce}"])
        self._agree(planner, results)

    def _answer(self, key: str, told: Told) -> Any:
        self.ranks.tell(f"{key}/{self.nonce}/{self.ranks.rank}", told)
        if told[0] == "failed":
            self.lose(self.lost_runs)
            raise self.failed(f"rank {self.ranks.rank}: {told[1][0]}") from self.failure
        return told[1]

    def _heard(self, keys: list[str]) -> Any:
        try:
            kind, value = self.ranks.hear_rank_zero(keys, self.what, self.deadline, first=self._begin_key)
        except WordsCleared as error:
            late = f"rank {self.ranks.rank} was held up and does not know how {self.what} ended, it may have been committed: {error}"
            raise CheckpointSaveError(late, self.step) from error
        if kind == "failed":
            text, lost = value
            self.lose(lost)
            raise CheckpointSaveError(text, self.step)
        return value

    # Every rank.

    def _note_lost(self, error: BaseException) -> None:
        if isinstance(error, UnknownRun) and self.run is not None:
            self.lost_runs.add(self.run)

    def _tried(self, make: Any) -> Told:
        """What this rank makes of its part, or that it failed and why."""
        try:
            if self.failure is not None:
                raise self.failure
            return ("ok", make())
        except Exception as error:
            self.failure = error
            self._note_lost(error)
            return ("failed", (said(error), self.lost_runs))

    def _plan_anew(self, todo: str) -> None:
        self.memory.agreed = None
        if todo == PLAN_AND_SHARE:
            self.memory.sharing.share = None

    def _base(self) -> tuple[str | None, str | None]:
        """The planned save that this one is like on this rank, and the agreement that its share is of; None if there is none."""
        assert self.writer is not None
        self.writer.set_up_storage_writer(self.ranks.rank == 0)
        share = self.writer.share
        return self._same_as(), None if share is None else share.name

    def _same_as(self) -> str | None:
        """The planned save that this one is like on this rank, object for object."""
        assert self.writer is not None
        agreed = self.memory.agreed
        if agreed is None or agreed.structure is not self.writer.structure:
            return None
        assert isinstance(self.staged, Twin)
        data = [self.memory.encoder.encoded(self.staged.value(located)) for located, _, _ in agreed.objects]
        if any(len(one) != length for one, (_, _, length) in zip(data, agreed.objects)):
            return None
        self.pieces = [(offset, one) for one, (_, offset, _) in zip(data, agreed.objects)]
        return agreed.nonce

    def _written_again(self) -> None:
        assert self.writer is not None
        self.writer.deadline = self.deadline
        self.writer.write_again(self.pieces)

    def _agree(self, planner: DefaultSavePlanner, results: list[WriteResult]) -> None:
        """Later saves of this structure need no plan, if every tensor was copied straight to its place."""
        writer, structure = self.writer, self.structure
        if writer is None or structure is None or self.staged is None or writer.appended:
            return
        rows = {result.index.fqn: result.storage_data for result in results if result.index.fqn in self.objects}
        objects = []
        for name, row in rows.items():
            path = actual_path(self.staged.state_dict, planner.mappings[name])
            if path is None:
                return
            objects.append((structure.located(path), row[1], row[2]))
        self.memory.agreed = Agreed(self.nonce, structure, sorted(objects, key=lambda one: one[1]), writer.described)

    def _local_plan(self, planner: DefaultSavePlanner) -> Any:
        assert self.writer is not None and self.staged is not None
        leads = self.ranks.rank == 0
        # Without an id of this save, so that the description of later ones is the same.
        planner.set_up_planner(self.staged.state_dict, None, leads)
        self.writer.set_up_storage_writer(leads)
        plan = planner.create_local_plan()
        share = self.writer.share
        if share is not None and share.left:
            tensors = [item.index for item in plan.items if item.type != WriteItemType.BYTE_IO]
            self.writer.left = frozenset(index for index in tensors if planner.lookup_object(index).is_meta)
        return self.writer.prepare_local_plan(plan)

    def _written(self, planner: DefaultSavePlanner, plan: Any) -> Any:
        assert self.writer is not None
        self.writer.deadline = self.deadline
        self.structure = self.writer.structure
        final = planner.finish_plan(plan)
        self.objects = {item.index.fqn for item in final.items if item.type == WriteItemType.BYTE_IO}
        return self.writer.write_data(final, planner).value()


def said(error: BaseException | None) -> str | None:
    """An error as one line for the other ranks."""
    return None if error is None else f"{type(error).__name__}: {error}"


def actual_path(value: Any, path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A path of DCP's, which has every key of a dict as text, with the keys that are there."""
    found: list[Any] = []
    for step in path:
        if isinstance(value, dict):
            keys = [key for key in value if key == step or str(key) == step]
            if len(keys) != 1:
                return None
            step = keys[0]
        found.append(step)
        value = value[step]
    return tuple(found)
