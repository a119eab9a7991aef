"""Refuses steps of optimizers that would silently fail to train a sharded module, or corrupt it.

[Note: state of another rank] The state of an optimizer has the same names and shapes on all ranks. So each parameter
group gets an entry that says which shards its parameters are. ``optimizer.state_dict()`` has it, and after
``load_state_dict`` the group has that of the state.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from etp.errors import EtpStateError
from etp.optimizer_steps import before_optimizer_steps
from etp.param import ETPShardedParam
from etp.reductions import Reductions

# Attribute of a parameter that has been cut: a weak reference to its shard.
_SHARD = "_etp_shard"

CUTS = "etp_cuts"
"""Entry of a parameter group; see [Note: state of another rank]."""

_WHOLE_MATRICES = (
    "treats each weight as a whole matrix, and would take every shard for one, so that the result depends on the "
    "number of ranks; use etp.Muon, or an element-wise optimizer such as AdamW or SGD, or keep these weights whole by "
    "replicated_modules of etp.shard_module"
)

_OF_WHOLE_MATRICES = (
    *("Adafactor", "Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "Dion", "Shampoo", "DistributedShampoo", "SOAP"),
    *("LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "GaLoreAdamW"),
)

# By name, because importing ZeroRedundancyOptimizer is slow and warns, and others come from other packages.
_REFUSED = {
    **dict.fromkeys(_OF_WHOLE_MATRICES, _WHOLE_MATRICES),
    "LBFGS": "computes dot products over all parameters, each rank over its own shards, so the ranks would take "
    "different steps; use an element-wise optimizer such as AdamW or SGD",
    "ZeroRedundancyOptimizer": "takes the ranks' shards for copies and would overwrite them with one rank's; leave it "
    "out: a shard's optimizer state is sharded already",
}


def remember_shard(param: torch.nn.Parameter, shard: ETPShardedParam) -> None:
    """Record on a full weight that ``shard`` has taken its place."""
    setattr(param, _SHARD, weakref.ref(shard))


def shard_in_place_of(param: torch.Tensor) -> ETPShardedParam | None:
    """The shard that has taken a full weight's place, while it exists."""
    reference: weakref.ref[ETPShardedParam] | None = getattr(param, _SHARD, None)
    return None if reference is None else reference()


class OptimizerCheck:
    """Checks every ``torch.optim`` optimizer before its next step, and its state again after each load.

    For as long as ``owner`` lives.

    Args:
        owner: the runtime of some shards.
        reductions: its reductions, which must be complete for the shards that an optimizer steps.
    """

    def __init__(self, owner: Any, reductions: Reductions) -> None:
        # Weak: reductions refer to their runtime, which would then live forever.
        self._reductions = weakref.ref(reductions)
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        """The entries of each optimizer's groups when they were checked."""
        before_optimizer_steps(owner, self._before_step)

    def _before_step(self, owner: Any, optimizer: torch.optim.Optimizer) -> None:
        del owner
        reductions = self._reductions()
        if reductions is not None and not reductions.idle:
            _require_complete(optimizer, reductions)
        checked = self._checked.get(optimizer)
        if checked is None:
            check_optimizer(optimizer)
        entries = [group.get(CUTS) for group in optimizer.param_groups]
        # By identity, because a load copies them.
        if checked is None or len(checked) != len(entries) or any(map(operator.is_not, checked, entries)):
            for group in optimizer.param_groups:
                _check_state(optimizer, group)
            self._checked[optimizer] = [group.get(CUTS) for group in optimizer.param_groups]


def _require_complete(optimizer: torch.optim.Optimizer, reductions: Reductions) -> None:
    """Raise EtpStateError if a gradient would be stepped of which these reductions have yet to add a part."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if not isinstance(param, ETPShardedParam) or param.grad is None or not param.has_driver:
            continue
        if param.driver.reductions is reductions:
            reductions.require_complete(param.weight_group)


def _check_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Record which shards the parameters of ``group`` are, if its state is not recorded as that of others.

    Raises:
        EtpStateError: if it is.
    """
    shards = [p for p in group["params"] if isinstance(p, ETPShardedParam) and p.layout.num_shards > 1]
    own = [list(cut) for cut in dict.fromkeys((p.group_rank, p.layout.num_shards) for p in shards if p.knows_copies)]
    said = group.get(CUTS, own)
    if said != own:
        raise EtpStateError(
            f"the state of {type(optimizer).__name__} that was loaded is of {_named(said)}, and this rank has "
            f"{_named(own)} of these weights: save optimizer.state_dict() on every rank, each to a file of its own, or "
            "use etp.ShardedCheckpoint, which any number of shards can load"
        )
    if own:
        group.setdefault(CUTS, own)


def _named(cuts: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"shard {rank} of {count}" for rank, count in cuts) or "no shards"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of full weights that have been sharded since, and optimizers that cannot step shards.

    Raises:
        EtpStateError: if a parameter is a full weight whose module has a shard of it now.
        TypeError: if it has shards and combines, or exchanges, whole parameters, unless its attribute
            ``steps_whole_matrices`` says that it supports shards, as that of :class:`etp.Muon` does.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        shard = shard_in_place_of(param)
        if shard is not None:
            raise EtpStateError(
                f"{type(optimizer).__name__} has the full weight of {shard.fqn}, which the module no longer uses, and "
                "would not train it: build the optimizer after etp.shard_module"
            )
    if getattr(optimizer, "steps_whole_matrices", False):
        return
    reason = next((_REFUSED[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _REFUSED), None)
    shard = next((p for p in params if isinstance(p, ETPShardedParam) and p.layout.num_shards > 1), None)
    if reason is not None and shard is not None:
        raise TypeError(f"{type(optimizer).__name__} has {shard!r}: it {reason}")
