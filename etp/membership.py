"""Checks, at each forward pass of a sharded module, that it still consists of the parameters that were sharded.

A parameter that is added or replaced later is in no runtime: its gradient would not be combined over the ranks, whose
copies would silently drift apart. The check costs a few comparisons of addresses per submodule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etp.errors import EtpStateError
from etp.param import ETPShardedParam


class Membership:
    """The parameters and submodules of a sharded module, as they were when it was sharded.

    Args:
        root: the module.
        is_combined: whether the gradient of a parameter that is not a shard is combined over its group.
    """

    def __init__(self, root: nn.Module, is_combined: Callable[[nn.Parameter], bool]) -> None:
        self._is_combined = is_combined
        self._note(root)

    def _note(self, root: nn.Module) -> None:
        self._shards = [
            (owner, name, param)
            for owner in root.modules()
            for name, param in owner._parameters.items()
            if isinstance(param, ETPShardedParam)
        ]
        members = (members for module in root.modules() for members in (module._parameters, module._modules))
        # The objects themselves too: an address may be used again as soon as its object is gone.
        self._known = [(each, list(each.values()), [*map(id, each.values())]) for each in members]
        # Added while they were frozen; they may be trained later.
        self._frozen = [param for _, param in self._not_combined(root)]

    def check(self, root: nn.Module, args: Any) -> None:
        """Compare with what ``root`` consists of now; a forward pre-hook.

        Raises:
            EtpStateError: if a shard was replaced, a trained parameter was added, or ``root`` is inside of
                ``DistributedDataParallel``.
        """
        del args
        self._refuse_ddp()
        # A list: a generator would cost a Python call per item.
        changed = [True for now, _, then in self._known if [*map(id, now.values())] != then]
        if not changed and not any(param.requires_grad for param in self._frozen):
            return
        self._refuse_replaced(root)
        self._refuse_added(root)
        self._note(root)

    def _refuse_ddp(self) -> None:
        outer = DistributedDataParallel._get_active_ddp_module()
        if outer is None:
            return
        shard = next((param for param in outer._module_parameters if isinstance(param, ETPShardedParam)), None)
        if shard is not None:
            raise EtpStateError(
                f"DistributedDataParallel has broadcast one rank's shard of {shard.fqn} to the others and would not "
                "see its gradient; build the model again and leave DistributedDataParallel out: etp.shard_module "
                "combines all gradients over its group"
            )

    def _refuse_replaced(self, root: nn.Module) -> None:
        present = set(root.modules())
        for owner, name, param in self._shards:
            held = owner._parameters.get(name)
            if owner in present and not isinstance(held, ETPShardedParam):
                by = "nothing" if held is None else f"a {type(held).__name__} of shape {tuple(held.shape)}"
                raise EtpStateError(
                    f"{param.fqn}, a shard, has been replaced by {by} in its module, where it must stay. "
                    "Parametrizations, pruning, fully_shard and torch.func.functional_call do this; modules in "
                    "replicated_modules of etp.shard_module have no shards"
                )

    def _refuse_added(self, root: nn.Module) -> None:
        for name, param in self._not_combined(root):
            if param.requires_grad:
                raise EtpStateError(
                    f"{name} was added after etp.shard_module, so its gradient would not be combined over the ranks; "
                    "call etp.shard_module again, with the same values on all ranks, and then build the optimizer"
                )

    def _not_combined(self, root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in root.named_parameters():
            if not isinstance(param, ETPShardedParam) and not self._is_combined(param):
                yield name, param
