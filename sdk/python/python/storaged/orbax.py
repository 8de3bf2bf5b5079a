"""Orbax: a handler that keeps the arrays of a step in the daemon. A sketch for one process; see docs/python/orbax.md.

    manager = ocp.CheckpointManager(folder, item_handlers=StoragedHandler("my-job"))
    manager.save(step, args=StoragedSave(state))
    state = manager.restore(step, args=StoragedRestore(like=state))

Orbax makes a folder for each step and finds steps by these; the handler leaves a small file in it and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from .errors import CheckpointLoadError, InvalidArgument, UnsavableState
from .torch import Checkpointer

if TYPE_CHECKING:

    class CheckpointHandler: ...

    class CheckpointArgs: ...

    jax: Any

    def register_with_handler(*_: Any, **__: Any) -> Any: ...

else:
    import jax
    from orbax.checkpoint import CheckpointHandler
    from orbax.checkpoint.args import CheckpointArgs, register_with_handler


def step_of(directory: Any) -> int:
    """The step whose folder this is in: `120/default`, or `120.orbax-checkpoint-tmp/default` while it is being saved."""
    for name in reversed(str(directory).split("/")):
        if found := re.fullmatch(r"(?:.*_)?(\d+)(?:\.orbax-checkpoint-tmp.*)?", name):
            return int(found[1])
    raise InvalidArgument(f"expected a folder below one that names the step, such as ckpt/120/default, got {directory}")


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _as_torch(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UnsavableState(f"array {name!r} is spread over processes, or a key: this handler saves arrays that one process has, and raw key data")
    # A device array comes to the host; one that is there is not copied before it is staged.
    return from_dlpack(jax.device_put(leaf, jax.devices("cpu")[0]))


class StoragedHandler(CheckpointHandler):
    """Saves pytrees of `jax.Array`s and plain values. Settings are those of `Checkpointer`."""

    def __init__(self, namespace: str | None = None, **settings: Any) -> None:
        self._checkpointer = Checkpointer(namespace, alone=True, **settings)

    def save(self, directory: Any, *_: Any, args: StoragedSave) -> None:
        """Returns when the arrays are committed, because Orbax then takes the step for saved."""
        state = {name: _as_torch(name, leaf) for name, leaf in _named(args.item).items()}
        self._checkpointer.save(step_of(directory), state, background=False)
        self._checkpointer.wait()
        (directory / "storaged").write_text(f"{self._checkpointer.session.namespace}\n")

    def restore(self, directory: Any, *_: Any, args: StoragedRestore) -> Any:
        """The step's values in the shape of `like`, its arrays sharded as there. Raises `NoCheckpointError` if the step is gone."""
        names = _named(args.like)
        saved = self._checkpointer.load_all(step_of(directory))
        missing = sorted(names.keys() - (saved or {}).keys())
        if saved is None or missing:
            raise CheckpointLoadError(f"step {step_of(directory)} has no values for {', '.join(missing[:5])}")

        def value(path: Any, like: Any) -> Any:
            got = saved[jax.tree_util.keystr(path)]
            if not isinstance(got, torch.Tensor):
                return got
            if tuple(got.shape) != tuple(like.shape):
                raise CheckpointLoadError(f"{jax.tree_util.keystr(path)} was saved as {tuple(got.shape)}, expected {tuple(like.shape)}")
            return jax.device_put(jax.dlpack.from_dlpack(got), getattr(like, "sharding", None))

        return jax.tree_util.tree_map_with_path(value, args.like)

    def close(self) -> None:
        self._checkpointer.close()


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
