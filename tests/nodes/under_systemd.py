"""Three nodes with a real systemd and the shipped unit, installed as deploy/README.md says: `make systemd`.

What the unit forbids is forbidden and nothing that the daemon needs; slots and parity outlive restarts, kills, upgrades and starts that fail, on
all nodes at once, so that no peer could have put them back; a stop, a drain and the end of the machine are in order.
"""

from __future__ import annotations

import re
import sys
import time

from lab import ROOT, Checks, Lab, expect, in_namespaces, until
from node import CREDENTIALS, SOURCE, TRAINER, Job, Node, authority_folder, binary, binds, everywhere, make_certificates
from lab import run as run_here

UNIT = (ROOT / "deploy" / "systemd" / "storaged.service").read_text()
OPERATORS = "storaged-operators"
#: What it says of a tier that is new, and what the checks bring about themselves.
EXPECTED = ("is now a new durable tier", "has rotted", "rotten", "left unfinished", "the file cannot be used", "a peer should be configured as this node", "newest checkpoint")


def prepared(lab: Lab) -> list[Node]:
    """Machines with what an operator puts there beside the shipped files: a tier, its key, and a group of operators."""
    make_certificates(lab)
    tier = lab.shared / "checkpoints"
    tier.mkdir()
    tier.chmod(0o777)
    lab.boot()
    nodes = [Node(lab, machine) for machine in lab.machines]
    for node in nodes:
        node.machine.does("groupadd", OPERATORS)
        node.machine.does("useradd", "--create-home", "--uid=1001", f"--groups={OPERATORS}", "oncall")
    return nodes


def install(nodes: list[Node]) -> None:
    """The tier is a directory, which needs a drop-in, and io_uring must do: where it is forbidden the daemon would not start."""
    changes = [
        (f'# group = "{OPERATORS}"', f'group = "{OPERATORS}"'),
        ('kind = "directory"\npath = "/shared/checkpoints"', 'kind = "directory"\npath = "/shared/checkpoints"\nio = "uring"'),
    ]
    dropins = {
        "tier": "[Service]\nReadWritePaths=/shared/checkpoints\n", "operators": f"[Service]\nSupplementaryGroups={OPERATORS}\n",
    }
    for node in nodes:
        node.install(changes, dropins)


def encrypt(nodes: list[Node]) -> None:
    """The line of the unit that gives the daemon a key, and the file's own lines that use it."""
    credential = re.search(r"^#(LoadCredential=tier\.key:/etc/storaged/tier\.key)$", UNIT, re.M)
    expect(credential is not None, "the unit names no credential for the tier's key")
    key = authority_folder(nodes[0].lab) / "tier.key"
    run_here(str(binary()), "token", str(key))
    for node in nodes:
        node.put("tier.key", key.read_text(), mode=0o600, group="root")
        node.machine.write("/etc/systemd/system/storaged.service.d/credentials.conf", f"[Service]\n{credential[1]}\n")
        node.change(("# [trickle.encryption]", "[trickle.encryption]"), ('# key_file = "/etc/storaged/tier.key"', f'key_file = "{CREDENTIALS}/tier.key"'))
        node.machine.shell("systemctl daemon-reload && systemctl restart storaged")
        node.wait_ready()


class Systemd:
    def __init__(self, checks: Checks, nodes: list[Node]):
        self.check, self.nodes = checks.check, nodes
        self.first = nodes[0]
        self.job: Job | None = None
        self.step = 0

    def run(self) -> None:
        with self.check("systemd-analyze security rates it as deploy/README.md says"):
            rated = self.first.machine.does("systemd-analyze", "security", "--offline=yes", f"{SOURCE}/deploy/systemd/storaged.service")
            told = re.search(r"rates it (\d\.\d)", (ROOT / "deploy" / "README.md").read_text())
            expect(told is not None and f"storaged.service: {told[1]} OK" in rated, rated[-200:])
        with self.check('every line of "With systemd" ends well, and the daemons are ready'):
            install(self.nodes)
            everywhere(self.nodes, lambda _, node: node.wait_ready())
            until("links", self._are_linked)
        self.unit()
        self.what_it_may()
        self.who_may()
        with self.check("three ranks save, the step is protected, loads return its bytes"):
            self.job = Job(self.nodes, "first")
            self.saves()
            self.job.load(self.step, "own ram")
        self.durable()
        self.memory_outlives()
        self.upgrades()
        self.starts_that_fail()
        self.reloads()
        self.hook()
        self.stops()
        self.uploads_end()
        self.one_after_the_other()
        self.machine_goes()
        self.quiet()

    def saves(self, step: int | None = None) -> None:
        self.step = self.step + 1 if step is None else step
        self.job.save(self.step)
        self.job.wait_whole()

    def _are_linked(self) -> bool | str:
        peers = [peer for node in self.nodes for peer in node.status()["peers"]]
        return all(peer["up"] for peer in peers) or str(peers)

    def kept_through(self, what: str, event) -> None:
        """All nodes at once lose their daemon, none its memory: nobody else could have put it back."""
        with self.check(f"{what} on all nodes at once: slots and parity are there again, byte by byte"):
            before = [node.pid() for node in self.nodes]
            everywhere(self.nodes, event)
            everywhere(self.nodes, lambda _, node: until("another daemon", lambda: node.machine.property("MainPID") not in ("0", before[_]) or "none", 90))
            everywhere(self.nodes, lambda _, node: node.wait_ready())
            self.job.wait_whole()
            self.job.load(self.step, "own ram")
            for node in self.nodes:
                expect(node.metric("storaged_memory_unheld") == 0, f"{node.name}: memory that systemd did not take")
            self.saves()

    def unit(self) -> None:
        machine = self.first.machine
        with self.check("systemd-analyze verify says nothing of the unit"):
            done = machine.tries("systemd-analyze", "verify", "/etc/systemd/system/storaged.service")
            said = [line for line in (done.stdout + done.stderr).splitlines() if "storaged" in line]
            expect(done.returncode == 0 and not said, f"{said}")
        with self.check("it was started once, and systemd holds descriptors of its memory"):
            expect(machine.property("ActiveState") == "active" and machine.property("NRestarts") == "0", machine.journal()[-2000:])
            expect(int(machine.property("NFileDescriptorStore")) > 0, "no descriptors")

    def what_it_may(self) -> None:
        machine = self.first.machine
        with self.check("the daemon has no capability, no core dump, and the user, umask and limits of the unit"):
            pid = self.first.pid()
            fields = dict(line.split(":\t", 1) for line in machine.process_file(pid, "status").splitlines() if ":\t" in line)
            own = machine.does("id", "-u", "storaged").strip()
            expect(set(fields["Uid"].split()) == {own} and own != "0", fields["Uid"])
            wanted = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "CapAmb": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2", "Umask": "0077"}
            got = {name: fields[name] for name in wanted}
            expect(got == wanted, f"{got}")
            limits = machine.process_file(pid, "limits")
            expect(re.search(r"Max core file size +0 +0 ", limits) is not None, limits)
            # Some machines (containers, virtual ones without CAP_SYS_RESOURCE) let not even root raise these.
            files, score = run_here("bash", "-c", "ulimit -n 65536; ulimit -n; echo -900 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj").split()
            expect(re.search(rf"Max open files +{files} +{files} ", limits) is not None, limits)
            expect(machine.process_file(pid, "oom_score_adj").strip() == score, machine.process_file(pid, "oom_score_adj"))
        with self.check("it sees a read-only system, no home directories and no devices"):
            inside = ["nsenter", f"--target={self.first.pid()}", "--mount", "--"]
            machine.does(*inside, "sh", "-c", "! touch /etc/x && ! touch /usr/x && ! ls /home/trainer && ! test -e /dev/kmsg && touch /shared/checkpoints/x")
            machine.does("rm", "/shared/checkpoints/x")
        with self.check("io_uring works below the unit's filter of system calls"):
            rings = machine.does("sh", "-c", f"ls -l /proc/{self.first.pid()}/fd | grep -c io_uring")
            expect(int(rings) > 0, "no ring is open")
        with self.check("the tier's key is a credential that the daemon reads and no other user"):
            encrypt(self.nodes)
            until("links", self._are_linked)
            self.first.machine.does("storaged", "config", "/etc/storaged/storaged.toml")
            expect(machine.tries("cat", f"{CREDENTIALS}/tier.key", user=TRAINER).returncode != 0, "a trainer reads the tier's key")
            expect("KEY" not in machine.process_file(self.first.pid(), "environ").upper(), "a key in the environment")

    def who_may(self) -> None:
        machine = self.first.machine
        with self.check("sockets and their directories have the modes that the documents name, in spite of UMask=0077"):
            places = {
                "/run/storaged": "755 storaged:storaged", "/run/storaged/training": "755 storaged:storaged",
                "/run/storaged/training/storaged.sock": "666 storaged:storaged", "/run/storaged/admin.sock": f"660 storaged:{OPERATORS}",
            }
            got = {place: machine.does("stat", "--format=%a %U:%G", place).strip() for place in places}
            expect(got == places, f"{got}")
        with self.check("an operator of admin.group may ask, a trainer may not; another user is no tenant"):
            machine.does("runuser", "-u", "oncall", "--", "storaged", "status")
            expect(machine.tries("storaged", "status", user=TRAINER).returncode != 0, "a trainer uses the operator's socket")
            expect(self.first.trainer("open", "other", user="oncall").returncode != 0, "a user who is no tenant opens a run")

    def durable(self) -> None:
        with self.check("a step becomes durable through io_uring, encrypted by the key in LoadCredential="):
            self.saves(100)
            everywhere(self.nodes[:1], lambda _, node: until("durable", lambda: self._is_durable(node), 60))
            objects = [path for path in (self.first.lab.shared / "checkpoints").rglob("*") if path.is_file() and path.stat().st_size > 1_000_000]
            expect(len(objects) >= 3, f"{objects}")
            for one in objects:
                expect(b"\0" * 64 not in one.read_bytes()[:4096], f"{one} is not encrypted")

    def _is_durable(self, node: Node) -> bool | str:
        listed = node.machine.does("storaged", "ls", "--json")
        return '"durable":true' in listed or "durable" in re.findall(r'"state":"(\w+)"', listed) or listed

    def memory_outlives(self) -> None:
        self.kept_through("systemctl restart", lambda _, node: node.machine.does("systemctl", "restart", "storaged"))
        self.kept_through("SIGKILL", lambda _, node: node.machine.does("systemctl", "kill", "--signal=KILL", "storaged"))
        self.kept_through("SIGABRT", lambda _, node: node.machine.does("systemctl", "kill", "--signal=ABRT", "storaged"))

        def reexec(_, node: Node) -> None:
            node.machine.does("systemctl", "daemon-reexec")
            node.machine.does("systemctl", "daemon-reload")
            node.machine.does("systemctl", "kill", "--signal=KILL", "storaged")

        self.kept_through("SIGKILL after systemd itself was started anew (daemon-reexec)", reexec)
        with self.check("ten kills in a row: no limit of starts, and the memory is there"):
            for _ in range(10):
                before = self.first.pid()
                self.first.machine.does("systemctl", "kill", "--signal=KILL", "storaged")
                until("the next daemon", lambda: self.first.machine.property("MainPID") not in ("0", before) or "none", 20)
            self.first.wait_ready()
            self.job.load(self.step, "own ram")

    def upgrades(self) -> None:
        def replace(_, node: Node) -> None:
            node.machine.shell("cp /usr/local/bin/storaged /root/newer && echo >> /root/newer && install -m 755 /root/newer /usr/local/bin/storaged && rm /root/newer")
            node.machine.does("systemctl", "kill", "--signal=USR2", "storaged")

        self.kept_through("another binary and systemctl kill -s USR2", replace)
        with self.check("the new binary runs, after an exit with 74"):
            for node in self.nodes:
                expect("(deleted)" not in node.machine.does("readlink", f"/proc/{node.pid()}/exe"), "the old one runs")
                expect("status=74" in node.machine.journal(), "no exit with 74")

        def move(_, node: Node) -> None:
            node.machine.shell("install -D -m 755 /usr/local/bin/storaged /opt/storaged-2/bin/storaged")
            command = re.search(r"^ExecStart=(.*)$", UNIT, re.M)[1].replace("/usr/local/bin", "/opt/storaged-2/bin")
            node.machine.write("/etc/systemd/system/storaged.service.d/path.conf", f"[Service]\nExecStart=\nExecStart={command}\n")
            node.machine.shell("systemctl daemon-reload && systemctl restart storaged")

        self.kept_through("a binary at another path and systemctl restart", move)
        with self.check("that binary runs"):
            for node in self.nodes:
                expect(node.machine.does("readlink", f"/proc/{node.pid()}/exe").strip() == "/opt/storaged-2/bin/storaged", "another one runs")

    def starts_that_fail(self) -> None:
        """A bad release: each start fails, until the good binary is back."""
        def fail(_, node: Node) -> None:
            machine, path = node.machine, "/opt/storaged-2/bin/storaged"
            machine.shell(f"mv {path} {path}.good && printf '#!/bin/sh\\nexit 1\\n' > {path} && chmod 755 {path}")
            starts = int(machine.property("NRestarts"))
            machine.does("systemctl", "kill", "--signal=KILL", "storaged")
            until("four starts that fail", lambda: int(machine.property("NRestarts")) >= starts + 4 or machine.property("NRestarts"), 60)
            machine.does("mv", f"{path}.good", path)

        self.kept_through("a binary that cannot start, four times, and the good one again", fail)

    def reloads(self) -> None:
        machine = self.first.machine
        with self.check("systemctl reload takes a renewed certificate, with the same process, links and memory"):
            pid, authority = self.first.pid(), authority_folder(self.first.lab)
            run_here(str(binary()), "cert", "renew", str(authority), self.first.name)
            self.first.take_certificates()
            done = machine.tries("systemctl", "reload", "storaged")
            expect(done.returncode == 0, done.stderr + machine.journal()[-1500:])
            until("the reload's word", lambda: "reloaded" in machine.journal()[-3000:] or machine.journal()[-1500:], 20)
            # The one before is revoked on the peers: links that begin now show which one is used.
            expect(self.first.pid() == pid and machine.property("ActiveState") == "active", "another process")
            until("links", self._are_linked)
            self.job.load(self.step, "own ram")
        with self.check("systemctl reload refuses a file that cannot be used, and the daemon goes on"):
            pid, good = self.first.pid(), self.first.change(("[coding]", "[koding]"))
            expect(machine.tries("systemctl", "reload", "storaged").returncode != 0, "the reload ends well")
            self.first.put("storaged.toml", good)
            expect(self.first.pid() == pid, "another process")
            self.first.wait_ready()
            machine.does("systemctl", "reload", "storaged")

    def hook(self) -> None:
        machine = self.first.machine
        with self.check("memory that rots: found, put back, and scrub.hook runs below the unit"):
            machine.write("/usr/local/bin/report-bad-memory", '#!/bin/sh\necho "report of $STORAGED_NODE: $STORAGED_ROTTEN_CHUNKS" >&2\n', 0o755)
            hook = 'hook = ["/usr/local/bin/report-bad-memory"]'
            good = self.first.change(("# [scrub]", "[scrub]\nrotten_max = 1"), ('# period = "1h"', 'period = "5s"'), (f"# {hook}", hook))
            machine.does("systemctl", "restart", "storaged")
            self.first.wait_ready()
            machine.does("python3", "/opt/tests/trainer.py", "rot", self.first.pid(), self.step, "0", environment={"PYTHONPATH": "/opt/python"})
            until("the hook", lambda: "report of node-1: 1" in machine.journal() or machine.journal()[-1500:], 60)
            self.job.wait_whole()
            self.job.load(self.step)
            self.first.put("storaged.toml", good)
            machine.does("systemctl", "restart", "storaged")
            self.first.wait_ready()

    def stops(self) -> None:
        last = self.nodes[-1]
        with self.check("systemctl stop where nothing hangs on the node: exit code 0 at once, and its memory is let go"):
            self.saves()
            began = time.monotonic()
            last.machine.does("systemctl", "stop", "storaged")
            took = time.monotonic() - began
            shown = [last.machine.property(name) for name in ("ActiveState", "Result", "ExecMainStatus", "NFileDescriptorStore")]
            expect(shown == ["inactive", "success", "0", "0"] and took < 25, f"{shown} after {took:.1f} s")
        with self.check("after systemctl start its peers put back what it had"):
            last.machine.does("systemctl", "start", "storaged")
            last.wait_ready()
            self.job.wait_whole(90)
            self.job.load(self.step)
        with self.check("storaged drain ends the unit with 0, and systemd does not start it again"):
            done = last.machine.does("storaged", "drain", "--deadline", "40s", limit=90)
            until("the end", lambda: (state := last.machine.property("ActiveState")) == "inactive" or state, 20)
            time.sleep(5)
            expect(last.machine.property("ActiveState") == "inactive" and last.machine.property("ExecMainStatus") == "0", done)
            last.machine.does("systemctl", "start", "storaged")
            last.wait_ready()
            self.job.wait_whole(90)
        self.only_copy()

    def only_copy(self) -> None:
        first, middle, last = (node.machine for node in self.nodes)
        with self.check("systemctl stop of what the others cannot do without: 75 within TimeoutStopSec=, named, neither failed nor started again"):
            self.saves()
            last.does("systemctl", "stop", "storaged")
            began = time.monotonic()
            middle.does("systemctl", "stop", "storaged")
            took = time.monotonic() - began
            time.sleep(4)
            shown = [middle.property(name) for name in ("ActiveState", "Result", "ExecMainStatus")]
            expect(shown == ["inactive", "success", "75"] and took < 60, f"{shown} after {took:.1f} s")
            expect(f"step {self.step}" in middle.journal()[-3000:], middle.journal()[-3000:])
            expect("75" in middle.tries("systemctl", "status", "storaged").stdout, "systemctl status does not show it")
        with self.check("all nodes were stopped: the job goes on from its durable step"):
            first.does("systemctl", "stop", "storaged")
            everywhere(self.nodes, lambda _, node: node.machine.does("systemctl", "start", "storaged"))
            everywhere(self.nodes, lambda _, node: node.wait_ready())
            until("links", self._are_linked)
            self.job = Job(self.nodes, "first")
            self.step = 100
            self.job.load(100)
            self.saves(201)

    def uploads_end(self) -> None:
        with self.check("systemctl stop on all nodes at once, right after a save: what is to be durable is durable"):
            self.step = 300
            self.job.save(300)
            everywhere(self.nodes, lambda _, node: node.machine.does("systemctl", "stop", "storaged"))
            codes = [node.machine.property("ExecMainStatus") for node in self.nodes]
            expect(codes == ["0"] * 3, f"exit codes {codes}")
            everywhere(self.nodes, lambda _, node: node.machine.does("systemctl", "start", "storaged"))
            everywhere(self.nodes, lambda _, node: node.wait_ready())
            until("links", self._are_linked)
            self.job = Job(self.nodes, "first")
            self.job.load(300)
            self.saves(301)

    def one_after_the_other(self) -> None:
        """As deploy/README.md has it, "What to know"."""
        command = "storaged restart-safe --wait --timeout 600 && systemctl restart storaged"
        with self.check("all nodes are restarted one after the other, each when it may go, and the job saves between"):
            expect(command in (ROOT / "deploy" / "README.md").read_text(), f"deploy/README.md has no {command}")
            for node in self.nodes:
                node.machine.shell(command)
                node.wait_ready()
                until("links", self._are_linked)
                self.saves()
            self.job.load(self.step, "own ram")

    def machine_goes(self) -> None:
        last = self.nodes[-1]
        with self.check("the machine is shut down and boots again: the unit ends in order, starts by itself, and is made whole"):
            began = time.monotonic()
            last.machine.tries("systemctl", "poweroff")
            last.machine.container.wait(timeout=120)
            took = time.monotonic() - began
            expect(took < 60, f"it took {took:.0f} s")
            last.machine.boot()
            last.machine.wait_booted()
            last.wait_ready()
            self.job.wait_whole(90)
            self.job.load(self.step)

    def quiet(self) -> None:
        with self.check("the journals hold no WARN or ERROR that was not brought about"):
            said = [line for node in self.nodes for line in node.machine.journal().splitlines() if re.search(r'"level":"(WARN|ERROR)"', line)]
            odd = [line for line in said if not any(known in line for known in EXPECTED)]
            expect(not odd, "\n".join(odd[:20]))


def main() -> int:
    in_namespaces()
    checks = Checks()
    lab = Lab([f"node-{number}" for number in (1, 2, 3)], binds())
    try:
        Systemd(checks, prepared(lab)).run()
    finally:
        lab.end()
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
