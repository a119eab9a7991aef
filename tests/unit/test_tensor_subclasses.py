"""The engine has few subclasses of torch.Tensor, and docs/design.md says why each of them is one."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.imports import ROOT, product_sources

MOST = 6
"""Whoever makes them fewer lowers this."""

BASES_OF_TORCH = {"Tensor", "Parameter"}


def _bases(*packages: str) -> dict[str, set[str]]:
    """For each class of some packages, the names of its bases; for classes of one name, of all of them."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, text in product_sources().items():
        if module.split(".")[0] in packages:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    found[node.name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return found


def test_there_are_no_more_tensor_subclasses_and_each_is_explained() -> None:
    bases = _bases("etp")
    subclasses: set[str] = set()
    while more := {name for name, of in bases.items() if of & (BASES_OF_TORCH | subclasses)} - subclasses:
        subclasses |= more
    # Of the others, there are no instances.
    leaves = subclasses - set().union(*(bases[name] for name in subclasses))
    assert len(leaves) <= MOST
    page = (ROOT / "docs" / "design.md").read_text().partition("## Tensor subclasses\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)) == leaves
    for name in subclasses - leaves:
        assert f"`{name}`" in page


def test_megatron_adds_attributes_to_one_of_them() -> None:
    derived = {name for name, of in _bases("megatron_patches").items() if of & {*BASES_OF_TORCH, "ETPShardedParam"}}
    assert derived == {"MegatronShardedParam"}
