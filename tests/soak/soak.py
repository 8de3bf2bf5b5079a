"""An ordinary month in minutes: real daemons, a real S3 server behind a proxy that is slow and fails, two jobs that save all
the time, and what happens to nodes. `make soak MINUTES=15`.

Two parts: a job without a durable tier and the same job with a tier slower than its steps, which save by turns, so that both
meet what else the machine does; then all the faults.
Everything runs in a network namespace of its own, so links are cut with its own nftables. What a daemon said was protected
must come back, bit for bit, as long as no more than m nodes were lost at once: the soak loses no more.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "demo"))

from cluster import NODES, RANKS, ROOT, CheckFailed, Cluster, check, kill  # noqa: E402
from proxy import MODES, Proxy  # noqa: E402
from watch import Costs, Watch, order  # noqa: E402

S3_PORT, PORT = 7480, 9600
# The tier takes so many bytes per second: less than the jobs owe it.
TIER_RATE = 600_000
EVERY = 5
# Two jobs that are compared save by turns of so many seconds, of which the first do not count: a backlog builds up.
TURN, SETTLE = 10.0, 3.0
MARKS = {"protected_lost": 0, "wrong_bytes": 0, "saves_rate_vs_no_tier": 0.95, "longest_unprotected_s": 10.0, "pinned_slots_end": 0}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Job:
    """A job's process, its log, and the watch over what it saved."""

    def __init__(self, soak: Soak, name: str, nodes: list[int], length: int, interval: float):
        self.soak, self.name, self.nodes = soak, name, nodes
        self.length, self.interval = length, interval
        self.log = soak.directory / f"{name}.jsonl"
        self.process: subprocess.Popen | None = None
        self.watch = Watch(name, f"{name}-token-of-the-soak", [str(soak.cluster.socket(node)) for node in range(NODES)])
        #: What was protected when each restart began, in order.
        self.owed: list[tuple[str, int] | None] = []

    def start(self, seconds: float = 1e9, turns: dict | None = None) -> None:
        self.owed.append(self.watch.newest())
        sockets = [str(self.soak.cluster.socket(node)) for node in self.nodes]
        settings = dict(namespace=self.name, token=f"{self.name}-token-of-the-soak", sockets=sockets, length=self.length)
        settings |= dict(interval=self.interval, seconds=seconds, log=str(self.log), attempt=len(self.owed) - 1, **(turns or {}))
        with self.log.with_suffix(".err").open("ab") as err:
            command = [sys.executable, str(HERE / "job.py"), json.dumps(settings)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err)

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.soak.trouble(f"{self.name} did not end within 60 s of SIGTERM")
                kill(self.process)

    def events(self, event: str) -> list[dict]:
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        return [one for one in map(json.loads, lines) if one["event"] == event]

    def lost(self) -> list[str]:
        """What was protected when a restart began and did not come back with it, or, if it was refused, with the next one."""
        restored, found = self.events("restored"), []
        for attempt, owed in enumerate(self.owed):
            if owed is None:
                continue
            got = next(((one["run"], one["step"]) for one in restored if one["attempt"] >= attempt), ("", 0))
            if not got[0] or order(got) < order(owed):
                found.append(f"{self.name}: run {owed[0]} step {owed[1]} was protected, restart {attempt} got run {got[0]} step {got[1]}")
        return found


class Soak:
    def __init__(self, directory: Path, durable: str, environment: dict[str, str], proxy: Proxy | None, dice: random.Random, port: int = PORT):
        self.directory, self.proxy, self.dice = directory, proxy, dice
        self.cluster = Cluster(directory, durable, EVERY if durable else 0, port, environment)
        self.costs, self.jobs = Costs(), []
        self.kills = self.pauses = 0
        self.faults: collections.Counter[str] = collections.Counter()
        self.gaps: list[float] = []
        #: When nodes were not all well: from a fault's begin until all was as before it.
        self.ill: list[tuple[float, float]] = []
        self.troubles: list[str] = []

    def trouble(self, text: str) -> None:
        say(f"TROUBLE: {text}")
        self.troubles.append(text)

    def start(self) -> None:
        self.cluster.start(*range(NODES))
        self.cluster.wait_up()

    def job(self, name: str, nodes: list[int], length: int, interval: float) -> Job:
        self.jobs.append(Job(self, name, nodes, length, interval))
        return self.jobs[-1]

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.costs.sample([daemon.pid for daemon in self.cluster.daemons.values()])
            time.sleep(min(0.5, max(0.0, until - time.monotonic())))

    def settled(self, limit: float = 60) -> bool:
        """Until all nodes see each other and each job that runs had two new steps protected since."""
        started = time.monotonic()
        try:
            self.cluster.wait_up(limit=limit)
        except (CheckFailed, subprocess.TimeoutExpired) as error:
            self.trouble(str(error))
            return False
        running = [job for job in self.jobs if job.process and job.process.poll() is None]
        for job in running:
            before = len(job.watch.safe)
            while len(job.watch.safe) < before + 2:
                if time.monotonic() - started > limit:
                    self.trouble(f"{job.name}: no two new protected steps within {limit:.0f} s of all nodes being up; newest {job.watch.newest()}")
                    return False
                self.rest(0.2)
        return True

    def was_ill(self, began: float, ended: float) -> bool:
        """Whether a node was not well in any part of this time."""
        return any(fault <= ended and began <= well for fault, well in self.ill)

    def end(self) -> None:
        for job in self.jobs:
            kill(job.process)
            job.watch.end()
        for daemon in self.cluster.daemons.values():
            daemon.send_signal(signal.SIGCONT)
        self.cluster.end()


class Faults:
    """What happens to nodes, one thing after the other; the tier has its own troubles meanwhile."""

    def __init__(self, soak: Soak):
        self.soak, self.cluster, self.dice = soak, soak.cluster, soak.dice
        self.kinds = [self.one_down, self.pause, self.cut, self.rank_node_down, self.job_killed, self.two_killed]
        self.waiting: list = []

    def next(self) -> None:
        """All kinds in an order of the dice, then again."""
        if not self.waiting:
            self.waiting = self.dice.sample(self.kinds, len(self.kinds))
        fault = self.waiting.pop()
        name, began = fault.__name__.replace("_", " "), time.time()
        self.soak.faults[name] += 1
        say(f"{name}: {fault()}")
        self.revive()
        if not self.soak.settled():
            say("not settled; going on")
        self.soak.ill.append((began, time.time()))

    def revive(self) -> None:
        """Daemons that are down start again; jobs whose process ended too."""
        for node in [node for node, daemon in self.cluster.daemons.items() if daemon.poll() is not None]:
            last = self.cluster.log(node).read_text(errors="replace").splitlines()[-1:]
            self.soak.trouble(f"n{node} ended by itself: {''.join(last)[:300]}")
            del self.cluster.daemons[node]
        self.cluster.start(*[node for node in range(NODES) if node not in self.cluster.daemons])
        for job in self.soak.jobs:
            if job.process.poll() is not None:
                job.start()

    def kill(self, *nodes: int) -> None:
        self.soak.kills += len(nodes)
        self.cluster.kill(*nodes)

    def one_down(self) -> str:
        """A node that no rank of the first job lives on: it goes on saving."""
        node, began = self.dice.choice([4, 5]), time.time()
        self.kill(node)
        self.soak.rest(15)
        gap = self.soak.jobs[0].watch.longest_gap(began, time.time())
        self.soak.gaps.append(gap)
        return f"n{node} for 15 s; the longest time without a new protected or durable step was {gap:.1f} s"

    def rank_node_down(self) -> str:
        node = self.dice.randrange(RANKS)
        self.kill(node)
        self.soak.rest(self.dice.uniform(1, 4))
        return f"n{node}"

    def two_killed(self) -> str:
        nodes = self.dice.sample(range(NODES), 2)
        self.kill(*nodes)
        for job in self.soak.jobs:
            kill(job.process)
        self.soak.rest(self.dice.uniform(0, 2))
        return f"n{nodes[0]} and n{nodes[1]}, and the jobs"

    def job_killed(self) -> str:
        job = self.dice.choice(self.soak.jobs)
        kill(job.process)
        return job.name

    def pause(self) -> str:
        node, seconds = self.dice.randrange(NODES), self.dice.choice([0.3, 1, 3, 6])
        self.soak.pauses += 1
        self.cluster.daemons[node].send_signal(signal.SIGSTOP)
        self.soak.rest(seconds)
        self.cluster.daemons[node].send_signal(signal.SIGCONT)
        return f"n{node} for {seconds} s"

    def cut(self) -> str:
        """A pair of nodes, or one from all others, one way or both."""
        one, *others = self.dice.sample(range(NODES), NODES)
        others = others[: self.dice.choice([1, NODES - 1])]
        ways = self.dice.choice([1, 2])
        rules = [f"add rule inet soak input ip saddr 127.0.0.{one + 1} ip daddr 127.0.0.{other + 1} drop" for other in others]
        if ways == 2:
            rules += [f"add rule inet soak input ip saddr 127.0.0.{other + 1} ip daddr 127.0.0.{one + 1} drop" for other in others]
        nft("\n".join(rules))
        seconds = self.dice.choice([0.5, 2, 5, 10])
        self.soak.rest(seconds)
        nft("flush chain inet soak input")
        return f"n{one} from {', '.join(f'n{other}' for other in others)}, {'one way' if ways == 1 else 'both ways'}, for {seconds} s"

    def rolling_restart(self) -> None:
        """As an operator's script does it: each node when it says that it may go."""
        self.soak.faults["rolling restart"] += 1
        began = time.time()
        for node in range(NODES):
            try:
                self.cluster.storaged("restart-safe", "--wait", "--timeout", 60, "--socket", self.cluster.socket(node))
            except CheckFailed as error:
                self.soak.trouble(f"n{node} may not be restarted: {error}")
            daemon = self.cluster.daemons.pop(node)
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.soak.trouble(f"n{node} did not end within 30 s of SIGTERM")
                kill(daemon)
            self.revive()
            self.cluster.wait_up()
        self.soak.settled()
        self.soak.ill.append((began, time.time()))
        say(f"rolling restart of {NODES} nodes in {time.time() - began:.0f} s")


def nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


def s3_server(directory: Path) -> dict[str, str]:
    script = ROOT / "tests" / "s3" / "ceph.sh"
    subprocess.run(["bash", str(script), "start", str(directory), str(S3_PORT)], check=True, stdout=subprocess.DEVNULL)
    output = subprocess.run(["bash", "-c", f". {directory}/env; env"], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def durable_section(env: dict[str, str], port: int, prefix: str) -> str:
    return f"""[durable]
kind = "s3"
bucket = "{env["STORAGED_TEST_S3_BUCKET"]}"
prefix = "{prefix}"
endpoint = "http://127.0.0.1:{port}"
region = "{env["AWS_REGION"]}"
path_style = true
"""


def compared(bare: Soak, tiered: Soak, turns: int) -> float:
    """The rate of saves with a slow tier, as a share of that without one: both save by turns, and medians are compared."""
    began = time.time() + 5
    for turn, soak in enumerate((bare, tiered)):
        soak.start()
        soak.job("first", list(range(RANKS)), 256 << 10, 0.2)
        soak.jobs[0].start(turns=dict(turn=turn, turn_seconds=TURN, turns_began=began))
    for number in range(turns):
        # What the tier is owed must not be paid while the other one saves.
        tiered.proxy.rate = TIER_RATE if number % 2 else TIER_RATE / 20
        bare.rest(began + (number + 1) * TURN - time.time())
    rates = [turn_rates(soak.jobs[0], began, range(turn, turns, 2)) for turn, soak in enumerate((bare, tiered))]
    for name, soak, found in zip(("without a", "with a slow"), (bare, tiered), rates):
        soak.jobs[0].end()
        refused = collections.Counter(one["error"] for one in soak.jobs[0].events("refused"))
        say(f"{name} tier: {', '.join(f'{rate:.2f}' for rate in found)} saves per second, refused {dict(refused)}")
    return statistics.median(rates[1]) / statistics.median(rates[0])


def turn_rates(job: Job, began: float, turns: range) -> list[float]:
    """Saves per second in each of a job's turns that it was there for, without their first seconds."""
    saved, running = [one["at"] for one in job.events("saved")], job.events("running")
    check(len(running) == 1, f"the job did not open its run: see {job.log}")
    starts = [began + turn * TURN + SETTLE for turn in turns]
    starts = [start for start in starts if start >= running[0]["at"]]
    check(len(starts) > 0, f"the job did not start in time: see {job.log}")
    return [sum(start <= at < start + TURN - SETTLE for at in saved) / (TURN - SETTLE) for start in starts]


def troubled(soak: Soak, seconds: float) -> None:
    """Two jobs, and everything that happens in a month."""
    soak.start()
    soak.job("first", list(range(RANKS)), 256 << 10, 0.2).start()
    soak.job("second", [1, 4], 1 << 20, 1.0).start()
    soak.settled()
    faults, until = Faults(soak), time.monotonic() + seconds
    tier_due, rolled = time.monotonic() + 10, False
    while time.monotonic() < until:
        if time.monotonic() > tier_due:
            mode = "ok" if soak.proxy.mode != "ok" else soak.dice.choice(MODES[1:])
            say(f"the tier: {mode}")
            soak.proxy.be(mode)
            tier_due = time.monotonic() + soak.dice.uniform(5, 25)
        if not rolled and time.monotonic() > until - seconds / 2:
            rolled = True
            faults.rolling_restart()
        faults.next()
        soak.rest(soak.dice.uniform(0, 2))
    soak.proxy.be("ok")
    faults.revive()
    soak.settled()
    # The last word: all jobs end and restart once more, so that what was protected last is looked at too.
    for job in soak.jobs:
        job.end()
        job.start(3)
    soak.rest(5)
    for job in soak.jobs:
        job.end()


def pinned(soak: Soak) -> int:
    """Slots that hold anything but a namespace's newest safe checkpoint, half a minute after the last save."""
    soak.proxy.rate = 1e9
    soak.rest(30)
    newest = {job.name: job.watch.newest() for job in soak.jobs}
    count = 0
    for node in range(NODES):
        status = soak.cluster.status(node)
        if status is None:
            soak.trouble(f"n{node} does not answer at the end")
            continue
        owned = 0
        for one in status["checkpoints"]:
            place = (one["run"], one["step"])
            if newest.get(one["namespace"]) and order(place) >= order(newest[one["namespace"]]):
                owned += one["shards_here"]
        count += max(0, status["memory"]["slots"] - owned)
    return count


def log_lines(soak: Soak) -> list[str]:
    """What daemons warned of, the most frequent first."""
    seen: collections.Counter[str] = collections.Counter()
    for node in range(NODES):
        for line in soak.cluster.log(node).read_text(errors="replace").splitlines():
            if " WARN " in line or " ERROR " in line:
                seen[line.split(" ", 1)[-1][:160]] += 1
    return [f"{count} x {line}" for line, count in seen.most_common(15)]


def figures(soak: Soak, minutes: float, seed: int, ratio: float) -> dict:
    saved = sum(len(job.events("saved")) for job in soak.jobs)
    refused = [one for job in soak.jobs for one in job.events("refused")]
    well = [one for one in refused if not soak.was_ill(one["at"] - one["seconds"], one["at"])]
    for one in well:
        soak.trouble(f"a save was refused while all nodes were well: {one}")
    lost = [text for job in soak.jobs for text in job.lost()]
    for text in lost:
        soak.trouble(text)
    rss, fds = soak.costs.growth()
    return {
        "minutes": minutes,
        "seed": seed,
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "kills": soak.kills + soak.faults["job killed"] + 2 * soak.faults["two killed"],
        "pauses": soak.pauses,
        "tier_outages": soak.proxy.outages,
        "faults": dict(soak.faults),
        "saves": saved,
        "saves_refused": len(refused),
        "saves_refused_while_all_was_well": len(well),
        "refused_by": dict(collections.Counter(one["error"] for one in refused)),
        "longest_save_s": max((one["seconds"] for job in soak.jobs for kind in ("saved", "refused") for one in job.events(kind)), default=0),
        "saves_rate_vs_no_tier": round(ratio, 3),
        "protected_lost": len(lost),
        "wrong_bytes": sum(one["wrong"] for job in soak.jobs for one in job.events("restored")),
        "restarts_refused": [one["error"] for job in soak.jobs for one in job.events("failed")],
        "restores": sum(len(job.events("restored")) for job in soak.jobs),
        "longest_unprotected_s": round(max(soak.gaps, default=0.0), 1),
        "pinned_slots_end": pinned(soak),
        "rss_growth_mib": rss,
        "fds_growth": fds,
        "troubles": soak.troubles,
    }


def flat(result: dict) -> dict:
    """The figures as docs/bench keeps them: no lists and nothing nested; a list counts its entries."""
    kept: dict = {}
    for key, value in result.items():
        if isinstance(value, dict):
            kept |= {f"{key}_{name.replace(' ', '_')}": count for name, count in value.items()}
        else:
            kept[key] = len(value) if isinstance(value, list) else value
    return kept


def missed(result: dict) -> list[str]:
    def bad(key: str, mark: float) -> bool:
        return result[key] < mark if key == "saves_rate_vs_no_tier" else result[key] > mark

    found = [f"{key}: expected {mark}, got {result[key]}" for key, mark in MARKS.items() if bad(key, mark)]
    found += [f"trouble: {text}" for text in result["troubles"]]
    return found + ([] if result["faults"].get("one down") else ["no node was down alone: the run was too short"])


def run(args: argparse.Namespace, env: dict[str, str]) -> dict:
    seconds, dice = args.minutes * 60, random.Random(args.seed)
    keys = {key: env[key] for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    turns, soaks = 2 * max(3, round(seconds / 8 / TURN)), []

    def soak(name: str, port: int = PORT) -> Soak:
        proxy = None if name == "without" else Proxy(S3_PORT, TIER_RATE)
        if proxy:
            proxy.start()
        tier = durable_section(env, proxy.port, f"{name}-{int(time.time())}") if proxy else ""
        soaks.append(Soak(args.directory / name, tier, keys, proxy, dice, port))
        return soaks[-1]

    try:
        ratio = compared(soak("without"), soak("slow", PORT + 10), turns)
        for ended in soaks:
            ended.end()
        last = soak("troubled")
        troubled(last, seconds - turns * TURN)
        return figures(last, args.minutes, args.seed, ratio)
    finally:
        for one in soaks:
            one.end()
        if len(soaks) == 3:
            print("what daemons warned of most:", *log_lines(soaks[-1]), sep="\n  ")


def into_own_network() -> None:
    """The soak again, in a network namespace of its own."""
    os.environ["STORAGED_SOAK_INSIDE"] = "1"
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo" / "soak")
    parser.add_argument("--write", type=Path, default=None)
    args = parser.parse_args()
    # Ended from outside, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if "STORAGED_SOAK_INSIDE" not in os.environ:
        if os.geteuid() != 0:
            sys.exit("soak: expected root, which a network of its own and nftables need: run it as root")
        into_own_network()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    nft("add table inet soak; add chain inet soak input { type filter hook input priority 0; }")
    say(f"{args.minutes} minutes, seed {args.seed}")
    state = args.directory.parent / "soak-s3"
    try:
        result = run(args, s3_server(state))
    finally:
        subprocess.run(["bash", str(ROOT / "tests" / "s3" / "ceph.sh"), "stop", str(state)], check=False)
    print(json.dumps(result, indent=2))
    if args.write:
        args.write.write_text(json.dumps(flat(result), indent=2) + "\n")
    problems = missed(result)
    print(*(f"MISSED {problem}" for problem in problems), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
