"""How answers are read and scored."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.grpo.reward import exact_number, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("72.0", "72"),
        ("72.", "72"),
        ("The answer is 72.50.", "72.5"),
        ("1,234,567", "1234567"),
        ("12,3456", "3456"),
        ("1, 23", "23"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("= +5", "5"),
        ("12-7", "7"),
        ("(3)-4", "4"),
        ("12 + 7 = 19", "19"),
        ("$1,000", "1000"),
        ("**42**", "42"),
        ("<think>3 or 4</think>5", "5"),
        ("<think>3</think>5<think>6</think>", "5"),
        ("7 <think>8", "7"),
        ("is it 3 or 4?</think>5", "5"),
        ("is it 3?</think>5<think>6</think>", "5"),
        (".5", "0.5"),
        ("it is -.25.", "-0.25"),
        ("$.75", "0.75"),
        ("so ...5", "5"),
        ("-$5", "-5"),
        ("a-$5", "5"),
        ("1.5e3", "1500"),
        ("2E-5", "0.00002"),
        ("2e", "2"),
    ],
)
def test_last_number_is_read_however_it_is_written(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no", "<think>5", "<think>5</think>", "5</think>", "-$", "-", ",", ".", "\ufffd"])
def test_text_without_a_number_has_none(text: str) -> None:
    assert last_number(text) is None
    assert exact_number(text, "0") == 0.0


@given(st.integers(), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00", "so {}.", "<think>1 2</think> {:,}"]))
def test_integers_score_in_every_format_and_no_other_integer_does(number: int, form: str) -> None:
    assert exact_number(form.format(number), str(number)) == 1.0
    assert exact_number(form.format(number + 1), str(number)) == 0.0


def test_answer_that_holds_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'twelve' of a prompt holds no number"):
        exact_number("12", "twelve")
