"""Trainer ranks in one network namespace push into an engine in another, over tcp."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.refit_two_hosts import RANKS, content, listening
from tests.support import plain_engine
from tests.support.template import Process
from tests.support.two_hosts import two_hosts


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_push_between_two_hosts_needs_the_address_of_the_trainer(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    hosts = contextlib.ExitStack()
    first, second = hosts.enter_context(two_hosts())
    started, seen = list[Process](), {host: set[tuple[str, int]]() for host in (first, second)}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            for host in (first, second):
                seen[host].update(listening(host.process))

    watching = threading.Thread(target=watch)
    try:
        for name, host in (("far", second), ("near", first)):
            started.append(plain_engine.start(str(tmp_path / f"{name}.sock"), host.inside))
        before = {host.address: {address for address, _ in listening(host.process)} for host in (first, second)}
        assert before == {first.address: set(), second.address: set()}
        watching.start()
        ranks = [
            subprocess.Popen(
                [*first.inside, sys.executable, "-m", "tests.integration.refit_two_hosts", str(tmp_path), str(rank)],
                env=environment,
            )
            for rank in range(RANKS)
        ]
        started += ranks
        assert [rank.wait(90.0) for rank in ranks] == [0] * RANKS
    finally:
        over.set()
        for process in started:
            process.kill()
            process.wait()
        hosts.close()
    watching.join()
    told, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    for refused in (told["refused"], other["refused"]):
        assert "\n" not in refused
        assert "cannot reach the rendezvous at 127.0.0.1:" in refused
        assert "the trainer's option host must be an address of its machine that engines reach" in refused
    assert tuple(told["far"]) == tuple(told["near"]) == content(1)
    assert told["at last"] == [3, 3]
    found = {host.address: {address for address, _ in opened} for host, opened in seen.items()}
    # gloo and the first session are at 127.0.0.1.
    assert found == {first.address: {first.address, "127.0.0.1"}, second.address: {second.address}}
