"""Sends versions in which a share of the elements changed, whole and as deltas, over a TCP link of a given speed.

python -m benchmarks.refit_delta [--device cuda] [--gigabytes-per-second 1] [--json FILE]

One source and one destination, each a process, and no engine: packing, digesting, sending, unpacking and verifying as
in a refit. Their weights are in host memory, or both sides' on the first GPU, which then does all of that but the
sending. Linux paces the link's payload connection.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.command_line import positive, positive_seconds, require_gpus, writable_file
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.delta import Base, PayloadKind, Snapshot
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.staging import StagingPool, slot_bytes, useful_bytes
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import Plan, make_plan
from megatron_patches.refit.transports.base import LinkEnd, Place
from megatron_patches.refit.transports.pump import receive_version, send_version
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd
from megatron_patches.refit.transports.tcp import TcpOutgoing, TcpTransport

_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE, which Python has no name for
_COLUMNS = 4096
_STAGING = 256 << 20
_TIMEOUT_S = 300.0
SHARES = (0.01, 0.02, 0.03, 0.3)
"""Shares of the elements that change between two versions."""


@dataclass(frozen=True)
class Row:
    """What one kind of push cost.

    Attributes:
        share: share of the elements that changed.
        payload: whole or delta.
        nbytes: bytes sent.
        seconds: of the whole push, from the start to the last comparison of digests; the least of all repetitions, as
            other work on the machine, and compiling a GPU's kernels the first time, only add to it. So are the next
            four.
        move: of these, until everything had arrived and was unpacked.
        source_cpu: CPU seconds of the source.
        destination_cpu: of the destination.
        keep: copying the version at the source after it, which is the next version's base; 0 if whole.
    """

    share: float
    payload: str
    nbytes: int
    seconds: float
    move: float
    source_cpu: float
    destination_cpu: float
    keep: float


class PacedTransport(TcpTransport):
    """TCP whose payload connections are no faster than a rate.

    Args:
        place: where this party runs.
        rate: bytes per second; None for no limit.
    """

    def __init__(self, place: Place, rate: float | None) -> None:
        super().__init__(place)
        self._rate = rate

    def outgoing(self, end: LinkEnd) -> TcpOutgoing:
        """Makes the payload connection."""
        wire = super().outgoing(end)
        if self._rate is not None:
            rate = struct.pack("N", int(self._rate))  # an int of Python's own would end at 2.1 GB/s
            wire._connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)
        return wire


def _model(mebibytes: int) -> tuple[Plan, Manifest]:
    """Matrices of 32 MiB in bfloat16, of one source to one destination."""
    specs = [TensorSpec(f"w{at}", (_COLUMNS, _COLUMNS), "bfloat16") for at in range(-(-mebibytes // 32))]
    storages = tuple(Storage(spec.name, spec.dtype, spec.numel, spec.numel) for spec in specs)
    placements = tuple(Placement(spec.box, View(spec.name, 0, spec.shape, (_COLUMNS, 1))) for spec in specs)
    side = Manifest(0, "here", storages, placements)
    return make_plan(specs, [side], [side]), side


def _memory(side: Manifest, device: str) -> dict[str, torch.Tensor]:
    """Zeros. NumPy's own memory on a CPU, which lies in huge pages."""
    return {
        storage.name: torch.from_numpy(np.zeros(storage.numel, dtype=np.int16)).to(device) for storage in side.storages
    }


def _terms(plan: Plan, device: str) -> Terms:
    # Beside the slots, a load of the base; on a GPU also the load itself, and a payload on its way to or from the host.
    slot = slot_bytes(_STAGING, 1, extra=1 if device == "cpu" else 3)
    return Terms(packet_bytes=min(slot, useful_bytes(plan.nbytes_by_link[0, 0])))


def _place(party: int, device: str) -> Place:
    pool = StagingPool(_STAGING)
    return Place(party=party, sources=1, host="127.0.0.1", device=device, pool=pool, timeout_s=_TIMEOUT_S)


def _check() -> None:
    """Raises nothing: no other party can fail."""


def _source(pipe: Connection, device: str, mebibytes: int, rate: float | None, repeats: int) -> None:
    plan, side = _model(mebibytes)
    terms, place = _terms(plan, device), _place(0, device)
    generator = torch.Generator(device).manual_seed(1)
    memory = _memory(side, device)
    for bits in memory.values():
        bits.random_(-(1 << 15), 1 << 15, generator=generator)
    with closing(SendingEnd(place, PacedTransport(place, rate))) as end:
        slot = terms.packet_bytes or 0
        pipe.send(end.offer(slot, memory))
        end.connect(pipe.recv(), {0: slot}, {0: plan.digests[0, 0]}, _check)
        sender, kept, version = Sender(plan, 0, memory, {(0, 0): terms}, place.pool), Snapshot(), 0
        for share in (1.0, *SHARES):  # the first warms up, and gives both ends a base
            for payload in _turns(share, repeats):
                version += 1
                _change(memory, share, generator)
                sender.renew(memory)
                sender.relate_to(kept.base if payload is PayloadKind.DELTA else None)
                pipe.send("changed")
                pipe.recv()
                before = time.process_time()
                with closing(sender):
                    end.begin(memory, _check)
                    send_version(sender, end, version, _check)
                cpu, began = time.process_time() - before, time.perf_counter()
                kept.take(version, memory)
                if device != "cpu":
                    torch.cuda.synchronize(device)
                pipe.send((end.sent_bytes, cpu, time.perf_counter() - began))


def _turns(share: float, repeats: int) -> list[PayloadKind]:
    """Whole and delta in turns, so that other work on the machine affects both alike."""
    return [*PayloadKind] * (repeats if share < 1.0 else 1)


def _change(memory: dict[str, torch.Tensor], share: float, generator: torch.Generator) -> None:
    for bits in memory.values():
        bits.bitwise_xor_(torch.rand(bits.shape, generator=generator, device=bits.device) < share)


def _destination(pipe: Connection, results: Connection, device: str, mebibytes: int, repeats: int) -> None:
    plan, side = _model(mebibytes)
    terms, place = _terms(plan, device), _place(1, device)
    serving, arriving, version = _memory(side, device), _memory(side, device), 0
    with closing(ReceivingEnd(place, PacedTransport(place, None))) as end:
        slot = terms.packet_bytes or 0
        mine, theirs = end.offer(slot), pipe.recv()
        pipe.send({0: theirs, 1: mine})
        end.connect({0: theirs, 1: mine}, {0: slot}, {0: plan.digests[0, 0]}, _check)
        unpacker = Unpacker(plan, side, {(0, 0): terms}, place.pool)
        for share in (1.0, *SHARES):
            taken: dict[PayloadKind, list[tuple[float, ...]]] = {kind: [] for kind in PayloadKind}
            for payload in _turns(share, repeats):
                version += 1
                unpacker.begin(version, arriving, Base(version - 1, serving))
                pipe.recv()  # the source has changed its weights
                pipe.send("go")
                began, before = time.perf_counter(), time.process_time()
                with closing(unpacker):
                    receive_version(unpacker, end, _TIMEOUT_S, _check)
                    moved = time.perf_counter()
                    unpacker.verify()
                    ended, cpu = time.perf_counter(), time.process_time() - before
                nbytes, cpu_of_source, keep = pipe.recv()
                taken[payload].append((nbytes, ended - began, moved - began, cpu_of_source, cpu, keep))
                serving, arriving = arriving, serving
            for payload, found in taken.items() if share < 1.0 else ():
                nbytes, push, move, source, destination, keep = (min(column) for column in zip(*found, strict=True))
                keep = keep if payload is PayloadKind.DELTA else 0.0
                results.send(Row(share, payload.value, int(nbytes), push, move, source, destination, keep))


def measure(device: str, mebibytes: int, rate: float | None, repeats: int) -> list[Row]:
    """Pushes versions between two processes.

    Args:
        device: of both sides' weights: ``cpu``, or torch's name of a GPU.
        mebibytes: size of the model, rounded up to a multiple of 32.
        rate: bytes per second of the link; None for no limit.
        repeats: number of pushes of each kind.

    Raises:
        RuntimeError: if a process fails.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    results, told = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_source, args=(here, device, mebibytes, rate, repeats)),
        context.Process(target=_destination, args=(there, told, device, mebibytes, repeats)),
    ]
    for process in processes:
        process.start()
    for end in (here, there, told):  # so that a process that waits for one that has failed notices it
        end.close()
    found: list[Row] = []
    try:
        while len(found) < 2 * len(SHARES):
            found.append(results.recv())
    except EOFError:
        raise RuntimeError("a process has failed") from None
    finally:
        for process in processes:
            if len(found) < 2 * len(SHARES):
                process.kill()
            process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the weights of both sides")
    parser.add_argument("--mebibytes", type=positive, default=256, help="size of the weights")
    parser.add_argument(
        "--gigabytes-per-second", type=positive_seconds, help="speed of the link; by default what it gives"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="at least 2 on a GPU: the first compiles kernels")
    parser.add_argument("--json", type=writable_file)
    options = parser.parse_args(arguments)
    rate = None if options.gigabytes_per_second is None else 1e9 * options.gigabytes_per_second
    if options.device == "cuda":
        require_gpus(parser.error)
    rows = measure("cuda:0" if options.device == "cuda" else "cpu", options.mebibytes, rate, options.repeats)
    print("| changed | whole | push | CPU | delta | push | CPU | copy of the base | of whole: bytes, time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for whole, delta in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{whole.share:.0%}"]
        for row in (whole, delta):
            cpu = f"{row.source_cpu:.2f} + {row.destination_cpu:.2f} s"
            cells += [f"{row.nbytes / 1e6:.1f} MB", f"{row.seconds:.2f} s", cpu]
        cells += [f"{delta.keep:.2f} s"]
        cells += [f"{delta.nbytes / whole.nbytes:.3f}, {delta.seconds / whole.seconds:.2f}"]
        print(f"| {' | '.join(cells)} |")
    if options.json is not None:
        found = {
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "gpu": torch.cuda.get_device_name(0) if options.device == "cuda" else None,
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
