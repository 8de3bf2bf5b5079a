"""`python -m storaged doctor | export | import`; the last two are `storaged export | import` too.

doctor: is there a daemon, may this user use it, how fast is a copy, what would a restart get. export: a step as files that
stock PyTorch and safetensors read. import: a directory of torch.distributed.checkpoint as a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from . import __version__
from ._session import Session
from .errors import ExportError, InvalidArgument, NoCheckpointError, StoragedError

#: What the copy is timed with.
COPY_BYTES = 64 << 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m storaged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help="looks at the daemon from where a trainer stands; changes nothing but, with --copy, a run")
    doctor_parser.add_argument(
        "--copy", action="store_true", help="also times a copy into a slot, in a new run of the namespace 'storaged-doctor'"
    )
    export_parser = commands.add_parser("export", help="writes a step to a directory or an object store, a piece of it at a time")
    export_parser.add_argument("--step", type=int, help="the newest restorable one by default")
    export_parser.add_argument("--format", default="dcp", choices=("dcp", "safetensors", "torch"))
    export_parser.add_argument("--to", required=True, help="a directory, empty or not there yet, or a URL of fsspec's (s3://bucket/folder needs s3fs)")
    import_parser = commands.add_parser("import", help="saves a directory of torch.distributed.checkpoint, which must be trusted")
    import_parser.add_argument("--step", type=int, required=True)
    import_parser.add_argument("--from", dest="source", required=True, help="the directory, or a URL of fsspec's")
    import_parser.add_argument(
        "--force",
        action="store_true",
        help="also where the namespace has checkpoints: a job that saves there is ended, and the step counts as newer than all of its steps",
    )
    for each in (doctor_parser, export_parser, import_parser):
        each.add_argument("--namespace", help="the job (STORAGED_NAMESPACE)")
        each.add_argument("--socket", help="the daemon's socket (STORAGED_SOCKET)")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return doctor(given.namespace, given.socket, given.copy)
    try:
        return move(given)
    except StoragedError as error:
        print(f"storaged: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def move(given: argparse.Namespace) -> int:
    """Exports or imports."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ExportError(f"expected PyTorch beside this package, {sys.executable} has none ({error}): pip install torch") from error
    from .torch import Checkpointer
    from .torch._export import export, import_dcp

    session = Session(given.namespace, socket=given.socket)
    with Checkpointer(session=session, alone=True) as checkpointer:
        if given.command == "export":
            step = export(checkpointer, given.to, given.step, given.format)
            print(f"step {step} of {session.namespace} is in {given.to}")
        else:
            if not given.force and (known := checkpointer.list()):
                raise InvalidArgument(
                    f"expected a namespace without checkpoints, {session.namespace} has step {known[-1].step}: an import opens a new run, which ends "
                    "a job that saves there and counts as newer than all of its steps; take another namespace, or --force"
                )
            import_dcp(checkpointer, given.source, given.step)
            print(f"{given.source} is step {given.step} of {session.namespace}")
    return 0


def doctor(namespace: str | None, socket: str | None, copy: bool) -> int:
    """0 if a trainer can save and load here."""
    session = Session(namespace, socket=socket, timeout=10.0)
    print(f"storaged {__version__}, namespace {session.namespace}, socket {session.socket}")
    checks: list[tuple[str, Callable[[], str]]] = [
        ("daemon", lambda: _answers(session)),
        ("restart", lambda: _restart(session)),
    ]
    if copy:
        checks.append(("copy", lambda: _copy(Session("storaged-doctor", socket=socket, timeout=10.0))))
    return max(_checked(name, check) for name, check in checks)


def _checked(name: str, check: Callable[[], str]) -> int:
    try:
        print(f"ok    {name}: {check()}")
        return 0
    except StoragedError as error:
        print(f"FAIL  {name}: {type(error).__name__}: {error}")
        return 1


def _answers(session: Session) -> str:
    started = time.perf_counter()
    session.connect()
    return f"answers and lets this user in, in {(time.perf_counter() - started) * 1000:.1f} ms"


def _restart(session: Session) -> str:
    try:
        plan = session.client().plan(None, int(session.timeout * 1000))
    except NoCheckpointError:
        return "nothing was saved yet: a job would begin anew"
    gigabytes = sum(length for _, length, _ in plan["shards"]) / 1e9
    sources = ", ".join(sorted({source for _, _, source in plan["shards"]}))
    return f"would get step {plan['step']} ({plan['state']}, {plan['world_size']} ranks, {gigabytes:.2f} GB from {sources})"


def _copy(session: Session) -> str:
    import ctypes

    run = session.connect().open_run(10_000)
    trainer = session.trainer(run, 0, 1)
    source = ctypes.create_string_buffer(COPY_BYTES)
    target = ctypes.create_string_buffer(COPY_BYTES)
    ctypes.memmove(target, source, COPY_BYTES)
    slot = trainer.acquire(COPY_BYTES, 10_000)
    try:
        parts = [(ctypes.addressof(source), 0, COPY_BYTES)]
        slot.get_ready()
        plain = _best(lambda: ctypes.memmove(target, source, COPY_BYTES))
        ours = _best(lambda: slot.copy_many(parts, 1))
    finally:
        trainer.release(slot)
    return f"{COPY_BYTES / ours / 1e9:.1f} GB/s into a slot on one thread, memcpy {COPY_BYTES / plain / 1e9:.1f} GB/s"


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
