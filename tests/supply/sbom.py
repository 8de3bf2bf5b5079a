"""Writes what the daemon is made of as a CycloneDX 1.5 bill of materials, from Cargo.lock and cargo.

    sbom.py --write FILE

Components are the crates of `cargo tree -p storaged` for x86-64 Linux: those that are linked, and, with the scope "excluded", those
that only the build uses. The C library that is compiled in from codec/xdelta3 is one too. The same commit gives the same file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import tomllib
import uuid
from pathlib import Path

from advisories import ROOT, TARGET, built_from

PACKAGE = "storaged"
C_LIBRARY = {
    "type": "library",
    "bom-ref": "pkg:generic/xdelta3@3.0.12",
    "name": "xdelta3",
    "version": "3.0.12",
    "purl": "pkg:generic/xdelta3@3.0.12",
    "scope": "required",
    "licenses": [{"expression": "Apache-2.0"}],
    "description": "C, compiled in from codec/xdelta3",
}


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def reference(name: str, version: str) -> str:
    return f"pkg:cargo/{name}@{version}"


def component(package: dict, checksums: dict[tuple[str, str], str], scope: str) -> dict:
    name, version = package["name"], package["version"]
    one = {
        "type": "library",
        "bom-ref": reference(name, version),
        "name": name,
        "version": version,
        "purl": reference(name, version),
        "scope": scope,
    }
    if package["license"]:
        # Some crates still write a slash, which is no SPDX.
        one["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if checksum := checksums.get((name, version)):
        one["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return one


def dependencies(metadata: dict, wanted: set[tuple[str, str]]) -> list[dict]:
    """Who uses whom, among the components."""
    named = {package["id"]: (package["name"], package["version"]) for package in metadata["packages"]}
    listed = []
    for node in metadata["resolve"]["nodes"]:
        if (user := named[node["id"]]) not in wanted:
            continue
        # Those of its tests have the kind "dev".
        kept = {
            named[used["pkg"]]
            for used in node["deps"]
            if any(kind["kind"] != "dev" for kind in used["dep_kinds"]) and named[used["pkg"]] in wanted
        }
        on = [reference(*one) for one in sorted(kept)]
        if user[0] == "storaged-codec":
            on.append(C_LIBRARY["bom-ref"])
        listed.append({"ref": reference(*user), "dependsOn": on})
    return sorted(listed, key=lambda entry: entry["ref"]) + [{"ref": C_LIBRARY["bom-ref"], "dependsOn": []}]


def bill() -> dict:
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET))
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(one["name"], one["version"]): one["checksum"] for one in lock["package"] if "checksum" in one}
    wanted, linked = built_from("normal,build"), built_from("normal,no-proc-macro")
    packages = {(one["name"], one["version"]): one for one in metadata["packages"]}
    components, own = [], None
    for key in sorted(wanted):
        made = component(packages[key], checksums, "required" if key in linked else "excluded")
        if key[0] == PACKAGE:
            own = {**made, "type": "application"}
            del own["scope"]
        else:
            components.append(made)
    seconds = int(output("git", "log", "-1", "--format=%ct"))
    made = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": own,
            "properties": [{"name": "storaged:commit", "value": output("git", "rev-parse", "HEAD").strip()}],
        },
        "components": [*components, C_LIBRARY],
        "dependencies": dependencies(metadata, wanted),
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(made, sort_keys=True))
    return {"$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json", "serialNumber": f"urn:uuid:{serial}", **made}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", type=Path, required=True)
    chosen = arguments.parse_args()
    made = bill()
    chosen.write.write_text(json.dumps(made, indent=1) + "\n")
    print(f"==> {len(made['components'])} components in {chosen.write}")


if __name__ == "__main__":
    main()
