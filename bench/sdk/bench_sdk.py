"""Saves and loads from the trainer's side, head to head with memcpy, stock torch.distributed.checkpoint and torch.save.

One rank, one daemon on this machine, every method on the same state in turn; each round is bracketed by a memcpy, and what counts
is the median of the ratios. Writes only keys that were measured in this run.

    python bench/sdk/bench_sdk.py --write docs/bench/sdk.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "sdk" / "python" / "tests"))

from daemon import Daemon  # noqa: E402
from storaged import __version__  # noqa: E402
from storaged.torch import Checkpointer  # noqa: E402

TENSORS, MANY = 32, 10_000
SECONDS_BETWEEN = 5


def timed(call):
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        each = options.mib * 2**20 // TENSORS // 4
        self.state = {f"layer{i}": torch.full((each,), float(i)) for i in range(TENSORS)}
        self.copy = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        self.daemon = Daemon(folder / "node", budget=f"{4 * options.mib + 512}MiB")
        self.step = 0
        self.pool = ThreadPoolExecutor(2)
        self.memcpy()

    def memcpy(self, threads=1):
        """Seconds of copying the state once, into memory that is there."""

        def copy(first):
            for name, tensor in list(self.state.items())[first::threads]:
                ctypes.memmove(self.copy[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)

        if threads == 1:
            return timed(lambda: copy(0))[0]
        return timed(lambda: list(self.pool.map(copy, range(threads))))[0]

    def ratio(self, call, threads=1):
        """The median, over the rounds, of what a call takes to what copies before and after it take. The first round warms up."""
        ratios = []
        for at in range(self.options.rounds + 1):
            self.change()
            before = self.memcpy(threads)
            took = call()
            ratios.append(took / statistics.mean([before, self.memcpy(threads)]))
        return round(statistics.median(ratios[1:]), 3)

    def change(self):
        """Training changes every element between two saves."""
        for tensor in self.state.values():
            tensor.add_(1)

    def checkpointer(self, namespace, **settings):
        return Checkpointer(session=self.daemon.session(namespace), **settings)

    def ours(self, out):
        for threads in (1, 2):
            with self.checkpointer(f"threads{threads}", threads=threads) as checkpointer:
                out[f"block_vs_memcpy_{threads}t"] = self.ratio(lambda: self.saved(checkpointer, wait_outside=True))
                # Of the same number of threads.
                load = lambda: timed(lambda: checkpointer.load(self.copy))[0]  # noqa: B023, E731
                out[f"load_vs_memcpy_{threads}t"] = self.ratio(load, threads)
                if threads == 2:
                    out["total_vs_memcpy"] = self.ratio(lambda: self.saved(checkpointer, wait_outside=False))
                    out["load_vs_memcpy"] = self.ratio(load)
            self.drop()

    def saved(self, checkpointer, wait_outside):
        self.step += 1

        def save():
            checkpointer.save(self.step, self.state)
            if not wait_outside:
                checkpointer.wait()

        took, _ = timed(save)
        checkpointer.wait()
        return took

    def drop(self):
        """A daemon without slots and namespaces of the method before."""
        self.daemon.kill()
        self.daemon.start()

    def first_saves(self, out):
        for key, ahead in (
            ("first_save_vs_later", "prepare"), ("first_save_after_load_vs_later", "load"), ("first_save_unprepared_vs_later", "nothing"),
        ):
            ratios = []
            for at in range(3):
                if ahead == "load":
                    with self.checkpointer(f"first-{at}-{ahead}") as before:
                        self.saved(before, wait_outside=True)
                    before.session.drop_connections()
                    before.session.forget_run(before._key)
                with self.checkpointer(f"first-{at}-{ahead}", ahead="load" if ahead == "load" else "asked") as checkpointer:
                    if ahead == "prepare":
                        checkpointer.prepare(self.state).result()
                    elif ahead == "load":
                        checkpointer.load(self.copy)
                        # What a job does between its resume and its first save.
                        time.sleep(SECONDS_BETWEEN)
                    first = self.saved(checkpointer, wait_outside=True)
                    later = statistics.median(self.saved(checkpointer, wait_outside=True) for _ in range(4))
                ratios.append(first / later)
                self.drop()
            out[key] = round(statistics.median(ratios), 2)

    def many_tensors(self, out):
        """10,000 tensors of 256 bytes: what a save costs the training thread, and how long it keeps other threads waiting."""
        tensors = {f"layer{i}.weight": torch.full((64,), float(i)) for i in range(MANY)}
        with self.checkpointer("many", timeout=300) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, tensors)
                checkpointer.wait()
            took, stalls = [], []
            for step in range(4, 9):
                with Stalls() as watch:
                    took.append(timed(lambda: checkpointer.save(step, tensors))[0])
                    checkpointer.wait()
                stalls.append(watch.longest)
        out["many_tensors_save_ms"] = round(statistics.median(took) * 1000, 1)
        out["many_tensors_gil_stall_ms"] = round(statistics.median(stalls) * 1000, 1)

    def others(self, out):
        shm = Path(tempfile.mkdtemp(dir="/dev/shm"))
        try:
            out["torch_save_vs_memcpy"] = self.ratio(lambda: timed(lambda: torch.save(self.state, shm / "state.pt"))[0])
            (shm / "state.pt").unlink()
            sync = lambda: dcp.save(self.state, storage_writer=dcp.FileSystemWriter(shm / "sync"), no_dist=True)  # noqa: E731
            out["dcp_sync_shm_vs_memcpy"] = self.ratio(lambda: timed(sync)[0])
            shutil.rmtree(shm / "sync")
            totals = []

            def block():
                started = time.perf_counter()
                future = dcp.async_save(self.state, storage_writer=dcp.FileSystemWriter(shm / "async"))
                blocked = time.perf_counter() - started
                getattr(future, "upload_completion", future).result()
                totals.append(time.perf_counter() - started)
                return blocked

            out["dcp_async_block_vs_memcpy"] = self.ratio(block)
            out["dcp_async_total_vs_memcpy"] = round(statistics.median(totals[1:]) / self.memcpy(), 3)
        finally:
            shutil.rmtree(shm)


class Stalls:
    """How long a thread that only wants to run for a moment had to wait for the interpreter, beyond its sleep."""

    PAUSE = 0.001

    def __enter__(self):
        self.longest, self._over = 0.0, False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over:
            started = time.perf_counter()
            time.sleep(self.PAUSE)
            self.longest = max(self.longest, time.perf_counter() - started - self.PAUSE)

    def __exit__(self, *_):
        self._over = True
        self._thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-sdk-"))
    out = {"version": __version__, "commit": options.commit, "torch": torch.__version__, "cores": os.cpu_count(), "mib": options.mib}
    bench = Bench(options, folder)
    try:
        bench.ours(out)
        bench.first_saves(out)
        bench.many_tensors(out)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
        bench.others(out)
    finally:
        bench.daemon.kill()
        shutil.rmtree(folder)
    text = json.dumps(out, indent=2)
    print(text)
    if options.write is not None:
        options.write.write_text(text + "\n")
    sys.stdout.flush()
    # PyTorch's shutdown with a process group of one may abort.
    os._exit(0)


if __name__ == "__main__":
    main()
