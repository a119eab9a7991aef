"""Shows the bytes that sharding moves in one training step, per weight, and what each option saves. Needs no GPU.

::

    python -m benchmarks.traffic                                   # starts 2 ranks on this machine
    python -m benchmarks.traffic --ranks 4 --layers 8 --json traffic.json
    torchrun --nproc-per-node 4 -m benchmarks.traffic              # or as any distributed program

The figures are counted by the engine (``EtpRuntime.counters``), not timed, so they hold on any hardware: bytes are
what one rank receives for its gathers and sends for its reductions.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing.spawn import spawn

import etp
from benchmarks.command_line import writable_file


@dataclass(frozen=True)
class Sizes:
    """The model: token embedding, blocks of a gated MLP, an untied head."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    microbatches: int


@dataclass
class WeightTraffic:
    """One weight's share of a step."""

    gathers: int = 0
    gather_bytes: int = 0
    reductions: int = 0
    reduce_bytes: int = 0


@dataclass
class Row:
    """One configuration's step.

    Attributes:
        name: what the table calls it.
        options: what was passed to :class:`etp.EtpConfig`.
        slot_bytes: storage that gathered weights take.
        gradient_bytes: storage that gradients take on their way, at full size.
        weights: by name, in the order of the first forward.
    """

    name: str
    options: dict[str, Any]
    slot_bytes: int = 0
    gradient_bytes: int = 0
    weights: dict[str, WeightTraffic] = field(default_factory=dict)

    def total(self, what: str) -> int:
        """Sum over weights of one of :class:`WeightTraffic`'s figures."""
        return sum(getattr(weight, what) for weight in self.weights.values())


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden)
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to the same."""
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def build(sizes: Sizes) -> nn.Module:
    """The same weights on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(sizes.vocabulary, sizes.hidden),
        *(Block(sizes) for _ in range(sizes.layers)),
        nn.Linear(sizes.hidden, sizes.vocabulary, bias=False),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes, step: int) -> None:
    """Forward and backward of all microbatches, and one optimizer step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    for _ in range(sizes.microbatches):
        tokens = torch.randint(sizes.vocabulary, (2, 9), generator=generator)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    etp.wait_async_comms(model)
    optimizer.step()


def bytes_per_element(runtimes: Iterable[etp.EtpRuntime], microbatches: int) -> float:
    """Bytes per element of a weight and microbatch, as counted by the engine since its counters were reset.

    Of whole weights: N ranks send (N - 1) / N of them. Without sums over microbatches, theory has a gather in the
    forward pass, one in the backward pass, and a reduction: 2 + 2 + 2 bytes in bf16.

    Args:
        runtimes: a model's, with weights of any formats.
        microbatches: so many were trained with.
    """
    groups = [group for runtime in runtimes for group in runtime.groups]
    elements = sum(len(group.shards) * math.prod(group.layout.shape) for group in groups)
    return sum(group.gathered_bytes + group.reduced_bytes for group in groups) / elements / microbatches


def measure(name: str, options: dict[str, Any], sizes: Sizes) -> tuple[Row, Row]:
    """Traffic of the third step: orders of visits are learned by then.

    Returns:
        What was counted, and what it would have been if every visit gathered its weight.
    """
    model = build(sizes)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group; start this script as its docstring says")
    runtime = etp.shard_module(model, group, config=etp.EtpConfig(**options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        runtime.counters.reset()
        train_step(model, optimizer, sizes, step)
    counters, held = runtime.counters, etp.resident_nbytes(model)
    forward, backward = runtime.passes.forward_order.visits, runtime.passes.backward_order.visits
    visits = [reading.group for reading in (*forward, *backward)]
    row = Row(name, options, held["gather_slots"], held["gradient_buffers"])
    every = Row("every visit gathers", options, held["gather_slots"], held["gradient_buffers"])
    for weight in [reading.group for reading in forward]:
        key, times = weight.name, sizes.microbatches * visits.count(weight)
        row.weights[key] = WeightTraffic(
            counters.gathers.get(key, 0),
            counters.gather_bytes.get(key, 0),
            counters.reductions.get(key, 0),
            counters.reduce_bytes.get(key, 0),
        )
        received = weight.spec.nbytes * (weight.size - 1) // weight.size
        every.weights[key] = WeightTraffic(
            times, times * received, row.weights[key].reductions, row.weights[key].reduce_bytes
        )
    return row, every


def run(sizes: Sizes) -> list[Row]:
    """All configurations, one after the other."""
    weights = sum(p.numel() * p.dtype.itemsize for p in build(sizes).parameters() if p.dim() > 1)
    settings: list[tuple[str, dict[str, Any]]] = [
        ("default", {}),
        ("no look-ahead", {"prefetch_depth": 0}),
        ("half resident", {"resident_bytes": weights // 2}),
        ("all resident", {"resident_bytes": 2 * weights}),
        ("... across forwards", {"resident_bytes": 2 * weights, "reuse_across_forwards": True}),
        ("one reduction", {"reduce_once_per_iteration": True}),
        (
            "all of these",
            {"resident_bytes": 2 * weights, "reuse_across_forwards": True, "reduce_once_per_iteration": True},
        ),
    ]
    rows: list[Row] = []
    for name, options in settings:
        row, every = measure(name, options, sizes)
        rows += [row] if rows else [every, row]
    return rows


def report(rows: list[Row], sizes: Sizes, ranks: int, console: Console) -> None:
    """Print both tables; they fit 80 columns."""
    options = Table(title=f"One step of {sizes.microbatches} microbatches over {ranks} ranks, KiB per rank")
    for column in ("configuration", "gathered", "reduced", "moved", "share", "slots", "buffers"):
        options.add_column(column, justify="left" if column == "configuration" else "right")
    default = rows[1].total("gather_bytes") + rows[1].total("reduce_bytes")
    for row in rows:
        gathered, reduced = row.total("gather_bytes"), row.total("reduce_bytes")
        options.add_row(
            row.name,
            kib(gathered),
            kib(reduced),
            kib(gathered + reduced),
            f"{(gathered + reduced) / default:.0%}",
            kib(row.slot_bytes),
            kib(row.gradient_bytes),
        )
    console.print(options)
    weights = Table(title="By weight, default configuration, KiB")
    for column in ("weight", "gathers", "gathered", "reductions", "reduced"):
        weights.add_column(column, justify="left" if column == "weight" else "right")
    for name, weight in rows[1].weights.items():
        weights.add_row(
            name, str(weight.gathers), kib(weight.gather_bytes), str(weight.reductions), kib(weight.reduce_bytes)
        )
    console.print(weights)


def kib(nbytes: int) -> str:
    """Bytes as a number of KiB."""
    return f"{nbytes / 1024:,.0f}"


def one_rank(rank: int, ranks: int, store: str | None, arguments: argparse.Namespace) -> None:
    """Join the group, measure, and let rank 0 report."""
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    sizes = Sizes(arguments.layers, arguments.hidden, arguments.ffn, arguments.vocabulary, arguments.microbatches)
    rows = run(sizes)
    if rank == 0:
        report(rows, sizes, ranks, Console(width=arguments.width))
        if arguments.json is not None:
            content = {"ranks": ranks, "model": asdict(sizes), "configurations": [asdict(row) for row in rows]}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    # The models refer to the group in cycles; gloo's threads must end with the group, not with the interpreter.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Read the command line; start the ranks unless torchrun has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start; ignored under torchrun")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--json", type=writable_file, help="also write all figures to this file")
    parser.add_argument("--width", type=int, help="columns of the tables; the terminal's if not given")
    arguments = parser.parse_args(argv)
    for name in ("ranks", "layers", "hidden", "ffn", "vocabulary", "microbatches"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    if (ranks := int(os.environ.get("WORLD_SIZE", arguments.ranks))) < 2:
        parser.error(f"{ranks} rank has all shards, so nothing moves; start at least 2")
    if "RANK" in os.environ:
        one_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(one_rank, args=(arguments.ranks, store, arguments), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
