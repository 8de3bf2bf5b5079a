"""torchft: `Manager(..., checkpoint_transport=StoragedTransport())`. A replica that comes back gets its state from another one.

The sender is blocked for one copy into its node's daemon and the commit; the receiver's daemon fetches the bytes from there, and
each is verified. The daemons of all replicas must be one cluster, or one daemon.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from ._arguments import limit_in_seconds, namespace_text
from ._deadline import Deadline
from ._session import Session
from .errors import CheckpointLoadError, NoCheckpointError, UnknownNamespace, UnsavableState
from .torch import Checkpointer
from .torch._whole import pack, unpack

if TYPE_CHECKING:
    CheckpointTransport = object
else:
    from torchft.checkpointing.transport import CheckpointTransport

#: Between two looks for a step that the sender has not committed yet, in seconds.
PAUSE = 0.05


class StoragedTransport(CheckpointTransport):
    """Sends a rank's state through the daemons.

    Each transport has a namespace of its own, which begins with `namespace` (by default STORAGED_NAMESPACE) and which its
    replica's manager tells to whoever has to be healed. `threads` copy; `commit_timeout` (seconds) is how long
    `disallow_checkpoint` waits at most, and what torchft gives bounds the rest. State comes back on the CPU. DTensors are
    refused: rank by rank they are parts, and what they are part of is not sent. What is not plain data needs
    `trust_pickle=True` on both sides.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        threads: int | None = None,
        commit_timeout: float = 60.0,
        trust_pickle: bool = False,
        session: Session | None = None,
    ) -> None:
        base = session or Session.shared(namespace)
        name = namespace_text(namespace) or base.namespace
        self._session = Session(f"{name}.heal-{uuid.uuid4().hex[:12]}", socket=base.socket, token=base.token)
        self._threads = threads
        self._commit_timeout = limit_in_seconds(commit_timeout)
        self._trust = trust_pickle
        self._sent: Checkpointer | None = None

    def metadata(self) -> str:
        """The namespace that is sent in."""
        return self._session.namespace

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Copies the state; once it returns training may go on. `disallow_checkpoint` waits for the commit."""
        self.disallow_checkpoint()
        deadline = Deadline(timeout.total_seconds())
        _refuse_parts(state_dict)
        # A step that was not committed by all replicas is sent again under its number: every time in a run of its own.
        run = self._session.connect(deadline).open_run(deadline.left_ms())
        self._sent = self._checkpointer(self._session, deadline, run)
        self._sent.save(step, pack(state_dict, self._trust), background=False)

    def disallow_checkpoint(self) -> None:
        """Waits until what was sent is committed, which may have failed."""
        sent, self._sent = self._sent, None
        if sent is not None:
            try:
                sent.wait(timeout=self._commit_timeout)
            finally:
                sent.close()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """The state that was sent under that step, once it is committed."""
        deadline = Deadline(timeout.total_seconds())
        session = Session(metadata, socket=self._session.socket, token=self._session.token)
        with self._checkpointer(session, deadline) as checkpointer:
            while True:
                try:
                    state = checkpointer.load_all(step, timeout=max(deadline.left(), PAUSE))
                    break
                except (NoCheckpointError, UnknownNamespace) as error:
                    if deadline.passed():
                        text = f"replica {src_rank} has sent no step {step} within {deadline.seconds:g} s ({metadata}): {error}"
                        raise CheckpointLoadError(text) from error
                    time.sleep(min(PAUSE, deadline.left()))
        assert state is not None
        return unpack(state, self._trust)

    def shutdown(self, wait: bool = True) -> None:
        """Ends what is under way; what was sent stays until the daemon needs its memory."""
        sent, self._sent = self._sent, None
        if sent is not None and wait:
            sent.close()

    def _checkpointer(self, session: Session, deadline: Deadline, run: str | None = None) -> Checkpointer:
        return Checkpointer(
            session=session, alone=True, run=run, timeout=deadline.left(), threads=self._threads, trust_pickle=self._trust
        )


def _refuse_parts(value: Any, path: str = "") -> None:
    if isinstance(value, DTensor):
        raise UnsavableState(f"tensor {path!r} is a DTensor, which is not sent: send its to_local(), and fill it where it is received")
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_parts(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            _refuse_parts(inner, f"{path}.{at}".lstrip("."))
