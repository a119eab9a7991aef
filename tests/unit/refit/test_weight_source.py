"""One thread settles a rank's weights in a push; those that look them up wait for it, and hear what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.source.weight_source import Settling


class Source:
    device = torch.device("cpu")

    def __init__(self, settle: Callable[[], None]) -> None:
        self.settle, self.looked_up = settle, 0

    def describe(self, rank: int) -> Held:
        raise NotImplementedError

    def look_up(self) -> FlatMemory:
        self.looked_up += 1
        return {"w": torch.zeros(1)}


def test_weights_are_looked_up_once_after_they_and_what_follows_have_been_settled() -> None:
    order: list[str] = []
    source = Source(lambda: order.append("settled"))
    weights = Settling(source, lambda: order.append("followed"))
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(weights.look_up) for _ in range(3)]
        assert not any(one.done() for one in found)
        assert source.looked_up == 0
        weights.settle()
        assert len({id(one.result(10)) for one in found}) == 1
    weights.settle()
    assert (order, source.looked_up) == (["settled", "followed"], 1)


@pytest.mark.parametrize("error", [OSError("the gather did not end"), KeyboardInterrupt()])
def test_all_who_look_weights_up_hear_why_they_were_not_settled(error: BaseException) -> None:
    def fail() -> None:
        raise error

    weights = Settling(Source(fail))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(weights.look_up) for _ in range(2)]
        if isinstance(error, Exception):
            weights.settle()
        else:
            with pytest.raises(KeyboardInterrupt):
                weights.settle()
        expected = (OSError, "the gather did not end") if isinstance(error, Exception) else (RefitError, "Interrupt")
        for one in found:
            with pytest.raises(expected[0], match=expected[1]):
                one.result(10)
