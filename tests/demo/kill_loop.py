"""Kill -9 of trainers, daemons and whole nodes at random times, round after round: no wrong byte, no lost protected
step, no hang. Run by `make kill-loop`. `--seed` gives the same choices again (the moments still differ)."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from cluster import HERE, NAMESPACE, NODES, RANKS, ROOT, TOKEN, Cluster, CheckFailed, check, end_all, kill, place
from saver import content
from storaged import _native

WAIT_MS = 60_000
NOTHING = ("0", 0)


class Loop:
    def __init__(self, cluster: Cluster, directory: Path, dice: random.Random):
        self.cluster, self.directory, self.dice = cluster, directory, dice
        self.log = directory / "protected.log"
        self.savers: list[subprocess.Popen] = []
        self.kills: dict[str, int] = {}

    def client(self, node: int) -> _native.Client:
        return _native.Client(str(self.cluster.socket(node)), NAMESPACE, TOKEN.encode())

    def save(self, first: int) -> None:
        run = self.client(0).open_run(WAIT_MS)
        for rank in range(RANKS):
            command = [sys.executable, str(HERE / "saver.py"), str(self.cluster.socket(rank)), NAMESPACE, TOKEN, str(self.log)]
            command += [str(run), str(rank), str(RANKS), str(first)]
            with (self.directory / f"saver-{rank}.log").open("ab") as log:
                self.savers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def strike(self) -> str:
        """Kills something at a random moment."""
        time.sleep(self.dice.uniform(0.2, 4))
        kind = self.dice.choice(["trainer", "daemon", "node", "two daemons", "two nodes"])
        nodes = self.dice.sample(range(NODES), 2 if kind.startswith("two") else 1)
        for node in nodes:
            if kind != "trainer":
                self.cluster.kill(node)
            if "daemon" not in kind and node < RANKS:
                kill(self.savers[node])
        self.kills[kind] = self.kills.get(kind, 0) + 1
        time.sleep(self.dice.uniform(0, 0.5))
        self.end_savers()
        self.cluster.start(*[node for node in nodes if node not in self.cluster.daemons])
        return f"{kind} {','.join(f'n{node}' for node in nodes)}"

    def end_savers(self) -> None:
        for saver in self.savers:
            kill(saver)
        self.savers.clear()

    def newest_protected(self) -> tuple[str, int]:
        if not self.log.exists():
            return NOTHING
        lines = self.log.read_text("ascii").split("\n")[:-1]
        found = [(run, int(step)) for run, step in map(str.split, lines)]
        return max(found, key=place, default=NOTHING)

    def restore(self) -> int:
        """Every rank's bytes, through its own node's daemon, against what was saved."""
        newest = self.newest_protected()
        if newest == NOTHING:
            return 0
        plan = self.client(0).plan(None, WAIT_MS)
        offered = (plan["run"], plan["step"])
        check(place(offered) >= place(newest), f"run {newest[0]} step {newest[1]} was protected, but the plan offers {offered}")
        for rank in range(RANKS):
            client = self.client(rank)
            manifest = self.client(0).manifest(plan["manifest"])
            shard = client.open_shard(manifest, rank, [], WAIT_MS)
            same = shard.read(0, shard.length) == content(*offered, rank)
            check(same, f"rank {rank} came back with wrong bytes at run {offered[0]} step {offered[1]}")
        return plan["step"]

    def round(self, number: int, rounds: int) -> None:
        started = time.monotonic()
        first = self.restore() + 1
        before = self.newest_protected()
        self.save(first)
        # Something must be protected before something is killed, the first time.
        while number == 1 and self.newest_protected() == NOTHING:
            check(time.monotonic() - started < 60, "nothing was protected within 60 s")
            time.sleep(0.05)
        what = self.strike()
        self.cluster.wait_up()
        step = self.restore()
        healed = self.cluster.wait_healed(0)
        saved = self.newest_protected()[1] - (before[1] if before[1] >= first else first - 1)
        print(f"round {number}/{rounds}: killed {what}; {max(saved, 0)} steps protected, restored step {step}, healed after {healed:.1f} s ({time.monotonic() - started:.1f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo" / "kill-loop")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    cluster, loop = None, None
    try:
        cluster = Cluster(args.directory, "", 0, 9500)
        loop = Loop(cluster, args.directory, random.Random(args.seed))
        cluster.start(*range(NODES))
        cluster.wait_up()
        for number in range(1, args.rounds + 1):
            loop.round(number, args.rounds)
    except (CheckFailed, subprocess.SubprocessError, OSError) as error:
        print(f"FAILED: {error}; logs are in {args.directory}", file=sys.stderr, flush=True)
        return 1
    finally:
        if loop is not None:
            loop.end_savers()
        end_all(cluster)
    print(f"{args.rounds} rounds passed: no wrong byte, no lost protected step, no hang; killed {loop.kills}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
