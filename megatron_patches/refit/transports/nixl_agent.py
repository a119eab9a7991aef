"""One party's NIXL agent: registers its memory for others, and reads theirs.

No agent has a thread that makes progress, which would poll without a pause. A reader makes progress when it asks
whether a transfer has ended; whoever is read from calls :meth:`NixlAgent.poll` while somebody may be reading.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.ports import Bits, Payload

# The package nixl takes the one that fits the machine's CUDA; alone, the others work without GPUs too.
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
# Where UCX finds no NVLink, it does not read another process's GPU memory, even on the same GPU, but sends over TCP:
# less than 1 GB/s. NIXL sets this itself after 1.5 (https://github.com/ai-dynamo/nixl/pull/2208).
_READ_WITHOUT_NVLINK = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
_POLL_S = 0.0002  # at least, between two looks: all links of a party ask for the same ones
_DRAIN_S = 1.0  # for transfers that are under way when links end
_PAUSE_S = 0.0001  # between looks while draining


def is_installed() -> bool:
    """Whether there is a package that :func:`load_api` would try."""
    return any(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def load_api() -> Any:
    """NIXL's Python interface.

    Raises:
        RefitError: if it is not installed.
    """
    reasons = []
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise RefitError(f"the transport nixl needs the package nixl (pip install nixl): {'; '.join(reasons)}")


class Region(NamedTuple):
    """Memory of this process, in bytes."""

    address: int
    nbytes: int


def region_of(memory: Payload | Bits) -> Region:
    """Where an array or a tensor lies.

    Raises:
        PartyFailedError: if it is neither, or not contiguous.
    """
    if isinstance(memory, np.ndarray):
        contiguous, address = memory.flags.c_contiguous, int(memory.ctypes.data)
    elif isinstance(memory, bytes):
        raise PartyFailedError("NIXL cannot use bytes that may not change")
    else:
        contiguous, address = memory.is_contiguous(), int(memory.data_ptr())
    if not contiguous:
        raise PartyFailedError("NIXL cannot use a storage that is not contiguous")
    return Region(address, int(memory.nbytes))


class Spans(NamedTuple):
    """Pieces of memory on both sides of a transfer, alike in size.

    Attributes:
        own: address of each piece here, uint64.
        theirs: address of each there, uint64.
        nbytes: size of each, uint64.
    """

    own: NDArray[np.uint64]
    theirs: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]


class Peer(NamedTuple):
    """Another party's agent.

    Attributes:
        name: what NIXL calls it.
        kind: of its memory, ``DRAM`` or ``VRAM``.
        device: number of its GPU in its process; 0 on the host.
    """

    name: str
    kind: str
    device: int


class NixlAgent:
    """An agent.

    One for a GPU sets ``UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on`` in the process's environment, unless it is set already.

    Args:
        party: number of the party, for the agent's name.
        device: device of the memory that it registers: ``cpu``, or torch's name of a GPU.

    Attributes:
        kind: of that memory, ``DRAM`` or ``VRAM``.
        device: number of the GPU; 0 on the host.

    Raises:
        RefitError: if NIXL is not installed.
    """

    def __init__(self, party: int, device: str) -> None:
        api = load_api()
        host = device == "cpu"
        if not host:
            os.environ.setdefault(*_READ_WITHOUT_NVLINK)  # UCX reads it when the agent is made
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = api.nixl_agent(f"refit-{party}-{secrets.token_hex(8)}", config)
        self.kind, self.device = ("DRAM", 0) if host else ("VRAM", int(device.partition(":")[2] or 0))
        self._registered: dict[Region, Any] = {}
        self._uses: Counter[Region] = Counter()
        self._under_way: list[Reading[Any]] = []
        self._looked = 0.0

    @property
    def metadata(self) -> bytes:
        """What others must know to read from here: how to connect, and all that is registered."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def register(self, region: Region) -> None:
        """Lets NIXL use memory; as often as it is to be forgotten.

        Args:
            region: the memory; none that is registered may overlap it, for NIXL would confuse the two.

        Raises:
            PartyFailedError: if NIXL refuses.
        """
        if not self._uses[region]:
            try:
                descriptors = [(region.address, region.nbytes, self.device, "")]
                self._registered[region] = self._agent.register_memory(descriptors, self.kind)
            except Exception as error:  # its errors have no base of their own
                raise PartyFailedError(
                    f"NIXL cannot register {region.nbytes} bytes of {self.kind} ({_said(error)}); where that is for "
                    "want of locked memory, raise its limit (ulimit -l), or take another transport"
                ) from error
        self._uses[region] += 1

    def forget(self, region: Region) -> None:
        """Ends one use of registered memory; after the last, NIXL no longer uses it."""
        self._uses[region] -= 1
        if not self._uses[region]:
            del self._uses[region]
            self._agent.deregister_memory(self._registered.pop(region))

    def poll(self) -> None:
        """Answers readers whose transfers need this side too, such as to connect, or over TCP."""
        now = time.monotonic()
        if now - self._looked >= _POLL_S:
            self._agent.get_new_notifs()
            self._looked = now

    def meet(self, metadata: bytes) -> str:
        """Gets to know another agent, or what more it has registered.

        Returns:
            The name by which :meth:`read` and :meth:`part` know it.

        Raises:
            PartyFailedError: if there is no way to it.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PartyFailedError(f"NIXL cannot reach another party: {_said(error)}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Forgets another agent."""
        self._agent.remove_remote_agent(name)

    def read[T](self, peer: Peer, spans: Spans, into: Sequence[Payload | Bits], result: T, what: str) -> Reading[T]:
        """Begins to read.

        Args:
            peer: whose memory.
            spans: which, and where to.
            into: the memory here, which is registered and held until the transfer has ended.
            result: what the transfer comes to.
            what: for messages.

        Raises:
            PartyFailedError: if NIXL refuses.
        """
        regions = {region_of(memory) for memory in into}
        if self.kind == "VRAM" and not regions <= self._registered.keys():
            # Kernels in torch's stream may still use memory that it has handed out again; NIXL follows no stream.
            torch.cuda.current_stream(self.device).synchronize()
        for region in regions:
            self.register(region)
        own = self._descriptors(spans.own, spans.nbytes, self.device, self.kind)
        theirs = self._descriptors(spans.theirs, spans.nbytes, peer.device, peer.kind)
        try:
            handle = self._agent.initialize_xfer("READ", own, theirs, peer.name)
        except Exception as error:
            raise PartyFailedError(f"{what}: NIXL says {_said(error)}") from error
        reading = Reading(self, handle, (regions, into), result, what)
        self._under_way.append(reading)
        return reading

    def begin(self, handle: Any) -> str:
        """Begins a transfer; NIXL's word for its state."""
        return str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        """Makes progress with a transfer; NIXL's word for its state."""
        return str(self._agent.check_xfer_state(handle))

    def end(self, reading: Reading[Any]) -> None:
        """Forgets a transfer that has ended, and the memory that it kept."""
        self._under_way.remove(reading)
        reading.release()
        for region in reading.regions:
            self.forget(region)

    def _descriptors(self, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], device: int, kind: str) -> Any:
        table = np.empty((len(addresses), 3), dtype=np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, nbytes, device
        return self._agent.get_xfer_descs(table, kind)

    def drain(self) -> None:
        """Waits a little for transfers that are under way."""
        deadline = time.monotonic() + _DRAIN_S
        while not all(reading.done() for reading in self._under_way) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Gives up what is under way, and ends the agent; until then what it reads into is held."""
        for reading in self._under_way:
            reading.release()
        for registered in self._registered.values():
            self._agent.deregister_memory(registered)
        self._registered.clear()
        self._uses.clear()
        self._agent = None
        self._under_way.clear()


class Reading[T]:
    """A transfer. See :class:`megatron_patches.refit.ports.Pending`.

    Args:
        agent: whose it is.
        handle: NIXL's.
        memory: what it reads into, as registered regions and as it is, to be held.
        result: what it comes to.
        what: for messages.

    Attributes:
        regions: what it reads into.
    """

    def __init__(
        self, agent: NixlAgent, handle: Any, memory: tuple[AbstractSet[Region], object], result: T, what: str
    ) -> None:
        self._agent, self._handle, self._result, self._what = agent, handle, result, what
        self.regions, self._held = memory
        self._ended, self._failure = False, ""
        self._note(agent.begin)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._ended:
            self._note(self._agent.state)
        return self._ended

    def result(self) -> T:
        """What it comes to; waits for it.

        Raises:
            PartyFailedError: if it has failed.
        """
        while not self.done():
            time.sleep(_PAUSE_S)
        self._agent.end(self)
        if self._failure:
            raise PartyFailedError(self._failure)
        return self._result

    def release(self) -> None:
        """Gives up what is left of it."""
        handle, self._handle, self._ended = self._handle, None, True
        if handle is not None:
            with suppress(Exception):  # one that cannot be given up ends with the agent
                handle.release()

    def _note(self, ask: Callable[[Any], str]) -> None:
        """Learns its state."""
        try:
            state = ask(self._handle)
        except Exception as error:  # noqa: BLE001 - its errors have no base of their own
            state = _said(error)
        if state != "PROC":
            self._ended = True
            self._failure = "" if state == "DONE" else f"{self._what}: NIXL says {state}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
