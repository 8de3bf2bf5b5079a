"""Runs a build and says how far it is: a line now and then instead of one per crate, warnings and errors as they are.

    build.py WHAT COMMAND...

Ends as the command ends, and says what the build cost. Needs nothing but Python.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time

# Seconds from one line of progress to the next.
EVERY = 15
# What cargo says of each crate.
CHATTER = re.compile(r"\s*(Adding|Blocking|Checking|Compiling|Downloaded|Downloading|Fresh|Locking|Unpacking|Updating)\b")
# Its progress bar: `Building [===>   ] 120/520: crate, crate`.
BAR = re.compile(r"\s*Building \[[^\]]*\]\s*(\d+)/(\d+): (.*)")
# What maturin says of itself when all is well.
MATURIN = re.compile(r"\s*[\U0001F300-\U0001FAFF\u270F]")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Progress:
    """What is said while a build runs."""

    def __init__(self, what: str):
        self.what, self.said = what, time.monotonic()
        self.downloaded = 0

    def line(self, line: str) -> None:
        plain = COLOURS.sub("", line)
        bar = BAR.match(plain)
        if bar:
            done, of, crates = bar.groups()
            self.now_and_then(f"{done} of {of} done, now {crates.split(',')[0].strip()}")
        elif "Downloading" in plain or "Downloaded" in plain:
            self.downloaded += plain.strip().startswith("Downloaded")
            self.now_and_then(f"downloading, {self.downloaded} crates so far")
        elif plain.strip() and not CHATTER.match(plain) and not MATURIN.match(plain) and "Finished" not in plain:
            print(line, file=sys.stderr, flush=True)

    def now_and_then(self, text: str) -> None:
        if time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(f"    {self.what}: {text}", flush=True)


def lines(stream):
    """Of a stream, ended by newline or, as a progress bar's are, by carriage return."""
    rest = b""
    while block := stream.read1(65536):
        *whole, rest = re.split(rb"[\r\n]", rest + block)
        yield from (line.decode(errors="replace") for line in whole)
    yield rest.decode(errors="replace")


def main() -> int:
    what, command = sys.argv[1], sys.argv[2:]
    print(f"==> building {what}", flush=True)
    progress, started = Progress(what), time.monotonic()
    environment = dict(os.environ, CARGO_TERM_PROGRESS_WHEN="always", CARGO_TERM_PROGRESS_WIDTH="120")
    build = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    for line in lines(build.stderr):
        progress.line(line)
    code = build.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, cpu = time.monotonic() - started, used.ru_utime + used.ru_stime
    if code == 0:
        print(f"    {what}: built in {wall:.0f} s, {cpu:.0f} s of processor time", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
