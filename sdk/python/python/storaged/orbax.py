"""Orbax: a handler that keeps the arrays of a step in the daemons, each process its own shards; see docs/python/orbax.md.

    manager = ocp.CheckpointManager(folder, item_handlers=StoragedHandler("my-job"))
    manager.save(step, args=StoragedSave(state))
    state = manager.restore(step, args=StoragedRestore(like=state))

Orbax makes a folder for each step and finds steps by these; the handler leaves a small file in it and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from .errors import CheckpointLoadError, InvalidArgument, UnsavableState
from .torch._pieces import OBJECTS, PIECES, Extents, PiecesCheckpointer, place_of
from .torch._ranks import Processes, Store

if TYPE_CHECKING:

    class AsyncCheckpointHandler: ...

    class CheckpointArgs: ...

    jax: Any
    distributed: Any

    def register_with_handler(*_: Any, **__: Any) -> Any: ...

else:
    import jax
    from jax._src import distributed
    from orbax.checkpoint import AsyncCheckpointHandler
    from orbax.checkpoint.args import CheckpointArgs, register_with_handler


def step_of(directory: Any) -> int:
    """The step whose folder this is in: `120/default`, or `120.orbax-checkpoint-tmp/default` while it is being saved."""
    for name in reversed(str(directory).split("/")):
        if found := re.fullmatch(r"(?:.*_)?(\d+)(?:\.orbax-checkpoint-tmp.*)?", name):
            return int(found[1])
    raise InvalidArgument(f"expected a folder below one that names the step, such as ckpt/120/default, got {directory}")


class CoordinationStore:
    """What the processes tell each other through: the coordination service that `jax.distributed.initialize` connects to."""

    def __init__(self, client: Any, prefix: str = "storaged") -> None:
        self._client = client
        self._prefix = prefix

    def below(self, prefix: str) -> Store:
        return CoordinationStore(self._client, f"{self._prefix}/{prefix}")

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(self._name(key), value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        value: bytes = self._client.key_value_try_get_bytes(self._name(key))
        return value

    def check(self, keys: list[str]) -> bool:
        return all(map(self._has, keys))

    def delete_key(self, key: str) -> None:
        self._client.key_value_delete(self._name(key))

    def _has(self, key: str) -> bool:
        try:
            self.get(key)
        except RuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return False
        return True

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


#: One for all handlers of this process: by it a session knows the run that they save in.
_processes: list[Processes] = []


def processes() -> Processes | None:
    """The processes of `jax.distributed`, None if this one is alone."""
    if jax.process_count() == 1:
        return None
    if not _processes:
        _processes.append(Processes(jax.process_index(), jax.process_count(), CoordinationStore(distributed.global_state.client)))
    return _processes[0]


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def state_of_pieces(tree: Any) -> dict[str, Any]:
    """What this process saves of a pytree: of each array the shards whose first replica it has, and every value that is no array."""
    state: dict[str, Any] = {}
    for name, leaf in _named(tree).items():
        if not isinstance(leaf, jax.Array):
            state.setdefault(OBJECTS, {})[name] = leaf
            continue
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UnsavableState(f"array {name!r} is a PRNG key: save its jax.random.key_data")
        own = [one for one in leaf.addressable_shards if one.replica_id == 0]
        if own:
            places = {place_of(offsets_of(one.index), leaf.shape): _as_torch(name, one.data) for one in own}
            state.setdefault(PIECES, {})[name] = places
    return state


def offsets_of(index: tuple[slice, ...]) -> Extents:
    return tuple(one.start or 0 for one in index)


def _as_torch(name: str, shard: Any) -> torch.Tensor:
    # What a device has comes to the host; what is there is not copied before it is staged.
    on_host = jax.device_put(shard, jax.local_devices(backend="cpu")[0]).block_until_ready()
    try:
        tensor: torch.Tensor = from_dlpack(on_host)
    except (RuntimeError, BufferError, TypeError) as error:
        raise UnsavableState(f"array {name!r} is of type {shard.dtype}, which torch has no counterpart of ({error}): save it as another type") from error
    return tensor


class Template:
    """What a pytree is filled with: for each array the parts that this process's devices hold, each once."""

    def __init__(self, like: Any) -> None:
        self._like = like
        self.state: dict[str, Any] = {}
        for name, leaf in _named(like).items():
            if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
                self.state.setdefault(OBJECTS, {})[name] = None
                continue
            dtype = _as_torch(name, jax.numpy.zeros((), leaf.dtype)).dtype
            parts = self.state.setdefault(PIECES, {}).setdefault(name, {})
            for index in _sharding_of(leaf).addressable_devices_indices_map(tuple(leaf.shape)).values():
                sizes = [len(range(*one.indices(extent))) for one, extent in zip(index, leaf.shape)]
                parts.setdefault(place_of(offsets_of(index), tuple(leaf.shape)), torch.empty(sizes, dtype=dtype))

    def filled(self) -> Any:
        """The pytree, after the state was loaded."""
        return jax.tree_util.tree_map_with_path(self._value, self._like)

    def _value(self, path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name in self.state.get(OBJECTS, {}):
            return self.state[OBJECTS][name]
        shape, sharding, parts = tuple(leaf.shape), _sharding_of(leaf), self.state[PIECES][name]
        places = {device: place_of(offsets_of(index), shape) for device, index in sharding.addressable_devices_indices_map(shape).items()}
        shards = [jax.device_put(jax.dlpack.from_dlpack(parts[place]), device) for device, place in places.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _sharding_of(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        return sharding
    if jax.process_count() > 1:
        raise InvalidArgument("expected arrays to restore like, or ShapeDtypeStructs with a sharding: several processes share each array")
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


class StoragedHandler(AsyncCheckpointHandler):
    """Saves pytrees of `jax.Array`s and plain values. Settings are those of `Checkpointer`.

    Every process makes its handlers in the same order, after `jax.distributed.initialize`, if there are several.
    """

    def __init__(self, namespace: str | None = None, **settings: Any) -> None:
        group = processes()
        self._checkpointer = PiecesCheckpointer(
            namespace, process_group=group, alone=group is None, on_error="warn", busy="wait", background=False, **settings
        )

    def save(self, directory: Any, *_: Any, args: StoragedSave) -> None:
        """Returns when the arrays of all processes are committed."""
        self._begun(directory, args).result()

    async def async_save(self, directory: Any, *_: Any, args: StoragedSave) -> list[Any]:
        """Returns when this process's arrays are staged. Orbax takes the step for saved when all processes' are committed."""
        return [self._begun(directory, args)]

    def restore(self, directory: Any, *_: Any, args: StoragedRestore) -> Any:
        """The step's values in the shape of `like`, its arrays sharded as there. Raises `NoCheckpointError` if the step is gone."""
        template = Template(args.like)
        if self._checkpointer.load(template.state, step_of(directory)) is None:
            raise CheckpointLoadError(f"step {step_of(directory)} was not saved in {self._checkpointer.session.namespace!r}")
        return template.filled()

    def finalize(self, directory: Any) -> None:
        """In one process, when all have ended."""
        (directory / "storaged").write_text(f"{self._checkpointer.session.namespace}\n")

    def close(self) -> None:
        self._checkpointer.close()

    def _begun(self, directory: Any, args: StoragedSave) -> Future[None]:
        make: Callable[[], dict[str, Any]] = partial(state_of_pieces, args.item)
        handle = self._checkpointer.save(step_of(directory), make)
        assert handle is not None and handle.saved is not None
        return handle.saved


@register_with_handler(StoragedHandler, for_save=True)
@dataclass
class StoragedSave(CheckpointArgs):
    """What is saved: a pytree."""

    item: Any


@register_with_handler(StoragedHandler, for_restore=True)
@dataclass
class StoragedRestore(CheckpointArgs):
    """What is restored: a pytree of arrays or `jax.ShapeDtypeStruct`s, in the shape that was saved."""

    like: Any
