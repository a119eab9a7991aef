"""The PyTorch functions that accept a shard, and tensors computed from it; all others are refused.

Results of the others would look plausible and be wrong: a shard can have the shape of its weight, as on rank 0 where
padding leaves all rows to it, but its singular values, mean or first rows are not those of the weight. The functions
listed here treat each element alone, describe the tensor, or are needed to train, clip and save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from etp.refusals import INITIALISERS, named_functions

_OWNERS = (torch, torch.Tensor, F, torch.special)

# Other names of element-wise functions, and element-wise ones that PyTorch does not mark as such.
_MORE_ELEMENT_WISE = (
    "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide fix floor_divide greater greater_equal less "
    "less_equal multiply negative not_equal subtract isclose isreal copy fill zero masked_fill where log_sigmoid "
    "logsigmoid leaky_relu softsign tanhshrink"
)

# Operators, as Tensor names them.
_OPERATORS = (
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __div__ __rdiv__ __idiv__ "
    "__truediv__ __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ "
    "__rpow__ __ipow__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ "
    "__rxor__ __ixor__ __lshift__ __rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__"
)

# Sums have the right gradient as part of a loss; the rest are decisions about this rank's elements.
_REDUCTIONS = "sum nansum sum_to_size count_nonzero any all equal allclose"

_COPIES = (
    "detach detach_ clone contiguous to type type_as float double half bfloat16 cfloat cdouble chalf int long short "
    "bool byte char cpu cuda xpu pin_memory conj resolve_conj resolve_neg real"
)

# Views with the elements in the same order; and narrow, for code that knows how the weight is cut.
_VIEWS = "view view_as reshape reshape_as flatten ravel expand expand_as repeat narrow squeeze"

_LIKE = (
    "zeros_like ones_like empty_like full_like new new_zeros new_ones new_empty new_full new_tensor new_empty_strided"
)

_ABOUT_IT = (
    "size dim ndimension stride storage_offset storage untyped_storage _typed_storage storage_type data_ptr dim_order "
    "element_size get_device has_names is_complex is_conj is_contiguous is_distributed is_floating_point "
    "is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed is_coalesced qscheme _is_view "
    "result_type can_cast share_memory_ record_stream requires_grad_ retain_grad backward register_hook "
    "register_post_accumulate_grad_hook __len__ __format__ __repr__ __hash__ _backward_hooks module_load "
    "_has_compatible_shallow_copy_type _clear_non_serializable_cached_data __setstate__ __dir__"
)

_TRAINING = (
    "_amp_foreach_non_finite_check_and_unscale_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ "
    "promote_types _assert_async"
)

# Reductions over all elements of each tensor.
_NOT_FOR_EACH_ELEMENT = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})


def _element_wise() -> Iterator[Callable[..., Any]]:
    """Functions that PyTorch tags as pointwise, and those of ``_MORE_ELEMENT_WISE``, each with its in-place form."""
    named = frozenset(_MORE_ELEMENT_WISE.split())
    for owner in _OWNERS:
        for name in dir(owner):
            base = name.removesuffix("_")
            if base.startswith("_") or base in {"max", "min", "rrelu"}:  # also reductions, or draws
                continue
            if base in named or _is_tagged(base) or (owner is torch.special and _is_tagged(f"special_{base}")):
                yield getattr(owner, name)


def _is_tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _properties() -> Iterator[Callable[..., Any]]:
    """The functions that read, assign and delete a tensor's properties, except transposes."""
    for name in dir(torch.Tensor):
        of_tensor = getattr(torch.Tensor, name)
        if name not in {"T", "mT", "H", "mH"} and hasattr(of_tensor, "__get__") and not callable(of_tensor):
            for access in ("__get__", "__set__", "__delete__"):
                if hasattr(of_tensor, access):
                    yield getattr(of_tensor, access)


def _computes() -> Iterator[Callable[..., Any]]:
    yield from _element_wise()
    yield from named_functions(f"{_OPERATORS} {_REDUCTIONS} {_COPIES} {_VIEWS}", torch, torch.Tensor)
    for name in dir(torch):
        if name.startswith("_foreach_") and name.removesuffix("_") not in _NOT_FOR_EACH_ELEMENT:
            yield getattr(torch, name)


def _allowed() -> Iterator[Callable[..., Any]]:
    yield from COMPUTES
    yield from _properties()
    yield from named_functions(f"{_LIKE} {_ABOUT_IT} {_TRAINING}", torch, torch.Tensor)
    yield from named_functions("constant_ zeros_ ones_", nn.init)
    yield from (torch.autograd.backward, torch.autograd.grad)


COMPUTES: frozenset[Callable[..., Any]] = frozenset(_computes()) - INITIALISERS
"""The allowed functions whose results have a gradient."""

ALLOWED: frozenset[Callable[..., Any]] = frozenset(_allowed()) - INITIALISERS


def is_refused(func: Callable[..., Any]) -> bool:
    """Whether a function is not allowed. Functional collectives, with which code assembles shards, are allowed.

    A function that was patched since, as Megatron does on a CPU, counts as the one that it wraps (``functools.wraps``).
    """
    known = func in ALLOWED or getattr(func, "__wrapped__", func) in ALLOWED
    return not known and "c10d_functional" not in (getattr(func, "__module__", None) or "")


def changes_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function that computes changes its first argument, by its name."""
    name: str = func.__name__
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
