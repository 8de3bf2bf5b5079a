"""PyTorch's own CUDA code on a CUDA runtime without a GPU (cudart.c): what it was called for, and what it is to refuse."""

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("cudart.c")
#: PyTorch looks for the driver by this name: preloaded, it is both.
NAME = "libcuda.so.1"


def is_preloaded():
    return NAME in os.environ.get("LD_PRELOAD", "")


def why_not():
    """Why it cannot be had here."""
    import torch

    if torch.version.cuda is None:
        return "this PyTorch has no CUDA code"
    if not torch.version.cuda.startswith("13."):
        return f"cudart.c stands for CUDA 13, this PyTorch is built for {torch.version.cuda}"
    if torch.cuda.is_available():
        return "there is a GPU: nothing is put in its place"
    return None if shutil.which("cc") else "there is no C compiler"


def environment(folder):
    """Builds the runtime; what a process needs to run on it."""
    built = Path(folder) / NAME
    warn = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command = ["cc", *warn, "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{NAME}", "-o", str(built), str(SOURCE)]
    subprocess.run(command, check=True)
    return os.environ | {"LD_PRELOAD": str(built)}


@dataclass(frozen=True)
class Call:
    """A line of the runtime's."""

    text: str

    @property
    def name(self):
        return self.text.split(" ")[0]

    def __getattr__(self, name):
        found = re.search(rf"\b{name}=(\d+)", self.text)
        if found is None:
            raise AttributeError(name)
        return int(found[1])


class Cuda:
    """The runtime of this process."""

    def __init__(self):
        self._library = ctypes.CDLL(NAME)
        self._library.said.restype = ctypes.c_char_p
        self.forget()
        self.refuse()

    def forget(self):
        self._library.forget()

    def calls(self, *names):
        """What was called since, in order; of these names."""
        calls = [Call(line) for line in self._library.said().decode().splitlines()]
        return [call for call in calls if not names or call.name in names]

    def copies(self, which):
        """Those "to-host" or "to-device"."""
        return [call for call in self.calls("copy") if call.text.startswith(f"copy {which} ")]

    def refuse(self, register=0, host_alloc=0, copy=0):
        """Errors of CUDA's for what is asked for from now on; the number of the copy to the host that is refused."""
        for name, value in (("refuse_register", register), ("refuse_host_alloc", host_alloc), ("refuse_copies", copy)):
            ctypes.c_int.in_dll(self._library, name).value = value
