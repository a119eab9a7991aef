"""DistributedDataParallel is notified of each expert's gradient separately, which takes longer than reducing them.

The gradients of a grouped layer's experts are complete at the same time. With this fix, one call per layer and backward
pass notifies DistributedDataParallel of all of them. The call counts the gradients of a bucket group in C, and lets
Megatron's own method count the last one, which starts the bucket group's reduction once all have arrived. If autograd
has left its own gradient on an expert, as with a penalty, Megatron's own hooks run for each expert.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from etp.group import WeightGroup
from megatron_patches.registry import PatchRecord

_GRAD = attrgetter("grad")
_HOOKS = "_grouped_experts"


class GroupReady:
    """Notifies a DistributedDataParallel that the gradients of one grouped layer are complete.

    Args:
        ddp: the DistributedDataParallel that reduces the layer's experts.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._hooks: dict[Any, Callable[..., None]] = {}
        self._by_bucket_group: list[tuple[Any, list[Any], Any]] = []

    def add(self, expert: Any, hook: Callable[..., None]) -> None:
        """Include ``expert``; ``hook`` is Megatron's own hook for this expert alone."""
        self._hooks[expert] = hook

    def __call__(self, expert: Any = None) -> None:
        """Notify that the gradient of one expert is complete; None: all of them."""
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        if is_graph_capturing():
            return
        if expert is not None:
            if expert in self._hooks:  # it may have been frozen when the hooks were made
                self._hooks[expert]()
            return
        with torch._C.DisableTorchFunctionSubclass():
            all_reduced = all(grad is None for grad in map(_GRAD, self._hooks))
        if not all_reduced:
            for hook in self._hooks.values():
                hook()
            return
        if not self._ddp.ddp_config.overlap_grad_reduce:
            return
        for bucket_group, others, last in self._bucket_groups():
            if bucket_group.is_last_microbatch:
                counts = bucket_group.per_param_grad_ready_counts
                counts.update(zip(others, [counts.get(expert, 0) + 1 for expert in others], strict=True))
            bucket_group.register_grad_ready(last, self._ddp.force_all_reduce)

    def _bucket_groups(self) -> list[tuple[Any, list[Any], Any]]:
        """The bucket groups of the experts, each with all of its experts except the last, and the last one."""
        if not self._by_bucket_group:
            found: defaultdict[Any, list[Any]] = defaultdict(list)
            for expert in self._hooks:
                if expert in self._ddp.param_to_bucket_group:
                    found[self._ddp.param_to_bucket_group[expert]].append(expert)
            self._by_bucket_group = [(group, experts[:-1], experts[-1]) for group, experts in found.items()]
        return self._by_bucket_group


def _replace(make: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    @functools.wraps(make)
    def replacement(self: Any, param: Any) -> Callable[..., None]:
        hook = make(self, param)
        if not getattr(param, "is_routed_expert", False):
            return hook
        layers: dict[WeightGroup, GroupReady] = vars(self).setdefault(_HOOKS, {})
        group = param.weight_group
        if group not in layers:
            layers[group] = GroupReady(self)
            group.reduce_hooks.append(layers[group])
        layers[group].add(param, hook)
        hook.told_with_its_layer = True  # type: ignore[attr-defined]
        return hook

    return replacement


RECORD = PatchRecord(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
    replace=_replace,
    reason="it is called for every expert of a layer, whose gradients are complete at the same time",
    sha256="aae4466be4608927",
)
