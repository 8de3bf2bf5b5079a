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
# The cause stands behind the first, and in the line of the second.
PANICKED = re.compile(r"thread '.*' .*panicked at ")
RETURNED = re.compile(r"Error: ")
# What belongs to a cause: both sides of a comparison, and what an error comes from.
MORE = re.compile(r"\s+(left|right|\d+): ")
# A binary that was ended: none of its tests has a report.
ENDED = re.compile(r"\s*process didn't exit successfully: .* \((signal: .*)\)$")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# A log's end has room for so much.
FAILURES_SHOWN = 12
CHARACTERS_SHOWN = 200


class Failures:
    """What the lines so far have told of tests that failed."""

    def __init__(self) -> None:
        self.causes: dict[str, list[str]] = {}
        self.binary, self.test = "", ""
        # Whether lines are of a cause: the next one is its first, or it goes on, or neither.
        self.cause = "nowhere"

    def line(self, line: str) -> None:
        line = COLOURS.sub("", line.rstrip())
        if running := RUNNING.match(line):
            self.binary, self.test = running[1], ""
        elif ended := ENDED.match(line):
            self.causes[f"{self.binary} as a whole"] = [ended[1]]
        elif report := REPORT.match(line):
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
        elif self.cause == "here" and (MORE.match(line) or line.strip() in ("", "Caused by:")):
            causes.extend(line.split())
        else:
            self.cause = "nowhere"

    def told(self) -> list[str]:
        shown = list(self.causes.items())[:FAILURES_SHOWN]
        lines = [f"{test}: {' '.join(cause)}"[:CHARACTERS_SHOWN] for test, cause in shown]
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
