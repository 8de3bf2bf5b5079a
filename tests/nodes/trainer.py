"""One rank on a node of the lab, without torch. What it saves follows from (step, rank), so that whoever loads can compare.

    trainer.py open NAMESPACE                              prints a run
    trainer.py save NAMESPACE RUN RANK RANKS STEP STATE    ends once the step is in that state
    trainer.py train NAMESPACE RUN RANK RANKS              saves each step that a line of its input names until it is protected, over one
                                                           connection; says `saved STEP`, or the error
    trainer.py load NAMESPACE RANK                         reads the newest step, and prints JSON: step, rung, wrong bytes
    trainer.py rot PID STEP RANK                           changes a byte of the slot that holds it, behind the daemon's back

The socket and the token come from STORAGED_SOCKET, and STORAGED_TOKEN or the file that STORAGED_TOKEN_FILE names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from storaged import StoragedError, _native

BYTES = 3_000_001
#: How long each of its requests may take; WAIT_MS says another time.
WAIT_MS = int(os.environ.get("WAIT_MS", "60000"))


def content(step: int, rank: int) -> bytes:
    return hashlib.shake_256(f"step {step} rank {rank}".encode()).digest(BYTES + rank * 4099)


def save(socket: str, namespace: str, token: bytes, run: str, rank: int, ranks: int, step: int, state: str) -> None:
    stage(_native.Trainer(socket, namespace, token, run, rank, ranks), rank, step)
    _native.Client(socket, namespace, token).wait(run, step, state, WAIT_MS)


def stage(trainer: _native.Trainer, rank: int, step: int) -> None:
    shard = content(step, rank)
    slot = trainer.acquire(len(shard), WAIT_MS)
    slot.write(0, shard)
    trainer.seal(slot, step, len(shard))
    if rank == 0:
        trainer.commit(step, b"", b"", "policy", WAIT_MS)


def train(socket: str, namespace: str, token: bytes, run: str, rank: int, ranks: int) -> None:
    trainer, client = _native.Trainer(socket, namespace, token, run, rank, ranks), _native.Client(socket, namespace, token)
    for line in sys.stdin:
        step = int(line)
        try:
            stage(trainer, rank, step)
            client.wait(run, step, "protected", WAIT_MS)
        except StoragedError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        else:
            print(f"saved {step}", flush=True)


def load(socket: str, namespace: str, token: bytes, rank: int) -> dict:
    client = _native.Client(socket, namespace, token)
    plan = client.plan(None, WAIT_MS)
    shard = client.open_shard(client.manifest(plan["manifest"]), rank, [], WAIT_MS)
    got, expected = shard.read(0, shard.length), content(plan["step"], rank)
    wrong = abs(len(got) - len(expected)) + sum(a != b for a, b in zip(got, expected)) if got != expected else 0
    return {"step": plan["step"], "state": plan["state"], "rung": shard.rung, "wrong": wrong}


def rot(process: int, step: int, rank: int) -> None:
    expected = content(step, rank)
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        if "storaged-slot" not in os.readlink(descriptor):
            continue
        with descriptor.open("r+b", buffering=0) as file:
            if file.read(4096) == expected[:4096]:
                file.seek(100_000)
                file.write(bytes([expected[100_000] ^ 0x40]))
                return
    raise LookupError(f"no slot of {process} holds rank {rank} of step {step}")


def main() -> int:
    if sys.argv[1] == "rot":
        rot(*map(int, sys.argv[2:]))
        return 0
    socket, file = os.environ["STORAGED_SOCKET"], os.environ.get("STORAGED_TOKEN_FILE")
    token = Path(file).read_bytes().strip() if file else os.environ["STORAGED_TOKEN"].encode()
    verb, namespace, *rest = sys.argv[1:]
    if verb == "open":
        print(_native.Client(socket, namespace, token).open_run(WAIT_MS))
    elif verb == "save":
        save(socket, namespace, token, rest[0], *map(int, rest[1:4]), rest[4])
    elif verb == "train":
        train(socket, namespace, token, rest[0], *map(int, rest[1:3]))
    else:
        print(json.dumps(load(socket, namespace, token, int(rest[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
