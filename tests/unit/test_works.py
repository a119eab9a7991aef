"""A finished work outlives the worker thread's hold on it."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist

from etp.collectives.works import WorkLine


class Work(dist.Work):
    """What a collective returns."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = False

    def is_completed(self) -> bool:
        return self.waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None  # gloo's thread would go on with it
        self.waited = True
        return True


def test_a_finished_work_stays_until_as_many_as_a_group_has_threads_have_followed() -> None:
    line = WorkLine()
    alive = []
    for _ in range(4):
        work = Work()
        alive.append(weakref.ref(work))
        line.wait(work, keep=True)
        del work
    assert [reference() is not None for reference in alive] == [False, False, True, True]


def test_works_that_need_not_stay_do_not() -> None:
    line, work = WorkLine(), Work()
    alive = weakref.ref(work)
    line.wait(work, keep=False)
    del work
    assert alive() is None
