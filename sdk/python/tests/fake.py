"""A daemon's stand-in that misbehaves on purpose: slots are private memory, a sealed shard is a file, and what it gives
back may be damaged. Tests of behaviour use the real daemon (`daemon.py`).
"""

import ctypes
import mmap
import os
from array import array
from pathlib import Path

from storaged.errors import CorruptData, NoCheckpointError


class Slot:
    def __init__(self, number, capacity):
        self.id, self.capacity = number, capacity
        self.memory = mmap.mmap(-1, max(capacity, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def write(self, offset, data):
        assert offset + len(data) <= self.capacity
        ctypes.memmove(self.address + offset, data, len(data))

    def write_many(self, pieces):
        for offset, data in pieces:
            self.write(offset, data)

    def copy_packed(self, addresses, offsets, lengths, threads):
        self.copy_many(list(zip(*(array("Q", column) for column in (addresses, offsets, lengths)))), threads)

    def copy_many(self, parts, threads):
        for address, offset, length in parts:
            assert offset + length <= self.capacity
            ctypes.memmove(self.address + offset, address, length)


class Shard:
    def __init__(self, path, ranges, rung, damaged):
        self.data, self.ranges, self.rung, self.damaged = path.read_bytes(), ranges, rung, damaged
        self.length = len(self.data)

    def take(self, offset, length):
        inside = any(start <= offset and offset + length <= start + count for start, count in self.ranges)
        assert inside, f"{length} bytes at {offset} were not asked for: {self.ranges}"
        if self.damaged:
            raise CorruptData(f"chunk {offset // Manifest.chunk_bytes} does not have its digest")
        return self.data[offset : offset + length]

    def read(self, offset, length):
        return self.take(offset, length)

    def read_many(self, parts, threads):
        for offset, address, length in parts:
            ctypes.memmove(address, self.take(offset, length), length)


class Manifest:
    chunk_bytes = 4096

    def __init__(self, folder):
        self.folder = folder
        self.shard_lengths = [path.stat().st_size for path in shards_of(folder)]

    def schema(self):
        return (self.folder / "schema.json").read_bytes()


def shards_of(folder):
    return sorted(folder.glob("__*_0.distcp"), key=lambda path: int(path.name.split("_")[2]))


class FakeSession:
    """Both connections in one, with the session's interface."""

    timeout_ms = 1000
    namespace = "fake"

    def __init__(self, folder):
        self.folder = Path(folder)
        self.rank, self.slots, self.free, self.opened, self.runs = 0, 0, [], [], {}
        # Rungs whose bytes do not have their digests.
        self.damaged = set()

    def connect(self, deadline=None):
        return self

    client = connect

    def trainer(self, run, rank, world_size, deadline=None):
        self.rank = rank
        return self

    def run_of(self, key):
        return self.runs.get(key)

    def set_run(self, key, run):
        self.runs[key] = run

    def drop_connections(self):
        pass

    def note_step(self, run, step):
        pass

    def last_step(self, key):
        return None

    def open_run(self, timeout_ms):
        return "1-00f3a9c1d2e4b5a6"

    def acquire(self, size, timeout_ms):
        for slot in self.free:
            if slot.capacity >= size:
                self.free.remove(slot)
                return slot
        self.slots += 1
        return Slot(self.slots, size)

    def release(self, slot, timeout_ms):
        self.free.append(slot)

    def seal(self, slot, step, length, timeout_ms):
        folder = self.folder / f"step-{step}"
        folder.mkdir(exist_ok=True)
        (folder / f"__{self.rank}_0.distcp").write_bytes(ctypes.string_at(slot.address, length))
        self.free.append(slot)

    def commit(self, step, schema, torch_metadata, durable, timeout_ms):
        folder = self.folder / f"step-{step}"
        (folder / "schema.json").write_bytes(schema)
        (folder / ".metadata.tmp").write_bytes(torch_metadata)
        os.rename(folder / ".metadata.tmp", folder / ".metadata")

    def wait(self, run, step, state, timeout_ms):
        return state, None, None

    def plan(self, step, timeout_ms, allow_older):
        steps = [int(p.parent.name.split("-")[1]) for p in self.folder.glob("step-*/.metadata")]
        found = [s for s in steps if step in (None, s)]
        if not found:
            raise NoCheckpointError(f"expected a checkpoint of step {step}, got steps {sorted(steps)}")
        plan = {"run": "1-00f3a9c1d2e4b5a6", "step": max(found), "manifest": f"step-{max(found)}", "state": "committed"}
        return plan | {"shards": [], "passed_over": []}

    def manifest(self, digest, timeout_ms):
        return Manifest(self.folder / digest)

    def open_shard(self, manifest, rank, ranges, timeout_ms, without_own_ram=False, verify="fast"):
        self.opened.append((rank, ranges))
        rung = "decoded" if without_own_ram else "own ram"
        return Shard(shards_of(manifest.folder)[rank], ranges, rung, rung in self.damaged)

    def close_shard(self, manifest, rank, timeout_ms):
        pass
