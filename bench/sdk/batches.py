"""How long a restarted process waits for its next batch: `ResumableLoader` over torchdata's `StatefulDataLoader`, and that alone.

Each figure is of a new process, which gets the state that the killed one had left at the same batch. Both have the same data, order, and
workers, and the batch that comes first is compared. Called with arguments it is that process.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

#: Samples of so many tokens, of which each takes so many seconds to get: a batch of 256 KiB takes 32 ms of one worker.
TOKENS, BATCH, SECONDS, SAMPLES, WORKERS = 2048, 16, 0.002, 16_000, 2
TAKEN = 120


def loader():
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, at):
            time.sleep(SECONDS)
            return torch.arange(at, at + TOKENS)

    made = torch.Generator().manual_seed(3)
    return StatefulDataLoader(Tokens(), batch_size=BATCH, shuffle=True, num_workers=WORKERS, generator=made)


def process(kind: str, job: str, state: Path) -> None:
    """`begin`: takes batches and waits to be killed. `resume`: how long the next one takes, in milliseconds, and what it is. `all`: seconds for
    as many batches."""
    import torch
    from storaged.data import ResumableLoader

    torch.set_num_threads(1)
    began = time.perf_counter()
    made = ResumableLoader(loader()) if kind == "ours" else loader()
    if job == "resume":
        made.load_state_dict(torch.load(state, weights_only=False))
    batches = iter(made)
    first = next(batches)
    waited = time.perf_counter() - began
    if job == "resume":
        print(json.dumps({"ms": waited * 1000, "first": int(first.sum())}), flush=True)
        os._exit(0)
    began = time.perf_counter()
    for _ in range(TAKEN - 1):
        next(batches)
    if job == "all":
        print(json.dumps({"s": time.perf_counter() - began}), flush=True)
        os._exit(0)
    torch.save(made.state_dict(), state)
    time.sleep(0.5)
    print(json.dumps({}), flush=True)
    signal.pause()


def run(kind, job, state, environment):
    command = [sys.executable, __file__, kind, job, str(state)]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    line = started.stdout.readline()
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    return json.loads(line)


def next_batches(daemon, folder, out, rounds):
    """What is missing, or None."""
    try:
        import torchdata.stateful_dataloader  # noqa: F401
    except ImportError:
        return "torchdata is not installed: no next batches"
    waits, walls, firsts = {"ours": [], "theirs": []}, {"ours": [], "theirs": []}, set()
    for round_ in range(rounds + 1):
        for kind in waits:
            environment = os.environ | {
                "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": f"batches-{round_}", "OMP_NUM_THREADS": "1",
            }
            state = Path(folder) / f"{kind}.pt"
            run(kind, "begin", state, environment)
            resumed = run(kind, "resume", state, environment)
            whole = run(kind, "all", state, environment)
            if round_:
                waits[kind].append(resumed["ms"])
                walls[kind].append(whole["s"])
                firsts.add(resumed["first"])
    if len(firsts) != 1:
        raise SystemExit(f"the batch that came next is not the same: {firsts}")
    out["next_batch_ms"] = round(statistics.median(waits["ours"]), 1)
    out["next_batch_ms_stateful_alone"] = round(statistics.median(waits["theirs"]), 1)
    out["batches_slowdown"] = round(statistics.median(walls["ours"]) / statistics.median(walls["theirs"]), 3)
    return None


if __name__ == "__main__":
    process(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
