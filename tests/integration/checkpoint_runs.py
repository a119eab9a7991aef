"""Trainings that save or load a checkpoint, and what their models and optimizers hold at that moment.

Each rank reports its parts with their ranks (:class:`Part`), and :mod:`tests.integration.whole_state` puts them
together by the names of the layers. Nothing of ``megatron_patches.checkpoint`` is used.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megatron_patches
from tests.integration.megatron_run import train
from tests.integration.whole_state import STATES, Part, Whole, assemble
from tests.support.full_disk import files_of

MOST_OF_A_FULL_DISK = 20_000
"""Bytes of the largest file: more than the index has, and less than a rank's part."""


@dataclass
class Run:
    """What the last rank knows of a training.

    Attributes:
        losses: of each step.
        packed: :attr:`state` as a file; Megatron changes how tensors are pickled, so that only it could read them.
        padding_is_zero: whether every padding row of every part of the state was zero, on all ranks.
    """

    losses: list[float]
    packed: bytes
    padding_is_zero: bool

    @functools.cached_property
    def state(self) -> Whole:
        """Weights and optimizer state when the checkpoint had been written, or had just been read."""
        return dict(unpack(self.packed))


def pack(tensors: dict[Any, torch.Tensor]) -> bytes:
    """``tensors`` as the bytes of a file."""
    file = io.BytesIO()
    torch.save({key: tensor.cpu() for key, tensor in tensors.items()}, file)
    return file.getvalue()


def unpack(packed: bytes) -> dict[Any, torch.Tensor]:
    """Undo :func:`pack`."""
    return dict(torch.load(io.BytesIO(packed), weights_only=True))


def run(rank: int, world_size: int, arguments: tuple[str, ...]) -> Run | None:
    """Train with the flags ``arguments``; the last rank answers, the others say None."""
    megatron_patches.apply()
    taken: list[list[Part]] = []
    with _snapshots(taken):
        seen = train(rank, world_size, arguments)
    if rank != world_size - 1:
        return None
    state, padding_is_zero = assemble(taken[0]) if taken else ({}, True)
    return Run(seen.losses, pack(state), padding_is_zero)


def run_refused(rank: int, world_size: int, arguments: tuple[str, ...]) -> tuple[str, bool]:
    """Train with flags that load a bad checkpoint.

    Returns:
        The error's text, and whether all weights were still those before the load.
    """
    from megatron.training import training

    megatron_patches.apply()
    load = training.load_checkpoint
    seen: list[tuple[str, bool]] = []

    def watching_load(model: Any, *args: Any, **kwargs: Any) -> Any:
        before = [parameter.detach().clone() for chunk in model for parameter in chunk.parameters()]
        try:
            return load(model, *args, **kwargs)
        except Exception as error:
            after = [parameter for chunk in model for parameter in chunk.parameters()]
            seen.append((str(error), all(map(torch.equal, before, after))))
            raise

    training.load_checkpoint = watching_load
    try:
        with contextlib.suppress(Exception):
            train(rank, world_size, arguments)
    finally:
        training.load_checkpoint = load
    return seen[0]


def run_on_a_full_disk(
    rank: int, world_size: int, arguments: tuple[str, ...], full: int, what: str
) -> tuple[list[float], str]:
    """Train with flags that save often; the disk of one rank becomes full behind the first save.

    Args:
        rank: this rank.
        world_size: ranks.
        arguments: the flags.
        full: that rank.
        what: finds no room: "its part", "the index", or a file's name.

    Returns:
        the losses until then, and the error's class and text.
    """
    from megatron.training import training

    megatron_patches.apply()
    save, step = training.save_checkpoint, training.train_step
    saved: list[int] = []
    writer: Any = FileSystemWriter
    finish, plain_open = writer.finish, open
    losses: list[float] = []

    def is_full(of: str) -> bool:
        return rank == full and len(saved) > 1 and of == what

    def limited_save(iteration: int, *args: Any, **kwargs: Any) -> Any:
        saved.append(iteration)
        with files_of(MOST_OF_A_FULL_DISK) if is_full("its part") else contextlib.nullcontext():
            return save(iteration, *args, **kwargs)

    def limited_finish(*args: Any) -> None:
        with files_of(100) if is_full("the index") else contextlib.nullcontext():
            finish(*args)

    def limited_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # Megatron writes these two by their names, our patch beside them.
        name = Path(str(file)).name.removesuffix(".new")
        return plain_open("/dev/full" if mode == "w" and is_full(name) else file, mode, *args, **kwargs)

    def recording_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        losses.extend(float(loss) for loss in result[0].values())
        return result

    training.save_checkpoint, training.train_step = limited_save, recording_step
    writer.finish, builtins.open, io.open = limited_finish, limited_open, limited_open
    try:
        train(rank, world_size, arguments)
    except BaseException as error:  # noqa: BLE001 - of whatever class it is
        return losses, f"{type(error).__name__}: {error}"
    finally:
        training.save_checkpoint, training.train_step = save, step
        writer.finish, builtins.open, io.open = finish, plain_open, plain_open
    return losses, ""


def finalize_on_a_full_disk(rank: int, world_size: int, folder: str) -> list[str]:
    """What each rank is told of two asynchronous saves, and the newest checkpoint after each.

    Rank 0 finds no room for the number of the first one.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.msc_utils import maybe_msc

    from megatron_patches.checkpoint.written import wrap_schedule_async_save

    del world_size
    megatron_patches.apply()
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    errors = []

    def note(text: str) -> None:
        with maybe_msc.open(str(tracker), "w") as file:
            file.write(text)

    def schedule(request: Any) -> None:
        for function in request.finalize_fns:
            function()

    # A training has communicated by then. NCCL's first call writes files in /dev/shm, which the limit would stop.
    dist.barrier()
    for text, most_bytes in (("100", 2), ("12", 100)):
        request = AsyncRequest(None, (), [functools.partial(note, text)] if rank == 0 else [])
        try:
            with files_of(most_bytes) if rank == 0 else contextlib.nullcontext():
                wrap_schedule_async_save(schedule)(request)
            errors.append("")
        except Exception as error:  # noqa: BLE001 - of whatever class it is
            errors.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        errors.append(tracker.read_text())
        dist.barrier()
    return errors


def stored(rank: int, world_size: int, directory: str) -> bytes:
    """Every tensor of the checkpoint in ``directory``, whole, packed."""
    del rank, world_size
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory))
    return pack(found)


@contextlib.contextmanager
def _snapshots(taken: list[list[Part]]) -> Iterator[None]:
    """Record all ranks' parts after the first save, or after a load that found a checkpoint."""
    from megatron.training import training

    save, load = training.save_checkpoint, training.load_checkpoint

    def recording_save(iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if taken:  # Megatron saves once more at the end
            return
        save(iteration, model, optimizer, *args, **kwargs)
        taken.append(_all_parts(model, optimizer))

    def recording_load(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(model, optimizer, *args, **kwargs)
        if result[0]:
            taken.append(_all_parts(model, optimizer))
        return result

    training.save_checkpoint, training.load_checkpoint = recording_save, recording_load
    try:
        yield
    finally:
        training.save_checkpoint, training.load_checkpoint = save, load


def _all_parts(model: list[Any], optimizer: Any) -> list[Part]:
    ours = list(_parts(model, optimizer))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, ours)
    return list(itertools.chain.from_iterable(everybody))


def _parts(model: list[Any], optimizer: Any) -> Iterator[Part]:
    states = {id(parameter): found for parameter, found in _optimizer_parts(optimizer)}
    for chunk in model:
        names = _global_names(chunk)
        for local_name, parameter in chunk.named_parameters():
            sharded = hasattr(parameter, "gtp_remat_size")
            common = (
                names[local_name],
                _tp_rank(local_name),
                dist.get_rank(parameter.group) if sharded else 0,
                tuple(parameter.shape),
                parameter.layout.rows if sharded else parameter.shape[0],
            )
            weight = ("weight", 0, parameter.data.reshape(-1))
            for kind, start, elements in (weight, *states.get(id(parameter), ())):
                yield Part(kind, *common, start, elements.detach().cpu().clone())


def _optimizer_parts(optimizer: Any) -> Iterator[tuple[Any, list[tuple[str, int, torch.Tensor]]]]:
    """Per parameter: (kind, first element of the shard, elements) of its states on this rank."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        if hasattr(one, "gbuf_ranges"):  # the distributed optimizer: a rank has a range of each shard
            buckets = itertools.chain.from_iterable(itertools.chain.from_iterable(r.values()) for r in one.gbuf_ranges)
            for parameter, where in itertools.chain.from_iterable(b["param_map"].items() for b in buckets):
                group, order = one.model_param_group_index_map[parameter]
                master = inner.param_groups[group]["params"][order]
                yield parameter, list(_states(inner, master, where["param"].start))
            continue
        models = itertools.chain.from_iterable(getattr(one, "float16_groups", []))
        copies = itertools.chain.from_iterable(getattr(one, "fp32_from_float16_groups", []))
        model_of = {id(copy): parameter for copy, parameter in zip(copies, models, strict=True)}
        for master in itertools.chain.from_iterable(group["params"] for group in inner.param_groups):
            yield model_of.get(id(master), master), list(_states(inner, master, 0))


def _states(optimizer: Any, master: torch.Tensor, start: int) -> Iterator[tuple[str, int, torch.Tensor]]:
    yield "master", start, master.data.reshape(-1)
    for kind in STATES:
        if kind in optimizer.state[master]:
            yield kind, start, optimizer.state[master][kind].reshape(-1)


def _global_names(chunk: Any) -> dict[str, str]:
    """Names with the layer's and the expert's number in the whole model, by the names in this chunk."""
    from megatron.core import parallel_state

    numbers = {
        name: module.layer_number - 1 for name, module in chunk.named_modules() if re.search(r"layers\.\d+$", name)
    }
    names = [name for name, _ in chunk.named_parameters()]
    tied = any(getattr(module, "share_embeddings_and_output_weights", False) for module in chunk.modules())
    experts = {int(found[1]) for name in names if (found := re.search(r"local_experts\.(\d+)", name))}
    first_expert = parallel_state.get_expert_model_parallel_rank() * len(experts)

    def expert(found: re.Match[str]) -> str:
        return f"experts.{first_expert + int(found[1])}"

    renamed = {}
    for name in names:
        layer = next((prefix for prefix in numbers if name.startswith(f"{prefix}.")), None)
        new = name
        if layer is not None:
            new = re.sub(r"\d+$", str(numbers[layer]), layer) + name[len(layer) :]
        new = re.sub(r"local_experts\.(\d+)", expert, new.replace("module.", ""))
        # With tied embeddings the last pipeline stage has a copy of the first's.
        renamed[name] = new.replace("output_layer.", "embedding.word_embeddings.") if tied else new
    return renamed


def _tp_rank(name: str) -> int:
    from megatron.core import parallel_state

    if "local_experts" in name:
        return int(parallel_state.get_expert_tensor_parallel_rank())
    return int(parallel_state.get_tensor_model_parallel_rank())
