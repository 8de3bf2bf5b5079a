"""Several ranks on this machine, one process each: `several` starts them, and run as a script this file is one of them."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

LAYERS, COLUMNS = 16, 1024


def several(ranks, job, daemon, mib, rounds, port):
    """What rank 0 of a job measured."""
    workers = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": "ranks",
        }
        command = [sys.executable, "-W", "ignore", __file__, job, str(mib), str(rounds)]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE if rank == 0 else None, text=True))
    text = workers[0].communicate()[0]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"ranks of the job {job!r} ended with {codes}")
    return json.loads(text)


def main():
    import torch
    import torch.distributed as dist

    job, mib, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said = {"save": save, "load": load}[job](mib, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(said), flush=True)
    dist.barrier()
    os._exit(0)


def sharded(mib):
    """A state of so many MiB on all ranks together, its rows on the ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = mib * 2**20 // LAYERS // COLUMNS // 4
    # Rows that divide by no number of ranks.
    state = {f"layer{i}": zeros((rows + 1, COLUMNS), device_mesh=mesh, placements=[Shard(0)]) for i in range(LAYERS)}
    for tensor in state.values():
        torch.nn.init.uniform_(tensor.to_local())
    return state


def save(mib, rounds):
    """Times of the slowest rank, in ratio to a copy that all ranks make at once."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from storaged.torch import Checkpointer

    state, group = sharded(mib), dist.new_group(backend="gloo")
    locals_ = [tensor.to_local() for tensor in state.values()]
    copies = [torch.empty_like(tensor) for tensor in locals_]
    checkpointer = Checkpointer()
    folder = Path("/dev/shm") / f"bench-sdk-ranks-{os.environ['MASTER_PORT']}"
    steps = iter(range(1, 1000))

    def copied():
        for target, tensor in zip(copies, locals_):
            target.copy_(tensor)

    def stock():
        futures.append(dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder), process_group=group))

    futures = []
    methods = {
        "": (lambda: checkpointer.save(next(steps), state), checkpointer.wait),
        "dcp_async_": (stock, lambda: getattr(futures[-1], "upload_completion", futures[-1]).result()),
    }
    said = {}
    for name, (begin, end) in methods.items():
        rows = []
        for _ in range(rounds + 1):
            for tensor in locals_:
                tensor.add_(1)
            rows.append(slowest(copied, begin, end))
        said[f"ranks4_{name}block_vs_memcpy"] = median(rows, lambda row: row[1] / row[0])
        said[f"ranks4_{name}total_vs_memcpy"] = median(rows, lambda row: (row[1] + row[2]) / row[0])
    rows = [slowest(copied, lambda: checkpointer.load(state)) for _ in range(rounds + 1)]
    said["ranks4_load_vs_memcpy"] = median(rows, lambda row: row[1] / row[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return said


def load(mib, rounds):
    """With another number of ranks than saved: the bytes that are opened, in ratio to those that are needed."""
    import torch
    import torch.distributed as dist
    from storaged.torch import Checkpointer, _reader

    opened, needed = [0], [0]
    merged = _reader.merged

    def counted(spans, chunk, length):
        ranges = merged(spans, chunk, length)
        opened[0] += sum(count for _, count in ranges)
        needed[0] += sum(count for _, count in spans)
        return ranges

    _reader.merged = counted
    state = sharded(mib)
    Checkpointer().load(state)
    both = torch.tensor([opened[0], needed[0]])
    dist.all_reduce(both)
    assert both[1] == sum(tensor.numel() * 4 for tensor in state.values()), "some bytes were not asked for"
    return {"reshard_read_amplification": round(both[0].item() / both[1].item(), 4)}


def slowest(*calls):
    """Seconds of each call on the rank where it took longest; all ranks begin each together."""
    import torch
    import torch.distributed as dist

    took = []
    for call in calls:
        dist.barrier()
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    longest = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


def median(rows, ratio):
    """Without the first round, which warms up."""
    return round(statistics.median(map(ratio, rows[1:])), 3)


if __name__ == "__main__":
    main()
