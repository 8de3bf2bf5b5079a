"""Saves and loads from the trainer's side, head to head with memcpy and with others.

One daemon on this machine and every method on the same state in turn; each round is bracketed by copies of the same bytes, and what
counts is the median of the ratios. Keys that were not measured are not written; what is missing is said.

    python bench/sdk/bench_sdk.py --write docs/bench
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "sdk" / "python" / "tests"))
warnings.simplefilter("ignore")

import others  # noqa: E402
import report  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from batches import next_batches  # noqa: E402
from daemon import Daemon, free_port  # noqa: E402
from hyper import TOKEN, section  # noqa: E402
from machine import described  # noqa: E402
from measure import Contest  # noqa: E402
from own import Own  # noqa: E402
from ranks import several  # noqa: E402
from storaged import __version__  # noqa: E402
from training import slowdowns  # noqa: E402

HEAD = ("version", "commit", "torch", "cores", "mib", "machine", "date", "memcpy_gb_per_second")
#: What `make torch-versions` and `make frameworks` have counted stays.
COUNTED = ("torch_versions", "frameworks")
PARTS = ("own", "background", "torch", "dcp", "hyperpod", "dlrover", "training", "ranks", "batches")


class Bench:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.out = {
            "version": __version__, "commit": options.commit, "torch": torch.__version__, "cores": os.cpu_count(), "mib": options.mib,
            "machine": described(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        self.missing = []
        self.contest = Contest(options.mib, options.rounds)

    def daemon(self, name, extra=""):
        return Daemon(self.folder / name, extra, budget=f"{4 * self.options.mib + 512}MiB")

    def measure(self):
        for part in PARTS:
            if self.options.only and part not in self.options.only:
                continue
            started = time.monotonic()
            missing = getattr(self, part)()
            if missing:
                self.missing.append(missing)
            print(f"{part}: {time.monotonic() - started:.0f} s{', ' + missing if missing else ''}", file=sys.stderr, flush=True)
        if self.contest.copies:
            self.out["memcpy_gb_per_second"] = round(self.contest.gigabytes / statistics.median(self.contest.copies), 2)

    def own(self):
        daemon = self.daemon("own")
        try:
            Own(self.contest, daemon, self.out).run()
        finally:
            daemon.kill()

    def background(self):
        daemon = self.daemon("background")
        try:
            Own(self.contest, daemon, self.out).background()
        finally:
            daemon.kill()

    def torch(self):
        others.torch_save(self.contest, self.out)

    def dcp(self):
        others.stock_dcp(self.contest, self.out)

    def hyperpod(self):
        def make():
            port = free_port()
            return self.daemon("hyperpod", section(self.folder, port)), port, TOKEN, self.folder

        return others.hyperpod(self.contest, self.out, make)

    def dlrover(self):
        return others.dlrover(self.contest, self.out)

    def training(self):
        daemon = self.daemon("training")
        try:
            with Own(self.contest, daemon, self.out).made("training", threads=1) as checkpointer:
                slowdowns(self.contest, checkpointer, self.out)
        finally:
            daemon.kill()

    def ranks(self):
        daemon = self.daemon("ranks")
        try:
            for ranks, job in ((4, "save"), (3, "load")):
                self.out |= several(ranks, job, daemon, self.options.mib, self.options.rounds, free_port())
        finally:
            daemon.kill()

    def batches(self):
        daemon = self.daemon("batches")
        try:
            return next_batches(daemon, self.folder, self.out, self.options.rounds)
        finally:
            daemon.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, help="these parts alone")
    parser.add_argument("--commit", default="")
    parser.add_argument("--write", type=Path, help="folder for sdk.json, sdk.md and sdk.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-sdk-"))
    # Stock asynchronous saves want a process group.
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        bench = Bench(options, folder)
        bench.measure()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.write is not None and (options.write / "sdk.json").exists():
        before = json.loads((options.write / "sdk.json").read_text())
        if options.only:
            # The head goes with the figures that are there; those of this run say whose they are.
            measured = {key: value for key, value in bench.out.items() if key not in HEAD}
            measured |= {f"{part}_commit": options.commit for part in options.only}
            bench.out = before | measured
        bench.out |= {key: value for key, value in before.items() if key.startswith(COUNTED)}
    text = json.dumps(bench.out, indent=2, sort_keys=True) + "\n"
    print(text, end="", flush=True)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "sdk.json").write_text(text)
        (options.write / "sdk.md").write_text(report.table(bench.out, bench.missing))
        (options.write / "sdk.svg").write_text(report.plot(bench.out))
    # PyTorch's shutdown with a process group of one may abort.
    os._exit(0)


if __name__ == "__main__":
    main()
