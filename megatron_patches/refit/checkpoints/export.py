"""Exports a sharded Megatron model to a Hugging Face checkpoint, each rank writing its own boxes.

Collective: every rank that holds a part of the model calls :func:`export_checkpoint`. Ranks exchange only manifests and
outcomes, which are small. The weights go from each rank's memory straight to the files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_patches.refit.checkpoints.checkpoint_dir import CheckpointDirectory
from megatron_patches.refit.checkpoints.file import share_of, verify_tensors, write_boxes
from megatron_patches.refit.checkpoints.safetensors_layout import CheckpointLayout, layout_checkpoint
from megatron_patches.refit.control.exchange import Exchange, default_exchange, together
from megatron_patches.refit.errors import ExportError, PlanMismatchError, UnsupportedModelError
from megatron_patches.refit.layout.digest import combine
from megatron_patches.refit.layout.dtypes import FLOAT_DTYPES
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.layout.weight_format import QUANTIZED, WeightFormat, quantization_config, with_scales
from megatron_patches.refit.models.family import ModelFamily, build_config
from megatron_patches.refit.models.params import ROUTER_BIAS
from megatron_patches.refit.models.traits import ModelTraits, check_ranks_agree
from megatron_patches.refit.planning.plan import Plan, PlanOptions, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.progress import Phases, Progress
from megatron_patches.refit.source.live import describe_rank, finish_parameter_gather

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megatron_patches.refit.source.block_quantizer import BlockQuantizer


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export.

    Attributes:
        max_shard_bytes: most bytes of weights in one file; a larger tensor gets its own file.
        overwrite: whether to replace an earlier export at the path; it stays until the new one is complete.
        dtype: dtype of the checkpoint, except of biases of routers; None keeps that of the weights.
        weight_format: format of the weights. A quantized one takes no ``dtype``.
        staging_bytes: most bytes that a rank copies at a time.
        bos_token_id: token that begins a text, for the configuration.
        eos_token_id: token that ends a text, for the configuration.
    """

    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    dtype: str | None = None
    weight_format: WeightFormat = WeightFormat.TRAINED
    staging_bytes: int = 256 << 20
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"cannot export as {self.dtype!r}; choose one of {', '.join(FLOAT_DTYPES)}")
        object.__setattr__(self, "weight_format", WeightFormat(self.weight_format))
        if self.dtype is not None and self.weight_format.is_quantized:
            raise ValueError(
                f"dtype is {self.dtype} and weight_format is {self.weight_format}, whose weights and scales have types "
                "of their own; give one of the two"
            )
        for name, least in (("max_shard_bytes", 1), ("staging_bytes", 8)):  # 8: an element of the widest dtype
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name, token in self.tokens.items():
            if token is not None and token < 0:
                raise ValueError(f"{name} is {token}; tokens are numbered from 0")

    @property
    def tokens(self) -> Mapping[str, int | None]:
        """The tokens for the configuration, by name."""
        return {"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id}

    def check_tokens(self, vocab_size: int) -> None:
        """Refuses tokens that the model does not have.

        Raises:
            ExportError: with the token.
        """
        for name, token in self.tokens.items():
            if token is not None and token >= vocab_size:
                raise ExportError(f"{name} is {token}; the model has {vocab_size} tokens, numbered from 0")


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did.

    Attributes:
        path: the checkpoint.
        architecture: class in ``transformers`` that loads it.
        files: number of files with weights.
        tensors: number of tensors.
        nbytes: bytes of weights, all files together.
        bytes_by_rank: bytes that each rank wrote.
        plan_digest: sha256 of the plan that all ranks followed.
        seconds: duration of each phase on this rank.
    """

    path: str
    architecture: str
    files: int
    tensors: int
    nbytes: int
    bytes_by_rank: Mapping[int, int]
    plan_digest: str
    seconds: Mapping[str, float]


def export_checkpoint(
    model_chunks: Sequence[torch.nn.Module],
    path: str | os.PathLike[str],
    *,
    vocab_size: int,
    options: ExportOptions = ExportOptions(),
    group: ProcessGroup | None = None,
    tp_group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Writes the model as a Hugging Face checkpoint, on all ranks together.

    May be called between training steps. The weights are only read. Nothing appears at ``path`` before everything has
    been written, synced and read back. If any rank fails, every rank raises with the reason, and ``path`` is unchanged.

    Args:
        model_chunks: this rank's part: one GPTModel per virtual pipeline stage, wrapped (DDP, Float16Module) or not.
        path: directory for the checkpoint, on a file system that all ranks share.
        vocab_size: number of tokens; embedding rows beyond it are padding and are left out.
        options: sizes, dtype, overwriting.
        group: ranks that hold the model, replicas included; None for all processes.
        tp_group: tensor-parallel group; None for Megatron's own.
        progress: receives this rank's progress.

    Returns:
        What was written; the same on every rank except for the seconds.

    Raises:
        ExportError: on every rank, if any rank failed; names ranks and reasons.
    """
    options.check_tokens(vocab_size)
    exchange = default_exchange(group)
    what = f"export to {os.fspath(path)}"
    token = exchange.gather(secrets.token_hex(4))[0]
    directory = CheckpointDirectory(path, token, options.overwrite)
    first = exchange.rank == 0
    try:
        together(exchange, what, lambda: directory.create() if first else None)
        job = _Job(exchange, what, directory, options, progress or Progress())
        return job.run(model_chunks, vocab_size, tp_group)
    except BaseException:
        # However the export ends, even by an interrupt, it must leave nothing behind that others have to interpret.
        if first:
            directory.discard()
        raise


class _Job:
    """One export, phase by phase. Every phase succeeds on all ranks or raises on all."""

    def __init__(
        self,
        exchange: Exchange,
        what: str,
        directory: CheckpointDirectory,
        options: ExportOptions,
        progress: Progress,
    ) -> None:
        self._exchange = exchange
        self._what = what
        self._directory = directory
        self._options = options
        self._progress = progress
        self._memory: Mapping[str, torch.Tensor] = {}  # this rank's storages by name, filled by _describe
        self._quantizer: BlockQuantizer | None = None  # this rank's, if the format is quantized
        self._phases = Phases(progress)

    def run(self, chunks: Sequence[torch.nn.Module], vocab_size: int, tp_group: ProcessGroup | None) -> ExportReport:
        """Plans, writes, verifies and commits."""
        with self._phases.phase("plan"):
            finish_parameter_gather(chunks)
            families: list[ModelFamily] = []  # this rank's
            held: list[tuple[str, ModelTraits, Manifest]] = self._together(
                partial(self._describe, chunks, vocab_size, tp_group, families.append)
            )
            check_ranks_agree([(architecture, traits) for architecture, traits, _ in held], ExportError)
            (family,) = families
            plan, layout = self._plan(family, [manifest for _, _, manifest in held])
            self._on_first(lambda: self._directory.allocate(layout))
            self._quantize()
        digests = self._write(plan, layout)
        self._verify(plan, layout, digests)
        with self._phases.phase("commit"):
            config = self._config(family, plan)
            self._on_first(lambda: self._directory.commit(layout, config, self._generation_config()))
        return ExportReport(
            path=str(self._directory.target),
            architecture=family.architecture,
            files=len(layout.files),
            tensors=len(plan.tensors),
            nbytes=plan.nbytes,
            bytes_by_rank=plan.bytes_by_source(),
            plan_digest=plan.digest,
            seconds=self._phases.seconds,
        )

    def _describe(
        self,
        chunks: Sequence[torch.nn.Module],
        vocab_size: int,
        tp_group: ProcessGroup | None,
        keep: Callable[[ModelFamily], None],
    ) -> tuple[str, ModelTraits, Manifest]:
        """Describes what this rank holds. Keeps memory and family; returns what other ranks need."""
        held = describe_rank(chunks, vocab_size, self._exchange.rank, tp_group)
        if clauses := list(held.family.file_refusals()):
            raise UnsupportedModelError("cannot export this model: " + "; ".join(clauses))
        self._memory = held.memory
        keep(held.family)
        manifest = held.manifest
        if self._options.weight_format.is_quantized:
            from megatron_patches.refit.source.block_quantizer import BlockQuantizer

            self._quantizer = BlockQuantizer(
                held.family.shapes(),
                manifest,
                power_of_two=self._options.weight_format.has_powers_of_two,
                device=next(iter(held.memory.values())).device,
                exchange=self._exchange,
            )
            manifest = self._quantizer.manifest
        return held.family.architecture, held.family.traits, manifest

    def _plan(self, family: ModelFamily, sources: Sequence[Manifest]) -> tuple[Plan, CheckpointLayout]:
        """The plan and the files, proved and equal on all ranks. Every rank computes both independently."""

        def compute() -> tuple[Plan, CheckpointLayout]:
            quantized = self._options.weight_format.is_quantized
            tensors = agree_on_tensors(with_scales(family.shapes()) if quantized else family.shapes(), sources)
            rules = frozenset[tuple[str, str]]()
            if self._options.dtype is not None:
                target = self._options.dtype
                cast = {spec for spec in tensors if spec.dtype in FLOAT_DTYPES and not spec.name.endswith(ROUTER_BIAS)}
                rules = frozenset((spec.dtype, target) for spec in cast)
                tensors = [replace(spec, dtype=target) if spec in cast else spec for spec in tensors]
            layout = layout_checkpoint(tensors, self._options.max_shard_bytes)
            options = PlanOptions(conversions=rules)
            plan = make_plan(tensors, sources, [layout.manifest()], options)
            prove(plan, sources, [layout.manifest()], options)
            return plan, layout

        found: list[tuple[Plan, CheckpointLayout]] = []

        def digest() -> str:
            found.append(compute())
            return found[0][0].digest

        digests = self._together(digest)
        differing = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if differing:
            raise PlanMismatchError(
                f"{self._what}: ranks {differing[:8]} computed another plan than rank 0; do all run the same version "
                "of this package with the same options?"
            )
        return found[0]

    def _quantize(self) -> None:
        """Replaces weights in memory by quantized copies, if the format is quantized."""
        quantizer, memory = self._quantizer, self._memory
        if quantizer is None:
            return
        self._together(lambda: quantizer.measure(memory))
        quantizer.agree()

        def cast() -> None:
            quantizer.cast(memory)
            quantizer.check()

        self._together(cast)
        self._memory = {**memory, **quantizer.quantized}

    def _config(self, family: ModelFamily, plan: Plan) -> Mapping[str, object]:
        """Content of ``config.json``."""
        kept = [spec for spec in plan.tensors if spec.dtype != QUANTIZED]
        widest = max(kept, key=lambda spec: spec.nbytes).dtype
        config = build_config(family, widest, self._options.bos_token_id, self._options.eos_token_id)
        if not self._options.weight_format.is_quantized:
            return config
        return {**config, "quantization_config": quantization_config(family.shapes())}

    def _write(self, plan: Plan, layout: CheckpointLayout) -> Mapping[str, int]:
        """Writes this rank's boxes. Returns the digest of every tensor, combined from all ranks' shares."""
        rank = self._exchange.rank
        with self._phases.phase("write", plan.bytes_by_source().get(rank, 0)):
            partial, staging = self._directory.partial, self._options.staging_bytes
            shares = self._together(
                lambda: write_boxes(plan, rank, self._memory, layout, partial, staging, self._progress.advance)
            )
        return {spec.name: combine(share.get(spec.name, 0) for share in shares) for spec in plan.tensors}

    def _verify(self, plan: Plan, layout: CheckpointLayout, digests: Mapping[str, int]) -> None:
        """Reads back a share of the tensors, regardless of which ranks wrote them."""
        mine = share_of(plan.tensors, self._exchange.rank, self._exchange.size)
        partial, chunk = self._directory.partial, self._options.staging_bytes
        with self._phases.phase("verify", sum(spec.nbytes for spec in mine)):
            self._together(lambda: verify_tensors(mine, digests, layout, partial, chunk, self._progress.advance))

    def _generation_config(self) -> Mapping[str, object]:
        known = {name: value for name, value in self._options.tokens.items() if value is not None}
        return {"_from_model_config": True, **known} if known else {}

    def _together[T](self, work: Callable[[], T]) -> list[T]:
        return together(self._exchange, self._what, work)

    def _on_first(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on rank 0 only; a failure is raised on all ranks."""
        self._together(work if self._exchange.rank == 0 else lambda: None)
