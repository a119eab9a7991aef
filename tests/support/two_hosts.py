"""Two network namespaces, joined by one cable, as two hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

CABLE = "cable"
"""The network interface of both hosts to the other."""

ADDRESSES = "10.177.3.1", "10.177.3.2"
"""Of the hosts' ends of the cable."""

_UNSHARED = ("unshare", "--net", "--uts")


class Host(NamedTuple):
    """A network namespace with a host name of its own.

    Attributes:
        process: number of the process that keeps it.
        address: of its end of the cable.
    """

    process: int
    address: str

    @property
    def inside(self) -> list[str]:
        """Begins a command that runs there."""
        return ["nsenter", "--target", str(self.process), "--net", "--uts"]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both. Each also has an address of its own at which the other does not reach it. Skips where it may not."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "hostname") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    trial = subprocess.run([*_UNSHARED, "true"], capture_output=True, text=True, check=False)
    if os.geteuid() != 0 or trial.returncode != 0:
        pytest.skip(f"needs the right to make network namespaces: {trial.stderr.strip() or 'not root'}")
    with contextlib.ExitStack() as stack:
        first, second = (Host(_process(stack, f"host-{number}"), at) for number, at in enumerate(ADDRESSES))
        _ip(first, f"link add {CABLE} type veth peer name {CABLE} netns {second.process}")
        for number, host in enumerate((first, second), 1):
            for what in (
                f"addr add {host.address}/24 dev {CABLE}",
                f"addr add 10.177.4.{number}/24 dev lo",
                f"link set {CABLE} up",
                "link set lo up",
            ):
                _ip(host, what)
        yield first, second


def _process(stack: contextlib.ExitStack, name: str) -> int:
    script = f"hostname {name} && echo ready && exec sleep 600"
    process = subprocess.Popen([*_UNSHARED, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process.pid


def _ip(host: Host, what: str) -> None:
    subprocess.run([*host.inside, "ip", *what.split()], check=True)
