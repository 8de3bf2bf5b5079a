"""Machines on this machine: systemd-nspawn boots a real systemd in each, on an overlay of a bare Debian 12 (`root.sh`).

The program runs itself again in namespaces of its own: processes, mounts and networks end with it, however it ends, and the machines
reach one another over a bridge and nothing else. Control groups alone are left, and are removed behind it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BASE = ROOT / "target" / "nodes"
INNER = "STORAGED_TESTS_IN_NAMESPACES"
#: Of the process that cleans up: it names the control groups.
GROUP = "storaged-nodes-{}"


class CheckFailed(Exception):
    """Something that must hold did not."""


def expect(holds: bool, text: str) -> None:
    if not holds:
        raise CheckFailed(text)


def until(what: str, holds, limit: float = 60) -> float:
    """Asks until it holds; what it says when it does not is in the error. The seconds that it took."""
    began = time.monotonic()
    while True:
        try:
            said = holds()
        except CheckFailed as error:
            said = str(error)
        if said is True:
            return time.monotonic() - began
        expect(time.monotonic() - began < limit, f"{what}: not within {limit:.0f} s: {said}")
        time.sleep(0.2)


class Checks:
    """Counts what held and what did not, and goes on behind what did not."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, []

    @contextlib.contextmanager
    def check(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failed.append(what)
            print(f"FAILED  {what}: {type(error).__name__}: {error}", flush=True)
        else:
            self.passed += 1
            print(f"ok      {what} ({time.monotonic() - began:.1f} s)", flush=True)

    def end(self) -> int:
        print(f"==> {self.passed} checks passed, {len(self.failed)} failed", flush=True)
        for what in self.failed:
            print(f"    failed: {what}", flush=True)
        return 1 if self.failed else 0


def control_groups() -> list[Path]:
    """Where the hierarchies are mounted: the unified one, and those of version 1."""
    mounts = [line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [Path(before.split()[4]) for before, _, after in mounts if after.split()[0] in ("cgroup", "cgroup2")]


def make_group(folder: Path) -> None:
    """A group that processes may join: in a hierarchy of cpusets only with processors and memory."""
    folder.mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        if (folder / file).exists() and (folder.parent / file).exists():
            (folder / file).write_text((folder.parent / file).read_text())


def remove_groups(name: str) -> None:
    left = []
    for hierarchy in control_groups():
        below = [Path(folder) for folder, _, _ in os.walk(hierarchy / name, topdown=False)]
        for folder in below:
            try:
                until(f"removing {folder}", lambda folder=folder: removed(folder), 10)
            except CheckFailed as error:
                left.append(str(error))
                break
    expect(not left, "; ".join(left))


def removed(folder: Path) -> bool | str:
    try:
        folder.rmdir()
    except OSError as error:
        return str(error)
    return True


def in_namespaces(prepare: tuple[str, Path] | None = None) -> None:
    """Returns in a process of the namespaces; the one outside waits for it here, and ends as it does.

    Before them, while there is a network to fetch from, the machines' root is made, and what a script of this folder makes in a place.
    """
    if os.environ.get(INNER):
        # systemd-nspawn leaves its folders there, and would find those of others.
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        run("ip", "link", "set", "lo", "up")
        return
    expect(os.geteuid() == 0, "expected root, which namespaces and mounts need")
    subprocess.run(["bash", str(Path(__file__).with_name("root.sh")), str(BASE)], check=True)
    if prepare is not None:
        script, place = prepare
        subprocess.run(["bash", str(Path(__file__).with_name(script)), str(place)], check=True)
    name = GROUP.format(os.getpid())
    environment = dict(os.environ, **{INNER: name})
    command = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    inner = None
    try:
        for hierarchy in control_groups():
            make_group(hierarchy / name)
        inner = subprocess.Popen([*command, sys.executable, "-u", *sys.argv], env=environment)
        code = inner.wait()
    finally:
        if inner is not None and inner.poll() is None:
            # The first process of its namespace goes with it, and all others with that.
            inner.kill()
            inner.wait()
        remove_groups(name)
    sys.exit(code)


def run(*command: str, **options) -> str:
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
    expect(done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


class Lab:
    """A bridge, memory for what machines write, and a folder that all of them share."""

    #: Debian 12 has the unified hierarchy, whatever the kernel of this machine was told.
    environment = {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}

    def __init__(self, names: list[str], binds: dict[str, Path]):
        self.memory = BASE / "memory"
        self.memory.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "size=8G,mode=755", "tmpfs", str(self.memory))
        # Else it has an address of its ports, another one when these come and go, and nobody finds it for seconds.
        run("ip", "link", "add", "lab", "address", "02:00:00:00:00:01", "type", "bridge")
        run("ip", "link", "set", "lab", "up")
        self.shared = self.memory / "shared"
        self.shared.mkdir()
        self.binds = binds
        self.hosts = "127.0.0.1 localhost\n" + "".join(f"10.0.0.{number} {name}\n" for number, name in enumerate(names, 1))
        self.machines = [Machine(self, name, f"10.0.0.{number}") for number, name in enumerate(names, 1)]

    def options_of(self, machine: Machine) -> list[str]:
        """Of systemd-nspawn, beside those of every machine."""
        del machine
        return []

    def boot(self) -> None:
        for machine in self.machines:
            machine.boot()
        for machine in self.machines:
            machine.wait_booted()

    def end(self) -> None:
        for machine in self.machines:
            machine.kill()


class Machine:
    """One node: its files, its network, its systemd."""

    def __init__(self, lab: Lab, name: str, address: str):
        self.lab, self.name, self.address = lab, name, address
        self.folder = lab.memory / name
        self.root, self.console = self.folder / "root", self.folder / "console"
        for part in ("upper", "work", "root"):
            (self.folder / part).mkdir(parents=True)
        layers = f"lowerdir={BASE / 'root'},upperdir={self.folder / 'upper'},workdir={self.folder / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        self.write("/etc/hostname", name + "\n")
        self.write("/etc/hosts", lab.hosts)
        self.write("/etc/systemd/network/10-host0.network", f"[Match]\nName=host0\n[Network]\nAddress={address}/24\n")
        run("systemctl", f"--root={self.root}", "enable", "systemd-networkd.service")
        self.container: subprocess.Popen | None = None
        self.leader = 0

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def boot(self) -> None:
        binds = [f"--bind-ro={source}:{target}" for target, source in self.lab.binds.items()]
        command = [
            "systemd-nspawn", "--quiet", f"--directory={self.root}", f"--machine={self.name}", f"--hostname={self.name}", "--boot",
            "--register=no", "--keep-unit", "--network-bridge=lab", "--console=pipe",
            f"--bind={self.lab.shared}:/shared", "--link-journal=no", "--resolv-conf=off", "--timezone=off", *binds, *self.lab.options_of(self),
        ]
        # Its network goes a moment after it.
        until(f"the end of the network before of {self.name}", lambda: f"vb-{self.name}@" not in run("ip", "link") or "it is there", 20)
        groups = [hierarchy / os.environ[INNER] / self.name for hierarchy in control_groups()]
        for group in groups:
            make_group(group)

        def join() -> None:
            for group in groups:
                (group / "cgroup.procs").write_text("0")

        environment = dict(os.environ, **self.lab.environment)
        with self.console.open("ab") as console:
            self.container = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment, preexec_fn=join)

    def wait_booted(self) -> None:
        until(f"the first process of {self.name}", self._find_leader, 30)
        until(f"the boot of {self.name}", self._is_running, 90)

    def _is_running(self) -> bool | str:
        said = self.tries("systemctl", "is-system-running").stdout.strip()
        return said == "running" or said + self.tries("systemctl", "--failed", "--plain", "--no-legend").stdout

    def _find_leader(self) -> bool | str:
        expect(self.container.poll() is None, f"systemd-nspawn ended: {self.console.read_text(errors='replace')[-2000:]}")
        children = Path(f"/proc/{self.container.pid}/task/{self.container.pid}/children").read_text().split()
        for child in children:
            # Not yet systemd, or gone again.
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{child}/exe").endswith("/systemd"):
                    self.leader = int(child)
                    return True
        return self.console.read_text(errors="replace")[-500:]

    def command(self, *command, user: str | None = None, environment: dict[str, str] | None = None, cwd: str = "/") -> list[str]:
        """What runs a command there, as root or as another user, with nothing of this process's environment."""
        home = "/root" if user is None else f"/home/{user}"
        own = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, "LANG": "C.UTF-8", **(environment or {})}
        inside = ["env", "-i", "-C", cwd, *(f"{name}={value}" for name, value in own.items())]
        if user is not None:
            inside += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return ["nsenter", f"--target={self.leader}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--", *inside, *map(str, command)]

    def tries(self, *command, limit: float = 120, **options) -> subprocess.CompletedProcess:
        whole = self.command(*command, **options)
        return subprocess.run(whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False)

    def does(self, *command, code: int = 0, **options) -> str:
        done = self.tries(*command, **options)
        said = (done.stdout + done.stderr).strip()[-2000:]
        expect(done.returncode == code, f"{self.name}: {' '.join(map(str, command))} ended with {done.returncode}: {said}")
        return done.stdout

    def shell(self, script: str, **options) -> str:
        return self.does("bash", "-euo", "pipefail", "-c", script, **options)

    def property(self, name: str, unit: str = "storaged") -> str:
        return self.does("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def process_file(self, process: str, name: str) -> str:
        return self.does("cat", f"/proc/{process}/{name}")

    def journal(self, unit: str = "storaged") -> str:
        return self.does("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")

    def pull_the_plug(self) -> None:
        """Its first process is killed, and all others with it."""
        os.kill(self.leader, signal.SIGKILL)
        self.container.wait(timeout=60)

    def kill(self) -> None:
        if self.container is not None and self.container.poll() is None:
            self.container.kill()
            self.container.wait()
