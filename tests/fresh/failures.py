"""Runs tests and, where some fail, says at the end which and why: what a log keeps of a long run is its end.

    failures.py COMMAND...

Ends as the command ends, and shows all that it says as it says it. Needs nothing but Python.
"""

from __future__ import annotations

import re
import subprocess
import sys

# The report of one test among those that libtest shows of a binary whose tests failed.
REPORT = re.compile(r"---- (\S.*) stdout ----$")
RUNNING = re.compile(r"\s*Running .*\(.*/(\S+)-[0-9a-f]{16}\)")
# Lines of a report that say nothing of the cause.
EMPTY = re.compile(r"\s*$|note: |thread '.*' \(?.*panicked at|stack backtrace:|\s*\d+: |\s+at ")
# A log's end has room for so much.
FAILURES_SHOWN = 12
CHARACTERS_SHOWN = 160


class Failures:
    """What the lines so far have told of tests that failed."""

    def __init__(self) -> None:
        self.causes: dict[str, str] = {}
        self.binary, self.test = "", ""

    def line(self, line: str) -> None:
        line = line.rstrip()
        if running := RUNNING.match(line):
            self.binary, self.test = running[1], ""
        elif report := REPORT.match(line):
            self.test = f"{self.binary} {report[1]}"
            self.causes[self.test] = ""
        elif line == "failures:":
            self.test = ""
        elif self.test and not self.causes[self.test] and not EMPTY.match(line):
            self.causes[self.test] = line.strip()

    def told(self) -> list[str]:
        shown = list(self.causes.items())[:FAILURES_SHOWN]
        lines = [f"{test}: {cause}"[:CHARACTERS_SHOWN] for test, cause in shown]
        more = len(self.causes) - len(shown)
        return lines + ([f"and {more} more"] if more else [])


def main() -> int:
    failures = Failures()
    tests = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    for line in tests.stdout:
        print(line, end="", flush=True)
        failures.line(line)
    code = tests.wait()
    if told := failures.told():
        print("==> failed:", *told, sep="\n    ", flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
