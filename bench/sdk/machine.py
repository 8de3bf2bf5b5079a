"""The machine as the kernel describes it, as the benches in Rust do."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def described() -> str:
    """What figures depend on, on one line."""
    cpu = re.search(r"model name\s*:\s*(.*)", read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", read("/proc/meminfo"))
    parts = [cpu[1] if cpu else platform.machine(), f"{os.cpu_count()} cores", *caches()]
    if memory:
        parts.append(f"{int(memory[1]) / 2**20:.1f} GiB memory")
    parts.append(f"Linux {platform.release()}")
    for name, path in (("", "enabled"), (" in shared memory", "shmem_enabled")):
        chosen = re.search(r"\[(.*)\]", read(f"/sys/kernel/mm/transparent_hugepage/{path}"))
        parts.append(f"transparent huge pages{name} {chosen[1] if chosen else 'not readable'}")
    return ", ".join(parts)


def caches() -> list[str]:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if read(index / "type") != "Instruction":
            found.append(f"L{read(index / 'level')} {read(index / 'size').removesuffix('K')} KiB")
    return found


def read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
