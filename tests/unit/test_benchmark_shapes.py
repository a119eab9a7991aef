"""What a step takes on paper, against hand counts and against what GPUs were measured to hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.train_shapes import GIB, SHAPES, SYSTEMS, Shape, closed_form, obstacle, resized

TINY = Shape(layers=2, hidden=8, ffn=12, heads=4, kv_heads=2, vocabulary=20, sequence=16, micro_batch=3)
EXPERTS = replace(TINY, experts=6, top_k=2, head=4)
QWEN = SHAPES["qwen3-30b-a3b-6l"]


def test_operations_are_counted_by_hand() -> None:
    weights = 2 * (8 * 16 + 8 * 8 + 24 * 8 + 8 * 12) + 20 * 8
    # Scores and their product with the values: 2 x hidden x sequence multiplications a token, half of them masked.
    attention = 2 * 2 * 8 * 16 / 2
    assert TINY.flops() == 6 * 48 * (weights + attention)


def test_bytes_are_counted_by_hand() -> None:
    # Over two ranks rows are padded to 32: embedding, output 20, QKV 16, projection 8, FC1 24, FC2 8 all become 32.
    layer = [(1, 16, 8), (1, 8, 8), (1, 24, 8), (1, 8, 12)]
    assert TINY.weights() == [(1, 20, 8), *layer * 2, (1, 20, 8)]
    assert TINY.expert_weights() == []
    padded = 2 * 32 * 8 + 2 * (3 * 32 * 8 + 32 * 12)
    norms = 5 * 8
    found = closed_form(TINY, "etp_copy_engine", 2, prefetch_depth=1)
    assert found == {
        "weights": 2 * (padded // 2 + norms),
        "gradients": 2 * (padded // 2 + norms),
        # Two slots for each of the shapes that two weights share; 20 x 8 is that of embedding and output.
        "gather slots": 2 * 2 * (4 * 32 * 8 + 32 * 12),
        "receive ring": 2 * 2 * 32 * 12 // 2,
    }


def test_a_mixture_of_experts_is_counted_by_hand() -> None:
    assert EXPERTS.weights() == [(1, 20, 8), *[(1, 32, 8), (1, 8, 16)] * 2, (1, 20, 8)]
    assert EXPERTS.expert_weights() == [(6, 24, 8), (6, 8, 12)] * 2
    active = 2 * (32 * 8 + 8 * 16 + 6 * 8 + 2 * (24 * 8 + 8 * 12)) + 20 * 8
    assert EXPERTS.flops() == 6 * 48 * (active + 2 * 2 * 16 * 16 / 2)
    # Norms of layers, of queries and keys, and the last one; routers.
    small = 2 * (2 * 8 + 2 * 4 + 6 * 8) + 8
    dense, experts = 2 * 20 * 8 + 2 * (32 * 8 + 8 * 16), 2 * 6 * (24 * 8 + 8 * 12)
    assert closed_form(EXPERTS, "dp", 2)["weights"] == 2 * (dense + experts + small)
    assert closed_form(EXPERTS, "ep", 2)["weights"] == 2 * (dense + experts // 2 + small)
    # Over two ranks rows are padded to 32.
    padded, sets = 2 * 32 * 8 + 2 * (32 * 8 + 32 * 16), 6 * (32 * 8 + 32 * 12)
    assert closed_form(EXPERTS, "etp_copy_engine", 2) == {
        "weights": 2 * ((padded + 2 * sets) // 2 + small),
        "gradients": 2 * ((padded + 2 * sets) // 2 + small),
        "gather slots": 2 * 2 * (2 * 32 * 8 + 32 * 16 + sets),
        # One for dense weights, one for experts.
        "receive ring": 2 * 2 * (32 * 16 + 6 * 32 * 12) // 2,
    }
    # Three experts on a rank, each cut in two.
    assert closed_form(EXPERTS, "etp_copy_engine_ep2", 4)["weights"] == 2 * ((padded + sets) // 2 + small)


def test_qwen3_30b_a3b_has_the_parameters_of_its_name() -> None:
    layer = QWEN.expert_weights()[:2]
    dense = QWEN.weights()[1:3]
    whole = 48 * sum(count * rows * columns for count, rows, columns in layer + dense) + 2 * 151936 * QWEN.hidden
    assert 30.4e9 < whole < 30.7e9


def test_shapes_shrink_and_say_so() -> None:
    assert resized("test") == ("test", SHAPES["test"])
    name, shape = resized("qwen3-30b-a3b-6l", layers=2, experts=16)
    assert name == "qwen3-30b-a3b-6l, 2 layers, 16 experts"
    assert shape == replace(QWEN, layers=2, experts=16)
    with pytest.raises(ValueError, match="test has no experts"):
        resized("test", experts=4)
    with pytest.raises(ValueError, match="4 experts are too few: in qwen3-30b-a3b-6l each token goes to 8"):
        resized("qwen3-30b-a3b-6l", experts=4)


@pytest.mark.parametrize(
    ("system", "shape", "ranks", "reason"),
    [
        ("none_graph", QWEN, 2, "the host reads how many tokens"),
        ("none_graph", TINY, 2, ""),
        ("ep", TINY, 2, "0 experts cannot be distributed over 2 ranks"),
        ("ep", EXPERTS, 4, "6 experts cannot be distributed over 4 ranks"),
        ("ep", EXPERTS, 3, ""),
        ("etp_copy_engine_ep2", QWEN, 2, "it needs 4 GPUs and there are 2"),
        ("etp_copy_engine_ep2", QWEN, 4, ""),
        ("etp_copy_engine", QWEN, 2, ""),
    ],
)
def test_what_cannot_run_is_told_with_its_reason(system: str, shape: Shape, ranks: int, reason: str) -> None:
    assert obstacle(system, shape, ranks).startswith(reason)
    assert bool(obstacle(system, shape, ranks)) == bool(reason)


def test_prefetch_depth_adds_slots_as_long_as_weights_share_them() -> None:
    shape = SHAPES["llama8b-8l"]
    slots = [closed_form(shape, "etp_c10d", 4, prefetch_depth=depth)["gather slots"] for depth in (0, 1, 2)]
    ends = 32000 * 4096 * 2
    one = (slots[1] - slots[0]) // 1
    assert slots[1] == 2 * slots[0]
    # Embedding and output have two slots at most: there are only two of them.
    assert slots[2] - slots[1] == one - ends


@pytest.mark.parametrize(
    ("system", "measured"),
    # GiB on 4 H200, as docs/performance/h200x4-etp.json and h200x4-others.json had them.
    [("dp", 7.479), ("etp_c10d", 3.174), ("etp_copy_engine", 2.238 + 0.935 + 0.366)],
)
def test_the_closed_form_is_what_was_measured(system: str, measured: float) -> None:
    paper = sum(closed_form(SHAPES["llama8b-8l"], system, 4).values()) / GIB
    assert measured == pytest.approx(paper, rel=0.003)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_system_has_a_closed_form_and_a_graph_that_of_its_eager_self(system: str) -> None:
    paper = closed_form(SHAPES["small"], system, 2)
    assert paper["weights"] == paper["gradients"] > 0
    assert paper == closed_form(SHAPES["small"], system.removesuffix("_graph"), 2)


def test_the_large_model_fits_over_two_gpus_and_not_on_one() -> None:
    shape, gpu = SHAPES["llama70b-40l"], 139 * GIB
    # Activations come on top: a layer keeps at least its inputs, QKV, both halves of FC1 and FC2's input.
    activations = shape.layers * shape.tokens() * (4 * shape.hidden + 3 * shape.ffn) * 2
    assert sum(closed_form(shape, "none", 1).values()) + activations > gpu
    assert sum(closed_form(shape, "etp_copy_engine", 2).values()) + activations < 0.85 * gpu
