"""What a second communicator takes from the first. NCCL's options have no stand-in on a CPU but this."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etp.collectives.sibling import sibling_group


class Options:
    """As ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


class Backend:
    """That of a group whose user has chosen."""

    options = Options(is_high_priority_stream=True)


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_priority_and_time_out_are_those_of_the_group(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    asked: dict[str, Any] = {}

    def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        asked.update(options, ranks=ranks)
        return world

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_gather_object", _of_one_rank)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: Backend())
    Backend.options._timeout = timedelta(seconds=77)
    assert sibling_group(world, timeout_s, torch.device("cuda", 0)) is world
    expected = timedelta(seconds=timeout_s or 77)
    assert asked.pop("ranks") == [0]
    assert asked.pop("use_local_synchronization") is True
    assert asked.pop("timeout") == expected
    options = asked.pop("pg_options")
    assert asked == {}
    assert options is not Backend.options
    assert options.is_high_priority_stream is True
    # Torch warns of options that say otherwise than the argument does.
    assert options._timeout == expected


def _of_one_rank(found: list[Any], own: Any, group: dist.ProcessGroup) -> None:
    del group
    found[:] = [own]
