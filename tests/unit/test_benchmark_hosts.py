"""The closed forms of groups that span hosts, against messages that are counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.hosts import Traffic, all_to_all, hierarchical, hierarchical_layer, ring, table
from benchmarks.sweep.step_time import Machine
from benchmarks.train_shapes import SHAPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hosts.md"
CHUNK = 7
"""Bytes of a rank's shard."""

Message = tuple[int, int, int]
"""From which rank to which, and bytes."""


def counted(messages: Iterator[Message], count: int, per_host: int) -> tuple[float, float]:
    """Bytes that a rank receives from other hosts and from its own, on average over a host's ranks."""
    received: Counter[tuple[int, bool]] = Counter()
    for source, to, nbytes in messages:
        host, other = to // per_host, source // per_host
        received[host, host != other] += nbytes
    network = {received[host, True] for host in range(count)}
    links = {received[host, False] for host in range(count)}
    assert len(network) == len(links) == 1, "a host receives more than another"
    return network.pop() / per_host, links.pop() / per_host


def in_rings(ranks: int) -> Iterator[Message]:
    """A gather: in each step every rank passes on what it received in the one before."""
    for _ in range(ranks - 1):
        for rank in range(ranks):
            yield rank, (rank + 1) % ranks, CHUNK


def to_all(ranks: int) -> Iterator[Message]:
    """A reduction: a chunk to each other rank."""
    for rank in range(ranks):
        for peer in range(ranks):
            if peer != rank:
                yield rank, peer, CHUNK


def in_two_steps(count: int, per_host: int) -> Iterator[Message]:
    """A gather: columns over the hosts, in rings, and then among the ranks of each host."""
    for column in range(per_host):
        for source, to, nbytes in in_rings(count):
            yield source * per_host + column, to * per_host + column, nbytes
    for host in range(count):
        for source, to, nbytes in to_all(per_host):
            yield host * per_host + source, host * per_host + to, count * nbytes


@pytest.mark.parametrize(("count", "per_host"), [(2, 1), (2, 2), (3, 4), (5, 8)])
def test_closed_forms_are_what_is_counted(count: int, per_host: int) -> None:
    ranks = count * per_host
    whole = ranks * CHUNK
    found: list[tuple[Traffic, Iterator[Message]]] = [
        (ring(whole, count, per_host), in_rings(ranks)),
        (all_to_all(whole, count, per_host), to_all(ranks)),
        (hierarchical(whole, count, per_host), in_two_steps(count, per_host)),
    ]
    for closed_form, messages in found:
        assert counted(messages, count, per_host) == pytest.approx((closed_form.network, closed_form.links))


def test_each_byte_enters_a_host_once() -> None:
    """And never less often with a ring."""
    for count in hosts.HOSTS:
        assert 8 * hierarchical(800, count, 8).network == pytest.approx(800 * (count - 1) / count)
        assert ring(800, count, 8).network > hierarchical(800, count, 8).network


def test_a_layers_time_is_that_of_its_slowest_links() -> None:
    machine = Machine(within_host=100e9, between_hosts=10e9)
    elements = 10**9
    network = 2 * elements / 8 / 2 / 10e9 + hosts.HOP_BETWEEN_S
    links = 2 * elements * 7 / 8 / 100e9 + hosts.HOP_WITHIN_S
    assert links > network
    sums = 2 * network - hosts.HOP_BETWEEN_S
    assert hierarchical_layer(elements, 2, 8, machine).seconds == pytest.approx(2 * links + links + sums)


def test_the_documented_table_is_the_printed_one() -> None:
    assert table(SHAPES["llama70b-40l"], 8, Machine()) in PAGE.read_text()
