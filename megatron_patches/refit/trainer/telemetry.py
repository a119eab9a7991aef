"""What each version cost at each engine: a line of the log, JSON lines in a file, and metrics for Prometheus."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from json import dumps
from pathlib import Path
from typing import NamedTuple

from megatron_patches.refit.control.messages import Moved, State
from megatron_patches.refit.errors import RefitError

logger = logging.getLogger(__name__)

TELEMETRY_SCHEMA = 1
"""Version of the JSON lines' schema, which docs/live_refit.md documents."""


class Address(NamedTuple):
    """Where metrics are served.

    Attributes:
        host: address of this machine.
        port: TCP port; 0 for any free one.
    """

    host: str
    port: int


def address_from(text: str) -> Address:
    """The address in ``PORT``, ``HOST:PORT`` or ``[IPv6 ADDRESS]:PORT``. A port alone is one of 127.0.0.1.

    Raises:
        ValueError: if it is none of these.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = (host[1:-1] if bracketed else host) if colon else "127.0.0.1"
    if not host or (":" in host) != bracketed or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ValueError(f"{text!r} is no address of metrics; it must be PORT, HOST:PORT or [IPV6 ADDRESS]:PORT")
    return Address(host, int(port))


@dataclass(frozen=True, kw_only=True)
class VersionCost:
    """What one version cost at one engine, seen from the trainer's first rank.

    Attributes:
        engine: name of the engine.
        version: number of the weights.
        serves: whether it serves them.
        reason: why it does not; None if it does.
        seconds: of ``plan``, the joining before its first version, 0 for later ones; ``move`` and ``verify``, on the
            slowest worker; ``wait``, the rest of sending: calling the engine, opening links, and looking up and
            allocating memory; ``commit``; and ``pause``, in which it began no request and which overlaps the others.
        bytes_by_source: bytes that each source sent; empty if the version did not arrive.
        sources: names of these sources, in the same order: numbers of trainer ranks or, if other engines served the
            version, their workers.
    """

    engine: str
    version: int
    serves: bool
    reason: str | None
    seconds: Mapping[str, float]
    bytes_by_source: tuple[int, ...]
    sources: tuple[str, ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in self.seconds.items())
        sent = [nbytes for nbytes in self.bytes_by_source if nbytes]
        moved = f"{sum(sent)} bytes from {len(sent)} sources, {max(sent, default=0)} at most"
        because = "" if self.reason is None else f" ({self.reason})"
        return (
            f"{self.engine} version {self.version} {'serves' if self.serves else 'failed'}: {parts}; {moved}{because}"
        )


def cost_of(
    engine: str,
    version: int,
    *,
    planning_s: float,
    lasted: Mapping[State, float],
    moved: Moved | None,
    paused_s: float,
    reason: str | None,
    sources: Sequence[str] = (),
) -> VersionCost:
    """The cost of a version, from what was measured where it happened.

    Args:
        engine: as in :class:`VersionCost`.
        version: as in :class:`VersionCost`.
        planning_s: seconds of joining that no version has been charged for.
        lasted: seconds of each state of the engine's subscription.
        moved: how all parties moved the version; None if it did not arrive.
        paused_s: seconds for which the engine was paused.
        reason: as in :class:`VersionCost`.
        sources: names of the sources, in order; none if they are the trainer's ranks.
    """
    sent = () if moved is None else moved.bytes_by_source
    parts = {} if moved is None else moved.seconds
    move, verify = parts.get("move", 0.0), parts.get("verify", 0.0)
    seconds = {
        "plan": planning_s,
        "wait": max(
            0.0, lasted.get(State.SENDING, 0.0) - move - verify
        ),  # the slowest of each may be different workers
        "move": move,
        "verify": verify,
        "commit": lasted.get(State.COMMITTING, 0.0),
        "pause": paused_s,
    }
    return VersionCost(
        engine=engine,
        version=version,
        serves=reason is None,
        reason=reason,
        seconds=seconds,
        bytes_by_source=sent,
        sources=tuple(sources or map(str, range(len(sent))))[: len(sent)],
    )


class Telemetry:
    """Passes on what versions cost. Any thread may tell it.

    Args:
        path: file to which one JSON object per version and engine is appended; None for none.
        metrics: where Prometheus reads metrics; None for nowhere.

    Attributes:
        metrics: where metrics are served, with the port that was chosen; None for nowhere.

    Raises:
        RefitError: if the file cannot be opened, nothing can listen there, or the package prometheus_client is missing.
    """

    def __init__(self, path: Path | None = None, metrics: Address | None = None) -> None:
        self._lock, self._closed = threading.Lock(), False
        self._file: FileIO | None = None
        self._metrics = None if metrics is None else _Metrics(metrics)
        self.metrics = None if self._metrics is None else self._metrics.address
        try:
            # Without a buffer nothing is left to write at the end, when a full disk would raise again.
            if path is not None:
                self._file = path.open("ab", buffering=0)
        except OSError as error:
            self.close()
            raise RefitError(f"cannot append telemetry to {path}: {error.strerror or error}") from error

    def tell(self, cost: VersionCost) -> None:
        """Passes on one version's cost. After :meth:`close`, only to the log."""
        logger.info("refit: %s", cost)
        with self._lock:
            if self._closed:
                return
            if self._metrics is not None:
                self._metrics.add(cost)
            if self._file is not None:
                try:
                    _append(self._file, dumps({"schema": TELEMETRY_SCHEMA, "time": time.time(), **asdict(cost)}))
                except OSError as error:  # a full disk must not cost an engine its version
                    logger.warning(
                        "refit: version %d of %s is missing in %s, to which telemetry cannot be appended (%s); make "
                        "room there for later versions",
                        cost.version,
                        cost.engine,
                        self._file.name,
                        error.strerror or error,
                    )

    def close(self) -> None:
        """Closes the file and the endpoint."""
        with self._lock:
            self._closed = True
            if self._metrics is not None:
                self._metrics.close()
            if self._file is not None:
                self._file.close()


def _append(file: FileIO, line: str) -> None:
    """Appends a whole line, or nothing.

    Raises:
        OSError: if nothing was appended.
    """
    content, begin = f"{line}\n".encode(), os.fstat(file.fileno()).st_size
    if file.write(content) < len(content):  # the disk became full within the line
        os.ftruncate(file.fileno(), begin)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Metrics:
    """Metrics of all engines, and the endpoint from which Prometheus reads them."""

    def __init__(self, at: Address) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server
        except ImportError as error:
            raise RefitError(
                f"metrics at port {at.port} need the package prometheus_client: pip install prometheus_client"
            ) from error
        registry = CollectorRegistry()
        self._seconds = Summary(
            "etp_refit_seconds", "Seconds of each part of a version", ["engine", "part"], registry=registry
        )
        self._bytes = Counter(
            "etp_refit_sent_bytes", "Bytes that a source sent", ["engine", "source"], registry=registry
        )
        self._version = Gauge("etp_refit_version", "Last version that serves", ["engine"], registry=registry)
        self._failures = Counter("etp_refit_failures", "Versions that do not serve", ["engine"], registry=registry)
        try:
            self._server, self._thread = start_http_server(at.port, at.host, registry)
        except OSError as error:
            raise RefitError(f"cannot serve metrics at {at.host}, port {at.port}: {error.strerror or error}") from error
        self.address = Address(at.host, self._server.server_port)

    def add(self, cost: VersionCost) -> None:
        """Adds one version's cost."""
        for part, seconds in cost.seconds.items():
            self._seconds.labels(cost.engine, part).observe(seconds)
        for source, nbytes in zip(cost.sources, cost.bytes_by_source, strict=True):
            self._bytes.labels(cost.engine, source).inc(nbytes)
        if cost.serves:
            self._version.labels(cost.engine).set(cost.version)
        self._failures.labels(cost.engine).inc(not cost.serves)

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
