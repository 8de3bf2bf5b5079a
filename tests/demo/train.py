"""A real training job: a small character-level transformer, sharded with FSDP2, saved through storaged.

Started once per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set (torchrun does it). Deterministic bit for
bit: the loss at a step depends on the seed and the step alone, however often the job was restarted before.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 3, 64, 4


def corpus() -> torch.Tensor:
    """Prose from a small grammar: enough structure for the loss to fall, and the same text everywhere."""
    dice = random.Random(2009)
    who = ["the old keeper", "a young sailor", "the clockmaker", "her brother", "the last traveller", "a quiet child"]
    did = ["remembered", "carried", "repaired", "counted", "forgot", "painted", "buried"]
    what = ["the brass lantern", "a map of the coast", "seven letters", "the broken wheel", "an unfinished song"]
    where = ["by the river", "under the bridge", "before the storm", "at the edge of town", "when winter came"]
    lines = []
    for _ in range(4000):
        first = f"{dice.choice(who)} {dice.choice(did)} {dice.choice(what)} {dice.choice(where)}"
        then = f", and {dice.choice(who)} {dice.choice(did)} {dice.choice(what)}" if dice.random() < 0.4 else ""
        lines.append(f"{first}{then}.\n".capitalize())
    return torch.frombuffer(bytearray("".join(lines), "ascii"), dtype=torch.uint8).long()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.mix(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letters(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(text: torch.Tensor, seed: int, step: int, rank: int) -> torch.Tensor:
    """What a rank sees at a step: a function of its arguments, so a restart sees the same."""
    dice = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4096 + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=dice)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}


def put_back(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> int:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, namespace: str) -> int:
    """Loads the newest checkpoint, if there is one; the step that training goes on from."""
    from storaged.errors import NoCheckpointError
    from storaged.torch import StoragedLoadPlanner, StoragedReader

    reader = StoragedReader(namespace=namespace)
    try:
        plan = reader.resolve()
    except NoCheckpointError:
        say("nothing saved yet: starting from step 0")
        return 0
    say(f"plan: step {plan['step']} of run {plan['run']} ({plan['state']}), manifest {plan['manifest'][:12]}")
    for rank, length, source in plan["shards"]:
        say(f"plan: rank {rank}: {length / 2**20:.1f} MiB from {source}")
    for run, step, reason in plan["passed_over"]:
        say(f"plan: passed over step {step} of run {run}: {reason}")
    state = state_of(model, optimizer, 0)
    started = time.perf_counter()
    dcp.load(state, storage_reader=reader, planner=StoragedLoadPlanner())
    step = put_back(model, optimizer, state)
    say(f"restored step {step} in {time.perf_counter() - started:.2f} s")
    return step


class Saver:
    """Saves one checkpoint at a time, on a process group that training does not use."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.group = dist.new_group(backend="gloo")
        self.last = None

    def save(self, state: dict, step: int) -> None:
        from storaged.torch import StoragedWriter

        self.finish()
        writer = StoragedWriter(step, namespace=self.namespace, process_group=self.group)
        started = time.perf_counter()
        result = dcp.async_save(state, storage_writer=writer, process_group=self.group)
        writer.handle.staged.result(timeout=120)
        say(f"step {step}: staged, training blocked {time.perf_counter() - started:.3f} s")
        self.last = getattr(result, "upload_completion", result)

    def finish(self) -> None:
        if self.last is not None:
            self.last.result(timeout=180)
            self.last = None


def train(args: argparse.Namespace) -> None:
    text, rank = corpus(), dist.get_rank()
    model, optimizer = build(args.seed)
    first = resume(model, optimizer, args.namespace) if args.resume else 0
    saver = None if args.no_save else Saver(args.namespace)
    for step in range(first + 1, args.steps + 1):
        batch = batch_of(text, args.seed, step, rank)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 128), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        report(args.losses, step, mean.item() / dist.get_world_size(), step == args.steps or step % 20 == 0)
        if saver is not None and step % args.save_every == 0:
            saver.save(state_of(model, optimizer, step), step)
    if saver is not None:
        saver.finish()


def report(path: str | None, step: int, loss: float, spoken: bool) -> None:
    if dist.get_rank() != 0:
        return
    if path:
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{step} {loss.hex()}\n")
    if spoken:
        say(f"step {step}: loss {loss:.4f}")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=20, metavar="N", help="save after every N steps")
    parser.add_argument("--losses", metavar="FILE", help="append 'step loss' lines, the loss as hex float (rank 0)")
    parser.add_argument("--namespace", default=os.environ.get("STORAGED_NAMESPACE", "demo"), help="the job's name")
    parser.add_argument("--seed", type=int, default=7, help="of the weights and the order of the data")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--no-save", action="store_true", help="save nothing: the reference run")
    args = parser.parse_args()
    if args.steps < 1 or args.save_every < 1:
        parser.error("--steps and --save-every must be at least 1")
    return args


def main() -> int:
    args = arguments()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Without the interpreter's shutdown: one of PyTorch's Gloo threads may still let go of the last tensor then, and
    # aborts the process because it finds no interpreter (seen with 2.15 in one run of five).
    os._exit(status)
