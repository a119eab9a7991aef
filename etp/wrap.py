"""Shards a plain PyTorch or Transformer Engine model in place."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from etp.config import EtpConfig
from etp.digest import check_peers_agree, unless_refused
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.modules import check_uses
from etp.optimizers import remember_shard, shard_in_place_of
from etp.param import ETPShardedParam
from etp.runtime import EtpRuntime, runtimes_driving
from etp.shard import own_rank
from etp.sites import (
    Replicated,
    Site,
    is_grouped,
    refuse_kept_elsewhere,
    refuse_partly_shared,
    replicated_below,
    weight_sites,
)
from etp.stacked import StackedWeights, Uses
from etp.te import refuse_quantized

logger = logging.getLogger(__name__)

# Matched with the names of a class and its bases, because importing some of these takes long.
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def shard_module(
    module: nn.Module,
    etp_group: dist.ProcessGroup,
    expert_group: dist.ProcessGroup | None = None,
    config: EtpConfig | None = None,
    *,
    replicated_modules: Iterable[nn.Module] = (),
) -> EtpRuntime:
    """Shard the linear and embedding weights under ``module`` over a group, in place. Collective.

    Every ``nn.Linear``, ``nn.Embedding``, Transformer Engine ``Linear``, ``LayerNormLinear`` and ``GroupedLinear``
    at any depth keeps its place and its behaviour; its weight becomes an :class:`etp.ETPShardedParam`. So do experts
    that a module keeps in parameters of three dimensions, of which the first is its ``num_experts``; during its forward
    pass they are the full weights. Shared weights stay shared. Everything else stays replicated, and its gradients are
    combined over ``etp_group`` (over ``expert_group`` in grouped linears). The projections inside
    ``nn.MultiheadAttention`` stay replicated, because it reads their weights directly. Pass other modules that do so in
    ``replicated_modules``.

    All ranks must call the same sharded layers in the same order, on batches of any size, and a backward pass must
    reach the same other parameters on all of them. If not, :class:`etp.PeerMismatchError` names the layers when the
    pass ends (on GPUs, when the next one ends), or the process ends at its timeout. Forward passes of ``module`` raise
    :class:`etp.EtpStateError` if shards were replaced, or trained parameters added, since this call; after adding
    parameters, call it again.

    When ``loss.backward()`` returns, each shard's ``grad`` holds the mean (or sum) over the group. Build the optimizer
    after sharding: one that was built before holds the full weights, which the module no longer uses, and is refused
    when it steps. So are ``LBFGS`` and ``ZeroRedundancyOptimizer``. On GPUs, build it with ``foreach=True`` or
    ``fused=True``: PyTorch chooses neither by itself for subclasses of ``Parameter``, and steps them one by one.

    ``torch.nn.utils.clip_grad_norm_`` (or :func:`etp.clip_grad_norm_`, with fewer collectives) and
    ``torch.amp.GradScaler`` see whole gradients and are collective. Norms computed in any other way see only this
    rank's part, and optimizers that treat a matrix as a whole see each shard as one. See docs/numerics.md.

    Args:
        module: the whole model, with the same weights on every rank of the group. Gradients of parameters outside of it
            are not combined.
        etp_group: the ranks to shard over. They see different data.
        expert_group: the ranks to shard grouped linears over; ``etp_group`` if None.
        config: engine options; the defaults if None.
        replicated_modules: submodules of ``module``, the same on all ranks. All parameters below them stay replicated,
            even where other modules share them. Unlike with FSDP's ``ignored_modules``, their gradients are combined
            over the group. A later call for the same weights needs them again.

    Returns:
        The runtime that now drives the weights. It lives as long as they do; keeping a reference is optional.

    Raises:
        ValueError: if this rank is not in one of the groups, a weight cannot be sharded, a weight was shared with a
            module that an earlier call has sharded, or is kept outside of its module's parameters as well, or is
            sharded already over other ranks, a part of ``module`` is in ``DistributedDataParallel`` or FSDP, or
            ``replicated_modules`` has a module that is not below ``module`` or has shards; nothing is changed then.
        TypeError: if a group is no process group, or ``replicated_modules`` has something other than modules; nothing
            is changed then.
        EtpStateError: if an earlier call has sharded a module of which ``module`` is a part, or a backward pass is in
            progress; nothing is changed then.
        PeerMismatchError: if the ranks hold different weights, or shard different ones, or another rank refuses, with
            its reason; nothing is changed then.
    """
    groups = _Groups(etp_group, expert_group or etp_group)
    for name, group in groups._asdict().items():
        own_rank(group, name)
    runtime = EtpRuntime(config)
    experts = {p for part in module.modules() if is_grouped(part) for p in part.parameters(recurse=False)}
    planned: _Plan | Exception
    try:
        planned = _plan(module, replicated_modules, runtime, groups)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        planned = error
    used = dict.fromkeys(groups if experts else [etp_group])
    plan = unless_refused(planned, list(used), "shard_module")
    _compare(module, plan, experts, groups)
    _replace(module, plan, groups)
    runtime.adopt(module)
    _register_replicated(module, runtime, groups)
    for group in used:
        runtime.routes.agree_on_name(group, module)
    check_uses(module, runtime)
    # Last, because the checks of a module of experts that is the root find shards in it.
    _replace_stacked(plan.sites)
    logger.info("sharded %d weight groups over %d ranks", len(runtime.groups), dist.get_world_size(etp_group))
    return runtime


class _Groups(NamedTuple):
    """The ranks to shard over, and those to shard experts over; possibly the same."""

    etp_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup

    def of(self, module: nn.Module) -> dist.ProcessGroup:
        """The group of a module's own parameters."""
        return self.expert_group if is_grouped(module) else self.etp_group


def _refuse_other_groups(root: nn.Module, groups: _Groups) -> None:
    """Refuse layers already sharded over other ranks than their replicated parameters would be combined over."""
    for path, module in root.named_modules():
        label, group = "expert_group" if is_grouped(module) else "etp_group", groups.of(module)
        for name, param in module.named_parameters(path, recurse=False):
            if isinstance(param, ETPShardedParam) and not _same_ranks(param.group, group):
                raise ValueError(
                    f"{name} is sharded over ranks {dist.get_process_group_ranks(param.group)}, and {label} has ranks "
                    f"{dist.get_process_group_ranks(group)}, over which the gradients of biases and norms beside it "
                    "would be combined; pass the group that it is sharded over"
                )


def _refuse_wrappers(root: nn.Module) -> None:
    """Refuse modules that shard weights or combine gradients themselves."""
    for path, module in root.named_modules():
        if _WRAPPERS & {kind.__name__ for kind in type(module).__mro__}:
            raise ValueError(
                f"{path or 'the module'} is a {type(module).__name__}, which combines gradients over the ranks, as "
                "etp.shard_module does; pass it the plain module"
            )
    for name, param in root.named_parameters():
        if type(param.data).__name__ == "DTensor":
            raise ValueError(f"{name} is a DTensor, which is distributed already; pass etp.shard_module plain weights")


@dataclass(frozen=True)
class _Plan:
    """What a call of :func:`shard_module` will cut.

    Attributes:
        sites: the modules whose weights are cut.
        chosen: what the caller wants to stay replicated.
        layouts: how each weight is cut, by ``id`` of the parameter.
    """

    sites: list[Site]
    chosen: Replicated
    layouts: dict[int, ShardLayout]


def _plan(root: nn.Module, replicated_modules: Iterable[nn.Module], runtime: EtpRuntime, groups: _Groups) -> _Plan:
    """Validate, on this rank alone, everything before the first weight is sharded."""
    _refuse_wrappers(root)
    chosen = replicated_below(root, replicated_modules)
    sites = list(weight_sites(root, chosen))
    refuse_partly_shared(sites)
    sites = [site for site in sites if not site.is_sharded]
    refuse_kept_elsewhere(root, sites)
    _refuse_other_groups(root, groups)
    runtime.require_adoptable(root)
    return _Plan(sites, chosen, _checked_layouts(root, sites, chosen, groups, runtime.config))


def _compare(root: nn.Module, plan: _Plan, experts: Container[nn.Parameter], groups: _Groups) -> None:
    """Raise PeerMismatchError unless all ranks would cut the same weights of the same values. Collective."""
    plain = {n: p for n, p in root.named_parameters() if not isinstance(p, ETPShardedParam)}
    # Replicated weights are named differently, so that ranks that would shard different weights differ.
    named = {f"{n} (replicated)" if p in plan.chosen.params else n: p for n, p in plain.items()}
    check_peers_agree({n: p for n, p in named.items() if p not in experts}, groups.etp_group, "shard_module")
    if experts:
        check_peers_agree({n: p for n, p in named.items() if p in experts}, groups.expert_group, "shard_module")


def _checked_layouts(
    root: nn.Module, sites: list[Site], chosen: Replicated, groups: _Groups, config: EtpConfig
) -> dict[int, ShardLayout]:
    """How each weight will be cut, by ``id`` of the parameter."""
    plain = {n: p for n, p in root.named_parameters() if not isinstance(p, ETPShardedParam)}
    for name, param in plain.items():
        if isinstance(param, nn.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet; run a forward pass of the model before etp.shard_module")
        if param.is_meta:
            raise ValueError(f"{name} is on the meta device; give it memory and values before etp.shard_module")
    for name, param in plain.items():
        _refuse_cut_before(name, param)
    _refuse_quantized(sites)
    _refuse_one_memory(plain, {param for site in sites for param in site.params()})
    for path, module in root.named_modules():
        _refuse_rescaled_table(path, module, chosen)
        if is_grouped(module) and module in chosen.modules and not _same_ranks(*groups):
            raise ValueError(
                f"{path} is in replicated_modules, but its gradients would be combined over expert_group, which has "
                "other ranks than etp_group; leave it out, so that it is sharded over expert_group"
            )
    replicated_before = {param for runtime in runtimes_of(root) for param in runtime.replicated.groups}
    layouts: dict[int, ShardLayout] = {}
    for site in sites:
        size = dist.get_world_size(groups.of(site.module))
        for name, attribute in zip(site.full_names(), site.names, strict=True):
            if site.module._parameters.get(attribute) in replicated_before:
                raise ValueError(
                    f"{name} stayed replicated in an earlier call of etp.shard_module; pass its module in "
                    "replicated_modules again"
                )
            param = _checked_param(name, site.module, attribute)
            # A row of stacked experts is an expert, and kernels never see shards of them.
            alignment = min(1, config.pad_for_alignment) if site.stacked else config.pad_for_alignment
            try:
                layouts[id(param)] = ShardLayout(tuple(param.shape), size, alignment)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return layouts


def _refuse_cut_before(name: str, param: nn.Parameter) -> None:
    shard = shard_in_place_of(param)
    if shard is not None:
        raise ValueError(
            f"{name} shared its weight with {shard.fqn}, which an earlier call of etp.shard_module has sharded without "
            "it; pass a module that contains both"
        )


def _refuse_quantized(sites: Iterable[Site]) -> None:
    for site in sites:
        for name, param in zip(site.full_names(), site.params(), strict=True):
            refuse_quantized(name, param)


def _refuse_one_memory(params: Mapping[str, nn.Parameter], cut: Container[nn.Parameter]) -> None:
    """Refuse weights that are tied only by sharing memory: each would get shards in separate memory."""
    first: dict[tuple[int, int], tuple[str, nn.Parameter]] = {}
    for name, param in params.items():
        other, holder = first.setdefault((param.data_ptr(), param.numel()), (name, param))
        if holder is not param and param.numel() and (param in cut or holder in cut):
            raise ValueError(
                f"{name} and {other} are two parameters in one memory, which sharding would part; tie weights by "
                "assigning one parameter to both modules, or copy one of the two"
            )


def _same_ranks(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def _refuse_rescaled_table(path: str, module: nn.Module, chosen: Replicated) -> None:
    replicated = isinstance(module, nn.EmbeddingBag) or module in chosen.modules
    if replicated and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise ValueError(
            f"{path}.weight: max_norm rescales the rows that a rank's own data use, so that the ranks' copies of the "
            "table would drift apart; build it without, and rescale all rows after optimizer steps (torch.renorm)"
        )


def _checked_param(name: str, module: nn.Module, attribute: str) -> nn.Parameter:
    """The parameter. Raises ValueError if sharding it would silently lose something."""
    if getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False):
        raise ValueError(f"{name}: an embedding with max_norm or sparse gradients cannot be sharded")
    param = module._parameters.get(attribute)
    if param is None:
        raise ValueError(
            f"{name} is computed from other parameters (a parametrization, such as weight norm) and cannot be "
            "sharded; remove the parametrization first, or pass its module in replicated_modules"
        )
    if param.is_complex():
        raise ValueError(
            f"{name} is complex, and only real weights can be sharded; pass its module in replicated_modules"
        )
    if param.grad is not None:
        raise ValueError(f"{name} has a gradient already, of the full size; call zero_grad() before sharding")
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(f"{name} has gradient hooks, which its shard would not have; register them after sharding")
    return param


def _replace(root: nn.Module, plan: _Plan, groups: _Groups) -> None:
    # Holds the originals too: an id may be used again as soon as its object is gone.
    done: dict[int, tuple[nn.Parameter, ETPShardedParam]] = {}
    for site in plan.sites:
        group = groups.of(site.module)
        fresh: list[ETPShardedParam] = []
        for param in site.params():
            if id(param) not in done:
                fresh.append(ETPShardedParam.from_full(param, group, plan.layouts[id(param)].pad_for_alignment))
                # Attributes that users have set on the parameter, such as flags for the optimizer, are kept.
                fresh[-1].__dict__.update({k: v for k, v in vars(param).items() if k not in vars(fresh[-1])})
                if param.grad_dtype is not param.dtype:
                    fresh[-1].grad_dtype = param.grad_dtype
                done[id(param)] = (param, fresh[-1])
                remember_shard(param, fresh[-1])
        if fresh:
            WeightGroup(fresh, group)
    # In all modules, not only at the sites: a user-defined module may share one of these weights.
    for module in root.modules():
        for name, held in module._parameters.items():
            if id(held) in done:
                module._parameters[name] = done[id(held)][1]


def _replace_stacked(sites: list[Site]) -> None:
    stacked: dict[nn.Module, list[str]] = {}
    for site in sites:
        if site.stacked:
            stacked.setdefault(site.module, []).extend(site.names)
    uses = Uses()
    for module, names in stacked.items():
        StackedWeights(module, names, uses)


def _register_replicated(root: nn.Module, runtime: EtpRuntime, groups: _Groups) -> None:
    if runtime.config.reduce_once_per_iteration:
        logger.info("replicated gradients are still combined at every backward; only sharded weights wait")
    for path, module in root.named_modules():
        for name, param in module.named_parameters(path, recurse=False):
            if not isinstance(param, ETPShardedParam):
                runtime.replicated.register(param, groups.of(module), name)


def runtimes_of(module: nn.Module) -> list[EtpRuntime]:
    """The runtimes that drive sharded weights under ``module``, each once."""
    return runtimes_driving(param for param in module.parameters() if isinstance(param, ETPShardedParam))


def wait_async_comms(module: nn.Module) -> None:
    """Finish all of ``module``'s communication: every shard's gradient is complete, every hook has run.

    Needed only where reductions outlive ``backward()``: with ``reduce_once_per_iteration``, and under Megatron,
    which calls it itself.
    """
    for runtime in runtimes_of(module):
        runtime.wait()


def resident_nbytes(module: nn.Module) -> dict[str, int]:
    """Bytes that this rank holds for ``module``'s sharded weights, by purpose.

    Returns:
        ``shards``, ``gradients``, ``gather_slots``, ``gradient_buffers``, and ``transports`` for other memory of the
        transports; docs/design.md has the closed form. Symmetric memory, which PyTorch's allocator does not report, is
        included: in ``shards`` where shards are stored in it, otherwise in ``transports``.
    """
    totals = {"shards": 0, "gradients": 0, "gather_slots": 0, "gradient_buffers": 0, "transports": 0}
    for param in module.parameters():
        if isinstance(param, ETPShardedParam):
            totals["shards"] += _nbytes(param.local_shard())
            grad = param.grad if getattr(param, "main_grad", None) is None else param.main_grad  # type: ignore[attr-defined]
            totals["gradients"] += 0 if grad is None else _nbytes(grad)
    for runtime in runtimes_of(module):
        totals["gather_slots"] += sum(mode.cache.nbytes() for mode in runtime.modes.all)
        totals["gradient_buffers"] += sum(mode.pool.nbytes() for mode in runtime.modes.all)
        for transport in runtime.routes.transports.values():
            totals["transports"] += sum(n for what, n in transport.nbytes().items() if what != "shards_in_place")
    return totals


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
