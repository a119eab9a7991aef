"""What versions cost reaches the log, a file and Prometheus, and a fault of one of these costs no version."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from megatron_patches.refit.control.messages import Moved, State
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.telemetry import Address, Telemetry, VersionCost, address_from, cost_of
from tests.support.full_disk import files_of

LASTED = {State.SENDING: 2.0, State.COMMITTING: 0.5, State.READY: 9.0}


def cost(version: int, reason: str | None = None) -> VersionCost:
    """Of a version that three ranks send, one of them nothing."""
    return cost_of(
        "http://a",
        version,
        planning_s=0.25,
        lasted=LASTED,
        moved=None
        if reason
        else Moved({"allocate": 0.125, "move": 1.0, "verify": 0.25}, 7, bytes_by_source=(100, 0, 30)),
        paused_s=0.375,
        reason=reason,
    )


def read(address: Address) -> dict[str, float]:
    """The metrics at an address."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    deadline = time.monotonic() + 30.0
    while True:
        try:
            with urllib.request.urlopen(f"http://{host}:{address.port}/metrics", timeout=5.0) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
            return {name: float(value) for name, _, value in samples if "_created" not in name}


def test_sending_is_moving_verifying_and_waiting() -> None:
    seconds = {"plan": 0.25, "wait": 0.75, "move": 1.0, "verify": 0.25, "commit": 0.5, "pause": 0.375}
    assert cost(7).seconds == seconds
    assert cost(7).bytes_by_source == (100, 0, 30)
    assert cost(7).sources == ("0", "1", "2")
    lost = cost(7, "it has left")
    assert lost.seconds == {**seconds, "wait": 2.0, "move": 0.0, "verify": 0.0}
    assert lost.bytes_by_source == ()
    assert lost.sources == ()


def test_each_version_is_a_line_of_the_log_and_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.jsonl"
    path.write_text("{}\n")
    began = time.time()
    with caplog.at_level(logging.INFO), closing(Telemetry(path)) as telemetry:
        telemetry.tell(cost(7))
        assert len(path.read_text().splitlines()) == 2  # at once
        telemetry.tell(cost(8, "it has left"))
    telemetry.tell(cost(9))  # after the end, only to the log
    kept, *found = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == {}
    assert all(began <= line.pop("time") <= time.time() for line in found)
    seconds = {"plan": 0.25, "wait": 0.75, "move": 1.0, "verify": 0.25, "commit": 0.5, "pause": 0.375}
    assert found[0] == {
        "schema": 1,
        "engine": "http://a",
        "version": 7,
        "serves": True,
        "reason": None,
        "seconds": seconds,
        "bytes_by_source": [100, 0, 30],
        "sources": ["0", "1", "2"],
    }
    assert (found[1]["version"], found[1]["serves"], found[1]["reason"]) == (8, False, "it has left")
    first, second = [record.getMessage() for record in caplog.records][:2]
    assert first == (
        "refit: http://a version 7 serves: plan 0.250 s, wait 0.750 s, move 1.000 s, verify 0.250 s, commit 0.500 s, "
        "pause 0.375 s; 130 bytes from 2 sources, 100 at most"
    )
    assert second.endswith("pause 0.375 s; 0 bytes from 0 sources, 0 at most (it has left)")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_prometheus_reads_the_sums(host: str) -> None:
    with closing(Telemetry(metrics=Address(host, 0))) as telemetry:
        assert telemetry.metrics is not None
        telemetry.tell(cost(7))
        telemetry.tell(cost(8, "it has left"))
        telemetry.tell(cost(9))
        found = read(telemetry.metrics)
    assert found['etp_refit_seconds_sum{engine="http://a",part="wait"}'] == 3.5
    assert found['etp_refit_seconds_count{engine="http://a",part="move"}'] == 3
    assert found['etp_refit_seconds_sum{engine="http://a",part="move"}'] == 2
    sent = {name: value for name, value in found.items() if name.startswith("etp_refit_sent_bytes_total")}
    assert list(sent.values()) == [200, 0, 60]
    assert found['etp_refit_version{engine="http://a"}'] == 9
    assert found['etp_refit_failures_total{engine="http://a"}'] == 1
    with pytest.raises(OSError, match="refused"), socket.create_connection(telemetry.metrics, timeout=5.0):
        pass


def test_several_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    with closing(Telemetry(path)) as telemetry, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda version: telemetry.tell(cost(version)), range(200)))
    assert sorted(json.loads(line)["version"] for line in path.read_text().splitlines()) == list(range(200))


def test_a_full_disk_costs_no_version(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Telemetry(Path("/dev/full"))) as telemetry:
        telemetry.tell(cost(7))
    (message,) = caplog.messages
    assert message == (
        "refit: version 7 of http://a is missing in /dev/full, to which telemetry cannot be appended (No space left on "
        "device); make room there for later versions"
    )


def test_a_disk_that_becomes_full_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.jsonl"
    with closing(Telemetry(path)) as telemetry:
        telemetry.tell(cost(7))
        with files_of(path.stat().st_size + 100):
            telemetry.tell(cost(8))
        telemetry.tell(cost(9))
    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == [7, 9]
    assert [message.partition(",")[0] for message in caplog.messages] == [
        f"refit: version 8 of http://a is missing in {path}"
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("9100", Address("127.0.0.1", 9100)),
        ("0", Address("127.0.0.1", 0)),
        ("10.0.0.5:9100", Address("10.0.0.5", 9100)),
        ("trainer-0:9100", Address("trainer-0", 9100)),
        ("[::1]:9100", Address("::1", 9100)),
    ],
)
def test_a_port_alone_is_one_of_this_machine(text: str, meant: Address) -> None:
    assert address_from(text) == meant


@pytest.mark.parametrize("text", ["", "a", "-1", "65536", ":9100", "::1:9100", "[::1]", "[a]:1", "a:", "a:b", "1.5"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(text))} is no address of metrics; it must be PORT"):
        address_from(text)


def test_what_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RefitError, match=rf"cannot serve metrics at 127\.0\.0\.1, port {port}: Address already in"):
            Telemetry(metrics=Address("127.0.0.1", port))
    with pytest.raises(RefitError, match=rf"cannot append telemetry to {tmp_path}: Is a directory"):
        Telemetry(tmp_path, Address("127.0.0.1", port))
    Telemetry(metrics=Address("127.0.0.1", port)).close()  # the refused one has given the port back
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(RefitError, match=r"metrics at port 9100 need .*: pip install prometheus_client$"):
        Telemetry(metrics=Address("127.0.0.1", 9100))
