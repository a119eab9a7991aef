"""Files that are handed to other processes: which arrive, who is refused, and waits that end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.transports.descriptors import BATCH, Counter, DescriptorServer, take_descriptors

OTHER_SIDE = """
import os, sys
from megatron_patches.refit.transports.descriptors import DescriptorServer

def give(number):
    if number == 13:
        os.kill(os.getpid(), 9)
    file = os.memfd_create("file")
    os.write(file, b"file %d" % number)
    return file

server = DescriptorServer(give)
print(server.counter.address, server.counter.token.hex(), flush=True)
sys.stdin.read()
server.close()
"""


def give(number: int) -> int:
    file = os.memfd_create("file")
    os.write(file, b"file %d" % number)
    return file


def patience(seconds: float = 10.0) -> Patience:
    return Patience(seconds, "files")


def take(counter: Counter, numbers: list[int], seconds: float = 10.0) -> dict[int, bytes]:
    found = {}

    def use(number: int, descriptor: int) -> None:
        assert not os.get_inheritable(descriptor)
        found[number] = os.pread(descriptor, 99, 0)

    take_descriptors(counter, numbers, use, patience(seconds))
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - what is open now, not a folder


@contextmanager
def another_process() -> Iterator[tuple[subprocess.Popen[str], Counter]]:
    command = [sys.executable, "-c", OTHER_SIDE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, token = process.stdout.readline().split()
        try:
            yield process, Counter(address, bytes.fromhex(token))
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10.0)


def test_files_of_another_process_arrive_and_none_stays_open() -> None:
    """More of them than one message takes, some of them twice."""
    numbers = [*range(100, 100 + 2 * BATCH + 3), 100]
    before = open_files()
    with another_process() as (process, counter):
        theirs = f"/proc/{process.pid}/fd"
        held = len(os.listdir(theirs))  # noqa: PTH208 - as above
        assert take(counter, numbers) == {number: b"file %d" % number for number in numbers}
        assert take(counter, []) == {}
        deadline = time.monotonic() + 5.0
        while len(os.listdir(theirs)) != held:  # noqa: PTH208 - as above
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert process.returncode == 0
    assert open_files() == before


def test_many_ask_at_once() -> None:
    server = DescriptorServer(give)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda first: take(server.counter, [first, first + 1]), range(64)))
    server.close()
    assert found == [{first: b"file %d" % first, first + 1: b"file %d" % (first + 1)} for first in range(64)]


@pytest.mark.parametrize("token", [b"", b"another token of", b"x" * 500])
def test_strangers_get_nothing(token: bytes) -> None:
    given: list[int] = []
    server = DescriptorServer(lambda number: given.append(number) or give(number))  # type: ignore[func-returns-value]
    with pytest.raises(PartyFailedError, match="lost the connection while waiting for files: the peer closed it"):
        take(Counter(server.counter.address, token), [1])
    assert not given
    assert take(server.counter, [2]) == {2: b"file 2"}
    server.close()


def test_what_prevents_opening_is_told_and_others_go_on() -> None:
    def refuse(number: int) -> int:
        if number == 3:
            raise ValueError("no number 3")
        return give(number)

    before = open_files()
    server = DescriptorServer(refuse)
    with pytest.raises(PartyFailedError, match="cannot hand out its memory: ValueError: no number 3"):
        take(server.counter, [1, 2, 3])
    assert take(server.counter, [1]) == {1: b"file 1"}
    server.close()
    server.close()
    assert open_files() == before


def test_what_fails_while_files_are_used_closes_them() -> None:
    def fail(number: int, descriptor: int) -> None:
        raise ZeroDivisionError(number, descriptor)

    before = open_files()
    server = DescriptorServer(give)
    with pytest.raises(ZeroDivisionError):
        take_descriptors(server.counter, [1, 2, 3], fail, patience())
    server.close()
    assert open_files() == before


def test_a_peer_that_dies_meanwhile_ends_the_wait() -> None:
    with another_process() as (process, counter):
        with pytest.raises(PartyFailedError, match="lost the connection while waiting for files"):
            take(counter, [1, 13], seconds=60.0)
        assert process.wait(10.0) == -signal.SIGKILL
        with pytest.raises(PartyFailedError, match=r"lost the connection while waiting for files: .*refused"):
            take(counter, [1])


def test_a_server_that_closes_ends_the_wait_of_others() -> None:
    server = DescriptorServer(give)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10.0)
    connection.connect(f"\0{server.counter.address}")
    time.sleep(0.1)
    server.close()
    assert connection.recv(1) == b""
    connection.close()


def test_the_reason_of_a_failed_party_is_what_a_wait_ends_with() -> None:
    def check() -> None:
        raise PartyFailedError("source rank 1: out of memory")

    server = DescriptorServer(give)
    server.close()
    with pytest.raises(PartyFailedError, match="source rank 1: out of memory"):
        take_descriptors(server.counter, [1], lambda *_: None, Patience(10.0, "files", check))


@pytest.mark.parametrize("accepts", [False, True])
def test_waits_end(accepts: bool) -> None:
    """For who is never heard: its listener is full, or it takes requests and does not answer."""
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.bind("\0refit-test-silent")
    silent.listen(0)
    held = []
    if not accepts:
        while True:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.settimeout(0.01)
            held.append(caller)
            try:
                caller.connect("\0refit-test-silent")
            except OSError:
                break
    started = time.monotonic()
    with pytest.raises(PartyFailedError, match="waited 0 s for files"):
        take(Counter("refit-test-silent", b"t" * 16), [1], seconds=0.3)
    assert 0.2 < time.monotonic() - started < 5.0
    for open_socket in (silent, *held):
        open_socket.close()


def test_a_caller_who_says_nothing_keeps_nobody_waiting() -> None:
    server = DescriptorServer(give)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{server.counter.address}")
        assert take(server.counter, [5], seconds=5.0) == {5: b"file 5"}
    server.close()


def test_too_few_files_may_be_open() -> None:
    """The limit holds for this process; what has come is closed again."""
    with another_process() as (_, counter):
        before = open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, hard))
        try:
            with pytest.raises(PartyFailedError, match=r"of 64 descriptors have come; .*limit of open files"):
                take(counter, list(range(20, 84)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert open_files() == before


def test_files_are_given_in_another_thread_than_the_one_that_made_the_server() -> None:
    threads: list[str] = []

    def note(number: int) -> int:
        threads.append(threading.current_thread().name)
        return give(number)

    server = DescriptorServer(note)
    take(server.counter, [1])
    server.close()
    assert threads == ["refit-descriptors"]
    assert "refit-descriptors" not in {thread.name for thread in threading.enumerate()}


def test_without_room_for_another_connection_it_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def no_room(_: socket.socket) -> None:
        nonlocal tries
        tries += 1
        raise OSError(24, "Too many open files")

    server = DescriptorServer(give)
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as full:
            full.setattr(socket.socket, "accept", no_room)
            found = pool.submit(take, server.counter, [7])
            time.sleep(0.5)
        assert 0 < tries < 100
        assert found.result() == {7: b"file 7"}
    server.close()
