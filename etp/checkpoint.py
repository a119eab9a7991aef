"""Sharded checkpoints through ``torch.distributed.checkpoint``, for plain PyTorch training.

Each rank writes the logical rows of its shards, as parts of whole tensors. So a checkpoint has the names, shapes and
values that the unsharded model and optimizer would have, whatever the number of shards. Any number of ranks can load
it, and so can the unsharded model. Nothing is gathered.

PyTorch's interface for this is its ``_Checkpointable`` protocol, which DTensor implements as well. DTensor itself
cannot describe shards with padding.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from etp.collectives.works import gather_objects
from etp.digest import PartIndex, differing_copies
from etp.errors import EtpStateError, PeerMismatchError
from etp.layout import ShardLayout
from etp.optimizers import CUTS
from etp.param import ETPShardedParam
from etp.shard_copy import ShardCopy
from etp.shard_grad import plain
from etp.shard_states import refuse_hidden_shards
from etp.wrap import runtimes_of

# Options of PyTorch's optimizers that determine which state they have.
_ADD_STATE = ("amsgrad", "centered", "momentum")


class CheckpointShard(torch.Tensor):
    """A tensor of a weight's logical shape, of which only this rank's rows exist; for checkpoints, not for arithmetic.

    Args:
        local: the shard, of ``layout.shard_shape``, which is saved from and loaded into, except for its padding.
        layout: how the whole is cut.
        rank: which shard it is.
    """

    refusal: str = ""
    """Why it must not be saved; empty if it may be. It can be loaded into in any case."""
    _rows: torch.Tensor
    _offset: int

    def __new__(cls, local: torch.Tensor, layout: ShardLayout, rank: int) -> Self:
        """See the class."""
        whole = torch.Tensor._make_wrapper_subclass(cls, layout.shape, dtype=local.dtype, device=local.device)
        whole._offset = layout.logical_range(rank)[0]
        whole._rows = local[: layout.logical_rows(rank)]
        return whole

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """What this rank writes: its rows, or nothing if it holds only padding.

        Raises:
            PeerMismatchError: if ranks hold different values that would be written as one.
        """
        del value
        if self.refusal:
            raise PeerMismatchError(self.refusal)
        properties = TensorProperties.create_from_tensor(self._rows)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where this rank's rows lie in the whole."""
        if not self._rows.shape[0]:
            return []
        offsets = torch.Size((self._offset, *(0 for _ in self._rows.shape[1:])))
        return [ChunkStorageMetadata(offsets=offsets, sizes=self._rows.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """This rank's rows."""
        del index
        return self._rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Self:  # type: ignore[override]
        """Refuse arithmetic. ``async_save`` creates an empty tensor, and fills it with copies of the attributes."""
        if func is torch.ops.aten.new_empty.default:
            own, size = args[0], args[1]
            device = (kwargs or {}).get("device", own.device)
            return torch.Tensor._make_wrapper_subclass(cls, size, dtype=own.dtype, device=device)
        # Not a TypeError: Tensor's operators would replace its message.
        raise EtpStateError(
            f"{func} on a shard in a checkpoint's state, which is only for torch.distributed.checkpoint; for whole "
            "weights use etp.full_state_dict"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Rows, whole shape, dtype and device."""
        stop = self._offset + self._rows.shape[0]
        return f"CheckpointShard(rows {self._offset}:{stop} of {tuple(self.shape)}, {self.dtype}, {self.device})"


class ShardedCheckpoint:
    """A sharded module and its optimizer, as ``torch.distributed.checkpoint`` saves and loads them.

    ::

        state = {"app": etp.ShardedCheckpoint(model, optimizer)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)

    Both are collective over all ranks that train, and so is ``async_save``. The entries are those of the unsharded
    model: ``app.model.<name>``, and ``app.optimizer.state.<name>.<key>`` and ``app.optimizer.param_groups`` as
    ``get_state_dict`` of ``torch.distributed.checkpoint.state_dict`` names them.

    Args:
        module: a sharded module.
        optimizer: an optimizer of its parameters whose state is element-wise, as Adam's is; None leaves it out.
        process_group: the ranks that save or load together, as given to ``torch.distributed.checkpoint``; all if None.

    Raises:
        ValueError: if the optimizer has a parameter that is not the module's, or is LBFGS.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._process_group = process_group
        self._optimizer = optimizer
        self._made: dict[torch.Tensor, dict[str, Any]] = {}
        self._held: list[list[str]] = []
        self._names: dict[torch.Tensor, str] = {param: name for name, param in module.named_parameters()}
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "the state of LBFGS is of all parameters together, and each rank's of its own shards; save "
                "optimizer.state_dict() on every rank, each to a file of its own"
            )
        for group in [] if optimizer is None else optimizer.param_groups:
            for param in group["params"]:
                if param not in self._names:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(param.shape)} that is not the module's: build "
                        "it after etp.shard_module, of the module's parameters"
                    )

    def state_dict(self) -> dict[str, Any]:
        """The state to save or to load into: tensors that share memory with module and optimizer. Collective.

        Saving it is refused if ranks hold parameters of equal names with different values.

        Raises:
            ValueError: naming state of the optimizer that is not element-wise, or a shard that is hidden by a hook, or
                if ranks have different numbers of parameter groups.
        """
        state = self._module.state_dict(keep_vars=True)
        refuse_hidden_shards(self._module, state)
        refusal = self._refusal()
        found: dict[str, Any] = {"model": {name: _entry(value, refusal) for name, value in state.items()}}
        if self._optimizer is not None:
            groups = self._param_groups(self._optimizer)
            self._held = [group["params"] for group in groups]
            self._made = _missing_state(self._optimizer)
            found["optimizer"] = {
                "state": {
                    self._names[param]: {key: self._of_state(param, key, value) for key, value in values.items()}
                    for param, values in {**self._optimizer.state, **self._made}.items()
                },
                "param_groups": groups,
            }
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Apply what was loaded, except for tensors, which were loaded in place.

        Raises:
            ValueError: if the optimizer's groups hold other parameters than those of the checkpoint, or other state.
                PyTorch has loaded tensors by then, so load again once this is fixed.
        """
        model = self._module.state_dict(keep_vars=True)
        for name, value in state["model"].items():
            if not isinstance(model[name], ETPShardedParam):
                model[name] = value
        self._module.load_state_dict({name: _local(value) for name, value in model.items()})
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer, state["optimizer"])
        for runtime in runtimes_of(self._module):
            runtime.mark_weights_changed()

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        # Without their order: other ranks may have held the same names when it was saved.
        own = [sorted(names) for names in self._held]
        saved = [sorted(group["params"]) for group in state["param_groups"]]
        if own != saved:
            different = next((pair for pair in zip(own, saved, strict=False) if pair[0] != pair[1]), (own, saved))
            raise ValueError(
                f"the optimizer's groups hold {different[0]}, and the checkpoint's {different[1]}: build the optimizer "
                "with the groups that it was saved with"
            )
        for group, values in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for option in _ADD_STATE:
                if bool(group.get(option)) != bool(values.get(option)):
                    raise ValueError(
                        f"the optimizer has {option}={group.get(option)} for {values['params']}, and the checkpoint "
                        f"{option}={values.get(option)}, which needs other state: build the optimizer with the "
                        "options that it was saved with"
                    )
        for group, values in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        optimizer.state.update(self._made)
        self._made = {}
        for param, values in list(optimizer.state.items()):
            for key, value in state["state"][self._names[param]].items():
                if not isinstance(value, CheckpointShard):
                    values[key] = value
            # State that the optimizer creates at its first step is right for all kinds. Adagrad creates it when built.
            if values.get("step") == 0 and not isinstance(optimizer, torch.optim.Adagrad):
                del optimizer.state[param]

    def _refusal(self) -> str:
        """Why the module cannot be saved; empty if it can. Collective."""
        held: dict[tuple[str, PartIndex], torch.Tensor] = {}
        for name, param in self._module.named_parameters():
            if isinstance(param, ETPShardedParam):
                rows = param.layout.logical_rows(param.group_rank)
                held[name, (param.group_rank, param.layout.num_shards)] = param.local_shard()[:rows]
            elif not hasattr(param, "__create_write_items__"):
                # Others, such as a DTensor, describe which part they are.
                held[name, (0, 1)] = param
        different = differing_copies(held, self._process_group)
        if not different:
            return ""
        return (
            f"{different}, and a checkpoint keeps one entry of each name, so the other's would be lost. Where ranks "
            "have experts of their own, give these names of their own, or save state_dict() on every rank, each to a "
            "file of its own. Of replicas that may differ, save one: pass its ranks as process_group to "
            "etp.ShardedCheckpoint and to torch.distributed.checkpoint.save"
        )

    def _param_groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The groups with names of parameters: all ranks', as a checkpoint keeps one rank's groups. Collective."""
        # A checkpoint is of whole weights.
        options = [{key: value for key, value in group.items() if key != CUTS} for group in optimizer.param_groups]
        names = [[self._names[param] for param in group["params"]] for group in optimizer.param_groups]
        everyone = _different(names, self._process_group)
        counts = [len(one) for one in everyone]
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks' optimizers have {counts} parameter groups, and a checkpoint keeps the groups of one: "
                "build the optimizer with equally many groups on all ranks; they may be empty"
            )
        merged = [list(dict.fromkeys(chain.from_iterable(ranks))) for ranks in zip(*everyone, strict=True)]
        return [{**group, "params": held} for group, held in zip(options, merged, strict=True)]

    def _of_state(self, param: torch.Tensor, key: str, value: Any) -> Any:
        if not isinstance(param, ETPShardedParam) or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if tuple(value.shape) != param.layout.shard_shape:
            raise ValueError(
                f"{param.fqn}: the optimizer's {key} has shape {tuple(value.shape)} and the shard "
                f"{param.layout.shard_shape}. What is not element-wise has no place in the whole tensor; save "
                "optimizer.state_dict() on every rank, each to a file of its own"
            )
        return CheckpointShard(plain(value), param.layout, param.group_rank)


def _different(names: list[list[str]], group: dist.ProcessGroup | None) -> list[list[list[str]]]:
    """What the ranks pass, by rank, or just ``names`` if all pass the same. Collective."""
    label = "comparison of the optimizers' groups"
    digests = gather_objects(hashlib.sha256(repr(names).encode()).hexdigest(), group, label)
    return gather_objects(names, group, label) if len(set(digests)) > 1 else [names]


def _entry(value: Any, refusal: str) -> Any:
    if isinstance(value, ETPShardedParam):
        shard = CheckpointShard(value.local_shard(), value.layout, value.group_rank)
        shard.refusal = refusal
        return shard
    return value.detach() if isinstance(value, torch.Tensor) else value


def _local(value: Any) -> Any:
    return ShardCopy.of(value.local_shard(), value.cut) if isinstance(value, ETPShardedParam) else value


def _missing_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """State to load a checkpoint into, for the parameters for which an optimizer has none yet.

    It comes from a step on zeros that is not counted and runs no hooks, which is as close to no step as possible.
    """
    # On a copy, because schedulers count the optimizer's own steps.
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(vars(optimizer))
    step = type(optimizer).step
    # Without PyTorch's wrapper, which calls hooks: the optimizer's, and those for all optimizers in this process.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    made: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not param.requires_grad or optimizer.state.get(param):
                continue
            zeros = torch.zeros_like(plain(param))
            zeros.grad = torch.zeros_like(zeros)
            copied.param_groups, copied.state = [{**group, "params": [zeros]}], defaultdict(dict)
            step(copied)
            values = dict(copied.state[zeros])
            if values:
                made[param] = values
            if isinstance(values.get("step"), torch.Tensor):
                values["step"].zero_()
            elif "step" in values:
                values["step"] = 0
    return made
