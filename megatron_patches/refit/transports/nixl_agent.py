"""One party's NIXL agent: registers its memory for other parties, and reads theirs.

Agents have no progress thread, which would poll without pause. A reader makes progress when it checks whether a
transfer has ended. The other side must call :meth:`NixlAgent.poll` while it may be read from.
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
from megatron_patches.refit.memory.ports import Bits, Payload
from megatron_patches.refit.transports.nics import AUTO_NICS, chosen_nics

# The package nixl loads the variant that fits the machine's CUDA. The variants alone work without GPUs, too.
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
# Without NVLink, UCX does not read another process's GPU memory, even on the same GPU, but sends over TCP at less than
# 1 GB/s. NIXL sets this itself after 1.5 (https://github.com/ai-dynamo/nixl/pull/2208).
_READ_WITHOUT_NVLINK = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
_POLL_S = 0.0002  # least time between two polls: all links of a party poll for the same messages
_DRAIN_S = 1.0  # for transfers under way when links end
_PAUSE_S = 0.0001  # between polls while waiting


def is_installed() -> bool:
    """Whether a package that :func:`load_api` tries is installed."""
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
    raise RefitError(
        "the transport nixl needs the package nixl, which cannot be imported here; install it (pip install nixl), or "
        f"choose another transport: {'; '.join(reasons)}"
    )


class MemoryRange(NamedTuple):
    """Memory of this process, in bytes."""

    address: int
    nbytes: int


def range_of(memory: Payload | Bits) -> MemoryRange:
    """The region of an array or a tensor.

    Raises:
        PartyFailedError: if ``memory`` is neither, or not contiguous.
    """
    if isinstance(memory, np.ndarray):
        contiguous, address = memory.flags.c_contiguous, int(memory.ctypes.data)
    elif isinstance(memory, bytes):
        raise PartyFailedError("NIXL cannot use bytes that may not change")
    else:
        contiguous, address = memory.is_contiguous(), int(memory.data_ptr())
    if not contiguous:
        raise PartyFailedError("NIXL cannot use a storage that is not contiguous")
    return MemoryRange(address, int(memory.nbytes))


class Spans(NamedTuple):
    """Pieces of memory of equal sizes on both sides of a transfer.

    Attributes:
        own: address of each piece on this side, uint64.
        theirs: address of each piece on the other side, uint64.
        nbytes: size of each piece, uint64.
    """

    own: NDArray[np.uint64]
    theirs: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]


class Peer(NamedTuple):
    """Another party's agent.

    Attributes:
        name: NIXL's name of the agent.
        kind: kind of its memory, ``DRAM`` or ``VRAM``.
        device: number of its GPU in its process; 0 for host memory.
    """

    name: str
    kind: str
    device: int


class NixlAgent:
    """A NIXL agent.

    An agent for a GPU sets ``UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on`` in the process's environment, unless it is already set.

    Args:
        party: number of the party, for the agent's name.
        device: device of the memory that it registers: ``cpu``, or torch's name of a GPU.
        host: address at which other parties reach this one; see
            :func:`megatron_patches.refit.transports.nics.choose_nics`.
        nics: which NICs it may use; see :func:`megatron_patches.refit.transports.nics.parse_nics`.

    Attributes:
        kind: kind of that memory, ``DRAM`` or ``VRAM``.
        device: number of the GPU; 0 for host memory.

    Raises:
        RefitError: if NIXL is not installed, or none of the NICs can be used.
    """

    def __init__(self, party: int, device: str, host: str, nics: str = AUTO_NICS) -> None:
        api = load_api()
        on_host = device == "cpu"
        if not on_host:
            os.environ.setdefault(*_READ_WITHOUT_NVLINK)  # UCX reads it when the agent is created
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        with chosen_nics(nics, device, host):
            self._agent: Any = api.nixl_agent(f"refit-{party}-{secrets.token_hex(8)}", config)
        self.kind, self.device = ("DRAM", 0) if on_host else ("VRAM", int(device.partition(":")[2] or 0))
        self._registered: dict[MemoryRange, Any] = {}
        self._uses: Counter[MemoryRange] = Counter()
        self._under_way: list[NixlRead[Any]] = []
        self._looked = 0.0

    @property
    def metadata(self) -> bytes:
        """What other parties must know to read from this agent: how to connect, and all registered memory."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def register(self, region: MemoryRange) -> None:
        """Registers memory with NIXL, or counts another use of it. Call :meth:`forget` once per call.

        Args:
            region: the memory. It must not overlap other registered memory, because NIXL would confuse the two.

        Raises:
            PartyFailedError: if NIXL fails.
        """
        if not self._uses[region]:
            try:
                descriptors = [(region.address, region.nbytes, self.device, "")]
                self._registered[region] = self._agent.register_memory(descriptors, self.kind)
            except Exception as error:  # NIXL's errors have no common base
                raise PartyFailedError(
                    f"NIXL cannot register {region.nbytes} bytes of {self.kind} ({_said(error)}); where that is for "
                    "want of locked memory, raise its limit (ulimit -l), or take another transport"
                ) from error
        self._uses[region] += 1

    def forget(self, region: MemoryRange) -> None:
        """Ends one use of registered memory. Deregisters it after the last."""
        self._uses[region] -= 1
        if not self._uses[region]:
            del self._uses[region]
            self._agent.deregister_memory(self._registered.pop(region))

    def poll(self) -> None:
        """Serves readers whose transfers need this side, for example to connect, or over TCP."""
        now = time.monotonic()
        if now - self._looked >= _POLL_S:
            self._agent.get_new_notifs()
            self._looked = now

    def meet(self, metadata: bytes) -> str:
        """Adds another agent, or updates its registered memory.

        Returns:
            The agent's name for :meth:`read` and :meth:`part`.

        Raises:
            PartyFailedError: if NIXL cannot reach it.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PartyFailedError(
                f"NIXL cannot reach another party: {_said(error)}; where no network joins the NICs of the two, choose "
                "others with the option nics"
            ) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Removes another agent."""
        self._agent.remove_remote_agent(name)

    def read[T](self, peer: Peer, spans: Spans, into: Sequence[Payload | Bits], result: T, what: str) -> NixlRead[T]:
        """Starts to read.

        Args:
            peer: the agent to read from.
            spans: what to read, and where to.
            into: the memory on this side; registered and kept alive until the transfer has ended.
            result: result of the transfer.
            what: description for messages.

        Raises:
            PartyFailedError: if NIXL fails.
        """
        regions = {range_of(memory) for memory in into}
        if self.kind == "VRAM" and not regions <= self._registered.keys():
            # Kernels on torch's stream may still use memory that was freed and reused; NIXL is not ordered with
            # streams.
            torch.cuda.current_stream(self.device).synchronize()
        for region in regions:
            self.register(region)
        own = self._descriptors(spans.own, spans.nbytes, self.device, self.kind)
        theirs = self._descriptors(spans.theirs, spans.nbytes, peer.device, peer.kind)
        try:
            handle = self._agent.initialize_xfer("READ", own, theirs, peer.name)
        except Exception as error:
            raise PartyFailedError(f"{what}: NIXL says {_said(error)}") from error
        reading = NixlRead(self, handle, (regions, into), result, what)
        self._under_way.append(reading)
        return reading

    def begin(self, handle: Any) -> str:
        """Starts a transfer. Returns NIXL's state of it."""
        return str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        """Makes progress with a transfer. Returns NIXL's state of it."""
        return str(self._agent.check_xfer_state(handle))

    def end(self, reading: NixlRead[Any]) -> None:
        """Forgets a transfer that has ended, and the memory that it kept alive."""
        self._under_way.remove(reading)
        reading.release()
        for region in reading.regions:
            self.forget(region)

    def _descriptors(self, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], device: int, kind: str) -> Any:
        table = np.empty((len(addresses), 3), dtype=np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, nbytes, device
        return self._agent.get_xfer_descs(table, kind)

    def drain(self) -> None:
        """Waits a little for transfers under way."""
        deadline = time.monotonic() + _DRAIN_S
        while not all(reading.done() for reading in self._under_way) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Abandons transfers under way and closes the agent. The memory that they read into is kept until then."""
        for reading in self._under_way:
            reading.release()
        for registered in self._registered.values():
            self._agent.deregister_memory(registered)
        self._registered.clear()
        self._uses.clear()
        self._agent = None
        self._under_way.clear()


class NixlRead[T]:
    """A transfer. See :class:`megatron_patches.refit.memory.ports.Pending`.

    Args:
        agent: the agent that reads.
        handle: NIXL's handle.
        memory: the memory that it reads into, as registered regions and as objects to keep alive.
        result: result of the transfer.
        what: description for messages.

    Attributes:
        regions: regions that it reads into.
    """

    def __init__(
        self, agent: NixlAgent, handle: Any, memory: tuple[AbstractSet[MemoryRange], object], result: T, what: str
    ) -> None:
        self._agent, self._handle, self._result, self._what = agent, handle, result, what
        self.regions, self._held = memory
        self._ended, self._failure = False, ""
        self._note(agent.begin)

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        if not self._ended:
            self._note(self._agent.state)
        return self._ended

    def result(self) -> T:
        """Waits for its end, and returns its result.

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
        """Releases NIXL's handle, even if the transfer has not ended."""
        handle, self._handle, self._ended = self._handle, None, True
        if handle is not None:
            with suppress(Exception):  # a transfer that cannot be released ends with the agent
                handle.release()

    def _note(self, ask: Callable[[Any], str]) -> None:
        """Updates the state."""
        try:
            state = ask(self._handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            state = _said(error)
        if state != "PROC":
            self._ended = True
            self._failure = "" if state == "DONE" else f"{self._what}: NIXL says {state}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
