"""Which weights are sharded, and what stays replicated with the modules that the caller names. No process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from etp.sites import Site, refuse_kept_elsewhere, replicated_below, weight_sites


class Net(nn.Module):
    """Linears and tables at several depths, a tie, attention, and what has no linear weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.block = nn.Sequential(nn.Linear(4, 6), nn.ModuleDict({"deep": nn.Linear(6, 4), "norm": nn.LayerNorm(4)}))
        self.attention = nn.MultiheadAttention(4, 2)
        self.conv = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight


def _sites(net: nn.Module, names: Sequence[str] = ()) -> list[Site]:
    return list(weight_sites(net, replicated_below(net, [net.get_submodule(name) for name in names])))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), ["table.weight", "block.0.weight", "block.1.deep.weight", "head.weight"]),
        (("block",), ["table.weight", "head.weight"]),
        (("block.1",), ["table.weight", "block.0.weight", "head.weight"]),
        (("block.1.deep", "block.1", "attention"), ["table.weight", "block.0.weight", "head.weight"]),
        (("head",), ["block.0.weight", "block.1.deep.weight"]),
        (("table", "block"), []),
    ],
)
def test_weights_below_the_chosen_modules_and_their_ties_are_left_out(
    names: Sequence[str], expected: list[str]
) -> None:
    assert [name for site in _sites(Net(), names) for name in site.full_names()] == expected


def test_all_that_is_below_counts() -> None:
    net = Net()
    found = replicated_below(net, (net.get_submodule(name) for name in ("block.1", "head")))
    assert found.modules == {*net.get_submodule("block.1").modules(), net.head}
    assert found.params == {*net.get_submodule("block.1").parameters(), net.table.weight}


def test_a_parametrized_layer_has_no_weight_to_share() -> None:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4))
    assert [site.path for site in _sites(net)] == ["0", "1"]
    assert [site.path for site in _sites(net, ["0"])] == ["1"]


def test_other_choices_are_refused() -> None:
    net = Net()
    with pytest.raises(TypeError, match="replicated_modules has 'head', which is a str; pass the modules themselves"):
        replicated_below(net, ["head"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="replicated_modules has the module that is to be sharded"):
        replicated_below(net, [net])
    stranger = (
        r"replicated_modules has Linear\(in_features=4, out_features=9, bias=False\), which is not below the module"
    )
    with pytest.raises(ValueError, match=stranger):
        replicated_below(net, [net.head, Net().head])


@pytest.mark.parametrize("keep", [lambda weight: [weight], lambda weight: {"tied": weight}, lambda weight: weight])
def test_a_weight_that_is_kept_outside_of_parameters_as_well_is_refused(keep: Callable[[Any], Any]) -> None:
    net = Net()
    refuse_kept_elsewhere(net, _sites(net))
    vars(net.block)["tied"] = keep(net.table.weight)
    with pytest.raises(ValueError, match=r"^block keeps (table|head)\.weight in its attribute tied as well"):
        refuse_kept_elsewhere(net, _sites(net))
    refuse_kept_elsewhere(net, _sites(net, ["table"]))
