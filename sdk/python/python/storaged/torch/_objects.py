"""What is not a tensor: loaded as plain data or as one of a few known types, never as pickle without trust."""

from __future__ import annotations

import codecs
import datetime
import enum
import io
import pickletools
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UnsafeObject, UnsavableState

#: Values of these types are plain data, whatever they hold.
PLAIN = (bool, int, float, complex, str, bytes, type(None))

# Types beyond PyTorch's own list whose making runs nothing but themselves. NumPy's two functions put bytes into arrays and
# scalars; an array of objects holds only what this list allows too. `encode` is how a pickle of protocol 2 holds bytes, and
# `__builtin__` how it calls `builtins`; torch knows the first itself from 2.6 on; 2.4 does not
# know complex numbers.
KNOWN = {
    "__builtin__.complex": complex,
    "_codecs.encode": codecs.encode,
    "_io.BytesIO": io.BytesIO,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
}
FLOAT, COMPLEX = struct.Struct("<d"), struct.Struct("<dd")
NUMPY = ("ndarray", "dtype", "_reconstruct", "scalar")


def load_plain(name: str, value: io.BytesIO) -> Any:
    """What was saved under that name, if it is plain data or of a known type."""
    start = value.tell()
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except Exception as first:
        value.seek(start)
        try:
            with _allowing(value):
                value.seek(start)
                return torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UnsafeObject(
                f"value {name!r} is not plain data and would need trust to be loaded: import the module of its type first if "
                "it is an Enum, save it as numbers, text or tensors, allow its type with "
                f"torch.serialization.add_safe_globals, or pass trust_pickle=True ({_first_line(first)})"
            ) from error


def check_savable(name: str, value: Any) -> None:
    """Refuses what could be saved and never be loaded again: better now than after the crash."""
    if is_plain_data(value):
        return
    saved = io.BytesIO()
    try:
        torch.save(value, saved)
    except Exception as error:
        raise UnsavableState(f"value {name!r} of type {type(value).__qualname__} cannot be saved: {error}") from error
    check_loadable(name, saved.getvalue(), type(value).__qualname__)


def check_loadable(name: str, saved: bytes, kind: str = "unknown") -> None:
    """The same for a value that is saved already."""
    try:
        load_plain(name, io.BytesIO(saved))
    except UnsafeObject as error:
        raise UnsavableState(
            f"value {name!r} (type {kind}) could be saved but not be loaded without trust in pickle: save it as numbers, text "
            "or tensors, allow its type with torch.serialization.add_safe_globals, or pass trust_pickle=True where it is "
            "saved and where it is loaded"
        ) from error


class Encoder:
    """Values as DCP saves them; what nobody can change is encoded once."""

    REMEMBERED_MAX = 4096

    def __init__(self) -> None:
        self._known: dict[tuple[type, Any], bytes] = {}

    def encoded(self, value: Any) -> bytes:
        kind = type(value)
        if kind not in PLAIN:
            return saved_by_torch(value)
        # Numbers that are equal may differ in their bits (0.0 and -0.0), and NaNs of other bits look the same.
        key = (kind, FLOAT.pack(value) if kind is float else COMPLEX.pack(value.real, value.imag) if kind is complex else value)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self.REMEMBERED_MAX:
                self._known.clear()
            known = self._known[key] = saved_by_torch(value)
        return known


def saved_by_torch(value: Any) -> bytes:
    saved = io.BytesIO()
    torch.save(value, saved)
    return saved.getvalue()


def is_plain_data(value: Any) -> bool:
    if type(value) in PLAIN:
        return True
    if type(value) in (list, tuple, set):
        return all(map(is_plain_data, value))
    return type(value) is dict and all(map(is_plain_data, value)) and all(map(is_plain_data, value.values()))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


@contextmanager
def _allowing(value: io.BytesIO) -> Iterator[None]:
    """PyTorch's restricted unpickler with the known types among those that this value names."""
    names: list[str] = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", names_in)(value)
    allow = getattr(torch.serialization, "safe_globals", allowing_before_2_5)
    with allow(list(_known(names))):
        yield


def names_in(value: io.BytesIO) -> list[str]:
    """The types and functions that a value names, for torch that cannot tell (up to 2.5)."""
    with zipfile.ZipFile(value) as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        # torch.save writes protocol 2, which has one operation for a name.
        found = {str(told) for operation, told, _ in pickletools.genops(archive.read(pickled)) if operation.name == "GLOBAL"}
    return sorted(name.replace(" ", ".") for name in found)


@contextmanager
def allowing_before_2_5(known: list[Any]) -> Iterator[None]:
    """What `torch.serialization.safe_globals` does from 2.5 on. It goes by what a type calls itself."""
    # 2.4 gives the list that it adds to.
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([one[0] if isinstance(one, tuple) else one for one in known])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _known(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        module, _, attribute = name.rpartition(".")
        # What nobody has imported is not imported here: that would run its code.
        found = KNOWN.get(name) or getattr(sys.modules.get(module), attribute, None)
        if name in KNOWN:
            yield found
        elif _is_of_numpy(module, attribute):
            yield (found, name)
        elif isinstance(found, type) and issubclass(found, enum.Enum):
            yield found
    # Not named, and wanted by numpy's types, which a framework may have allowed: then they are not among the names.
    yield from _dtype_classes()


def _is_of_numpy(module: str, attribute: str) -> bool:
    return module in ("numpy", "numpy._core.multiarray", "numpy.core.multiarray") and attribute in NUMPY


def _dtype_classes() -> Iterator[type]:
    dtypes = getattr(sys.modules.get("numpy"), "dtypes", None)
    for name in getattr(dtypes, "__all__", ()):
        yield getattr(dtypes, name)
