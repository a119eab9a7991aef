"""Copies of a shard, which record which rank's rows they hold.

Shards of all ranks have the same name and shape, so a copy that does not record its shard could be saved by one rank
and loaded by all. Entries of a state dict, and copies of a shard, are therefore tensors of a class that keeps its
*cut* through copies, casts, moves, arithmetic and pickling. ``etp/shard_states.py`` compares it when they are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Self

import torch
import torch.nn.functional as F
from torch._guards import TracingContext

from etp.errors import EtpStateError
from etp.refusals import BY_ROW, INITIALISERS, chooses_rows, named_functions

type Cut = tuple[int, int, int]
"""The shard's index, the number of shards, and the rows of the weight."""

CUT = "etp_cut"
"""Attribute with the cut. A pickled copy is a plain tensor that has it, and loads without this package."""

COPIES = named_functions(
    "detach clone contiguous to type type_as float double half bfloat16 cpu cuda pin_memory", torch, torch.Tensor
)

AS_WEIGHT = frozenset({F.linear, F.embedding})
"""The functions that a layer calls with its weight."""

ASKED_BY_WRITERS = named_functions("untyped_storage storage", torch.Tensor)
"""Called on each tensor, to find shared memory, by safetensors and other libraries before they write a file."""


def refuse_writers(func: Any, cut: Cut | None) -> None:
    """Raise TypeError if ``cut`` is one of several shards: a file of it would not record which one it is.

    Args:
        func: one of ``ASKED_BY_WRITERS``.
        cut: which shard ``func`` was called on; None if it was not a shard.
    """
    # Dynamo calls these too, and writes nothing.
    if cut is not None and cut[1] > 1 and TracingContext.try_get() is None:
        raise TypeError(
            f"{func.__name__} of shard {cut[0]} of {cut[1]} of a weight of {cut[2]} rows: what asks for it "
            "(safetensors, save_pretrained, async_save) would write this rank's rows as the whole weight. On every "
            "rank call etp.full_state_dict(module), and on one save what it returns, as in "
            "save_pretrained(folder, state_dict=...). For torch.distributed.checkpoint, also async_save, pass it "
            "etp.ShardedCheckpoint(module, optimizer). torch.save keeps which shard it is, and param.local_shard() is "
            "a plain tensor of this rank's rows"
        )


class OneOfMany:
    """A tensor that differs between ranks under the same name; ``torch.distributed.checkpoint`` would keep only one.

    The checkpoint calls the two methods to plan what to write and read.
    """

    shape: torch.Size

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """Raise TypeError."""
        del value
        raise TypeError(self._told(fqn))

    def __create_chunk_list__(self) -> NoReturn:
        """Raise TypeError."""
        raise TypeError(self._told(f"a tensor of shape {tuple(self.shape)}"))

    def _told(self, what: str) -> str:
        return (
            f"{what} is this rank's shard, and torch.distributed.checkpoint would take the ranks' shards for copies "
            "and keep one: pass it etp.ShardedCheckpoint(module, optimizer) instead of their state dicts"
        )


class WithCut(OneOfMany, torch.Tensor):
    """A tensor that records which shard it holds, even when it is pickled."""

    etp_cut: Any
    """The :data:`Cut`; None if it holds no shard."""

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(torch.Tensor)
        if self.etp_cut is not None:
            setattr(plain, CUT, self.etp_cut)
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy, with the record; tensors that share memory get copies that share memory."""
        copied = copy.deepcopy(self._plain(), memo)
        return copied if self.etp_cut is None else ShardCopy.of(copied, self.etp_cut)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor with an attribute, which ``torch.load`` restores, even with ``weights_only``."""
        return self._plain().__reduce_ex__(protocol)


class ShardCopy(WithCut):
    """A shard or a copy of it, as in state dicts: usable like any tensor, except as a weight.

    Random values are refused, and so are rows chosen by number.
    """

    @classmethod
    def of(cls, tensor: torch.Tensor, cut: Cut) -> Self:
        """``tensor``, ``[shard rows, ...]``, as the shard ``cut``: the same memory and version counter."""
        with torch._C.DisableTorchFunctionSubclass():
            made = torch.Tensor._make_subclass(cls, tensor)
        made.etp_cut = cut
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Results of the shard's shape are still this rank's shard; results of other shapes are plain tensors."""
        if any(issubclass(kind, torch.nn.Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        copies = [operand for operand in (*args, *kwargs.values()) if isinstance(operand, cls)]
        if func in AS_WEIGHT and any(one.etp_cut[1] > 1 for one in copies):
            raise EtpStateError(
                f"{func.__name__} on a copy of shard {copies[0].etp_cut[0]} of {copies[0].etp_cut[1]}: a shard is not "
                "its weight. Pass the module's own parameter, which is gathered, or param.full_tensor()"
            )
        if func in INITIALISERS and copies and copies[0].etp_cut[1] > 1:
            raise TypeError(
                f"{func.__name__} on a copy of shard {copies[0].etp_cut[0]} of {copies[0].etp_cut[1]}: ranks with the "
                "same seed would draw the same rows. Initialise before etp.shard_module, pass the values to "
                "etp.load_full_state_dict, or fill param.local_shard()"
            )
        if func in BY_ROW:
            chosen_from = args[0] if args else kwargs["input"]
            # A copy may share the shard's memory, as ``param.detach()`` and entries of ``module.state_dict()`` do.
            cut = chosen_from.etp_cut if isinstance(chosen_from, cls) else None
            if cut is not None and cut[1] > 1 and chooses_rows(func, args, kwargs, chosen_from.dim()):
                raise TypeError(
                    f"{func.__name__} of rows of a copy of shard {cut[0]} of {cut[1]} of a weight of {cut[2]} rows: "
                    "they are numbered from 0 on every rank, so each would take other rows of the weight. "
                    "param.local_shard() is a plain tensor of this rank's rows, and param.full_tensor() has all rows"
                )
        if func in ASKED_BY_WRITERS:
            refuse_writers(func, copies[0].etp_cut)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        same = type(result) is torch.Tensor and result.shape == copies[0].shape and not result.requires_grad
        if not same or any(result is operand for operand in args) or len({one.etp_cut for one in copies}) > 1:
            return result
        return cls.of(result, copies[0].etp_cut)
