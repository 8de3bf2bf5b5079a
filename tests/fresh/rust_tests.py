"""Runs Rust's test binaries, some at a time, and says at the end which tests failed and why.

    rust_tests.py cargo test OPTIONS...

`cargo test` runs one binary after the other. Most of ours wait for processes, links and limits rather than for the processor: on two
cores three at a time take half as long. What a binary says is shown when it has ended. Needs nothing but Python and cargo.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# What takes longest, first, so that nothing is left alone at the end.
LONGEST = [
    "simulation", "namespaces", "attack_program", "membership", "kubernetes", "drain", "small_clusters", "beyond", "etcd", "jobs",
    "operator", "attacks",
]  # fmt: skip
# The report of one test among those that libtest shows of a binary whose tests failed.
REPORT = re.compile(r"---- (\S.*) stdout ----$")
# The cause stands behind the first, and in the line of the second.
PANICKED = re.compile(r"thread '.*' .*panicked at ")
RETURNED = re.compile(r"Error: ")
# What belongs to a cause: both sides of a comparison, and what an error comes from.
MORE = re.compile(r"\s+(left|right|\d+): ")
COUNTS = re.compile(r"test result: .* (\d+) passed; (\d+) failed; (\d+) ignored;")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# A log's end has room for so much.
FAILURES_SHOWN = 12
CHARACTERS_SHOWN = 200
# And for so much of what an error is told with, where its cause follows.
CONTEXT_SHOWN = 60
# How often it is said what still runs: a test that hangs is to be seen in a log that was cut off.
SAID_EACH_S = 120


@dataclass(frozen=True)
class Binary:
    """Tests that cargo has built, and the package that they are of."""

    name: str
    executable: str
    package: Path

    @classmethod
    def all_of(cls, messages: str) -> list[Binary]:
        """Those that cargo told of, in the order in which they are to run."""
        told = [json.loads(line) for line in messages.splitlines() if line.startswith("{")]
        built = [it for it in told if it.get("executable") and it["profile"]["test"]]
        found = [cls(it["target"]["name"], it["executable"], Path(it["manifest_path"]).parent) for it in built]
        return sorted(found, key=lambda it: LONGEST.index(it.name) if it.name in LONGEST else len(LONGEST))


class Failures:
    """What the lines of a binary tell of tests that failed."""

    def __init__(self, binary: str) -> None:
        self.binary, self.test = binary, ""
        self.causes: dict[str, list[str]] = {}
        # Whether lines are of a cause: the next one is its first, or the first of what that comes from, or it goes on, or none of that.
        self.cause = "nowhere"

    @classmethod
    def of(cls, binary: str, text: str, code: int) -> Failures:
        found = cls(binary)
        for line in text.splitlines():
            found.line(COLOURS.sub("", line.rstrip()))
        if code < 0:
            # What it has said of single tests is not all.
            found.causes[f"{binary} as a whole"] = [f"signal {signal.Signals(-code).name}"]
        elif code and not found.causes:
            found.causes[f"{binary} as a whole"] = [f"exit code {code}"]
        return found

    def line(self, line: str) -> None:
        if report := REPORT.match(line):
            self.test, self.cause = f"{self.binary} {report[1]}", "nowhere"
            self.causes[self.test] = []
        elif line == "failures:":
            self.test = ""
        elif self.test:
            self.reported(self.causes[self.test], line)

    def reported(self, causes: list[str], line: str) -> None:
        """A line of a test's report. What the test printed before it failed is no cause."""
        if PANICKED.match(line):
            causes.clear()
            self.cause = "next"
        elif self.cause == "next" or RETURNED.match(line):
            causes[:] = [line.strip()]
            self.cause = "here"
        elif line == "Caused by:" and causes:
            # What an error comes from says more than what it is told with, which may be the logs of a cluster.
            causes[:] = [causes[0][:CONTEXT_SHOWN]]
            self.cause = "next of it"
        elif self.cause == "next of it":
            causes.append(line.strip())
            self.cause = "here"
        elif self.cause == "here" and (MORE.match(line) or line.strip() in ("", "Caused by:")):
            causes.extend(line.split())
        else:
            self.cause = "nowhere"


def told(causes: dict[str, list[str]]) -> list[str]:
    """As many as there is room for."""
    lines = [f"{test}: {' '.join(cause)}"[:CHARACTERS_SHOWN] for test, cause in causes.items()]
    more = len(lines) - FAILURES_SHOWN
    return lines[:FAILURES_SHOWN] + ([f"and {more} more"] if more > 0 else [])


class Runs:
    """Binaries that run and have run."""

    def __init__(self, cargo: str) -> None:
        self.cargo = cargo
        self.lock = threading.Lock()
        self.running: dict[str, float] = {}
        self.counts = [0, 0, 0]
        self.causes: dict[str, list[str]] = {}

    def run(self, binary: Binary) -> None:
        began = time.monotonic()
        with self.lock:
            self.running[binary.executable] = began
        # What cargo would tell its tests.
        known = {"CARGO": self.cargo, "CARGO_MANIFEST_DIR": str(binary.package)}
        # No pipe: a process that a test has left behind would hold it open, and nobody would see its end.
        with tempfile.TemporaryFile() as log:
            done = subprocess.run(
                [binary.executable], cwd=binary.package, env={**os.environ, **known},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            log.seek(0)
            said = log.read().decode(errors="replace")
        took = time.monotonic() - began
        with self.lock:
            del self.running[binary.executable]
            print(f"\n     Ran {binary.name} ({binary.executable}), {took:.1f} s\n{said}", end="", flush=True)
            self.causes.update(Failures.of(binary.name, said, done.returncode).causes)
            for counted in COUNTS.finditer(said):
                self.counts = [before + int(more) for before, more in zip(self.counts, counted.groups(), strict=True)]

    def say_what_runs(self, ended: threading.Event) -> None:
        while not ended.wait(SAID_EACH_S):
            with self.lock:
                now = time.monotonic()
                some = [f"{Path(it).name} ({now - began:.0f} s)" for it, began in self.running.items()]
                print("==> running:", ", ".join(some), flush=True)


def main() -> int:
    build = subprocess.run([*sys.argv[1:], "--no-run", "--message-format=json-render-diagnostics"], stdout=subprocess.PIPE, text=True)
    if build.returncode:
        return build.returncode
    binaries, runs, ended = Binary.all_of(build.stdout), Runs(sys.argv[1]), threading.Event()
    if not binaries:
        print("==> cargo has built no tests")
        return 1
    began = time.monotonic()
    at_once = min((os.cpu_count() or 1) + 1, 4)
    threading.Thread(target=runs.say_what_runs, args=[ended], daemon=True).start()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(runs.run, binaries))
    ended.set()
    passed, failed, ignored = runs.counts
    took = time.monotonic() - began
    print(f"\n==> Rust: {passed} passed, {failed} failed, {ignored} ignored in {len(binaries)} binaries, {took:.0f} s", flush=True)
    if runs.causes:
        print("==> failed:", *told(runs.causes), sep="\n    ", flush=True)
    return 101 if runs.causes else 0


if __name__ == "__main__":
    sys.exit(main())
