"""Gradients of experts' biases are added up twice with sequence parallelism, in Megatron's own layers.

Experts with biases are whole on each rank (``--expert-tensor-parallel-size 1``). The reduction over their data-parallel
ranks thus covers the tokens of all tensor-parallel ranks. The bias of a second linear layer is nevertheless marked as
one whose gradient is to be added up over these ranks afterwards. That doubles it, adds those of different experts with
expert parallelism, and those of different ranks' parts with the distributed optimizer. With this fix, it is not marked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self.parameters():
            if getattr(parameter, "sequence_parallel", False):
                parameter.sequence_parallel = False

    return replacement


RECORD = PatchRecord(
    target="megatron.core.transformer.moe.experts:SequentialMLP.__init__",
    replace=_replace,
    reason="gradients of biases of experts are added up twice with sequence parallelism",
    sha256="05796b2a71cd20b7",
)
