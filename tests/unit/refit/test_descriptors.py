"""File descriptors that travel over a link: which arrive, which are closed, and waits that end."""

from __future__ import annotations

import os
import resource
import socket
import time

import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.transports.cuda_mapped import Fetch
from megatron_patches.refit.transports.frames import (
    MOST_DESCRIPTORS,
    Patience,
    prepare,
    receive_descriptors,
    send_descriptors,
)
from tests.unit.refit.link_ends import asked_over_a_link


def give(number: int) -> int:
    file = os.memfd_create("file")
    os.write(file, b"file %d" % number)
    return file


def take(fetch: Fetch, numbers: list[int]) -> dict[int, bytes]:
    found = {}

    def use(number: int, descriptor: int) -> None:
        assert not os.get_inheritable(descriptor)
        found[number] = os.pread(descriptor, 99, 0)

    fetch(numbers, use)
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - what is open now, not a folder


def test_what_is_asked_for_arrives_and_nothing_stays_open() -> None:
    """More than one message takes, some of it twice; never more at a time than one message takes, at either end."""
    numbers = [*range(100, 100 + 2 * MOST_DESCRIPTORS + 3), 100]
    before, most = open_files(), 0

    def counted(number: int) -> int:
        nonlocal most
        most = max(most, open_files())
        return give(number)

    with asked_over_a_link(counted) as fetch:
        during = open_files()
        assert take(fetch, numbers) == {number: b"file %d" % number for number in numbers}
        assert take(fetch, []) == {}
    assert most <= during + MOST_DESCRIPTORS
    assert open_files() == before


def test_what_fails_while_they_are_used_closes_them() -> None:
    def fail(number: int, descriptor: int) -> None:
        raise ZeroDivisionError(number, descriptor)

    before = open_files()
    with asked_over_a_link(give) as fetch, pytest.raises(ZeroDivisionError):
        fetch([1, 2, 3], fail)
    assert open_files() == before


def test_what_cannot_be_given_ends_the_link_and_the_reason_of_the_failed_party_is_raised() -> None:
    def refuse(number: int) -> int:
        if number == 3:
            raise PartyFailedError("no number 3")
        return give(number)

    def failed() -> None:
        raise PartyFailedError("source rank 1: no number 3")

    before = open_files()
    with asked_over_a_link(refuse, failed=failed) as fetch:
        with pytest.raises(PartyFailedError, match="source rank 1: no number 3"):
            take(fetch, [1, 2, 3])
        assert open_files() == before + 3  # both ends of the link, and what it waits on
    assert open_files() == before


def test_waits_end() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        started = time.monotonic()
        with pytest.raises(PartyFailedError, match="waited 0 s for files"):
            receive_descriptors(prepare(near), 1, Patience(0.3, "files"))
        assert 0.2 < time.monotonic() - started < 5.0
        prepare(far).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

        def fill() -> None:
            while True:
                send_descriptors(far, [0], Patience(0.3, "room"))

        with pytest.raises(PartyFailedError, match="waited 0 s for room"):
            fill()


def test_a_peer_that_has_gone_ends_the_wait() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    far.close()
    with prepare(near):
        with pytest.raises(PartyFailedError, match="lost the connection while waiting for files: the peer closed it"):
            receive_descriptors(near, 1, Patience(10.0, "files"))
        with pytest.raises(PartyFailedError, match=r"lost the connection while waiting for files: .*Broken pipe"):
            send_descriptors(near, [0], Patience(10.0, "files"))


def test_too_few_files_may_be_open() -> None:
    """What has come is closed again."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        send_descriptors(far, [0] * MOST_DESCRIPTORS, Patience(10.0, "files"))
        before = open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, hard))
        try:
            with pytest.raises(PartyFailedError, match=r"of 64 descriptors have come; .*limit of open files"):
                receive_descriptors(prepare(near), MOST_DESCRIPTORS, Patience(10.0, "files"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert open_files() == before
