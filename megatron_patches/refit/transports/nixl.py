"""NIXL (https://github.com/ai-dynamo/nixl): the destination reads the source's slots, over whatever UCX finds.

On one host that is shared memory, or NVLink between GPUs; between hosts RDMA, or TCP. Slots lie where the party's
storages do, on the host or on a GPU. The two sides may run different versions of torch.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.loads import Reach
from megatron_patches.refit.ports import Memory, Payload, Pending
from megatron_patches.refit.staging import SLOTS
from megatron_patches.refit.transports.base import Check, LinkEnd, Offer, Packed, Place

# The package nixl takes the one that fits the machine's CUDA; alone, the others work without GPUs too.
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")


class _Remote(msgspec.Struct):
    """What a destination must know of its source's slots.

    Attributes:
        agent: the source's agent, as NIXL describes it.
        kind: ``DRAM`` or ``VRAM``.
        address: of the first slot.
        device: number of the GPU in the source's process; 0 on the host.
    """

    agent: bytes
    kind: str
    address: int
    device: int


_decode_remote = msgspec.msgpack.Decoder(_Remote).decode


class NixlTransport:
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party is.

    Raises:
        RefitError: if NIXL is not installed.
    """

    one_host = False
    reach = Reach.NONE  # only slots are registered

    def __init__(self, place: Place) -> None:
        self._place = place
        api = load_api()
        # The thread polls without a pause. A worker polls itself while it reads; a source may have to answer.
        is_source = place.party < place.sources
        config = api.nixl_agent_config(enable_prog_thread=is_source, backends=["UCX"])
        self._agent: Any = api.nixl_agent(f"refit-{place.party}-{secrets.token_hex(8)}", config)

    def hidden(self, memory: Memory) -> frozenset[str]:  # noqa: ARG002 - whatever it is
        """All are alike."""
        return frozenset()

    def details(self) -> bytes:
        """Nothing."""
        return b""

    def connect(self, offers: Sequence[Offer], check: Check) -> None:
        """Nothing is common to all links."""

    def outgoing(self, end: LinkEnd) -> NixlOutgoing:
        """Makes the slots known to the destination."""
        slots = _Slots(self._agent, self._place, end.slot_bytes)
        remote = _Remote(self._agent.get_agent_metadata(), slots.kind, slots.address, slots.device)
        frames.send(end.connection, msgspec.msgpack.encode(remote), end.patience)
        return NixlOutgoing(slots)

    def incoming(self, end: LinkEnd) -> NixlIncoming:
        """Gets to know the source's slots."""
        remote = _decode_remote(frames.receive(end.connection, end.patience))
        name = self._agent.add_remote_agent(remote.agent)
        slots = _Slots(self._agent, self._place, end.slot_bytes)
        return NixlIncoming(self._agent, slots, name.decode() if isinstance(name, bytes) else name, remote, end)

    def stop(self) -> None:
        """Each wire ends what is under way."""

    def close(self) -> None:
        """Ends the agent."""
        self._agent = None


def load_api() -> Any:
    """NIXL's Python interface.

    Raises:
        RefitError: if it is not installed.
    """
    reasons = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise RefitError(f"the transport nixl needs the package nixl (pip install nixl): {'; '.join(reasons)}")


class _Slots:
    """Registered memory of one side of a link."""

    def __init__(self, agent: Any, place: Place, slot_bytes: int) -> None:
        self._agent, self.slot_bytes = agent, slot_bytes
        self.kind, self.device = "DRAM", 0
        if place.device == "cpu":
            host = place.pool.lease(SLOTS * slot_bytes, lambda nbytes: np.zeros(nbytes, dtype=np.uint8))
            self._lease: Any = host
            self.address = int(host.buffer.ctypes.data)
        else:
            import torch

            device = torch.device(place.device)
            self.kind, self.device = "VRAM", device.index or 0
            self._lease = place.pool.lease(
                SLOTS * slot_bytes, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device)
            )
            self.address = int(self._lease.buffer.data_ptr())
        self.payloads = [self._lease.buffer[index * slot_bytes : (index + 1) * slot_bytes] for index in range(SLOTS)]
        self._registered = agent.register_memory([(self.address, SLOTS * slot_bytes, self.device, "")], self.kind)

    def release(self) -> None:
        """Forgets it."""
        self._agent.deregister_memory(self._registered)
        self.payloads = []
        self._lease.release()


class NixlOutgoing(Packed):
    """A source's side of a link: the destination does the work.

    Attributes:
        direct: False: only slots are registered.

    Args:
        slots: the memory.
    """

    direct = False

    def __init__(self, slots: _Slots) -> None:
        self._slots = slots

    @property
    def slots(self) -> Sequence[Payload]:
        """Memory to pack into."""
        return self._slots.payloads

    def start(self, slot: int, payload: Payload) -> None:
        """The destination reads it when it was told."""

    def check(self) -> None:
        """What fails fails at the destination."""

    def close(self) -> None:
        """Forgets the memory."""
        self._slots.release()


class NixlIncoming(Packed):
    """A destination's side of a link.

    Attributes:
        direct: False: only slots are registered.

    Args:
        agent: this party's agent.
        slots: the own memory.
        name: the source's agent.
        remote: its slots.
        end: the link.
    """

    direct = False

    def __init__(self, agent: Any, slots: _Slots, name: str, remote: _Remote, end: LinkEnd) -> None:
        self._agent, self._slots, self._name, self._remote = agent, slots, name, remote
        self._what = f"reading a packet of source rank {end.peer}"
        self._reading: dict[int, _Reading] = {}

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Reads into the own slot of the same number, which is free if the source's is."""
        offset = slot * self._slots.slot_bytes
        own = self._agent.get_xfer_descs([(self._slots.address + offset, nbytes, self._slots.device)], self._slots.kind)
        remote = self._remote
        theirs = self._agent.get_xfer_descs([(remote.address + offset, nbytes, remote.device)], remote.kind)
        handle = self._agent.initialize_xfer("READ", own, theirs, self._name)
        self._reading[slot] = _Reading(self._agent, handle, self._slots.payloads[slot][:nbytes], self._what)
        return self._reading[slot]

    def close(self) -> None:
        """Ends it."""
        for reading in self._reading.values():
            reading.end()
        self._slots.release()
        self._agent.remove_remote_agent(self._name)


class _Reading:
    """A transfer."""

    def __init__(self, agent: Any, handle: Any, payload: Payload, what: str) -> None:
        self._agent, self._handle, self._payload, self._what = agent, handle, payload, what
        self._state = str(agent.transfer(handle))

    def done(self) -> bool:
        if self._state == "PROC":
            self._state = str(self._agent.check_xfer_state(self._handle))
        return self._state != "PROC"

    def result(self) -> Payload:
        if not self.done() or self._state != "DONE":
            raise PartyFailedError(f"{self._what}: NIXL says {self._state}")
        self.end()
        return self._payload

    def end(self) -> None:
        """Gives the transfer up, or what is left of it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._agent.release_xfer_handle(handle)
