from typing import Any, TypedDict

__version__: str
DEFAULT_SOCKET: str
#: Seconds.
AWAY_AFTER: float

class Plan(TypedDict):
    run: str
    step: int
    manifest: str
    world_size: int
    state: str
    expected_ms: int
    shards: list[tuple[int, int, str]]
    passed_over: list[tuple[str, int, str]]

class ReasonDict(TypedDict):
    code: str
    text: str

class SourceDict(TypedDict):
    rank: int
    nbytes: int
    source: str
    nodes: list[str]

class VerdictPlan(TypedDict):
    run: str
    step: int
    manifest: str
    world_size: int
    state: str
    expected_ms: int
    shards: list[SourceDict]

class ExpectedDict(TypedDict):
    stretch: str
    ms: int
    rate: str

class PassedOverDict(TypedDict):
    run: str
    step: int
    cause: str | None
    text: str

class ReturningDict(TypedDict):
    any: int
    of: list[str]
    basis: str

class GainDict(TypedDict):
    run: str
    step: int
    verdict: str
    returning: list[ReturningDict]
    text: str

class VerdictDict(TypedDict):
    namespace: str
    verdict: str
    exit_code: int
    reasons: list[ReasonDict]
    plan: VerdictPlan | None
    expected: list[ExpectedDict]
    newest_seen: tuple[str, int] | None
    passed_over: list[PassedOverDict]
    waiting: list[GainDict]

class Client:
    def __new__(cls, socket: str, namespace: str, token: bytes, timeout_ms: int = 15_000) -> Client: ...
    def hang_up(self) -> None: ...
    def open_run(self, timeout_ms: int) -> str: ...
    def board(self, rank: int, kind: str, bytes: int, timeout_ms: int = 15_000) -> Board: ...
    def wait(self, run: str, step: int, state: str, timeout_ms: int) -> tuple[str, str | None, tuple[int, int] | None]: ...
    def plan(self, step: int | None, timeout_ms: int, allow_older: bool = False) -> Plan: ...
    def verdict(self, timeout_ms: int) -> VerdictDict: ...
    def restart_failed(self, run: str | None, step: int, timeout_ms: int) -> list[tuple[str, int, int, int | None]]: ...
    def manifest(self, digest: str, timeout_ms: int = 15_000) -> Manifest: ...
    def open_shard(
        self, manifest: Manifest, rank: int, ranges: list[tuple[int, int]], timeout_ms: int, without_own_ram: bool = False,
        verify: str = "fast", early: bool = False,
    ) -> Shard: ...
    def close_shard(self, manifest: Manifest, rank: int, timeout_ms: int = 15_000) -> None: ...
    def status(self, timeout_ms: int = 15_000) -> str: ...
    def list(
        self, namespace: str, timeout_ms: int = 15_000
    ) -> list[tuple[str, int, str, bool, int, int, str | None]]: ...

class Trainer:
    def __new__(
        cls, socket: str, namespace: str, token: bytes, run: str, rank: int, world_size: int, timeout_ms: int = 15_000
    ) -> Trainer: ...
    def acquire(self, bytes: int, timeout_ms: int) -> Slot: ...
    def seal(self, slot: Slot, step: int, length: int, timeout_ms: int = 15_000) -> None: ...
    def release(self, slot: Slot, timeout_ms: int = 15_000) -> None: ...
    def commit(
        self, step: int, schema: bytes, torch_metadata: bytes, durable: str, timeout_ms: int = 15_000
    ) -> None: ...

class Board:
    address: int
    capacity: int

class Slot:
    id: int
    address: int
    capacity: int
    def get_ready(self) -> None: ...
    def write(self, offset: int, bytes: bytes) -> None: ...
    def write_many(self, pieces: list[tuple[int, bytes]]) -> None: ...
    def copy_many(self, parts: list[tuple[int, int, int]], threads: int) -> None: ...
    def copy_packed(self, addresses: bytes, offsets: bytes, lengths: bytes, threads: int) -> None: ...

class Manifest:
    digest: str
    run: str
    step: int
    world_size: int
    nbytes: int
    chunk_bytes: int
    shard_lengths: list[int]
    def schema(self) -> bytes: ...
    def torch_metadata(self) -> bytes: ...

class Shard:
    length: int
    rung: str
    is_early: bool
    def read(self, offset: int, length: int) -> bytes: ...
    def read_many(self, parts: list[tuple[int, int, int]], threads: int) -> None: ...

def token_of_environment() -> bytes: ...
def layout(
    tensors: list[tuple[str, list[int]]], start: int
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, bytes]], int]: ...
