"""An engine that is one process and has no model: it keeps what it receives, for tests of sessions.

Run as ``python -m tests.support.plain_engine ADDRESS NICS``. :class:`PlainEngine` is an engine for a session.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Invitation, Model
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import Base
from megatron_patches.refit.memory.ports import Bits
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.fan_out import Committed, Relay, Taking
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.planning.tensors import fold_tensors
from megatron_patches.refit.trainer.engine_client import Joined, PauseMode
from megatron_patches.refit.transports.nics import AUTO_NICS
from tests.support.prepared import template_of, torch_alone
from tests.support.template import Process

logger = logging.getLogger(__name__)

_START_S = 60.0


def digest(name: str, content: bytes) -> str:
    """Of one tensor."""
    return hashlib.sha256(name.encode() + content).hexdigest()[:16]


class Engine:
    """The process's side; serves one connection after another.

    Attributes:
        version: number of the version that serves.
        serving: its storages.

    Args:
        nics: see :attr:`megatron_patches.refit.parties.terms.LinkOptions.nics`.
    """

    def __init__(self, nics: str) -> None:
        self.version, self.serving = -1, dict[str, Bits]()
        self._nics = nics
        self._fault: tuple[str, int] | None = None  # the state in which the process sends itself a signal, and which
        self._received: tuple[int, dict[str, Bits], list[int]] | None = None
        self._party: DestinationParty | None = None
        self._manifest: Manifest | None = None
        self._known: dict[str, str] | None = None
        self._base: Base | None = None
        self._thread: threading.Thread | None = None
        self._model: Model | None = None
        self._digests: list[int] = []
        self._calls: list[str] = []
        self._relays: dict[str, tuple[Relay, threading.Thread]] = {}
        self._others: Taking | None = None
        self._cannot_send = ""
        self._token = ""  # of the session that it joined last

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        if call["call"] == "join":
            self._token = call["token"]
        elif call["token"] != self._token:
            raise RefitError(f"asked to {call['call']}, but by another session than the one that was joined last")
        self._calls.append(call["call"])
        getattr(self, f"_{call['call']}")(call)

    def calls(self) -> list[str]:
        """What it was asked to do, pauses included."""
        return self._calls

    def pause(self) -> None:
        """Notes that it was paused. Nothing is served between two calls."""
        self._calls.append("pause")

    def commit(self, version: int) -> None:
        """Makes the received version serve."""
        self._calls.append("commit")
        self._fail_at("committing")
        self._finish()
        received, self._received = self._received, None
        if self._party is None or received is None or received[0] != version:
            raise RefitError(f"version {version} has not been received")
        self._stop_relays()
        self.version, self.serving, self._digests = received
        self._base = Base(self.version, self.serving)
        self._party.post_commit(version, None)

    def content(self) -> tuple[int, dict[str, str]]:
        """The version that serves, and digests of its tensors."""
        return self.version, {name: digest(name, array.tobytes()) for name, array in self.serving.items()}

    def spoil(self) -> None:
        """Flips a bit of what serves."""
        next(iter(self.serving.values()))[-1] ^= 1

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def fail_in(self, state: str, how: int) -> None:
        """Lets the process send itself a signal in a state."""
        self._fault = state, how

    def damage(self, tensor: str) -> None:
        """Changes one element of what serves."""
        self.serving[tensor][0] += 1

    def send_slowly(self, seconds: float) -> None:
        """Lets it wait before each packet that it sends to other engines."""
        original = Sender.pack_into

        def slow(sender: Sender, *args: Any) -> Any:
            time.sleep(seconds)
            self._fail_at("relaying")
            return original(sender, *args)

        Sender.pack_into = slow  # type: ignore[method-assign, assignment]

    def send_nothing(self) -> None:
        """Lets it keep what it serves in a form in which others cannot take it, from when it joins next."""
        self._cannot_send = "it keeps what it serves in another form"

    def know(self, dtypes: dict[str, str]) -> None:
        """Lets it know tensors of these names and dtypes alone, and keep them in these dtypes."""
        self._known = dtypes

    def _join(self, call: dict[str, Any]) -> None:
        self._fail_at("joining")
        if self._party is not None:
            self._party.leave()
            self._leave_others()
            self._stop_relays()
            for relay, _ in self._relays.values():
                relay.leave()
            self._relays = {}
            self._finish()
            self._party.close()
        invitation = Invitation(call["host"], call["port"], call["token"], call["timeout_s"])
        options = replace(_links(call, self._nics), payload=call["payload"])
        self._base = None
        party = DestinationParty(Assembly(invitation, call["sources"], "engine worker 0"), options)
        self._party = party
        self._start(lambda: setattr(self, "_manifest", party.prepare(self._want)))

    def _record(self, call: dict[str, Any]) -> None:
        """Nothing: there is no model to wait for."""

    def _meet(self, call: dict[str, Any]) -> None:
        self._leave_others()
        self._finish()
        if self._manifest is None:
            raise RefitError("nobody has joined")
        manifest, invitation = self._manifest, Invitation(call["host"], call["port"], call["key"], call["timeout_s"])
        others = Taking(
            invitation, call["sources"], "engine worker 0", _links(call, self._nics), "cpu", call["lease_s"]
        )
        self._others = others
        self._start(lambda: others.meet(manifest))

    def _leave_others(self) -> None:
        if self._others is not None:
            self._others.leave()
        self._others = None

    def _receive(self, call: dict[str, Any]) -> None:
        if not call.get("key") and self._thread is not None and self._thread.is_alive():
            self._leave_others()
        self._finish()
        self._received = None
        self._start(lambda: self._take(call))

    def _relay(self, call: dict[str, Any]) -> None:
        if call["key"] in self._relays:
            relay, thread = self._relays[call["key"]]
            thread.join()
        else:
            invitation = Invitation(call["host"], call["port"], call["key"], call["timeout_s"])
            relay = Relay(
                invitation, call["first"], "engine worker 0", _links(call, self._nics), "cpu", call["lease_s"]
            )
        thread = threading.Thread(target=self._send, args=(relay, call["version"]), daemon=True)
        self._relays[call["key"]] = relay, thread
        thread.start()

    def _send(self, relay: Relay, version: int) -> None:
        def committed() -> Committed:
            if self._model is None or self._manifest is None:
                raise RefitError("nobody has joined")
            if self._cannot_send:
                raise RefitError(self._cannot_send)
            return Committed(self.version, self._model, self._manifest, self.serving, self._digests)

        try:
            relay.run(version, committed)
        except RefitError:
            logger.exception("version %d was not sent", version)

    def _stop_relays(self) -> None:
        under_way = [(relay, thread) for relay, thread in self._relays.values() if thread.is_alive()]
        for relay, _ in under_way:
            relay.stop()
        for _, thread in under_way:
            thread.join()

    def _abandon(self, call: dict[str, Any]) -> None:  # noqa: ARG002 - likewise
        self._finish()
        self._received = None

    def _commit(self, call: dict[str, Any]) -> None:
        """Of an adapter."""
        self.commit(call["version"])

    def _keep(self, call: dict[str, Any]) -> None:
        """Nothing: there are no files."""

    def _take(self, call: dict[str, Any]) -> None:
        if self._party is None or self._manifest is None:
            raise RefitError("nobody has joined")
        storages, party = self._manifest.storages, self._party
        if call.get("key") and self._others is not None:
            party = self._others.party

        def room() -> dict[str, Bits]:
            self._fail_at("sending")
            return {one.name: np.full(one.numel, 0xAB, f"u{itemsize(one.dtype)}") for one in storages}

        try:
            found = party.receive(call["version"], call["step"], call["linked"], room, base=lambda: self._base)
        except BaseException:
            if party is not self._party:
                party.close()
            raise
        if party is not self._party:
            party.unlink()
        arrays = {name: np.asarray(array) for name, array in found.items()}
        self._received = call["version"], arrays, list(party.verified)

    def _want(self, model: Model) -> Manifest:
        self._model = model
        if self._party is not None:
            self._party.cannot_send = self._cannot_send
        if self._known is None:
            return whole(model)
        unknown = [spec.name for spec in model.tensors if spec.name not in self._known]
        if unknown:
            raise RefitError(f"the engine has no {unknown[0]}")
        return whole(
            Model(model.config, fold_tensors(replace(spec, dtype=self._known[spec.name]) for spec in model.tensors))
        )

    def _fail_at(self, state: str) -> None:
        if self._fault is not None and self._fault[0] == state:
            (_, how), self._fault = self._fault, None
            os.kill(os.getpid(), how)

    def _start(self, work: Any) -> None:
        def run() -> None:
            try:
                work()
            except RefitError:
                logger.exception("the engine goes on with what it served")

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _links(call: dict[str, Any], nics: str) -> LinkOptions:
    return LinkOptions(
        transport=call["transport"],
        staging_bytes=call["staging_bytes"],
        sources=call["sources"],
        memory=call["memory"],
        nics=nics,
    )


def whole(model: Model) -> Manifest:
    """All of every tensor."""
    return Manifest.of_whole(0, "here", model.tensors)


class PlainEngine:
    """Calls the process; an :class:`megatron_patches.refit.EngineClient`.

    Args:
        name: name for messages.
        address: where the process listens.
        timeout_s: of one call.

    Attributes:
        name: name for messages.
        address: where the process listens.
        added: versions of adapters that it was told to add, and their folders.
    """

    def __init__(self, name: str, address: str, timeout_s: float = 60.0) -> None:
        self.name, self.address, self._timeout_s = name, address, timeout_s
        self.added: list[tuple[str, Path]] = []
        self._joined = Joined()

    def run(self, command: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Runs a method of :class:`Engine`.

        Raises:
            RefitError: with its reason if it fails, or does not end in time.
        """
        try:
            with Client(self.address, "AF_UNIX", None) as connection:
                connection.send((command, args))
                if not connection.poll(self._timeout_s if timeout_s is None else timeout_s):
                    raise RefitError(f"{self.name} did not answer {command}")
                good, value = connection.recv()
        except (OSError, EOFError) as error:
            raise RefitError(f"cannot reach {self.name}: {error}") from error
        if not good:
            raise RefitError(value)
        return value

    def world_size(self) -> int:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self.check_up()
        return 1

    def check_up(self) -> None:
        """Likewise."""
        self.run("content", timeout_s=5.0)

    def call(self, call: dict[str, Any]) -> None:
        """Likewise."""
        self.run("call", self._joined.told(call))

    def commit(self, version: int, *, reset_cache: bool) -> None:  # noqa: ARG002 - there is no cache
        """Likewise."""
        self.run("commit", version)

    def add_adapter(self, adapter: str, version: int, folder: Path, keep: int) -> list[int]:
        """See :class:`megatron_patches.refit.trainer.engine_client.AdapterServer`. It serves one version."""
        del keep
        self.added.append((f"{adapter}@{version}", folder))
        return [version]

    def pause(self, mode: PauseMode) -> None:  # noqa: ARG002 - nothing is served between two calls
        """Likewise."""
        self.run("pause")

    def resume(self, *, reset_cache: bool) -> None:
        """Likewise."""


def start(address: str, inside: Sequence[str] = (), nics: str = AUTO_NICS) -> Process:
    """Starts the process and waits until it answers.

    Args:
        address: where it listens.
        inside: beginning of a command, such as one that enters a network namespace. A copy of a template cannot.
        nics: see :attr:`megatron_patches.refit.parties.terms.LinkOptions.nics`.
    """
    template = None if inside else template_of(torch_alone)
    process: Process
    if template is None:
        process = subprocess.Popen([*inside, sys.executable, "-m", "tests.support.plain_engine", address, nics])
    else:
        process = template.start(serve, (address, nics))
    deadline = time.monotonic() + _START_S
    while True:
        with suppress(RefitError):
            PlainEngine("starting", address).check_up()
            return process
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the engine did not start")
        time.sleep(0.05)


@contextmanager
def running(name: str, folder: Path) -> Iterator[PlainEngine]:
    """An engine that listens at ``NAME.sock`` in a folder."""
    address = str(folder / f"{name}.sock")
    process = start(address)
    try:
        yield PlainEngine(name, address, 30.0)
    finally:
        process.kill()
        process.wait()


def _answer(engine: Engine, connection: Connection) -> None:
    with connection, suppress(EOFError, OSError):
        command, args = connection.recv()
        try:
            answer = True, getattr(engine, command)(*args)
        except RefitError as error:
            answer = False, str(error)
        connection.send(answer)


def serve(address: str, nics: str) -> None:
    """Serves until the process is killed."""
    logging.basicConfig(level=logging.INFO)
    engine = Engine(nics)
    Path(address).unlink(missing_ok=True)
    with Listener(address, "AF_UNIX") as listener:
        while True:
            _answer(engine, listener.accept())


if __name__ == "__main__":
    serve(*sys.argv[1:])
