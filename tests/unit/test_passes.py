"""What begins a pass, what ends it, and what is left of one that died. Visits are made by hand, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import etp
from etp.group import Reading, WeightGroup
from etp.mode import Modes
from etp.passes import Passes
from etp.reductions import Reductions
from etp.routes import Routes
from etp.versions import WeightVersions


class Group:
    """All that passes ask of a weight group."""

    used_more_than_once = False

    def __init__(self) -> None:
        self.rows = Reading(cast("WeightGroup", self), columns=False)


class Discards(Reductions):
    """Counts how often everything was dropped."""

    count = 0

    def discard(self) -> None:
        self.count += 1
        super().discard()


FIRST, SECOND = range(2)


class Model:
    """Two groups and their passes."""

    def __init__(self, at_end: Callable[[], None] = lambda: None, *, reuse: bool = False) -> None:
        config = etp.EtpConfig()
        self.groups = cast("list[WeightGroup]", [Group(), Group()])
        modes = Modes(etp.EtpConfig())
        routes = Routes(config)
        self.weights = WeightVersions([], reuse_across_forwards=reuse)
        self.passes = Passes(self.groups, self.weights, at_end=at_end)
        self.reductions = Discards(config, routes, modes, self.passes)
        self.passes.collectors = (self.reductions,)

    def visit(self, *which: int) -> list[int]:
        """Visit these groups. Returns the number of the pass that each visit belonged to."""
        numbers = []
        for index in which:
            self.passes.enter(self.groups[index]).visit(self.groups[index].rows)
            numbers.append(self.passes.number)
        return numbers

    def backward(self, *which: int, then: Callable[[], None] = lambda: None) -> list[int]:
        """Visit these groups inside a backward pass; see :meth:`visit`."""
        numbers: list[int] = []

        def hook(_: torch.Tensor) -> None:
            numbers.extend(self.visit(*which))
            assert self.passes.backward_is_under_way
            then()

        x = torch.ones(1, requires_grad=True)
        x.register_hook(hook)
        (x * 2).backward()
        return numbers


def fail() -> None:
    raise ArithmeticError


def test_a_forward_pass_ends_with_a_backward_visit_and_a_backward_pass_with_its_task() -> None:
    model = Model()
    assert model.visit(FIRST, SECOND) == [0, 0]
    assert model.backward(SECOND, FIRST, SECOND) == [1, 1, 1]
    assert not model.passes.backward_is_under_way
    assert model.passes.in_backward
    assert model.backward(FIRST) == [2]
    assert model.visit(FIRST, SECOND) == [3, 3]
    assert not model.passes.in_backward
    assert model.reductions.count == 0
    assert [model.groups.index(r.group) for r in model.passes.backward_order.learned] == [SECOND, FIRST, SECOND]


def test_the_first_backward_pass_is_expected_to_reverse_the_forward_pass() -> None:
    model = Model()
    model.visit(FIRST, SECOND)
    model.backward(SECOND)
    assert [model.groups.index(r.group) for r in model.passes.backward_order.learned] == [SECOND, FIRST]


def test_only_the_root_begins_a_pass_where_there_is_one() -> None:
    model, root = Model(), nn.Linear(1, 1)
    assert not model.passes.had_root
    assert model.visit(FIRST, SECOND, FIRST) == [0, 0, 1]
    model.passes.set_root(root)
    assert model.visit(FIRST, SECOND) == [1, 1]
    model.passes.begin_forward()
    assert model.visit(FIRST) == [2]
    del root
    assert model.passes.had_root
    assert not model.passes.has_root
    assert model.visit(FIRST) == [3]


def test_visits_are_not_recorded_for_ever() -> None:
    model = Model()
    numbers = model.visit(FIRST, *[SECOND] * 1000)
    assert len(set(numbers)) > 5
    assert len(model.passes.forward_order.visits) < 200


@pytest.mark.parametrize(
    ("training", "with_grad", "counts"), [(True, True, True), (True, False, True), (False, False, False)]
)
def test_uses_count_where_a_backward_pass_may_follow(training: bool, with_grad: bool, counts: bool) -> None:
    model, root = Model(), nn.Linear(1, 1).train(training)
    model.passes.set_root(root)
    with torch.set_grad_enabled(with_grad):
        model.visit(FIRST, SECOND, SECOND)
    assert [cast("Any", group).used_more_than_once for group in model.groups] == [False, counts]


@pytest.mark.parametrize("with_grad", [True, False])
def test_uses_count_in_evaluation_mode_if_the_pass_began_with_gradients(with_grad: bool) -> None:
    model, root = Model(), nn.Linear(1, 1).eval()
    model.passes.set_root(root)
    with torch.set_grad_enabled(with_grad):
        model.passes.begin_forward()
        with torch.no_grad():  # as inside of a layer's own operation
            model.visit(FIRST, SECOND, SECOND)
    assert [cast("Any", group).used_more_than_once for group in model.groups] == [False, with_grad]


def test_an_evaluation_between_iterations_changes_no_prediction() -> None:
    model, root = Model(reuse=True), nn.Linear(1, 1)
    model.passes.set_root(root)

    def forward(*, evaluating: bool = False) -> list[int]:
        """What is expected behind the pass, as seen from its first visit."""
        root.train(not evaluating)
        with torch.set_grad_enabled(not evaluating):
            model.passes.begin_forward()
            model.visit(FIRST, SECOND)
        return [model.groups.index(reading.group) for reading in model.passes.expected(8)]

    def backward() -> list[int]:
        expected: list[list[int]] = []
        model.backward(
            SECOND, FIRST, then=lambda: expected.append([model.groups.index(r.group) for r in model.passes.expected(8)])
        )
        return expected[0]

    def iteration() -> list[list[int]]:
        model.weights.announce_change()
        return [forward(), backward(), forward(), backward()]

    iteration()
    expected = [[SECOND, FIRST], [FIRST, SECOND], [SECOND, FIRST], []]
    assert iteration() == expected
    for _ in range(2):
        # Weights have changed before the first of them, and stay so for the iteration behind.
        model.weights.announce_change()
        assert [forward(evaluating=True) for _ in range(3)] == [[], [], []]
        assert iteration() == expected
        assert iteration() == expected


@pytest.mark.parametrize("begin_next", [Model.visit, Model.backward, lambda model, *_: model.passes.drop_abandoned()])
def test_what_dies_inside_a_backward_pass_is_dropped_before_the_next(begin_next: Callable[..., object]) -> None:
    model = Model()
    model.visit(FIRST)
    with pytest.raises(ArithmeticError):
        model.backward(FIRST, then=fail)
    assert not model.passes.backward_is_under_way
    assert model.reductions.count == 0
    begin_next(model, FIRST)
    assert model.reductions.count == 1
    model.visit(FIRST)
    assert model.reductions.count == 1


def test_what_dies_at_the_end_of_a_backward_pass_is_dropped_too() -> None:
    model = Model(at_end=fail)
    with pytest.raises(ArithmeticError):
        model.backward(FIRST)
    model.visit(FIRST)
    assert model.reductions.count == 1


def test_nothing_goes_on_across_the_border_of_a_capture() -> None:
    model = Model()
    model.visit(FIRST)
    with pytest.raises(ArithmeticError):
        model.backward(FIRST, then=fail)
    model.passes.change_mode(Modes(etp.EtpConfig()).now)
    assert not model.passes.in_backward
    assert model.visit(FIRST, SECOND) == [2, 2]
    assert model.reductions.count == 0
    assert model.passes.forward_order.visits == [group.rows for group in model.groups]
