"""Workers of an engine, which vote over gloo as vLLM's do: whoever comes late, none serves what others do not."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_patches.refit.errors import LostWeightsError, RefitError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_patches.refit.vllm import all_or_none
from megatron_patches.refit.vllm.all_or_none import AllOrNone

TIMEOUT_S = 1.0
LATE_S = 1.5


class Replacement:
    """New weights of a worker, which serve or not; what it does may take a while, or fail."""

    def __init__(self, refused: str = "", slow: str = "") -> None:
        self.serves, self._refused, self._slow = False, refused, slow

    def build(self) -> None:
        self._do("build")

    def apply(self) -> None:
        self._do("apply")
        self.serves = True

    def replace(self) -> None:
        self.apply()

    def undo(self) -> None:
        self.serves = False

    def forget(self) -> None:
        """Nothing."""

    def _do(self, what: str) -> None:
        if what == self._slow:
            time.sleep(LATE_S)
        if what == self._refused:
            raise MemoryError(f"no room to {what}")


class Workers:
    """An engine's workers.

    Args:
        count: how many.
        monkeypatch: gives each its own side of their group.
    """

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._version = 0
        self._here = threading.local()
        store = dist.HashStore()

        def make(rank: int) -> Any:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=60)
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            return gloo(store, rank, count, options)

        with ThreadPoolExecutor(count) as pool:
            self._groups = list(pool.map(make, range(count)))

        def all_reduce(votes: torch.Tensor, *, op: Any, group: Any, async_op: bool) -> Any:
            assert async_op
            options = dist.AllreduceOptions()
            options.reduceOp = op
            return group.allreduce([votes], options)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(
            all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=count, cpu_group=self._here.group)
        )

    def commit(
        self, replacements: Sequence[Replacement | None], late: int | None = None, *, in_place: bool = False
    ) -> list[str]:
        """What becomes of the next version on each worker; None declines, and ``late`` comes when others have left."""
        self._version += 1

        def work(rank: int) -> str:
            self._here.group = self._groups[rank]
            time.sleep(LATE_S * (rank == late))
            ballot, replacement = AllOrNone(self._version, self._version - 1, TIMEOUT_S), replacements[rank]
            try:
                if replacement is None:
                    ballot.decline()
                    return "declined"
                if in_place:
                    ballot.overwrite(cast(Any, replacement), torch.device("cpu"))
                else:
                    ballot.exchange(cast(Any, replacement))
            except LostWeightsError:
                return "lost"
            except RefitError:
                replacement.serves = False  # in place whoever has the old weights puts them back
                return "refused"
            return "serves" if replacement.serves else "nothing"

        with ThreadPoolExecutor(len(replacements)) as pool:
            return list(pool.map(work, range(len(replacements))))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("first", [lambda: None, Replacement])
def test_who_comes_late_to_one_commit_is_on_time_for_the_next(
    first: Callable[[], Replacement | None], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it then says must be no answer to what the others ask next."""
    workers = Workers(3, monkeypatch)
    found = workers.commit([first(), Replacement(), Replacement()], late=2, in_place=in_place)
    assert set(found) <= {"declined", "refused"}
    refusing = [Replacement(), Replacement(), Replacement("apply")]
    assert workers.commit(refusing, in_place=in_place) == ["refused"] * 3
    assert workers.commit([Replacement() for _ in range(3)], in_place=in_place) == ["serves"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_who_does_not_hear_whether_others_serve_a_version_serves_none(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one finds that all have said yes."""
    workers = Workers(2, monkeypatch)
    found = workers.commit([Replacement(), Replacement(slow="apply")], in_place=in_place)
    assert found == ["lost", "serves"]
    refusing = [Replacement(), Replacement(slow="apply", refused="apply")]
    assert workers.commit(refusing, in_place=in_place) == ["lost", "refused"]
    refusing = [Replacement("apply"), Replacement(slow="apply")]
    assert workers.commit(refusing, in_place=in_place) == ["refused"] * 2
