"""Plants random mutants in the core, one at a time, and counts how many its tests find.

cargo-mutants lists what it could change. A sample of that is drawn by a seed, and each of the sample is built and tested with
the core's unit, healing and simulation tests and their default seeds. A mutant that does not compile says nothing about the
tests, so another one is drawn in its place. One that makes the tests hang counts as caught.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "storaged-core"
TESTS = ["--lib", "--test", "healing", "--test", "simulation"]
# What a mutant may take of the time that the sound core takes, before it counts as hanging.
PATIENCE = 4
CAUGHT = {"CaughtMutant", "Timeout"}
FOUND_OUT = CAUGHT | {"MissedMutant"}


def possible() -> list[str]:
    """The name of every mutant there is, by file and line."""
    command = ["cargo", "mutants", "--list", "--line-col", "true", "--package", PACKAGE]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return sorted(line for line in listed.stdout.splitlines() if line.strip())


def tested(names: list[str], output: Path) -> dict[str, str]:
    """What became of each of them."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    chosen = [word for name in names for word in ("--re", f"^{re.escape(name)}$")]
    # cargo-mutants 27 tests mutants of struct fields whatever --re says, so at least those of other files are left out.
    chosen += [word for file in sorted({name.split(":")[0] for name in names}) for word in ("--file", file)]
    command = ["cargo", "mutants", "--package", PACKAGE, "--output", str(output), "--profile", "mutants", "--jobs", "1", "--colors", "never"]
    command += ["--timeout-multiplier", str(PATIENCE), "--line-col", "true", *chosen, "--", *TESTS]
    # It ends with 2 if mutants were missed and with 3 if some hung: both are outcomes, not failures.
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code not in (0, 2, 3):
        sys.exit(f"mutants.py: cargo-mutants ended with {code}: see {output}/mutants.out/log")
    outcomes = json.loads((output / "mutants.out" / "outcomes.json").read_text())["outcomes"]
    mutants = [one for one in outcomes if isinstance(one["scenario"], dict)]
    became = {one["scenario"]["Mutant"]["name"]: one["summary"] for one in mutants}
    return {name: became[name] for name in names if name in became}


def draw(sample: int, seed: int, output: Path) -> dict[str, str]:
    """What became of the first `sample` mutants, in an order shuffled by the seed, that compile."""
    waiting = possible()
    random.Random(seed).shuffle(waiting)
    print(f"{sample} of {len(waiting)} mutants of {PACKAGE}, seed {seed}", flush=True)
    became: dict[str, str] = {}
    while len(became) < sample and waiting:
        count = sample - len(became)
        names, waiting = waiting[:count], waiting[count:]
        outcomes = tested(names, output)
        missing = [name for name in names if name not in outcomes]
        if missing:
            sys.exit(f"mutants.py: cargo-mutants says nothing of {missing}")
        became.update({name: outcome for name, outcome in outcomes.items() if outcome in FOUND_OUT})
    return became


def write(path: Path, figures: dict) -> None:
    """Into the figures of the simulation, whose other keys stay."""
    others = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(others | figures, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--output", type=Path, default=ROOT / "target" / "mutants")
    parser.add_argument("--write", type=Path, default=None, help="the JSON file whose keys random_mutants* are set")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    became = draw(arguments.sample, seed, arguments.output)
    missed = sorted(name for name, outcome in became.items() if outcome not in CAUGHT)
    share = round(1 - len(missed) / max(1, len(became)), 3)
    print("".join(f"missed: {name}\n" for name in missed), end="")
    print(f"{len(became) - len(missed)} of {len(became)} caught ({share}), seed {seed}")
    if arguments.write:
        figures = {"random_mutants": len(became), "random_mutants_caught_share": share, "random_mutants_seed": seed}
        write(arguments.write, figures)


if __name__ == "__main__":
    main()
