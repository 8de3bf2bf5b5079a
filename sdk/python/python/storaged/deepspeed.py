"""DeepSpeed: `engine.checkpoint_engine = StoragedCheckpointEngine("job")` after `deepspeed.initialize`.

`save_checkpoint` and `load_checkpoint` work as always. What DeepSpeed would write into files goes through the daemon; in the folder stay
empty files of the same names and its `latest`, because it looks for them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._session import Session
from .errors import InvalidArgument, NoCheckpointError
from .torch import Checkpointer, StoragedReader
from .torch._alone import load_alone
from .torch._reader import StoragedLoadPlanner
from .torch._whole import pack, unpack

if TYPE_CHECKING:

    class CheckpointEngine:
        def __init__(self, config_params: Any = None) -> None: ...

else:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine


def step_of_tag(tag: str) -> int:
    """The step that a tag names at its end: `global_step120`, which is what DeepSpeed makes."""
    found = re.search(r"(\d+)$", tag)
    if found is None:
        raise InvalidArgument(f"expected a tag that ends with its step, such as global_step120, got {tag!r}")
    return int(found.group(1))


class StoragedCheckpointEngine(CheckpointEngine):
    """Keeps what DeepSpeed saves for a tag as one checkpoint of all ranks. Settings are those of `Checkpointer`.

    DeepSpeed saves objects of its own beside tensors (ZeRO's loss scaler, for one), which need `trust_pickle=True`; without it they
    are refused. `commit` waits until all ranks' files are committed, and `latest` is written after that.
    """

    def __init__(self, namespace: str | None = None, *, trust_pickle: bool = False, **settings: Any) -> None:
        super().__init__()
        self.name = "StoragedCheckpointEngine"
        self._trust = trust_pickle
        self._checkpointer = Checkpointer(namespace, trust_pickle=trust_pickle, **settings)
        self._files: dict[str, dict[str, Any]] = {}

    @property
    def session(self) -> Session:
        return self._checkpointer.session

    def create(self, info: Any) -> None:
        step_of_tag(info.tag)
        self._files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps the file until the commit: DeepSpeed calls both before training goes on."""
        self._files[Path(path).name] = pack(state_dict, self._trust)

    def commit(self, info: Any) -> bool:
        files, self._files = self._files, {}
        self._checkpointer.save(step_of_tag(info.tag), files, background=False)
        saved = self._checkpointer.wait()
        if saved:
            for name in files:
                (Path(info.save_dir) / info.tag / name).touch()
        return saved

    def cleanup(self) -> None:
        self._checkpointer.close()

    def load(self, path: str, map_location: Any = None) -> Any:
        """One file of a tag, on the CPU. Nothing collective: ranks load what they need."""
        name, step = Path(path).name, step_of_tag(Path(path).parent.name)
        reader = StoragedReader(
            step, session=self.session, threads=self._checkpointer.threads, timeout=self._checkpointer.timeout, trust_pickle=self._trust
        )
        reader.follow(reader.ask())
        paths = reader.read_metadata().planner_data or {}
        flat = {key: value for key, value in reader.blank().items() if paths.get(key, (key,))[0] == name}
        if not flat:
            raise NoCheckpointError(f"step {step} of {self.session.namespace!r} has no file {name!r}")
        load_alone(flat, reader, StoragedLoadPlanner(trust_pickle=self._trust))
        return unpack(reader.nested(flat)[name], self._trust)
