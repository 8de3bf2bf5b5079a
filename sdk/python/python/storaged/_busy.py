"""What another process of the node can wait for: that work in this one has ended, or this one itself.

A lock on a byte of a file that has no name. The kernel lets go of it when this process dies, and a process that was forked does not
inherit it, so nobody waits for ever.
"""

from __future__ import annotations

import fcntl
import os
import threading

Awaited = tuple[int, int, int]

_lock = threading.Lock()
#: The process that made the file, its descriptor, and how many bytes were used.
_file: list[int] = []


class Work:
    """Work that has begun: `awaited` is what others wait for, by `wait_for`."""

    def __init__(self) -> None:
        with _lock:
            # A child that was forked has its parent's descriptor and none of its locks.
            if not _file or _file[0] != os.getpid():
                _file[:] = [os.getpid(), os.memfd_create("storaged-work", os.MFD_CLOEXEC), 0]
            _file[2] += 1
            #: Process, descriptor, byte: to be given to others.
            self.awaited: Awaited = (_file[0], _file[1], _file[2])
        fcntl.lockf(self.awaited[1], fcntl.LOCK_EX, 1, self.awaited[2])

    def end(self) -> None:
        process, descriptor, byte = self.awaited
        if process == os.getpid():
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def wait_for(process: int, descriptor: int, byte: int) -> None:
    """Waits for work of another process; returns at once in that process itself, whose locks would go with the file that is opened here."""
    if process == os.getpid():
        return
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY)
    except OSError:
        return  # the process has ended
    try:
        fcntl.lockf(opened, fcntl.LOCK_SH, 1, byte)
    finally:
        os.close(opened)
