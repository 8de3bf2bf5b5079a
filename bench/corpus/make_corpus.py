"""Trains small real models on the CPU and keeps successive states of them: what the delta benches are measured on.

Each case is a directory with three raw files, t.bin, t1.bin and t10.bin: the state after some warm-up, one step later
and ten steps later, as the bytes of the tensors one after the other in a fixed order. corpus.json describes them. The
same machine, torch and seed give the same bytes. The text that the models learn is the Python standard library's own.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = 1
MARKS = {0: "t", 1: "t1", 10: "t10"}
LETTERS = 128
# What models of this depth are trained with (GPT-3 small). The higher it is, the less consecutive states agree.
RATE = 6e-4


@dataclass(frozen=True)
class Scale:
    """How large the models are and how long they train before the first state is kept."""

    width: int = 384
    layers: int = 5
    context: int = 128
    batch: int = 8
    warm_up: int = 240
    rows: int = 65536
    expert_width: int = 192
    experts: int = 16
    lines: int = 3_500_000

    @staticmethod
    def quick() -> Scale:
        return Scale(width=128, layers=3, context=64, warm_up=50, rows=8192, expert_width=64, experts=8, lines=100_000)


@dataclass
class Corpus:
    """Where the states go, and what corpus.json will say about them."""

    out: Path
    cases: dict[str, dict] = field(default_factory=dict)

    def begin(self) -> None:
        """The index goes first and comes back last: a run that was cut short leaves no corpus."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "corpus.json").unlink(missing_ok=True)

    def keep(self, name: str, element_size: int, mark: str, parts: Iterable[Tensor | bytes], description: str) -> None:
        path = self.out / name / f"{mark}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for part in parts:
                file.write(part if isinstance(part, bytes) else raw(part))
        blank = {"name": name, "element_size": element_size, "description": description, "files": {}, "lengths": {}}
        case = self.cases.setdefault(name, blank)
        case["files"][mark] = f"{name}/{mark}.bin"
        case["lengths"][mark] = path.stat().st_size

    def finish(self, seed: int, scale: Scale) -> None:
        about = {"version": VERSION, "torch": torch.__version__, "seed": seed, "scale": vars(scale)}
        text = json.dumps({**about, "cases": list(self.cases.values())}, indent=2)
        (self.out / "corpus.json").write_text(text + "\n", encoding="utf-8")


def raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def library() -> list[bytes]:
    """The standard library's modules as ASCII, largest first: real text, and every machine with Python has it."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [file.read_text("utf-8", "replace").encode("ascii", "replace") for file in files]
    return sorted(sources, key=len, reverse=True)


def letters(source: bytes) -> Tensor:
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def windows(text: Tensor, count: int, length: int, dice: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length, (count,), generator=dice)
    return torch.stack([text[start : start + length] for start in starts])


def at_marks(first: int, one_step: Callable[[int], None], keep: Callable[[str], None]) -> None:
    """Takes `first` steps, then ten more, and keeps the states t, t+1 and t+10."""
    for step in range(1, first + 11):
        one_step(step)
        if step - first in MARKS:
            keep(MARKS[step - first])


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.mix(self.norm(x)).view(batch, length, 3, width // 64, 64)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(seen.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Top-1 experts, one per sequence; a bias on the choice, not on the loss, keeps the load even."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, 2 * width) for _ in range(experts))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x.mean(dim=1)).softmax(dim=-1)
        chosen = (share.detach() + self.bias).argmax(dim=-1)
        load = torch.bincount(chosen, minlength=len(self.experts)).float()
        self.bias += 0.02 * (load.mean() - load).sign()
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().flatten()
            weight = share[rows, expert].view(-1, 1, 1)
            out = out.index_add(0, rows, weight * self.experts[expert](x[rows]))
        return x + out


class Transformer(nn.Module):
    """Reads letters; `features` is what a head works on."""

    def __init__(self, width: int, context: int, layers: int, feed_forward: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(context, width)
        blocks = [nn.Sequential(Attention(width), feed_forward()) for _ in range(layers)]
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, LETTERS)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if "out" in name or "down" in name else 0.02)

    def features(self, text: Tensor) -> Tensor:
        return self.norm(self.blocks(self.letters(text) + self.places(torch.arange(text.shape[1]))))

    def loss(self, text: Tensor) -> Tensor:
        logits = self.head(self.features(text[:, :-1]))
        return F.cross_entropy(logits.reshape(-1, LETTERS).float(), text[:, 1:].reshape(-1))


def dense_transformer(scale: Scale) -> Transformer:
    width = scale.width
    return Transformer(width, scale.context, scale.layers, lambda: FeedForward(width, 4 * width))


def moments(optimizer: torch.optim.Optimizer, weights: list[Tensor], kind: str) -> list[Tensor]:
    """The optimizer's moments in the order of the weights; what was never stepped has zeros."""
    return [optimizer.state[weight].get(kind, torch.zeros_like(weight)) for weight in weights]


def adam_state(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> list[Tensor]:
    return moments(optimizer, weights, "exp_avg") + moments(optimizer, weights, "exp_avg_sq")


class Losses:
    """Shows that a case has learned: the mean of its first and of its last ten losses."""

    def __init__(self, name: str) -> None:
        self.name, self.values, self.started = name, [], time.monotonic()

    def add(self, loss: Tensor) -> None:
        self.values.append(loss.item())

    def say(self) -> None:
        spent = time.monotonic() - self.started
        first, last = sum(self.values[:10]) / 10, sum(self.values[-10:]) / 10
        line = f"{self.name}: {len(self.values)} steps in {spent:.1f} s, loss {first:.3f} -> {last:.3f}"
        print(line, file=sys.stderr, flush=True)


def make_dense(corpus: Corpus, scale: Scale, text: Tensor, dice: torch.Generator) -> Transformer:
    """Mixed precision as large jobs do it: bf16 weights compute, AdamW steps the fp32 master, a cast makes the next
    weights. Then the same job goes on at the low learning rate that its schedule would end with. Returns the model
    with the master's weights."""
    model = dense_transformer(scale)
    master = [weight.detach().clone() for weight in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.AdamW(master, weight_decay=0.1, fused=True)
    losses = Losses("dense")

    def one_step(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        model.zero_grad()
        loss = model.loss(windows(text, scale.batch, scale.context + 1, dice))
        loss.backward()
        losses.add(loss)
        for weight, full in zip(model.parameters(), master, strict=True):
            full.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, full in zip(model.parameters(), master, strict=True):
                weight.copy_(full)

    def keep(mark: str) -> None:
        about = f"dense transformer under AdamW, learning rate {RATE}: "
        corpus.keep("adamw_fp32_master", 4, mark, master, about + "fp32 master weights")
        corpus.keep("adamw_bf16_weight", 2, mark, model.parameters(), about + "bf16 weights")
        for kind, says in (("exp_avg", "first moment"), ("exp_avg_sq", "second moment")):
            corpus.keep(f"adamw_{kind}", 4, mark, moments(optimizer, master, kind), f"{about}fp32 {says}")

    def keep_low(mark: str) -> None:
        corpus.keep("adamw_fp32_low_lr", 4, mark, master, "the dense job's fp32 master at learning rate 1e-5")

    at_marks(scale.warm_up, lambda step: one_step(RATE * min(1.0, step / 30)), keep)
    at_marks(5, lambda step: one_step(1e-5), keep_low)
    losses.say()
    model.float()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(master), model.parameters())
    return model


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


def copy_of(model: Transformer, scale: Scale) -> Transformer:
    copy = dense_transformer(scale)
    copy.load_state_dict(model.state_dict())
    return copy.requires_grad_(False)


def fine_tune(
    name: str, trained: list[Tensor], loss_of: Callable[[], Tensor], first: int, keep: Callable, rate: float
) -> None:
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    losses = Losses(name)

    def one_step(_: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        losses.add(loss)
        optimizer.step()

    at_marks(first, one_step, lambda mark: keep(mark, adam_state(optimizer, trained)))
    losses.say()


def make_lora(corpus: Corpus, scale: Scale, base: Transformer, text: Tensor, dice: torch.Generator) -> None:
    """Adapters of rank 4 on the attention of a frozen base, tuned to text that the base saw little of."""
    model = copy_of(base, scale)
    for block in model.blocks:
        block[0].mix = LowRank(block[0].mix, 4)
    trained = [weight for weight in model.parameters() if weight.requires_grad]

    def keep(mark: str, optimizer_state: list[Tensor]) -> None:
        about = "whole state of a LoRA run: frozen fp32 base, rank 4 adapters, their AdamW moments"
        corpus.keep("lora", 4, mark, [*model.parameters(), *optimizer_state], about)

    fine_tune("lora", trained, lambda: model.loss(windows(text, 4, scale.context + 1, dice)), 50, keep, 5e-4)


def make_frozen(corpus: Corpus, scale: Scale, base: Transformer, sources: list[bytes], dice: torch.Generator) -> None:
    """A linear head that tells from which of 16 modules a snippet is, on a frozen encoder."""
    encoder, head = copy_of(base, scale), nn.Linear(scale.width, 16)
    modules = [letters(source) for source in sources[:16]]

    def loss() -> Tensor:
        labels = torch.randint(16, (16,), generator=dice)
        snippets = torch.cat([windows(modules[label], 1, scale.context, dice) for label in labels])
        return F.cross_entropy(head(encoder.features(snippets).mean(dim=1)), labels)

    def keep(mark: str, optimizer_state: list[Tensor]) -> None:
        parts = [*encoder.parameters(), *head.parameters(), *optimizer_state]
        corpus.keep("frozen", 4, mark, parts, "frozen fp32 encoder, tuned linear head, the head's AdamW moments")

    fine_tune("frozen", list(head.parameters()), loss, 50, keep, 3e-3)


def make_sparse(corpus: Corpus, scale: Scale, text: Tensor, dice: torch.Generator) -> None:
    """Hashed n-grams (2 to 5 letters) predict the next letter; a step touches the rows of its batch alone."""
    dim, batch = 64, 128
    table, head = nn.EmbeddingBag(scale.rows, dim, mode="sum", sparse=True), nn.Linear(dim, LETTERS)
    nn.init.normal_(table.weight, std=0.1)
    sparse, dense = torch.optim.SparseAdam(table.parameters(), lr=1e-2), torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = Losses("sparse_embedding")

    def rows_of(context: Tensor) -> Tensor:
        hashes, mixed = [], torch.zeros(len(context), dtype=torch.long)
        for back in range(1, 6):
            mixed = (mixed * 0x5BD1E995 + context[:, -back] + back) & 0x7FFF_FFFF
            hashes.append(((mixed * 0x9E37_79B1) >> 13) % scale.rows)
        return torch.stack(hashes[1:], dim=1)

    def one_step(_: int) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        seen = windows(text, batch, 6, dice)
        loss = F.cross_entropy(head(table(rows_of(seen[:, :5]))), seen[:, 5])
        loss.backward()
        losses.add(loss)
        sparse.step()
        dense.step()

    def keep(mark: str) -> None:
        parts = [table.weight, *adam_state(sparse, [table.weight])]
        corpus.keep("sparse_embedding", 4, mark, parts, "embedding of hashed n-grams and its SparseAdam moments")

    at_marks(2 * scale.warm_up, one_step, keep)
    losses.say()


def make_moe(corpus: Corpus, scale: Scale, sources: list[bytes], dice: torch.Generator) -> None:
    """Two layers of experts; a batch comes from one module of the library, so it wakes few of them. AdamW skips a
    weight that has no gradient: it neither decays nor moves."""
    width = scale.expert_width
    model = Transformer(width, scale.context, 2, lambda: Experts(width, scale.experts))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    modules = [letters(source) for source in sources[:16]]
    losses = Losses("moe")

    def one_step(_: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        module = modules[int(torch.randint(len(modules), (1,), generator=dice))]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(windows(module, 4, scale.context + 1, dice))
        loss.backward()
        losses.add(loss)
        optimizer.step()

    def keep(mark: str) -> None:
        parts = [*weights, *adam_state(optimizer, weights)]
        corpus.keep("moe", 4, mark, parts, "mixture of experts, top-1, mostly idle: fp32 weights and AdamW moments")

    at_marks(scale.warm_up // 2, one_step, keep)
    losses.say()


def make_pickled(corpus: Corpus, scale: Scale, sources: list[bytes], seed: int) -> None:
    """The Python side of a training loop: losses, word pair counts, recent lines, the order still to read. Each step
    makes some of them longer and some shorter, so nearly all bytes move and few are new."""
    dice, lines = random.Random(seed), b"\n".join(sources).decode("ascii").splitlines()
    order = [dice.randrange(len(lines)) for _ in range(scale.lines)]
    pairs: Counter[str] = Counter()
    state = {"losses": [], "recent": [], "order": [], "pairs": pairs}
    losses = Losses("pickled")

    def one_step(step: int) -> None:
        batch = [lines[index] for index in order[64 * step - 64 : 64 * step]]
        found = [pair for line in batch for pair in re.findall(r"(?=\b(\w+\W+\w+))", line)]
        missed = sum(pair not in pairs for pair in found) / max(1, len(found))
        pairs.update(found)
        state["losses"].append(missed)
        losses.add(torch.tensor(missed))
        # Copies, because pickle writes a second reference to one string as a number that changes when others come.
        state["recent"] = (state["recent"] + [f"{line}\n" for line in batch])[-40_000:]

    def keep(mark: str) -> None:
        state["order"] = order[64 * len(state["losses"]) :]
        corpus.keep("pickled", 1, mark, [pickle.dumps(state, 5)], "pickled dict of growing and shrinking containers")

    at_marks(4 * scale.warm_up, one_step, keep)
    losses.say()


def changed(old: numpy.ndarray, new: numpy.ndarray, size: int) -> float:
    """The share of pieces of `size` bytes of the new state that differ from the old one; a longer end counts."""
    same = min(len(old), len(new)) // size * size
    pieces = -(-len(new) // size)
    differs = (old[:same] != new[:same]).reshape(-1, size).any(axis=1).sum()
    return (int(differs) + pieces - same // size) / pieces


def say_table(corpus: Corpus) -> None:
    print(f"{'case':<20}{'MiB':>7}{'element':>9}   changed from t to t+1: elements, 4 KiB, 64 KiB")
    for case in corpus.cases.values():
        old, new = (numpy.fromfile(corpus.out / case["files"][mark], numpy.uint8) for mark in ("t", "t1"))
        shares = [100 * changed(old, new, size) for size in (case["element_size"], 4096, 65536)]
        line = "".join(f"{share:8.2f} %" for share in shares)
        print(f"{case['name']:<20}{len(old) / 2**20:7.1f}{case['element_size']:>9}{line}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("target/corpus"), help="directory to write (target/corpus)")
    parser.add_argument("--seed", type=int, default=2009, help="of the weights and the order of the data")
    parser.add_argument("--quick", action="store_true", help="small states, for trying things out: not for figures")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    started = time.monotonic()
    scale = Scale.quick() if args.quick else Scale()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    dice = torch.Generator().manual_seed(args.seed)
    corpus, sources = Corpus(args.out), library()
    text, other = letters(b"".join(sources[16:])), letters(sources[0])
    corpus.begin()
    base = make_dense(corpus, scale, text, dice)
    make_lora(corpus, scale, base, other, dice)
    make_frozen(corpus, scale, base, sources, dice)
    make_sparse(corpus, scale, text, dice)
    make_moe(corpus, scale, sources, dice)
    make_pickled(corpus, scale, sources, args.seed)
    corpus.finish(args.seed, scale)
    say_table(corpus)
    print(f"{args.out}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
