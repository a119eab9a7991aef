"""Timelines: what is predicted after each visit, whatever the last pass looked like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etp.passes import PassSequence, Timeline


class Item:
    """Compared by identity, as weight groups are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


A, B, C, D = (Item(name) for name in "ABCD")


def learn(*order: Item) -> Timeline[Item]:
    timeline: Timeline[Item] = Timeline()
    timeline.begin()
    for item in order:
        timeline.visit(item)
    timeline.begin()
    return timeline


def predictions(timeline: Timeline[Item], *order: Item) -> list[Item | None]:
    """The first guess after each visit."""
    result: list[Item | None] = []
    for item in order:
        timeline.visit(item)
        result.append(next(iter(timeline.upcoming(1)), None))
    return result


def test_nothing_is_predicted_before_the_first_pass_is_complete() -> None:
    timeline: Timeline[Item] = Timeline()
    timeline.begin()
    assert predictions(timeline, A, B, C) == [None, None, None]
    assert timeline.learned == ()
    assert timeline.visits == [A, B, C]


def test_a_repeated_pass_is_predicted_throughout() -> None:
    timeline = learn(A, B, C, D)
    assert list(timeline.upcoming(9)) == [A, B, C, D]
    assert predictions(timeline, A, B, C, D) == [B, C, D, None]


def test_a_weight_visited_twice_is_predicted_by_its_place() -> None:
    timeline = learn(A, B, A, C)
    assert predictions(timeline, A, B, A, C) == [B, A, C, None]


def test_a_skipped_visit_moves_the_cursor_past_it() -> None:
    timeline = learn(A, B, C, D)
    assert predictions(timeline, A, C) == [B, D]


def test_a_visit_out_of_order_goes_back_to_its_place() -> None:
    timeline = learn(A, B, C, D)
    assert predictions(timeline, C, A, B) == [D, B, C]


def test_an_unknown_visit_leaves_the_cursor() -> None:
    timeline = learn(A, B, C)
    new = Item("new")
    assert predictions(timeline, A, new, B) == [B, B, C]


def test_one_changed_pass_is_learned_and_predicted_next() -> None:
    timeline = learn(A, B, C)
    predictions(timeline, C, B, A)
    timeline.begin()
    assert timeline.learned == [C, B, A]
    assert predictions(timeline, C, B, A) == [B, A, None]


def test_an_empty_pass_does_not_erase_what_is_known() -> None:
    timeline = learn(A, B)
    timeline.begin()
    timeline.begin()
    assert timeline.learned == [A, B]


def test_visits_belong_to_the_pass_under_way() -> None:
    timeline = learn(A, B)
    assert (timeline.visits, timeline.visited) == ([], set())
    timeline.visit(B)
    assert (timeline.visits, timeline.visited) == ([B], {B})


def test_no_more_is_predicted_than_was_asked_for() -> None:
    timeline = learn(A, B, C, D)
    timeline.visit(A)
    assert [list(timeline.upcoming(count)) for count in range(5)] == [[], [B], [B, C], [B, C, D], [B, C, D]]
    assert list(timeline.beginning(2)) == [A, B]


def test_a_guess_predicts_the_first_pass_only() -> None:
    timeline: Timeline[Item] = Timeline()
    timeline.begin(guess=[C, B, A])
    assert list(timeline.upcoming(9)) == [C, B, A]
    assert predictions(timeline, C, A) == [B, None]
    timeline.begin(guess=[C, B, A])
    assert list(timeline.upcoming(9)) == [C, A]


def test_recompute_and_gradient_visits_interleave_in_one_timeline() -> None:
    timeline: Timeline[Item] = Timeline()
    for _ in range(2):
        timeline.begin(guess=[D, C, B, A])
        # Two checkpointed segments: each is recomputed in forward order, then differentiated in reverse.
        guesses = predictions(timeline, C, D, D, C, A, B, B, A)
    assert guesses == [D, D, C, A, B, B, A, None]


items = st.lists(st.sampled_from([A, B, C, D]), min_size=1, max_size=12)


@given(items)
def test_replaying_any_order_predicts_every_visit(order: list[Item]) -> None:
    timeline = learn(*order)
    assert timeline.upcoming(1) == order[:1]
    assert predictions(timeline, *order) == [*order[1:], None]


@given(items, items)
def test_any_order_after_any_order_only_predicts_known_items(learned: list[Item], visited: list[Item]) -> None:
    timeline = learn(*learned)
    for item in visited:
        timeline.visit(item)
        upcoming = list(timeline.upcoming(len(learned)))
        assert upcoming == learned[len(learned) - len(upcoming) :]
    assert timeline.visits == visited


def follow(sequence: PassSequence[Item], *kinds: Item) -> list[Item | None]:
    """An iteration: what is expected after each of its passes."""
    sequence.begin_iteration()
    result: list[Item | None] = []
    for kind in kinds:
        sequence.begin(kind)
        result.append(sequence.next)
    return result


def test_an_iteration_is_expected_to_go_like_the_one_before() -> None:
    sequence: PassSequence[Item] = PassSequence()
    assert follow(sequence, A, B, A, B) == [None] * 4
    assert follow(sequence, A, B, A, B) == [B, A, B, None]
    # Another kind: nothing is known until the kinds agree again.
    assert follow(sequence, A, A, B, B, A) == [B, None, None, None, None]
    assert follow(sequence, A, B, B) == [A, None, B]
    # An iteration without passes is none.
    sequence.begin_iteration()
    assert follow(sequence, A, B, B) == [B, B, None]


def test_passes_without_end_are_not_recorded_for_ever() -> None:
    sequence: PassSequence[Item] = PassSequence()
    assert set(follow(sequence, *[A] * 10_000)) == {None}
    assert follow(sequence, *[A] * 10_000)[-1] is None
