"""TCP ports for processes that are told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports where nobody listens, now and most likely later.

    They are below those that the system gives to whoever asks for any, as process groups do many times.
    """
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 500):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"only {len(found)} of {count} ports below 32000 are free")


def free_port() -> int:
    """One of :func:`free_ports`."""
    (port,) = free_ports(1)
    return port
