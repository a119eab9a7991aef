"""Modules under ``etp.shard_module`` and FSDP2, and plain ones, are described and published without Megatron."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patches.refit import Fate
from tests.multiproc import bodies_publish as bodies
from tests.multiproc.bodies_publish import Sharding
from tests.support.launch import run_distributed
from tests.support.plain_engine import running

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("the engine of these tests keeps weights in host memory")]

CASES: list[tuple[Sharding, int]] = [
    (bodies.ddp, 2),
    (bodies.shards, 2),
    (bodies.shards, 4),
    (bodies.fsdp, 2),
    (bodies.fsdp, 4),
    (bodies.hsdp, 4),
]
SLOW = pytest.mark.slow
QUICK: list[tuple[Sharding, int]] = [(bodies.shards, 2), (bodies.fsdp, 2)]
IDS = [f"{sharding.__name__}-{ranks}" for sharding, ranks in CASES]


@pytest.mark.parametrize(("sharding", "ranks"), [(bodies.plain, 1), *CASES, (bodies.columns, 2)])
def test_each_rank_describes_its_parts_of_the_whole_state(sharding: Sharding, ranks: int) -> None:
    of_ranks = run_distributed(bodies.described, ranks, "gloo", args=(sharding,))
    names = of_ranks[0][1]
    if sharding is not bodies.columns:
        assert sorted(names) == sorted(bodies.NAMES)
    for name in names:
        parts = [found.get(name, []) for found, _ in of_ranks]
        assert all(len(part) <= 1 for part in parts)
        expected = ROWS.get((sharding.__name__, ranks), {}).get(name)
        assert expected is None or [part[0] if part else "" for part in parts] == expected


def test_meshes_of_two_dimensions_cut_blocks() -> None:
    assert run_distributed(bodies.blocks_of_a_grid, 4, "gloo") == [
        ["w[0:3, 0:4]", "w[0:2, 0:7]", "w[0:5, 0:4]", "w[0:2, 0:7]"],
        ["w[0:3, 4:7]", "w[2:3, 0:7]", "w[0:5, 0:4]", "w[3:4, 0:7]"],
        ["w[3:5, 0:4]", "w[3:4, 0:7]", "w[0:5, 4:7]", "w[2:3, 0:7]"],
        ["w[3:5, 4:7]", "w[4:5, 0:7]", "w[0:5, 4:7]", "w[4:5, 0:7]"],
    ]


ROWS = {
    ("shards", 4): {"layers.0.up.weight": ["[0:8, 0:11]", "[8:16, 0:11]", "[16:23, 0:11]", ""]},
    ("fsdp", 4): {
        "layers.0.norm.weight": ["[0:3]", "[3:6]", "[6:9]", "[9:11]"],
        "embed.weight": ["[0:10, 0:11]", "[10:20, 0:11]", "[20:30, 0:11]", "[30:37, 0:11]"],
        "scale": ["[0:3]"] * 4,
        "steps": ["[]"] * 4,
    },
    ("hsdp", 4): {"layers.1.down.weight": ["[0:6, 0:23]", "[6:11, 0:23]"] * 2},
    ("columns", 2): {"0.weight": ["[0:9, 0:4]", "[0:9, 4:8]"], "1.bias": ["[0:4]", "[4:8]"]},
}


@pytest.mark.parametrize(
    ("sharding", "ranks"), [pytest.param(*case, marks=[] if case in QUICK else [SLOW]) for case in CASES], ids=IDS
)
def test_an_engine_serves_the_bits_of_each_version(sharding: Sharding, ranks: int, engine_folder: str) -> None:
    of_ranks = run_distributed(bodies.published, ranks, "gloo", args=(sharding, engine_folder))
    served, were, told = of_ranks[0]
    assert [version for version, _ in served] == [3, 4, 9]
    assert served == were
    assert len({tuple(sorted(content.items())) for _, content in were}) == 3
    nbytes = 4 * (37 * 11 + 2 * (2 * 11 + 23 * 11 + 23 + 11 * 23)) + 8 * 3 + 8
    assert told == [(Fate.SERVES, nbytes)] * 3
    assert all(other == told for _, _, other in of_ranks)


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        (bodies.shards, 2),
        pytest.param(bodies.plain, 1, marks=SLOW),
        pytest.param(bodies.fsdp, 2, marks=SLOW),
        pytest.param(bodies.hsdp, 4, marks=SLOW),
    ],
)
def test_a_version_whose_scale_would_be_no_number_is_refused_in_one_line(
    sharding: Sharding, ranks: int, engine_folder: str
) -> None:
    """In each quantized format and as each payload; the engine serves the version before, and the next one."""
    of_ranks = run_distributed(bodies.quantized, ranks, "gloo", args=(sharding, engine_folder))
    served, should, said = of_ranks[0]
    assert served == should
    assert [version for version, _ in served] == [1, 1, 3, 4, 4, 6, 7, 7, 9, 10, 10, 12]
    assert len({tuple(sorted(content.items())) for _, content in served}) == 8
    assert len(said) == 4
    reason = "layers.0.down.weight[0:11, 0:23] cannot be quantized: a weight in it is infinite or not a number"
    assert all(reason in one and "\n" not in one for one in said)
    assert all(len(others) == 4 for _, _, others in of_ranks)


@SLOW
def test_one_process_publishes_without_process_groups(engine_folder: str) -> None:
    ((served, were, told),) = run_distributed(bodies.published, 1, None, args=(bodies.plain, engine_folder))
    assert served == were
    assert [fate for fate, _ in told] == [Fate.SERVES] * 3


@SLOW
@pytest.mark.parametrize(
    ("known", "dtype", "said"),
    [
        ("layers.0.up.bias", "", "the engine has no layers.0.up.bias"),
        ("layers.1.norm.bias", "bfloat16", "layers.1.norm.bias"),
    ],
)
def test_an_engine_of_another_model_is_refused_in_one_line(
    known: str, dtype: str, said: str, engine_folder: str
) -> None:
    with running("another", Path(engine_folder)):
        of_ranks = run_distributed(bodies.refused, 2, "gloo", args=(engine_folder, known, dtype))
    for reasons, serves, refused in of_ranks:
        assert len(reasons) == 2
        assert all(said in reason and "\n" not in reason for reason in reasons), reasons
        assert reasons[0].startswith("cannot start the refit: ")
        if refused is not None:
            assert serves[0] == serves[1]
            assert refused == (-1, {})  # what it served before


@SLOW
def test_a_rank_that_cannot_describe_its_weights_fails_on_all_ranks_in_one_line(engine_folder: str) -> None:
    one, other = run_distributed(bodies.undescribed, 2, "gloo", args=(engine_folder,))
    assert one == other
    assert one[0] == (
        "cannot start the refit: trainer rank 1: layers.1.up.weight is on the meta device, so there is no memory to "
        "publish"
    )
    assert one[1].startswith("cannot start the refit: ")
    assert "layers.1.up.weight is on the meta device" in one[1]
    assert "\n" not in one[1]


@SLOW
def test_engines_come_and_go(engine_folder: str) -> None:
    of_ranks = run_distributed(bodies.come_and_gone, 2, "gloo", args=(engine_folder,))
    for rank, (fates, (served, states), said) in enumerate(of_ranks):
        assert fates[0] == {}
        assert {fate for one in fates[1:-2] for fate in one.values()} <= {Fate.JOINING}
        assert fates[-2:] == [{"engine": Fate.SERVES}, {"engine": Fate.LEFT}]
        assert (served, states) == (0, {"engine": "ready"})
        assert said[0] == "the publisher was closed; make another one"
        assert said[1:] == (["there is no engine engine; attached are none"] if rank == 0 else [])
    assert of_ranks[0][0] == of_ranks[1][0]


@SLOW
def test_of_two_trainers_the_engine_is_the_last_ones_that_joined(engine_folder: str) -> None:
    """The other is told in one line that its worker has left, disturbs nobody, and may join again."""
    (said, served), (said_of_other, _) = run_distributed(bodies.two_trainers, 2, "gloo", args=(engine_folder,))
    assert served == [1, 2, 2, 4, 5]
    assert said_of_other == []
    (reason,) = said
    assert "rollout 0: " in reason  # at the beginning, or with the engine's own reason, if that comes in time
    assert "engine worker 0 has ended or closed its connection" in reason
    assert "\n" not in reason


def test_the_publisher_is_imported_without_megatron() -> None:
    code = (
        "import sys, megatron_patches.refit as refit; [getattr(refit, name) for name in refit.__all__]; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'megatron', 'vllm'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
