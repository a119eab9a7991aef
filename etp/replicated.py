"""Gradients of replicated parameters (norms, biases, routers), combined over the shard group in one flat all-reduce.

The ranks of a shard group see different data, so gradients of replicated parameters must be combined over them like
those of shards. A tensor hook collects each incoming gradient and gives autograd zeros instead. At the end of the
backward pass the combined gradients are added to ``grad``, so that earlier gradients there are not reduced twice.

[Note: hooks of users] The user's own hooks must see the gradient rather than those zeros, so our hook must run last:
each forward pass registers it again if others were added after it. If a hook was added even later, or runs once the
gradient is accumulated, the parameter's gradient is combined right away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from etp.collectives.sums import divide
from etp.collectives.works import free_bytes
from etp.config import EtpConfig, GradReduction
from etp.grad_hooks import executes
from etp.mode import Modes
from etp.passes import Passes
from etp.routes import Routes
from etp.shard import can_be_trained


class ReplicatedGrads:
    """Collects gradients of replicated parameters in a backward pass and reduces them at its end.

    Args:
        config: options of the runtime.
        routes: records, pairs and waits for each all-reduce.
        modes: whether a part of the model is being captured; the gradients of its backward pass are left to autograd,
            which delivers them again at every replay.
        passes: notified, at each collected gradient, that a backward pass is under way.
    """

    def __init__(self, config: EtpConfig, routes: Routes, modes: Modes, passes: Passes) -> None:
        self._config = config
        self._routes = routes
        self._modes = modes
        self._passes = passes
        self._names: dict[nn.Parameter, str] = {}
        self.groups: dict[nn.Parameter, dist.ProcessGroup] = {}
        """The registered parameters, each with the process group over which its gradient is combined."""
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._collected: dict[nn.Parameter, torch.Tensor] = {}

    def register(self, param: nn.Parameter, group: dist.ProcessGroup, name: str) -> None:
        """Reduce ``param``'s gradients over ``group`` from now on, whenever it is trained."""
        self.groups.setdefault(param, group)
        self._names.setdefault(param, name)
        self._hook(param)

    def begin_pass(self, *, backward: bool) -> None:
        """Hook the registered parameters again where other hooks were added since."""
        for param in () if backward else self.groups:
            self._hook(param)

    def _hook(self, param: nn.Parameter) -> None:
        if self._is_last(param) or not (param.requires_grad or can_be_trained(param)):
            return
        if param in self._hooks:
            self._hooks.pop(param).remove()
        with torch._C.DisableTorchFunctionSubclass():
            # A frozen parameter accepts no hook. It gets one all the same, because where the parts of a model are
            # called one by one, it may be trained again without a forward pass that is seen to begin.
            is_trained = param.requires_grad
            param.requires_grad_(True)
            self._hooks[param] = param.register_hook(partial(self._collect, param))
            param.requires_grad_(is_trained)

    def _is_last(self, param: nn.Parameter) -> bool:
        """Whether ``param`` has our hook, after all others."""
        hook = self._hooks.get(param)
        return hook is not None and next(reversed(param._backward_hooks or {}), None) == hook.id

    def release(self) -> None:
        """Remove all hooks: gradients are no longer combined."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.groups.clear()
        self._names.clear()

    def _collect(self, param: nn.Parameter, grad: torch.Tensor | None) -> torch.Tensor | None:
        # An autograd function may return None. PyTorch drops the gradient of a parameter that was frozen after the
        # forward pass.
        if grad is None or self._modes.now.is_part or not param.requires_grad:
            return grad
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True with {self._names[param]}, whose gradient is combined over the ranks of the shard "
                "group and cannot be differentiated again: ask torch.autograd.grad for gradients of inputs only"
            )
        if grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self._names[param]} is sparse and cannot be combined over the ranks of the shard "
                "group; turn its module's option sparse off"
            )
        if not executes(get_gradient_edge(param).node):
            # torch.autograd.grad returns it, and must return the same on all ranks, as it does for shards.
            return self._reduced(param, grad)
        self._passes.enter_backward()
        if param._post_accumulate_grad_hooks or not self._is_last(param):
            # A hook uses the gradient next (an optimizer fused into backward, for example).
            return self._reduced(param, grad)
        earlier = self._collected.get(param)
        self._collected[param] = grad.detach().clone() if earlier is None else earlier + grad.detach()
        return torch.zeros_like(grad)

    def _reduced(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """``grad`` combined over the group right away. Collective."""
        self._announce(param)
        reduced = grad.detach().to(self._wide(grad.dtype), copy=True)
        self._all_reduce(reduced, self.groups[param], [self._names[param]])
        return reduced.to(grad.dtype)

    def announce(self) -> None:
        """Record the gradients that :meth:`reduce` combines next, in their order."""
        for param in self.groups:
            if param in self._collected:
                self._announce(param)

    def _announce(self, param: nn.Parameter) -> None:
        self._routes.note(self.groups[param], f"all-reduce of {self._names[param]}'s gradient")

    def reduce(self) -> None:
        """Combine what was collected and add it to each parameter's ``grad``."""
        collected, self._collected = self._collected, {}
        buckets: dict[tuple[dist.ProcessGroup, torch.dtype, torch.device], list[nn.Parameter]] = {}
        # In registration order, which all ranks share; the order of arrival may differ.
        for param, group in self.groups.items():
            if param in collected:
                buckets.setdefault((group, collected[param].dtype, param.device), []).append(param)
        for (group, _, _), params in buckets.items():
            flat = torch.cat([collected[param].reshape(-1) for param in params])
            flat = flat.to(self._wide(flat.dtype))
            names = [self._names[param] for param in params]
            self._all_reduce(flat, group, names)
            for param, total in zip(params, flat.split([p.numel() for p in params]), strict=True):
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                param.grad.add_(total.view(param.shape))
            free_bytes(flat)

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` are summed."""
        return torch.promote_types(dtype, torch.float32) if self._config.fp32_accumulation else dtype

    def settle(self) -> None:
        """Nothing is in flight between two collected gradients."""

    def discard(self) -> None:
        """Drop what an abandoned backward pass collected."""
        self._collected.clear()

    def _all_reduce(self, flat: torch.Tensor, group: dist.ProcessGroup, names: Sequence[str]) -> None:
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        label = f"all-reduce of replicated gradients ({span})"
        self._routes.pair(group, flat.device, label, names)
        reduce = partial(dist.all_reduce, flat, group=group, async_op=True)
        self._routes.wait_for(reduce, group, label, flat.device.type == "cpu")
        if self._config.grad_reduction is GradReduction.MEAN:
            divide(flat, dist.get_world_size(group))
