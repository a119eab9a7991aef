"""Waves: everybody gets the version once, nobody sends what it lacks or more than it can, and no time is wasted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patches.refit.planning.fan_out import Server, Share, Waiting, Wave, assign, fan_out, least_units
from tests.support.quick import examples

PARTS = st.fractions(Fraction(1, 8), 1, max_denominator=8)
COPIES = st.fractions(Fraction(1, 8), 12, max_denominator=8)


def trainer(copies: Fraction | int = 1) -> list[Server]:
    return [Server(name="trainer", copies=Fraction(copies))]


def engines(count: int) -> list[Waiting]:
    return [Waiting(name=f"engine {number}") for number in range(count)]


def totals(shares: Sequence[Share]) -> tuple[dict[str, Fraction], dict[str, Fraction]]:
    sent, taken = defaultdict[str, Fraction](Fraction), defaultdict[str, Fraction](Fraction)
    for share in shares:
        assert share.speed > 0
        sent[share.server] += share.speed
        taken[share.receiver] += share.speed
    return sent, taken


def check(waves: Sequence[Wave], copies: Fraction, missing: dict[str, Fraction]) -> None:
    """Follows the waves, with none of the code under test."""
    has, now, left = {"trainer": copies}, Fraction(), dict(missing)
    for wave in waves:
        assert wave.begin == now < wave.end
        sent, taken = totals(wave.shares)
        for server, speed in sent.items():
            assert speed <= has[server], f"{server} sends before it has the version, or more than it can"
        for receiver, speed in taken.items():
            assert speed <= 1
            left[receiver] -= speed * (wave.end - wave.begin)
        assert {name for name, part in left.items() if part == 0} == set(wave.committed)
        for name in wave.committed:
            del left[name]
            has[name] = Fraction(1)
        assert all(part > 0 for part in left.values())
        now = wave.end
    assert not left


@settings(max_examples=examples(100), deadline=None)
@given(COPIES, st.integers(1, 20))
def test_everybody_gets_the_version_once_and_in_no_less_than_the_least_time(copies: Fraction, count: int) -> None:
    waves = fan_out(trainer(copies), engines(count))
    check(waves, copies, dict.fromkeys((item.name for item in engines(count)), Fraction(1)))
    assert waves[-1].end >= least_units(copies, count)


@settings(max_examples=examples(100), deadline=None)
@given(COPIES, st.lists(PARTS, min_size=1, max_size=12))
def test_who_has_a_part_already_takes_the_rest(copies: Fraction, parts: list[Fraction]) -> None:
    """As after a server was lost in the middle of a wave."""
    receivers = [Waiting(name=str(number), missing=part) for number, part in enumerate(parts)]
    check(fan_out(trainer(copies), receivers), copies, {item.name: item.missing for item in receivers})


@pytest.mark.parametrize("copies", [1, 2, 3, 5, 8, 16, 32, 100, 128, 255, 256, 1000])
def test_256_replicas_are_within_a_tenth_of_the_optimum(copies: int) -> None:
    waves = fan_out(trainer(copies), engines(256))
    assert waves[-1].end <= Fraction(11, 10) * least_units(Fraction(copies), 256)


@pytest.mark.parametrize("count", [3, 4, 6, 7, 8, 12, 31, 33, 100])
@pytest.mark.parametrize("copies", [1, 2, 3, 7])
def test_so_are_fewer(copies: int, count: int) -> None:
    waves = fan_out(trainer(copies), engines(count))
    assert waves[-1].end <= Fraction(11, 10) * least_units(Fraction(copies), count)


def test_receivers_double() -> None:
    waves = fan_out(trainer(), engines(31))
    assert [float(wave.end) for wave in waves] == [1, 2, 3, 4, 5]
    assert [len(wave.committed) for wave in waves] == [1, 2, 4, 8, 16]


def test_the_last_two_waves_share_what_does_not_double() -> None:
    """64 of the 256 commit in the first wave, each served alone; the others take as much as is left, then the rest."""
    waves = fan_out(trainer(128), engines(256))
    assert [wave.end for wave in waves] == [Fraction(1), Fraction(5, 3)]
    assert [len(wave.committed) for wave in waves] == [64, 192]
    assert least_units(Fraction(128), 256) == Fraction(5, 3)


@pytest.mark.parametrize(
    ("copies", "count", "units"),
    [(1, 0, 0), (4, 1, 1), (4, 4, 1), (1, 1, 1), (1, 3, 2), (1, 7, 3), (2, 6, 2), (Fraction(1, 2), 1, 2)],
)
def test_the_least_time(copies: Fraction | int, count: int, units: int) -> None:
    assert least_units(Fraction(copies), count) == units


def test_who_is_there_twice_is_named() -> None:
    with pytest.raises(ValueError, match="engine 0 has the version or wants it twice"):
        assign([*trainer(), Server(name="engine 0")], engines(2))


def test_a_version_that_nobody_has_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody has the version that engine 0 wants"):
        assign([], engines(1))
    assert fan_out([], []) == ()


def test_impossible_parties_are_refused() -> None:
    with pytest.raises(ValueError, match="trainer serves 0 receivers"):
        trainer(0)
    for missing in (Fraction(0), Fraction(9, 8)):
        with pytest.raises(ValueError, match=f"a lacks {missing} of a version"):
            Waiting(name="a", missing=missing)
