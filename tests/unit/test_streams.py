"""Started work is ordered on its own device, whichever device is current. Streams only note what they wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from etp.streams import InFlight, Lane, Together

CURRENT, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self, device: torch.device, **_: Any) -> None:
        self.device = device
        self.waited: list[Any] = []


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream

    def wait(self, stream: Stream) -> None:
        stream.waited.append(self)


class Devices:
    """In the place of ``torch.cuda``, with two devices, of which the first is current."""

    def __init__(self) -> None:
        self.Event, self.Stream = Event, Stream
        self.streams = {device: Stream(device) for device in (CURRENT, OTHER)}

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.streams[CURRENT if device is None else device]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        former, self.streams[stream.device] = self.streams[stream.device], stream
        yield
        self.streams[stream.device] = former


@pytest.mark.parametrize("device", [CURRENT, OTHER], ids=str)
def test_work_is_waited_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    lane = Lane(device)
    ready = lane.start(InFlight)
    (begin,) = lane._stream.waited
    assert begin.stream is devices.streams[device]
    assert ready.wait() is devices.streams[device]
    (end,) = devices.streams[device].waited
    assert end.stream is lane._stream
    ready.wait()
    assert devices.streams[device].waited == [end], "the second time it is ordered already"
    other = OTHER if device == CURRENT else CURRENT
    assert devices.streams[other].waited == []


def test_a_reader_waits_for_the_end_that_work_has_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    lane, end, reader = Lane(CURRENT), Event(), Event()
    lane.start(InFlight)
    ready = lane.start(lambda: InFlight(end), waits=[reader])
    assert lane._stream.waited[1:] == [reader]
    ready.wait()
    assert devices.streams[CURRENT].waited == [end]


def test_work_that_is_started_again_has_one_event_and_readers_wait_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    lane, work = Lane(CURRENT), InFlight()
    for times in (1, 2):
        lane.start(lambda: work, waits=()).wait()
        (end,) = set(devices.streams[CURRENT].waited)
        assert end.stream is lane._stream
        assert len(devices.streams[CURRENT].waited) == times


def test_the_end_of_several_works_is_that_of_the_last() -> None:
    first, last = Event(), Event()
    assert Together([InFlight(first), InFlight(last, among_peers=True)]).end is last


def test_the_end_of_what_waits_for_peers_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: Devices())
    watched: list[tuple[Any, str]] = []
    lane, end = Lane(CURRENT, lambda *what: watched.append(what)), Event()
    lane.start(lambda: InFlight(end), label="a copy")
    lane.start(lambda: InFlight(end, among_peers=True), label="gather")
    lane.start(lambda: InFlight(among_peers=True), label="reduction")
    assert [label for _, label in watched] == ["gather", "reduction"]
    assert watched[0][0] is end
    assert watched[1][0].stream is lane._stream


def test_a_mark_is_recorded_again_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    lane, side = Lane(CURRENT), Stream(CURRENT)
    mark = lane.mark(side)
    assert mark.stream is side
    assert lane.mark(event=mark) is mark
    assert mark.stream is devices.streams[CURRENT]
