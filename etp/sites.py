"""Finds the weights to shard: those of linear and embedding layers, and of stacked experts, except replicated ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from etp.modules import GroupedLinear
from etp.param import ETPShardedParam
from etp.te import is_te_grouped_linear, is_te_linear, refuse_hidden_gradients, refuse_unsupported_te

_CONTAINERS = (list, tuple, set, ValuesView)


@dataclass(frozen=True)
class Site:
    """One module's weights that are gathered together.

    Attributes:
        path: the module's dotted name.
        module: the module.
        names: the weights' names in it.
        stacked: whether the module's forward pass reads the weight itself; see ``etp/stacked.py``.
    """

    path: str
    module: nn.Module
    names: list[str]
    stacked: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether an earlier call has sharded them."""
        return isinstance(self.params()[0], ETPShardedParam)

    def params(self) -> list[nn.Parameter]:
        """The weights: full ones, or shards if they are sharded already."""
        return [getattr(self.module, name) for name in self.names]

    def full_names(self) -> list[str]:
        """Their dotted names in the module that is sharded."""
        return [f"{self.path}.{name}".lstrip(".") for name in self.names]


def is_grouped(module: nn.Module) -> bool:
    """Whether it holds experts, which can have their own shard group."""
    return isinstance(module, GroupedLinear) or is_te_grouped_linear(module)


def stacked_experts(module: nn.Module) -> list[str]:
    """Names of parameters that hold a matrix for each of a module's experts, one on top of the other.

    That is how ``transformers`` keeps experts: in three dimensions, of which the first is the module's ``num_experts``.
    """
    shapes = {
        name: param.layout.shape if isinstance(param, ETPShardedParam) else tuple(param.shape)
        for name, param in module._parameters.items()
        if param is not None
    }
    count = getattr(module, "num_experts", None)
    return [name for name, shape in shapes.items() if len(shape) == 3 and shape[0] == count]


@dataclass(frozen=True)
class Replicated:
    """What the caller wants to stay replicated: modules at any depth below the chosen ones, and their parameters."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


def replicated_below(root: nn.Module, chosen: Iterable[nn.Module]) -> Replicated:
    """All modules below ``chosen``, and their parameters.

    Raises:
        TypeError: for something other than a module.
        ValueError: for a module that is not below ``root``, or has shards.
    """
    paths = {module: path for path, module in root.named_modules()}
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for module in chosen:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"replicated_modules has {module!r}, which is a {type(module).__name__}; pass the modules themselves, "
                "such as model.get_submodule(name)"
            )
        if module is root:
            raise ValueError("replicated_modules has the module that is to be sharded; pass submodules of it")
        if module not in paths:
            raise ValueError(
                f"replicated_modules has {type(module).__name__}({module.extra_repr()}), which is not below the module "
                "that is to be sharded; pass submodules of that one, and none of a copy"
            )
        for name, param in module.named_parameters(paths[module]):
            if isinstance(param, ETPShardedParam):
                raise ValueError(
                    f"replicated_modules has {paths[module]}, but {name} is a shard already; leave it out, or build "
                    "the model with layers that are not sharded"
                )
        modules.update(module.modules())
        params.update(module.parameters())
    return Replicated(frozenset(modules), frozenset(params))


def weight_sites(root: nn.Module, replicated: Replicated) -> Iterator[Site]:
    """The modules under ``root`` whose weights can be sharded or are, and are not ``replicated``.

    Raises:
        ValueError: for a module of Transformer Engine that would train wrongly, and for experts of which some are
            ``replicated`` because another module shares them.
    """
    for path, module in root.named_modules():
        if module in replicated.modules:
            refuse_hidden_gradients(path, module)
            continue
        refuse_unsupported_te(path or "the module", module)
        if isinstance(module, NonDynamicallyQuantizableLinear):
            continue
        if is_grouped(module):
            names = [f"weight{index}" for index in range(module.num_gemms)]
        elif isinstance(module, nn.Linear | nn.Embedding) or is_te_linear(module):
            names = ["weight"]
        else:
            refuse_hidden_gradients(path or "the module", module)
            for name in stacked_experts(module):
                if module._parameters[name] not in replicated.params:
                    yield Site(path, module, [name], stacked=True)
            continue
        tied = [name for name in names if module._parameters.get(name) in replicated.params]
        if tied and len(tied) < len(names):
            raise ValueError(
                f"{path}: {tied[0]} is shared with a module of replicated_modules, and a grouped linear is sharded "
                "as a whole or not at all; pass it in replicated_modules as well"
            )
        if not tied:
            yield Site(path, module, names)


def refuse_partly_shared(sites: Sequence[Site]) -> None:
    """Refuse modules that share only some of their weights: a module's weights are gathered together, in its order."""
    first: dict[int, tuple[list[int], str]] = {}
    for site in sites:
        together = [id(param) for param in site.params()]
        for param, name in zip(site.params(), site.full_names(), strict=True):
            if isinstance(param, ETPShardedParam):
                others, other = [id(shard) for shard in param.weight_group.shards], param.weight_group.name
            else:
                others, other = first.setdefault(id(param), (together, name))
            if others != together:
                raise ValueError(
                    f"{name} is gathered together with other weights than {other}, with which it is shared: modules "
                    "may share all of their weights, in one order, or none"
                )


def refuse_kept_elsewhere(root: nn.Module, sites: Sequence[Site]) -> None:
    """Refuse modules that also keep a weight outside of their parameters, where its shard would not replace it.

    They would go on computing with the full weight, which is no longer trained.
    """
    cut = {
        id(site.module._parameters.get(attribute)): name
        for site in sites
        for attribute, name in zip(site.names, site.full_names(), strict=True)
        if site.module._parameters.get(attribute) is not None
    }
    for path, module in root.named_modules():
        for attribute, value in vars(module).items():
            kept = value.values() if isinstance(value, dict) and attribute != "_parameters" else value
            for each in kept if isinstance(kept, _CONTAINERS) else (kept,):
                if id(each) in cut:
                    raise ValueError(
                        f"{path or 'the module'} keeps {cut[id(each)]} in its attribute {attribute} as well, and would "
                        "go on computing with the full weight there; register it as a parameter, or read it from its "
                        "module in forward"
                    )
