"""What can go wrong. Each text says what was expected, what was got and what to do."""


class StoragedError(Exception):
    """Base of all errors of this package."""


class DaemonUnavailable(StoragedError, ConnectionError):
    """No daemon answers on the socket, or the connection to it broke."""


class ProtocolError(StoragedError):
    """Daemon and package do not understand each other: their versions differ, or a call came out of order."""


class InvalidArgument(StoragedError, ValueError):
    """An argument that cannot be."""


class CheckpointerClosed(StoragedError, RuntimeError):
    """The checkpointer was closed, or is that of a process that this one was forked from: it neither saves nor loads any more."""


class AccessDenied(StoragedError, PermissionError):
    """The namespace or the socket belongs to somebody else."""


class RunFenced(StoragedError):
    """A newer run of the namespace exists: this process must stop saving."""


class UnknownRun(StoragedError, LookupError):
    """Nobody has opened the run, or all nodes that knew it were restarted: open a new one."""


class StepConflict(StoragedError):
    """The step is not above the last one of the same run."""


class WorldSizeMismatch(StoragedError):
    """Ranks disagree on the world size."""


class ArenaTooSmall(StoragedError, MemoryError):
    """The shard does not fit its slot or the daemon's memory budget."""


class ArenaError(StoragedError):
    """Shared memory failed, or bytes lie outside of it."""


class Busy(StoragedError):
    """Every slot stayed in use until the wait ended."""


class NoCheckpointError(StoragedError, LookupError):
    """Nothing restorable, or a newer step took the place of the one that was planned."""


class UnknownNamespace(NoCheckpointError):
    """No node knows the namespace: nothing was ever saved in it."""


class TooManyLost(StoragedError):
    """The checkpoint exists, but too much of it is lost, and no newer one took its place."""


class NewerUnreachable(StoragedError):
    """A newer checkpoint than could be offered was protected, or may have been, and the nodes that may hold it have not
    answered: wait for them, or load with ``allow_older=True``."""


class CorruptData(StoragedError):
    """Bytes do not have the digest that they must have; none of them were used."""


class CheckpointAbandoned(StoragedError):
    """The checkpoint was given up before it reached the state waited for."""


class WaitTimeout(StoragedError, TimeoutError):
    """A bounded wait ended first."""


class DurableTierError(StoragedError):
    """The durable tier cannot be used now."""


class UnsafeObject(StoragedError):
    """A saved object that would need trust to be loaded."""


class UnsavableState(StoragedError, TypeError):
    """A value of the state dict that could not be loaded again, or has no bytes to save. Named in the text."""


class RanksMissing(StoragedError, TimeoutError):
    """Ranks did not come to a save or a load in time, or are at another step."""

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks


class ProcessModeUnsupported(StoragedError, TypeError):
    """Arena tensors cannot go to another process."""


class CheckpointSaveError(StoragedError):
    """A save failed; training may go on. The cause is in `__cause__`, or in the text if it was another rank's."""

    def __init__(self, text: str, step: int | None = None) -> None:
        super().__init__(text)
        self.step = step


class RestartRefused(StoragedError):
    """A launcher does not start a job: a load would be given nothing of what was saved. `exit_code` is the verdict's."""

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class CheckpointLoadError(StoragedError):
    """A load failed; the state dict may be partly filled."""


class ExportError(StoragedError):
    """A checkpoint could not be written elsewhere, or what lies there could not be read. The cause is in the text."""
