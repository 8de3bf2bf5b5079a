"""Writes advisories.json, the index of the RustSec database that advisories.py compares Cargo.lock with.

    renew.py DATABASE [--write FILE]

DATABASE is a clone of https://github.com/rustsec/advisory-db, with or without a work tree. The index has all crates, not only
those in use today, so that a new dependency is compared too. Advisories that were withdrawn are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

INDEX = Path(__file__).with_name("advisories.json")
HEAD = re.compile(rb"\s*```toml\n(.*?)\n```", re.DOTALL)


def git(database: Path, *command: str, fed: bytes | None = None) -> bytes:
    return subprocess.run(["git", "-C", database, *command], input=fed, stdout=subprocess.PIPE, check=True).stdout


def files(database: Path) -> dict[str, bytes]:
    """All advisories of crates, by their paths, in one run of git."""
    names = git(database, "ls-tree", "-r", "--name-only", "HEAD", "crates").decode().split("\n")
    names = [name for name in names if name.endswith(".md")]
    asked = "".join(f"HEAD:{name}\n" for name in names).encode()
    answer, found = git(database, "cat-file", "--batch", fed=asked), {}
    for name in names:
        head, _, answer = answer.partition(b"\n")
        size = int(head.split(b" ")[2])
        found[name], answer = answer[:size], answer[size + 1 :]
    return found


def entry(name: str, text: bytes) -> dict | None:
    """What the check needs of an advisory; None if it was withdrawn."""
    head = HEAD.match(text)
    if not head:
        sys.exit(f"{name}: expected a block of TOML first")
    read = tomllib.loads(head.group(1).decode())
    advisory, versions = read["advisory"], read.get("versions", {})
    if "withdrawn" in advisory:
        return None
    return {
        "id": advisory["id"],
        "package": advisory["package"],
        "kind": advisory.get("informational", "vulnerability"),
        "patched": versions.get("patched", []),
        "unaffected": versions.get("unaffected", []),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("database", type=Path)
    arguments.add_argument("--write", type=Path, default=INDEX)
    chosen = arguments.parse_args()
    commit, date = git(chosen.database, "show", "-s", "--format=%H %cs", "HEAD").decode().split()
    entries = (entry(name, text) for name, text in files(chosen.database).items())
    listed = sorted((found for found in entries if found), key=lambda found: (found["package"], found["id"]))
    # One advisory per line: what a renewal brings can be read as a diff.
    lines = ",\n".join(json.dumps(found) for found in listed)
    head = {"source": "https://github.com/rustsec/advisory-db", "commit": commit, "date": date}
    chosen.write.write_text(json.dumps(head)[:-1] + ', "advisories": [\n' + lines + "\n]}\n")
    print(f"{len(listed)} advisories of {date} in {chosen.write}")


if __name__ == "__main__":
    main()
