"""Links when the connection between the two ends has room for next to nothing."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Never

import numpy as np
import pytest

from megatron_patches.refit.errors import PartyFailedError, TransferError
from megatron_patches.refit.layout.boxes import TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.delta import Delta
from megatron_patches.refit.memory.loads import Reach, Terms
from megatron_patches.refit.memory.packets import Packet
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.parties.party import open_transport
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.transports import frames
from megatron_patches.refit.transports.base import LinkEnd, Place, Transport, TransportName
from megatron_patches.refit.transports.frames import Patience, prepare
from megatron_patches.refit.transports.nixl import NixlTransport
from megatron_patches.refit.transports.pump import receive_version, send_version
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd, _dial
from megatron_patches.refit.transports.shm import ShmTransport

SPEC = TensorSpec("w", (1500, 16), "bfloat16")


def check() -> None:
    """Nobody has failed."""


def place(party: int) -> Place:
    return Place(party=party, sources=1, host="127.0.0.1", device="cpu", pool=StagingPool(1 << 14), timeout_s=20.0)


def narrow(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that the system allows
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)


def test_ends_that_both_have_more_to_say_than_fits_do_not_wait_for_each_other() -> None:
    """Announcements fill one direction, what comes back the other; both ends must go on all the same."""
    view = View("w", 0, SPEC.shape, row_major_strides(SPEC.shape))
    side = Manifest(0, "", (Storage("w", "bfloat16", SPEC.numel, SPEC.numel),), (Placement(SPEC.box, view),))
    plan = make_plan([SPEC], [side], [side])
    terms = {(0, 0): Terms(packet_bytes=512, reach=Reach.CONTIGUOUS, direct_bytes=1, load_bytes=32)}
    held = np.random.default_rng(1).integers(0, 2**16, SPEC.numel, dtype=np.uint16)
    taken = np.zeros_like(held)
    receiver = ReceivingEnd(place(1), open_transport(TransportName.TCP, place(1)))
    sender = SendingEnd(place(0), open_transport(TransportName.TCP, place(0)))
    offers = {0: sender.offer(512, {"w": held}), 1: receiver.offer(512)}
    unpacker = Unpacker(plan, side, terms)
    assert unpacker.expected == 1500
    unpacker.begin(1, {"w": taken})
    with ThreadPoolExecutor(2) as pool:
        linked = pool.submit(sender.connect, offers, {0: 512}, {0: plan.digests[0, 0]}, check)
        receiver.connect(offers, {0: 512}, {0: plan.digests[0, 0]}, check)
        linked.result()
        narrow(sender._links[0].connection)
        narrow(receiver._links[0][0])
        sent = pool.submit(send_version, Sender(plan, 0, {"w": held}, terms), sender, 1, check)
        began: list[int] = []
        receive_version(
            unpacker, receiver, 20.0, check, lambda: began.append(len(unpacker._arrived) + receiver.on_their_way)
        )
        sent.result()
    assert began == [1500]  # once, when all was on its way
    unpacker.verify()
    assert np.array_equal(taken, held)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("urgent", [False, True])
def test_where_weights_are_still_quantized_packets_leave_after_the_loads_that_travel_in_place(urgent: bool) -> None:
    """A packet has scales of all weights: what is digested behind it on a GPU would wait for the last of them."""
    specs = [TensorSpec("a.scales", (4,), "bfloat16"), TensorSpec("w", (64, 16), "bfloat16")]
    side = Manifest(
        0,
        "",
        tuple(Storage(spec.name, spec.dtype, spec.numel, spec.numel) for spec in specs),
        tuple(Placement(one.box, View(one.name, 0, one.shape, row_major_strides(one.shape))) for one in specs),
    )
    plan = make_plan(specs, [side], [side])
    terms = {(0, 0): Terms(packet_bytes=512, reach=Reach.CONTIGUOUS, direct_bytes=32, load_bytes=32)}
    random = np.random.default_rng(2)
    held = {spec.name: random.integers(0, 2**16, spec.numel, dtype=np.uint16) for spec in specs}
    taken = {name: np.zeros_like(values) for name, values in held.items()}
    receiver = ReceivingEnd(place(1), open_transport(TransportName.TCP, place(1)))
    sender = SendingEnd(place(0), open_transport(TransportName.TCP, place(0)))
    offers = {0: sender.offer(512, held), 1: receiver.offer(512)}
    unpacker = Unpacker(plan, side, terms)
    unpacker.begin(1, taken)
    with closing(sender), closing(receiver), ThreadPoolExecutor(2) as pool:
        linked = pool.submit(sender.connect, offers, {0: 512}, {0: plan.digests[0, 0]}, check)
        receiver.connect(offers, {0: 512}, {0: plan.digests[0, 0]}, check)
        linked.result()
        packing = Sender(plan, 0, held, terms, urgent=urgent)
        packed = [load.key for load in packing.loads[0] if not load.direct]
        assert len(packing.loads[0]) - len(packed) == 64
        sent = pool.submit(send_version, packing, sender, 1, check)
        receive_version(unpacker, receiver, 20.0, check)
        sent.result()
        unpacker.verify()
    came = [key in packed for key in unpacker._arrived]
    assert came.index(True) >= 60 if urgent else came.index(True) < 4


def test_a_source_announces_no_packets_of_another() -> None:
    receiver = ReceivingEnd(place(1), open_transport(TransportName.TCP, place(1)))
    sender = SendingEnd(place(0), open_transport(TransportName.TCP, place(0)))
    offers = {0: sender.offer(512, {}), 1: receiver.offer(512)}
    with ThreadPoolExecutor(1) as pool:
        linked = pool.submit(sender.connect, offers, {0: 512}, {0: "d" * 64}, check)
        receiver.connect(offers, {0: 512}, {0: "d" * 64}, check)
        linked.result(20)
    sender._announce(Packet("d" * 64, 1, 0, 5, 0, (), 8, Delta(3, 1), 0), check)

    def unasked(_: object) -> Never:
        raise AssertionError("it was looked for")

    with pytest.raises(TransferError, match="source rank 0 announces a packet of source rank 5"):
        receiver.receive(unasked, unasked, check, wait_s=5.0)
    sender.close()
    receiver.close()


def test_where_nothing_comes_what_is_done_meanwhile_is_done_all_the_same() -> None:
    nothing = Manifest(0, "", (), ())
    receiver = ReceivingEnd(place(1), open_transport(TransportName.TCP, place(1)))
    began: list[int] = []
    unpacker = Unpacker(make_plan([], [nothing], [nothing]), nothing, {})
    receive_version(unpacker, receiver, 20.0, check, lambda: began.append(1))
    assert began == [1]
    receiver.close()


@pytest.mark.parametrize("refuser", ["source", "destination"])
def test_local_sockets_are_the_users_alone(refuser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {party: open_transport(TransportName.SHM, place(party)) for party in range(2)}
    with closing(ReceivingEnd(place(1), ends[1])) as receiver, closing(SendingEnd(place(0), ends[0])) as sender:
        offers = {0: sender.offer(512, {}), 1: receiver.offer(512)}
        uid, own = os.geteuid(), threading.get_ident() if refuser == "destination" else None
        # In the refuser's eyes, it is another user than its peer.
        monkeypatch.setattr(os, "geteuid", lambda: uid + (own in (None, threading.get_ident())))
        with ThreadPoolExecutor(1) as pool:
            linked = pool.submit(sender.connect, offers, {0: 512}, {0: "d" * 64}, check)
            expected = (
                f"the other end of a local socket runs as uid {uid}, this process as uid {uid + 1}; run trainer and "
                "engine as one user, or take the transport tcp"
            )
            if refuser == "source":
                with pytest.raises(PartyFailedError) as raised:
                    linked.result(20)
            else:
                with pytest.raises(PartyFailedError) as raised:
                    receiver.connect(offers, {0: 512}, {0: "d" * 64}, check)
                linked.exception(20)  # it may have said all that it has to say before it is refused
            assert str(raised.value) == expected


RUBBISH = b"hello, I am a source of weights"


dial = socket.create_connection


def strange(address: tuple[str, int], says: bytes) -> socket.socket:
    """Somebody who has no business there, and stays."""
    connection = dial(address)
    connection.sendall(says)
    return connection


@pytest.mark.parametrize("says", [RUBBISH, RUBBISH[:5], b""], ids=["rubbish", "little", "nothing"])
def test_strangers_keep_no_link_from_being_made(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who dials a destination's control connection, nor who dials that of the payload."""
    receiver = ReceivingEnd(place(1), open_transport(TransportName.TCP, place(1)))
    sender = SendingEnd(place(0), open_transport(TransportName.TCP, place(0)))
    offers = {0: sender.offer(512, {}), 1: receiver.offer(512)}
    host, _, port = offers[1].address.rpartition(":")
    strangers = [strange((host, int(port)), says) for _ in range(100)]

    def dial_second(address: tuple[str, int], *args: Any, **kwargs: Any) -> socket.socket:
        strangers.append(strange(address, says))
        return dial(address, *args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", dial_second)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        linked = pool.submit(sender.connect, offers, {0: 512}, {0: "d" * 64}, check)
        receiver.connect(offers, {0: 512}, {0: "d" * 64}, check)
        linked.result(20)
    assert time.monotonic() - began < 5
    assert len(strangers) == 102
    assert list(receiver._links) == [0]
    for end in (sender, receiver):
        end.close()
    for stranger in strangers:
        stranger.close()


@contextmanager
def listening() -> Iterator[tuple[frames.Callers, tuple[str, int]]]:
    with frames.listen("127.0.0.1") as listener:
        frames.prepare(listener)
        with closing(frames.Callers(listener, SECRET)) as callers:
            yield callers, listener.getsockname()


SECRET = bytes(range(frames.SECRET_BYTES))


def test_who_says_the_secret_in_parts_is_heard_and_what_follows_is_kept() -> None:
    with listening() as (callers, address), dial(address) as caller, ThreadPoolExecutor(1) as pool:
        found = pool.submit(callers.next, Patience(20.0, "a caller"))
        for part in (SECRET[:1], SECRET[1:7], SECRET[7:] + b"and more"):
            caller.sendall(part)
            time.sleep(0.05)
        with found.result(20) as connection:
            assert frames.receive_exactly(connection, 8, Patience(5.0, "more")) == b"and more"


def test_strangers_are_only_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MOST_STRANGERS", 3)
    with listening() as (callers, address):
        strangers = [dial(address, timeout=5.0) for _ in range(5)]
        with pytest.raises(PartyFailedError, match="waited 1 s for a caller"):
            callers.next(Patience(1.0, "a caller"))
        assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
        for stranger in strangers[2:]:
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
        strangers[4].settimeout(5.0)
        strangers[4].sendall(SECRET[:-1] + b"?")
        strangers[3].settimeout(5.0)
        strangers[3].sendall(SECRET)
        callers.next(Patience(5.0, "a caller")).close()
        assert strangers[4].recv(1) == b""
        for stranger in strangers:
            stranger.close()


def test_a_stranger_who_speaks_as_a_newer_one_takes_its_place_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MOST_STRANGERS", 1)
    with listening() as (callers, address), dial(address) as oldest:
        with pytest.raises(PartyFailedError, match="waited 0 s for a caller"):
            callers.next(Patience(0.3, "a caller"))
        with dial(address) as newer:  # this one is seen first
            oldest.sendall(b"?")
            newer.sendall(SECRET)
            time.sleep(0.05)
            callers.next(Patience(5.0, "a caller")).close()


def test_a_caller_is_waited_for_no_longer_than_the_link() -> None:
    with listening() as (callers, _), pytest.raises(PartyFailedError, match="waited 0 s for the link"):
        callers.next(Patience(0.0, "the link"))


class Agent:
    """Stands for NIXL's, of which a source's slots need little; it may refuse them."""

    metadata, kind, device = b"", "cpu", 0

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.known = refuses, list[object]()

    def register(self, region: object) -> None:
        if self.refuses:
            raise PartyFailedError("no memory can be registered")
        self.known.append(region)

    def forget(self, region: object) -> None:
        self.known.remove(region)


def nixl(here: Place, *, refuses: bool = False) -> NixlTransport:
    transport = NixlTransport.__new__(NixlTransport)
    transport._place, transport._agent = here, Agent(refuses=refuses)  # type: ignore[assignment]
    return transport


@pytest.mark.parametrize(
    "make", [ShmTransport, nixl, lambda here: nixl(here, refuses=True)], ids=["shm", "nixl", "nixl refuses"]
)
def test_a_link_that_is_not_made_keeps_no_staging_memory(make: Callable[[Place], Transport]) -> None:
    """The party makes its links again for the next version, within the same budget."""
    here = place(0)
    near, far = socket.socketpair()
    far.close()
    with near:
        end = LinkEnd(connection=near, peer=1, slot_bytes=512, patience=Patience(5.0, "a link"))
        with pytest.raises((PartyFailedError, OSError)):
            make(here).outgoing(end)
    assert here.pool.peak_bytes == 1024
    assert here.pool.leased_bytes == 0


def test_a_process_that_may_open_no_more_files_is_told_at_once() -> None:
    """The descriptor of a link's memory is lost on the way then, without an error of the system's."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far, tempfile.TemporaryFile() as file:
        socket.send_fds(near, [b"m"], [file.fileno()])
        end = LinkEnd(connection=prepare(far), peer=0, slot_bytes=512, patience=Patience(3.0, "a link"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)  # the lowest number that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(PartyFailedError, match=r"reached its limit of open files \(ulimit -n\)"):
                ShmTransport(place(1)).incoming(end)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_destination_that_takes_no_connections_is_not_waited_for_longer_than_the_time_out() -> None:
    with ExitStack() as stack:
        hangs = stack.enter_context(socket.socket(socket.AF_UNIX))
        name = f"refit-test-{os.getpid()}-full"
        hangs.bind(f"\0{name}")
        hangs.listen(0)
        while True:  # its backlog is short
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(f"\0{name}")
            except BlockingIOError:
                break
        began = time.monotonic()
        with pytest.raises(PartyFailedError, match="waited 1 s for a connection"):
            _dial(name, Patience(1.0, "a connection", check), local=True)
        assert time.monotonic() - began < 10
        with pytest.raises(PartyFailedError, match="cannot reach nobody on this machine"):
            _dial("nobody", Patience(1.0, "a connection", check), local=True)
