"""Strategies for `dist_checkpointing`: a step's sharded state goes to the daemon under the step that its folder names."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .._busy import wait_for
from ..errors import CheckpointLoadError, InvalidArgument, NoCheckpointError, UnsavableState
from ..torch import StoragedReader
from ..torch._objects import check_loadable, load_plain, saved_by_torch
from ..torch._pieces import OBJECTS, PIECES, PiecesCheckpointer, place_of
from ..torch._ranks import from_rank_zero, run_key
from ._saves import Begun

if TYPE_CHECKING:
    core: Any
    strategies: Any
    torch_strategy: Any
    AsyncRequest: Any
    TorchDistLoadShardedStrategy = object

    class TorchDistSaveShardedStrategy:
        def __init__(self, backend: str, version: int, keep_only_main_replica: bool) -> None: ...

else:
    from megatron.core.dist_checkpointing import core
    from megatron.core.dist_checkpointing.strategies import base as strategies
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

BACKEND, VERSION = "storaged", 1
#: Megatron-Core's own, which reads and writes files.
FILES = ("torch_dist", 1)
COMMON = "common.pt"

register_strategies_of_files = torch_strategy.register_default_torch_strategies

#: One for each group and settings: Megatron-Core's users make strategies by the save, and a checkpointer knows what later saves need.
_checkpointers: dict[Any, PiecesCheckpointer] = {}


def step_of_folder(folder: str | Path) -> int:
    """The step that a checkpoint's folder names at its end: `iter_0000120`."""
    found = re.search(r"(\d+)/?$", str(folder))
    if found is None:
        raise InvalidArgument(f"expected a checkpoint folder that ends with its step, such as iter_0000120, got {str(folder)!r}")
    return int(found.group(1))


# A subclass of Megatron-Core's, because newer releases of it take no others.
class SaveStrategy(TorchDistSaveShardedStrategy):
    """Saves the sharded state under the step that the folder names. Settings are those of `Checkpointer`."""

    def __init__(self, namespace: str | None = None, *, keep_only_main_replica: bool = True, **settings: Any) -> None:
        super().__init__(BACKEND, VERSION, keep_only_main_replica)
        self.keep_only_main_replica = keep_only_main_replica
        self._trust = bool(settings.get("trust_pickle", False))
        self._settings = {"namespace": namespace, **settings}

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Returns when all ranks' shards are committed."""
        self._begin(sharded_state_dict, checkpoint_dir).finish()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Returns when this rank's tensors are staged. What goes wrong, now or later, the request's finalisation raises on every rank."""
        begun = self._begin(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(wait_for, begun.awaited, [begun.finish])

    def can_handle_sharded_objects(self) -> bool:
        return True

    def _begin(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Begun:
        step = step_of_folder(checkpoint_dir)
        return Begun(checkpointer_of(self._settings), step, lambda: self._state(sharded_state_dict))

    def _state(self, sharded_state_dict: Any) -> dict[str, Any]:
        """What this rank saves, as pieces and objects."""
        by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state: dict[str, Any] = {}
        for key, shards in by_key.items():
            if isinstance(shards[0], torch_strategy.ShardedTensor):
                places = {place_of(one.global_offset, one.global_shape): part_of(one) for one in shards}
                state.setdefault(PIECES, {})[key] = places
            else:
                data = saved_by_torch([one.data for one in shards])
                if not self._trust:
                    check_loadable(key, data)
                state.setdefault(OBJECTS, {})[key] = io.BytesIO(data)
        return state


class LoadStrategy(TorchDistLoadShardedStrategy):
    """Loads what `SaveStrategy` saved, as Megatron-Core's own strategy loads files. Settings are those of `StoragedReader`."""

    def __init__(self, namespace: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._trust = bool(settings.get("trust_pickle", False))
        self._settings = {"namespace": namespace, **settings}

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        # Saves that follow may be of steps before those of these.
        close_checkpointers()
        tensors = [one for one in torch_strategy.nested_values(sharded_state_dict) if isinstance(one, torch_strategy.ShardedTensor)]
        state, flat, renamed = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        loaded = torch_strategy.mcore_to_pyt_state_dict(state, True)
        planner = torch_strategy.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        load(loaded, storage_reader=self._reader(checkpoint_dir), planner=planner)
        whole = {key: self._unwrapped(key, value) for key, value in loaded.items()}
        whole = torch_strategy._replace_sharded_keys_with_state_dict_keys(whole, flat, renamed)
        torch_strategy._restore_dict_types(whole, sharded_state_dict)
        return whole

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        metadata = metadata or self._reader(checkpoint_dir).read_metadata()
        described = [(key, one) for key, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)]
        # As Megatron-Core's own does, which trips over properties that newer PyTorch has.
        empty = {key: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for key, one in described}
        return {key: torch_strategy.ShardedTensor.from_rank_offsets(key, one).without_data() for key, one in empty.items()}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        metadata = self._reader(checkpoint_dir).read_metadata()
        kinds = metadata.state_dict_metadata.items()
        objects = [key for key, kind in kinds if isinstance(kind, BytesStorageMetadata)]
        found = {one.unique_key: one for one in map(torch_strategy.ShardedObject.empty_from_unique_key, objects)}
        return {**found, **self.load_tensors_metadata(checkpoint_dir, metadata)}

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        raise InvalidArgument("a saved step is never changed: save again without these tensors")

    def _reader(self, checkpoint_dir: str | Path) -> StoragedReader:
        return StoragedReader(step_of_folder(checkpoint_dir), **self._settings)

    def _unwrapped(self, key: str, value: Any) -> Any:
        if not isinstance(value, io.BytesIO):
            return torch_strategy._unwrap_pyt_sharded_tensor(value)
        if not self._trust:
            return load_plain(key, value)
        return torch.load(value, map_location="cpu", weights_only=False)


def latest_checkpoint(folder: str | Path, namespace: str | None = None, **settings: Any) -> str | None:
    """The folder, below this one, of the newest step that the daemons can restore; None if nothing was saved yet. Every rank calls it.

    A job that dies between the commit of a step and its `metadata.json` leaves a whole checkpoint that Megatron-Core does not know for
    one: rank 0 writes the file then. Settings are those of `StoragedReader`.
    """
    try:
        step = int(StoragedReader(namespace=namespace, **settings).resolve()["step"])
    except NoCheckpointError:
        return None
    found: str = from_rank_zero(lambda: _completed(Path(folder), step))
    return found


def install(namespace: str | None = None, **settings: Any) -> None:
    """Makes these the default strategies: those that Megatron-Core takes for what they have saved, and to save where it would write files.

    Checkpoints that are files are still loaded as files. Settings are those of `SaveStrategy`.
    """
    saves = SaveStrategy(namespace, **settings)
    loads = LoadStrategy(namespace, trust_pickle=bool(settings.get("trust_pickle", False)))

    def register() -> None:
        register_strategies_of_files()
        strategies.register_default_strategy(strategies.StrategyAction.SAVE_SHARDED, *FILES, saves)

    # Megatron-Core registers its own anew whenever one is asked for.
    torch_strategy.register_default_torch_strategies = register
    strategies.register_default_strategy(strategies.StrategyAction.SAVE_SHARDED, BACKEND, VERSION, saves)
    strategies.register_default_strategy(strategies.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, loads)


def part_of(shard: Any) -> torch.Tensor:
    """A `ShardedTensor`'s own part, with as many dimensions as the whole has."""
    if getattr(shard, "flattened_range", None) is not None:
        raise UnsavableState(f"tensor {shard.key!r} is a flattened range of its shard, which Megatron-Core does not save any more either")
    if shard.data is None:
        raise UnsavableState(f"tensor {shard.key!r} has no data")
    part: torch.Tensor = shard.data.detach()
    for _ in range(shard.prepend_axis_num):
        part = part.unsqueeze(0)
    return part


def checkpointer_of(settings: dict[str, Any]) -> PiecesCheckpointer:
    key = (run_key(settings.get("process_group")), *sorted(settings.items(), key=lambda item: item[0]))
    if key not in _checkpointers:
        # What fails is raised where the request is finalised, once.
        _checkpointers[key] = PiecesCheckpointer(on_error="warn", busy="wait", background=False, **settings)
    return _checkpointers[key]


def close_checkpointers() -> None:
    while _checkpointers:
        _, checkpointer = _checkpointers.popitem()
        checkpointer.close()


def _completed(folder: Path, step: int) -> str:
    """The step's folder, with its `metadata.json`."""
    named = [path for path in folder.iterdir() if re.search(rf"\D0*{step}$", path.name) and path.is_dir()] if folder.is_dir() else []
    found = [path for path in named if (path / COMMON).exists()]
    if not found:
        raise CheckpointLoadError(
            f"the newest step that can be restored is {step}, and no folder of it in {str(folder)!r} has a {COMMON}: give the folder "
            "that the job has saved in"
        )
    try:
        is_known = core.maybe_load_config(str(found[0])) is not None
    except (ValueError, TypeError):
        is_known = False  # torn when it was written
    if not is_known:
        core.save_config(core.CheckpointingConfig(BACKEND, VERSION), str(found[0]))
    return str(found[0])
