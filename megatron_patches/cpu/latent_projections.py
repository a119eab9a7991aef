"""The projections around latent experts on a CPU, for which Megatron has only Transformer Engine's layer.

With ``--moe-latent-size``, an expert layer narrows its input before the routed experts and widens their output
afterwards. Both projections are whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import PatchRecord


class DuplicatedLinear(torch.nn.Linear):
    """A linear layer that is whole on every rank, as Megatron's ``TELinear`` with ``parallel_mode="duplicated"``.

    Args:
        input_size: columns of the weight.
        output_size: rows of the weight.
        config: Megatron's configuration.
        init_method: draws the weight in fp32, on every rank from the same state of the CPU's generator.
        bias: whether there is a bias; it starts as zeros.
        settings: arguments for other modes, and for Transformer Engine.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        **settings: object,  # noqa: ARG002 - of TELinear
    ) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = input_size, output_size
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        )
        if config.perform_initialization:
            drawn = torch.empty(output_size, input_size)
            init_method(drawn)
            with torch.no_grad():
                self.weight.copy_(drawn)
        for parameter in self.parameters():
            # Where a rank sees a part of the sequence, Megatron sums gradients over the tensor-parallel ranks.
            vars(parameter).update(allreduce=True, sequence_parallel=config.sequence_parallel)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # noqa: A002
        """From [..., input_size] to [..., output_size]; the second result is the bias that is left to the caller."""
        return super().forward(input), None

    def backward_dw(self) -> None:
        """Nothing to do: backward has computed the weight's gradient."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Entries of a checkpoint, equal on all ranks."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return entries


def _replace(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.transformer.moe import moe_layer

        original(self, *args, **kwargs)
        if self.config.moe_latent_size and not moe_layer.HAVE_TE:
            # What the constructor of an expert layer, which calls this one first, reads next; nothing else does.
            moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear

    return replacement


RECORD = PatchRecord(
    target="megatron.core.transformer.moe.moe_layer:BaseMoELayer.__init__",
    replace=_replace,
    reason="expert layers refuse latent experts without Transformer Engine, though the projections are plain layers",
    sha256="4c513c52e7ddceec",
)
