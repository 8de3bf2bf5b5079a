"""Which lines of storaged/core/src the corpora of the fuzz targets reach: replays every seed and every file of tests/fuzz/corpus in a
build with rustc's own coverage, and writes the share into a file of figures. Tests inside of the crate are not built, so they do not count."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tests/fuzz"
WORK = ROOT / "target/fuzz/coverage"
CORE = "/storaged/core/src/"
# Files of one call of the replayer.
AT_ONCE = 500


def tools() -> Path:
    """The folder of the LLVM tools that read what this rustc writes."""
    told = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host = re.search(r"host: (\S+)", told).group(1)
    major = re.search(r"LLVM version: (\d+)", told).group(1)
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    own = Path(sysroot) / "lib/rustlib" / host / "bin"
    if (own / "llvm-cov").exists():
        return own
    for name in (f"llvm-cov-{major}", "llvm-cov"):
        found = shutil.which(name)
        if found and f"version {major}." in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
            return Path(os.path.realpath(found)).parent
    sys.exit(f"expected llvm-cov of LLVM {major}, got none: rustup component add llvm-tools")


def build() -> Path:
    flags = {"RUSTC_WRAPPER": str(PACKAGE / "rustc.sh"), "STORAGED_FUZZ_FLAGS": "-Cinstrument-coverage", "CARGO_TARGET_DIR": str(WORK)}
    command = ["cargo", "build", "--locked", "--release", "--bin", "replay", "--bin", "seeds"]
    # The build script of nobody writes a profile into the tree.
    profile = {"LLVM_PROFILE_FILE": str(WORK / "build-%p.profraw")}
    subprocess.run(command, cwd=PACKAGE / "engine", check=True, env=os.environ | flags | profile)
    return WORK / "release"


def replay(built: Path, folder: Path, target: str, inputs: list[Path]) -> None:
    for first in range(0, len(inputs), AT_ONCE):
        some = [str(path) for path in inputs[first : first + AT_ONCE]]
        profile = {"LLVM_PROFILE_FILE": str(folder / f"{target}-{first}.profraw")}
        subprocess.run([built / "replay", target, *some], check=True, env=os.environ | profile, stdout=subprocess.DEVNULL)


def lines(built: Path, folder: Path) -> dict[str, dict[str, int]]:
    """Of each file of the core, how many lines there are and how many were reached."""
    llvm = tools()
    merged = folder / "all.profdata"
    profiles = sorted(str(path) for path in folder.glob("*.profraw"))
    subprocess.run([llvm / "llvm-profdata", "merge", "-sparse", *profiles, "-o", merged], check=True)
    command = [llvm / "llvm-cov", "export", "-format=text", "-summary-only", f"-instr-profile={merged}", built / "replay"]
    exported = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files = json.loads(exported)["data"][0]["files"]
    ours = (file for file in files if CORE in file["filename"] and not file["filename"].endswith("/tests.rs"))
    return {file["filename"].split(CORE)[1]: file["summary"]["lines"] for file in ours}


def write(path: Path, figures: dict[str, float]) -> None:
    """Replaces these keys; those of others stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(dict(sorted((known | figures).items())), indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file of figures")
    parser.add_argument("--files", action="store_true", help="say what is not reached, by file")
    asked = parser.parse_args()
    tools()
    built = build()
    subprocess.run([built / "seeds", WORK / "seeds"], check=True)
    targets = sorted(path.name for path in (WORK / "seeds").iterdir())
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:
            inputs = [*sorted((WORK / "seeds" / target).iterdir()), *sorted((PACKAGE / "corpus" / target).glob("*"))]
            replay(built, Path(folder), target, inputs)
        reached = lines(built, Path(folder))
    total = sum(one["count"] for one in reached.values())
    covered = sum(one["covered"] for one in reached.values())
    if asked.files:
        for name, one in sorted(reached.items(), key=lambda file: file[1]["covered"] - file[1]["count"]):
            print(f"{name}: {one['covered']} of {one['count']}")
    all_targets = re.findall(r'target\(\s*"(\w+)"', (PACKAGE / "src/lib.rs").read_text())
    figures = {"fuzz_targets": float(len(all_targets)), "fuzz_core_line_coverage": round(covered / total, 3)}
    print(f"{covered} of {total} lines of the core, by {len(targets)} of {len(all_targets)} targets")
    for key, figure in figures.items():
        print(f"{key} {figure}")
    if asked.write:
        write(asked.write, figures)


if __name__ == "__main__":
    main()
