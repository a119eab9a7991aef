"""Bytes and time of one layer's gathers and reduction over groups that span hosts, in closed form. Needs no GPU.

::

    python -m benchmarks.hosts                                      # a Llama-70B layer, 2 to 64 hosts of 8 GPUs
    python -m benchmarks.hosts --shape llama8b-8l --per-host 4 --within-host 250 --between-hosts 25

Assumptions: every GPU has a network interface of its own, and all links and interfaces move their full rate in both
directions at once. NCCL gathers in rings through all ranks, host by host, one for each interface, so that a host's
interfaces carry equal shares. Nothing else uses the links. A step of a collective takes the time of its slowest link,
and a fixed time for each of the hops that follow one another.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from benchmarks.sweep.step_time import Machine
from benchmarks.train_shapes import SHAPES, WEIGHT_BYTES, Shape

HOSTS = (2, 4, 8, 16, 32, 64)
SUM_BYTES = 4
HOP_WITHIN_S = 2e-6
HOP_BETWEEN_S = 10e-6


@dataclass(frozen=True)
class Traffic:
    """The traffic of one GPU in one collective. It sends as many bytes as it receives.

    Attributes:
        network: bytes through its network interface.
        links: bytes from the other GPUs of its host.
        network_hops: hops between hosts, one after the other.
        link_hops: hops within hosts, one after the other.
    """

    network: float
    links: float
    network_hops: int
    link_hops: int

    def network_s(self, machine: Machine) -> float:
        """Seconds on the network."""
        return self.network / machine.between_hosts + self.network_hops * HOP_BETWEEN_S

    def links_s(self, machine: Machine) -> float:
        """Seconds on the host's links."""
        return self.links / machine.within_host + self.link_hops * HOP_WITHIN_S


def ring(nbytes: float, hosts: int, per_host: int) -> Traffic:
    """NCCL's all-gather or reduce-scatter of ``nbytes``: of every ring's N links one each enters each host."""
    ranks = hosts * per_host
    received = nbytes * (ranks - 1) / ranks
    return Traffic(received / per_host, received * (per_host - 1) / per_host, hosts - 1, ranks - hosts)


def all_to_all(nbytes: float, hosts: int, per_host: int) -> Traffic:
    """``c10d``'s reduction with fp32 accumulation: every rank sends its chunk of ``nbytes`` to every other one."""
    ranks = hosts * per_host
    return Traffic(nbytes * (ranks - per_host) / ranks, nbytes * (per_host - 1) / ranks, 1, 1)


def hierarchical(nbytes: float, hosts: int, per_host: int, column_bytes: float | None = None) -> Traffic:
    """Both steps of ``hierarchical``; ``column_bytes`` are those of a whole column on the network if they differ."""
    column = nbytes / per_host if column_bytes is None else column_bytes
    # One gather or all-to-all over the hosts, whose ring has a hop to each of the others.
    return Traffic(column * (hosts - 1) / hosts, nbytes * (per_host - 1) / per_host, hosts - 1, 1)


@dataclass(frozen=True)
class Layer:
    """What one layer takes with one transport: a gather for forward and one for backward, and a reduction.

    Attributes:
        gather: of its weights.
        reduction: of their gradients.
        seconds: of all three, one after the other.
    """

    gather: Traffic
    reduction: Traffic
    seconds: float


def c10d_layer(elements: int, hosts: int, per_host: int, machine: Machine, *, fp32: bool = True) -> Layer:
    """A layer over NCCL; gradients travel in bf16."""
    nbytes = elements * WEIGHT_BYTES
    gather = ring(nbytes, hosts, per_host)
    reduction = all_to_all(nbytes, hosts, per_host) if fp32 else gather
    # Links and network work at once.
    seconds = [max(each.network_s(machine), each.links_s(machine)) for each in (gather, reduction)]
    return Layer(gather, reduction, 2 * seconds[0] + seconds[1])


def hierarchical_layer(elements: int, hosts: int, per_host: int, machine: Machine) -> Layer:
    """A layer in two steps: gradients in bf16 within hosts, their sums in fp32 between them.

    The steps of neighbouring gathers overlap, those of reductions do not: they are on one stream.
    """
    nbytes = elements * WEIGHT_BYTES
    gather = hierarchical(nbytes, hosts, per_host)
    reduction = hierarchical(nbytes, hosts, per_host, elements * SUM_BYTES / per_host)
    gather_s = max(gather.network_s(machine), gather.links_s(machine))
    return Layer(gather, reduction, 2 * gather_s + reduction.network_s(machine) + reduction.links_s(machine))


def layer_elements(shape: Shape) -> int:
    """Elements of one layer's weights."""
    two, one = (
        sum(n * rows * columns for weights in (each.weights(), each.expert_weights()) for n, rows, columns in weights)
        for each in (replace(shape, layers=2), replace(shape, layers=1))
    )
    return two - one


def table(shape: Shape, per_host: int, machine: Machine) -> str:
    """Markdown: megabytes through each network interface, and milliseconds of a layer."""
    elements = layer_elements(shape)
    compute = replace(shape, layers=2).flops() - replace(shape, layers=1).flops()
    header = (
        "| hosts | GPUs | gather, MB: `c10d` | `hierarchical` | reduction, MB: `c10d` | `hierarchical` "
        "| layer, ms: `c10d` | `c10d`, bf16 sums | `hierarchical` |"
    )
    lines = [header, "|---|---|---|---|---|---|---|---|---|"]
    for hosts in HOSTS:
        one = c10d_layer(elements, hosts, per_host, machine)
        rounded = c10d_layer(elements, hosts, per_host, machine, fp32=False)
        two = hierarchical_layer(elements, hosts, per_host, machine)
        megabytes = (one.gather, two.gather, one.reduction, two.reduction)
        cells = [str(hosts), str(hosts * per_host), *(f"{each.network / 1e6:,.0f}" for each in megabytes)]
        cells += [f"{layer.seconds * 1e3:.1f}" for layer in (one, rounded, two)]
        lines.append(f"| {' | '.join(cells)} |")
    milliseconds = compute / machine.flops_per_s * 1e3
    tokens = f"{milliseconds:.1f} ms of arithmetic for a microbatch of {shape.tokens():,} tokens"
    lines += ["", f"{elements / 1e6:.1f} M weights a layer; {tokens}."]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine = Machine()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama70b-40l", help="default: %(default)s")
    parser.add_argument("--per-host", type=int, default=machine.ranks_per_host, help="GPUs; default: %(default)s")
    parser.add_argument("--within-host", type=float, default=machine.within_host / 1e9, metavar="GB/S")
    parser.add_argument("--between-hosts", type=float, default=machine.between_hosts / 1e9, metavar="GB/S")
    options = parser.parse_args()
    if options.per_host < 1 or min(options.within_host, options.between_hosts) <= 0:
        parser.error("--per-host, --within-host and --between-hosts must be positive")
    machine = replace(machine, within_host=options.within_host * 1e9, between_hosts=options.between_hosts * 1e9)
    print(table(SHAPES[options.shape], options.per_host, machine))


if __name__ == "__main__":
    main()
