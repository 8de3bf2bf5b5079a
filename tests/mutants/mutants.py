"""Plants random mutants in what decides (the core, and the plans below it), one at a time, and counts how many its tests find.

cargo-mutants lists what it would change, and a sample of that is drawn by a seed. To build each mutant by itself takes a
minute, sixty times over; so all of the sample are built into one copy of it, where each changed function asks which
mutant is there, as it does for planted bugs (`storaged/core/src/planted.rs`), and has one body for each. What does not
compile says nothing about the tests, so another mutant is drawn in its place. Then the core's own tests run with each: the
quick ones first, then the simulation with its default seeds, until the first failure. One that makes them hang is caught.

    mutants.py --sample 60 --seed 7 [--commit HEAD] [--only NAME ...] [--write docs/bench/sim.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("storaged-plan", "storaged-core")
QUICK = ("storaged_plan", "storaged_core", "handle", "healing", "lifetimes", "plans", "restart_safe", "runs", "slots", "tier")
SIMULATION = "simulation"
QUICK_SECONDS, SIMULATION_SECONDS = 240, 1200
# What the ordinary build does not contain; the plans have none of it, so a copy of it goes into the mutated tree.
NOT_BUILT = "storaged/core/src/planted.rs"
WITHOUT_BUGS = "storaged/plan/src"


@dataclass(frozen=True)
class Mutant:
    """A change of one function: its file, the body's place there, and the body's text with the change."""

    name: str
    file: str
    body: tuple[int, int]
    changed: str
    number: int


def offset(text: str, place: dict) -> int:
    """Where a line and column, both counted from one, are in a text."""
    lines = text.split("\n")
    return sum(len(line) + 1 for line in lines[: place["line"] - 1]) + place["column"] - 1


def skip_to_body(text: str, at: int) -> int:
    """The opening brace of the function that begins at or before a place: the first one outside of brackets and comments."""
    depth = 0
    while True:
        if text.startswith("//", at):
            at = text.index("\n", at)
        elif text[at] == '"':
            at = text.index('"', at + 1)
        elif text[at] in "([":
            depth += 1
        elif text[at] in ")]":
            depth -= 1
        elif text[at] == "{" and depth == 0:
            return at
        at += 1


def of_packages() -> list[str]:
    return [word for package in PACKAGES for word in ("-p", package)]


def possible(tree: Path) -> list[dict]:
    """Every mutant there is, by file and line."""
    command = ["cargo", "mutants", "--list", "--json", "--line-col", "true", *of_packages()]
    listed = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    all_of_it = [one for one in json.loads(listed.stdout) if one["file"] != NOT_BUILT and one["function"]]
    return sorted(all_of_it, key=lambda one: one["name"])


def mutant_of(one: dict, number: int, tree: Path) -> Mutant:
    """The changed body of its function."""
    text = (tree / one["file"]).read_text()
    function = one["function"]["span"]
    body = (skip_to_body(text, offset(text, function["start"])), offset(text, function["end"]))
    start, end = offset(text, one["span"]["start"]), offset(text, one["span"]["end"])
    changed = text[body[0] : start] + one["replacement"] + text[end : body[1]]
    return Mutant(one["name"], one["file"], body, changed, number)


def copy_of(commit: str, output: Path) -> Path:
    """The committed tree, in a place of its own."""
    tree = output / "tree"
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "fetch", "-q", "origin", commit], cwd=tree, check=True)
    subprocess.run(["git", "checkout", "-q", "--force", "FETCH_HEAD"], cwd=tree, check=True)
    return tree


def plant(mutants: list[Mutant], tree: Path) -> dict[tuple[str, int], Mutant]:
    """Writes all of them into the tree; says which mutant each changed line is of."""
    subprocess.run(["git", "checkout", "-q", "--force", "."], cwd=tree, check=True)
    lines: dict[tuple[str, int], Mutant] = {}
    for file in sorted({mutant.file for mutant in mutants}):
        text = (tree / file).read_text()
        planted, at = "", 0
        here = [mutant for mutant in mutants if mutant.file == file]
        for body in sorted({mutant.body for mutant in here}):
            planted += text[at : body[0]] + "{"
            for mutant in (mutant for mutant in here if mutant.body == body):
                first = planted.count("\n") + 1
                planted += f'if crate::planted::is_there("m{mutant.number:04}") {mutant.changed}\nelse '
                lines |= {(file, line): mutant for line in range(first, planted.count("\n") + 1)}
            planted += text[body[0] : body[1]] + "}"
            at = body[1]
        (tree / file).write_text(planted + text[at:])
    shutil.copy(tree / NOT_BUILT, tree / WITHOUT_BUGS)
    with (tree / WITHOUT_BUGS / "lib.rs").open("a") as lib:
        lib.write("\n#[allow(unused_macros)]\nmod planted;\n")
    return lines


def cargo(tree: Path, *words: str) -> list[dict]:
    """Runs cargo on the core with planted bugs; its messages."""
    env = dict(os.environ, RUSTC_WORKSPACE_WRAPPER=str(tree / "tests/sim/with_bugs.sh"), CARGO_TARGET_DIR=str(ROOT / "target"))
    command = ["cargo", *words, "-q", *of_packages(), "--message-format", "json"]
    run = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in run.stdout.splitlines()]


def that_do_not_compile(lines: dict[tuple[str, int], Mutant], messages: list[dict]) -> set[Mutant]:
    """Whose lines the compiler finds errors in; or only mentions, where a body of another type makes the original's an error."""
    errors = [one["message"] for one in messages if one.get("reason") == "compiler-message" and one["message"]["level"] == "error"]
    blamed: set[Mutant] = set()
    for error in errors:
        for primary in (True, False):
            spans = [span for span in error["spans"] if span["is_primary"] is primary]
            found = {lines[place] for place in ((span["file_name"], span["line_start"]) for span in spans) if place in lines}
            blamed |= found
            if found:
                break
    return blamed


def draw(sample: int, seed: int, tree: Path) -> list[Mutant]:
    """The first `sample` mutants, in an order shuffled by the seed, that compile; they are in the tree then."""
    waiting = possible(tree)
    random.Random(seed).shuffle(waiting)
    print(f"{sample} of {len(waiting)} mutants of {' and '.join(PACKAGES)}, seed {seed}", flush=True)
    mutants = [mutant_of(one, number, tree) for number, one in enumerate(waiting)]
    refused: set[Mutant] = set()
    while True:
        drawn = [mutant for mutant in mutants if mutant not in refused][:sample]
        lines = plant(drawn, tree)
        messages = cargo(tree, "check", "--lib")
        bad = that_do_not_compile(lines, messages)
        if not bad and not any(one.get("reason") == "build-finished" and not one["success"] for one in messages):
            return drawn
        if not bad:
            sys.exit("mutants.py: it does not compile, and no mutant is to blame")
        print("".join(f"does not compile: {mutant.name}\n" for mutant in sorted(bad, key=lambda it: it.number)), end="", flush=True)
        refused |= bad


def build(tree: Path) -> dict[str, str]:
    """The test programs, by name."""
    words = [word for name in (*QUICK[len(PACKAGES) :], SIMULATION) for word in ("--test", name)]
    messages = cargo(tree, "test", "--no-run", "--lib", *words)
    made = [one for one in messages if one.get("executable")]
    found = {one["target"]["name"]: one["executable"] for one in made}
    if set(found) != {*QUICK, SIMULATION}:
        sys.exit(f"mutants.py: expected the tests {(*QUICK, SIMULATION)}, got {sorted(found)}")
    return found


def fails(program: str, words: list[str], seconds: int, mutant: str, tree: Path) -> str | None:
    """The first test that fails."""
    env = dict(os.environ, STORAGED_MUTANT=mutant, STORAGED_SIM_STOP="1", RUST_BACKTRACE="0")
    command = [program, "--test-threads", "1", *words]
    try:
        run = subprocess.run(command, cwd=tree / "storaged/core", env=env, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith("test ") and line.endswith("FAILED")]
    return failed[0] if failed else None if run.returncode == 0 else f"ended with {run.returncode}"


def seen_by(mutant: str, programs: dict[str, str], tree: Path) -> str | None:
    """The first test that sees a mutant: quick ones first, of the simulation the months first."""
    for name in QUICK:
        if test := fails(programs[name], [], QUICK_SECONDS, mutant, tree):
            return f"{name}: {test}"
    for words in (["ordinary"], ["--skip", "ordinary"]):
        if test := fails(programs[SIMULATION], words, SIMULATION_SECONDS, mutant, tree):
            return f"{SIMULATION}: {test}"
    return None


def write(path: Path, figures: dict) -> None:
    """Into the figures of the simulation, whose other keys stay."""
    others = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(others | figures, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--commit", default="HEAD", help="what is mutated and tested")
    parser.add_argument("--only", nargs="*", default=[], help="of the sample, those whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="so many mutants at once; each takes one core")
    parser.add_argument("--output", type=Path, default=ROOT / "target" / "mutants")
    parser.add_argument("--write", type=Path, default=None, help="the JSON file whose keys random_mutants* are set")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    commit = subprocess.run(["git", "rev-parse", arguments.commit], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    arguments.output.mkdir(parents=True, exist_ok=True)
    tree = copy_of(commit, arguments.output)
    mutants = draw(arguments.sample, seed, tree)
    programs = build(tree)
    if not arguments.only and (test := seen_by("", programs, tree)):
        sys.exit(f"mutants.py: {test} fails without a mutant: nothing can be said of those with one")
    named = [mutant for mutant in mutants if not arguments.only or any(part in mutant.name for part in arguments.only)]

    def tested(mutant: Mutant) -> bool:
        began = time.monotonic()
        test = seen_by(f"m{mutant.number:04}", programs, tree)
        print(f"{mutant.name}: {test or 'MISSED'} ({time.monotonic() - began:.0f} s)", flush=True)
        return test is not None

    with ThreadPoolExecutor(arguments.jobs) as pool:
        caught = list(pool.map(tested, named))
    missed, tried = [mutant.name for mutant, seen in zip(named, caught, strict=True) if not seen], len(named)
    share = round(1 - len(missed) / max(1, tried), 3)
    print("".join(f"missed: {name}\n" for name in missed), end="")
    print(f"{tried - len(missed)} of {tried} caught ({share}), seed {seed}, commit {commit[:7]}")
    if arguments.write and not arguments.only:
        figures = {"random_mutants": tried, "random_mutants_caught_share": share, "random_mutants_seed": seed}
        write(arguments.write, figures)


if __name__ == "__main__":
    main()
