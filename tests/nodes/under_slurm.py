"""Three nodes with a real systemd, storaged's unit and a real Slurm, set up as deploy/README.md says: `make slurm`.

The scripts of deploy/slurm do what they say where slurmctld and slurmd call them: Prolog, TaskProlog, Epilog and the health check; and
train.sbatch saves when its time is nearly over, is requeued, and goes on at that step; after the loss of a node, too.
"""

from __future__ import annotations

import re
import sys
import time

from lab import ROOT, Checks, Lab, expect, in_namespaces, run, until
from node import SOURCE, TRAINER, TRAINER_UID, Node, authority_folder, binds, everywhere, make_certificates, package, section

HOME = "/shared/home/trainer"
SCRIPTS = "/usr/local/share/storaged/slurm"
EXAMPLE = "/opt/examples/last_save.py"
BEGINS = re.compile(r"rank \d begins after step (\d+)")
ENDS = re.compile(r"rank \d ends after step (\d+), saved: True")
# What a cluster has beside the lines of deploy/README.md. The machines have no control groups with controllers, so processes are found otherwise.
CONF = """ClusterName=lab
SlurmctldHost=node-1
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdTimeout=20
# A requeued job is eligible again after so long.
AuthInfo=cred_expire=15
NodeName=node-[1-3] CPUs=2
PartitionName=main Nodes=node-[1-3] Default=YES State=UP
"""
TORCHRUN = '#!/bin/sh\nexec python3 -m torch.distributed.run "$@"\n'


def settings_for_slurm() -> str:
    """The lines for slurm.conf in deploy/README.md."""
    _, _, behind = section("With Slurm").partition("# slurm.conf\n")
    lines = [line for line in behind.split("\n\n")[0].splitlines() if line]
    expect(len(lines) >= 6 and all(re.match(r"\w+=", line) for line in lines), f"{lines}")
    return "\n".join(lines) + "\n"


def one_file_for_all(names: str) -> str:
    """deploy/storaged.toml with the section for all nodes at once, which its comments show; the names as Slurm has them."""
    text = (ROOT / "deploy" / "storaged.toml").read_text()
    head, _, _ = text.partition("\n# Or, instead of all [[peers]]")
    for old, new in [
        ('name = "node-1"\n', ""), (re.search(r"^failure_domain.*\n", head, re.M)[0], ""), ('listen = "10.0.0.1:9300"', 'listen = "0.0.0.0:9300"'),
        ("/node-1.", "/node."), ("k = 4", "k = 2"), ("m = 2", "m = 1"), ('# budget = "256GiB"', 'budget = "256MiB"'),
    ]:
        expect(old in head, f"deploy/storaged.toml has no {old}")
        head = head.replace(old, new)
    entry = re.search(r'^# \[\[peers\]\]\n# name = "node-\[1-6\]"\n# address = .*\n# failure_domain = .*\n', text, re.M)
    expect(entry is not None, "deploy/storaged.toml shows no list of peers")
    peers = re.sub(r"^# ", "", entry[0], flags=re.M).replace("node-[1-6]", names).replace("[1-6]", "[1-3]")
    return f"{head}\n{peers}"


class Slurm:
    def __init__(self, checks: Checks, lab: Lab):
        self.check, self.failed, self.lab = checks.check, checks.failed, lab
        self.nodes = [Node(lab, machine) for machine in lab.machines]
        self.head = lab.machines[0]

    def run(self) -> None:
        for part in (self.sets_up, self.prolog_fails, self.epilog_fails, self.health_check, self.trains):
            if not self.failed:
                part()

    def sets_up(self) -> None:
        with self.check('every line of "With Slurm": slurmctld and three slurmd are up'):
            everywhere(self.nodes, lambda _, node: self.set_up(node))
            until("idle nodes", lambda: self.are_idle(3), 40)
        with self.check("node lists of Slurm's are host lists of storaged's: the daemons of its nodes are one cluster"):
            names = self.head.does("sinfo", "--noheader", "--format=%N").strip()
            everywhere(self.nodes, lambda _, node: self.install(node, one_file_for_all(names)))
            until("links", self.are_linked)
            self.host_lists()
        with self.check("Prolog lets a job start, TaskProlog tells tasks socket, namespace and token; Epilog keeps the nodes"):
            self.task_prolog()

    def set_up(self, node: Node) -> None:
        machine = node.machine
        machine.does("useradd", f"--uid={TRAINER_UID}", f"--home-dir={HOME}", "--no-create-home", "--shell=/bin/bash", TRAINER)
        machine.write("/usr/local/bin/torchrun", TORCHRUN, 0o755)
        machine.shell(section("With Slurm").splitlines()[0], cwd=SOURCE)
        machine.does("install", "-d", "-o", "slurm", "/var/spool/slurmctld", "/var/spool/slurmd")
        # Where the kernel of this machine has both kinds of control groups, slurmd ends unless it is told which.
        machine.write("/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")
        machine.write("/etc/slurm/slurm.conf", CONF + settings_for_slurm())
        if machine is not self.head:
            # Debian's package enables it on every node.
            machine.does("systemctl", "disable", "slurmctld")
        machine.does("systemctl", "start", *(["slurmctld"] if machine is self.head else []), "slurmd")

    def install(self, node: Node, text: str) -> None:
        node.install_with(text, {"tier": "[Service]\nReadWritePaths=/shared/checkpoints\n"}, certificate="node")
        node.wait_ready()

    def are_linked(self) -> bool | str:
        peers = [node.status()["peers"] for node in self.nodes]
        return all(len(some) == 2 and all(peer["up"] for peer in some) for some in peers) or str(peers)

    def host_lists(self) -> None:
        """What `scontrol show hostlist` makes of names is read as the names that it was made of."""
        for names in (["n001", "n002", "n010"], ["a1", "a2", "b07", "b08", "c"], [f"gpu-{rack}-{place}" for rack in (1, 2) for place in (1, 2, 3)]):
            text = self.head.does("scontrol", "show", "hostlist", ",".join(names)).strip()
            self.head.write("/root/names.toml", self.list_of(names[0], text, len(names)))
            said = self.head.does("storaged", "config", "/root/names.toml")
            expect(f"node {names[0]} of {len(names)}" in said, f"{text}: {said}")

    def list_of(self, own: str, text: str, count: int) -> str:
        folder = self.lab.shared / "names"
        if not folder.exists():
            run("cp", "-r", str(authority_folder(self.lab)), str(folder))
        run(str(binds()[f"{SOURCE}/target/release/storaged"]), "cert", "issue", str(folder), own)
        addresses = ",".join(f"10.1.0.{number}:9300" for number in range(1, count + 1))
        files = f'ca = "/shared/names/ca.pem"\ncertificate = "/shared/names/{own}.pem"\nkey = "/shared/names/{own}.key"\n'
        return f'[node]\nname = "{own}"\nlisten = "10.1.0.1:9300"\n[tls]\n{files}[[peers]]\nname = "{text}"\naddress = "{addresses}"\n'

    def node_state(self, name: str) -> str:
        return self.head.does("sinfo", "--noheader", "--format=%T", "--nodes", name).strip()

    def are_idle(self, count: int) -> bool | str:
        done = self.head.tries("sinfo", "--noheader", "--format=%D %T")
        if done.stdout.strip() == f"{count} idle":
            return True
        return done.stdout + done.stderr + self.nodes[-1].machine.journal("slurmd")[-1500:] + self.head.journal("slurmctld")[-1500:]

    def user(self, *command, limit: float = 120, **environment: str) -> str:
        own = {"HOME": HOME, "PYTHONPATH": "/opt/python:/opt/site", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        return self.head.does(*command, user=TRAINER, environment=own, cwd=HOME, limit=limit)

    def job(self, number: str) -> dict[str, str]:
        said = self.head.does("scontrol", "--oneliner", "show", "job", number)
        return dict(part.split("=", 1) for part in said.split() if "=" in part)

    def until_state(self, number: str, *states: str, limit: float = 120) -> dict[str, str]:
        until(f"job {number} {' or '.join(states)}", lambda: (state := self.job(number)["JobState"]) in states or f"{self.job(number)}{self.log(number)[-2500:]}", limit)
        return self.job(number)

    def log(self, number: str) -> str:
        file = self.lab.shared / "home" / "trainer" / f"job-{number}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def until_said(self, number: str, pattern: re.Pattern, count: int, limit: float = 150) -> list[str]:
        until(f"{pattern.pattern} {count} times", lambda: len(pattern.findall(self.log(number))) >= count or f"{self.job(number)}{self.log(number)[-2500:]}", limit)
        return pattern.findall(self.log(number))

    def task_prolog(self) -> None:
        said = self.user("srun", "--nodes=3", "bash", "-c", 'echo "$SLURMD_NODENAME $STORAGED_SOCKET $STORAGED_NAMESPACE $(stat -c %a $STORAGED_TOKEN_FILE)"')
        lines = sorted(line.split() for line in said.splitlines())
        expect([line[0] for line in lines] == ["node-1", "node-2", "node-3"], said)
        for line in lines:
            expect(line[1] == "/run/storaged/training/storaged.sock" and re.fullmatch(r"slurm-\d+", line[2]) and line[3] == "600", said)
        until("idle nodes", lambda: self.are_idle(3), 30)

    def submit(self, *options: str, script: str = EXAMPLE) -> str:
        """As deploy/README.md does."""
        command = next(line for line in section("With Slurm").splitlines() if " sbatch " in line)
        expect(command.startswith(f"STORAGED_SCRIPTS={SCRIPTS} sbatch --nodes 4 deploy/slurm/train.sbatch"), command)
        job = ["sbatch", "--parsable", "--nodes=2", f"--output={HOME}/job-%j.log", *options, f"{SOURCE}/deploy/slurm/train.sbatch"]
        return self.user(*job, "/opt/tests/paced.py", script, "--steps", "1000000", STORAGED_SCRIPTS=SCRIPTS, NPROC_PER_NODE="1").strip()

    def trains(self) -> None:
        with self.check("train.sbatch: near the end of its time (--signal) all ranks save the same step, and the job is requeued"):
            number = self.submit("--time=2", "--signal=B:USR1@30")
            expect(self.until_said(number, BEGINS, 2) == ["0", "0"], self.log(number))
            ended = self.until_said(number, ENDS, 2, limit=150)
            expect(len(set(ended)) == 1 and int(ended[0]) > 0, f"{ended}")
            self.until_restarts(number, 1)
        if not self.failed:
            self.goes_on(number)

    def goes_on(self, number: str) -> None:
        with self.check("it starts again and goes on at that step"):
            self.goes_on_at(number, 2)
        with self.check("scancel --signal=USR1 --batch by hand: it saves once more and is requeued"):
            time.sleep(3)
            self.user("scancel", "--signal=USR1", "--batch", number)
            self.until_said(number, ENDS, 4)
            self.until_restarts(number, 2)
            self.goes_on_at(number, 4)
        with self.check("a node of the job is lost: Slurm requeues it, and it goes on at the step that was protected"):
            names = self.head.does("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()
            lost = [node for node in self.nodes if node.name in names and node.machine is not self.head][-1]
            lost.machine.pull_the_plug()
            self.goes_on_at(number, 6, limit=240)
            lost.machine.boot()
            lost.machine.wait_booted()
            lost.wait_ready()
            until("links", self.are_linked)
        with self.check("scancel ends it: nothing is started or requeued any more"):
            self.user("scancel", number)
            self.until_state(number, "CANCELLED")
            until("idle nodes", lambda: self.are_idle(3), 60)

    def goes_on_at(self, number: str, starts: int, limit: float = 150) -> None:
        """The two ranks of the next start begin behind the step that was saved last."""
        began = self.until_said(number, BEGINS, starts + 2, limit)[starts:]
        expect(set(began) == {ENDS.findall(self.log(number))[-1]}, f"{began}: {self.log(number)[-2000:]}")

    def until_restarts(self, number: str, times: int) -> None:
        until("the requeue", lambda: self.job(number)["Restarts"] == str(times) or str(self.job(number)), 60)

    def prolog_fails(self) -> None:
        node = self.nodes[0]
        with self.check("Prolog: no job starts where the daemon does not run; the node is drained, and the job runs on another"):
            node.machine.does("systemctl", "stop", "storaged")
            number = self.user("sbatch", "--parsable", f"--output={HOME}/job-%j.log", "--wrap", "echo it ran on $SLURMD_NODENAME").strip()
            expect(self.until_state(number, "CONFIGURING", "RUNNING")["NodeList"] == node.name, f"another node was first: {self.job(number)}")
            until("the drain", lambda: "drain" in (state := self.node_state(node.name)) or state, 90)
            (where,) = self.until_said(number, re.compile("it ran on (.*)"), 1, limit=90)
            expect(where != node.name, self.log(number))
            self.recover(node)

    def recover(self, node: Node) -> None:
        node.machine.does("systemctl", "start", "storaged")
        node.wait_ready()
        until("no job on it", lambda: (state := self.node_state(node.name)) in ("drained", "idle") or state, 60)
        if self.node_state(node.name) != "idle":
            self.head.does("scontrol", "update", f"nodename={node.name}", "state=resume")
        until("idle nodes", lambda: self.are_idle(3), 60)

    def epilog_fails(self) -> None:
        node = self.nodes[2]
        with self.check("Epilog: a node whose daemon has ended during the job gets no next one"):
            number = self.user("sbatch", "--parsable", f"--nodelist={node.name}", f"--output={HOME}/job-%j.log", "--wrap", "echo it ran; sleep 5").strip()
            self.until_said(number, re.compile("it ran"), 1)
            node.machine.does("systemctl", "stop", "storaged")
            until("the drain", lambda: "drain" in (state := self.node_state(node.name)) or state, 90)
            self.recover(node)

    def health_check(self) -> None:
        node = self.nodes[2]
        with self.check("scontrol update state=drain: the health check drains the daemon, and it is not started again"):
            self.head.does("scontrol", "update", f"nodename={node.name}", "state=drain", "reason=maintenance")
            until("the daemon's end", lambda: self.has_ended(node), 200)
            expect(node.machine.property("ExecMainStatus") == "0", node.machine.journal()[-1500:])
            self.recover(node)

    def has_ended(self, node: Node) -> bool | str:
        state = node.machine.property("ActiveState")
        if state == "inactive":
            return True
        drains = node.machine.does("journalctl", "--no-pager", "--identifier=storaged-drain")[-1000:]
        shown = self.head.does("scontrol", "--oneliner", "show", "node", node.name)
        return f"{state}; {re.search('State=[^ ]*', shown)[0]}; {drains}; {node.machine.tries('pgrep', '-a', 'storaged').stdout}"


def main() -> int:
    in_namespaces()
    checks = Checks()
    names = ["node-1", "node-2", "node-3"]
    lab = Lab(names, binds() | {"/opt/site": package("torch").parent, "/opt/examples": ROOT / "sdk" / "python" / "examples"})
    try:
        make_certificates(lab)
        for folder, owner in [("checkpoints", None), ("home", None), ("home/trainer", TRAINER_UID)]:
            (lab.shared / folder).mkdir(mode=0o777 if folder == "checkpoints" else 0o755)
            run("chown", str(owner or 0), str(lab.shared / folder))
        (lab.shared / "checkpoints").chmod(0o777)
        lab.boot()
        Slurm(checks, lab).run()
    finally:
        lab.end()
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
