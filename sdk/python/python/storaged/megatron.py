"""Megatron-Core: `dist_checkpointing.save(..., sharded_strategy=SaveStrategy())` and `load(..., sharded_strategy=LoadStrategy())`.

Sharded tensors and objects go through the daemon. What Megatron-Core calls common state, and its `metadata.json`, stay small files in
the checkpoint's folder: it has no other place for them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .errors import InvalidArgument
from .torch import StoragedReader, StoragedWriter

if TYPE_CHECKING:
    torch_strategy: Any = None
    TorchDistLoadShardedStrategy = object

    class SaveShardedStrategy:
        def __init__(self, backend: str, version: int) -> None: ...

else:
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
    from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

BACKEND, VERSION = "storaged", 1


def step_of_folder(folder: str | Path) -> int:
    """The step that a checkpoint's folder names at its end: `iter_0000120`."""
    found = re.search(r"(\d+)/?$", str(folder))
    if found is None:
        raise InvalidArgument(f"expected a checkpoint folder that ends with its step, such as iter_0000120, got {str(folder)!r}")
    return int(found.group(1))


class SaveStrategy(SaveShardedStrategy):
    """Saves the sharded state under the step that the folder names. Settings are those of `StoragedWriter`."""

    def __init__(self, namespace: str | None = None, *, keep_only_main_replica: bool = True, **settings: Any) -> None:
        super().__init__(BACKEND, VERSION)
        self.keep_only_main_replica = keep_only_main_replica
        self._settings = {"namespace": namespace, **settings}

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Returns when all ranks' shards are committed."""
        state, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = torch_strategy.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        writer = StoragedWriter(step_of_folder(checkpoint_dir), **self._settings)
        save(torch_strategy.mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)

    def can_handle_sharded_objects(self) -> bool:
        return True


class LoadStrategy(TorchDistLoadShardedStrategy):
    """Loads what `SaveStrategy` saved, as Megatron-Core's own strategy loads files. Settings are those of `StoragedReader`."""

    def __init__(self, namespace: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._settings = {"namespace": namespace, **settings}

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        tensors = [one for one in torch_strategy.nested_values(sharded_state_dict) if isinstance(one, torch_strategy.ShardedTensor)]
        state, flat, renamed = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        loaded = torch_strategy.mcore_to_pyt_state_dict(state, True)
        planner = torch_strategy.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        load(loaded, storage_reader=self._reader(checkpoint_dir), planner=planner)
        whole = {key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
        whole = torch_strategy._replace_sharded_keys_with_state_dict_keys(whole, flat, renamed)
        torch_strategy._restore_dict_types(whole, sharded_state_dict)
        return whole

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        of_files = torch_strategy.TorchDistLoadShardedStrategy.load_tensors_metadata
        return of_files(self, checkpoint_dir, metadata or self._reader(checkpoint_dir).read_metadata())

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
