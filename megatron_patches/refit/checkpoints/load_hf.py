"""Loads a Hugging Face checkpoint into a sharded Megatron model, each rank reading the slices that it holds.

Collective: every rank that holds a part of the model calls :func:`load_hf_checkpoint`. The boxes are those by which an
export describes the model, copied the other way, so every family that can be exported can be loaded.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles, open_checkpoint
from megatron_patches.refit.checkpoints.hf_match import check_config, check_tensors, check_vocabulary
from megatron_patches.refit.checkpoints.hf_slices import read_slices, verify_slices
from megatron_patches.refit.control.exchange import Exchange, default_exchange, on_first, together
from megatron_patches.refit.errors import LoadError
from megatron_patches.refit.layout.dtypes import FLOAT_DTYPES, itemsize
from megatron_patches.refit.layout.manifest import Manifest, Placement
from megatron_patches.refit.layout.weight_format import QUANTIZED
from megatron_patches.refit.models.shard import ParamShard
from megatron_patches.refit.models.traits import ModelTraits, check_ranks_agree
from megatron_patches.refit.planning.plan import PartOf, Plan, PlanOptions, make_part, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.source.describe import unwrapped_chunk
from megatron_patches.refit.source.live import Holdings, describe_rank

if TYPE_CHECKING:
    import torch

# Parameters with padding after the last token.
_TABLES = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
_READABLE = (*FLOAT_DTYPES, QUANTIZED)
_CONVERSIONS = frozenset((read, write) for read in _READABLE for write in FLOAT_DTYPES if read != write)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    Attributes:
        architecture: class in ``transformers`` of the checkpoint.
        tensors: number of tensors of the model.
        nbytes: bytes of those tensors in the checkpoint, without scales.
        bytes_by_rank: bytes that each rank read for its parameters, without scales.
        vocab_size: rows of the checkpoint's embedding.
        padding_rows: rows of the model's embedding after those; they are zero now.
        conversions: number of tensors that were converted, by their dtype in the checkpoint and in the model.
        seconds: duration.
    """

    architecture: str
    tensors: int
    nbytes: int
    bytes_by_rank: tuple[int, ...]
    vocab_size: int
    padding_rows: int
    conversions: Mapping[tuple[str, str], int]
    seconds: float

    def lines(self) -> Iterator[str]:
        """Messages to the user about the load."""
        yield (
            f"{self.architecture}, {self.tensors} tensors of {self.nbytes / 1e6:.1f} MB in {self.seconds:.1f} s, at "
            f"most {max(self.bytes_by_rank) / 1e6:.1f} MB on a rank; digests agree"
        )
        for (read, write), count in sorted(self.conversions.items()):
            how = "dequantized" if read == QUANTIZED else "converted"
            yield f"{count} tensors are {read} in the checkpoint and {write} in this run, and were {how}"
        if self.padding_rows:
            yield (
                f"the embedding has {self.padding_rows} more rows than the checkpoint's {self.vocab_size}; they are "
                "zero"
            )


def load_hf_checkpoint(
    model_chunks: Sequence[torch.nn.Module],
    path: Path,
    *,
    tokens: int,
    staging_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> LoadReport:
    """Loads the model's weights, on all ranks together. An optimizer's own copies of them are not touched.

    No weight is changed before configuration, names, shapes and coverage have been checked on every rank. Afterwards
    every rank reads its slices again, in another way, and compares digests with what its parameters hold.

    Args:
        model_chunks: this rank's part: one module per virtual pipeline stage, wrapped or not.
        path: the checkpoint's folder, on a file system that all ranks share.
        tokens: number of tokens of the run's tokenizer.
        staging_bytes: most bytes of weights that a rank holds at a time besides its parameters.
        progress: receives this rank's progress.

    Raises:
        RefitError: on every rank, if the checkpoint does not fit the model or any rank failed; with the reason.
    """
    started = time.perf_counter()
    exchange = default_exchange()
    files = on_first(exchange, lambda: open_checkpoint(path))
    rows = int(unwrapped_chunk(model_chunks[0]).vocab_size)  # type: ignore[arg-type]
    vocab_size = check_vocabulary(files.config, tokens, rows)
    job = _Job(exchange, files, vocab_size, staging_bytes, progress or Progress())
    held = job.describe(model_chunks)
    plan = job.plan(held)
    read = job.read(plan, held)
    job.verify(model_chunks)
    return LoadReport(
        architecture=held.family.architecture,
        tensors=len(held.family.shapes()),
        nbytes=sum(files.tensors[name].spec.nbytes for name in held.family.shapes()),
        bytes_by_rank=tuple(read),
        vocab_size=vocab_size,
        padding_rows=rows - vocab_size,
        conversions=job.conversions(plan),
        seconds=time.perf_counter() - started,
    )


class _Job:
    """One load, phase by phase. Every phase succeeds on all ranks or raises on all."""

    def __init__(
        self, exchange: Exchange, files: HuggingFaceFiles, vocab_size: int, staging_bytes: int, progress: Progress
    ) -> None:
        self._exchange = exchange
        self._files = files
        self._vocab_size = vocab_size
        self._staging_bytes = staging_bytes
        self._progress = progress
        self._repeated: Mapping[str, str] = {}

    def describe(self, chunks: Sequence[torch.nn.Module]) -> Holdings:
        """What this rank holds, after comparing the model with the checkpoint and showing that each tensor is used."""
        found: list[Holdings] = []

        def describe() -> tuple[str, ModelTraits, Manifest]:
            found.append(self._describe(chunks))
            return found[0].family.architecture, found[0].family.traits, found[0].manifest

        parts = self._together(describe)
        check_ranks_agree([(architecture, traits) for architecture, traits, _ in parts], LoadError)
        held = found[0]
        check_config(self._files.config, held.family)
        self._repeated = check_tensors(self._files, held.family)
        on_first(self._exchange, lambda: self._check_used(held, [manifest for _, _, manifest in parts]))
        return held

    def plan(self, held: Holdings) -> Plan:
        """What this rank reads, with the proof that each element of its parameters is written exactly once."""
        found: list[Plan] = []
        self._together(lambda: found.append(self._plan(held)))
        return found[0]

    def read(self, plan: Plan, held: Holdings) -> list[int]:
        """Reads this rank's slices into its parameters. Returns the bytes that each rank has read."""
        self._progress.phase("read", plan.nbytes)

        def read() -> int:
            self._clear_padding(held)
            return read_slices(plan.transfers, self._files, held.memory, self._staging_bytes, self._progress.advance)

        return self._together(read)

    def verify(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Describes the model again, and compares what it holds with the files; also tensors that repeat others."""

        def verify() -> None:
            held = self._describe(chunks)
            placements = [*held.manifest.placements]
            for name, other in self._repeated.items():
                placements += [
                    replace(item, box=replace(item.box, tensor=name))
                    for item in held.manifest.placements
                    if item.box.tensor == other
                ]
            widths = {name: itemsize(stored.spec.dtype) for name, stored in self._files.tensors.items()}
            self._progress.phase("verify", sum(item.box.volume * widths[item.box.tensor] for item in placements))
            verify_slices(placements, self._files, held.memory, self._staging_bytes, self._progress.advance)

        self._together(verify)

    def conversions(self, plan: Plan) -> Mapping[tuple[str, str], int]:
        """Number of tensors that any rank has converted, by pair of dtypes."""
        mine = {
            (item.box.tensor, item.source_dtype, item.dtype)
            for item in plan.transfers
            if item.source_dtype != item.dtype
        }
        found: dict[tuple[str, str], int] = defaultdict(int)
        for _, read, write in set[tuple[str, str, str]]().union(*self._exchange.gather(mine)):
            found[read, write] += 1
        return dict(found)

    def _describe(self, chunks: Sequence[torch.nn.Module]) -> Holdings:
        return describe_rank(chunks, self._vocab_size, self._exchange.rank, None)

    def _check_used(self, held: Holdings, manifests: Sequence[Manifest]) -> None:
        """Shows that some rank holds each element of the checkpoint; raises CoverageError with one that none holds."""
        names = held.family.shapes()
        make_plan([self._files.tensors[name].spec for name in names], manifests, [self._files.manifest(names)])

    def _plan(self, held: Holdings) -> Plan:
        specs = [self._files.tensors[name].spec for name in held.family.shapes()]
        for spec in specs:
            if spec.dtype not in _READABLE:
                raise LoadError(
                    f"{spec.name} is {spec.dtype}; only {', '.join(FLOAT_DTYPES)} and block FP8 can be loaded"
                )
        wanted = _without_copies(held.manifest)
        _check_complete(held.shards, wanted, self._vocab_size)
        source, options = self._files.manifest(held.family.shapes()), PlanOptions(conversions=_CONVERSIONS)
        plan = make_part(specs, [source], [wanted], PartOf("destination", wanted.rank), options)
        prove(plan, [source], [wanted], options)
        return plan

    def _clear_padding(self, held: Holdings) -> None:
        """Sets the rows of embedding and output layer that belong to no token to zero."""
        for shard in held.shards:
            if shard.name in _TABLES:
                held.memory[shard.storage][_elements(shard, self._vocab_size) :].zero_()

    def _together[T](self, work: Callable[[], T]) -> list[T]:
        return together(self._exchange, f"loading {self._files.directory}", work, LoadError)


def _without_copies(manifest: Manifest) -> Manifest:
    """The manifest with one box for each place: where tensors are copies of each other, the first one."""
    first: dict[tuple[str, int], Placement] = {}
    for placement in manifest.placements:
        first.setdefault((placement.view.storage, placement.view.offset), placement)
    return replace(manifest, placements=tuple(first.values()))


def _elements(shard: ParamShard, vocab_size: int) -> int:
    """Elements of a shard, without the padding of a vocabulary."""
    low, high = shard.rows
    if shard.name in _TABLES:
        high = min(high, max(low, vocab_size - shard.tp_rank * shard.shape[0]))
    return (high - low) * shard.row_numel


def _check_complete(shards: Sequence[ParamShard], wanted: Manifest, vocab_size: int) -> None:
    """Shows that the boxes of every parameter have as many elements as it has. The proof shows that none overlap.

    Raises:
        LoadError: with the first parameter that would keep elements of its initial value.
    """
    covered: dict[str, int] = defaultdict(int)
    for placement in wanted.placements:
        covered[placement.view.storage] += placement.box.volume
    for shard in shards:
        needed = _elements(shard, vocab_size)
        if covered[shard.storage] != needed:
            raise LoadError(
                f"the checkpoint has {covered[shard.storage]} of the {needed} elements of {shard.name} on rank "
                f"{wanted.rank}; the family's mapping is not complete"
            )
