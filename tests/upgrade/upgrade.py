#!/usr/bin/env python3
"""Upgrades a cluster under a saving job from the daemon of another commit to this one's, and back.

    upgrade.py --from COMMIT [--write docs/bench/lifetime.json]

Both are built as releases. Three daemons of the first are told one after the other, three times each, to go on as what their program's file holds by then (SIGUSR2,
`lifetime --only upgrade` of the first commit, whose trainers have its SDK); after the first of them the file is the other commit's. So
for some time the daemons are of both, and each takes over the memory that the other kind has left. No protected step may be lost.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = ROOT / "target/upgrade"
PROGRAMS = ("storaged", "lifetime")
ROUNDS = 9
#: Processes that run the second program at the same time: the daemons at least, of three nodes.
DAEMONS = 3


def built(source, folder):
    """Builds a source tree's programs and has them in a folder. Crates of others are shared with this tree's builds."""
    env = dict(os.environ, CARGO_TARGET_DIR=str(ROOT / "target"))
    command = ["cargo", "build", "-q", "--release", "-p", "storaged", "-p", "storaged-tests"]
    command += [part for name in PROGRAMS for part in ("--bin", name)]
    subprocess.run(command, cwd=source, env=env, check=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        shutil.copy2(ROOT / "target/release" / name, folder / name)
    return folder


def source_of(commit):
    """The tree of a commit."""
    folder = WORK / "source"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    if archive.wait() != 0:
        sys.exit(f"expected a commit, got {commit}")
    return folder


def running(program):
    """How many processes run this file as it is now."""
    count = 0
    for process in pathlib.Path("/proc").glob("[0-9]*/exe"):
        try:
            count += process.readlink() == program
        except OSError:
            continue
    return count


def upgraded(first, second, name):
    """Runs the first's `lifetime`, and puts the second's daemon where the first's was; what came of it."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(first, folder)
    program = folder / "storaged"
    run = subprocess.Popen([folder / "lifetime", "--only", "upgrade"], stdout=subprocess.PIPE, text=True)
    rounds, of_second, figures = 0, 0, {}
    for line in run.stdout:
        print(f"{name}: {line}", end="", flush=True)
        rounds += bool(re.match(r"n\d+: ", line))
        if rounds == 1 and not (folder / "before").exists():
            # Renamed, as packages do: what runs keeps its file.
            shutil.copy2(second / "storaged", folder / "new")
            os.link(program, folder / "before")
            os.replace(folder / "new", program)
        of_second = max(of_second, running(program)) if rounds > 1 else 0
        found = re.match(r"(upgrade_\w+) (\d+\.\d+)$", line)
        if found:
            figures[found[1]] = float(found[2])
    if run.wait() != 0:
        sys.exit(f"{name}: lifetime ended with {run.returncode}")
    if rounds != ROUNDS or of_second < DAEMONS or len(figures) != 3:
        sys.exit(f"{name}: {rounds} rounds, {of_second} processes of the second program, {figures}")
    return figures


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--from", required=True, dest="commit", help="the commit whose daemon is upgraded")
    arguments.add_argument("--write", type=pathlib.Path, help="file whose keys are replaced by what was measured")
    given = arguments.parse_args()
    old = built(source_of(given.commit), WORK / "old")
    new = built(ROOT, WORK / "new")
    figures = {}
    for name, first, second in [("upgrade", old, new), ("downgrade", new, old)]:
        for key, value in upgraded(first, second, name).items():
            figures[f"{name}_between_releases_{key.removeprefix('upgrade_')}"] = value
    for key, value in figures.items():
        print(f"{key} {value:.3f}")
    if given.write:
        known = json.loads(given.write.read_text()) | figures
        given.write.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    if any(value for key, value in figures.items() if key.endswith("steps_lost")):
        sys.exit("protected steps were lost")


if __name__ == "__main__":
    main()
