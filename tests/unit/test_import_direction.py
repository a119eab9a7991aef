"""The direction of imports, and the statements that product code does without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.imports import (
    LAYERS,
    PACKAGES,
    REFIT,
    REFIT_GLUE,
    REFIT_LAYERS,
    ROOT,
    cycles,
    direction_violations,
    imported_at_once,
    loaded_with,
    product_sources,
    statement_violations,
)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return product_sources()


@pytest.mark.parametrize(
    ("subgraph", "layers", "folder"),
    [
        ("etp", LAYERS, PACKAGES["etp"]),
        ("refit", REFIT_LAYERS, PACKAGES["megatron_patches"] / "refit"),
    ],
)
def test_the_documented_layers_are_those_that_are_checked_and_there(
    subgraph: str, layers: tuple[frozenset[str], ...], folder: Path
) -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    diagram = page.partition(f"subgraph {subgraph}\n")[2].partition("    end\n")[0]
    documented = [frozenset(names.split(", ")) for names in re.findall(r'\["(.+)"\]', diagram)]
    assert documented == list(reversed(layers))
    present = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert frozenset().union(*layers) == present - {"__init__"}


def test_every_import_goes_down(sources: dict[str, str]) -> None:
    assert len(sources) > 40
    assert direction_violations(sources) == []


@pytest.mark.parametrize("package", ["etp", "megatron_patches"])
def test_imports_are_acyclic(sources: dict[str, str], package: str) -> None:
    assert cycles({name: text for name, text in sources.items() if name.split(".")[0] == package}) == []


def test_importing_refit_loads_neither_megatron_nor_transformer_engine(sources: dict[str, str]) -> None:
    imported = imported_at_once(sources)
    for name in sources:
        if name.startswith(REFIT) and not name.startswith(REFIT_GLUE):
            roots = {loaded.split(".")[0] for loaded in loaded_with(name, imported)}
            assert not roots & {"megatron", "transformer_engine"}, name


def test_the_engine_outside_of_collectives_names_no_transport(sources: dict[str, str]) -> None:
    named = re.compile(r"collectives\.(c10d|copy_engine)|C10dTransport|CopyEngineTransport")
    others = {n: text for n, text in sources.items() if n.split(".")[0] == "etp" and "collectives" not in n}
    assert [name for name, text in others.items() if named.search(text)] == []


def test_no_global_and_no_assert_statements(sources: dict[str, str]) -> None:
    assert statement_violations(sources) == []


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("etp.layout", "from etp.runtime import EtpRuntime", "layer 6 is above its own, 1"),
        ("etp.collectives.c10d", "import etp.group", "layer 3 is above its own, 2"),
        ("etp.group", "def f():\n    from etp import param", "layer 4 is above its own, 3"),
        ("etp.cache", "if TYPE_CHECKING:\n    import megatron.core", "the engine knows neither Megatron"),
        ("etp.cache", "if not TYPE_CHECKING:\n    import etp.wrap", "layer 7 is above"),
        ("etp.wrap", "from etp import Linear", "imports the module it needs"),
        ("etp.novelty", "from etp.config import EtpConfig", "etp.novelty belongs to no layer"),
        ("etp.runtime", "import megatron_patches.registry", "the engine knows neither Megatron"),
        ("etp.runtime", "from megatron.core import parallel_state", "the engine knows neither Megatron"),
        ("megatron_patches.refit.planning.plan", "from etp.param import ETPShardedParam", "only its layout"),
        ("megatron_patches.refit.planning.plan", "import megatron_patches.seam", "refit stands alone"),
        (
            "megatron_patches.refit.planning.plan",
            "from megatron_patches.refit.parties import party",
            "is above its own",
        ),
        ("megatron_patches.refit.vllm.worker", "import megatron_patches.refit.trainer.engines", "by messages only"),
        ("megatron_patches.refit.trainer.take", "import megatron_patches.refit.vllm.swap", "by messages only"),
        ("megatron_patches.refit.trainer.take", "from megatron_patches.refit import Publisher", "the module it needs"),
        ("megatron_patches.refit.novelty", "import megatron_patches.refit.errors", "belongs to no layer"),
        ("megatron_patches.refit.vllm.worker", "import megatron.core", "neither Megatron nor Transformer Engine"),
        ("megatron_patches.refit.vllm.worker", "import transformer_engine.pytorch", "neither Megatron nor"),
        ("megatron_patches.refit.vllm.worker", "from etp.runtime import EtpRuntime", "the engine's run time"),
    ],
)
def test_a_wrong_import_is_found(sources: dict[str, str], module: str, text: str, reason: str) -> None:
    (violation,) = direction_violations(dict.fromkeys(sources, "") | {module: text})
    assert violation.startswith(f"{module}:{text.count(chr(10)) + 1}: ")
    assert reason in violation


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("etp.group", "from etp.layout import ShardLayout\nfrom etp.cache import BufferCache"),
        ("etp.grads", "from etp.group import WeightGroup"),
        ("etp.shard", "if TYPE_CHECKING:\n    from etp.runtime import EtpRuntime"),
        ("etp", "from etp.wrap import shard_module"),
        ("megatron_patches.seam", "from etp.runtime import EtpRuntime\nimport megatron.core"),
        ("megatron_patches.refit.planning.plan", "from etp.layout import ShardLayout"),
        ("megatron_patches.refit.source.describe", "from etp.param import ETPShardedParam"),
    ],
)
def test_a_right_import_passes(module: str, text: str) -> None:
    assert direction_violations({module: text}) == []


def test_cycles_and_banned_statements_are_found() -> None:
    modules = {"etp.a": "import etp.b", "etp.b": "def f():\n    from etp import a", "etp.c": "import etp.a"}
    assert cycles(modules) == ["etp.a -> etp.b -> etp.a"]
    assert cycles({"etp.a": "import etp.b", "etp.b": "if TYPE_CHECKING:\n    import etp.a"}) == []
    assert statement_violations({"m": "def f():\n    global x\n    assert x"}) == [
        "m:2: a global statement; give the state an owner",
        "m:3: an assert; raise an exception",
    ]


def test_what_an_import_loads_includes_the_parents_and_leaves_out_deferred_imports() -> None:
    modules = {"p": "import p.a", "p.a": "import torch\ndef f():\n    import megatron.core", "p.q": "", "p.q.r": ""}
    assert loaded_with("p.q.r", imported_at_once(modules)) == {"p", "p.a", "p.q", "p.q.r", "torch"}
