"""Two network namespaces, joined by one cable, as two hosts: and a trainer that pushes from one of them.

Run as ``python -m tests.integration.refit_two_hosts FOLDER RANK``, it is a rank of the trainer.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.parties.messages import State
from megatron_patches.refit.session import OnEngineFailure, RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName
from tests.support.plain_engine import PlainEngine, digest

RANKS = 2
FIRST, SECOND = "10.177.3.1", "10.177.3.2"
_IP = "/usr/sbin/ip"


class Host(NamedTuple):
    """A network namespace.

    Attributes:
        process: keeps it.
        address: of its end of the cable.
    """

    process: subprocess.Popen[bytes]
    address: str

    @property
    def inside(self) -> list[str]:
        """Begins a command that runs there."""
        return ["/usr/bin/nsenter", "-t", str(self.process.pid), "-n"]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both. Each also has an address at which nobody of the other host can reach it.

    Raises:
        OSError: if a program is missing.
        subprocess.CalledProcessError: if this user may not make them.
    """
    with contextlib.ExitStack() as stack:

        def namespace(address: str) -> Host:
            process = subprocess.Popen(["/usr/bin/unshare", "-n", "/usr/bin/sleep", "600"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            while Path(f"/proc/{process.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
                if process.poll() is not None:
                    raise subprocess.CalledProcessError(process.returncode, "unshare -n")
                time.sleep(0.01)
            return Host(process, address)

        hosts = namespace(FIRST), namespace(SECOND)
        cable = f"link add cable type veth peer name cable netns {hosts[1].process.pid}"
        _run(hosts[0], cable)
        for host in hosts:
            for what in (
                f"addr add {host.address}/24 dev cable",
                f"addr add {host.address.replace('.3.', '.4.')}/24 dev lo",
                "link set cable up",
                "link set lo up",
            ):
                _run(host, what)
        yield hosts


def _run(host: Host, what: str) -> None:
    subprocess.run([*host.inside, _IP, *what.split()], check=True, capture_output=True)


def listening(process: int) -> set[tuple[str, int]]:
    """Addresses and ports at which anything listens in the network namespace of a process."""
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                host, port = local.split(":")
                found.add((".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(port, 16)))
    return found


def model(version: int) -> torch.nn.Module:
    """Of a version."""
    torch.manual_seed(version)
    return torch.nn.Sequential(torch.nn.Linear(301, 997), torch.nn.Linear(997, 1203))


def content(version: int) -> tuple[int, dict[str, str]]:
    """What an engine holds of a version."""
    tensors = model(version).state_dict().items()
    return version, {name: digest(name, tensor.contiguous().numpy().tobytes()) for name, tensor in tensors}


def until(what: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline = time.monotonic() + 30.0
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def push(folder: Path, rank: int) -> dict[str, Any]:
    """Pushes with the default address, and with the one of the cable; then an engine on this host joins late.

    Returns:
        What was seen.
    """
    trained = model(1)
    far, near = (PlainEngine(name, str(folder / f"{name}.sock"), 20.0) for name in ("far", "near"))
    seen: dict[str, Any] = {}
    session = RefitSession(trained, [far], config={}, options=RefitOptions(timeout_s=20.0))
    with contextlib.closing(session):
        try:
            session.prepare()
        except PartyFailedError as error:
            seen["refused"] = str(error)
    options = RefitOptions(
        timeout_s=20.0,
        host=FIRST,
        transport=TransportName.TCP,
        fan_out=True,
        on_engine_failure=OnEngineFailure.DROP,
        staging_bytes=1 << 20,
    )
    session = RefitSession(trained, [far], config={}, options=options)
    with contextlib.closing(session):
        session.prepare()
        session.push(1)
        if rank == 0:
            seen["far"] = far.run("content")
            session.attach(near)
            until(lambda: near.run("content")[0] == 1)
            seen["near"] = near.run("content")
        dist.barrier()
        trained.load_state_dict(model(2).state_dict())
        session.push(2)
        until(lambda: session.state()["near"].state is State.READY)
        dist.barrier()
        session.push(3)
        if rank == 0:
            seen["at last"] = [engine.run("content")[0] for engine in (far, near)]
        dist.barrier()
    return seen


def main() -> None:
    """Is one rank, and writes what it has seen."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.barrier()
    seen = push(folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
