"""The package's tests with torch versions from the oldest that is supported to the newest, each in a virtual environment of its own.

    torch_versions.py --wheel target/wheels/storaged-*.whl --daemon target/debug/storaged

Each torch is paired with another Python, so that both are covered: what is wanted and not on this machine is said, and the Python
that runs this takes its place. An environment is some 5 GB and is deleted once its tests have ended; `--keep` keeps it for the next
time. Ends with a table, and with 1 if a test failed. Versions that no index has are said, and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "sdk" / "python" / "tests"
#: torch, and the Python that it is tested with. `make test` has the newest with the system's Python.
PAIRS = (("2.4.1", "3.10"), ("2.6.0", "3.12"), ("2.8.0", "3.13"), ("2.10.0", "3.10"), ("2.13.0", "3.12"), ("2.15.0", "3.14"))
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: They need frameworks, which want versions of torch of their own: `make frameworks` has them.
WITH_FRAMEWORKS = ("test_frameworks.py", "test_hyperpod_client.py", "test_torchft.py", "test_deepspeed.py", "test_orbax.py")
BESIDE = ("numpy", "pytest", "pytest-xdist", "fsspec", "torchdata")
#: Tests wait more than they work: so many at once.
AT_ONCE = 3
#: Seconds for one version's tests: a quarter of an hour alone, more than half an hour beside other work.
LIMIT = 3600


@dataclass
class Outcome:
    """What came of one version. `why` is set if there was nothing to test."""

    torch: str
    python: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    why: str = ""

    def row(self) -> str:
        head = f"{self.torch:8}  {self.python:8}"
        if self.why:
            return f"{head}  {self.why}"
        return f"{head}  {self.passed:6}  {self.failed:6}  {self.skipped:7}  {self.seconds:7.0f}"


def interpreters() -> dict[str, str]:
    """Where each Python of PYTHONS is: on the path, or made by pyenv."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        made = sorted(pyenv.glob(f"{version}.*/bin/python3"))
        candidates = [str(made[-1])] if made else []
        candidates += [path] if (path := shutil.which(f"python{version}")) else []
        for candidate in candidates:
            # pyenv puts shims on the path also for versions that it does not have.
            if said_version(candidate) == version:
                found[version] = candidate
                break
    return found


def said_version(python: str) -> str | None:
    ask = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else None


def installed(folder: Path, python: str, torch: str, wheel: Path) -> str:
    """Makes the environment, or says why it cannot be had."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    first = subprocess.run([*pip, "--no-cache-dir", f"torch=={torch}", *BESIDE], capture_output=True, text=True)
    if first.returncode != 0:
        lines = [line for line in first.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        return f"cannot be had: {lines[-1].removeprefix('ERROR: ')}"
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    return ""


def tested(folder: Path, daemon: Path, outcome: Outcome) -> None:
    """Runs the tests in an environment, and counts."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    ignored = [f"--ignore={TESTS / name}" for name in WITH_FRAMEWORKS]
    command = [str(folder / "bin" / "python"), "-m", "pytest", "-q", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-n", str(AT_ONCE), "--dist", "loadfile"]
    environment = os.environ | {"STORAGED_BIN": str(daemon), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        subprocess.run([*command, *ignored, str(TESTS)], env=environment, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        outcome.why = f"the tests did not end within {LIMIT} s"
        outcome.failed = 1
        return
    outcome.seconds = time.monotonic() - began
    if not report.exists():
        outcome.why, outcome.failed = "the tests did not begin", 1
        return
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        failed = counts["failures"] + counts["errors"]
        outcome.failed += failed
        outcome.skipped += counts["skipped"]
        outcome.passed += counts["tests"] - failed - counts["skipped"]


def written(path: Path, outcomes: list[Outcome], commit: str) -> None:
    """What passed goes into the bench's figures, in place of what the same versions did before; other versions' stay."""
    figures = json.loads(path.read_text())
    entries = [entry.split(" ", 1) for entry in figures.get("torch_versions_passed", "").split(", ") if entry]
    known = {torch: rest for torch, rest in entries}
    for outcome in outcomes:
        if not outcome.passed and not outcome.failed:
            continue  # it could not be had, and says nothing
        known.pop(outcome.torch, None)
        if outcome.passed and not outcome.failed:
            known[outcome.torch] = f"(Python {outcome.python}: {outcome.passed} tests at {commit})"
    ordered = sorted(known.items(), key=lambda entry: [int(part) for part in entry[0].split(".")])
    figures["torch_versions"] = len(ordered)
    figures["torch_versions_passed"] = ", ".join(f"{torch} {rest}" for torch, rest in ordered)
    path.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--daemon", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=ROOT / "target" / "torch-versions")
    parser.add_argument("--only", nargs="*", help="these versions of torch alone")
    parser.add_argument("--keep", action="store_true", help="leave the environments for the next time")
    parser.add_argument("--write", type=Path, help="sdk.json, for what passed")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    found, outcomes = interpreters(), []
    for torch, wanted in PAIRS:
        if options.only and torch not in options.only:
            continue
        python = found.get(wanted, sys.executable)
        outcome = Outcome(torch, wanted if wanted in found else f"{sys.version_info[0]}.{sys.version_info[1]}")
        folder = options.folder / torch
        print(f"==> torch {torch} with Python {outcome.python} (about 5 GB below {folder})", flush=True)
        outcome.why = installed(folder, python, torch, options.wheel.resolve())
        if not outcome.why:
            tested(folder, options.daemon.resolve(), outcome)
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        outcomes.append(outcome)
    print("\ntorch     Python    passed  failed  skipped  seconds")
    print("\n".join(outcome.row() for outcome in outcomes))
    missing = [version for version in PYTHONS if version not in found]
    if missing:
        print(f"not on this machine: Python {', '.join(missing)}")
    failed = any(outcome.failed for outcome in outcomes)
    if options.write is not None:
        written(options.write, outcomes, options.commit)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
