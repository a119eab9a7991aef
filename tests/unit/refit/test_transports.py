"""Every transport between real processes: bits arrive, and whoever dies takes nobody else down with a hang."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import numpy as np
import pytest

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held, Invitation
from megatron_patches.refit.control.rendezvous import Rendezvous
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.ports import Bits
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.transports.base import Place, TransportName
from megatron_patches.refit.transports.c10d import C10dTransport, _decode_details
from tests.support.launch import RanksFailedError, run_distributed
from tests.unit.refit.transport_cases import usable

ROWS, COLUMNS = 64, 96
SPECS = tuple(TensorSpec(f"w{index}", (ROWS, COLUMNS), "bfloat16") for index in range(3))
SOURCES, DESTINATIONS = 2, 2
STAGING = 4096  # a box has 6144 or 4096 bytes, a slot 1024


def bits(spec: TensorSpec, version: int) -> np.ndarray:
    seed = np.random.default_rng([version, int(spec.name[1:])])
    return seed.integers(0, 2**16, spec.shape, dtype=np.uint16)


def manifest(rank: int, dim: int) -> Manifest:
    """Half of every tensor, cut in dimension ``dim``."""
    storages, placements = [], []
    for spec in SPECS:
        half = spec.shape[dim] // 2
        box = spec.box.with_range(dim, rank * half, (rank + 1) * half)
        storages.append(Storage(spec.name, spec.dtype, box.volume, box.volume))
        placements.append(Placement(box, View(spec.name, 0, box.shape, (box.shape[1], 1))))
    return Manifest(rank, "here", tuple(storages), tuple(placements))


def memory(part: Manifest, version: int | None) -> dict[str, Bits]:
    found: dict[str, Bits] = {}
    for spec, placement in zip(SPECS, part.placements, strict=True):
        (r0, c0), (r1, c1) = placement.box.start, placement.box.stop
        content = np.zeros(spec.shape, np.uint16) if version is None else bits(spec, version)
        found[spec.name] = np.ascontiguousarray(content[r0:r1, c0:c1]).reshape(-1)
    return found


def body(
    rank: int, world_size: int, invitation: Invitation, transport: TransportName, victim: int | None
) -> tuple[float, str]:
    """Moves versions 1 and 2; a victim is killed in the midst of the second. Seconds and reason of a failure."""
    assembly = Assembly(invitation, rank, f"party {rank}")
    options = LinkOptions(transport=transport, staging_bytes=STAGING, sources=SOURCES, direct_bytes=2048)
    started = time.monotonic()
    try:
        if rank < SOURCES:
            send(rank, SourceParty(assembly, options), victim)
        else:
            take(rank, DestinationParty(assembly, options), victim)
    except PartyFailedError as error:
        return time.monotonic() - started, str(error)
    return 0.0, ""


def send(rank: int, party: SourceParty, victim: int | None) -> None:
    shapes = {spec.name: spec.shape for spec in SPECS}
    part = manifest(rank, 0)
    party.prepare(lambda: Held({}, shapes, part))
    party.push(1, lambda: memory(part, 1))
    if rank == victim:
        kill_in_the_third(party)
    party.push(2, lambda: memory(part, 2))
    assert 0 < party.staging.peak_bytes <= STAGING
    party.close()
    assert party.staging.leased_bytes == 0


def kill_in_the_third(party: SourceParty) -> None:
    """Ends this process, as the kernel would, when it is about to send its third packet."""
    end = party._end
    assert end is not None
    original, left = end._announce, [3]

    def send_some(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args)

    end._announce = send_some  # type: ignore[method-assign,assignment]


def take(rank: int, party: DestinationParty, victim: int | None) -> None:
    part = manifest(rank - SOURCES, 1)
    party.prepare(lambda _: part)

    def room() -> dict[str, Bits]:
        if rank == victim and party._assembly.next_step > first:
            os.kill(os.getpid(), signal.SIGKILL)
        return memory(part, None)

    first = 1 << 30
    for version in (1, 2):
        step = party._assembly.next_step
        received = party.receive(version, step, version > 1, room)
        first = party._assembly.next_step
        for name, expected in memory(part, version).items():
            assert np.array_equal(received[name], expected)
    assert 0 < party.staging.peak_bytes <= STAGING
    party.close()
    assert party.staging.leased_bytes == 0


def run(transport: TransportName, victim: int | None, timeout_s: float) -> list[tuple[float, str]]:
    server = Rendezvous(SOURCES + DESTINATIONS, timeout_s, answer=Registry(SOURCES).answer)
    try:
        args = (server.invitation, transport, victim)
        return run_distributed(body, SOURCES + DESTINATIONS, None, args=args, timeout_s=90, fresh=victim is not None)
    finally:
        server.close()


@pytest.mark.parametrize("transport", usable())
def test_versions_arrive_between_processes(transport: TransportName) -> None:
    assert run(transport, None, 60.0) == [(0.0, "")] * (SOURCES + DESTINATIONS)


@pytest.mark.parametrize("transport", usable())
@pytest.mark.parametrize("victim", [0, SOURCES])
def test_when_a_process_is_killed_all_others_raise_soon(transport: TransportName, victim: int) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run(transport, victim, 60.0)
    failures = raised.value.failures
    assert [(failure.rank, failure.kind) for failure in failures] == [(victim, "exit")]


def test_the_store_of_c10d_listens_on_the_given_address_alone() -> None:
    place = Place(party=0, sources=1, host="127.0.0.1", device="cpu", pool=StagingPool(1 << 20), timeout_s=10.0)
    transport = C10dTransport(place)
    port = _decode_details(transport.details()).port
    socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5.0)
    transport.close()
