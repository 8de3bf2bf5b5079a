"""Saves and loads with the installed package against a daemon that it starts: `smoke.py DAEMON`. Without torch by its native part; and with torch where there is one."""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import storaged
from storaged import Session, StoragedError, errors

CONTENT = os.urandom(1 << 20)


def native(session):
    run = session.connect().open_run(10_000)
    trainer = session.trainer(run, 0, 1)
    slot = trainer.acquire(len(CONTENT), 10_000)
    source = ctypes.create_string_buffer(CONTENT, len(CONTENT))
    slot.copy_many([(ctypes.addressof(source), 0, len(CONTENT))], 2)
    trainer.seal(slot, 7, len(CONTENT))
    trainer.commit(7, b"schema", b"metadata", "policy")
    client = session.connect()
    client.wait(run, 7, "committed", 10_000)
    plan = client.plan(None, 10_000)
    manifest = client.manifest(plan["manifest"])
    shard = client.open_shard(manifest, 0, [], 10_000)
    assert (plan["step"], manifest.schema(), shard.read(0, len(CONTENT))) == (7, b"schema", CONTENT)


def with_torch(session):
    import torch
    from storaged.torch import Checkpointer

    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(8, {"w": torch.arange(1000.0), "step": 8})
        checkpointer.wait()
        into = {"w": torch.zeros(1000), "step": 0}
        checkpointer.load(into)
    assert into["step"] == 8 and torch.equal(into["w"], torch.arange(1000.0))


def main():
    with tempfile.TemporaryDirectory() as folder:
        daemon = subprocess.Popen([sys.argv[1], "run", "--keep", "none", "--runtime-dir", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            session = Session("smoke", socket=Path(folder) / "storaged.sock", token=b"", timeout=20)
            limit = time.monotonic() + 20
            while True:
                try:
                    session.connect()
                    break
                except errors.DaemonUnavailable:
                    assert daemon.poll() is None and time.monotonic() < limit
                    time.sleep(0.05)
            native(session)
            try:
                import torch  # noqa: F401

                has_torch = True
            except ImportError:
                has_torch = False
            if has_torch:
                with_torch(session)
        finally:
            daemon.kill()
            daemon.wait()
    words = "with torch" if has_torch else "without torch"
    print(f"    Python {sys.version.split()[0]}, storaged {storaged.__version__}: saved and loaded {words}")


if __name__ == "__main__":
    assert issubclass(errors.DaemonUnavailable, StoragedError)
    main()
