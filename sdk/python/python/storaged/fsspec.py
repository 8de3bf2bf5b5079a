"""The fsspec protocol `storaged://`: checkpoints as folders, for whoever gives stock `torch.distributed.checkpoint` a bare
`checkpoint_id="storaged://NAMESPACE/step-100"`.

A step is one checkpoint, whoever saved it: `.metadata`, and one `__R_0.distcp` per rank, which is that rank's shard. Each
rank's file is sealed when it is closed; the step is committed when `.metadata` is put in its place, and neither listed nor
found before. Folders between the namespace and the step are joined to its name by dots.
"""

from __future__ import annotations

import io
import logging
import re
import threading
from dataclasses import dataclass
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from ._arguments import DURABLE, VERIFY, one_of, step_number
from ._deadline import Deadline
from ._session import Session
from .errors import InvalidArgument, NoCheckpointError, UnknownNamespace
from .torch._files import MetadataFile, RankSave, ShardReader, rank_of_file
from .torch._handle import STATES

logger = logging.getLogger("storaged")

PROTOCOL = "storaged"
METADATA, METADATA_TMP = ".metadata", ".metadata.tmp"
#: Saves that a process has begun and not forgotten: more than go on at once.
SAVES_MAX = 8
#: One more than a step has.
STEP_DIGITS = 21
#: A listing's states of checkpoints that every rank has saved.
WHOLE = ("committed", "protected", "durable")


@dataclass(frozen=True)
class Place:
    """What a path names: a namespace, a step of it, a file of that."""

    namespace: str
    step: int | None = None
    file: str | None = None

    @property
    def folder(self) -> str:
        return self.namespace if self.step is None else f"{self.namespace}/step-{self.step}"


def place_of(path: str) -> Place:
    """Refuses what is not `NAMESPACE`, `NAMESPACE/step-N` or a file of a step."""
    parts = [part for part in path.removeprefix(f"{PROTOCOL}://").split("/") if part not in ("", ".")]
    at = next((at for at, part in enumerate(parts) if _step_in(part) is not None), len(parts))
    if at == 0 or len(parts) > at + 2 or ".." in parts:
        raise InvalidArgument(
            f"expected {PROTOCOL}://NAMESPACE/step-N or a file in it, got {path!r}: name the job first, and one folder per step"
        )
    step = _step_in(parts[at]) if at < len(parts) else None
    return Place(".".join(parts[:at]), step, parts[at + 1] if len(parts) > at + 1 else None)


def _step_in(part: str) -> int | None:
    found = re.fullmatch(r"step[-_](\d+)", part, re.ASCII)
    if found is None:
        return None
    digits = found.group(1).lstrip("0") or "0"
    # Python refuses to read thousands of digits in its own words.
    return step_number(int(digits[:STEP_DIGITS]))


class _Known:
    """What this process knows across file systems, which fsspec makes anew in every thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sessions: dict[tuple[Any, ...], Session] = {}
        self.saves: dict[tuple[Session, int], RankSave] = {}
        # One manifest for all files of a load, also if a newer run saves the same step meanwhile.
        self.manifests: dict[tuple[Session, int], Any] = {}


_known = _Known()


class StoragedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Options (`storage_options`, or keywords of `FsspecWriter`): `socket`, `token` and `timeout` as of `Session`, `durable`
    and `until` as of `StoragedWriter`, `verify` as of `StoragedReader`. Without them the environment says them."""

    protocol = PROTOCOL
    root_marker = ""

    def __init__(
        self,
        socket: str | None = None,
        token: bytes | None = None,
        timeout: float = 120.0,
        durable: str = "policy",
        until: str = "committed",
        verify: str = "fast",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.timeout = timeout
        self.verify = one_of("verify", verify, VERIFY)
        self.durable = one_of("durable", durable, DURABLE)
        self.until = one_of("until", until, STATES)
        self._reach = (socket, token)

    # Writing.

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Folders are there by themselves; that of a step says that this process is about to save it."""
        place = place_of(path)
        if place.file is None and place.step is not None:
            self._save(place.namespace, place.step)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.mkdir(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        place = place_of(path)
        if place.step is None or place.file is None:
            raise IsADirectoryError(f"expected a file of a step, got the folder {path}")
        if mode == "rb":
            return self._reading(place)
        if mode != "wb":
            raise InvalidArgument(f"expected mode rb or wb, got {mode!r}: files of a checkpoint are written once, whole")
        save = self._save(place.namespace, place.step)
        if place.file in (METADATA, METADATA_TMP):
            return MetadataFile(save, commits=place.file == METADATA)
        return save.open(rank_of_file(place.file))

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """The one renaming there is: what commits a step."""
        before, after = place_of(path1), place_of(path2)
        if before.folder != after.folder or (before.file, after.file) != (METADATA_TMP, METADATA) or before.step is None:
            raise InvalidArgument(f"expected {METADATA_TMP} to be renamed to {METADATA} in one step, got {path1} to {path2}")
        self._save(before.namespace, before.step).commit()

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Gives up what this process is saving. What is committed stays: the daemon drops what newer steps displace, and the
        durable tier what its policy says."""
        for one in [path] if isinstance(path, str) else path:
            place = place_of(one)
            save = _known.saves.get((self._session(place.namespace), place.step)) if place.step is not None else None
            # DCP removes the description of the checkpoint that a save is about to replace.
            if save is not None and place.file != METADATA:
                save.give_up()
            elif save is None:
                logger.info("%s was not removed: steps leave RAM when newer ones need the room", one)

    def rm_file(self, path: str) -> None:
        self.rm(path)

    _rm = rm_file

    # Reading.

    def exists(self, path: str, **_: Any) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        return self.exists(path) and place_of(path).file is None

    def isfile(self, path: str) -> bool:
        return self.exists(path) and place_of(path).file is not None

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        place = place_of(path)
        name = self._strip_protocol(path)
        if place.step is not None:
            manifest = self._manifest(place)
            if place.file is not None:
                if place.file not in (sizes := _sizes(manifest)):
                    raise FileNotFoundError(f"no {place.file} in {place.folder}: expected one of {', '.join([*sizes][:5])}")
                return {"name": name, "size": sizes[place.file], "type": "file"}
        return {"name": name, "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Of a namespace the steps that can be loaded, up to the newest one, which all nodes are asked for; of a step its
        files."""
        place = place_of(path)
        name = self._strip_protocol(path).rstrip("/")
        if place.file is not None:
            entries = [self.info(path)]
        elif place.step is not None:
            sizes = _sizes(self._manifest(place))
            entries = [{"name": f"{name}/{file}", "size": size, "type": "file"} for file, size in sizes.items()]
        else:
            steps = self._steps(place.namespace)
            entries = [{"name": f"{name}/step-{step}", "size": 0, "type": "directory"} for step in steps]
        return entries if detail else [entry["name"] for entry in entries]

    # Parts of the above.

    def _session(self, namespace: str) -> Session:
        socket, token = self._reach
        if socket is None and token is None:
            return Session.shared(namespace)
        with _known.lock:
            key = (namespace, socket, token)
            return _known.sessions.setdefault(key, Session(namespace, socket=socket, token=token))

    def _save(self, namespace: str, step: int) -> RankSave:
        """This process's part in the save of a step; its oldest ones are forgotten."""
        session = self._session(namespace)
        with _known.lock:
            save = _known.saves.get((session, step))
            if save is None or save.is_over:
                save = _known.saves[session, step] = RankSave(session, step, self.timeout, self.durable, self.until)
            _known.manifests.pop((session, step), None)
            old = [_known.saves.pop(key) for key in [*_known.saves][:-SAVES_MAX]]
        for one in old:
            one.give_up()
        return save

    def _manifest(self, place: Place) -> Any:
        """What describes a step, if it can be loaded."""
        assert place.step is not None
        session, deadline = self._session(place.namespace), Deadline(self.timeout)
        missing = FileNotFoundError(f"no checkpoint that could be loaded is at {PROTOCOL}://{place.folder}")
        save = _known.saves.get((session, place.step))
        if save is not None and save.is_ahead and place.step not in self._listed(session):
            # Nodes that are away need not be asked for what is being saved here.
            raise missing
        client = session.connect(deadline)
        try:
            plan = client.plan(place.step, deadline.left_ms())
            # A newer step may take its place right after it was planned.
            manifest = client.manifest(plan["manifest"], deadline.left_ms())
        except NoCheckpointError:
            raise missing from None
        with _known.lock:
            _known.manifests[session, place.step] = manifest
            for key in [*_known.manifests][:-SAVES_MAX]:
                del _known.manifests[key]
        return manifest

    def _reading(self, place: Place) -> io.BufferedIOBase:
        assert place.step is not None and place.file is not None
        session = self._session(place.namespace)
        manifest = _known.manifests.get((session, place.step))
        if manifest is None or place.file == METADATA:
            manifest = self._manifest(place)
        if place.file not in _sizes(manifest):
            raise FileNotFoundError(f"no {place.file} in {place.folder}")
        if place.file == METADATA:
            return io.BytesIO(manifest.torch_metadata())
        return io.BufferedReader(ShardReader(session, manifest, rank_of_file(place.file), self.timeout, self.verify))

    def _listed(self, session: Session) -> set[int]:
        """Steps of the namespace that this node knows to be whole."""
        deadline = Deadline(self.timeout)
        try:
            rows = session.connect(deadline).list(session.namespace, deadline.left_ms())
        except UnknownNamespace:
            return set()
        return {step for _, step, state, *_ in rows if state in WHOLE}

    def _steps(self, namespace: str) -> list[int]:
        session, deadline = self._session(namespace), Deadline(self.timeout)
        try:
            newest = session.connect(deadline).plan(None, deadline.left_ms())["step"]
        except NoCheckpointError:
            return []
        # A job that went back to an older step would not find the one it came from.
        return sorted({step for step in self._listed(session) if step < newest} | {newest})


def _sizes(manifest: Any) -> dict[str, int]:
    """A step's files and their bytes."""
    shards = {f"__{rank}_0.distcp": length for rank, length in enumerate(manifest.shard_lengths)}
    return {METADATA: len(manifest.torch_metadata())} | shards


# For installations without entry points, and whoever imports this module by itself.
fsspec.register_implementation(PROTOCOL, StoragedFileSystem, clobber=True)
