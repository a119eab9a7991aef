"""Each step looks for replicated parameters in all modules of the model, which takes the host up to a millisecond.

Megatron averages their gradients over the shard group at the end of a step. With this fix, it looks at a model's
modules once, and in later steps only at the parameters that are not sharded. Whether one of them is trained is still
asked in each step. A parameter that takes another one's place later is not seen; Megatron's gradient buffers and its
optimizer do not have it, either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_patches.checkpoint.model_state import is_sharded
from megatron_patches.registry import PatchRecord

_Named = tuple[str, torch.nn.Parameter]


def _replace(reduce: Callable[..., None]) -> Callable[..., None]:
    found: WeakKeyDictionary[torch.nn.Module, list[_Named]] = WeakKeyDictionary()

    def replicated(chunk: torch.nn.Module) -> Iterable[_Named]:
        if chunk not in found:
            found[chunk] = [each for each in chunk.named_parameters() if not is_sharded(each[1])]
        return found[chunk]

    @functools.wraps(reduce)
    def replacement(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        chunks = [SimpleNamespace(named_parameters=functools.partial(replicated, chunk)) for chunk in model]
        reduce(chunks, *args, **kwargs)

    return replacement


RECORD = PatchRecord(
    target="megatron.core.distributed.finalize_model_grads:_allreduce_replicated_grads_over_gtp_remat_group",
    replace=_replace,
    reason="it looks for the replicated parameters in all modules of the model in each step",
    sha256="07d9bfe476230404",
)
