"""A finished work outlives the worker thread's hold on it."""

from __future__ import annotations

import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from etp.collectives.works import WorkLine


class Work(dist.Work):
    """What a collective returns."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[timedelta | None] = []

    def is_completed(self) -> bool:
        return bool(self.waited)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waited.append(timeout)
        return True


def test_a_finished_work_stays_until_as_many_as_a_group_has_threads_have_followed() -> None:
    line = WorkLine()
    alive = []
    for _ in range(4):
        work = Work()
        alive.append(weakref.ref(work))
        line.wait(work, None, keep=True)
        del work
    assert [reference() is not None for reference in alive] == [False, False, True, True]


def test_works_that_need_not_stay_do_not() -> None:
    line, work = WorkLine(), Work()
    alive = weakref.ref(work)
    line.wait(work, None, keep=False)
    del work
    assert alive() is None


@pytest.mark.parametrize(("timeout_s", "given"), [(None, None), (2.5, timedelta(seconds=2.5))])
def test_the_time_out_reaches_the_work(timeout_s: float | None, given: timedelta | None) -> None:
    work = Work()
    WorkLine().wait(work, timeout_s, keep=True)
    assert work.waited == [given]
