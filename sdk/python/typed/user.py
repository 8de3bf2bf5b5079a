"""What a user writes, under the strictest checks of mypy and pyright: `make typed` reads it, nothing runs it."""

from __future__ import annotations

import asyncio

import torch
from storaged import Decision, Session, StoragedError, restart_failed, verdict
from storaged.data import ResumableLoader
from storaged.errors import CheckpointSaveError, NoCheckpointError, UnsavableState
from storaged.torch import CheckpointInfo, Checkpointer, Event, SaveFuture, SaveHandle, StoragedReader, StoragedWriter, progress_bar
from storaged.torchrun import agreed_verdict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

State = dict[str, torch.Tensor]


def told(event: Event) -> None:
    print(event.name)


def train(model: torch.nn.Module, steps: int) -> int | None:
    state: State = dict(model.state_dict())
    with Checkpointer("job", on_error="warn", busy="skip", events=told, progress=progress_bar(), durable="policy") as checkpointer:
        checkpointer.on_sigterm()
        ready: SaveFuture[int] = checkpointer.prepare(state)
        if checkpointer.load(state) is None:
            print("a new job", ready.done())
        for step in range(1, steps + 1):
            with checkpointer.step(step):
                pass
            handle: SaveHandle | None = checkpointer.save(step, state, background=True)
            if handle is not None:
                handle.staged.result(10.0)
                print(handle.wait("protected", timeout=5.0))
            if checkpointer.is_last_step(step):
                checkpointer.wait("protected", timeout=20)
                break
        infos: list[CheckpointInfo] = checkpointer.list()
        print([info.step for info in infos], checkpointer.verdict())
        return checkpointer.latest_step()


async def saved(checkpointer: Checkpointer, state: State) -> str:
    handle = checkpointer.save(1, lambda: state)
    assert handle is not None
    return await handle


def with_dcp(state: State, session: Session) -> tuple[StorageWriter, StorageReader] | None:
    """torch's own `dcp.save` is typed in part alone, and not checked here."""
    try:
        writer = StoragedWriter(7, session=session)
        writer.stage(state)
        writer.handle.staged.result()
        return writer, StoragedReader(session=session, verify="full")
    except (CheckpointSaveError, NoCheckpointError, UnsavableState) as error:
        print(error)
    return None


def restored(checkpointer: Checkpointer, state: State) -> bool:
    agreed = agreed_verdict()
    return checkpointer.load(state, allow_older=agreed is not None and agreed.needs_allow_older) is not None


def launch() -> None:
    said = verdict("job")
    if said.may_start(allow_older=True) and not said.newer_if_waited:
        print(said.decision.value)
    if said.decision is Decision.RECOVER and said.plan is not None:
        print(restart_failed(said.plan.step, "job"))


def batches(dataset: torch.utils.data.Dataset[torch.Tensor]) -> None:
    loader = ResumableLoader(torch.utils.data.DataLoader(dataset))
    print(len(loader), loader.kept, loader.state_dict())


if __name__ == "__main__":
    try:
        train(torch.nn.Linear(2, 2), 3)
        asyncio.run(saved(Checkpointer(), {}))
    except StoragedError as error:
        print(error)
