"""One rank that saves as fast as it can, without torch, for the kill loop: content follows from (run, step, rank)."""

from __future__ import annotations

import hashlib
import sys

from storaged import _native

BYTES, CHANGED = 3_000_001, 64


def content(run: str, step: int, rank: int) -> bytes:
    """Mostly the same from step to step, so that increments are small; different for every run, step and rank."""
    base = bytearray(hashlib.shake_256(f"base {rank}".encode()).digest(4096) * (BYTES // 4096 + 1))[: BYTES + rank * 4099]
    mark = hashlib.sha256(f"{run} {step} {rank}".encode()).digest() * 2
    for place in range(3):
        at = (step * 7919 + place * 1_000_003) % (len(base) - CHANGED)
        base[at : at + CHANGED] = mark
    base[:CHANGED] = mark
    return bytes(base)


def main() -> int:
    socket, namespace, token, log = sys.argv[1:5]
    run = sys.argv[5]
    rank, ranks, first = map(int, sys.argv[6:9])
    trainer = _native.Trainer(socket, namespace, token.encode(), run, rank, ranks)
    waiter = _native.Client(socket, namespace, token.encode())
    for step in range(first, first + 10_000):
        shard = content(run, step, rank)
        slot = trainer.acquire(len(shard), 30_000)
        slot.write(0, shard)
        trainer.seal(slot, step, len(shard))
        if rank == 0:
            trainer.commit(step, b"", b"", "policy")
        waiter.wait(run, step, "protected", 30_000)
        with open(log, "a", encoding="ascii") as file:
            file.write(f"{run} {step}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
