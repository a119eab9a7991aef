"""Sharded layers to build a model from: Linear, LayerNormLinear, GroupedLinear.

With Transformer Engine and CUDA, constructing one of these returns TE's own module with sharded weights; otherwise the
plain PyTorch implementation below, which is the reference and has the same signature. Construction is collective: all
ranks take the weights drawn by the first rank of the group. A layer combines gradients of its own parameters only: pass
a model that has others to :func:`etp.shard_module`, or the ranks' copies of them drift apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from etp import functional
from etp.config import EtpConfig
from etp.group import WeightGroup
from etp.membership import Membership
from etp.optimizers import OptimizerCheck
from etp.param import ETPShardedParam
from etp.runtime import EtpRuntime
from etp.shard import own_rank
from etp.te import refuse_quantized, te_available, te_pytorch


class _ShardedModule(nn.Module):
    """A layer with sharded weights. It has its own runtime until ``shard_module`` gives it a shared one.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return TE's module where TE can run; see the file's docstring. User-defined subclasses are never replaced."""
        if _ShardedModule in cls.__bases__ and _wants_te(kwargs):
            return _build_te(cls, args, kwargs)
        return super().__new__(cls)

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    @staticmethod
    def weight_names(arguments: Mapping[str, Any]) -> list[str]:
        """Names of the sharded weights of a layer constructed with these arguments."""
        del arguments
        return ["weight"]

    @staticmethod
    def refuse(arguments: Mapping[str, Any]) -> None:
        """Raise ValueError for arguments that neither implementation accepts, before anything is built."""

    def _add_linear(
        self, suffix: str, bias: bool, params_dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        """Register a weight and a bias (or none), initialised as in ``nn.Linear``."""
        made = nn.Linear(self.in_features, self.out_features, bias, device, params_dtype)
        for name, param in made._parameters.items():
            self.register_parameter(f"{name}{suffix}", param)

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Linear`` prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(_ShardedModule):
    """``y = x @ weight.T + bias`` with ``weight`` sharded over ``etp_group``. Construction is collective.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output; need not be a multiple of the group's size.
        bias: whether there is a (replicated) bias.
        etp_group: the ranks to shard over.
        params_dtype: dtype of the parameters; torch's default if None.
        device: where they live; the current CUDA device with TE, else the CPU, if None.
        config: engine options.

    Raises:
        ValueError: if this rank is not in ``etp_group``, or ``config`` forbids padding and the rows do not divide.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        etp_group: dist.ProcessGroup,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        config: EtpConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self._add_linear("", bias, params_dtype, device)
        shard_weights(self, ["weight"], etp_group, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Linear`` prints them."""
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class LayerNormLinear(_ShardedModule):
    """A LayerNorm or RMSNorm followed by :class:`Linear`.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        eps: added to the variance (or mean square).
        bias: whether the linear has a bias.
        normalization: "LayerNorm" (with weight and bias) or "RMSNorm" (with weight).
        etp_group: the ranks to shard over.
        params_dtype: dtype of the parameters; torch's default if None.
        device: where they live; see :class:`Linear`.
        config: engine options.

    Raises:
        ValueError: as :class:`Linear` does, and for another ``normalization``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(  # noqa: PLR0913  # the signature is Transformer Engine's
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        *,
        etp_group: dist.ProcessGroup,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        config: EtpConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.refuse({"normalization": normalization})
        self.eps, self.normalization = eps, normalization
        where: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, **where))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, **where)) if normalization == "LayerNorm" else None
        self._add_linear("", bias, params_dtype, device)
        shard_weights(self, ["weight"], etp_group, config)

    @staticmethod
    def refuse(arguments: Mapping[str, Any]) -> None:
        """Raise ValueError for an unknown ``normalization``."""
        normalization = arguments.get("normalization", "LayerNorm")
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization is {normalization!r}; choose 'LayerNorm' or 'RMSNorm'")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        shape = (self.in_features,)
        if self.normalization == "LayerNorm":
            x = F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            x = F.rms_norm(x, shape, self.layer_norm_weight, self.eps)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes and the kind of norm."""
        return f"{super().extra_repr()}, {self.normalization}"


class GroupedLinear(_ShardedModule):
    """``num_gemms`` linears, each on its own rows of the input, gathered and reduced together.

    Args:
        num_gemms: number of (local) experts.
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether each has a bias.
        etp_group: the ranks to shard over.
        params_dtype: dtype of the parameters; torch's default if None.
        device: where they live; see :class:`Linear`.
        config: engine options.

    The weights are the parameters ``weight0`` to ``weight{num_gemms - 1}``, the biases ``bias0`` and so on.

    Raises:
        ValueError: as :class:`Linear` does, and if ``num_gemms`` is below 1.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        etp_group: dist.ProcessGroup,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        config: EtpConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.refuse({"num_gemms": num_gemms})
        self.num_gemms, self.use_bias = num_gemms, bias
        for index in range(num_gemms):
            self._add_linear(str(index), bias, params_dtype, device)
        shard_weights(self, self.weight_names({"num_gemms": num_gemms}), etp_group, config)

    @staticmethod
    def weight_names(arguments: Mapping[str, Any]) -> list[str]:
        """``weight0`` and so on, one for each expert."""
        return [f"weight{index}" for index in range(arguments["num_gemms"])]

    @staticmethod
    def refuse(arguments: Mapping[str, Any]) -> None:
        """Raise ValueError for a layer without experts."""
        if arguments["num_gemms"] < 1:
            raise ValueError(f"num_gemms is {arguments['num_gemms']}; a grouped linear needs at least one")

    def forward(self, x: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """``[sum(m_splits), in_features]`` to ``[sum(m_splits), out_features]``; ``m_splits[i]`` rows for expert i."""
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        return functional.grouped_linear(x, weights, biases, m_splits)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_gemms={self.num_gemms}, {super().extra_repr()}"


def shard_weights(
    module: nn.Module, weight_names: Sequence[str], group: dist.ProcessGroup, config: EtpConfig | None
) -> EtpRuntime:
    """Shard one module's weights in place, as one weight group with its own runtime. Collective over ``group``.

    All parameters first take the values of the group's first rank.

    Args:
        module: the layer, with full weights.
        weight_names: names of its parameters to shard.
        group: the shard group.
        config: engine options; the defaults if None.

    Returns:
        The runtime that drives the weights.

    Raises:
        ValueError: if this rank is not in ``group``, or a weight cannot be sharded.
    """
    own_rank(group, "etp_group")
    for name in weight_names:
        refuse_quantized(name, getattr(module, name))
    config = config or EtpConfig()
    first = dist.get_global_rank(group, 0)
    for param in module.parameters():
        dist.broadcast(param.detach(), src=first, group=group)
    shards = []
    for name in weight_names:
        shards.append(ETPShardedParam.from_full(getattr(module, name), group, config.pad_for_alignment))
        module._parameters[name] = shards[-1]
    WeightGroup(shards, group)
    runtime = EtpRuntime(config)
    runtime.adopt(module)
    for name, param in module.named_parameters():
        if not isinstance(param, ETPShardedParam):
            runtime.replicated.register(param, group, name)
    runtime.routes.agree_on_name(group, module)
    check_uses(module, runtime)
    return runtime


def check_uses(module: nn.Module, runtime: EtpRuntime) -> None:
    """Check from now on that ``module`` keeps its parameters, and that its optimizers can step shards."""
    members = Membership(module, runtime.replicated.groups.__contains__)
    runtime.keep(module.register_forward_pre_hook(members.check))
    OptimizerCheck(runtime, runtime.reductions)


def _wants_te(kwargs: dict[str, Any]) -> bool:
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    return te_available() and (device is None or device.type == "cuda")


def _build_te(cls: type[_ShardedModule], args: Sequence[Any], kwargs: dict[str, Any]) -> nn.Module:
    """TE's module of the same name, built with the arguments that both signatures share."""
    bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
    bound.pop("self")
    group, config = bound.pop("etp_group"), bound.pop("config", None)
    given = {name: value for name, value in bound.items() if value is not None}
    cls.refuse(given)
    module: nn.Module = getattr(te_pytorch(), cls.__name__)(**given)
    shard_weights(module, cls.weight_names(given), group, config)
    return module
