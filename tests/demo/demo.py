"""The main job, step by step: six daemons, a real training job, two nodes lost at once, then everything lost.

Run by `make demo`; `make demo S3=1` uses a real S3 server instead of a directory. Exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from cluster import HERE, K, M, NODES, RANKS, ROOT, Cluster, CheckFailed, Job, check, end_all, place, read_losses

STEPS, SAVE_EVERY, DURABLE_EVERY = 300, 20, 60
# Copies in a row that hold only what changed, and a rate as one would set it beside training.
INCREMENTS, TRICKLE_RATE = 8, "32MiB"


def say(text: str) -> None:
    print(text, flush=True)


def title(number: int, text: str) -> None:
    say(f"\n[{number}/5] {text}")


def size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def durable_tier(directory: Path, s3: bool) -> tuple[str, dict[str, str]]:
    """The [durable] section, and what the daemons' environment needs for it."""
    place = directory.parent / "durable"
    # Also with S3: what an earlier demo left there must not be taken for this one's.
    subprocess.run(["rm", "-rf", str(place)], check=True)
    if not s3:
        place.mkdir(parents=True)
        return f'[durable]\nkind = "directory"\npath = "{place}"\n', {}
    state = directory.parent / "s3"
    say("starting a real S3 server (Ceph's gateway) on loopback; the first time this installs its Debian packages")
    subprocess.run(["bash", str(ROOT / "tests" / "s3" / "ceph.sh"), "start", str(state), "7480"], check=True)
    output = subprocess.run(["bash", "-c", f". {state}/env; env"], capture_output=True, text=True, check=True).stdout
    env = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    wanted = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    section = f"""[durable]
kind = "s3"
bucket = "{env["STORAGED_TEST_S3_BUCKET"]}"
prefix = "demo-{int(time.time())}"
endpoint = "{env["STORAGED_TEST_S3_ENDPOINT"]}"
region = "{env["AWS_REGION"]}"
path_style = true
"""
    return section, {key: env[key] for key in wanted}


def show_log(job: Job, *beginnings: str) -> None:
    for line in job.log.read_text().splitlines():
        if line.startswith(beginnings):
            say(f"    {line}")


def show_plan(plan: dict) -> None:
    say(f"    plan: step {plan['step']} of run {plan['run']} ({plan['state']}), expected {plan['expected_ms']} ms, manifest {plan['manifest'][:16]}")
    for shard in plan["shards"]:
        source = shard["source"]
        where = "the durable tier" if source == "durable" else f"RAM of {source['ram']}" if "ram" in source else f"decoding from {', '.join(source['decode'])}"
        say(f"    rank {shard['rank']}: {size(shard['bytes'])} from {where}")
    for one in plan["passed_over"]:
        say(f"    passed over run {one['run']} step {one['step']}: {one['reason']}")


def same_losses(reference: Path, job: Job, what: str) -> None:
    expected, got = read_losses(reference), read_losses(job.losses)
    check(len(got) > 0, f"{what}: no losses were written")
    wrong = [step for step, loss in got.items() if expected.get(step) != loss]
    check(not wrong, f"{what}: the loss differs from the uninterrupted run's at steps {wrong[:5]}")
    say(f"    losses of steps {min(got)} to {max(got)} are bit-identical to the uninterrupted run's")


def wait_state(cluster: Cluster, step: int, states: tuple[str, ...], limit: float = 120) -> None:
    started = time.monotonic()
    while (cluster.newest(0, *states) or (0, 0))[1] < step:
        check(time.monotonic() - started < limit, f"step {step} was not {states[0]} within {limit:.0f} s; the logs are in {cluster.directory}")
        time.sleep(0.2)


def show_increments(cluster: Cluster) -> None:
    shards, stored, increments = (cluster.metric(f"storaged_trickle_{name}_total") for name in ("bytes", "stored_bytes", "increments"))
    check(increments > 0, "expected increments in the durable tier, got full copies only")
    check(stored < shards, f"expected fewer bytes in the durable tier than in the shards, got {stored} of {shards}")
    kinds = {kind: cluster.metric("storaged_trickle_increment_records_total", kind=kind) for kind in ("clean", "difference", "moved", "packed", "raw")}
    records = ", ".join(f"{count:.0f} {kind}" for kind, count in kinds.items() if count)
    say(f"    durable tier: {increments:.0f} shards as increments; {size(stored)} stored of {size(shards)} in this life of the daemons; chunks: {records}")


def reference_run(directory: Path) -> Path:
    job = Job(None, directory, "reference", "--steps", str(STEPS), "--no-save")
    started = time.monotonic()
    job.wait()
    losses = {step: float.fromhex(loss) for step, loss in read_losses(job.losses).items()}
    check(len(losses) == STEPS, f"expected {STEPS} losses of the reference run, got {len(losses)}")
    check(losses[STEPS] < losses[1] / 2, f"expected the loss to fall by half, got {losses[1]:.3f} to {losses[STEPS]:.3f}")
    say(f"    reference: {STEPS} steps without a stop in {time.monotonic() - started:.0f} s, loss {losses[1]:.3f} -> {losses[STEPS]:.3f}")
    return job.losses


def demo(cluster: Cluster, directory: Path) -> None:
    options = ("--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
    title(1, f"Start {NODES} daemons: k = {K} data and m = {M} coding nodes, mutual TLS, addresses 127.0.0.1 to 127.0.0.{NODES}")
    cluster.start(*range(NODES))
    say(f"    all {NODES} daemons see each other after {cluster.wait_up():.1f} s")

    title(2, f"Train a transformer on {RANKS} ranks (FSDP2), one per data node, saving every {SAVE_EVERY} steps")
    reference = reference_run(directory)
    job = Job(cluster, directory, "1-killed-rank", *options)
    job.wait_step(3 * SAVE_EVERY + 10)
    show_log(job, "step 20", "step 40", "step 60")

    title(3, "Kill: first one rank's trainer, then a whole node and another one")
    say(f"    SIGKILL the trainer of rank 2 at step {job.step()}")
    job.kill(2)
    job.kill()
    same_losses(reference, job, "before the kill")
    say("    its daemon lives, so the restart reads from RAM:")
    show_plan(cluster.plan(0))
    job = Job(cluster, directory, "2-after-rank", "--resume", *options)
    job.wait_step(8 * SAVE_EVERY + 10)
    wait_state(cluster, 8 * SAVE_EVERY, ("protected", "durable"))
    protected = cluster.newest(0, "protected", "durable")
    say(f"    step {protected[1]} of run {protected[0]} is protected; SIGKILL nodes n1 and n2, trainers and daemons: their RAM is gone")
    job.kill(1, 2)
    cluster.kill(1, 2)
    job.kill()
    same_losses(reference, job, "after the restart from RAM")

    title(4, "Restart on replacement daemons with empty RAM")
    cluster.start(1, 2)
    say(f"    replacements up after {cluster.wait_up():.1f} s")
    plan = cluster.plan(0)
    show_plan(plan)
    check(place((plan["run"], plan["step"])) >= place(protected), f"expected step {protected[1]} or newer, the plan offers step {plan['step']}")
    job = Job(cluster, directory, "3-after-nodes", "--resume", *options)
    job.wait()
    show_log(job, "restored", "step 300")
    same_losses(reference, job, "after the loss of two nodes")
    wait_state(cluster, STEPS, ("durable",))
    show_increments(cluster)
    say(f"    verify: {size(sum(part['bytes'] for part in cluster.verify(0)['parts']))} of shards and parity read and checked, no fault")

    title(5, "Kill everything, start again from the durable tier alone")
    cluster.kill(*range(NODES))
    cluster.start(*range(NODES))
    cluster.wait_up()
    plan = cluster.plan(0)
    show_plan(plan)
    check(plan["step"] == STEPS, f"expected step {STEPS} from the durable tier, got {plan['step']}")
    check(all(shard["source"] == "durable" for shard in plan["shards"]), "expected every shard from the durable tier")
    go_on = ("--steps", str(STEPS + 20), "--save-every", str(SAVE_EVERY))
    job = Job(cluster, directory, "4-after-all", "--resume", *go_on)
    job.wait()
    show_log(job, "restored")
    longer = Job(None, directory, "reference-longer", "--steps", str(STEPS + 20), "--no-save")
    longer.wait()
    same_losses(longer.losses, job, "after the loss of everything")
    # A full copy in a directory has `.metadata`: stock PyTorch reads it.
    full = sorted((directory.parent / "durable").glob("demo/run-*/step-*/.metadata"), key=lambda path: path.stat().st_mtime)
    if full:
        folder = full[-1].parent
        command = [sys.executable, "-W", "ignore", str(HERE / "stock_read.py"), str(folder)]
        read = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        check(read.returncode == 0, f"stock PyTorch could not read {folder}: {read.stderr[-400:]}")
        say(f"    stock PyTorch, without us, reads the full copy {folder.relative_to(directory.parent)}: {read.stdout.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s3", action="store_true", help="a real S3 server as durable tier, instead of a directory")
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo" / "run", help="where everything goes")
    args = parser.parse_args()
    started = time.monotonic()
    cluster = None
    try:
        durable, environment = durable_tier(args.directory, args.s3)
        trickle = f'increments = {INCREMENTS}\nrate = "{TRICKLE_RATE}"\n'
        cluster = Cluster(args.directory, trickle + durable, DURABLE_EVERY, 9300, environment)
        demo(cluster, args.directory)
    except (CheckFailed, subprocess.SubprocessError, OSError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        end_all(cluster)
        if args.s3:
            subprocess.run(["bash", str(ROOT / "tests" / "s3" / "ceph.sh"), "stop", str(args.directory.parent / "s3")], check=False)
    say(f"\nAll checks passed in {time.monotonic() - started:.0f} s. Logs and configurations are in {os.path.relpath(args.directory)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
