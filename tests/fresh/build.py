"""Runs a long command and says how far it is: a line now and then instead of one per crate; warnings and errors as they are.

    build.py WHAT COMMAND...

Ends as the command ends, and says what it cost. Needs nothing but Python.
"""

from __future__ import annotations

import os
import re
import resource
import select
import subprocess
import sys
import time

# Seconds from one line of progress to the next.
EVERY = 15
# What cargo says of each crate, and when all is well.
CHATTER = re.compile(
    r"\s*(Adding|Blocking|Checking|Compiling|Documenting|Executable|Fetch|Finished|Fresh|Generated|Installing|Locking|Unpacking|Updating)\b"
)
# Its progress bar: `Building [===>   ] 120/520: crate, crate`.
BAR = re.compile(r"\s*Building \[[^\]]*\]\s*(\d+)/(\d+): (.*)")
DOWNLOAD = re.compile(r"\s*(Downloaded|Downloading|Fetch)\b")
# What maturin says of itself when all is well.
MATURIN = re.compile(r"\s*[\U0001F300-\U0001FAFF\u270F]")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Progress:
    """What is said while the command runs."""

    def __init__(self, what: str):
        self.what, self.began = what, time.monotonic()
        self.said, self.at = self.began, "at work"

    def line(self, line: str) -> None:
        plain = COLOURS.sub("", line)
        if bar := BAR.match(plain):
            done, of, crates = bar.groups()
            self.at = f"{done} of {of} done, now {crates.split(',')[0].strip()}"
        elif DOWNLOAD.match(plain):
            self.at = "downloading"
        elif plain.strip() and not CHATTER.match(plain) and not MATURIN.match(plain):
            print(line, file=sys.stderr, flush=True)

    def now_and_then(self) -> None:
        if time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(f"    {self.what}: {self.at} ({self.said - self.began:.0f} s)", flush=True)


def follow(stream: int, progress: Progress) -> None:
    """Lines of a stream until it ends, ended by newline or, as a progress bar's are, by carriage return."""
    rest = b""
    while True:
        ready, _, _ = select.select([stream], [], [], 1)
        block = os.read(stream, 65536) if ready else None
        if block:
            *lines, rest = re.split(rb"[\r\n]", rest + block)
            for line in lines:
                progress.line(line.decode(errors="replace"))
        progress.now_and_then()
        if block == b"":
            progress.line(rest.decode(errors="replace"))
            return


def main() -> int:
    what, command = sys.argv[1], sys.argv[2:]
    print(f"==> {what}", flush=True)
    progress = Progress(what)
    environment = dict(os.environ, CARGO_TERM_PROGRESS_WHEN="always", CARGO_TERM_PROGRESS_WIDTH="120")
    # What builds say on their standard output is chatter too.
    build = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    follow(build.stderr.fileno(), progress)
    code = build.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, cpu = time.monotonic() - progress.began, used.ru_utime + used.ru_stime
    if code == 0:
        print(f"    {what}: done in {wall:.0f} s with {cpu:.0f} s of processor time", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
