"""Compares Cargo.lock with the advisories of the RustSec database. Needs no network and nothing but Python.

    advisories.py           # says what was found; ends with 1 if something must be done, 2 if a file cannot be used
    advisories.py --json    # counts, which need cargo as well
    advisories.py --write docs/bench/security.json  # the same, among the file's keys

The database is the index in advisories.json, which renew.py writes. An advisory that is lived with for now stands in
deny.toml with `reason = "until YYYY-MM-DD: why"`: after that day it is a failure again, and so is an entry that meets nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from semver import BadVersion, Version, matches

ROOT = Path(__file__).resolve().parents[2]
INDEX = Path(__file__).with_name("advisories.json")
AGE_MAX_DAYS = 90
REASON = re.compile(r"until (\d{4}-\d{2}-\d{2}): (\S.*)", re.DOTALL)
# What is built for, as in deny.toml.
TARGET = "x86_64-unknown-linux-gnu"


class Unusable(Exception):
    """A file that does not say what it should."""


@dataclass(frozen=True)
class Hit:
    """A locked crate that an advisory speaks of."""

    id: str
    kind: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.id} ({self.kind}): {self.package} {self.version}, https://rustsec.org/advisories/{self.id}.html"


@dataclass(frozen=True)
class Accepted:
    """An advisory that is lived with."""

    until: datetime.date
    why: str


def affected(advisory: dict, version: Version) -> bool:
    fine = [*advisory["patched"], *advisory["unaffected"]]
    return not any(matches(requirement, version) for requirement in fine)


def hits(lock: dict, index: dict) -> list[Hit]:
    by_package: dict[str, list[dict]] = {}
    for advisory in index["advisories"]:
        by_package.setdefault(advisory["package"], []).append(advisory)
    found = []
    for package in lock["package"]:
        # Crates of the workspace have no source; their names may be somebody else's on crates.io.
        if "source" not in package:
            continue
        name, version = package["name"], package["version"]
        for advisory in by_package.get(name, []):
            if affected(advisory, Version.parse(version)):
                found.append(Hit(advisory["id"], advisory["kind"], name, version))
    return sorted(found, key=lambda hit: (hit.package, hit.id))


def accepted(deny: dict) -> dict[str, Accepted]:
    entries = {}
    for entry in deny.get("advisories", {}).get("ignore", []):
        found = REASON.fullmatch(entry.get("reason", "")) if isinstance(entry, dict) else None
        if not found:
            raise Unusable(f'deny.toml: expected {{ id = "...", reason = "until YYYY-MM-DD: why" }}, got {entry!r}')
        try:
            until = datetime.date.fromisoformat(found.group(1))
        except ValueError as error:
            raise Unusable(f"deny.toml: {entry['id']}: {error}") from error
        entries[entry["id"]] = Accepted(until, found.group(2))
    return entries


def failures(found: list[Hit], entries: dict[str, Accepted], today: datetime.date) -> list[str]:
    """What must be done, a line each."""
    lines = [str(hit) for hit in found if hit.id not in entries]
    for identity, entry in entries.items():
        if identity not in {hit.id for hit in found}:
            lines.append(f"{identity} is accepted in deny.toml, but nothing in Cargo.lock is affected: remove it there")
        elif entry.until < today:
            lines.append(f"{identity} was accepted in deny.toml until {entry.until}: act, or give new reasons")
    return lines


def age_warning(index: dict, today: datetime.date) -> str | None:
    age = (today - datetime.date.fromisoformat(index["date"])).days
    if age <= AGE_MAX_DAYS:
        return None
    return f"the advisories are of {index['date']}, {age} days old: run `make renew-advisories` where GitHub can be reached"


def built_from(edges: str) -> set[tuple[str, str]]:
    """Names and versions of what the daemon is made from."""
    command = ["cargo", "tree", "--locked", "--package", "storaged", "--edges", edges, "--target", TARGET]
    listed = subprocess.run([*command, "--prefix", "none"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    words = (line.split() for line in listed.stdout.splitlines() if line)
    return {(line[0], line[1].removeprefix("v")) for line in words}


def counts(found: list[Hit], index: dict) -> dict:
    """Advisories by what the crate that they speak of is used for; accepted ones count too."""

    def of(crates: set[tuple[str, str]]) -> int:
        return sum((hit.package, hit.version) in crates for hit in found)

    return {
        "advisories_database": index["date"],
        "advisories_in_lock": len(found),
        "advisories_in_build": of(built_from("normal,build")),
        "advisories_linked": of(built_from("normal,no-proc-macro")),
    }


def read(path: Path, parse):
    try:
        return parse(path.read_text())
    except (OSError, ValueError) as error:
        raise Unusable(f"{path}: {error}") from error


def checked_index(path: Path) -> dict:
    """The index; one without advisories would let everything pass."""
    index = read(path, json.loads)
    fields = {"id": str, "package": str, "kind": str, "patched": list, "unaffected": list}
    entries = index.get("advisories") if isinstance(index, dict) and isinstance(index.get("date"), str) else None
    whole = lambda entry: isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in fields.items())
    if not isinstance(entries, list) or not entries or not all(map(whole, entries)):
        raise Unusable(f"{path}: expected a date and advisories with {', '.join(fields)}; renew.py writes it")
    return index


def checked_lock(path: Path) -> dict:
    lock = read(path, tomllib.loads)
    packages = lock.get("package")
    if not isinstance(packages, list) or not all("name" in package and "version" in package for package in packages):
        raise Unusable(f"{path}: expected a Cargo.lock with packages")
    return lock


def check(chosen: argparse.Namespace) -> int:
    index, lock = checked_index(chosen.index), checked_lock(chosen.lock)
    found = hits(lock, index)
    if chosen.json or chosen.write:
        counted = counts(found, index)
        print(json.dumps(counted, indent=2))
        if chosen.write:
            figures = read(chosen.write, json.loads) | counted
            chosen.write.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
        return 0
    entries = accepted(read(chosen.deny, tomllib.loads))
    if warning := age_warning(index, chosen.today):
        print(f"warning: {warning}", file=sys.stderr)
    for line in (wrong := failures(found, entries, chosen.today)):
        print(f"error: {line}", file=sys.stderr)
    said = f"{len(lock['package'])} locked crates against {len(index['advisories'])} advisories of {index['date']}"
    print(f"==> {said}: {len(found)} affected, {len(entries)} accepted, {len(wrong)} to act on")
    return int(bool(wrong))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="counts, as JSON")
    arguments.add_argument("--write", type=Path, help="a JSON file whose keys are replaced by the counts")
    arguments.add_argument("--lock", type=Path, default=ROOT / "Cargo.lock")
    arguments.add_argument("--deny", type=Path, default=ROOT / "deny.toml")
    arguments.add_argument("--index", type=Path, default=INDEX)
    arguments.add_argument("--today", type=datetime.date.fromisoformat, default=datetime.date.today())
    try:
        return check(arguments.parse_args())
    except (Unusable, BadVersion) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
