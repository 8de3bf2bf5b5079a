#!/usr/bin/env python3
"""Runs the simulation over many seeds, or over planted bugs, and keeps what came of it in docs/bench/sim.json.

    run.py seeds --seeds 2000 --first 0
    run.py mutants [--only NAME ...] [--jobs 1]
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/bench/sim.json"
KEYS = [
    "seeds",
    "seeds_failed",
    "mutants",
    "mutants_caught",
    "scenarios",
    "random_mutants",
    "random_mutants_caught_share",
]
# A planted bug that makes a test run for ever is found out as well.
MUTANT_SECONDS_MAX = 600


def keep(figures):
    """Writes these figures and leaves the others as they are."""
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    known.update(figures)
    named = {key: known.pop(key, None) for key in KEYS}
    FIGURES.write_text(json.dumps(named | known, indent=2) + "\n")


def run_seeds(seeds, first):
    """Half of the seeds go to the one job that is killed again and again, half to months of all classes."""
    classes = scenarios()
    per_class = max(1, (seeds // 2) // len(classes))
    env = dict(os.environ, STORAGED_SIM_FIRST=str(first), STORAGED_SIM_MONTHS=str(per_class))
    env["STORAGED_SIM_SEEDS"] = str(seeds - per_class * len(classes))
    env["STORAGED_SIM_LIARS"] = str(seeds // 8 + 18)
    env["STORAGED_SIM_BYZANTINE"] = str(seeds // 20 + 12)
    command = ["cargo", "test", "-p", "storaged-core", "--test", "simulation", "--no-fail-fast"]
    command += ["--", "--nocapture", "seeds", "lying", "a_node_that_says_anything"]
    # Which seeds failed is said by the panic that ends a test.
    run = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout)
    failed = sum(len(re.findall(r"\d+", found)) for found in re.findall(r"that failed: \[([^\]]*)\]", run.stdout))
    keep({"seeds": seeds, "seeds_failed": failed, "scenarios": len(classes) + 1})
    return run.returncode


def scenarios():
    text = (ROOT / "storaged/core/tests/ordinary/scenarios.rs").read_text()
    return re.findall(r'^\s+name: "(\w+)",', text, re.M)


def planted():
    """Every bug that is planted somewhere in the core."""
    found = set()
    for path in sorted((ROOT / "storaged/core/src").rglob("*.rs")):
        text = re.sub(r"//.*", "", path.read_text())
        found.update(re.findall(r'planted!\(\s*"(\w+)"\s*\)', text))
    return sorted(found)


def build():
    """The core's test binaries by their names, with all bugs in them. The simulation, which takes longest, is the last."""
    env = dict(os.environ, RUSTC_WORKSPACE_WRAPPER=str(ROOT / "tests/sim/with_bugs.sh"))
    command = ["cargo", "test", "-q", "-p", "storaged-core", "--lib", "--tests", "--no-run"]
    command += ["--message-format", "json"]
    built = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    found = {it["target"]["name"]: it["executable"] for it in messages if it.get("executable")}
    return dict(sorted(found.items(), key=lambda it: it[0] == "simulation"))


def seen_before():
    """Which test saw each bug when the table was last filled: with it the search begins."""
    rows = re.findall(r"^\| `(\w+)` \| `([\w:]+)` \|", (ROOT / "docs/TESTING.md").read_text(), re.M)
    return dict(rows)


def catches(binary, name, *words):
    """The first test of a binary that fails with the bug, or nothing."""
    env = dict(os.environ, STORAGED_MUTANT=name, STORAGED_SIM_STOP="1", RUST_BACKTRACE="0")
    try:
        run = subprocess.run(
            [binary, "--test-threads", "1", *words],
            cwd=ROOT / "storaged/core",
            env=env,
            capture_output=True,
            text=True,
            timeout=MUTANT_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return "ran for ever"
    failed = re.findall(r"^test (\S+)(?: - should panic)? \.\.\. FAILED", run.stdout, re.M)
    if failed:
        return failed[0]
    return None if run.returncode == 0 else f"ended with {run.returncode}"


def seen_by(binaries, name, before):
    """The test that sees a bug, as `binary::test`: the one that saw it before, if it still does."""
    if before is not None:
        target, test = before.split("::", 1)
        if target in binaries and catches(binaries[target], name, "--exact", test):
            return before
    for target, binary in binaries.items():
        if test := catches(binary, name):
            return f"{target}::{test}"
    return None


def run_mutants(only):
    names = [name for name in planted() if not only or name in only]
    binaries = build()
    if by := seen_by(binaries, "", None):
        sys.exit(f"expected all tests to pass without a bug, {by} fails: nothing can be said of planted ones")
    caught, before = {}, seen_before()
    for name in names:
        began = time.monotonic()
        caught[name] = seen_by(binaries, name, before.get(name))
        print(f"{name}: {caught[name] or 'NOT CAUGHT'} ({time.monotonic() - began:.0f} s)", flush=True)
    count = sum(1 for by in caught.values() if by)
    print(f"{count} of {len(caught)} planted bugs are caught")
    if not only:
        keep({"mutants": len(caught), "mutants_caught": count})
    return 0 if count == len(caught) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    seeds = commands.add_parser("seeds")
    seeds.add_argument("--seeds", type=int, default=2000)
    seeds.add_argument("--first", type=int, default=0)
    mutants = commands.add_parser("mutants")
    mutants.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.command == "seeds":
        return run_seeds(arguments.seeds, arguments.first)
    return run_mutants(set(arguments.only))


if __name__ == "__main__":
    sys.exit(main())
