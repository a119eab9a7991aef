"""Which groups may copy from and to each other's memory, for machines described here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

from etp.collectives import reach


@dataclass(frozen=True)
class Rank:
    """What one rank's process says of its machine."""

    host: str = "a"
    visible: tuple[str, ...] = ("GPU-0", "GPU-1", "GPU-2")
    index: int = 0
    shares: bool = False


def answers(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Rank], linked: Callable[[str, str], bool] = lambda *_: True
) -> list[str]:
    """The obstacle that each rank is told of; ranks are threads."""
    here, barrier, said = threading.local(), threading.Barrier(len(ranks), timeout=10), [None] * len(ranks)

    def gather(found: list[Any], own: Any, group: Any) -> None:
        del group
        said[here.number] = own
        barrier.wait()
        found[:] = list(said)
        barrier.wait()

    def rank() -> Rank:
        return ranks[here.number]

    class Nvml:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def reaches(self, uuid: str, other: str) -> bool:
            if other == "GPU-2":
                raise reach.NvmlError("nvmlDeviceGetHandleByUUID failed: Not Found")
            return linked(uuid, other)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda _: len(ranks))
    monkeypatch.setattr(socket, "gethostname", lambda: rank().host)
    monkeypatch.setattr(reach, "_uuid", lambda index: rank().visible[index])
    monkeypatch.setattr(reach, "Nvml", Nvml)
    monkeypatch.setattr(reach, "_may_share", lambda: rank().shares)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(rank().visible))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: linked(rank().visible[a], rank().visible[b]))
    found = [""] * len(ranks)

    def run(number: int) -> None:
        here.number = number
        device = torch.device("cuda", ranks[number].index)
        found[number] = reach.obstacle_to_peer_copies(None, device)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [Rank(index=0), Rank(index=1), Rank(index=2)]) == [""] * 3


def test_each_sees_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [Rank(visible=("GPU-0",)), Rank(visible=("GPU-1",))]) == [""] * 2


def test_hosts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [Rank(index=0), Rank(host="b", index=1)]) == ["its ranks are on 2 hosts"] * 2


def test_one_gpu_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [Rank(), Rank(visible=("GPU-0",))]) == ["several of its ranks use one GPU"] * 2


def test_one_gpu_for_two_must_be_allowed_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [Rank(shares=True), Rank(shares=True)]) == [""] * 2
    assert all(answers(monkeypatch, [Rank(shares=True), Rank()]))


@pytest.mark.parametrize("visible", [("GPU-0", "GPU-1"), ("GPU-1",)])
def test_no_link_between_two_is_told_to_all(monkeypatch: pytest.MonkeyPatch, visible: tuple[str, ...]) -> None:
    ranks = [Rank(visible=("GPU-0",)), Rank(visible=visible, index=len(visible) - 1)]
    found = answers(monkeypatch, ranks, lambda a, b: {a, b} != {"GPU-0", "GPU-1"})
    assert found == ["GPU GPU-0 has no direct access to the memory of GPU-1"] * 2


def test_what_nobody_can_tell_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers(monkeypatch, [Rank(visible=("GPU-0",)), Rank(visible=("GPU-2",))])
    assert len(set(found)) == 1
    assert "may not reach GPU-2, which its process does not see: nvmlDeviceGetHandleByUUID failed" in found[0]
