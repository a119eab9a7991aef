"""Parallel sizes for exporting or pushing a checkpoint's model, and whether they are possible, by Megatron's flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patches.refit.errors import ExportError
from megatron_patches.refit.models.mesh import TrainerMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Sizes of the parallel axes. The rest of the world holds replicas.

    Attributes:
        tensor: tensor-parallel size.
        pipeline: number of pipeline stages.
        chunks: model chunks per stage (virtual pipeline stages).
        etp: extended-tensor-parallel size.
        expert: expert-parallel size.
        expert_tensor: tensor-parallel size of experts; None for that of the other layers, as in Megatron.
        expert_etp: extended-tensor-parallel size of experts.
        first: layers on the first pipeline stage; None for as many as on the others.
        last: layers on the last pipeline stage; None for as many as on the others.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    etp: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    expert_etp: int = 1
    first: int | None = None
    last: int | None = None

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser, while_doing: str) -> None:
        """Adds the flags, with the same names as in training.

        Args:
            parser: parser of the command.
            while_doing: verb for the help, such as "exporting".
        """
        for name, (flag, meaning) in _AXES.items():
            default = cls.__dataclass_fields__[name].default
            parser.add_argument(
                flag, dest=name, type=int, metavar="N", default=default, help=f"{meaning} while {while_doing}"
            )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> ParallelSizes:
        """The sizes from the flags of :meth:`add_options`."""
        return cls(**{name: getattr(options, name) for name in SIZE_FLAGS})

    @property
    def experts_tensor(self) -> int:
        """Tensor-parallel size of experts as a number."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def check(self, world_size: int) -> None:
        """Checks that ``world_size`` processes can be divided this way.

        Raises:
            ExportError: if they cannot.
        """
        for name, flag in SIZE_FLAGS.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ExportError(f"{flag} is {value}; it must be at least 1")
        for name in ("chunks", "first", "last"):
            value, plain = getattr(self, name), getattr(ParallelSizes(), name)
            if self.pipeline == 1 and value != plain:
                raise ExportError(
                    f"{SIZE_FLAGS[name]} is {value}, but there is one pipeline stage; set {SIZE_FLAGS['pipeline']}, or "
                    "drop it"
                )
        product = self.tensor * self.pipeline * self.etp
        if world_size % product:
            raise ExportError(
                f"{world_size} processes cannot be divided by tensor {self.tensor} x pipeline {self.pipeline} x ETP "
                f"{self.etp} = {product}; start a multiple of that with torchrun, or change the sizes"
            )
        product = self.experts_tensor * self.expert * self.expert_etp * self.pipeline
        if world_size % product:
            raise ExportError(
                f"{world_size} processes cannot be divided by expert tensor {self.experts_tensor} x expert "
                f"{self.expert} x expert ETP {self.expert_etp} x pipeline {self.pipeline} = {product}; start a "
                "multiple of that with torchrun, or change the sizes"
            )

    def check_model(self, args: argparse.Namespace) -> None:
        """Checks that the model of a checkpoint can be divided this way.

        Args:
            args: arguments saved in the checkpoint.

        Raises:
            ExportError: with every setting that does not divide, both numbers and the remedy.
        """
        found = [*self._expert_clauses(args), *self._division_clauses(args), *self._tie_clauses(args)]
        try:
            self.chunk_layers(number_of_layers(args))
        except ValueError as error:
            found.append(
                f"{error}; change {SIZE_FLAGS['pipeline']} or {SIZE_FLAGS['chunks']}, or set {SIZE_FLAGS['first']} and "
                f"{SIZE_FLAGS['last']}"
            )
        if found:
            raise ExportError("cannot spread this model: " + "; ".join(found))

    def chunk_layers(self, num_layers: int) -> list[int]:
        """Layers of each model chunk, in layer order: the first chunk of every stage, then the second, and so on.

        Raises:
            ValueError: if the layers cannot be divided this way.
        """
        mesh = TrainerMesh(pp=self.pipeline, first=self.first or 0, last=self.last or 0)
        stages = mesh.stage_layers(num_layers)
        if not all(stages):
            raise ValueError(f"stages of {stages} layers leave one without")
        if any(layers % self.chunks for layers in stages):
            raise ValueError(f"stages of {stages} layers cannot be cut into {self.chunks} chunks each")
        return [layers // self.chunks for layers in stages] * self.chunks

    def _expert_clauses(self, args: argparse.Namespace) -> Iterator[str]:
        experts = getattr(args, "num_experts", None)
        if experts is None:
            for name in ("expert", "expert_tensor", "expert_etp"):
                value = getattr(self, name)
                if value not in {None, 1} and (name != "expert_tensor" or value != self.tensor):
                    yield f"{SIZE_FLAGS[name]} is {value}, but it has no experts (--num-experts); drop it"
        elif experts % self.expert:
            yield self._undivided("--num-experts", experts, "expert", self.expert)

    def _division_clauses(self, args: argparse.Namespace) -> Iterator[str]:
        """Checks the dimensions that Megatron divides equally over tensor-parallel ranks."""
        cut = [("--num-attention-heads", "num_attention_heads"), ("--ffn-hidden-size", "ffn_hidden_size")]
        if getattr(args, "num_experts", None) is not None:
            cut.append(("--moe-shared-expert-intermediate-size", "moe_shared_expert_intermediate_size"))
            width = getattr(args, "moe_ffn_hidden_size", None) or 0
            if width % self.experts_tensor:
                name = "tensor" if self.expert_tensor is None else "expert_tensor"
                yield self._undivided("--moe-ffn-hidden-size", width, name, self.experts_tensor)
        if "M" in (getattr(args, "hybrid_layer_pattern", None) or ""):
            cut += [("--mamba-num-heads", "mamba_num_heads"), ("--mamba-num-groups", "mamba_num_groups")]
        for flag, name in cut:
            if (value := getattr(args, name, None) or 0) % self.tensor:
                yield self._undivided(flag, value, "tensor", self.tensor)
        groups = (getattr(args, "num_query_groups", None) or 0) if getattr(args, "group_query_attention", False) else 0
        if groups and groups % self.tensor and self.tensor % groups:
            yield self._undivided("--num-query-groups", groups, "tensor", self.tensor)

    def _tie_clauses(self, args: argparse.Namespace) -> Iterator[str]:
        """The table is the embedding's then, and Megatron's state dict has the last stage's output layer besides."""
        mtp = getattr(args, "mtp_num_layers", None) or "/" in (getattr(args, "hybrid_layer_pattern", None) or "")
        if mtp and self.pipeline > 1 and not getattr(args, "untie_embeddings_and_output_weights", True):
            yield (
                f"{SIZE_FLAGS['pipeline']} is {self.pipeline}, and Megatron neither saves nor loads tied embeddings "
                "beside multi-token prediction layers on several stages; drop it"
            )

    @staticmethod
    def _undivided(flag: str, value: int, axis: str, size: int) -> str:
        return f"{flag} {value} is not divisible by {SIZE_FLAGS[axis]} {size}; choose another size"


_AXES = {
    "tensor": ("--tensor-model-parallel-size", "tensor-parallel size"),
    "pipeline": ("--pipeline-model-parallel-size", "pipeline stages"),
    "chunks": ("--num-virtual-stages-per-pipeline-rank", "model chunks on each pipeline stage"),
    "etp": ("--etp-size", "extended-tensor-parallel size (not expert tensor parallelism)"),
    "expert": ("--expert-model-parallel-size", "expert-parallel size"),
    "expert_tensor": (
        "--expert-tensor-parallel-size",
        "tensor-parallel size of experts, by default that of the other layers,",
    ),
    "expert_etp": ("--expert-etp-size", "extended-tensor-parallel size of experts"),
    "first": (
        "--decoder-first-pipeline-num-layers",
        "layers on the first pipeline stage, by default as many as on the others,",
    ),
    "last": (
        "--decoder-last-pipeline-num-layers",
        "layers on the last pipeline stage, by default as many as on the others,",
    ),
}
"""The flag of each field of :class:`ParallelSizes`, and its meaning."""

SIZE_FLAGS = {name: flag for name, (flag, _) in _AXES.items()}
"""The flag of each field of :class:`ParallelSizes`."""


def number_of_layers(args: argparse.Namespace) -> int:
    """Number of layers of a saved model, without multi-token prediction."""
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        return int(args.num_layers)
    return len(main_pattern(pattern))


def main_pattern(pattern: str) -> str:
    """A hybrid model's layers as letters, without pipeline separators and multi-token prediction."""
    return pattern.partition("/")[0].replace("|", "")
