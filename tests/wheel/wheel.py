"""Builds the wheels of the Python package, looks at what they need, and tries the one for this machine.

    wheel.py --daemon target/debug/storaged

One abi3 wheel for each of x86-64 and aarch64, linked by zig against glibc 2.28, so that they install on manylinux_2_28 without Rust or
clang. A wheel that needs a younger glibc, or that holds debug information, is an error. The other processor's wheel is only looked at:
nothing here can run it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "versions"))

from torch_versions import PYTHONS, interpreters  # noqa: E402

TARGETS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
GLIBC = (2, 28)
TAG = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"


def built(target: str, folder: Path) -> Path | str:
    """The wheel, or why there is none."""
    if not has_target(target):
        return f"rustup could not add {target}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "maturin", "build", "--release", "--zig", "--target", target, "--compatibility", TAG]
    build = [sys.executable, str(ROOT / "tests" / "fresh" / "build.py"), f"building the wheel for {target}", *command]
    subprocess.run([*build, "-m", "sdk/python/Cargo.toml", "-o", str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def has_target(target: str) -> bool:
    """Whether Rust can build for it; a Rust without rustup builds for this machine alone."""
    if shutil.which("rustup") is None:
        return target == TARGETS.get(os.uname().machine)
    return subprocess.run(["rustup", "target", "add", target], capture_output=True).returncode == 0


def looked_at(wheel: Path) -> str:
    """What a wheel needs, in words. Raises if that is more than its tag says."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        library = archive.extract(name, folder)
        symbols = subprocess.run(["readelf", "-W", "--dyn-syms", "--sections", "--dynamic", library], check=True, capture_output=True, text=True).stdout
        size = os.path.getsize(library)
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"@GLIBC_([0-9.]+)", symbols)}
    needed = sorted(re.findall(r"\(NEEDED\).*\[(.*)\]", symbols))
    youngest = max(versions)
    if youngest > GLIBC or TAG not in wheel.name or "abi3" not in wheel.name:
        raise SystemExit(f"{wheel.name} needs glibc {'.'.join(map(str, youngest))}")
    if ".debug_info" in symbols or ".symtab" in symbols:
        raise SystemExit(f"{wheel.name} is not stripped")
    libraries = ", ".join(needed)
    return f"{wheel.stat().st_size / 1e6:.2f} MB ({size / 1e6:.2f} MB unpacked), glibc {'.'.join(map(str, youngest))}, {libraries}"


def tried(wheel: Path, daemon: Path, python: str, folder: Path) -> None:
    """Installs the wheel where there is nothing else, not even a compiler on the path, and saves and loads with it."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    nothing = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=nothing)
    subprocess.run([str(folder / "bin" / "python"), str(Path(__file__).with_name("smoke.py")), str(daemon)], check=True, env=nothing)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=ROOT / "target" / "wheels")
    options = parser.parse_args()
    machine, said = os.uname().machine, []
    for name, target in TARGETS.items():
        wheel = built(target, options.folder / name)
        if isinstance(wheel, str):
            said.append(f"{name}: none, because {wheel}")
            continue
        said.append(f"{wheel.name}: {looked_at(wheel)}")
        if name != machine:
            continue
        pythons = interpreters()
        for version, python in pythons.items():
            tried(wheel, options.daemon.resolve(), python, options.folder / "try")
        missing = [version for version in PYTHONS if version not in pythons]
        said.append(f"    tried with Python {', '.join(pythons)}" + (f"; not on this machine: {', '.join(missing)}" if missing else ""))
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
